"""The networks, one family per file; `build_network` builds each by its name in `zoo.architectures`."""

from zoo.models.build import build_network
from zoo.models.network import FeatureInfo, Network

__all__ = ["FeatureInfo", "Network", "build_network"]
