"""Transfers the weights of a file to a network with another activation or other norms."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor, nn

from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import WITH_PARAMETER, NetworkSpec, Spec
from zoo.convert._norms import inplace_to_standard, standard_to_inplace
from zoo.errors import ConversionError, WeightsError
from zoo.weights import LoadReport, StoredWeights, load_stored
from zoo.weights._description import ASKED_BY_NETWORK, has_same_tensors

logger = logging.getLogger("zoo")


def load_transferred(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the content of a file into ``model``, converted to its norms by `transferred`; see `load_stored`."""
    return load_stored(model, transferred(stored, getattr(model, "built_as", None)), asked_by)


def transferred(stored: StoredWeights, network: Spec | None) -> StoredWeights:
    """Convert the weights of a file to the norms and the activation of ``network``; log each change in one line.

    - For another activation, the weights stay unchanged, as in the original project; the outputs differ.
    - Standard norms become in-place norms, or in-place norms become standard norms, if the conversion is exact.

    Returns weights unchanged if they have no description, belong to a network with fixed layers, or to another
    architecture. Raises WeightsError if the norms cannot be converted exactly.
    """
    spec = stored.spec
    if not (isinstance(spec, NetworkSpec) and isinstance(network, NetworkSpec)):
        return stored
    of_weights = ARCHITECTURES[network.arch].structure.get("body", network.arch)  # a DeepLab may load only its body
    if spec.arch != network.arch and not has_same_tensors(spec.arch, of_weights):
        return stored
    tensors, source = stored.state_dict, stored.source
    if spec.norm == "standard":  # change the activation first: in-place norms do not support relu
        spec = _with_activation(spec, network, source)
    if (spec.norm == "standard") != (network.norm == "standard"):
        tensors = _convert_norms(tensors, spec, network.norm, source)
    spec = _with_activation(spec.model_copy(update={"norm": network.norm}), network, source)
    assert stored.record is not None
    return replace(stored, state_dict=tensors, record=stored.record.with_spec(spec))


def _with_activation(spec: NetworkSpec, network: NetworkSpec, source: str) -> NetworkSpec:
    """Return the spec with the activation of ``network``."""
    changed = spec.model_copy(update={"activation": network.activation, "activation_param": network.activation_param})
    before, after = _activation_text(spec), _activation_text(changed)
    if before != after:
        logger.warning(
            "%s: trained with %s and used with %s: the weights are unchanged, the outputs differ%s",
            source, before, after,
            "; zoo convert relu-to-leaky-relu measures by how much" if spec.activation == "relu" else
            "; zoo convert has no conversion between these",
        )  # fmt: skip
    return changed


def _activation_text(spec: NetworkSpec) -> str:
    parameter = f" ({spec.activation_param:g})" if spec.activation in WITH_PARAMETER else ""
    return f"{spec.activation}{parameter}"


def _convert_norms(tensors: dict[str, Tensor], spec: NetworkSpec, norm: str, source: str) -> dict[str, Tensor]:
    """Convert weights to standard or in-place norms. Synchronized norms count as in-place norms."""
    convert = inplace_to_standard if norm == "standard" else standard_to_inplace
    try:
        converted, _, report = convert(tensors, spec)
    except ConversionError as error:
        raise WeightsError(
            f"{source}: trained with norm={spec.norm!r}, which norm={norm!r} cannot replace exactly: {error}\nOr use "
            f"norm={spec.norm!r}, or write an approximation: zoo convert standard-to-inplace --allow-approximate"
        ) from error
    logger.warning("%s: %s", source, str(report).partition("\n")[0])
    return converted
