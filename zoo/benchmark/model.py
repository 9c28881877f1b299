"""Time and memory of a training step of whole networks, relative to std-BN."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup, allow_many_compilations, graph_step
from zoo.benchmark.plot_style import Line, Panel, draw_panels
from zoo.benchmark.results import Case, Results
from zoo.benchmark.strategies import BASELINE, Strategy, build_all, note_refusals
from zoo.memory.allocations import measure_memory
from zoo.memory.timing import Clock, TimedStep, ratios, time_interleaved, training_step
from zoo.tables import counted

CHECKPOINTED = "checkpointed"  # in the names of strategies


def measure_strategies(results: Results, setup: Setup, strategies: Sequence[Strategy], rounds: int) -> None:
    """Measure memory and step time of each strategy that the network supports, and their ratios to the `BASELINE`.

    Measures memory and time in separate loops. Notes and skips strategies that torch cannot compile or run.

    Args:
    - `strategies`: must include the `BASELINE`.
    - `rounds`: interleaved timings of each step; 0 measures memory only.
    """
    built = build_all(results, strategies, setup)
    models = {strategy.name: model for strategy, model in built.items()}
    prepared = {strategy.name: strategy.prepare(model) for strategy, model in built.items()}
    forwards = {name: setup.forward_of(call) for name, call in prepared.items()}
    with allow_many_compilations():
        memory = {}
        for name, model in models.items():
            print(f"{setup.case.subject}: bytes of {name}", file=sys.stderr, flush=True)
            with note_refusals(results, setup.case.subject, name):
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


def add_times(
    results: Results,
    case: Case,
    forwards: Mapping[str, Callable[[], Tensor]],
    models: Mapping[str, nn.Module],
    baseline: str,
    rounds: int,
) -> None:
    """Measure the step time of each of the ``models`` and its ratio to the ``baseline``.

    On a GPU, also replays the steps from CUDA graphs, which take only the time of the kernels. Steps with checkpoints
    are left out: they restore the state of the random number generator, which no graph can capture.

    Args:
    - `forwards`: functions that compute the losses, by the names of the models.
    - `rounds`: interleaved timings of each step, at least one.
    """
    steps = {name: training_step(forwards[name], model) for name, model in models.items()}
    _add_interleaved(results, case, "step", steps, baseline, rounds)
    if results.device.type == "cuda":
        graphs = {}
        for name, model in models.items():
            if CHECKPOINTED in name:
                continue
            with note_refusals(results, f"{case.subject}, CUDA graph", name, baseline):
                graphs[name] = graph_step(forwards[name], model)
        _add_interleaved(results, case, "step as CUDA graph", graphs, baseline, rounds)


def _add_interleaved(
    results: Results, case: Case, metric: str, steps: Mapping[str, TimedStep], baseline: str, rounds: int
) -> None:
    seconds = time_interleaved(steps, Clock(results.device), rounds=rounds, warmup=1)
    for name, values in seconds.items():
        results.add(case, name, metric, "ms", [1e3 * value for value in values])
        results.add(case, name, f"{metric} ratio", "1", ratios(values, seconds[baseline]))


def draw_strategies(content: dict[str, Any]) -> bytes:
    """Return a PNG plot of a benchmark's JSON ``content``, with panels for peak and held memory of each network."""
    panels = [
        Panel(
            subject, f"step time / step time of {BASELINE}", f"{what} / {BASELINE}", lines_of(content, subject, metric)
        )
        for subject in dict.fromkeys(record["subject"] for record in content["records"])
        for metric, what in (("peak", "peak memory of a step"), ("held", "bytes held for backward"))
    ]
    record, machine, threads = content["records"][0], content["machine"], content["settings"]["threads"]
    torch_version = content["versions"]["torch"]
    case = ["x".join(map(str, record["shape"])), record["dtype"], record["layout"]]
    place = [machine["cpu"], f"device {machine['device']}", counted(threads, "thread")]
    return draw_panels(
        f"Time and memory of a training step, {', '.join(case)}\n{', '.join(place)}, torch {torch_version}",
        panels,
    )


def lines_of(content: dict[str, Any], subject: str, metric: str) -> list[Line]:
    """Return a scatter point per strategy, step time against relative ``metric``, grouped by kind."""
    values: dict[str, dict[str, float]] = {}
    for record in content["records"]:
        if record["subject"] == subject:
            values.setdefault(record["provider"], {})[record["metric"]] = record["median"]
    kinds: dict[str, list[str]] = {}
    for provider, medians in values.items():
        if {"step ratio", f"{metric} ratio"} <= medians.keys():
            kinds.setdefault(re.match(r"(compiled )?[^ ,]+", provider)[0], []).append(provider)  # type: ignore[index]
    return [
        Line(kind, [values[name]["step ratio"] for name in names], [values[name][f"{metric} ratio"] for name in names],
             names=[re.sub(r"^(compiled .*) ([\d.]+)$", r"\1, budget \2", name) for name in names])
        for kind, names in kinds.items()
    ]  # fmt: skip
