"""A run that is stopped anywhere and resumed has the bits of uninterrupted training."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.data.sample_labels import make_labeled
from tests.dist.spawn import PRELOADED, TIMEOUT_S, free_port, prepare_process, run_distributed
from tests.engine.tiny import (
    BatchLog,
    Drive,
    MemoryLog,
    build_net,
    build_segmenter,
    differences,
    make_config,
    make_images,
    make_segmentation_config,
    run,
    run_until_killed,
    terminate_at,
    this_process,
)
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment
from zoo.engine._checkpoint import BEST, CHECKPOINT, PREVIOUS, read
from zoo.engine._digest import digest
from zoo.engine._process import open_process
from zoo.engine._reporting import TrainMetrics
from zoo.errors import CheckpointError, DataError, TrainingInterrupted
from zoo.registry.get import build_from_config

EVERY_STEPS = 3  # an epoch has 5 steps
TOLERANCE = 200 * torch.finfo(torch.float32).eps  # about ten roundings per step, and weights of about 1


class Run(NamedTuple):
    """Settings, images and network of a run."""

    config: Experiment
    data: Path
    build: Callable[[Any], nn.Module] = build_net


def _run(folder: Path, num_val: int = 6, **changes: Any) -> Run:
    return Run(make_config(**{"checkpoint": {"every_steps": EVERY_STEPS}, **changes}), make_images(folder, 40, num_val))


def _everything(folder: Path, **optimizer: Any) -> Run:
    """All augmentations and regularizations at once; the last batch of an epoch has four images."""
    images = {
        "crop_scale_train": [0.3, 1.0],
        "interpolation_train": "random",
        "augment_train": "randaugment",
        "augment_params_train": {"interpolation": "bilinear"},
        "color_jitter_train": 0.3,
        "random_erasing_train": 0.5,
        "random_erasing_mode_train": "pixel",
        "repeats_train": 3,
    }
    mixing = {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.7, "loss": "bce"}
    averaging = {"ema_every": 2, "label_smoothing": 0.1}
    config = make_config(input=images, regularization=mixing, optimizer={**averaging, **optimizer})
    return Run(config, make_images(folder, 44))


def _lean(folder: Path) -> Run:
    network = {"arch": "torchvision:resnet18", "classes": 2, "memory": "lean"}
    sizes = {"crop_train": 32, "scale_val": 32, "crop_val": 32}
    schedule = {"type": "linear", "mode": "step", "epochs": 2, "params": {"alpha": -0.1, "beta": 1.0}}
    optimizer = {"batch_size": 16, "learning_rate": 0.01, "nesterov": True, "decay_norms": False, "schedule": schedule}
    config = make_config(input=sizes, optimizer=optimizer, checkpoint={"every_steps": 2})
    config = parse_experiment({**config.model_dump(mode="json"), "network": network}, "test")
    return Run(config, make_images(folder, 48, num_val=4), build_from_config)


def _segmentation(folder: Path) -> Run:
    """The sums of its epoch are a confusion matrix, and its crops are drawn class by class."""
    config = make_segmentation_config(checkpoint={"every_steps": EVERY_STEPS})
    return Run(config, make_labeled(folder, num_train=16, num_val=2), build_segmenter)


RELEASED = {"type": "AdamW", "learning_rate": 0.01, "clip": 0, "accumulate_steps": 2, "release_gradients": True}
RUNS: dict[str, Callable[[Path], Run]] = {
    "plain": _run,
    "more images to validate": partial(_run, num_val=41),
    "standard norms": partial(_run, network={"bn_mode": "standard"}),
    "two parts": partial(_run, optimizer={"batch_size": 12, "accumulate_steps": 2}),
    "frozen norms of stem": partial(_run, optimizer={"freeze": ["[01]"]}),
    "released gradients": partial(_run, optimizer=RELEASED),
    "best weights of each step": partial(_run, checkpoint={"every_steps": 1, "keep_best": 2}),
    "everything": _everything,
    "lean": _lean,
    "segmentation": _segmentation,
}


def _train(case: Run, log_dir: Path, log: MemoryLog | None = None, **options: Any) -> MemoryLog:
    log = log or MemoryLog()
    run(case.config, case.data, log_dir, log, build=case.build, **options)
    return log


def _reports(case: Run, log_dir: Path, options: dict[str, Any]) -> tuple[list[Any], ...]:
    """Train; return the digests of all batches, and the reports of the log."""
    seen = BatchLog()
    log = _train(case, log_dir, observers=[seen], **options)
    return [digest({"images": images, "targets": targets}) for images, targets in seen.batches], *log.reports


def _on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a function on each of several processes, or of this one alone."""
    return [function(*args)] if world_size == 1 else run_distributed(function, world_size, *args)


