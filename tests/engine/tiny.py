"""A training run small enough for tests: colored noise in two classes, a network with dropout, a log in memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.config.parse import parse_experiment
from zoo.data.reading import Unreachable, read_bytes
from zoo.engine._checkpoint import CHECKPOINT, CheckpointWriter
from zoo.engine._consistency import fingerprints
from zoo.engine._observers import Observer, build_observers
from zoo.engine._process import Process
from zoo.engine._reporting import TrainMetrics
from zoo.engine._start import check_images, start
from zoo.engine._state import TrainState, build_state
from zoo.engine._step import StepBatch
from zoo.engine._task import Result
from zoo.engine._trainer import Trainer
from zoo.layers import DeeplabV3, norm_act
from zoo.tasks import task_of

SIDE_PX = 12
EPOCH = {"type": "linear", "mode": "step", "epochs": 1, "params": {"alpha": -0.1, "beta": 1.0}}


def make_images(folder: Path, num_train: int = 40, num_val: int = 6) -> Path:
    """Write an ImageFolder tree of PNG files and return it."""
    generator = np.random.default_rng(0)
    for split, count in (("train", num_train), ("val", num_val)):
        for index in range(count):
            target = index % 2
            path = folder / split / f"class{target}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = generator.integers(0, 128, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
            noise[..., target] += 100
            Image.fromarray(noise).save(path)
    return folder


def make_config(**changes: dict[str, Any] | int) -> Experiment:
    """Return settings of a run of 3 epochs of 8 images per step; ``changes`` replace keys of sections."""
    content: dict[str, Any] = {
        "network": {"arch": "resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 2},
        "optimizer": {
            "batch_size": 8,
            "learning_rate": 0.05,
            "ema_decay": 0.9,
            "schedule": {"type": "cosine", "mode": "step", "epochs": 3, "warmup_epochs": 0.5},
        },
        "input": {"crop_train": 8, "scale_val": 8, "crop_val": 8, "color_jitter_train": True, "lighting_train": True},
    }
    return _changed(content, changes)


def make_segmentation_config(**changes: dict[str, Any] | int) -> Experiment:
    """Return settings of a run of 2 epochs of 4 crops per step; ``changes`` replace keys of sections."""
    content: dict[str, Any] = {
        "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "sync", "classes": 3},
        "optimizer": {
            "batch_size": 4,
            "learning_rate": 0.05,
            "ema_decay": 0.9,
            "schedule": {"type": "polynomial", "mode": "step", "epochs": 2, "params": {"power": 0.9}},
        },
        "input": {"crop_train": 8, "color_jitter_train": True},
        "segmentation": {"class_uniform": True},
    }
    return _changed(content, changes)


def _changed(content: dict[str, Any], changes: dict[str, dict[str, Any] | int]) -> Experiment:
    for section, values in changes.items():
        content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
    return parse_experiment(content, "test")


def build_net(network: NetworkSpec) -> nn.Module:
    """Return a small network with norms and dropout, whose state a resume must restore."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(network.activation_param),
        nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, network.num_classes),
    )


def build_segmenter(network: NetworkSpec) -> nn.Module:
    """Return a small network with logits at half the size of the image, and norms that are synchronized."""
    norm = norm_act("sync", activation=network.activation, activation_param=network.activation_param)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False),
        norm(8),
        DeeplabV3(8, 8, hidden_channels=4, dilations=(1, 2, 3), norm_act=norm),
        nn.Conv2d(8, network.num_classes, 1),
    )


class MemoryLog:
    """A log that stores all reports and calls ``on_metrics`` with each."""

    def __init__(self, on_metrics: Callable[[TrainMetrics], object] | None = None) -> None:
        self.metrics: list[TrainMetrics] = []
        self.validations: list[tuple[int, int, Result, bool]] = []
        self.records: list[dict[str, Any]] = []
        self.bars: list[tuple[str, int, int]] = []
        self._on_metrics = on_metrics

    @contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], object]]:
        self.bars.append((title, total, done))
        yield lambda count: None

    def train_metrics(self, metrics: TrainMetrics) -> None:
        self.metrics.append(metrics)
        if self._on_metrics is not None:
            self._on_metrics(metrics)

    def validation(self, epoch: int, step: int, result: Result, is_best: bool) -> None:
        self.validations.append((epoch, step, result, is_best))

    def record(self, event: str, **fields: Any) -> None:
        self.records.append({"event": event, **fields})

    @property
    def digests(self) -> list[str]:
        """The digests of all epochs."""
        return [record["sha256"] for record in self.records if record["event"] == "digest"]

    @property
    def numbers(self) -> list[tuple[float, ...]]:
        """All reported values except times and memory."""
        return [
            (m.step, m.lr, m.loss, *m.scores.values(), m.epoch_loss, *m.epoch_scores.values()) for m in self.metrics
        ]

    @property
    def reports(self) -> tuple[list[Any], ...]:
        """The `numbers`, the `digests` and the validations."""
        validations = [(epoch, step, result.record(), is_best) for epoch, step, result, is_best in self.validations]
        return self.numbers, self.digests, validations


