"""Time and bytes of a training step of whole networks, and what takes the time, in variants beside eager std-BN."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup, room_for_compilations, training_step
from zoo.benchmark.results import Case, Results
from zoo.benchmark.strategies import BASELINE, Strategy, build_all, refusals_noted
from zoo.benchmark.time_shares import measure_shares
from zoo.benchmark.timing import Clock, ratios, time_interleaved
from zoo.remat.memory_use import measure_memory

MODES = ("eager", "compiled")
VARIANTS = (
    Strategy(BASELINE, "standard", "plain"),
    Strategy("iABN plain", "inplace", "plain"),
    Strategy("iABN", "inplace", "auto"),
    Strategy("compiled std-BN", "standard", "plain", 1.0),
    Strategy("compiled iABN", "inplace", "auto", 1.0),
)


def measure_networks(results: Results, setups: Sequence[Setup], modes: Sequence[str], rounds: int) -> None:
    """Add time and bytes of each network with each norm in the ``modes``, and of other packages' networks.

    Eager std-BN is always measured, as the baseline. `measure_strategies` says the rest.
    """
    wanted = [variant for variant in VARIANTS if ("eager" if variant.budget is None else "compiled") in modes]
    baseline = VARIANTS[0]
    for setup in setups:
        measure_strategies(results, setup, wanted if baseline in wanted else [baseline, *wanted], rounds, _peers(setup))


def measure_strategies(
    results: Results,
    setup: Setup,
    strategies: Sequence[Strategy],
    rounds: int,
    peers: Mapping[str, nn.Module] | None = None,
) -> None:
    """Add the bytes of each strategy that the network has, then in a loop of its own the time of a step.

    Both stand beside their ratio to the `BASELINE`, which has to be among the ``strategies``. Where a step is not
    compiled, steps that are not timed add which share of the time each kind of operation takes. With 0 rounds no times
    are taken. ``peers`` are networks of other packages that are measured too, by their names. What torch refuses to
    compile, or to run in a strategy, is noted and left out.
    """
    built = build_all(results, strategies, setup)
    models = {**{strategy.name: model for strategy, model in built.items()}, **(peers or {})}
    prepared = {strategy.name: strategy.prepare(model) for strategy, model in built.items()}
    calls: dict[str, Callable[[Tensor], Tensor]] = {**models, **prepared}
    forwards = {name: setup.forward_of(call) for name, call in calls.items()}
    with room_for_compilations():
        memory = {}
        for name, model in models.items():
            print(f"{setup.case.subject}: bytes of {name}", file=sys.stderr, flush=True)
            with refusals_noted(results, setup, name):
                memory[name] = measure_memory(forwards[name], model.parameters())
        models = {name: models[name] for name in memory}
        for name, measured in memory.items():
            results.add(setup.case, name, "held", "MB", [measured.held / 1e6])
            results.add(setup.case, name, "held ratio", "1", [measured.held / memory[BASELINE].held])
            results.add(setup.case, name, "peak", "MB", [measured.peak / 1e6])
            results.add(setup.case, name, "peak ratio", "1", [measured.peak / memory[BASELINE].peak])
        if rounds > 0:
            print(f"{setup.case.subject}: times", file=sys.stderr, flush=True)
            add_times(results, setup.case, forwards, models, BASELINE, rounds)
            compiled = {strategy.name for strategy in strategies if strategy.budget is not None}
            _add_shares(results, setup.case, forwards, {n: m for n, m in models.items() if n not in compiled})


def add_times(
    results: Results,
    case: Case,
    forwards: Mapping[str, Callable[[], Tensor]],
    models: Mapping[str, nn.Module],
    baseline: str,
    rounds: int,
) -> None:
    """Add the time of a training step of each of the ``models``, and its ratio to that of the ``baseline``.

    ``forwards`` compute their losses, by the same names; ``rounds`` is how often each step is timed, at least once.
    """
    steps = {name: training_step(forwards[name], model) for name, model in models.items()}
    seconds = time_interleaved(steps, Clock(results.device), rounds=rounds, warmup=1)
    for name, values in seconds.items():
        results.add(case, name, "step", "ms", [1e3 * value for value in values])
        results.add(case, name, "step ratio", "1", ratios(values, seconds[baseline]))


def _add_shares(
    results: Results, case: Case, forwards: Mapping[str, Callable[[], Tensor]], models: Mapping[str, nn.Module]
) -> None:
    """Add which share of the time of a step each kind of operation takes, in rows of their own."""
    of_time = replace(case, subject=f"{case.subject}, share of time")
    for name, model in models.items():
        shares = measure_shares(forwards[name], model.parameters(), results.device)
        for kind, share in shares.items():
            results.add(of_time, name, kind, "%", [100 * share])


def _peers(setup: Setup) -> dict[str, nn.Module]:
    """Return the networks of this name that torchvision and timm have, if it is one of a shape that they share."""
    if setup.structure is not None or setup.input_3x3:
        return {}
    builders: dict[str, Callable[[], nn.Module]] = {}
    models = import_module("torchvision.models")
    if setup.arch in models.list_models():
        builders["torchvision"] = lambda: models.get_model(setup.arch, weights=None)
    if find_spec("timm") is not None and (timm := import_module("timm")).is_model(setup.arch):
        builders["timm"] = lambda: timm.create_model(setup.arch)
    return {f"{package} eager": setup.place(build()) for package, build in builders.items()}
