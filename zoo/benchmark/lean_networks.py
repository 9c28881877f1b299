"""Bit-exactness, memory and step time of `zoo.lean` on networks of this and other packages."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.model import add_times
from zoo.benchmark.network_setup import Setup, loss_of_any, room_for_compilations
from zoo.benchmark.results import Case, Results, describe_error
from zoo.benchmark.strategies import EAGER, compile_with_budget
from zoo.models.external import iter_tensors
from zoo.remat import Rematerializer, inductor_options
from zoo.remat.budget import Decision
from zoo.remat.lean import lean
from zoo.remat.memory_use import clear_gradients, measure_memory
from zoo.torch_internals import TorchDispatchMode

PLAIN, LEAN, CAPTURED, INDUCTOR = "plain", "lean", "lean captured", "Inductor, lean rule"
SEED = 0
WORST = 20
OVERHEAD_ROUNDS = 51


def measure_lean_network(
    results: Results,
    setup: Setup,
    *,
    rounds: int,
    budget: Any = None,
    max_bytes: int | None = None,
    capture: bool = False,
    compiled_budgets: Sequence[float] = (),
) -> str | None:
    """Add held memory, peak memory and step time of a network, lean and plain; return what holds most when it is lean.

    A network that cannot be built or trained plainly is noted and skipped. If outputs, gradients or buffers are not
    bitwise equal, "same bits" is 0 and a note says whether plain training is deterministic. On a GPU, bits are compared
    with deterministic algorithms; bytes and times are those of torch's default.

    Args:
    - `setup`: the network; networks of this package use standard batch norm.
    - `rounds`: timed steps; 0 measures memory only.
    - `budget`: argument of `zoo.lean`.
    - `capture`: also measure captured lean training, and Inductor with the same rule.
    - `compiled_budgets`: also measure Inductor with torch's partitioner and these activation memory budgets, and with
      the lean rule and those of them that are below 1.
    - `max_bytes`: networks whose plain training is predicted to need more are noted and skipped. A network that
      cannot run on the meta device is measured.
    """
    name = setup.spec.arch
    try:
        if max_bytes is not None and (needed := _predicted_bytes(setup)) > max_bytes:
            results.note(f"not measured: {name} (training takes {needed:,} bytes, more than {max_bytes:,})")
            return None
        plain, images = _new(setup)
        with _deterministic(images.device):
            first = step_of(plain, images)
        plain, _ = _new(setup)
    except Exception as error:  # other packages may raise anything
        results.note(f"not measured: {name} ({describe_error(error)})")
        return None
    case = replace(setup.case, shape=tuple(images.shape))
    models: dict[str, Any] = {PLAIN: plain, LEAN: lean(copy.deepcopy(plain), budget)}
    if capture:
        models[CAPTURED] = lean(copy.deepcopy(plain), budget, capture=True)
        models[INDUCTOR] = torch.compile(copy.deepcopy(plain), options=inductor_options(budget))
    for share in compiled_budgets:
        models[f"Inductor, budget {share:g}"] = compile_with_budget(copy.deepcopy(plain), share)
        if share < 1:
            options = inductor_options(share)
            models[f"{INDUCTOR}, budget {share:g}"] = torch.compile(copy.deepcopy(plain), options=options)
    with room_for_compilations():
        return _measure(results, case, models, images, first, rounds, budget)


def _measure(
    results: Results,
    case: Case,
    models: dict[str, Any],
    images: Tensor,
    first: Sequence[Tensor],
    rounds: int,
    budget: Any,
) -> str | None:
    """Add bits, memory and time of a network; ``first`` is the first step of plain training."""
    name, plain = case.subject, models[PLAIN]
    for provider in [*models][1:]:
        try:
            begin = time.process_time()
            is_exact = provider in (LEAN, CAPTURED)  # the kernels of Inductor are others
            if is_exact:
                with _deterministic(images.device):
                    is_same = _are_equal(first, step_of(models[provider], images))
            else:
                _forward(models[provider], images)().backward()
        except Exception as error:
            results.add(case, provider, "trains", "1", [0.0])
            results.note(f"{name}, {provider}, fails: {describe_error(error)}")
            del models[provider]
            continue
        results.add(case, provider, "trains", "1", [1.0])
        if provider != LEAN:
            results.add(case, provider, "first step", "s of CPU time", [time.process_time() - begin])
        if is_exact:
            results.add(case, provider, "same bits", "1", [float(is_same)])
            if not is_same:
                with _deterministic(images.device):
                    repeats = _are_equal(first, step_of(copy.deepcopy(plain), images))
                why = f"plain training is {'' if repeats else 'not '}deterministic"
                results.note(f"{name}, {provider}: the bits differ; {why}")
    if len(models) == 1:
        return None
    try:
        _add_costs(results, case, models, images, rounds)
        return _largest_holder(plain, images, budget)
    except Exception as error:
        results.note(f"{name}: bytes and times not measured ({describe_error(error)})")
        return None


def _largest_holder(model: nn.Module, images: Tensor, budget: Any) -> str | None:
    """Return the operation whose outputs are most of the bytes that lean training holds, with its share of them."""
    decisions: list[Decision] = []
    with Rematerializer(budget, parameters=[*model.parameters(), *model.buffers()], log=decisions):
        outputs = model(images)
    del outputs
    held: Counter[str] = Counter()
    for decision in decisions:
        held[decision.made_by] += decision.lean_bytes
    if not held.total():
        return None
    operation, most = held.most_common(1)[0]
    return f"{operation or 'inputs'} {most / held.total():.0%}"


def summarize_networks(results: Results, holders: Mapping[str, str | None]) -> None:
    """Add the numbers of networks that train lean and with the same bits, and quantiles of their memory and time.

    A note names the `WORST` networks, which hold most of plain training's bytes, with their ``holders``, which
    `measure_lean_network` returned.
    """
    for provider in (LEAN, CAPTURED, INDUCTOR):
        _summarize(results, provider)
    ratios = {
        each["subject"]: each["median"]
        for each in results.records
        if (each["provider"], each["metric"]) == (LEAN, "held ratio") and each["subject"] in holders
    }
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)[:WORST]
    if len(ratios) > 1:
        told = ", ".join(f"{name} {ratios[name]:.2f} ({holders[name]})" for name in worst)
        results.note(
            f"held ratio of the {len(worst)} that hold most, and the operation whose outputs are most of it: {told}"
        )


def _summarize(results: Results, provider: str) -> None:
    def values(metric: str) -> list[float]:
        wanted = provider, metric
        return [each["median"] for each in results.records if (each["provider"], each["metric"]) == wanted]

    trained, is_same = values("trains"), values("same bits")
    if not trained:
        return
    case = Case(f"all {len(trained)} networks", (), "float32", "contiguous")
    results.add(case, provider, "networks that train", "1", [int(sum(trained))])
    if provider != INDUCTOR:
        results.add(case, provider, "with the same bits", "1", [int(sum(is_same))])
    for metric, wanted in (
        ("held ratio", ("median", "90th percentile", "worst")),
        ("peak without gradients ratio", ("median", "worst")),
        ("step ratio", ("median", "worst")),
    ):
        if ratios := values(metric):
            ninth_tenth = quantiles(ratios, n=10, method="inclusive")[-1] if len(ratios) > 1 else ratios[0]
            found = {"median": median(ratios), "90th percentile": ninth_tenth, "worst": max(ratios)}
            for which in wanted:
                results.add(case, provider, f"{metric}, {which}", "1", [found[which]])


def _predicted_bytes(setup: Setup) -> int:
    try:
        return MemoryPrediction(setup, EAGER[0]).bytes_for(setup.batch).total
    except Exception:  # other packages may raise anything on the meta device
        return 0


class _DoesNothing(TorchDispatchMode):
    """A dispatch mode that does nothing, to measure the overhead of any dispatch mode."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class _Counting(_DoesNothing):
    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return super().__torch_dispatch__(operation, types, args, kwargs)


