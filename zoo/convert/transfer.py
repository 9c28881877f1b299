"""Transfers the weights of a file to a network with another activation or another form of its norms.

Tested by tests/convert/test_transfer.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import nn

from zoo.config.architectures import ARCHITECTURES, has_same_tensors
from zoo.config.network import WITH_PARAMETER, NetworkSpec
from zoo.convert.norms import inplace_to_standard, standard_to_inplace
from zoo.errors import ConversionError, WeightsError, escape
from zoo.weights import LoadReport, StoredWeights, load_stored
from zoo.weights.description import ASKED_BY_NETWORK

logger = logging.getLogger("zoo")


def load_transferred(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the content of a file into ``model``, converted to its norms by `transferred`; see `load_stored`."""
    return load_stored(model, transferred(stored, getattr(model, "built_as", None)), asked_by)


def transferred(stored: StoredWeights, network: NetworkSpec | None) -> StoredWeights:
    """Return the weights of a file for the norms and the activation of ``network``, and log each change in one line.

    - Another activation leaves the weights unchanged, as the original project does; the outputs differ.
    - Standard norms become in-place norms, or in-place norms standard ones, if that is exact.

    Weights without a description, of networks with their own layers, and of another architecture are returned
    unchanged. Raises WeightsError if the norms cannot be converted exactly.
    """
    spec = stored.spec
    if spec is None or network is None or spec.has_own_layers or network.arch not in ARCHITECTURES:
        return stored
    of_weights = ARCHITECTURES[network.arch].structure.get("body", network.arch)  # a DeepLab may load its body alone
    if spec.arch != network.arch and not has_same_tensors(spec.arch, of_weights):
        return stored
    if spec.norm == "standard":  # first, because in-place norms have no relu
        stored = _with_activation(stored, network)
    stored = _with_norm(stored, network.norm)
    return _with_activation(stored, network)


def _with_activation(stored: StoredWeights, network: NetworkSpec) -> StoredWeights:
    """Return the same weights, described with the activation of ``network``."""
    spec = stored.spec
    assert spec is not None
    changed = spec.changed(activation=network.activation, activation_param=network.activation_param)
    if _activation_text(spec) != _activation_text(changed):
        logger.warning(
            "%s: trained with %s and used with %s: the weights are unchanged, the outputs differ%s",
            escape(stored.path), _activation_text(spec), _activation_text(changed),
            "; zoo convert relu-to-leaky-relu measures by how much" if spec.activation == "relu" else
            "; zoo convert has no conversion between these",
        )  # fmt: skip
    return replace(stored, spec=changed)


def _activation_text(spec: NetworkSpec) -> str:
    parameter = f" ({spec.activation_param:g})" if spec.activation in WITH_PARAMETER else ""
    return f"{spec.activation}{parameter}"


def _with_norm(stored: StoredWeights, norm: str) -> StoredWeights:
    """Return the weights for standard or in-place norms; synchronized norms are in-place norms."""
    spec, source = stored.spec, escape(stored.path)
    assert spec is not None
    if (spec.norm == "standard") == (norm == "standard"):
        return stored
    convert = inplace_to_standard if norm == "standard" else standard_to_inplace
    try:
        state_dict, converted, report = convert(stored.state_dict, spec)
    except ConversionError as error:
        raise WeightsError(
            f"{source}: trained with norm={spec.norm!r}, which norm={norm!r} cannot replace exactly: {error}\nOr use "
            f"norm={spec.norm!r}, or write an approximation: zoo convert standard-to-inplace --allow-approximate"
        ) from error
    logger.warning("%s: %s", source, str(report).partition("\n")[0])
    return replace(stored, state_dict=state_dict, spec=converted.changed(norm=norm))
