"""Reconstruction in reversible networks: its error over depth, memory and time, in floating point and on grids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.benchmark.model import add_times
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.plot_style import Line, Panel, draw_panels
from zoo.benchmark.results import Results
from zoo.engine._precision import DTYPES, autocast
from zoo.engine._reconstruction import reconstruction_errors
from zoo.errors import VerificationError
from zoo.files import write_bytes
from zoo.layers.reversible import ReversibleSequential
from zoo.memory.allocations import measure_memory

FLOAT, BFLOAT16 = "float32", "bfloat16"
# As in the RevNet paper's experiments on CIFAR-10, except for their larger batches.
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 2e-4


def measure_grids(results: Results, setup: Setup, all_bits: Sequence[int], steps: int, rounds: int) -> None:
    """Measure the effect of a grid on the forward and backward passes of a network, for each of ``all_bits``.

    Trains each network twice for ``steps`` steps on the same random images and labels: with stored and with
    reconstructed activations. The summary has the last step's reconstruction errors by block. Held bytes and the time
    of a step are measured with reconstructed activations, in ``rounds`` interleaved timings; 0 measures no times.

    Raises ConfigError if the architecture has no grid.
    """
    grids: dict[str, int | None] = {FLOAT: None, **{f"grid {bits}": bits for bits in all_bits}}
    networks = {name: _on_grid(setup, bits) for name, bits in grids.items()}
    images = setup.random_images()
    reference = _logits(networks[FLOAT], images)
    changed = {name: _logits(network, images) for name, network in networks.items() if name != FLOAT}
    changed[BFLOAT16] = _logits(networks[FLOAT], images, BFLOAT16)
    for name, logits in changed.items():
        difference = float((logits - reference).norm() / reference.norm())
        results.add(setup.case, name, "logits, relative difference to float32", "1", [difference])
    for name, network in networks.items():
        print(f"{setup.case.subject}: {name}", file=sys.stderr, flush=True)
        stored, largest, _ = _train(network, "plain", steps)
        results.add(setup.case, name, "largest value", "1", [largest])
        try:
            reconstructed, _, errors = _train(network, "auto", steps)
        except VerificationError as error:  # a value beyond the range of the grid
            results.note(f"{setup.case.subject}, {name}: {error}")
            continue
        of_weights = max(float((a - b).abs().max()) for a, b in zip(stored, reconstructed, strict=True))
        results.add(setup.case, name, "largest relative error of reconstruction", "1", [max(errors)])
        results.add(setup.case, name, "largest difference of weights", "1", [of_weights])
        results.summary.setdefault("errors", {}).setdefault(setup.case.subject, {})[name] = errors
    if rounds:
        models = {name: network.build("standard", "auto") for name, network in networks.items()}
        forwards = {name: setup.forward_of(model) for name, model in models.items()}
        for name, model in models.items():
            held = measure_memory(forwards[name], model.parameters()).held
            results.add(setup.case, name, "held", "MB", [held / 1e6])
        add_times(results, setup.case, forwards, models, FLOAT, rounds)


def draw_errors(stem: Path, content: dict[str, Any], steps: int) -> None:
    """Write ``stem``.png: the error of reconstruction over the blocks of each network."""
    panels = []
    for subject, errors in content["errors"].items():
        # Grids without errors share one curve.
        exact = [name for name in errors if not any(errors[name])]
        shown = {name: values for name, values in errors.items() if any(values)}
        shown |= {f"{', '.join(exact)}: exactly 0": errors[exact[0]]} if exact else {}
        lines = [Line(name, range(1, len(values) + 1), values) for name, values in shown.items()]
        panels.append(Panel(subject, "block, from input to output", "relative error of activations", lines))
    title = f"Reversible networks: error of reconstructed activations in training step {steps}"
    write_bytes(stem.with_name(stem.name + ".png"), draw_panels(title, panels))


def _on_grid(setup: Setup, bits: int | None) -> Setup:
    return replace(setup, spec=setup.spec.changed(options={**setup.spec.options, "grid_bits": bits}))


def _logits(setup: Setup, images: Tensor, dtype: str = FLOAT) -> Tensor:
    torch.manual_seed(0)
    model = setup.build("standard", "plain")
    with torch.no_grad(), autocast(setup.device, DTYPES[dtype]):
        logits: Tensor = model(images)
    return logits.float()


def _train(setup: Setup, memory: str, steps: int) -> tuple[list[Tensor], float, list[float]]:
    """Train; return the weights, the largest absolute output of a block, and the last step's errors by block.

    The largest output is 0 unless activations are stored: a chain that reconstructs them does not call its blocks.
    """
    torch.manual_seed(0)
    model = setup.build("standard", memory)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY)
    with _record_largest_outputs(model) as largest, reconstruction_errors(model) as errors:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(setup.random_images())
            F.cross_entropy(logits, torch.randint(logits.shape[1], (setup.batch,), device=setup.device)).backward()
            optimizer.step()
    # Backward visits the blocks from the last to the first.
    return [parameter.detach() for parameter in model.parameters()], max(largest), [*errors.values()][::-1] or [0.0]


@contextmanager
def _record_largest_outputs(model: nn.Module) -> Iterator[list[float]]:
    """Yields a list to which each forward pass appends the largest absolute value of each block's outputs."""
    largest = [0.0]

    def look(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        largest.extend(float(output.detach().abs().max()) for output in outputs)

    blocks = [block for chain in model.modules() if isinstance(chain, ReversibleSequential) for block in chain]
    handles = [block.register_forward_hook(look) for block in blocks]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()
