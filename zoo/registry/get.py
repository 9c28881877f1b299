"""`zoo.get`: builds the network that a name stands for, with its weights."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from zoo.config.architectures import is_hub_name
from zoo.config.network import ExternalSpec, Spec
from zoo.convert._transfer import load_transferred, transferred
from zoo.layers.norm import NormFactory
from zoo.models import Network, build, build_network
from zoo.models.external import build_external
from zoo.registry.arguments import BuildOptions, split_arguments
from zoo.registry.open import Opened, open_network
from zoo.registry.preprocessing import describe_images
from zoo.weights import LoadReport, StoredWeights, load_state_dict, load_stored, read_weights


def get(
    name: str | os.PathLike[str],
    *,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    norm: str | NormFactory | None = None,
    activation: str | None = None,
    num_classes: int | None = None,
    features_only: bool = False,
    **options: Any,
) -> Network:
    """Return a network with weights, or initialized as the published networks were.

    The spec of the weights file comes first, then the name, then the arguments. A contradiction with the file is an
    error, except in settings that do not change weights. Weights of another norm are converted if the conversion is
    exact. Weights trained with another activation are used unchanged. Both are logged.

    Args:
    - `name`: an architecture, a published variant (which fixes norm, activation and stem), the path of a weights file
      that describes its network, "hf-hub:OWNER/NAME" or "hf-hub:OWNER/NAME@REVISION" for a repository on the Hugging
      Face Hub, or "timm:NAME" or "torchvision:NAME".
    - `pretrained`: load the published weights of the variant, or of the only variant of an architecture.
    - `weights`: path of a weights file, a published name, or "hf-hub:OWNER/NAME"; loaded strictly.
    - `norm`: "standard" (default), "inplace", "sync", or a function ``channels -> module`` with norm and activation.
    - `activation`: "leaky_relu" (default), "elu", "identity", or with standard norms "relu".
    - `num_classes`: default 1000 (CIFAR: 10, segmentation: 19); with 0 forward returns features instead of logits.
    - `features_only`: forward returns the list of the stages' outputs, see ``model.feature_info``.
    - `**options`: options of the architecture (``zoo show NAME``) or of the other package's builder; other fields of
      `NetworkSpec` and `BuildOptions`; ``output_stride`` (8, 16 or 32), which sets ``dilation``; ``body_weights``, the
      path or published name of weights for the body of a segmentation network.

    Raises TypeError for an unknown argument, ConfigError for an invalid value, and WeightsError for weights that are
    unavailable or do not fit.
    """
    name, body_weights = os.fspath(name), options.pop("body_weights", None)
    if is_hub_name(name):
        pretrained = False  # weights of a repository are always loaded
    arguments = {"norm": norm, "activation": activation, "num_classes": num_classes, **options}
    how, changes = split_arguments(name, {"pretrained": pretrained, "features_only": features_only, **arguments})
    if callable(norm):
        changes["norm"] = build.norm_kind(norm)

    opened = open_network(name, changes, pretrained=how.pretrained, weights=weights, body_weights=body_weights)
    model = _build(opened, how, norm if callable(norm) else None)
    if opened.weights is not None:
        _load(model, opened.weights, is_body=body_weights is not None)
    return model


create_model = get  # the name that timm uses


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load a weights file, or the published weights of that name, into ``model``; return a report.

    Loading is strict, see `zoo.weights.load_stored`. If file and model both have a spec, the weights are converted to
    the norms of the model if the conversion is exact, and used with the model's activation; both are logged. Raises
    WeightsError, and leaves the model unchanged, if the file is missing, damaged or unsafe, or does not fit.
    """
    return load_transferred(model, read_weights(path))


def build_from_config(network: Spec) -> nn.Module:
    """Return the initialized network of an experiment's ``network`` section.

    An external network has its package's initial weights, or pretrained ones if the options say so. Raises ConfigError
    as `zoo.models.build.build_model` does.
    """
    model: Any = build.build_model(network)
    if not isinstance(network, ExternalSpec):
        build.initialize(model, network)
    model.built_as = network.without_pretrained()
    return model


def _build(opened: Opened, how: BuildOptions, norm: NormFactory | None) -> Any:
    """Return the initialized network. ``norm`` builds its norms; by default the spec determines them."""
    model: Any
    spec = opened.spec
    if not isinstance(spec, ExternalSpec):
        model = _build_own(spec, how, norm)
    else:
        model = build_external(spec.arch, **spec.builder_arguments(), **how.model_dump(exclude_defaults=True))
    model.built_as = None if norm is not None else spec
    if images := describe_images(opened.network, getattr(model, "in_chans", 3)):
        names = opened.network.class_names
        images |= {} if names is None else {"label_names": names}
        model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **images, "source": opened.source}
    return model


def _build_own(spec: Spec, how: BuildOptions, norm: NormFactory | None) -> Network:
    model = build_network(spec, norm, features_only=how.features_only)
    if how.in_chans != 3:
        model.set_input_channels(how.in_chans)
    if how.global_pool is not None:
        model.reset_classifier(spec.num_classes, how.global_pool)
    if how.drop_rate:
        model.set_drop_rate(how.drop_rate)
    if how.features_only and model.last_norm is not None:
        # Layers that do not run are loaded and saved, but not trained: DDP would wait for their gradients.
        model.last_norm.requires_grad_(False)
    build.initialize(model, spec)
    if how.out_indices is not None:
        model.select_features(how.out_indices)
    return model


def _load(model: Any, stored: StoredWeights, is_body: bool) -> None:
    """Load the content of a file into a network or into its body; raises WeightsError if it does not fit."""
    if model.built_as is not None:
        stored.warn_of_assumptions(model.built_as)
        stored = transferred(stored, model.built_as)
    if isinstance(model, Network) and not is_body:  # body weights must be requested by `body_weights`
        load_state_dict(model, stored.state_dict, source=stored.source)
    else:
        load_stored(model, stored, "the arguments")
