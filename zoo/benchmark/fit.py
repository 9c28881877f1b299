"""The largest batch that fits, foretold: a training step on the meta device takes no memory, but counts it.

Only the scratch memory of convolutions is measured, one by one on few images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from zoo.benchmark.held import measure_memory
from zoo.benchmark.networks import Setup
from zoo.benchmark.schema import Results
from zoo.benchmark.scratch import Scratch, ScratchLog
from zoo.benchmark.storages import count_memory
from zoo.benchmark.strategies import Strategy, build_all
from zoo.errors import ConfigError, VerificationError
from zoo.ops.abn import backend, reference

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TOLERANCE = 0.05


class Need(NamedTuple):
    """Bytes of training: always there (parameters, buffers, momentum), and above that at the peak of a step."""

    constant: int
    step: int

    @property
    def total(self) -> int:
        """The most that there is at once."""
        return self.constant + self.step


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` says ("16GiB", "500 MB"); ConfigError where it says none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; write it as 16GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


class OnPaper:
    """A network in one strategy on the meta device: what training it with SGD and momentum needs.

    ConfigError for a strategy that the network does not have.
    """

    def __init__(self, setup: Setup, strategy: Strategy) -> None:
        self._setup, self._strategy = replace(setup, device=torch.device("meta")), strategy
        self._model = strategy.build(self._setup)
        self._scratch = Scratch(setup.device)
        # Tensors without numbers are treated as the kernels of the real device would treat theirs.
        self._reference = backend.kernels_for(torch.empty(0, device=setup.device)) is reference

    def need(self, batch: int) -> Need:
        """Return what a step of ``batch`` images needs."""
        setup = replace(self._setup, batch=batch)
        with backend.forced("reference") if self._reference else nullcontext():
            forward, log = setup.forward_of(self._model), ScratchLog(self._scratch)
            step = count_memory(forward, self._model.parameters(), log)
        return Need(constant_bytes(self._model, setup), step.peak)

    def largest_batch(self, memory_bytes: int) -> tuple[int, Need]:
        """Return the largest batch whose need is at most ``memory_bytes``, and that need.

        The need grows with the batch, by parts in a straight line: from two batches the next guess follows.
        Where not even 2 images fit the batch is 0, and the need that of 2: fewer cannot be normed.
        """
        fits, need = 2, self.need(2)
        if need.total > memory_bytes:
            return 0, need
        batch, too_large = 4, None
        while too_large is None or too_large - fits > 1:
            found = self.need(batch)
            per_image = (found.total - need.total) / (batch - fits)
            if found.total <= memory_bytes:
                fits, need = batch, found
            else:
                too_large = batch
            guess = fits + int((memory_bytes - need.total) / per_image)
            batch = max(fits + 1, guess if too_large is None else min(guess, too_large - 1))
        return fits, need


def constant_bytes(model: nn.Module, setup: Setup) -> int:
    """Return the bytes of parameters, their momentum, buffers and images."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return 2 * parameters + buffers + setup.batch * 3 * setup.size**2 * 4


def report_fits(results: Results, setup: Setup, strategies: Sequence[Strategy], memory_bytes: int) -> bool:
    """Add, for each strategy that the network has, the largest batch and what it needs; return whether any fits."""
    case, largest = replace(setup.case, shape=(3, setup.size, setup.size)), 0
    for strategy in available(results, setup, strategies):
        batch, need = OnPaper(setup, strategy).largest_batch(memory_bytes)
        largest = max(largest, batch)
        results.add(case, strategy.name, "largest batch", "images", [batch])
        if batch == 0:
            results.note(
                f"does not fit: {strategy.name} needs {need.total:,} bytes for a batch of 2 at {setup.size} px, there "
                f"are {memory_bytes:,}"
            )
            continue
        results.add(case, strategy.name, "needed", "MB", [need.total / 1e6])
        results.add(case, strategy.name, "of it constant", "MB", [need.constant / 1e6])
    return largest > 0


def check_predictions(results: Results, setup: Setup, strategies: Sequence[Strategy], batches: Sequence[int]) -> None:
    """Add what each strategy was predicted to need, and what it takes; VerificationError above 5 % of difference."""
    wrong = []
    for strategy in available(results, setup, strategies):
        for batch in batches:
            here = replace(setup, batch=batch)
            need, model = OnPaper(here, strategy).need(batch), strategy.build(here)
            taken = need.constant + measure_memory(here.forward_of(model), model.parameters()).peak
            difference = need.total / taken - 1
            results.add(here.case, strategy.name, "predicted", "MB", [need.total / 1e6])
            results.add(here.case, strategy.name, "taken", "MB", [taken / 1e6])
            results.add(here.case, strategy.name, "difference", "%", [100 * difference])
            if abs(difference) > TOLERANCE:
                wrong.append(f"{strategy.name} at batch {batch}: {100 * difference:+.1f} %")
    if wrong:
        raise VerificationError(f"predictions are off by more than {100 * TOLERANCE:.0f} %: {'; '.join(wrong)}")


def available(results: Results, setup: Setup, strategies: Sequence[Strategy]) -> list[Strategy]:
    """Return the strategies that the network has, and note the others, as time against bytes does.

    ConfigError where even the baseline cannot be built. On the meta device that takes neither time nor memory.
    """
    models, notes = build_all(strategies, replace(setup, device=torch.device("meta")))
    for note in notes:
        results.note(note)
    return list(models)
