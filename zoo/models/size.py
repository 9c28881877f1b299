"""How large a network is: numbers that need its shapes, and none of its values."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.models.network import Network


@dataclass(frozen=True)
class NetworkSize:
    """Counts of one network.

    Args:
        parameters: values that training changes, which the running statistics are not.
        parameters_headless: the same without the classifier.
        norms: norm layers with running statistics.
        tensors: entries of the state dict.
    """

    parameters: int
    parameters_headless: int
    norms: int
    tensors: int


def count_network(model: Network) -> NetworkSize:
    """Return the counts of a network, which may be on the meta device (see `zoo.layers.conv.counting`)."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    in_classifier = sum(parameter.numel() for parameter in model.classifier.parameters())
    keys = list(model.state_dict())
    norms = sum(key.endswith("running_mean") for key in keys)
    return NetworkSize(parameters, parameters - in_classifier, norms, len(keys))
