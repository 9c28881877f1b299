"""Networks that a state dict belongs to, in float64 evaluation mode, and the difference of their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ConversionError, VerificationError
from zoo.weights import NetworkRecord, load_state_dict
from zoo.weights.load import check_fits, num_outputs

StateDict = Mapping[str, Tensor]
RANDOM_SIZE = (2, 3, 64, 64)
# Differences of this many roundings, relative to the largest output, are rounding; more is a fault.
ROUNDINGS = 1e4


def load_network(
    state_dict: StateDict,
    arch: str,
    norm: str = "standard",
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    **options: Any,
) -> nn.Module:
    """Return the architecture with the state dict in float64 and evaluation mode.

    The number of classes is that of the state dict, none without a classifier. Raises WeightsError if it does not fit.
    """
    source = f"the state dict given for {arch}"
    classes = num_outputs(state_dict, source)
    with torch.device("meta"):
        model = NetworkRecord(arch, norm, activation, activation_param, classes, options).build()
    check_fits(model, state_dict, source=source)
    model = model.double().to_empty(device="cpu").eval()
    load_state_dict(model, state_dict, source=source)
    return model


def state_dict_like(model: nn.Module, given: StateDict) -> dict[str, Tensor]:
    """Return a copy of the model's state dict in the kind of floating-point number that ``given`` has."""
    dtype = next((tensor.dtype for tensor in given.values() if tensor.is_floating_point()), torch.float32)
    return {
        key: tensor.detach().to(given[key].dtype if key in given else dtype, copy=True)
        if tensor.is_floating_point()
        else tensor.detach().clone()
        for key, tensor in model.state_dict().items()
    }


@torch.no_grad()
def compare(source: nn.Module, target: nn.Module, images: Tensor | None = None) -> dict[str, Any]:
    """Return the largest difference of two float64 networks' outputs and the largest output of the source.

    ``images`` (N, 3, H, W); default two of 64x64, normally distributed, always the same. Raises ConversionError for
    outputs that are not finite.
    """
    if images is None:
        images = torch.randn(RANDOM_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = images.double()
    expected, found = source(images.clone()), target(images.clone())
    if not (expected.isfinite().all() and found.isfinite().all()):
        raise ConversionError(
            f"the outputs on {len(images)} images are not finite; comparison before and after: the weights are "
            "damaged, or skip the comparison (compare_with_source=False, --no-compare)"
        )
    return {"max_difference": (expected - found).abs().max().item(), "max_output": expected.abs().max().item()}


def compare_exact(source: nn.Module, target: nn.Module, images: Tensor | None, given: StateDict) -> dict[str, Any]:
    """Return what `compare` does; VerificationError if the difference is more than rounding of ``given``.

    Where its tensors are of several kinds of number, it is the coarsest that explains the difference.
    """
    measured = compare(source, target, images)
    dtypes = {tensor.dtype for tensor in given.values() if tensor.is_floating_point()} or {torch.float32}
    dtype = max(dtypes, key=lambda kind: torch.finfo(kind).eps)
    allowed = ROUNDINGS * torch.finfo(dtype).eps * measured["max_output"]
    if measured["max_difference"] > allowed:
        raise VerificationError(
            f"an exact conversion changed the outputs by {measured['max_difference']:.2e}, more than the rounding of "
            f"{dtype} explains ({allowed:.2e}); this is a fault of zoo, please report it"
        )
    return measured
