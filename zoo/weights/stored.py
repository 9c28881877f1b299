"""Weights files: their tensors with the description of the network.

Tested by tests/weights/test_read.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.config.architectures import ARCHITECTURES, architecture, has_same_tensors, is_external, is_hub_name
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec, merge
from zoo.config.published import published_spec
from zoo.errors import ConfigError, WeightsError, escape, shorten_repr
from zoo.models import Network
from zoo.models.build import build_on_meta, depth_of
from zoo.models.deeplab import DeepLab
from zoo.weights.cache import published_name, weights_path
from zoo.weights.hub import fetch_from_hub
from zoo.weights.load import LoadReport, check_fits, is_segmentation, load_state_dict, num_outputs
from zoo.weights.read import extract_state_dict, read_checkpoint, read_published
from zoo.weights.stored_spec import (
    ASKED_BY_NETWORK,
    REMEDY,
    check_same_network,
    parse_stored_experiment,
    parse_stored_spec,
)

logger = logging.getLogger("zoo")

NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class StoredWeights:
    """The content of a weights file: tensors, the network's spec (None if unknown), and the whole content.

    ``published`` is the name of published weights.
    """

    path: Path
    state_dict: dict[str, Tensor]
    spec: NetworkSpec | None
    content: Mapping[Any, Any]
    published: str | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters: all values except the norms' running statistics and batch counters."""
        return sum(tensor.numel() for key, tensor in self.state_dict.items() if not key.endswith(NORM_BUFFERS))

    def checked_spec(self) -> NetworkSpec | None:
        """Return the spec after comparing it with the tensors, without allocating the network.

        Raises WeightsError if the tensors do not match the spec or its number of classes, because a small file must not
        request a large network.
        """
        source, spec = escape(self.path), self.spec
        if spec is None:
            return None
        # The classifier of an external network may have any name; `check_fits_spec` compares all shapes.
        num_in_tensors = spec.num_classes if spec.is_external else num_outputs(self.state_dict, source)
        if num_in_tensors != spec.num_classes:
            raise WeightsError(
                f"{source}: network.num_classes = {spec.num_classes}, but the classifier has {num_in_tensors} outputs; "
                f"{REMEDY}"
            )
        try:
            check_fits_spec(self.state_dict, spec, source)
        except ConfigError as error:
            raise WeightsError(f"{source}: {error}; {REMEDY}") from error
        return spec

    def experiment(self) -> Experiment | None:
        """Return the settings that a checkpoint of this package was trained with; None for other files.

        Raises ConfigError if they are wrong.
        """
        return parse_stored_experiment(self.content, escape(self.path))

    def check_architecture(self, arch: str) -> None:
        """Raise WeightsError unless the file's spec is of this architecture."""
        assert self.spec is not None
        check_same_network(self.spec, {"arch": arch}, escape(self.path), "the command")

    def merged(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the file's network, changed by ``wanted``; only ``wanted`` if the file has no spec.

        Raises WeightsError as `checked_spec` does, and if ``wanted`` contradicts the file, see `check_same_network`.
        Norm and activation may differ, see `zoo.convert.transfer.transferred`.
        """
        stored = self.checked_spec()
        if stored is None:
            return dict(wanted)
        check_same_network(stored, wanted, escape(self.path), "the arguments", may_transfer=True)
        return merge(stored.model_dump(), wanted)

    def merged_as_body(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a DeepLab whose body has these weights: norm, activation and stem are the file's.

        ``wanted`` are the settings of the DeepLab, which win. Raises errors as `merged` does, and ConfigError if
        ``wanted`` is another network.
        """
        arch = wanted["arch"]
        if is_external(arch) or architecture(arch).family != "deeplab":
            raise ConfigError(f"{arch}: body_weights are for the body of a deeplab_* network; give weights=PATH")
        stored = self.checked_spec()
        if stored is None:
            return dict(wanted)
        check_same_network(
            stored, settings_of_body(wanted, stored), escape(self.path), "the arguments", may_transfer=True
        )
        of_body = {key: getattr(stored, key) for key in ("norm", "activation", "activation_param")}
        stem = {key: value for key, value in stored.options.items() if key == "input_3x3"}
        return merge(of_body, stem, wanted)

    def warn_of_assumptions(self, spec: NetworkSpec, given: Collection[str]) -> None:
        """Warn about the norm and activation that ``spec`` assumes for a file without spec, except those in ``given``.

        Nothing is assumed of networks with their own layers.
        """
        assumed = [key for key in ("norm", "activation") if key not in given]
        if self.spec is None and assumed and not spec.has_own_layers:
            settings = ", ".join(f"{key}={getattr(spec, key)!r}" for key in assumed)
            logger.warning(
                "%s does not describe its network: assuming %s with %s; if it was trained with other settings, name "
                "its experiment, or pass %s to zoo.get or --%s to zoo convert",
                escape(self.path), spec.arch, settings, " and ".join(f"{key}=" for key in assumed),
                " and --".join(assumed),
            )  # fmt: skip


def read_weights(path_or_name: str | os.PathLike[str]) -> StoredWeights:
    """Return the content of a weights file, of published weights, or of a repository on the Hugging Face Hub.

    Both latter are downloaded if needed. Published weights are read once, and their md5 is verified before anything is
    loaded. Raises WeightsError if the file is missing, damaged or unsafe, or if its description of the network is
    invalid.
    """
    if isinstance(path_or_name, (str, os.PathLike)) and is_hub_name(path_or_name):
        return _read_from_hub(os.fspath(path_or_name))
    name = published_name(path_or_name)
    path = Path(path_or_name) if name is None else weights_path(name)
    content = read_checkpoint(path) if name is None else read_published(name)
    state_dict = extract_state_dict(content, path)
    spec = parse_stored_spec(content, escape(path)) if name is None else published_spec(name)
    return StoredWeights(path, state_dict, spec, content, name)


def _read_from_hub(name: str) -> StoredWeights:
    """Return the weights of a repository, whose config.json describes the network."""
    path, spec = fetch_from_hub(name)
    stored = read_weights(path)
    if stored.spec is not None and stored.spec.model_dump() != spec.model_dump():
        raise WeightsError("config.json and the weights file describe different networks", name, "ask its owner")
    return replace(stored, spec=spec)


def load_stored(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the content of a weights file into ``model``; return a report.

    Loading is strict, with two exceptions. The file's classifier is dropped, with a warning, if the model has none or
    one with another number of classes. A DeepLab loads the weights of a classification network into its body, see
    `load_body`. If file and model both have a spec, these must agree: weights trained with another activation or norm
    have the same shapes, but compute something else. Raises WeightsError if the file does not fit; the model is then
    unchanged. See `check_same_network` for ``asked_by``.
    """
    if isinstance(model, DeepLab) and not is_segmentation(stored.state_dict):
        return load_body(model, stored, asked_by)
    built_as = getattr(model, "built_as", None)
    if built_as is not None and stored.spec is not None:
        if built_as.is_external:
            return _load_external(model, built_as, stored, stored.spec, asked_by)
        check_same_network(stored.spec, _compared(built_as), escape(stored.path), asked_by)
    return load_state_dict(model, stored.state_dict, source=escape(stored.path))


def _compared(spec: NetworkSpec) -> dict[str, Any]:
    """Return the settings of a built network, with all options of its architecture."""
    return merge(ARCHITECTURES[spec.arch].options().model_dump(), spec.model_dump())


def _load_external(
    model: nn.Module, built_as: NetworkSpec, stored: StoredWeights, spec: NetworkSpec, asked_by: str
) -> LoadReport:
    """Load a checkpoint into an external network. A classifier with other classes is dropped, with a warning.

    If the numbers of classes differ, the classifier is determined as the tensors whose shapes differ.
    """
    source = escape(stored.path)
    check_same_network(spec, {"arch": built_as.arch}, source, asked_by)
    if spec.num_classes == built_as.num_classes:
        return replace(load_state_dict(model, stored.state_dict, source=source), classifier="loaded")
    of_file, of_network = (
        build_on_meta(spec.model_copy(update={"num_classes": num_classes})).state_dict()
        for num_classes in (spec.num_classes, built_as.num_classes)
    )
    unused = {key for key, like in of_file.items() if key not in of_network or of_network[key].shape != like.shape}
    own = {key: tensor for key, tensor in model.state_dict().items() if key in unused}
    used = {key: tensor for key, tensor in stored.state_dict.items() if key not in unused}
    report = load_state_dict(model, {**used, **own}, source=source)
    logger.warning(
        "%s: the classifier was dropped because it has %d classes, and the network %d%s",
        source, spec.num_classes, built_as.num_classes, "; the network keeps its initial classifier" if own else "",
    )  # fmt: skip
    return replace(report, num_loaded=len(used), classifier="kept" if own else "dropped")


def load_body(model: DeepLab, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the weights of a classification network into the body of ``model``; log and return a report.

    The file's classifier is dropped; head and cls keep their values. A `wider_resnet*_a2` accepts the weights of the
    plain form. Raises WeightsError as `load_weights` does, also for a file of another body.
    """
    source, built_as = escape(stored.path), model.built_as
    if built_as is not None and stored.spec is not None:
        check_same_network(stored.spec, settings_of_body(_compared(built_as), stored.spec), source, asked_by)
    report = load_state_dict(model.body, stored.state_dict, source=source)
    initial = tuple(name for name, _ in model.named_children() if name != "body")
    logger.info(
        "%s: %d tensors were loaded into the body; %s keep their initial values",
        source, report.num_loaded, " and ".join(initial),
    )  # fmt: skip
    return replace(report, initial=initial)


def settings_to_compare(built_as: NetworkSpec, spec: NetworkSpec) -> dict[str, Any]:
    """Return the settings of a built network, or of the body of a DeepLab if ``spec`` describes a body's file."""
    settings = _compared(built_as)
    is_body = architecture(built_as.arch).family == "deeplab" and not spec.is_external
    if is_body and architecture(spec.arch).family != "deeplab":
        return settings_of_body(settings, spec)
    return settings


def settings_of_body(settings: Mapping[str, Any], spec: NetworkSpec) -> dict[str, Any]:
    """Return the settings of a DeepLab's body, for a comparison with the spec of a body's file.

    If the file's architecture has the same tensors as the body, its name is used.
    """
    body = ARCHITECTURES[settings["arch"]].structure["body"]
    fits = not spec.is_external and has_same_tensors(spec.arch, body)
    known = ARCHITECTURES[body].options.model_fields
    options = {key: value for key, value in settings["options"].items() if key in known}
    common = {key: settings[key] for key in ("norm", "activation", "activation_param") if key in settings}
    return {**common, "arch": spec.arch if fits else body, "options": options}


def check_fits_spec(state_dict: Mapping[str, Tensor], spec: NetworkSpec, source: str) -> None:
    """Raise WeightsError unless a state dict fits the network of a spec.

    The network is built on the meta device, so a small file cannot request a large network. The number of tensors is
    compared first, because thousands of blocks take seconds, and millions hours, to build even there. Any number of
    image channels is accepted. Raises ConfigError for an unknown architecture or unknown options.
    """
    if not spec.is_external:
        depth = depth_of(architecture(spec.arch), spec.options)
        if depth > len(state_dict):
            raise WeightsError(
                f"{source}: network: {spec.arch} with the options {shorten_repr(spec.options)} has {depth:,} layers or "
                f"blocks, but the file has only {len(state_dict):,} tensors; ask its author, or save it again"
            )
    model = build_on_meta(spec)
    first = state_dict.get(model.input_weight()) if isinstance(model, Network) else None
    if isinstance(model, Network) and first is not None and first.ndim == 4 and first.shape[1] not in (0, 3):
        model.set_input_channels(first.shape[1])
    check_fits(model, state_dict, source=source)
