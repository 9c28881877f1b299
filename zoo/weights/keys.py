"""Brings the keys of older weights files into the form that the networks have now."""

from __future__ import annotations

import re

from torch import Tensor

from zoo.errors import WeightsError

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
            raise WeightsError(f"{source}: holds {new_key} twice, with and without the old .bn level ({key})")
        renamed[new_key] = tensor
    return renamed