class BatchLog(Observer):
    """Stores the images and targets of each step of a process without replicas."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []

    def before_step(self, state: TrainState, batches: Sequence[StepBatch]) -> None:
        self.batches += [(batch.images.clone(), batch.targets.clone()) for batch in batches]


def terminate_at(step: int) -> Callable[[TrainMetrics], None]:
    """Return a function for `MemoryLog` that sends SIGTERM to this process when ``step`` is reported."""

    def send(metrics: TrainMetrics) -> None:
        if metrics.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return send


def this_process() -> Process:
    """Return the process that the default group describes, or one that is alone."""
    if not dist.is_initialized():
        return Process()
    return Process(dist.get_rank(), dist.get_world_size(), control=dist.new_group(backend="gloo"))


class Drive:
    """Reads files, but raises errno ``number`` for the files of ``split`` after the first ``count``."""

    def __init__(self, split: str, count: int, number: int) -> None:
        self._split, self._count, self._number = f"/{split}/", count, number

    def __call__(self, path: Any, *args: Any) -> bytes:
        if self._split in os.fspath(path):
            self._count -= 1
            if self._count < 0:
                raise Unreachable(f"{path}: the file system answered: {os.strerror(self._number)}")
        return read_bytes(path, *args)


def new_state(config: Experiment | None = None, model: nn.Module | None = None) -> TrainState:
    """Return the state of a new run of this process."""
    config = config or make_config()
    return build_state(task_of(config), model or build_net(config.network), this_process())


def save(state: TrainState, folder: Path, is_best: bool = False) -> Path:
    """Write a checkpoint to ``folder``, wait for it and return its path."""
    with CheckpointWriter(state.process, folder) as writer:
        writer.save(state, is_best)
    return folder / CHECKPOINT


def run(
    config: Experiment,
    data: Path,
    log_dir: Path,
    log: MemoryLog,
    *,
    workers: int = 0,
    log_interval: int = 1,
    build: Callable[[NetworkSpec], nn.Module] = build_net,
    observers: Iterable[Observer] = (),
    validates: bool = True,
    **start_options: Any,
) -> TrainState:
    """Train as the command line does, and return the state at the end."""
    process = this_process()
    log_dir.mkdir(exist_ok=True)
    task = task_of(config)
    state = start(task, process, log_dir, build=build, **start_options)
    share = process.loader_options(workers, config.optimizer.replicas)
    train_loader = task.build_train_loader(data, share)
    val_loader = task.build_val_loader(data, task.own_protocol, share) if validates else None
    loaders = train_loader, val_loader
    check_images(state, train_loader.dataset, fingerprints(*loaders))
    observers = [*build_observers(state, *loaders, log), *observers]
    Trainer(state, *loaders, log, log_dir, observers=observers, log_interval=log_interval).train()
    return state


def run_until_killed(config: Experiment, data: Path, log_dir: Path, step: int, **options: Any) -> None:
    """Train until ``step`` is reported; then write a file for this rank and wait to be killed."""

    def hold(metrics: TrainMetrics) -> None:
        if metrics.step == step:
            (log_dir / f"reached.{os.environ.get('RANK', '0')}").touch()
            time.sleep(600)

    run(config, data, log_dir, MemoryLog(hold), **options)


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the paths at which two checkpoints, or parts of them, are not bit-identical."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [place for key in first for place in differences(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, (list, tuple)) and type(first) is type(second) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for index, pair in pairs for place in differences(*pair, f"{path}[{index}]")]
    same = torch.equal(first, second) if isinstance(first, Tensor) else first == second
    return [] if same else [path]