def _signal_at(step: int, case: Run, log_dir: Path, world_size: int, **options: Any) -> None:
    train = partial(_train, case, log_dir, MemoryLog(terminate_at(step)), **options)
    refused(TrainingInterrupted, train, f"SIGTERM at step {step} ", str(log_dir), "--resume auto")


class _SignalingLog(MemoryLog):
    """A log that sends SIGTERM to this process after ``after`` batches of a validation."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after, self.validated = after, 0

    @contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], object]]:
        with super().progress(title, total, done) as advance:
            yield advance if title != "validation" else self._advance

    def _advance(self, count: int) -> None:
        self.validated += count
        if self.validated == self._after:
            os.kill(os.getpid(), signal.SIGTERM)


def _stop_in_validation(case: Run, log_dir: Path, rank: int, after: int) -> int:
    log = _SignalingLog(after if this_process().rank == rank else -1)
    refused(TrainingInterrupted, lambda: _train(case, log_dir, log), "SIGTERM at step 5 ")
    return log.validated


def _signal_in_validation(rank: int, after: int, case: Run, log_dir: Path, world_size: int) -> None:
    validated = _on_ranks(world_size, _stop_in_validation, case, log_dir, rank, after)
    assert max(validated) <= after + (world_size > 1)  # ranks need one further batch to agree
    assert (log_dir / BEST).exists() == (read(log_dir / CHECKPOINT)["position"]["epoch"] > 0)


def _stop_by_fault(case: Run, log_dir: Path, rank: int, split: str, count: int) -> str:
    drive = Drive(split, count if this_process().rank == rank else 10**6, errno.EIO)
    with mock.patch("zoo.data.sources.folder.read_bytes", drive):
        words = f"/{split}/", "Input/output error; the state is saved", str(log_dir), "--resume auto"
        return refused(DataError, lambda: _train(case, log_dir), *words)


def _fault_of_data(rank: int, split: str, count: int, case: Run, log_dir: Path, world_size: int) -> None:
    """Train until reading an image of ``split`` fails on one rank, after ``count`` images."""
    assert len({*_on_ranks(world_size, _stop_by_fault, case, log_dir, rank, split, count)}) == 1


class _End(Exception):
    pass


def _error_at(step: int, case: Run, log_dir: Path, world_size: int, **options: Any) -> None:
    """Train until an error, at which nothing is saved."""

    def end(metrics: TrainMetrics) -> None:
        if metrics.step == step:
            raise _End

    with pytest.raises(_End):
        _train(case, log_dir, MemoryLog(end), **options)


def _kill_at(step: int, case: Run, log_dir: Path, world_size: int, workers: int = 0) -> None:
    kill_at(step, world_size, *case[:2], log_dir, build=case.build, workers=workers)


# The run, the number of processes, and the stops, each with the epoch and the step that the run resumes from.
# An epoch of "plain" has 5 steps of 8 images, and 6 images to validate with.
STOPS: list[tuple[str, int, list[tuple[partial[None], tuple[int, int]]]]] = [
    ("plain", 1, [(partial(_signal_at, 3), (0, 3))]),
    ("plain", 1, [(partial(_signal_at, 5), (0, 5))]),
    ("plain", 1, [(partial(_signal_at, 7), (1, 7))]),
    (
        "plain",
        1,
        [(partial(_signal_at, 2), (0, 2)), (partial(_error_at, 7), (1, 6)), (partial(_signal_at, 12), (2, 12))],
    ),
    ("plain", 1, [(partial(_fault_of_data, 0, "train", 17), (0, 2))]),
    ("plain", 1, [(partial(_fault_of_data, 0, "train", 57), (1, 7))]),
    ("plain", 1, [(partial(_fault_of_data, 0, "val", 3), (0, 5))]),
    ("plain", 1, [(partial(_fault_of_data, 0, "val", 11), (1, 10))]),
    ("plain", 1, [(partial(_kill_at, 8), (1, 6))]),
    ("plain", 1, [(partial(_kill_at, 8, workers=2), (1, 6))]),
    ("plain", 2, [(partial(_kill_at, 7), (1, 6))]),
    ("two parts", 3, [(partial(_kill_at, 7), (2, 6))]),
    ("frozen norms of stem", 1, [(partial(_signal_at, 4), (0, 4))]),
    ("frozen norms of stem", 1, [(partial(_kill_at, 8), (1, 6))]),
    ("released gradients", 1, [(partial(_signal_at, 4), (0, 4))]),
    ("released gradients", 1, [(partial(_kill_at, 8), (1, 6))]),
    ("best weights of each step", 1, [(partial(_error_at, 6), (1, 5)), (partial(_error_at, 11), (2, 10))]),
    ("everything", 1, [(partial(_signal_at, 2), (0, 2))]),
    ("everything", 1, [(partial(_signal_at, 14), (2, 14))]),
    ("lean", 1, [(partial(_kill_at, 5), (1, 4))]),
    ("segmentation", 1, [(partial(_kill_at, 7), (1, 6))]),
    ("more images to validate", 1, [(partial(_signal_in_validation, 0, 2), (0, 5))]),
    ("more images to validate", 2, [(partial(_signal_in_validation, 1, 1), (0, 5))]),
    # After the very last batch, ranks agree on a signal once the validation has been counted and saved.
    ("more images to validate", 2, [(partial(_signal_in_validation, 0, 6), (1, 5))]),
    ("standard norms", 2, [(partial(_fault_of_data, 0, "train", 9), (0, 2))]),
    ("standard norms", 2, [(partial(_fault_of_data, 1, "train", 19), (0, 4))]),
    ("standard norms", 2, [(partial(_fault_of_data, 1, "train", 35), (1, 8))]),
    ("standard norms", 2, [(partial(_fault_of_data, 0, "val", 0), (0, 5))]),
    ("standard norms", 2, [(partial(_fault_of_data, 1, "val", 2), (0, 5))]),
]


class Uninterrupted(NamedTuple):
    """A run without a break: its settings, its folder, and the reports of each rank."""

    case: Run
    folder: Path
    reports: list[tuple[list[Any], ...]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Uninterrupted]:
    """Return a function that trains a run of `RUNS` without a break, once."""

    @functools.cache
    def case(name: str) -> Run:
        return RUNS[name](tmp_path_factory.mktemp("data"))

    @functools.cache
    def train(name: str, world_size: int = 1) -> Uninterrupted:
        folder = tmp_path_factory.mktemp("straight")
        return Uninterrupted(case(name), folder, _on_ranks(world_size, _reports, case(name), folder, {}))

    return train


def _differing_files(first: Path, second: Path) -> list[str]:
    """Return the paths at which the checkpoints and the best weights of two runs differ."""
    names = [{path.name for path in folder.glob("*.pth.tar")} - {PREVIOUS} for folder in (first, second)]
    assert names[0] == names[1]
    contents = [{name: torch.load(folder / name, weights_only=True) for name in names[0]} for folder in (first, second)]
    return differences(*contents)


def _marked(name: str, world_size: int, stops: list[tuple[partial[None], tuple[int, int]]]) -> Any:
    starts_processes = world_size > 1 or any(stop.func is _kill_at for stop, _ in stops)
    how = ", ".join(f"{stop.func.__name__[1:]} {' '.join(map(str, stop.args))}" for stop, _ in stops)
    marks = [pytest.mark.dist] * starts_processes
    return pytest.param(name, world_size, stops, marks=marks, id=f"{name} on {world_size}, {how}")


@pytest.mark.parametrize(("name", "world_size", "stops"), [_marked(*row) for row in STOPS])
def test_stopped_and_resumed_run_has_bits_of_uninterrupted_run(
    name: str,
    world_size: int,
    stops: list[tuple[partial[None], tuple[int, int]]],
    uninterrupted: Callable[..., Uninterrupted],
    tmp_path: Path,
) -> None:
    (case, folder, expected), log_dir, options = uninterrupted(name, world_size), tmp_path / "log", {}
    for stop, position in stops:
        stop(case, log_dir, world_size, **options)
        saved = read(log_dir / CHECKPOINT)["position"]
        assert (saved["epoch"], saved["step"]) == position
        options = {"resume": "auto"}
    epoch, step = position
    resumed = _on_ranks(world_size, _reports, case, log_dir, options)
    for reports, (batches, numbers, digests, validations) in zip(resumed, expected, strict=True):
        assert reports == (batches[step:], numbers[step:], digests[epoch:], validations[epoch:])
    assert _differing_files(folder, log_dir) == []


def test_number_of_workers_does_not_change_bits(uninterrupted: Callable[..., Uninterrupted], tmp_path: Path) -> None:
    straight, seen = uninterrupted("everything"), BatchLog()
    _train(straight.case, tmp_path, workers=2, observers=[seen])
    assert {targets.dim() for _, targets in seen.batches} == {1, 2}  # some batches are not mixed
    assert _differing_files(straight.folder, tmp_path) == []


def test_run_with_more_epochs_has_bits_of_longer_run(data: Path, tmp_path: Path) -> None:
    def config(epochs: int) -> Experiment:
        params = {"milestones": [3, 12], "gamma": 0.5}
        schedule = {"type": "multistep", "mode": "step", "epochs": epochs, "params": params}
        return make_config(optimizer={"schedule": schedule})

    straight, prolonged, log = tmp_path / "straight", tmp_path / "prolonged", MemoryLog()
    run(config(3), data, straight, MemoryLog())
    run(config(2), data, prolonged, MemoryLog())
    run(config(3), data, prolonged, log, resume="auto")
    assert [epoch for epoch, *_ in log.validations] == [2]
    assert differences(read(straight / CHECKPOINT), read(prolonged / CHECKPOINT)) == []


def _run_rank(rank: int, world_size: int, port: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    prepare_process(rank, world_size, port)
    with open_process():
        run_until_killed(*args, **options)


def kill_at(step: int, world_size: int, config: Experiment, data: Path, log_dir: Path, **options: Any) -> None:
    """Train in separate processes and kill them with SIGKILL when all have reported ``step``.

    The last checkpoint is written by then.
    """
    saved = step // config.checkpoint.every_steps * config.checkpoint.every_steps
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log_dir.mkdir(exist_ok=True)
    for reached in log_dir.glob("reached.*"):
        reached.unlink()
    shared = (world_size, free_port(), (config, data, log_dir, step), options)
    processes = [context.Process(target=_run_rank, args=(rank, *shared)) for rank in range(world_size)]
    for process in processes:
        process.start()
    is_done = lambda: len(list(log_dir.glob("reached.*"))) == world_size and _saved_step(log_dir) >= saved  # noqa: E731
    _wait_for(is_done, processes)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL


def _wait_for(is_done: Callable[[], bool], processes: list[Any]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert all(process.is_alive() for process in processes), "a process ended by itself"
        assert time.monotonic() < end, "the step was not reached"
        time.sleep(0.02)


def _saved_step(log_dir: Path) -> int:
    try:
        return read(log_dir / CHECKPOINT)["position"]["step"]
    except CheckpointError:  # there is none, for a moment also between the two renames of a save
        return -1


def _hold_in_write(held_step: int, folder: Path, config: Experiment, data: Path, log_dir: Path) -> None:
    """Train until a part of the checkpoint after ``held_step`` is written, and a step after it is done."""
    write = torch.save

    def hold(content: dict[str, Any], file: Any) -> None:
        if "position" not in content or content["position"]["step"] < held_step:  # the best weights have none
            write(content, file)
            return
        file.write(bytes(1000))
        file.flush()
        (folder / "writing").touch()
        time.sleep(600)

    with mock.patch("torch.save", hold):
        run_until_killed(config, data, log_dir, held_step + 1)


@pytest.mark.dist
def test_run_killed_during_write_resumes_from_previous_checkpoint(
    uninterrupted: Callable[..., Uninterrupted], tmp_path: Path
) -> None:
    (config, data, _), straight, _ = uninterrupted("plain")
    killed = tmp_path / "killed"
    arguments = (6, tmp_path, config, data, killed)
    process = multiprocessing.get_context("forkserver").Process(target=_hold_in_write, args=arguments)
    process.daemon = True
    process.start()
    _wait_for(lambda: (tmp_path / "writing").exists() and (killed / "reached.0").exists(), [process])
    process.kill()
    process.join()
    assert list(killed.glob(f".{CHECKPOINT}.*.tmp"))
    assert read(killed / CHECKPOINT)["position"]["step"] == 5
    run(config, data, killed, log := MemoryLog(), resume="auto")
    assert log.numbers[0][0] == 6
    assert _differing_files(straight, killed) == []


def build_without_norms(network: Any) -> nn.Module:
    """Return a network that neither uses statistics of a part of a batch nor draws random numbers."""
    layers = [nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, network.num_classes))


def _batches_and_weights(case: Run, log_dir: Path) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    state = run(case.config, case.data, log_dir, MemoryLog(), build=case.build, observers=[seen := BatchLog()])
    return seen.batches, state.model.state_dict()


@pytest.mark.dist
def test_two_processes_and_accumulation_see_images_of_one(tmp_path: Path) -> None:
    alone, shared = (
        _everything(tmp_path / "data", batch_size=12, **parts)._replace(build=build_without_norms)
        for parts in ({}, {"accumulate_steps": 2})
    )
    expected, weights = _batches_and_weights(alone, tmp_path / "one")
    assert [len(images) for images, _ in expected] == [12, 12, 12, 8] * 3  # some images of the last have no partner
    (first, found), (second, _) = run_distributed(_batches_and_weights, 2, shared, tmp_path / "two")
    for whole, parts in zip(expected, zip(first, second, strict=True), strict=True):
        for tensor, of_ranks in zip(whole, zip(*parts, strict=True), strict=True):
            assert all(torch.equal(tensor[rank::2], of_rank) for rank, of_rank in enumerate(of_ranks))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, weights[key], rtol=TOLERANCE, atol=TOLERANCE)
