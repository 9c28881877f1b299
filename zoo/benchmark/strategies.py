"""Memory strategies for training the same network, by their names in tables and plots."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results, describe_error
from zoo.errors import ConfigError
from zoo.memory.block_checkpointing import checkpoint_blocks_selectively
from zoo.remat import inductor_options
from zoo.remat._lean import lean
from zoo.torch_internals.compiler import activation_memory_budget, lookup_backend

BASELINE = "std-BN"


@dataclass(frozen=True)
class Strategy:
    """A way to train a network.

    Args:
    - `name`: label in tables and plots.
    - `norm`, `memory`: arguments that the network is built with.
    - `budget`: activation memory budget of torch.compile, 0 to 1; None: the network is not compiled.
    - `has_lean_rule`: compile with `zoo.remat.inductor_options` and this budget, in place of torch's choice.
    - `reversible`: use the RevNet of similar size and accuracy.
    - `change`: function that changes and returns the built network, such as `zoo.lean` with a budget.
    """

    name: str
    norm: str
    memory: str
    budget: float | None = None
    has_lean_rule: bool = False
    reversible: bool = False
    change: Callable[[nn.Module], nn.Module] | None = None

    def build(self, setup: Setup) -> nn.Module:
        """Build the network of a setup or its RevNet. Raises ConfigError if it does not support the strategy."""
        model = (setup.reversible_twin() if self.reversible else setup).build(self.norm, self.memory)
        return model if self.change is None else self.change(model)

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the function that computes the logits: the model or its compiled version."""
        if self.budget is None:
            return model
        if self.has_lean_rule:
            options = inductor_options(float(self.budget))
            return torch.compile(model, fullgraph=True, dynamic=False, options=options)
        return compile_with_budget(model, self.budget, fullgraph=True, dynamic=False)


def compile_with_budget(model: nn.Module, budget: float, **options: Any) -> nn.Module:
    """Compile the model with this activation memory budget of torch.compile, from 0 to 1.

    ``options`` are further arguments of torch.compile. Below 1, torch may draw new dropout masks in backward, which
    makes gradients wrong.
    """
    inductor = lookup_backend("inductor")

    # torch.compile has no guard on the budget: a model compiled twice would keep the first budget. A separate backend
    # gives each compiled model its own budget.
    def backend(graph: Any, inputs: Any) -> Any:
        with activation_memory_budget(budget):
            return inductor(graph, inputs)

    return torch.compile(model, backend=backend, **options)  # type: ignore[return-value]


EAGER = (
    Strategy(BASELINE, "standard", "plain"),
    Strategy("std-BN checkpointed", "standard", "checkpoint"),
    Strategy("std-BN checkpointed selectively", "standard", "plain", change=checkpoint_blocks_selectively),
    Strategy("std-BN lean", "standard", "lean"),
    Strategy("std-BN lean 0.4", "standard", "lean", change=partial(lean, budget=0.4)),
    Strategy("iABN plain", "inplace", "plain"),
    Strategy("iABN", "inplace", "auto"),
    Strategy("iABN checkpointed", "inplace", "checkpoint"),
    Strategy("iABN lean", "inplace", "lean"),
    Strategy("RevNet stored", "standard", "plain", reversible=True),
    Strategy("RevNet", "standard", "auto", reversible=True),
    Strategy("RevNet, iABN", "inplace", "auto", reversible=True),
)  # fmt: skip


def all_strategies(budgets: Sequence[float]) -> list[Strategy]:
    """Return the eager strategies, and compiled strategies for each budget, with the lean rule for budgets above 0."""
    compiled = [
        Strategy(f"compiled {name} {budget:g}", norm, memory, budget, has_lean_rule)
        for name, norm, memory, has_lean_rule in (
            ("std-BN", "standard", "plain", False),
            ("std-BN, lean rule", "standard", "plain", True),
            ("iABN", "inplace", "auto", False),
        )
        for budget in budgets
        if budget > 0 or not has_lean_rule  # unlike torch, the lean rule does not accept 0
    ]
    return [*EAGER, *compiled]


def choose_strategies(strategies: Sequence[Strategy], patterns: Sequence[str]) -> list[Strategy]:
    """Return the baseline and the strategies whose names match a shell-style pattern.

    Raises ConfigError for an unmatched pattern.
    """
    names = [strategy.name for strategy in strategies]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"no strategy is called {pattern!r}", "--strategies", f"choose from {', '.join(names)}")
    wanted = {name for pattern in patterns for name in fnmatch.filter(names, pattern)} | {BASELINE}
    return [strategy for strategy in strategies if strategy.name in wanted]


def build_all(results: Results, strategies: Sequence[Strategy], setup: Setup) -> dict[Strategy, nn.Module]:
    """Build the network with each strategy that it supports; note the others, with reasons, in ``results``."""
    models: dict[Strategy, nn.Module] = {}
    for strategy in strategies:
        try:
            models[strategy] = strategy.build(setup)
        except ConfigError as error:
            if strategy.name == BASELINE:
                raise
            results.note(f"not measured: {strategy.name} ({error})")
    return models


@contextmanager
def note_refusals(results: Results, subject: str, name: str, baseline: str = BASELINE) -> Iterator[None]:
    """Notes RuntimeErrors of torch instead of raising them, except for the baseline."""
    try:
        yield
    except RuntimeError as error:
        if name == baseline:
            raise
        results.note(f"not measured: {subject}, {name} ({describe_error(error)})")
