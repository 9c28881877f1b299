"""Converts weights and networks between variants, and reports how exact the conversion is.

Functions of state dicts take a state dict and its architecture, and return the converted state dict and a
`ConversionReport`; `convert_network` takes and returns a network of any package. Common arguments: ``activation``,
``activation_param`` and ``**options`` (such as ``input_3x3``) describe the network; with ``compare_with_source``, the
outputs of both networks are compared on ``images`` (N, 3, H, W), by default two random ones. They raise ConfigError for
an unknown architecture or option, and WeightsError for a state dict that does not fit.
"""

from zoo.convert.conversion import ConversionReport
from zoo.convert.export import export
from zoo.convert.fold import fold, fold_network
from zoo.convert.norm_conversion import convert_norm
from zoo.convert.norms import convert_network, inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert.torchvision import backbone_dilation, from_torchvision, to_torchvision

__all__ = [
    "ConversionReport",
    "backbone_dilation",
    "convert_network",
    "convert_norm",
    "export",
    "fold",
    "fold_network",
    "from_torchvision",
    "inplace_to_standard",
    "relu_to_leaky_relu",
    "standard_to_inplace",
    "to_torchvision",
]
