"""Weights files: their tensors with the description of the network."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.config.architectures import architecture, is_hub_name
from zoo.config.experiment import Experiment
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.config.published import published_record
from zoo.config.record import NetworkRecord
from zoo.errors import ConfigError, WeightsError, escape, shorten_repr
from zoo.models import Network
from zoo.models.build import build_on_meta, depth_of
from zoo.models.family import network_class
from zoo.tables import counted
from zoo.weights._cache import published_name, weights_path
from zoo.weights._description import REMEDY, parse_description
from zoo.weights._hub import fetch_from_hub
from zoo.weights._load import check_fits, count_outputs
from zoo.weights._read import extract_state_dict, read_checkpoint, read_published

logger = logging.getLogger("zoo")

NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class StoredWeights:
    """The content of a weights file.

    Args:
    - `path`: the file.
    - `state_dict`: its tensors.
    - `record`: the network, which fits the tensors, and its images; None if the file does not describe it.
    - `content`: the whole content.
    - `experiment`: the settings that trained a checkpoint of this package; None for other files.
    - `published`: the name of published weights.
    """

    path: Path
    state_dict: dict[str, Tensor]
    record: NetworkRecord | None
    content: Mapping[Any, Any]
    experiment: Experiment | None = None
    published: str | None = None

    @property
    def spec(self) -> Spec | None:
        """The network; None if the file does not describe it."""
        return None if self.record is None else self.record.spec

    @property
    def source(self) -> str:
        """The path, escaped for messages."""
        return escape(self.path)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, that is, of all values except running statistics and batch counters of norms."""
        return sum(tensor.numel() for key, tensor in self.state_dict.items() if not key.endswith(NORM_BUFFERS))

    def warn_of_assumptions(self, spec: Spec) -> None:
        """Warn about the norm and activation that ``spec`` assumes by default for a file without record.

        Nothing is assumed of networks whose layers are fixed.
        """
        assumed = [key for key in ("norm", "activation") if key not in spec.model_fields_set]
        if self.record is None and assumed and isinstance(spec, NetworkSpec):
            settings = ", ".join(f"{key}={getattr(spec, key)!r}" for key in assumed)
            logger.warning(
                "%s does not describe its network: assuming %s with %s; if it was trained with other settings, name "
                "its experiment, or pass %s to zoo.get or --%s to zoo convert",
                self.source, spec.arch, settings, " and ".join(f"{key}=" for key in assumed),
                " and --".join(assumed),
            )  # fmt: skip


def read_weights(path_or_name: str | os.PathLike[str]) -> StoredWeights:
    """Read a weights file, published weights, or a repository on the Hugging Face Hub.

    Downloads published weights and repositories if needed. Published weights are verified before anything is loaded.
    For other files, builds the described network on the meta device and compares it with the tensors. Raises
    WeightsError if the file is missing, damaged or unsafe, or if its description is invalid or does not fit its
    tensors.
    """
    name = published_name(path_or_name)
    if name is not None:
        path = weights_path(name)
        content = read_published(name)
        return StoredWeights(path, extract_state_dict(content, path), published_record(name), content, published=name)
    config: NetworkRecord | None = None
    if isinstance(path_or_name, (str, os.PathLike)) and is_hub_name(path_or_name):
        path, config = fetch_from_hub(os.fspath(path_or_name))
    else:
        path = Path(path_or_name)
    content = read_checkpoint(path)
    state_dict = extract_state_dict(content, path)
    record, experiment = parse_description(content, escape(path))
    if config is not None and record is not None and record.content() != config.content():
        what = "config.json and the weights file describe different networks"
        raise WeightsError(what, path_or_name, "ask its owner")
    record = config or record
    if record is not None:
        _check_description(state_dict, record.spec, escape(path))
    return StoredWeights(path, state_dict, record, content, experiment)


def _check_description(state_dict: Mapping[str, Tensor], spec: Spec, source: str) -> None:
    """Raise WeightsError if the tensors of a file do not fit its description or its number of classes."""
    # The classifier of an external network may have any name; `check_fits_spec` compares all shapes instead.
    network = None if isinstance(spec, ExternalSpec) else network_class(spec.arch)
    num_in_tensors = spec.num_classes if network is None else count_outputs(state_dict, network, source)
    if num_in_tensors != spec.num_classes:
        raise WeightsError(
            f"{source}: network.num_classes = {spec.num_classes}, but the classifier has "
            f"{counted(num_in_tensors, 'output')}; {REMEDY}"
        )
    try:
        check_fits_spec(state_dict, spec, source)
    except ConfigError as error:
        raise WeightsError(f"{source}: {error}; {REMEDY}") from error


def check_fits_spec(state_dict: Mapping[str, Tensor], spec: Spec, source: str) -> None:
    """Raise WeightsError unless a state dict fits the network of a spec.

    Builds the network on the meta device, so that a small file cannot request a large network. Compares the number of
    tensors first, because even there thousands of blocks take seconds to build, and millions hours. Accepts any number
    of image channels. Raises ConfigError for an unknown architecture or unknown options.
    """
    if not isinstance(spec, ExternalSpec):
        depth = depth_of(architecture(spec.arch), spec.options)
        if depth > len(state_dict):
            raise WeightsError(
                f"{source}: network: {spec.arch} with the options {shorten_repr(spec.options)} has {depth:,} layers or "
                f"blocks, but the file has only {counted(len(state_dict), 'tensor')}; ask its author, or save it again"
            )
    model = build_on_meta(spec)
    key = model.input_weight() if isinstance(model, Network) else None
    first = None if key is None else state_dict.get(key)
    if isinstance(model, Network) and first is not None and first.ndim == 4 and first.shape[1] not in (0, 3):
        model.set_input_channels(first.shape[1])
    check_fits(model, state_dict, source=source)
