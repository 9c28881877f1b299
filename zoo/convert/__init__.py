"""Converts weights and networks between variants, and reports how exact the conversion is.

Functions on state dicts take a state dict and its network, and return the converted state dict, its `NetworkSpec`, and
a `ConversionReport`. The network is a `NetworkSpec`, the name of published weights, or an architecture; an architecture
gets the norms and the activation that the conversion requires. The state dict determines the number of classes.
Functions that do more than rename tensors compare the outputs of both networks on two random images. All raise
ConfigError for an unknown architecture, WeightsError for a state dict that does not fit, and ConversionError for a
network that they cannot convert. `convert_norm` converts the norms of a network of any package.
"""

from zoo.convert._conversion import ConversionReport
from zoo.convert._norm_conversion import convert_norm
from zoo.convert._norms import inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert._torchvision import from_torchvision, to_torchvision

__all__ = [
    "ConversionReport",
    "convert_norm",
    "from_torchvision",
    "inplace_to_standard",
    "relu_to_leaky_relu",
    "standard_to_inplace",
    "to_torchvision",
]
