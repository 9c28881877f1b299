"""Peak memory and time of whole training steps with their optimizer: plain, lean, and with released gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Case, Results
from zoo.errors import ConfigError
from zoo.memory.allocations import clear_gradients, count_memory, measure_memory
from zoo.memory.release import PER_PARAMETER, release_gradients
from zoo.memory.timing import Clock, TimedStep, ratios, time_interleaved
from zoo.memory.values import bits
from zoo.remat._lean import lean
from zoo.torch_internals.data import tensors_of

PLAIN, LEAN, RELEASED = "plain", "lean", "lean, released gradients"
PLAIN_RELEASED = "plain, released gradients"
SEED = 0
WARMUP = 3  # steps until lean training follows its final plan and the optimizer has its state


@dataclass(frozen=True)
class Step:
    """A training step of a network.

    Args:
    - `model`: the network.
    - `forward`: computes the loss.
    - `optimizer`: its optimizer.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def update(self) -> None:
        """Update the parameters, and set their gradients to None."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        clear_gradients(self.model.parameters())  # the optimizer may lack some parameters

    def run(self, times: int) -> None:
        """Take steps."""
        for _ in range(times):
            self.forward().backward()
            self.update()


def measure_setup(results: Results, setup: Setup, *, optimizer: str, rounds: int) -> None:
    """Measure training steps of a network on random images, as `measure_step` does."""
    torch.manual_seed(SEED)
    model = setup.build("standard", "plain")

    def forward_of(network: nn.Module) -> Callable[[], Tensor]:
        torch.manual_seed(SEED)
        return setup.forward_of(network)

    measure_step(results, setup.case, model, forward_of, optimizer=optimizer, rounds=rounds)


def measure_step(
    results: Results,
    case: Case,
    model: nn.Module,
    forward_of: Callable[[nn.Module], Callable[[], Tensor]],
    *,
    optimizer: str,
    rounds: int,
) -> None:
    """Measure bytes and times of training steps: forward, backward and the step of an optimizer.

    Bytes are measured after `WARMUP` steps. The whole peak includes parameters, buffers and the state of the optimizer,
    but not the images. "same bits" is 1 if all parameters are bit-identical to plain training after the warm-up. On the
    meta device, tensors are counted and nothing is timed.

    Args:
    - `model`: the network; copies of it are trained.
    - `forward_of`: returns a function that computes the loss of a copy.
    - `optimizer`: the name of an optimizer of torch.optim.
    - `rounds`: interleaved timings of each step; 0 measures no times.
    """
    if optimizer not in PER_PARAMETER:
        what = f"{optimizer} does not update each parameter independently"
        raise ConfigError(what, "--optimizer", "give AdamW or SGD")
    is_meta = results.device.type == "meta" or next(model.parameters()).is_meta
    steps = {name: _step(model, forward_of, optimizer, name) for name in (PLAIN, PLAIN_RELEASED, LEAN, RELEASED)}
    peaks = {}
    for step in steps.values():
        torch.manual_seed(SEED)
        step.run(WARMUP)
    for name, step in steps.items():
        if not is_meta:
            results.add(case, name, "same bits", "1", [float(_same(step.model, steps[PLAIN].model))])
    for name, step in steps.items():
        measure = count_memory if is_meta else measure_memory
        found = measure(step.forward, step.model.parameters(), warmup=0, update=step.update)
        peaks[name] = found.peak
        existing = _existing_bytes(step)
        results.add(case, name, "whole peak", "MB", [(existing + found.peak) / 1e6])
        results.add(case, name, "peak above parameters", "MB", [found.peak / 1e6])
        results.add(case, name, "peak above parameters ratio", "1", [found.peak / peaks[PLAIN]])
        if name == PLAIN:
            results.add(case, name, "gradients", "MB", [found.gradients / 1e6])
            results.add(case, name, "parameters and states", "MB", [existing / 1e6])
            gradients = found.gradients
    results.add(case, LEAN, "gradients, share of the peak", "1", [gradients / peaks[LEAN]])
    results.add(case, RELEASED, "saved, share of the gradients", "1", [(peaks[LEAN] - peaks[RELEASED]) / gradients])
    if rounds > 0 and not is_meta:
        timed = {name: TimedStep(step.run) for name, step in steps.items()}
        seconds = time_interleaved(timed, Clock(results.device), rounds=rounds, warmup=1)
        for name, values in seconds.items():
            results.add(case, name, "step", "ms", [1e3 * each for each in values])
            results.add(case, name, "step ratio", "1", ratios(values, seconds[PLAIN]))
        for name, kept in ((PLAIN_RELEASED, PLAIN), (RELEASED, LEAN)):
            results.add(case, name, "time of the release", "1", ratios(seconds[name], seconds[kept]))


def _step(model: nn.Module, forward_of: Callable[[nn.Module], Callable[[], Tensor]], optimizer: str, name: str) -> Step:
    network = copy.deepcopy(model)
    if name in (LEAN, RELEASED):
        network = lean(network)
    trained = [each for each in network.parameters() if each.requires_grad]
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
    built: torch.optim.Optimizer = getattr(torch.optim, optimizer)(trained, lr=1e-4, **options)
    if name in (PLAIN_RELEASED, RELEASED):
        release_gradients(network, built)
    return Step(network, forward_of(network), built)


def _same(model: nn.Module, other: nn.Module) -> bool:
    """Return whether the parameters of two networks have the same bits."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(bits(a.detach().contiguous()), bits(b.detach().contiguous())) for a, b in pairs)


def _existing_bytes(step: Step) -> int:
    """Return the bytes of parameters, buffers and the state of the optimizer."""
    states = tensors_of(list(step.optimizer.state.values()))
    return sum(each.nbytes for each in (*step.model.parameters(), *step.model.buffers(), *states))
