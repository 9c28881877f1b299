"""A weights file as a whole: its tensors, and what it says about the network that they belong to."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.architectures import ARCHITECTURES, architecture, check_option, has_same_tensors, is_elsewhere
from zoo.errors import ConfigError, WeightsError, printable
from zoo.models import Network
from zoo.models.build import depth_of
from zoo.models.deeplab import DeepLab
from zoo.weights.cache import published_name, weights_path
from zoo.weights.load import LoadReport, check_fits, is_segmentation, load_state_dict, num_outputs
from zoo.weights.read import extract_state_dict, read_checkpoint, read_published
from zoo.weights.record import (
    ASKED_BY_NETWORK,
    COMMON_SETTINGS,
    REMEDY,
    NetworkRecord,
    check_record,
    record_in,
    shown,
)

logger = logging.getLogger("zoo")

NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class StoredWeights:
    """What a weights file holds: the network's tensors, its record if there is one, and all else of the file."""

    path: Path
    state_dict: dict[str, Tensor]
    record: NetworkRecord | None
    content: Mapping[Any, Any]

    @property
    def num_parameters(self) -> int:
        """Number of values that training changes: all tensors but the norms' running statistics and batch counters."""
        return sum(tensor.numel() for key, tensor in self.state_dict.items() if not key.endswith(NORM_BUFFERS))

    def record_to_build(self) -> NetworkRecord | None:
        """Return the record, checked so that the network can be built before the tensors are compared with it.

        Raises WeightsError where it claims another number of classes than the classifier beside it has, or a network
        that the tensors beside it do not fit: a small file must not make its reader allocate a network of gigabytes.
        """
        source = printable(self.path)
        if self.record is None:
            return None
        check_record(self.record, {}, source)  # a folded network is not built like others
        # The classifier of another package's network may have any name; `check_fits_record` compares all shapes.
        of_other_package = is_elsewhere(self.record.arch)
        num_in_tensors = self.record.classes if of_other_package else num_outputs(self.state_dict, source)
        if num_in_tensors != self.record.classes:
            raise WeightsError(
                f"{source}: network.classes = {self.record.classes}: the classifier beside it has "
                f"{num_in_tensors} outputs; take the "
                f"weights alone with zoo.weights.read_state_dict(FILE), or ask who made it"
            )
        try:
            check_fits_record(self.state_dict, self.record, source)
        except ConfigError as error:
            raise WeightsError(f"{source}: network: {error}; {REMEDY}") from error
        return self.record

    def warn_of_assumptions(self, arch: str, assumed: Mapping[str, Any]) -> None:
        """Log the settings (norm, activation) that are assumed for a file that does not say its network."""
        if self.record is None and assumed:
            settings = ", ".join(f"{key}={value!r}" for key, value in assumed.items())
            logger.warning(
                "%s does not say which network it belongs to: taken for %s with %s; if it was trained otherwise, name "
                "its experiment, or give %s to zoo.get or --%s to zoo convert",
                printable(self.path), arch, settings, " and ".join(f"{key}=" for key in assumed),
                " and --".join(assumed),
            )  # fmt: skip


def read_weights(path_or_name: str | os.PathLike[str]) -> StoredWeights:
    """Return the content of the weights file at a path, or of the published weights of a name, downloaded if need be.

    Published weights are read once, and their md5 is compared before anything of them is loaded. Raises WeightsError
    if the file is missing, damaged or unsafe, or if its record of the network cannot be true.
    """
    published = published_name(path_or_name)
    path = Path(path_or_name) if published is None else weights_path(published)
    content = read_checkpoint(path) if published is None else read_published(published)
    state_dict = extract_state_dict(content, path)
    record = record_in(content, printable(path)) if published is None else NetworkRecord.of_published(published)
    return StoredWeights(path, state_dict, record, content)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load the weights file at ``path``, or the published weights of that name, into ``model``; return what was done.

    Everything must fit, except that the file's classifier is left out, and this is logged, if the model has none or one
    with another number of classes, and that a DeepLab takes the weights of a classification network into its body, see
    `load_body`. Where both the file and the model say which network they are, they must agree:
    weights that were trained with another activation or kind of norm have the same shapes, but compute something else.
    Raises WeightsError if the file is missing, damaged, unsafe or does not fit; the model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise WeightsError(
            f"the network comes first, got a {type(model).__name__}: write zoo.load_weights(model, FILE)"
        )
    return load_stored(model, read_weights(path))


