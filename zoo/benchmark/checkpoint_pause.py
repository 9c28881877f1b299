"""How long training stands still for a checkpoint, beside one that it would have to wait for."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.benchmark.timing import ratios
from zoo.config import parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, CheckpointWriter
from zoo.engine.process import Process
from zoo.engine.state import TrainState, all_finite, build_state
from zoo.engine.step import StepBatch, train_step
from zoo.tasks import task_of

NORM, EMA_DECAY = "inplace", 0.999
AMP = {"float32": "off", "bfloat16": "bf16"}
WARMUP = 2  # the first copy takes fresh memory
RATIO = "pause / waiting"


def measure_pauses(results: Results, setup: Setup, folder: Path, rounds: int) -> None:
    """Add how long training stands still for a checkpoint, and how long it would if it waited for the disk.

    The state is that of `zoo train` with in-place norms, SGD with momentum and a moving average of the weights. A round
    has a step without a checkpoint, a checkpoint that is waited for, and one that is written beside a step. The pause
    is the time of the check that the weights are finite, and of the save.

    Args:
    - `folder`: on the disk that checkpoints are written to; they are removed again.
    - `rounds`: how often each is timed, in turn.
    """
    state = _state(setup)
    targets = torch.zeros(setup.batch, dtype=torch.int64, device=setup.device)
    batch = StepBatch(setup.random_images(), targets, setup.batch)
    times: dict[str, list[float]] = {}

    def now() -> float:
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        return time.perf_counter()

    def timed(name: str, action: Callable[[], object]) -> None:
        start = now()
        action()
        times.setdefault(name, []).append(now() - start)

    with tempfile.TemporaryDirectory(dir=folder) as inside, CheckpointWriter(state.process, Path(inside)) as writer:

        def save_and_wait() -> None:
            all_finite(state.model)
            writer.save(state)
            writer.join()

        for _ in range(WARMUP + rounds):
            timed("step", lambda: train_step(state, batch))
            timed("waiting", save_and_wait)
            timed("check", lambda: all_finite(state.model))
            timed("save", lambda: writer.save(state))
            timed("step beside", lambda: train_step(state, batch))
            writer.join()
        num_bytes = Path(inside, CHECKPOINT).stat().st_size

    times = {name: values[WARMUP:] for name, values in times.items()}
    times["pause"] = [sum(parts) for parts in zip(times["check"], times["save"], strict=True)]
    results.settings["bytes of the checkpoint"] = num_bytes
    waits, goes_on, none = "written while training waits", "written beside a step", "none"
    for provider, metric, name in (
        (none, "step", "step"),
        (waits, "pause", "waiting"),
        (goes_on, "pause", "pause"),
        (goes_on, "of it: check of the weights", "check"),
        (goes_on, "of it: save", "save"),
        (goes_on, "step", "step beside"),
    ):
        results.add(setup.case, provider, metric, "ms", [1000 * value for value in times[name]])
    results.add(setup.case, goes_on, RATIO, "1", ratios(times["pause"], times["waiting"]))


def _state(setup: Setup) -> TrainState:
    """Return the state of a run with the network of ``setup``, before its first step."""
    config = parse_experiment(
        {
            "network": {"arch": setup.arch, "bn_mode": NORM},
            "optimizer": {"ema_decay": EMA_DECAY},
            "training": {"amp": AMP[setup.dtype], "channels_last": setup.layout == "channels_last"},
        },
        "the benchmark",
    )
    model = setup.build(NORM, "auto")
    return build_state(task_of(config), model, Process(device=setup.device))
