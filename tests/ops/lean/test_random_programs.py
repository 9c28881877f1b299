"""Random programs of repeated and other operations, views and in-place updates have the same gradients with recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.lean.programs import gradients_of

SHAPE = (2, 4, 4, 4)
OTHER_SHAPE = (4, 4)

# Operations of one or two tensors of SHAPE that return one of SHAPE.
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid, "hardswish": F.hardswish,
    "neg": torch.neg,
    "leaky": lambda x: F.leaky_relu(x, 0.1), "clamp": lambda x: x.clamp(-1, 1), "square": lambda x: 0.1 * x * x,
    "clone": torch.clone, "flip": lambda x: x.flip(2), "roll": lambda x: x.roll(1, 1),
    "transpose": lambda x: x.transpose(2, 3), "permute": lambda x: x.permute(0, 2, 1, 3),
    "view": lambda x: x.reshape(2, 16, 4).view(SHAPE), "contiguous": lambda x: x.transpose(1, 3).contiguous(),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), "unbind": lambda x: torch.stack(x.unbind(3)[::-1], 3),
    "pool": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2), "max": lambda x: F.max_pool2d(x, 3, 1, 1),
    "norm": lambda x: F.batch_norm(x, None, None, training=True), "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2), "mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "cumsum": lambda x: 0.3 * x.cumsum(3), "softmax": lambda x: x.softmax(1), "detach": lambda x: x + x.detach(),
    "matmul": lambda x: 0.3 * (x @ x), "dropout": lambda x: F.dropout(x, 0.3),
    "expand": lambda x: x[:, :1].expand(SHAPE),
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": lambda x, y: 0.5 * x * y, "div": lambda x, y: x / (2 + y * y),
    "where": lambda x, y: torch.where(x > y, x, 2 * y), "maximum": torch.maximum,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "cat": lambda x, y: torch.cat([x[:, :2], y[:, 2:]], 1), "matmul2": lambda x, y: 0.3 * (x @ y),
    "conv": lambda x, y: F.conv2d(x, 0.2 * y[:1].reshape(4, 4, 2, 2), padding=1)[:, :, :4, :4],
}  # fmt: skip
# In-place operations.
CHANGE_ONE: dict[str, Callable[[Tensor], Any]] = {
    "relu_": F.relu_, "add_": lambda x: x.add_(0.5), "mul_": lambda x: x.mul_(0.7), "sigmoid_": torch.sigmoid_,
    "silu_": lambda x: F.silu(x, inplace=True), "zero_part": lambda x: x[:, 0].zero_(),
    "fill_row": lambda x: x[0].fill_(1.0),
    "view_relu_": lambda x: x.view(-1)[:32].relu_(), "dropout_": lambda x: F.dropout(x, 0.3, inplace=True),
}  # fmt: skip
CHANGE_TWO: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add2_": lambda x, y: x.add_(y), "mul2_": lambda x, y: x.mul_(y), "copy_": lambda x, y: x.copy_(y),
    "set_part": lambda x, y: x.__setitem__((slice(None), 1), y[:, 2]),
    "out": lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty(SHAPE)),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0]),), y[1:]),
}  # fmt: skip
NAMES = [*ONE, *TWO, *CHANGE_ONE, *CHANGE_TWO]

Step = tuple[str, int, int, bool]
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 7), st.integers(0, 7), st.booleans()), min_size=5, max_size=60
)


def program(steps: list[Step]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the program of some steps, which take tensors out of a pool of eight and put results there."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        pool = [x * 1.0, y * 1.0, x + y, x - y, x, y, 2 * x, 3 * y]
        for name, first, second, is_new in steps:
            a, b = pool[first], pool[second]
            if name in CHANGE_ONE:
                CHANGE_ONE[name](a)
            elif name in CHANGE_TWO:
                CHANGE_TWO[name](a, b)
            else:
                result = ONE[name](a) if name in ONE else TWO[name](a, b)
                pool[first if is_new else second] = result
        return torch.stack([each.reshape(SHAPE) for each in pool]).tanh()

    return run


def check(steps: list[Step], seed: int, depth: int, smallest_bytes: int) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(SHAPE), torch.randn(SHAPE)
    try:
        expected = gradients_of(program(steps), inputs, with_recipes=False)
    except RuntimeError:
        return  # no such program: it overwrites a leaf, or what autograd needs
    found = gradients_of(program(steps), inputs, with_recipes=True, depth=depth, smallest_bytes=smallest_bytes)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
ARGUMENTS: dict[str, Any] = {
    "steps": STEPS, "seed": st.integers(0, 3), "depth": st.sampled_from([0, 1, 4, 100]),
    "smallest_bytes": st.sampled_from([0, 300]),
}  # fmt: skip


@given(**ARGUMENTS)
@settings(max_examples=150, **OPTIONS)
def test_random_programs_have_the_same_gradients(steps: list[Step], seed: int, depth: int, smallest_bytes: int) -> None:
    check(steps, seed, depth, smallest_bytes)


@pytest.mark.slow
@given(**ARGUMENTS)
@settings(max_examples=2000, **OPTIONS)
def test_two_thousand_random_programs_have_the_same_gradients(
    steps: list[Step], seed: int, depth: int, smallest_bytes: int
) -> None:
    check(steps, seed, depth, smallest_bytes)
