"""The networks, one family per file; `build_network` builds the network of a `NetworkSpec`."""

from zoo.models.base import FeatureInfo, Network
from zoo.models.build import build_network

__all__ = ["FeatureInfo", "Network", "build_network"]