def measure_overhead(results: Results) -> None:
    """Add the overhead of Python per operation, in a network whose tensors are too small to matter.

    It is the difference between the median times of `OVERHEAD_ROUNDS` interleaved steps with and without a
    rematerializer that records every operation. For comparison, also adds that of a dispatch mode that does nothing.
    """
    layers = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(30)]
    model, images = nn.Sequential(*layers).to(results.device), torch.randn(2, 4, 2, 2, device=results.device)
    modes: dict[str, Callable[[], Any]] = {
        PLAIN: nullcontext,
        "mode that does nothing": _DoesNothing,
        LEAN: lambda: Rematerializer(smallest_bytes=0, parameters=model.parameters()),
    }
    with _Counting() as counting:
        model(images)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for _ in range(OVERHEAD_ROUNDS):
        for name, mode in modes.items():
            begin = time.process_time()
            with mode():
                loss = model(images).sum()
            middle = time.process_time()
            loss.backward()
            times[name].append((middle - begin, time.process_time() - middle))
    case = Case(f"a network of {counting.count} small operations", tuple(images.shape), "float32", "contiguous")
    for name in [*modes][1:]:
        for index, phase in enumerate(("forward", "backward")):
            extra = median(each[index] for each in times[name]) - median(each[index] for each in times[PLAIN])
            results.add(case, name, f"overhead per operation, {phase}", "us", [extra / counting.count * 1e6])


def _add_costs(results: Results, case: Case, models: dict[str, nn.Module], images: Tensor, rounds: int) -> None:
    forwards = {name: _forward(model, images) for name, model in models.items()}
    for name in forwards.keys() - {PLAIN, LEAN}:  # compile graphs for images without gradients
        forwards[name]().backward()
    memory = {name: measure_memory(forwards[name], model.parameters()) for name, model in models.items()}
    for name, measured in memory.items():
        for metric, value, reference in (
            ("held", measured.held, memory[PLAIN].held),
            ("peak without gradients", measured.peak_without_gradients, memory[PLAIN].peak_without_gradients),
        ):
            results.add(case, name, metric, "MB", [value / 1e6])
            results.add(case, name, f"{metric} ratio", "1", [value / reference])
    if rounds > 0:
        add_times(results, case, forwards, models, PLAIN, rounds)


def _new(setup: Setup) -> tuple[nn.Module, Tensor]:
    """Return the network in training mode and random images, the same at each call."""
    torch.manual_seed(SEED)
    return EAGER[0].build(setup), setup.random_images()


def step_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return outputs, gradients and buffers of a step, whose random numbers are the same at each call."""
    torch.manual_seed(SEED)
    images = images.clone().requires_grad_()
    outputs = list(iter_tensors(model(images)))
    values = [output.detach().clone() for output in outputs]
    loss_of_any(outputs).backward()
    gradients = [each.grad.clone() for each in (images, *model.parameters()) if each.grad is not None]
    clear_gradients(list(model.parameters()))
    return [*values, *gradients, *(buffer.clone() for buffer in model.buffers())]


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    same_length = len(first) == len(second)
    return same_length and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(first, second, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Let operations on a GPU use deterministic algorithms where they have one."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch calls cuBLAS nondeterministic
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fills


def _forward(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    return lambda: loss_of_any(list(iter_tensors(model(images))))
