"""The networks, one family per file; each file names its architectures and their builders."""

from collections.abc import Callable

from zoo.models import densenet, irevnet, preact, resnet, resnext, revnet, revnext, revnext_twins, wider_resnet
from zoo.models.network import FeatureInfo, Network

# name -> builder(norm, classes, *, features_only=False, **the family's options)
ARCHITECTURES: dict[str, Callable[..., Network]] = {
    **resnet.ARCHITECTURES,
    **resnext.ARCHITECTURES,
    **wider_resnet.ARCHITECTURES,
    **densenet.ARCHITECTURES,
    **preact.ARCHITECTURES,
    **revnet.ARCHITECTURES,
    **irevnet.ARCHITECTURES,
    **revnext.ARCHITECTURES,
    **revnext_twins.ARCHITECTURES,
}

# Those for images of 32 pixels and 10 classes; the others are for ImageNet.
FOR_CIFAR = frozenset(
    name for name in ARCHITECTURES if name.endswith("_cifar") or name.startswith(("revnext", "irevnet"))
)

__all__ = ["ARCHITECTURES", "FOR_CIFAR", "FeatureInfo", "Network"]
