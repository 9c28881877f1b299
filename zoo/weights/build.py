"""Networks without values, which cost next to nothing, to compare weights with before a real one is built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config import check_option
from zoo.errors import ConfigError, WeightsError, nearest
from zoo.layers.norm import norm_act
from zoo.models import ARCHITECTURES, Network
from zoo.models.arguments import check_size, depth_of
from zoo.weights.load import check_fits
from zoo.weights.record import NetworkRecord, option_defaults, shown


def build_empty(
    arch: str, classes: int, norm: str, activation: str, activation_param: float, options: Mapping[str, Any]
) -> nn.Module:
    """Return the architecture on the meta device; ConfigError for unknown names and options."""
    _check_values(arch, options)
    try:
        build = partial(ARCHITECTURES[arch], norm_act(norm, activation, activation_param), classes, **options)
        check_size(arch, options, option_defaults(arch), build)
        with torch.device("meta"):
            return build()
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's, of sizes that no tensor can have
        raise ConfigError(f"{arch} cannot be built: {error}") from error


def check_fits_record(state_dict: Mapping[str, Tensor], record: NetworkRecord, source: str) -> None:
    """Raise WeightsError, as `load_state_dict` does, unless a state dict fits the network of a record.

    Nothing of the network's size is allocated, so that no small file makes its reader build a large network. The
    number of tensors is looked at first: even without values a network of thousands of blocks takes seconds.
    Images of any number of channels are accepted. Raises ConfigError for an unknown architecture, and for options that
    it cannot have.
    """
    _check_values(record.arch, record.options)
    depth = depth_of({**option_defaults(record.arch), **record.options})
    if depth > len(state_dict):
        raise WeightsError(
            f"{source}: network: {record.arch} with the options {shown(dict(record.options))} has {depth:,} layers or "
            f"blocks, and the file only {len(state_dict):,} tensors; ask who made it, or make it again"
        )
    model = build_empty(
        record.arch, record.classes, record.norm, record.activation, record.activation_param, record.options
    )
    if isinstance(model, Network):
        first = state_dict.get(model.input_weight())
        if first is not None and first.ndim == 4 and first.shape[1] not in (0, 3):
            model.set_input_channels(first.shape[1])
    check_fits(model, state_dict, source=source)


def _check_values(arch: str, options: Mapping[str, Any]) -> None:
    if arch not in ARCHITECTURES:
        names = ", ".join(nearest(arch, ARCHITECTURES))
        raise ConfigError(f"unknown architecture {arch!r}; the nearest names are {names}")
    for option, value in options.items():
        check_option(option, value)
