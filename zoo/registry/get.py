"""`zoo.get`: builds the network that a name stands for, with its weights."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from zoo.config.architectures import ARCHITECTURES, is_hub_name
from zoo.config.limits import MAX_CHANNELS
from zoo.config.network import MISSING_BECAUSE, ExternalSpec, NetworkSpec, Spec, choose_dilation, merge, parse_spec
from zoo.config.published import published
from zoo.config.record import NetworkRecord
from zoo.config.section import Section, parse_section
from zoo.convert.transfer import load_transferred, transferred
from zoo.errors import ConfigError, escape, join_names
from zoo.layers.norm import NormFactory
from zoo.models import Network, build, build_network
from zoo.models.external import build_external
from zoo.registry.names import Resolved, only_variant, resolve, with_preprocessing
from zoo.registry.preprocessing import describe_images
from zoo.weights import LoadReport, StoredWeights, load_state_dict, load_stored, read_weights
from zoo.weights.description import check_same_network, settings_with_body

# The fields of a spec that are arguments of `get`.
SPEC_ARGUMENTS = [key for key in NetworkSpec.model_fields if key not in ("arch", "options")]


class BuildOptions(Section):
    """The arguments of `get` that are not part of the spec."""

    pretrained: bool = False
    """Load the published weights."""
    features_only: bool = False
    """Omit the classifier; forward returns the list of the stages' outputs."""
    out_indices: Annotated[Sequence[int | str], Field(min_length=1, max_length=100)] | None = None
    """Stages that forward returns, finest first; later ones do not run. "stem" is the input of the stem's pool."""
    in_chans: Annotated[int, Field(ge=1, le=MAX_CHANNELS)] = 3
    """Number of image channels; `zoo.weights.load.fit_input` adapts weights."""
    drop_rate: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    """Dropout rate before the classifier."""
    global_pool: str | None = None
    """Pooling before the classifier, see `zoo.models.base.Network.reset_classifier`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if stages are selected without ``features_only``."""
        if self.out_indices is not None and not self.features_only:
            yield "out_indices", "chooses among features; give features_only=True too"


