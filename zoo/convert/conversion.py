"""What all conversions use: building the network of a state dict, comparing two networks, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ConversionError, VerificationError
from zoo.models.build import build_on_meta
from zoo.models.external import iter_tensors
from zoo.spec import merge, parse_spec
from zoo.weights import load_state_dict
from zoo.weights.load import check_fits, num_outputs

StateDict = Mapping[str, Tensor]
RANDOM_SIZE = (2, 3, 64, 64)
# A difference of up to this many roundings, relative to the largest output, is explained by rounding.
ROUNDINGS = 1e4
SHOWN = 6  # names of layers in a printed report


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, and how exactly the result computes what the source computed.

    Args:
    - `conversion`: the kind of conversion, in the words of ``zoo convert``.
    - `arch`: the architecture.
    - `layers`: names of the layers whose weights or activation changed.
    - `exact`: whether the result computes the same up to the rounding of the weights' kind of number.
    - `reason`: why it does, or why it does not.
    - `kept`: names of the norms that could not be folded.
    - `clamped`: for each norm that has any, the number of its scales that in-place norms cannot have; they were set to
      the nearest possible value, eps.
    - `left`: why norms that were to be converted were not, by the name of the norm with its class.
    - `max_difference`: largest absolute difference between the outputs of source and result, in float64 and evaluation
      mode; None where they were not compared.
    - `max_output`: largest absolute output of the source in that comparison.
    """

    conversion: str
    arch: str
    layers: tuple[str, ...]
    exact: bool
    reason: str
    kept: tuple[str, ...] = ()
    clamped: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    max_difference: float | None = None
    max_output: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        content = asdict(self)
        exact = content.pop("exact")
        return {**content, "exactness": "exact" if exact else "approximate"}

    def __str__(self) -> str:
        lines = [
            f"{self.conversion} {self.arch}: {'exact' if self.exact else 'approximate'}, {self.reason}",
            f"  layers touched: {_counted(self.layers)}",
        ]
        if self.kept:
            lines.append(f"  norms kept: {_counted(self.kept)}")
        if self.clamped:
            counts = tuple(f"{name}: {count}" for name, count in self.clamped.items())
            lines.append(f"  norms with scales set to eps: {_counted(counts)}")
        if self.left:
            more = f" (the first {SHOWN} here; --json lists all)" if len(self.left) > SHOWN else ""
            lines.append(f"  norms left as they are: {len(self.left)}{more}")
            lines += [f"    {name}: {reason}" for name, reason in list(self.left.items())[:SHOWN]]
        if self.max_difference is None:
            lines.append("  outputs: not compared")
        else:
            lines.append(
                f"  outputs: largest difference {self.max_difference:.2e}, "
                f"largest output {self.max_output:.2e} (float64)"
            )
        return "\n".join(lines)


def _counted(names: tuple[str, ...]) -> str:
    """Return the number of names and the first of them."""
    rest = f", ... ({len(names) - SHOWN} more; --json lists all)" if len(names) > SHOWN else ""
    return f"{len(names)}" + (f" ({', '.join(names[:SHOWN])}{rest})" if names else "")


def build_with_weights(
    state_dict: StateDict,
    arch: str,
    norm: str = "standard",
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    **options: Any,
) -> nn.Module:
    """Return the network of a state dict, with its values, in float64 and evaluation mode.

    The number of classes is that of the state dict, 0 without a classifier. Raises WeightsError for a state dict that
    does not fit the architecture.
    """
    source = f"the state dict given for {arch}"
    settings = {"arch": arch, "norm": norm, "activation": activation, "activation_param": activation_param}
    spec = parse_spec(merge(settings, options, {"num_classes": num_outputs(state_dict, source)}), arch)
    model = build_on_meta(spec)
    check_fits(model, state_dict, source=source)
    model = model.double().to_empty(device="cpu").eval()
    load_state_dict(model, state_dict, source=source)
    return model


def state_dict_like(model: nn.Module, like: StateDict) -> dict[str, Tensor]:
    """Return a copy of the model's state dict in the kind of floating-point number that ``like`` has."""
    dtype = next((tensor.dtype for tensor in like.values() if tensor.is_floating_point()), torch.float32)
    return {
        key: tensor.detach().to(like[key].dtype if key in like else dtype, copy=True)
        if tensor.is_floating_point()
        else tensor.detach().clone()
        for key, tensor in model.state_dict().items()
    }


@torch.no_grad()
def compare_outputs(
    source: nn.Module, target: nn.Module, images: Tensor | None = None, exact_for: StateDict | None = None
) -> dict[str, Any]:
    """Return ``max_difference`` and ``max_output`` of two float64 networks, see `ConversionReport`.

    Args:
    - `source`: the network before the conversion.
    - `target`: the network after it.
    - `images`: (N, 3, H, W); default two of 64 x 64 px, normally distributed, always the same.
    - `exact_for`: the weights of the source, where no more than their rounding may change the outputs. Where they are
      of several kinds of number, the coarsest one sets the limit.

    Raises ConversionError for outputs that are not finite, VerificationError for a difference above that limit.
    """
    if images is None:
        images = torch.randn(RANDOM_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = images.double()
    expected, actual = (
        torch.cat([output.flatten() for output in iter_tensors(network(images.clone()))])
        for network in (source, target)
    )
    if not (expected.isfinite().all() and actual.isfinite().all()):
        raise ConversionError(
            f"the outputs on {len(images)} images are not finite; comparison before and after: the weights are "
            "damaged, or skip the comparison (compare_with_source=False, --no-compare)"
        )
    difference, largest = (expected - actual).abs().max().item(), expected.abs().max().item()
    if exact_for is not None:
        dtypes = {tensor.dtype for tensor in exact_for.values() if tensor.is_floating_point()} or {torch.float32}
        dtype = max(dtypes, key=lambda kind: torch.finfo(kind).eps)
        allowed = ROUNDINGS * torch.finfo(dtype).eps * largest
        if difference > allowed:
            raise VerificationError(
                f"an exact conversion changed the outputs by {difference:.2e}, more than the rounding of {dtype} "
                f"explains ({allowed:.2e}); this is a fault of zoo, please report it"
            )
    return {"max_difference": difference, "max_output": largest}
