"""The values that `zoo.check` compares: named tensors, plain values and the kinds of their containers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zoo.errors import truncate
from zoo.memory.containers import PLAIN, items_of


class Value(NamedTuple):
    """A value of training.

    Args:
    - `step`, `name`: step and name of a `Difference`.
    - `kind`: type and shape of a tensor, type and keys of a container, or a plain value itself.
    - `elements`: a contiguous copy of the elements of a tensor; None for other values.
    """

    step: int
    name: str
    kind: str
    elements: Tensor | None


class Difference(NamedTuple):
    """The first value that differs from plain training.

    Args:
    - `step`: number of the step, from 1; 0 is the evaluation pass after the last step.
    - `value`: name of the value, such as "gradient of layer1.0.conv1.weight" or "output['logits']".
    - `place`: the first module and operation whose values differ, such as "layer1.0.bn1 (BatchNorm2d), in backward:
      NativeBatchNormBackward0"; "" if unknown, as for compiled networks, which run other operations.
    - `scenario`: the scenario in which the value differs, such as "second derivatives"; "" in the steps.
    - `differing`, `size`: number of elements that differ, and of all elements.
    - `largest`: the largest absolute difference; NaN if it is undefined, as between NaN and a number.
    - `kinds`: both values, unless they are tensors of the same kind, such as "False instead of True"; otherwise "".
    """

    step: int
    value: str
    place: str
    differing: int
    size: int
    largest: float
    kinds: str = ""
    scenario: str = ""

    def __str__(self) -> str:
        when = self.scenario or (f"step {self.step}" if self.step else "evaluation")
        where = f"\n  first in {self.place}" if self.place else ""
        elements = f"{self.differing:,} of {self.size:,} elements differ, at most by {self.largest:.2g}"
        return f"{when}, {self.value}: {self.kinds or elements}{where}"


def difference(plain: Value, other: Value) -> Difference | None:
    """Return the difference of two values, without its place; None if they have the same bits.

    Their names only differ if the objects in two outputs refer to each other in different ways.
    """
    a, b = plain.elements, other.elements
    if plain[:3] != other[:3]:
        size = next((each.numel() for each in (b, a) if each is not None), 1)
        kind = other.kind if plain.name == other.name else f"{other.name}, {other.kind},"
        kinds = f"{truncate(kind)} instead of {truncate(plain.kind)}"
        return Difference(plain.step, plain.name, "", size, size, float("nan"), kinds)
    if a is None or b is None or torch.equal(bits(a), bits(b)):
        return None
    differ = bits(a).ne(bits(b)).any(dim=1)
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a.view(-1)[differ].to(wide) - b.view(-1)[differ].to(wide)).abs().max().item()
    return Difference(plain.step, plain.name, "", int(differ.sum()), a.numel(), largest)


def value_of(step: int, name: str, value: Any) -> Value:
    """Return the `Value` of a tensor, an array, a plain value, or a container without its contents."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.tensor(value)
    if isinstance(value, Tensor) and not value.is_nested:
        words = (
            "" if value.layout is torch.strided else f"{value.layout}".removeprefix("torch."),
            f"{value.dtype}".removeprefix("torch."),
            "tensor" if type(value) in (Tensor, nn.Parameter) else type(value).__name__,
            f"of shape {tuple(value.shape)}",
            "" if value.device.type == "cpu" else f"on {value.device}",
            "that requires gradients" if value.requires_grad else "",
        )
        return Value(step, name, " ".join(filter(None, words)), elements_of(value))
    if isinstance(value, PLAIN):
        return Value(step, name, repr(value), None)
    keys = ", ".join(key for key, _ in items_of(value))
    return Value(step, name, type(value).__qualname__ + (f" of {keys}" if keys else ""), None)


def elements_of(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor with one bit pattern for all NaN."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    if dense.is_floating_point() and dense.itemsize == 1:
        dense = dense.float()  # float8 has few operations
    dense = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    if real.is_floating_point():
        real.masked_fill_(real.isnan(), float("nan"))
    return dense


def bits(elements: Tensor) -> Tensor:
    """Return the bytes of contiguous elements, a row per element."""
    return elements.view(-1, 1).view(torch.uint8)
