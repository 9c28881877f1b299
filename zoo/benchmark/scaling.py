"""How fast data-parallel training is on many accelerators: a model, and a check of it on processes of this machine.

A step of N accelerators with B images each takes, in seconds,

    step(N) = max(compute * max(1, N / C), B / D) + norms(N) + max(0, gradients(N) - hidden)
    exchange(bytes, N) = 2 ceil(log2 N) latency + 2 (N - 1) / N * bytes / bandwidth

- ``compute``: forward, backward and optimiser of one accelerator alone. C is how many can compute at the same time:
  the cores of this machine for processes with a thread each, no limit for accelerators.
- D: images per second that the cores of one accelerator decode and augment; the others wait for the slower of the two.
- gradients(N): one all-reduce of the bytes of all gradients, as rings and trees do it (`exchange`). ``hidden`` is 0
  where nothing is computed meanwhile, and two thirds of ``compute``, the backward pass, where all of it can be hidden;
  the truth is between.
- norms(N): an all-gather in forward and an all-reduce in backward for each synchronised norm, which the next layer
  waits for: half an exchange of two float64 per channel and one more, and an exchange of two float32 per channel.

The efficiency is compute / step(N). Memory bandwidth that processes share, slow machines and full switches are not in
the model.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp
from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.engine.process import Process
from zoo.engine.wrapping import distribute
from zoo.layers import InPlaceABNSync

COUNTS = tuple(2**power for power in range(11))  # accelerators
BACKWARD = 2 / 3  # of a step; a convolution takes two products in backward and one in forward
DAY_S = 86_400
SMALL, LARGE = 2, 2**22  # elements of the messages that latency and bandwidth are taken of
WARMUP = 2
MEASURED, PREDICTED = "measured", "predicted"


@dataclass(frozen=True)
class Job:
    """What one accelerator does in a step.

    Args:
    - `batch`: its images.
    - `compute_s`: seconds of the step alone, without messages and with images at hand.
    - `gradient_bytes`: bytes of the gradients that travel.
    - `norm_channels`: channels of each synchronised norm.
    - `input_images_per_s`: images that its cores decode and augment in a second.
    - `at_once`: how many of them can compute at the same time.
    """

    batch: int
    compute_s: float
    gradient_bytes: int
    norm_channels: tuple[int, ...] = ()
    input_images_per_s: float = math.inf
    at_once: float = math.inf


@dataclass(frozen=True)
class Link:
    """What connects accelerators: bytes per second in each direction of each, and seconds of an empty message."""

    bytes_per_s: float
    latency_s: float

    def exchange_s(self, num_bytes: float, count: int) -> float:
        """Return the seconds of an all-reduce of ``num_bytes`` between ``count`` accelerators."""
        rounds = 2 * math.ceil(math.log2(count))
        return rounds * self.latency_s + 2 * (count - 1) / count * num_bytes / self.bytes_per_s


def step_s(job: Job, link: Link, count: int, *, overlap: bool) -> float:
    """Return the predicted seconds of a step of ``count`` accelerators; ``overlap`` hides gradients behind backward."""
    compute_s = job.compute_s * max(1.0, count / job.at_once)
    norms_s = sum(
        link.exchange_s(8 * (2 * channels + 1), count) / 2 + link.exchange_s(4 * 2 * channels, count)
        for channels in job.norm_channels
    )
    hidden_s = BACKWARD * compute_s if overlap else 0.0
    exposed_s = max(0.0, link.exchange_s(job.gradient_bytes, count) - hidden_s)
    return max(compute_s, job.batch / job.input_images_per_s) + norms_s + exposed_s


def job_of(setup: Setup, norm: str, compute_s: float) -> Job:
    """Return the work of a network whose step takes ``compute_s``; it is built without memory."""
    model = replace(setup, device=torch.device("meta")).build(norm, "plain")
    channels = tuple(each.num_features for each in model.modules() if isinstance(each, InPlaceABNSync))
    return Job(setup.batch, compute_s, sum(p.numel() * p.element_size() for p in model.parameters()), channels)


def predict(
    results: Results, setup: Setup, job: Job, link: Link, *, decode_images_per_s: float, image_bytes: float
) -> None:
    """Add what the model says of each count of accelerators, and what they need.

    ``decode_images_per_s`` is that of one core; ``image_bytes`` are the mean of an encoded image.
    """
    for count in COUNTS:
        slow_s, fast_s = (step_s(job, link, count, overlap=overlap) for overlap in (False, True))
        images_per_s = count * job.batch / fast_s
        for metric, unit, value in (
            ("step, nothing hidden", "ms", 1000 * slow_s),
            ("step, gradients hidden", "ms", 1000 * fast_s),
            ("efficiency, nothing hidden", "1", job.compute_s / slow_s),
            ("efficiency, gradients hidden", "1", job.compute_s / fast_s),
            ("images in a day", "million", images_per_s * DAY_S / 1e6),
            ("cores that decode", "1", images_per_s / decode_images_per_s),
            ("network of each", "MB/s", 2 * (count - 1) / count * job.gradient_bytes / fast_s / 1e6),
            ("disk", "MB/s", images_per_s * image_bytes / 1e6),
        ):
            results.add(setup.case, f"{count} accelerator{'s' * (count > 1)}", metric, unit, [value])


def check(results: Results, setup: Setup, norm: str, rounds: int) -> None:
    """Add measured and predicted steps of 1, 2 and 3 processes of this machine, with one thread on one core each.

    Compute is that of one process, latency and bandwidth those of Gloo between two. Where there are more processes than
    cores, they are predicted to take turns.
    """
    cores = len(_cores())
    alone, pair, three = (_run_processes(setup, norm, count, rounds) for count in (1, 2, 3))
    job = replace(job_of(setup, norm, median(alone.steps_s)), at_once=cores)
    latency_s = pair.small_s / 2
    link = Link(LARGE * 4 / max(pair.large_s - pair.small_s, 1e-9), latency_s)
    results.settings |= {
        "cores": cores,
        "Gloo latency, us": round(1e6 * latency_s, 1),
        "Gloo, GB/s": round(link.bytes_per_s / 1e9, 3),
    }
    for count, measured in ((1, alone), (2, pair), (3, three)):
        provider = f"{count} process{'es' * (count > 1)}"
        predicted_s = step_s(job, link, count, overlap=False)
        results.add(setup.case, provider, MEASURED, "ms", [1000 * each for each in measured.steps_s])
        results.add(setup.case, provider, PREDICTED, "ms", [1000 * predicted_s])
        results.add(setup.case, provider, f"{PREDICTED} / {MEASURED}", "1", [predicted_s / median(measured.steps_s)])
    if cores < 3:
        results.note(f"3 processes share {cores} cores; they are predicted to take turns")


@dataclass(frozen=True)
class _Measured:
    """Seconds of steps of several processes, and of a small and a large all-reduce (0 for one process)."""

    steps_s: list[float]
    small_s: float
    large_s: float


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _run_processes(setup: Setup, norm: str, count: int, rounds: int) -> _Measured:
    with tempfile.TemporaryDirectory() as folder:
        torch_mp.start_processes(
            _run_rank, args=(count, folder, setup, norm, rounds), nprocs=count, start_method="spawn"
        )
        return _Measured(*torch.load(Path(folder, "measured.pt")))


def _run_rank(rank: int, count: int, folder: str, setup: Setup, norm: str, rounds: int) -> None:
    """Time steps in one of ``count`` processes; rank 0 writes the times to ``folder``."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {_cores()[rank % len(_cores())]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        small_s, large_s = (_median_s(_all_reduce(size), rounds) if count > 1 else 0.0 for size in (SMALL, LARGE))
        steps_s = _times_s(_step(setup, norm, Process(rank, rank, count)), rounds)
        if rank == 0:
            torch.save((steps_s, small_s, large_s), Path(folder, "measured.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _all_reduce(size: int) -> Callable[[], object]:
    tensor = torch.zeros(size)
    return lambda: dist.all_reduce(tensor)


def _step(setup: Setup, norm: str, process: Process) -> Callable[[], object]:
    """Return a step of training by SGD with momentum."""
    torch.manual_seed(0)
    network = setup.build(norm, "plain")
    trained = distribute(network, process)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    images, targets = torch.randn(setup.batch, *setup.image_shape), torch.zeros(setup.batch, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        logits: Tensor = trained(images)
        nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()

    return step


def _median_s(action: Callable[[], object], rounds: int) -> float:
    return median(_times_s(action, rounds))


def _times_s(action: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of an action that all processes begin together."""
    times = []
    for _ in range(WARMUP + rounds):
        dist.barrier()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times[WARMUP:]
