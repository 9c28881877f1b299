"""Step time and bytes of whole networks: each norm, eager and compiled, and other packages' networks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor, nn

from zoo.benchmark.held import measure_memory
from zoo.benchmark.networks import Setup, room_for_compilations, training_step
from zoo.benchmark.schema import Results
from zoo.benchmark.strategies import BASELINE, Strategy, build_all
from zoo.benchmark.timing import Clock, ratios, time_interleaved

MODES = ("eager", "compiled")
VARIANTS = (
    Strategy(BASELINE, "standard", "plain"),
    Strategy("iABN plain", "inplace", "plain"),
    Strategy("iABN", "inplace", "auto"),
    Strategy("compiled std-BN", "standard", "plain", 1.0),
    Strategy("compiled iABN", "inplace", "auto", 1.0),
)
Runnable = tuple[nn.Module, Callable[[Tensor], Tensor]]


def measure_networks(results: Results, setups: Sequence[Setup], modes: Sequence[str], rounds: int) -> None:
    """Add time and bytes of each network in each of the ``modes``, relative to eager std-BN; no times for 0 rounds."""
    wanted = [variant for variant in VARIANTS if ("eager" if variant.budget is None else "compiled") in modes]
    baseline = VARIANTS[0]
    for setup in setups:
        models, notes = build_all(wanted if baseline in wanted else [baseline, *wanted], setup)
        runnable = {variant.name: (model, variant.prepare(model)) for variant, model in models.items()}
        runnable |= {f"{package} eager": (model, model) for package, model in _peers(setup).items()}
        for note in notes:
            results.note(note)
        measure_all(results, setup, runnable, rounds)


def measure_all(results: Results, setup: Setup, runnable: Mapping[str, Runnable], rounds: int) -> None:
    """Add the bytes of each, then in a loop of its own the time, both beside the ratio to the `BASELINE`."""
    forwards = {name: setup.forward_of(call) for name, (_, call) in runnable.items()}
    with room_for_compilations():
        memory = {}
        for name, (model, _) in runnable.items():
            print(f"{setup.case.subject}: bytes of {name}", file=sys.stderr, flush=True)
            memory[name] = measure_memory(forwards[name], model.parameters())
        for name, measured in memory.items():
            results.add(setup.case, name, "held", "MB", [measured.held / 1e6])
            results.add(setup.case, name, "held ratio", "1", [measured.held / memory[BASELINE].held])
            results.add(setup.case, name, "peak", "MB", [measured.peak / 1e6])
            results.add(setup.case, name, "peak ratio", "1", [measured.peak / memory[BASELINE].peak])
        if rounds > 0:
            print(f"{setup.case.subject}: times", file=sys.stderr, flush=True)
            steps = {name: training_step(forwards[name], model) for name, (model, _) in runnable.items()}
            seconds = time_interleaved(steps, Clock(setup.device), rounds=rounds, warmup=1)
            for name, values in seconds.items():
                results.add(setup.case, name, "step", "ms", [1e3 * value for value in values])
                results.add(setup.case, name, "step ratio", "1", ratios(values, seconds[BASELINE]))


def _peers(setup: Setup) -> dict[str, nn.Module]:
    """Return the networks of this name that installed packages have, unless ours is one of no common shape."""
    if setup.structure is not None or setup.input_3x3:
        return {}
    builders: dict[str, Callable[[], nn.Module]] = {}
    models = import_module("torchvision.models")
    if setup.arch in models.list_models():
        builders["torchvision"] = lambda: models.get_model(setup.arch, weights=None)
    if find_spec("timm") is not None and (timm := import_module("timm")).is_model(setup.arch):
        builders["timm"] = lambda: timm.create_model(setup.arch)
    return {package: setup.place(build()) for package, build in builders.items()}
