"""Brings the keys of older weights files into the form that the networks have now, and knows torchvision's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from zoo.errors import WeightsError, brief

# Until July 2018 the norm classes wrapped a second module: bn1.bn.weight. A plain DenseNet key such as
# convs1.0.bn.weight has a number before its bn, so it is left alone; convs1.0.bn.bn.weight is not.
WRAPPED_NORM = re.compile(
    r"(?P<norm>(?:^|\.)(?:bn\d*|bn_out|\w+_bn))\.bn"
    r"(?P<leaf>\.(?:weight|bias|running_mean|running_var|num_batches_tracked))$"
)


def published_keys(state_dict: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return ``state_dict`` with one leading "module." dropped if all keys have it, and wrapped norms unwrapped.

    Raises WeightsError if two keys become one.
    """
    prefix = "module." if all(key.startswith("module.") for key in state_dict) else ""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        new_key = WRAPPED_NORM.sub(r"\g<norm>\g<leaf>", key.removeprefix(prefix))
        if new_key in renamed:
            raise WeightsError(
                f"{source}: holds {brief(new_key)} twice, with and without the old .bn level ({brief(key)})"
            )
        renamed[new_key] = tensor
    return renamed


# torchvision's ResNets by their blocks per stage, whether these are bottlenecks, and the channels of the first 3x3.
TORCHVISION = {
    ((2, 2, 2, 2), False, (64, 64)): "resnet18",
    ((3, 4, 6, 3), False, (64, 64)): "resnet34",
    ((3, 4, 6, 3), True, (64, 64)): "resnet50",
    ((3, 4, 23, 3), True, (64, 64)): "resnet101",
    ((3, 8, 36, 3), True, (64, 64)): "resnet152",
    ((3, 4, 6, 3), True, (128, 4)): "resnext50_32x4d",
    ((3, 4, 23, 3), True, (256, 8)): "resnext101_32x8d",
    ((3, 4, 23, 3), True, (256, 4)): "resnext101_64x4d",
    ((3, 4, 6, 3), True, (128, 128)): "wide_resnet50_2",
    ((3, 4, 23, 3), True, (128, 128)): "wide_resnet101_2",
}


def torchvision_arch(state_dict: Mapping[str, Tensor]) -> str | None:
    """Return which of torchvision's ResNets has these keys; "ResNet" for none that is known, None for other keys."""
    if not {"conv1.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight", "fc.weight"} <= state_dict.keys():
        return None
    blocks = tuple(
        len({key.split(".")[1] for key in state_dict if key.startswith(f"layer{stage}.")}) for stage in range(1, 5)
    )
    width = tuple(state_dict["layer1.0.conv2.weight"].shape[:2])
    return TORCHVISION.get((blocks, "layer1.0.conv3.weight" in state_dict, width), "ResNet")  # type: ignore[arg-type]
