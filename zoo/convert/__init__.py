"""Turns weights into those of another variant of their network, and reports what was done and how exactly."""

from zoo.convert.conversion import ConversionReport
from zoo.convert.export import export
from zoo.convert.fold import fold, fold_network
from zoo.convert.norms import inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert.torchvision import from_torchvision, to_torchvision

__all__ = [
    "ConversionReport",
    "export",
    "fold",
    "fold_network",
    "from_torchvision",
    "inplace_to_standard",
    "relu_to_leaky_relu",
    "standard_to_inplace",
    "to_torchvision",
]
