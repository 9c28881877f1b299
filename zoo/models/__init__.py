"""The networks, one family per file; each file names its architectures and their builders."""

from collections.abc import Callable

from zoo.models import densenet, resnet, resnext, wider_resnet
from zoo.models.network import FeatureInfo, Network

# name -> builder(norm, classes, *, features_only=False, **the family's options)
ARCHITECTURES: dict[str, Callable[..., Network]] = {
    **resnet.ARCHITECTURES,
    **resnext.ARCHITECTURES,
    **wider_resnet.ARCHITECTURES,
    **densenet.ARCHITECTURES,
}

__all__ = ["ARCHITECTURES", "FeatureInfo", "Network"]
