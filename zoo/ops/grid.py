"""Rounds the streams of reversible chains to a grid on which sums are exact and subtraction inverts them bit by bit.

If x and r are multiples of 2^-bits, so is y = x + r. In float32 the sum is exact if |y| < 2^(24 - bits), and then y - r
is exactly x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.config.limits import MAX_GRID_BITS
from zoo.errors import ConfigError, VerificationError
from zoo.ops.backend import back_end_for
from zoo.torch_internals.dispatch import are_transforms_active

HALF = (torch.float16, torch.bfloat16)
SIGNIFICAND_BITS = {torch.float32: 24, torch.float64: 53}
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def round_to_grid(x: Tensor, bits: int) -> Tensor:
    """Return round(x 2^bits) 2^-bits, at least in float32, ties to even; its gradient is the gradient of x.

    Raises ConfigError unless ``bits`` is a whole number from 0 to `MAX_GRID_BITS`.
    """
    if type(bits) is not int or not 0 <= bits <= MAX_GRID_BITS:
        raise ConfigError(f"grid_bits must be a whole number from 0 to {MAX_GRID_BITS}, got {bits!r}")
    return _RoundToGrid.apply(x, bits)


class _RoundToGrid(torch.autograd.Function):
    """Rounds; its derivative is the identity (a straight-through estimator)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bits: int) -> Tensor:
        x = x.float() if x.dtype in HALF else x
        return x.mul(2.0**bits).round_().mul_(2.0**-bits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return with_standard_strides(dy), None


def with_standard_strides(x: Tensor) -> Tensor:
    """Return a view of a contiguous or channels_last x with the strides of a new tensor; other tensors unchanged.

    Dimensions of size 1 may have any stride. Sums in place and out of place leave different strides there, by which
    kernels choose an order of summation. Gradients of branches would then depend on whether activations are stored.
    """
    if are_transforms_active():
        return x
    if x.is_contiguous():
        return x.view(-1).view(x.shape)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        last = x.permute(0, 2, 3, 1)
        return last.view(-1).view(last.shape).permute(0, 3, 1, 2)
    return x


def sum_on_grid(
    x: Tensor, r: Tensor, bits: int, subtract: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x + round_to_grid(r) or, with ``subtract``, x - round_to_grid(r), and a summary or None.

    Links add in forward and subtract in backward. x must be on the grid and have the shape of r. The result is a new
    tensor or ``out``, which may be x. Gradients are not recorded.

    The summary is an int32 tensor of two numbers: the `digest` of x before the addition or of the result of the
    subtraction, and the bits of the largest absolute value of the result. It is None without a kernel that computes
    both in one pass.
    """
    r = r.float() if r.dtype in HALF else r
    back_end = back_end_for(x)
    dense = x.stride() == r.stride() and (x.is_contiguous() or x.movedim(1, -1).is_contiguous())
    if x.dtype != torch.float32 or r.dtype != x.dtype or not dense or back_end == "reference" or x.is_meta:
        rounded = round_to_grid(r, bits)
        return torch.sub(x, rounded, out=out) if subtract else torch.add(x, rounded, out=out), None
    result = torch.empty_like(x) if out is None else out
    summary = torch.empty(2, dtype=torch.int32, device=x.device)
    if back_end == "native":
        torch.ops.zoo.grid_sum_into.default(result, summary, x, r, 2.0**bits, subtract)
    else:
        from zoo.ops import grid_triton

        grid_triton.sum_into(result, summary, x, r, 2.0**bits, subtract)
    return result, summary


def digest(x: Tensor) -> Tensor:
    """Return the sum of b (2 b + 1) over the values of x, where b are their bits as integers; the sum wraps around.

    The map is a permutation of the integers, so a single changed value always changes the digest. It is not linear:
    rounding errors of opposite sign cancel in a sum of b, but not here.
    """
    integers = INTEGERS[x.dtype]
    bits = x.detach().view(integers)
    return torch.addcmul(bits, bits, bits, value=2).sum(dtype=integers)


class _Recorded(NamedTuple):
    """Digests of the inputs that a link replaces in forward, and the range of its outputs."""

    replaced: list[int]  # positions
    shape: torch.Size
    digests: Tensor
    extremes: Tensor  # smallest and largest output


def _summary_of(link: Any) -> tuple[Tensor, Tensor] | None:
    """Return digest and largest value from the summary of the link's latest call, see `sum_on_grid`."""
    summary = getattr(link, "summary", None)
    return None if summary is None else (summary[:1], summary[1:].view(torch.float32))


class Digests:
    """Digests of the tensors that links replace: recorded in forward, compared with what backward reconstructs.

    Args:
    - `bits`: the grid.
    - `blocks`: the number of each link's block, None at the ends of a chain.
    - `num_blocks`: the number of blocks in the chain.
    """

    def __init__(self, bits: int, blocks: Sequence[int | None], num_blocks: int) -> None:
        self.bits, self.blocks, self.num_blocks = bits, blocks, num_blocks
        self._recorded: list[_Recorded | None] = []

    def record(self, link: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], compared: bool) -> None:
        """Record the next link, which returned ys for the inputs xs."""
        replaced = [i for i, x in enumerate(xs) if all(x is not y for y in ys)] if compared else []
        if not replaced:
            self._recorded.append(None)
            return
        summary = _summary_of(link)
        if summary is None:
            new = [y.detach() for y in ys if all(y is not x for x in xs)]
            extremes = torch.stack([extreme for y in new for extreme in torch.aminmax(y)])
            summary = torch.stack([digest(xs[i]) for i in replaced]), extremes
        self._recorded.append(_Recorded(replaced, xs[replaced[0]].shape, *summary))

    def digests_of(self, index: int, link: Any, xs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return {index of the link: digests of its reconstructed inputs xs}; empty for a link that is not compared."""
        recorded = self._recorded[index]
        if recorded is None:
            return {}
        summary = _summary_of(link)
        return {index: torch.stack([digest(xs[i]) for i in recorded.replaced]) if summary is None else summary[0]}

    def compare(self, found: Mapping[int, Tensor]) -> None:
        """Compare the digests that backward found, in its order. Synchronizes with the device once.

        Raises VerificationError for the first link that differs.
        """
        compared = [(link, recorded) for link in found if (recorded := self._recorded[link]) is not None]
        if not compared or compared[0][1].digests.is_meta:
            return
        differ = torch.cat(list(found.values())) != torch.cat([recorded.digests for _, recorded in compared])
        links = [(link, recorded) for link, recorded in compared for _ in recorded.replaced]
        for (link, recorded), differs in zip(links, differ.tolist(), strict=True):
            if differs:
                raise self._error(self.blocks[link], recorded)

    def _error(self, block: int | None, recorded: _Recorded) -> VerificationError:
        largest = float(recorded.extremes.abs().max())  # NaN if there is one
        significand = SIGNIFICAND_BITS[recorded.extremes.dtype]
        limit = 2.0 ** (significand - self.bits)
        if not math.isfinite(largest):
            remedy = "the network has diverged; lower the learning rate"
        elif largest < limit:
            remedy = (
                "the recomputation of the block differed: change no parameters or buffers between forward and "
                "backward, and call torch.use_deterministic_algorithms(True)"
            )
        elif (most := significand - math.frexp(largest)[1]) >= 0:
            remedy = f"set grid_bits to {most} or less"
        else:
            remedy = 'no grid has this range; store activations (store=True, memory "plain")'
        return VerificationError(
            f"backward could not reconstruct the bits of a reversible chain with grid_bits = {self.bits}; its values "
            f"are exact below {limit:,.0f}, and the largest absolute value of this block's output is {largest:,.6g}",
            f"block {block} of the blocks 0 to {self.num_blocks - 1}, streams of shape {tuple(recorded.shape)}",
            remedy,
        )
