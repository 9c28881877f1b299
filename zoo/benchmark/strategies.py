"""Ways to train the same network in less memory, under the names that tables and plots have for them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.benchmark.networks import Setup
from zoo.engine.compiled import compile_network
from zoo.errors import ConfigError

BASELINE = "std-BN"
FUSED = "iABN fused"  # in float32 nothing else than iABN


@dataclass(frozen=True)
class Strategy:
    """A name, the arguments of the network, and with ``budget`` torch.compile's share of the bytes it would hold.

    With ``reversible`` the network is the RevNet of about the same size and accuracy.
    """

    name: str
    norm: str
    memory: str
    budget: float | None = None
    reversible: bool = False

    def build(self, setup: Setup) -> nn.Module:
        """Return the network of a setup, or its reversible twin; ConfigError for what it does not have."""
        return (setup.reversible_twin() if self.reversible else setup).build(self.norm, self.memory)

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return what computes the logits: the model, or a compiled one."""
        if self.budget is None:
            return model
        return compile_network(model, self.budget, fullgraph=True, dynamic=False)


EAGER = (
    Strategy(BASELINE, "standard", "plain"),
    Strategy("std-BN checkpointed", "standard", "checkpoint"),
    Strategy("iABN plain", "inplace", "plain"),
    Strategy("iABN", "inplace", "auto"),
    Strategy("iABN checkpointed", "inplace", "checkpoint"),
    Strategy("iABN unwound", "inplace", "unwind"),
    Strategy("iABN unwound, 3x3 redone", "inplace", "unwind_3x3"),
    Strategy(FUSED, "inplace", "fused"),
    Strategy("RevNet stored", "standard", "plain", reversible=True),
    Strategy("RevNet", "standard", "auto", reversible=True),
    Strategy("RevNet, iABN", "inplace", "auto", reversible=True),
)


def all_strategies(budgets: Sequence[float]) -> list[Strategy]:
    """Return the eager strategies, and torch.compile over the standard and the in-place norm at each budget."""
    compiled = [
        Strategy(f"compiled {name} {budget:g}", norm, memory, budget)
        for name, norm, memory in (("std-BN", "standard", "plain"), ("iABN", "inplace", "auto"))
        for budget in budgets
    ]
    return [*EAGER, *compiled]


def choose_strategies(
    strategies: Sequence[Strategy], patterns: Sequence[str], dtype: str = "float32"
) -> list[Strategy]:
    """Return those whose name fits a shell-style pattern, and the baseline; ConfigError for a pattern without any.

    Left out is what makes no difference in the ``dtype``.
    """
    names = [strategy.name for strategy in strategies]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"no strategy is called {pattern!r}; there are {', '.join(names)}")
    wanted = {name for pattern in patterns for name in fnmatch.filter(names, pattern)} | {BASELINE}
    if dtype == "float32" and FUSED in wanted:
        if len(wanted) == 2:
            raise ConfigError(f"{FUSED!r} differs from 'iABN' in half precision only; name the latter, or a --dtype")
        wanted.remove(FUSED)
    return [strategy for strategy in strategies if strategy.name in wanted]


def build_all(strategies: Sequence[Strategy], setup: Setup) -> tuple[dict[Strategy, nn.Module], list[str]]:
    """Return the network in each strategy that it has, and a note about each that it does not have."""
    models: dict[Strategy, nn.Module] = {}
    notes = []
    for strategy in strategies:
        try:
            models[strategy] = strategy.build(setup)
        except ConfigError as error:
            if strategy.name == BASELINE:
                raise
            notes.append(f"not measured: {strategy.name} ({error})")
    return models, notes
