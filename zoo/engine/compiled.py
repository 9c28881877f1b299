"""torch.compile with a budget for what it keeps for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
from torch import nn


def compile_network(model: nn.Module, activation_memory_budget: float | None) -> nn.Module:
    """Return the compiled model, which keeps for backward what the budget (0 to 1, None: torch's own choice) allows."""
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled if activation_memory_budget is None else _Budgeted(compiled, activation_memory_budget)


class _Budgeted(nn.Module):
    """A compiled network whose budget holds while it is called, and compiled, and for no other network.

    (torch's context for regions of a network, new in 2.15, refuses those that update running statistics.)
    """

    def __init__(self, compiled: nn.Module, budget: float) -> None:
        super().__init__()
        self._orig_mod = compiled  # torch.compile's own name for what is inside, by which `unwrap` finds it
        self._budget = budget

    def forward(self, *args: Any) -> Any:
        """Return what the network returns."""
        with torch._functorch.config.patch(activation_memory_budget=self._budget):
            return self._orig_mod(*args)
