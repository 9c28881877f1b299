"""The networks, one family per file; `build_network` builds the network of a `NetworkSpec`."""

from zoo.models import deeplab, pyramid  # noqa: F401  # heads, for the bodies of families that are imported later
from zoo.models.base import FeatureInfo, Network
from zoo.models.build import build_network

__all__ = ["FeatureInfo", "Network", "build_network"]
