"""Time, its breakdown by kind of operation, and memory of a training step of whole networks, relative to std-BN."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zoo.benchmark.network_setup import Setup, graph_step, room_for_compilations, training_step
from zoo.benchmark.results import Case, Results
from zoo.benchmark.strategies import BASELINE, Strategy, build_all, refusals_noted
from zoo.benchmark.timing import Clock, Step, ratios, time_interleaved
from zoo.remat.memory_use import clear_gradients, measure_memory

PROFILED_STEPS = 2
OTHER_KIND = "rest"
OPERATION_KINDS = {  # kinds of operations, by the names of operations in torch's profiler
    "convolution": re.compile(r"conv(olution|[123]d|_depthwise)", re.IGNORECASE),
    "norm and activation": re.compile(r"batch_?norm|abn|elu|silu|swish|sigmoid|tanh|mish", re.IGNORECASE),
    "pooling": re.compile("pool", re.IGNORECASE),
    "concatenation": re.compile(r"aten::cat$"),
    "sums": re.compile(r"aten::(add|sub)_?$"),
}
VARIANTS = (
    Strategy(BASELINE, "standard", "plain"),
    Strategy("iABN plain", "inplace", "plain"),
    Strategy("iABN", "inplace", "auto"),
    Strategy("compiled std-BN", "standard", "plain", 1.0),
    Strategy("compiled iABN", "inplace", "auto", 1.0),
)


def measure_networks(results: Results, setups: Sequence[Setup], modes: Sequence[str], rounds: int) -> None:
    """Add time and memory of each network with each norm in the ``modes``, and of other packages' networks.

    The baseline, eager std-BN, is always measured. See `measure_strategies`.
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
    """Add memory and step time of each strategy that the network supports, with their ratios to the `BASELINE`.

    Memory and time are measured in separate loops; eager steps also get a breakdown of their time by kind of
    operation, from further steps. Strategies that torch cannot compile or run are noted and skipped.

    Args:
    - `strategies`: must include the `BASELINE`.
    - `rounds`: interleaved timings of each step; 0 measures memory only.
    - `peers`: networks of other packages that are measured too, by name.
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
            with refusals_noted(results, setup.case.subject, name):
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
    """Add the step time of each of the ``models`` and its ratio to that of the ``baseline``.

    On a GPU, the steps are also replayed from CUDA graphs, whose time is that of the kernels without the host's work.

    Args:
    - `forwards`: compute the losses, by the names of the models.
    - `rounds`: interleaved timings of each step, at least one.
    """
    steps = {name: training_step(forwards[name], model) for name, model in models.items()}
    _add_interleaved(results, case, "step", steps, baseline, rounds)
    if results.device.type == "cuda":
        graphs = {}
        for name, model in models.items():
            with refusals_noted(results, f"{case.subject}, CUDA graph", name, baseline):
                graphs[name] = graph_step(forwards[name], model)
        _add_interleaved(results, case, "step as CUDA graph", graphs, baseline, rounds)


def _add_interleaved(
    results: Results, case: Case, metric: str, steps: Mapping[str, Step], baseline: str, rounds: int
) -> None:
    seconds = time_interleaved(steps, Clock(results.device), rounds=rounds, warmup=1)
    for name, values in seconds.items():
        results.add(case, name, metric, "ms", [1e3 * value for value in values])
        results.add(case, name, f"{metric} ratio", "1", ratios(values, seconds[baseline]))


def _add_shares(
    results: Results, case: Case, forwards: Mapping[str, Callable[[], Tensor]], models: Mapping[str, nn.Module]
) -> None:
    """Add the share of the step time of each kind of operation, in separate rows."""
    of_time = replace(case, subject=f"{case.subject}, share of time")
    for name, model in models.items():
        shares = measure_shares(forwards[name], model.parameters(), results.device)
        for kind, share in shares.items():
            results.add(of_time, name, kind, "%", [100 * share])


def measure_shares(
    forward: Callable[[], Tensor], parameters: Iterable[Tensor], device: torch.device
) -> dict[str, float]:
    """Run training steps in torch's profiler and return the fraction of operator time per kind, `OTHER_KIND` included.

    Time is that of each operation without the operations it calls: of CPU cores, or of kernels on a GPU. The
    parameters' gradients are None afterwards.

    Args:
    - `forward`: computes the loss, a scalar; it has run before, so that nothing is compiled here.
    """
    parameters, on_gpu = list(parameters), device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # torch 2.11 warns without acc_events
        for _ in range(PROFILED_STEPS):
            forward().backward()
            clear_gradients(parameters)
    times = dict.fromkeys((*OPERATION_KINDS, OTHER_KIND), 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, pattern in OPERATION_KINDS.items() if pattern.search(event.key)), OTHER_KIND)
        times[kind] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}


def _peers(setup: Setup) -> dict[str, nn.Module]:
    """Return the networks of the same name in torchvision and timm; none if the setup changes the architecture."""
    if setup.structure is not None or setup.spec.options:
        return {}
    builders: dict[str, Callable[[], nn.Module]] = {}
    models = import_module("torchvision.models")
    if setup.spec.arch in models.list_models():
        builders["torchvision"] = lambda: models.get_model(setup.spec.arch, weights=None)
    if find_spec("timm") is not None and (timm := import_module("timm")).is_model(setup.spec.arch):
        builders["timm"] = lambda: timm.create_model(setup.spec.arch)
    return {f"{package} eager": setup.place(build()) for package, build in builders.items()}
