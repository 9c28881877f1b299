"""What each way to save memory costs in time, for one network: peak and held bytes against the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.benchmark.model import measure_all
from zoo.benchmark.networks import Setup
from zoo.benchmark.schema import Results
from zoo.benchmark.strategies import Strategy, build_all


def measure_front(results: Results, setup: Setup, strategies: Sequence[Strategy], rounds: int) -> None:
    """Add bytes and time of each of the ``strategies`` that the network has, the baseline among them."""
    models, notes = build_all(strategies, setup)
    for note in notes:
        results.note(note)
    runnable = {strategy.name: (model, strategy.prepare(model)) for strategy, model in models.items()}
    measure_all(results, setup, runnable, rounds)
