"""Attention on the meta device takes the memory that the kernels of a real device take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.memory.allocations import count_memory

NUM_TOKENS, WIDTH, NUM_HEADS = 96, 64, 4


class Attention(nn.Module):
    """Attention between linear layers, with a form of `F.scaled_dot_product_attention`."""

    def __init__(self, options: Callable[[Tensor], dict[str, Any]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._options = options
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, **self._options(q))
        return self.outputs(out.transpose(1, 2).flatten(2))


def bool_mask(q: Tensor) -> Tensor:
    return torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device=q.device).tril()


def bias(q: Tensor) -> Tensor:
    return torch.zeros(1, NUM_HEADS, NUM_TOKENS, NUM_TOKENS, dtype=q.dtype, device=q.device)


FORMS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda q: {},
    "causal": lambda q: {"is_causal": True},
    "mask": lambda q: {"attn_mask": bool_mask(q)},
    "bias": lambda q: {"attn_mask": bias(q)},
    "trained bias": lambda q: {"attn_mask": bias(q).requires_grad_()},
    "dropout": lambda q: {"dropout_p": 0.1},
    "causal dropout": lambda q: {"dropout_p": 0.1, "is_causal": True},
    "scale": lambda q: {"scale": 0.5},
}


def assert_same_count(model: nn.Module, x: Tensor) -> None:
    real = count_memory(lambda: model(x).sum(), model.parameters())
    other, y = copy.deepcopy(model).to("meta"), x.to("meta")
    assert count_memory(lambda: other(y).sum(), other.parameters()).held == real.held


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, torch.float32) for form in FORMS), ("causal", torch.bfloat16), ("mask", torch.float64)]
)
def test_count_of_attention_equals_cpus(form: str, dtype: torch.dtype) -> None:
    assert_same_count(Attention(FORMS[form], dtype), torch.randn(2, NUM_TOKENS, WIDTH, dtype=dtype))


def test_chosen_kernel_is_counted() -> None:
    x = torch.randn(2, NUM_TOKENS, WIDTH)
    with sdpa_kernel(SDPBackend.MATH):
        assert_same_count(Attention(FORMS["plain"]), x)
        scores = zoo.memory_report(Attention(FORMS["plain"]).to("meta"), x.to("meta")).plain
    assert scores > zoo.memory_report(Attention(FORMS["plain"]).to("meta"), x.to("meta")).plain


def test_report_of_attention_equals_cpus() -> None:
    model, x = Attention(FORMS["causal"]), torch.randn(2, NUM_TOKENS, WIDTH)
    real, counted = zoo.memory_report(model, x), zoo.memory_report(copy.deepcopy(model).to("meta"), x.to("meta"))
    assert (counted.plain, counted.lean) == (real.plain, real.lean)
    assert counted.modules == real.modules


class Named(nn.Linear):
    """Gives the query by its name."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)[:, None]
        return F.scaled_dot_product_attention(query=x, key=x, value=x, is_causal=True)


@pytest.mark.parametrize(
    "layer",
    [nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, dropout=0.0, batch_first=True), Named(WIDTH, WIDTH)],
    ids=["layer of torch", "named query"],
)
def test_layers_are_counted_for_any_call(layer: nn.Module) -> None:
    assert_same_count(layer, torch.randn(2, NUM_TOKENS, WIDTH))


def test_autocast_without_meta_kernel_raises() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        refused(
            ConfigError,
            lambda: zoo.memory_report(
                Attention(FORMS["plain"]).to("meta"), torch.randn(2, NUM_TOKENS, WIDTH, device="meta")
            ),
            "autocast",
        )
