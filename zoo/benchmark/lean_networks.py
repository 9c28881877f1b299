"""Bit-exactness, memory and step time of `zoo.lean` on networks of this and other packages."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.model import add_times
from zoo.benchmark.network_setup import Setup, allow_many_compilations, loss_of_any
from zoo.benchmark.results import Case, Results, describe_error
from zoo.benchmark.strategies import EAGER, compile_with_budget
from zoo.engine._precision import DTYPES, autocast
from zoo.memory.allocations import measure_memory
from zoo.memory.block_checkpointing import blocks_of, checkpoint_blocks
from zoo.memory.check import compare
from zoo.memory.report import memory_report
from zoo.memory.trial import default_loss
from zoo.models.external import iter_tensors
from zoo.remat import inductor_options
from zoo.remat._lean import lean

ForwardOf = Callable[..., Callable[[], Tensor]]  # a model, and its loss or None -> computes the loss
PLAIN, LEAN, CHECKPOINTS, INDUCTOR = "plain", "lean", "checkpointed blocks", "Inductor, lean rule"
SEED = 0
WARMUP = 2  # steps before the first timing


def measure_lean_network(
    results: Results,
    setup: Setup,
    *,
    rounds: int,
    max_bytes: int | None = None,
    budgets: Sequence[float] = (),
    compiled_budgets: Sequence[float] = (),
    reports: bool = False,
) -> None:
    """Measure held memory, peak memory and step time of a network, lean and plain.

    Notes and skips a network that cannot be built or trained plainly. If outputs, gradients or buffers differ in a bit,
    "same bits" is 0 and a note says whether plain training is deterministic. On a GPU, bits are compared with
    deterministic algorithms; bytes and times are measured with torch's defaults.

    Args:
    - `setup`: the network; networks of this package use standard batch norm.
    - `rounds`: timed steps; 0 measures memory only.
    - `budgets`: also measure lean training within these fractions, and checkpoints of the network's blocks.
    - `compiled_budgets`: also measure Inductor with these activation memory budgets, both with torch's partitioner and
      with the lean rule. A budget of 1 recomputes no convolutions and matrix products.
    - `reports`: also compare the peaks of `zoo.memory_report` with the allocator's.
    - `max_bytes`: note and skip networks whose plain training is predicted to need more. A network that cannot run on
      the meta device is always measured.
    """
    name = setup.spec.arch
    try:
        if max_bytes is not None and (needed := _predicted_bytes(setup)) > max_bytes:
            results.note(f"not measured: {name} (training takes {needed:,} bytes, more than {max_bytes:,})")
            return
        torch.manual_seed(SEED)
        plain, images = EAGER[0].build(setup), setup.random_images()
        forward_of = partial(_forward, setup, images)
        forward_of(copy.deepcopy(plain))().backward()
    except Exception as error:  # other packages may raise anything
        results.note(f"not measured: {name} ({describe_error(error)})")
        return
    case = replace(setup.case, shape=tuple(images.shape))
    models: dict[str, Any] = {PLAIN: plain, LEAN: lean(copy.deepcopy(plain))}
    for share in budgets:
        models[f"{LEAN}, budget {share:g}"] = lean(copy.deepcopy(plain), float(share))
    if budgets and blocks_of(plain):
        models[CHECKPOINTS] = checkpoint_blocks(copy.deepcopy(plain))
    for share in compiled_budgets:
        models[f"Inductor, budget {share:g}"] = compile_with_budget(copy.deepcopy(plain), share)
        name_of_rule = INDUCTOR if share == 1 else f"{INDUCTOR}, budget {share:g}"
        options = inductor_options(float(share))
        models[name_of_rule] = torch.compile(copy.deepcopy(plain), options=options)
    with allow_many_compilations():
        _measure(results, case, models, images, forward_of, rounds, reports)


def _measure(
    results: Results,
    case: Case,
    models: dict[str, Any],
    images: Tensor,
    forward_of: ForwardOf,
    rounds: int,
    reports: bool,
) -> None:
    """Measure bits, memory and time of a network."""
    name = case.subject
    for provider in [*models][1:]:
        try:
            begin = time.process_time()
            is_exact = provider.startswith(LEAN)  # Inductor uses other kernels
            if is_exact:
                variant = partial(_replace, models[provider])
                with _use_deterministic_algorithms(images.device), autocast(images.device, DTYPES[case.dtype]):
                    found = compare(models[PLAIN], images.clone().requires_grad_(), variant)
            else:
                forward_of(models[provider])().backward()
        except Exception as error:
            results.add(case, provider, "trains", "1", [0.0])
            results.note(f"{name}, {provider}, fails: {describe_error(error)}")
            del models[provider]
            continue
        results.add(case, provider, "trains", "1", [1.0])
        if not is_exact and provider != CHECKPOINTS:
            results.add(case, provider, "first step", "s of CPU time", [time.process_time() - begin])
        if is_exact:
            results.add(case, provider, "same bits", "1", [float(found.same is True)])
            if found.same is not True:
                results.note(f"{name}, {provider}: {found.verdict} ({found.difference})")
    if len(models) == 1:
        return
    try:
        _add_costs(results, case, models, forward_of, rounds)
        if reports:
            _add_reported_peaks(results, case, models, images, forward_of)
    except Exception as error:
        results.note(f"{name}: bytes and times not measured ({describe_error(error)})")


def _predicted_bytes(setup: Setup) -> int:
    try:
        return MemoryPrediction(setup, EAGER[0]).bytes_for(setup.batch)
    except Exception:  # other packages may raise anything on the meta device
        return 0


def _add_costs(results: Results, case: Case, models: dict[str, nn.Module], forward_of: ForwardOf, rounds: int) -> None:
    forwards = {name: forward_of(model) for name, model in models.items()}
    # Graphs were compiled and plans were made for these images.
    memory = {name: measure_memory(forwards[name], model.parameters(), warmup=WARMUP) for name, model in models.items()}
    for name, measured in memory.items():
        for metric, value, reference in (
            ("held", measured.held, memory[PLAIN].held),
            ("peak without gradients", measured.peak_without_gradients, memory[PLAIN].peak_without_gradients),
        ):
            results.add(case, name, metric, "MB", [value / 1e6])
            results.add(case, name, f"{metric} ratio", "1", [value / reference])
    if rounds > 0:
        add_times(results, case, forwards, models, PLAIN, rounds)


def _add_reported_peaks(
    results: Results, case: Case, models: dict[str, nn.Module], images: Tensor, forward_of: ForwardOf
) -> None:
    """Measure the peak of a step, including existing tensors, and the report's peak relative to it."""
    report = memory_report(models[PLAIN], images)
    for name, reported in ((PLAIN, report.plain_peak), (LEAN, report.peak)):
        forward = forward_of(models[name], default_loss)
        existing = sum(each.nbytes for each in (*models[name].parameters(), *models[name].buffers(), images))
        measured = existing + measure_memory(forward, models[name].parameters()).peak
        results.add(case, name, "whole peak", "MB", [measured / 1e6])
        if reported is not None:
            results.add(case, name, "reported peak ratio", "1", [reported / measured])


def _replace(model: nn.Module, _: nn.Module) -> nn.Module:
    return model


@contextmanager
def _use_deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Makes operations on a GPU use deterministic algorithms where they exist."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise torch treats cuBLAS as nondeterministic
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fills


def _forward(
    setup: Setup, images: Tensor, model: nn.Module, loss: Callable[[Any], Tensor] | None = None
) -> Callable[[], Tensor]:
    loss = loss or (lambda output: loss_of_any(list(iter_tensors(output))))

    def forward() -> Tensor:
        with autocast(setup.device, DTYPES[setup.dtype]):
            output = model(images)
        return loss(output)

    return forward