def load_stored(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Do what `load_weights` does with a file that was read already; ``asked_by``: see `check_record`."""
    if isinstance(model, DeepLab) and not is_segmentation(stored.state_dict):
        return load_body(model, stored, asked_by)
    built_as = getattr(model, "built_as", None)
    if built_as is not None and stored.record is not None:
        if is_elsewhere(built_as.arch):
            return _load_elsewhere(model, built_as, stored, stored.record, asked_by)
        wanted = {**ARCHITECTURES[built_as.arch].options, **built_as.settings()}
        check_record(stored.record, wanted, printable(stored.path), asked_by)
    return load_state_dict(model, stored.state_dict, source=printable(stored.path))


def _load_elsewhere(
    model: nn.Module, built_as: NetworkRecord, stored: StoredWeights, record: NetworkRecord, asked_by: str
) -> LoadReport:
    """Load a checkpoint into a network of another package; a classifier for other classes is left out, and logged.

    Where the numbers of classes differ, the classifier is what has other shapes in the file's network.
    """
    source = printable(stored.path)
    check_record(record, {"arch": built_as.arch}, source, asked_by)
    if record.classes == built_as.classes:
        return replace(load_state_dict(model, stored.state_dict, source=source), classifier="loaded")
    of_file, of_network = (
        replace(record, classes=classes).build_on_meta().state_dict() for classes in (record.classes, built_as.classes)
    )
    unused = {key for key, like in of_file.items() if key not in of_network or of_network[key].shape != like.shape}
    own = {key: tensor for key, tensor in model.state_dict().items() if key in unused}
    used = {key: tensor for key, tensor in stored.state_dict.items() if key not in unused}
    report = load_state_dict(model, {**used, **own}, source=source)
    logger.warning(
        "%s: the classifier has %d classes and the network %d: it was left out%s",
        source, record.classes, built_as.classes, ", the network keeps its initial one" if own else "",
    )  # fmt: skip
    return replace(report, num_loaded=len(used), classifier="kept" if own else "dropped")


def load_body(model: DeepLab, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the weights of a classification network into the body of ``model``; log and return what was done.

    The file's classifier is left out; head and cls keep their values. Raises WeightsError as `load_weights` does, also
    for a file of another body; a `wider_resnet*_a2` takes the weights of the plain form.
    """
    source, built_as = printable(stored.path), model.built_as
    if built_as is not None and stored.record is not None:
        settings = {**ARCHITECTURES[built_as.arch].options, **built_as.settings()}
        check_record(stored.record, settings_of_body(settings, stored.record), source, asked_by)
    report = load_state_dict(model.body, stored.state_dict, source=source)
    initial = tuple(name for name, _ in model.named_children() if name != "body")
    logger.info(
        "%s: %d tensors were loaded into the body; %s keep their initial values",
        source, report.num_loaded, " and ".join(initial),
    )  # fmt: skip
    return replace(report, initial=initial)


def settings_of_body(settings: Mapping[str, Any], record: NetworkRecord) -> dict[str, Any]:
    """Return those settings of a DeepLab that are about its body, for comparison with the record of a body's file.

    The architecture is the record's own where it has the same tensors as the body.
    """
    body = ARCHITECTURES[settings["arch"]].structure["body"]
    known = {*COMMON_SETTINGS, *ARCHITECTURES[body].options} - {"arch", "classes"}
    fits = not is_elsewhere(record.arch) and has_same_tensors(record.arch, body)
    arch = record.arch if fits else body
    return {"arch": arch, **{key: value for key, value in settings.items() if key in known}}


def check_fits_record(state_dict: Mapping[str, Tensor], record: NetworkRecord, source: str) -> None:
    """Raise WeightsError, as `load_state_dict` does, unless a state dict fits the network of a record.

    Nothing of the network's size is allocated, so that a small file cannot make its reader build a large network. The
    number of tensors is compared first, because building a network of thousands of blocks takes seconds even so.
    Images of any number of channels are accepted. Raises ConfigError for an unknown architecture, and for options that
    it cannot have.
    """
    if not is_elsewhere(record.arch):
        _check_extent(state_dict, record, source)
    model = record.build_on_meta()
    first = state_dict.get(model.input_weight()) if isinstance(model, Network) else None
    if isinstance(model, Network) and first is not None and first.ndim == 4 and first.shape[1] not in (0, 3):
        model.set_input_channels(first.shape[1])
    check_fits(model, state_dict, source=source)


def _check_extent(state_dict: Mapping[str, Tensor], record: NetworkRecord, source: str) -> None:
    """Raise an error for options that the architecture cannot have, or that make more layers than there are tensors."""
    for option, value in record.options.items():
        check_option(option, value)
    depth = depth_of(architecture(record.arch), record.options)
    if depth > len(state_dict):
        raise WeightsError(
            f"{source}: network: {record.arch} with the options {shown(dict(record.options))} has {depth:,} layers or "
            f"blocks, and the file only {len(state_dict):,} tensors; ask who made it, or make it again"
        )
