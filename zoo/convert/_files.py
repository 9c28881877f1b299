"""Converts weights files, using their descriptions of their networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.config.network import ExternalSpec, Spec, merge, parse_spec
from zoo.config.record import NetworkRecord
from zoo.convert._conversion import REQUIRED_SETTINGS, ConversionReport, check_convertible, count_source_classes
from zoo.convert._norms import inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert._torchvision import from_torchvision, to_torchvision
from zoo.errors import ConfigError, ConversionError, escape
from zoo.files import replace_file, write_bytes
from zoo.models.family import network_class
from zoo.weights import StoredWeights, read_weights
from zoo.weights._description import check_same_network
from zoo.weights._safetensors_files import SUFFIX, safetensors_bytes
from zoo.weights._stored import check_fits_spec


def _export(state_dict: Mapping[str, Tensor], spec: Spec) -> tuple[dict[str, Tensor], Spec, ConversionReport]:
    is_external = isinstance(spec, ExternalSpec)
    weights = state_dict if is_external else network_class(spec.arch).rename_keys(state_dict)
    return dict(weights), spec, ConversionReport("export", spec.arch, (), True, "the weights are unchanged")


# Kind of conversion -> its function in `zoo.convert`; None for export.
FUNCTIONS: dict[str, Callable[..., tuple[dict[str, Tensor], Spec | None, ConversionReport]]] = {
    "from-torchvision": from_torchvision,
    "to-torchvision": to_torchvision,
    "relu-to-leaky-relu": relu_to_leaky_relu,
    "inplace-to-standard": inplace_to_standard,
    "standard-to-inplace": standard_to_inplace,
    "export": _export,
}


def convert_file(kind: str, source: Path, target: Path, asked: Mapping[str, Any], **options: Any) -> ConversionReport:
    """Convert a weights file, write the result with the description of its network, and return a report.

    If a training checkpoint has a moving average of the weights, the average is converted.

    Args:
    - `kind`: a key of `FUNCTIONS`.
    - `source`: path of the weights file, or a published name.
    - `target`: file to write, see `save_weights`.
    - `asked`: settings and options of the network; must agree with the file's description.
    - `**options`: keyword arguments of the function.

    Raises ConfigError if the architecture is unknown, ConversionError if the conversion does not support the network,
    and WeightsError for settings that contradict the file.
    """
    stored = read_weights(source)
    spec = _source_spec(stored, kind, asked)
    record = NetworkRecord(spec=spec) if stored.record is None else stored.record
    if kind != "from-torchvision":  # torchvision's tensors have other names
        check_fits_spec(stored.state_dict, spec, escape(source))
    try:
        state_dict, converted, report = FUNCTIONS[kind](stored.state_dict, spec, **options)
    except ConversionError as error:
        raise ConversionError(f"{escape(source)}: {error}") from error
    save_weights(state_dict, None if converted is None else record.with_spec(converted), target)
    return report


def save_weights(state_dict: Mapping[str, Tensor], record: NetworkRecord | None, path: Path) -> None:
    """Write a weights file: safetensors if ``path`` ends in .safetensors, otherwise a file of `torch.save`.

    Both contain the record of the network if there is one. Raises ConversionError if the file cannot be written.
    """
    try:
        if path.suffix == SUFFIX:
            write_bytes(path, safetensors_bytes(state_dict, record))
            return
        content = state_dict if record is None else {"state_dict": state_dict, "network": record.content()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary, temporary.open("wb") as file:
            torch.save(content, file)
    except OSError as error:
        raise ConversionError(f"the file cannot be written ({error.strerror})", path, "give another TARGET") from error


def _source_spec(stored: StoredWeights, kind: str, asked: Mapping[str, Any]) -> Spec:
    """Return the spec of a file with the default memory strategy, or a spec from ``asked`` and the kind.

    Raises the errors of `convert_file`.
    """
    path, spec = stored.source, stored.spec
    if spec is not None and kind == "from-torchvision":
        raise ConversionError(f"{path}: {kind} is for torchvision's files, and this is a file of zoo for {spec.arch}")
    if spec is not None:
        check_same_network(spec, merge(asked), stored.path, "the options")
        return spec.changed(**asked, memory="auto")
    if "arch" not in asked:
        raise ConfigError(
            f"{path}: does not say which network it belongs to; give --arch NAME (resnet50), and --norm, "
            "--activation, --activation-param and --input-3x3 where they differ from the defaults"
        )
    if kind != "export":
        check_convertible(asked["arch"], kind)
    spec = parse_spec(merge(asked, REQUIRED_SETTINGS.get(kind, {})), path)
    spec = spec.changed(num_classes=count_source_classes(stored.state_dict, spec, kind, path))
    stored.warn_of_assumptions(spec)
    return spec
