"""torch.compile with a budget for what it keeps for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config


def compile_network(
    model: nn.Module, activation_memory_budget: float | None, *, fullgraph: bool = False, dynamic: bool | None = None
) -> nn.Module:
    """Return the compiled model, which keeps for backward what the budget (0 to 1, None: torch's own choice) allows.

    ``fullgraph`` and ``dynamic`` are those of torch.compile.  (torch's context for the budget of a region of a network,
    new in 2.15, refuses regions that update running statistics.)
    """
    if activation_memory_budget is None:
        return torch.compile(model, fullgraph=fullgraph, dynamic=dynamic)  # type: ignore[return-value]
    inductor = lookup_backend("inductor")

    # The budget guards nothing: compiled twice, a model would keep the first one. With a backend of its own each
    # compiled model is another one.
    def backend(graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=activation_memory_budget):
            return inductor(graph, inputs)

    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)  # type: ignore[return-value]