@dataclass(frozen=True)
class _Request:
    """The arguments of `get`: how the network is built, changes of its spec, and a function that makes its norms."""

    how: BuildOptions
    changes: Mapping[str, Any]
    norm: NormFactory | None


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
    """Return a network, initialized as the published ones were, or with weights.

    Its spec comes from the weights file, changed by the name, changed by the arguments. It is an error if these
    contradict the file, except in settings that change no weights. Weights of another form of the norms are converted
    if that is exact. Weights trained with another activation are used unchanged. The log says so.

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
        pretrained = False  # a repository's weights are loaded in any case
    found = resolve(name)
    if [bool(pretrained), found.stored is not None or weights is not None, body_weights is not None].count(True) > 1:
        remedy = "give one of pretrained, weights, body_weights and a weights file"
        raise ConfigError("there are two sources of weights", name, remedy)
    if pretrained is True and not isinstance(found.network, ExternalSpec):
        found = resolve(only_variant(found.name))
    arguments = {"norm": norm, "activation": activation, "num_classes": num_classes, **options}
    request = _parse_request(found.network.arch, pretrained=pretrained, features_only=features_only, **arguments)
    record, stored = _resolve_weights(found, request, weights, body_weights)
    model = _build(record.spec, request)
    _set_pretrained_cfg(model, record, found.name, stored)
    if stored is not None:
        _load(model, stored, is_body=body_weights is not None)
    return model


create_model = get  # its name in timm


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load a weights file, or the published weights of that name, into ``model``; return a report.

    Loading is strict, see `zoo.weights.load_stored`. If file and model both have a spec, the weights are converted to
    the norms of the model if that is exact, and used with its activation; the log says so. Raises WeightsError if the
    file is missing, damaged or unsafe, or does not fit; the model is then unchanged.
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


def _parse_request(arch: str, **arguments: Any) -> _Request:
    """Return the arguments of `get`; those that are None are left out.

    Raises TypeError for names that neither `get` nor the architecture knows, and
    ConfigError for arguments that exclude each other.
    """
    facts = ARCHITECTURES.get(arch)  # None for an external network, whose package checks its options
    if facts is not None:
        options = [*facts.options.model_fields, "memory"]
        known = [*SPEC_ARGUMENTS, *BuildOptions.model_fields, "output_stride", *options]
        if unknown := [argument for argument in arguments if argument not in known]:
            near = difflib.get_close_matches(unknown[0], [*known, "weights", "body_weights"], 1)
            raise TypeError(
                f"get() got an unexpected keyword argument {unknown[0]!r} for {arch}, whose options are "
                f"{join_names(options)}{MISSING_BECAUSE.get(unknown[0], '')}"
                + "".join(f"; the nearest argument is {name!r}" for name in near)
            )
    changes = {key: value for key, value in arguments.items() if value is not None}
    how = {key: changes.pop(key) for key in BuildOptions.model_fields if key in changes}
    factory = changes.pop("norm") if callable(changes.get("norm")) else None
    if factory is not None and not changes.keys().isdisjoint({"activation", "activation_param"}):
        raise ConfigError(f"{arch}: a norm function includes the activation", "activation", "omit the argument")
    if facts is not None and how.get("features_only") and changes.get("num_classes"):
        raise ConfigError(f"{arch}: features_only=True builds no classifier", "num_classes", "omit the argument")
    if facts is not None and "output_stride" not in facts.options.model_fields:
        dilation = choose_dilation(facts, changes.pop("output_stride", None), changes.get("dilation"))
        changes |= {} if dilation is None else {"dilation": dilation}
    return _Request(parse_section(BuildOptions, how, arch), changes, factory)


def _resolve_weights(
    found: Resolved,
    request: _Request,
    weights: str | os.PathLike[str] | None,
    body_weights: str | os.PathLike[str] | None,
) -> tuple[NetworkRecord, StoredWeights | None]:
    """Return the record of the network that is asked for, and its weights for it; None for initial weights.

    Raises WeightsError if the arguments contradict the weights.
    """
    record, stored, settings = found.described, found.stored, merge(found.network.given(), request.changes)
    if weights is not None:
        stored = read_weights(weights)
    if body_weights is not None:
        stored = read_weights(body_weights)
        settings = settings_with_body(stored.spec, settings, stored.path)
    elif request.how.pretrained:
        check_same_network(found.network, settings, found.name, "the arguments")
    elif stored is not None and stored.record is not None:
        images = record.preprocessing or stored.record.preprocessing
        record = stored.record.model_copy(update={"preprocessing": images})
        check_same_network(record.spec, settings, stored.path, "the arguments", may_transfer=True)
        settings = merge(record.spec.model_dump(), settings)
    if request.norm is not None:
        settings["norm"] = build.norm_kind(request.norm)
    spec = parse_spec(settings, found.network.arch)
    record = with_preprocessing(record.with_spec(spec))

    if request.how.pretrained and not isinstance(spec, ExternalSpec):
        stored = read_weights(found.name)  # may download, so only now, when the arguments are known to be valid
    if stored is None or request.norm is not None:
        return record, stored
    stored.warn_of_assumptions(spec)
    return record, transferred(stored, spec)


def _build(spec: Spec, request: _Request) -> Any:
    """Return the initialized network of a spec."""
    how = request.how
    if isinstance(spec, ExternalSpec):
        external: Any = build_external(spec.arch, **spec.builder_arguments(), **how.model_dump(exclude_defaults=True))
        external.built_as = spec.without_pretrained()
        return external
    model = build_network(spec, request.norm, features_only=how.features_only)
    model.built_as = None if request.norm else spec
    if how.in_chans != 3:
        model.set_input_channels(how.in_chans)
    if how.global_pool is not None:
        model.reset_classifier(spec.num_classes, how.global_pool)
    if how.drop_rate:
        model.set_drop_rate(how.drop_rate)
    if how.features_only and model.last_norm is not None:
        # Loaded and saved, but not run: DDP waits for the gradients of what is trained.
        model.last_norm.requires_grad_(False)
    build.initialize(model, spec)
    if how.out_indices is not None:
        model.select_features(how.out_indices)
    return model


def _load(model: Any, stored: StoredWeights, is_body: bool) -> None:
    """Load the content of a file into a network or into its body; raises WeightsError if it does not fit."""
    if isinstance(model, Network) and not is_body:  # a classifier's weights do not become the body's unasked
        load_state_dict(model, stored.state_dict, source=escape(stored.path))
    else:
        load_stored(model, stored, "the arguments")


def _set_pretrained_cfg(model: Any, record: NetworkRecord, name: str, file: StoredWeights | None) -> None:
    """Set the preprocessing of the network, the names of its outputs, and the source of its weights."""
    if images := describe_images(record, getattr(model, "in_chans", 3)):
        if record.class_names is not None:
            images["label_names"] = record.class_names
        source = published()[name].page if name in published() else None if file is None else os.fspath(file.path)
        model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **images, "source": source}
