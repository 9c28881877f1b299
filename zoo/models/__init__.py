"""The networks, one family per file; `build_network` builds each by its name in `zoo.architectures`."""

from zoo.models.base import FeatureInfo, Network
from zoo.models.build import build_network

__all__ = ["FeatureInfo", "Network", "build_network"]
