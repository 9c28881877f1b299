"""The loop reports, validates, saves and stops when it should."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import SIDE_PX, MemoryLog, build_net, differences, make_config, make_images, run
from tests.refusals import refused
from zoo.data.reading import Unreachable, read_bytes
from zoo.engine.checkpoint import BEST, CHECKPOINT, PREVIOUS, read
from zoo.engine.reporting import TrainMetrics
from zoo.engine.state import all_finite
from zoo.engine.validation import validate
from zoo.errors import CheckpointError, DataError, NonFiniteLossError, TrainingInterrupted

NUM_BATCHES, EPOCHS = 5, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


def test_reports_come_at_interval_and_end_of_epoch(data: Path, tmp_path: Path) -> None:
    log, config = MemoryLog(), make_config()
    run(config, data, tmp_path, log, log_interval=2)
    assert [(m.epoch, m.batch, m.step) for m in log.metrics] == [
        (epoch, batch, epoch * NUM_BATCHES + batch) for epoch in range(EPOCHS) for batch in (2, 4, 5)
    ]
    schedule = config.optimizer.schedule
    rates = [0.05 * schedule.factor(m.epoch, m.batch - 1, NUM_BATCHES, 0.05) for m in log.metrics]
    assert [metrics.lr for metrics in log.metrics] == rates
    assert len(set(rates)) == len(rates)
    assert all(m.images_per_s > 0 and m.peak_memory_bytes > 10**6 and m.step_s >= m.data_s > 0 for m in log.metrics)
    assert log.metrics[0].eta_s > log.metrics[-1].eta_s == 0
    assert log.bars[:2] == [("epoch 1/3", NUM_BATCHES, 0), ("validation", 1, 0)]


def test_interval_averages_combine_to_epoch_average(data: Path, tmp_path: Path) -> None:
    log = MemoryLog()
    run(make_config(), data, tmp_path, log, log_interval=2)
    for end in (3, 6, 9):
        parts, sizes = log.metrics[end - 3 : end], (16, 16, 8)
        records = [part.record() for part in parts]
        for key in ("loss", "top1", "top5"):
            mean = sum(record[key] * size for record, size in zip(records, sizes, strict=True)) / 40
            assert mean == pytest.approx(records[-1][f"epoch_{key}"])


def test_epoch_ends_with_validation_and_checkpoint(data: Path, tmp_path: Path) -> None:
    log = MemoryLog()
    state = run(make_config(), data, tmp_path, log)
    assert [(epoch, step) for epoch, step, _, _ in log.validations] == [(0, 5), (1, 10), (2, 15)]
    scores = [result.score for _, _, result, _ in log.validations]
    bests = [top1 > max(scores[:epoch], default=-1) for epoch, top1 in enumerate(scores)]
    assert [is_best for *_, is_best in log.validations] == bests
    assert all(result.count == 6 for _, _, result, _ in log.validations)
    content = read(tmp_path / CHECKPOINT)
    assert content["position"] == {"epoch": 3, "batch": 0, "step": 15}
    assert content["best_prec1"] == max(scores)
    assert read(tmp_path / PREVIOUS)["epoch"] == 2
    last_best = max(epoch for epoch, is_best in enumerate(bests) if is_best)
    assert torch.load(tmp_path / BEST, weights_only=True)["epoch"] == last_best + 1
    assert state.ema is not None
    assert differences(content["ema"], state.ema.state_dict()) == []
    assert differences(content["ema"], content["state_dict"]) != []


def test_moving_average_is_scored_if_present(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[nn.Module] = []

    def spy(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scored.append(model)
        return validate(model, *args, **kwargs)

    monkeypatch.setattr("zoo.engine.trainer.validate", spy)
    for name, decay in (("with", 0.9), ("without", None)):
        state = run(make_config(optimizer={"ema_decay": decay}), data, tmp_path / name, MemoryLog())
        assert scored[-1] is (state.model if state.ema is None else state.ema)


def _statistics_that_are_scored(data: str, log_dir: str) -> list[float]:
    seen: list[float] = []

    def spy(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(model[1].running_mean.sum().item())
        return validate(model, *args, **kwargs)

    with mock.patch("zoo.engine.trainer.validate", spy):
        run(make_config(), Path(data), Path(log_dir), MemoryLog())
    return seen


@pytest.mark.dist
def test_all_ranks_score_with_running_statistics_of_rank_0(data: Path, tmp_path: Path) -> None:
    first, second = run_distributed(_statistics_that_are_scored, 2, str(data), str(tmp_path))
    assert first == second
    assert len(set(first)) == EPOCHS


def test_checkpoints_within_epochs_follow_every_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        "zoo.engine.checkpoint.CheckpointWriter.save",
        lambda writer, state, is_best=False: positions.append((state.epoch, state.batch, state.step)),
    )
    run(make_config(checkpoint={"every_steps": 4}), data, tmp_path, MemoryLog())
    assert positions == [(0, 4, 4), (1, 0, 5), (1, 3, 8), (2, 0, 10), (2, 2, 12), (3, 0, 15)]


class _Exploding(nn.Module):
    """Multiplies by a weight whose gradient is infinite, or whose output is, from a given forward pass on."""

    def __init__(self, forward_passes: int, in_gradient: bool) -> None:
        super().__init__()
        self.left, self.in_gradient = forward_passes, in_gradient
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.left -= 1
        if self.left > 0:
            return x * self.weight
        # sqrt at 0 is finite and its derivative is not
        return x + (self.weight - self.weight.detach()).abs().sqrt() if self.in_gradient else x / (0 * self.weight)


def _exploding_net(forward_passes: int, in_gradient: bool = False) -> Any:
    return lambda network: nn.Sequential(build_net(network), _Exploding(forward_passes, in_gradient))


def test_non_finite_loss_stops_run_with_last_good_checkpoint(data: Path, tmp_path: Path) -> None:
    log = MemoryLog()
    train = partial(run, make_config(), data, tmp_path, log, build=_exploding_net(8))
    refused(NonFiniteLossError, train, "step 8", CHECKPOINT)
    assert log.metrics[-1].step == 7
    assert read(tmp_path / CHECKPOINT)["position"]["step"] == 5


@pytest.mark.parametrize(
    ("in_gradient", "every_steps", "place"), [(False, 4, "loss was not finite at step 3"), (True, 3, "after step 3")]
)
def test_bad_numbers_between_two_reports_are_found_before_save(
    data: Path, tmp_path: Path, in_gradient: bool, every_steps: int, place: str
) -> None:
    config = make_config(checkpoint={"every_steps": every_steps}, optimizer={"clip": 0.0})
    build = _exploding_net(3, in_gradient)
    train = partial(run, config, data, tmp_path, MemoryLog(), build=build, log_interval=100)
    refused(NonFiniteLossError, train, place, "no checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_single_non_finite_number_is_found(value: float, name: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(4, 2).bfloat16())
    network.register_buffer("empty", torch.zeros(0))
    assert all_finite(network)
    network.state_dict()[name].view(-1)[3] = value
    assert not all_finite(network)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_image_ends_run_with_its_name(tmp_path: Path, workers: int) -> None:
    folder = make_images(tmp_path / "data")
    bad = folder / "train" / "class1" / "5.png"
    bad.write_bytes(bad.read_bytes()[:60])
    train = partial(run, make_config(), folder, tmp_path / "log", MemoryLog(), workers=workers)
    refused(DataError, train, f"{bad}: ")


class _Drive:
    """Reads files, but raises errno ``number`` for the file of ``split`` after the first ``count``."""

    def __init__(self, split: str, count: int, number: int) -> None:
        self._split, self._count, self._number = f"/{split}/", count, number

    def __call__(self, path: Any, *args: Any) -> bytes:
        if self._split in os.fspath(path):
            self._count -= 1
            if self._count < 0:
                raise Unreachable(f"{path}: the file system answered: {os.strerror(self._number)}")
        return read_bytes(path, *args)


@pytest.mark.parametrize(
    ("split", "count", "step"), [("train", 17, 2), ("train", 57, 7), ("val", 3, 5), ("val", 11, 10)]
)
def test_fault_of_data_saves_at_step_and_resumed_run_is_bit_identical(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, count: int, step: int
) -> None:
    """An epoch has 5 steps of 8 images, and 6 images to validate with."""
    run(make_config(), data, tmp_path / "straight", MemoryLog())
    with monkeypatch.context() as patch:
        patch.setattr("zoo.data.sources.folder.read_bytes", _Drive(split, count, errno.EIO))
        train = partial(run, make_config(), data, tmp_path / "stopped", MemoryLog())
        refused(DataError, train, f"/{split}/", "Input/output error", str(tmp_path / "stopped"), "--resume auto")
    assert read(tmp_path / "stopped" / CHECKPOINT)["position"]["step"] == step
    run(make_config(), data, tmp_path / "stopped", MemoryLog(), resume="auto")
    ends = [read(tmp_path / name / CHECKPOINT) for name in ("straight", "stopped")]
    assert differences(*ends) == []


def test_fault_of_first_batch_saves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", _Drive("train", 0, errno.ESTALE))
    message = refused(DataError, partial(run, make_config(), data, tmp_path / "log", MemoryLog()), "Stale file handle")
    assert "saved" not in message
    assert list((tmp_path / "log").iterdir()) == []


def test_fault_at_begin_of_later_epoch_names_its_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", _Drive("train", 40, errno.ESTALE))
    train = partial(run, make_config(), data, tmp_path / "log", MemoryLog())
    refused(DataError, train, "Stale file handle", str(tmp_path / "log"))
    assert [path.name for path in (tmp_path / "log").glob("checkpoint*")] == [CHECKPOINT]


def test_fault_of_data_is_named_beside_failed_save(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("torch.save", fail)
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", _Drive("train", 17, errno.ESTALE))
    train = partial(run, make_config(), data, tmp_path / "log", MemoryLog())
    refused(DataError, train, "Stale file handle", "Input/output error")


def _end_of_two(data: str, log_dir: str, split: str, count: int, faulty_rank: int) -> str:
    """Train with a fault on one of two ranks, and then without; return the error of this rank."""
    config = make_config(network={"bn_mode": "standard"})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == faulty_rank:
            patch.setattr("zoo.data.sources.folder.read_bytes", _Drive(split, count, errno.EIO))
        try:
            run(config, Path(data), Path(log_dir), MemoryLog())
        except DataError as error:
            text = str(error)
    run(config, Path(data), Path(log_dir), MemoryLog(), resume="auto")
    return text


@pytest.mark.dist
@pytest.mark.parametrize(
    ("split", "count", "faulty_rank"),
    [("train", 9, 0), ("train", 19, 1), ("train", 35, 1), ("val", 0, 0), ("val", 2, 1)],
)
def test_fault_of_data_on_one_rank_saves_on_all(
    data: Path, tmp_path: Path, split: str, count: int, faulty_rank: int
) -> None:
    """A rank has 5 steps of 4 images in an epoch, and 3 images to validate with."""
    texts = run_distributed(_end_of_two, 2, str(data), str(tmp_path / "log"), split, count, faulty_rank)
    assert texts[0] == texts[1]
    assert f"/{split}/" in texts[0]
    assert "Input/output error; the state is saved" in texts[0]
    assert read(tmp_path / "log" / CHECKPOINT)["position"]["step"] == 15


def _replace(data: Path) -> None:
    (data / "train/class0/4.png").rename(data / "train/class0/400.png")


def _move(data: Path) -> None:
    (data / "train/class0/4.png").rename(data / "train/class1/4.png")


def _rename_all(data: Path) -> None:
    for file in [*(data / "train").glob("*/*")]:
        file.rename(file.with_name(f"image_{file.name}"))


def _edit(split: str) -> Callable[[Path], None]:
    def edit(data: Path) -> None:
        Image.new("RGB", (SIDE_PX, SIDE_PX)).save(data / split / "class1/3.png")

    return edit


def _rename_class(data: Path) -> None:
    for split in ("train", "val"):
        (data / split / "class1").rename(data / split / "other")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image more": (lambda data: make_images(data, num_train=42), "(train.images: 40 before and 42 now"),
    "replaced": (_replace, "(train.names: '"),
    "moved to another class": (_move, "(train.names: '"),
    "renamed": (_rename_all, "(train.names: '"),
    "other content": (_edit("train"), "(train.sizes: '"),
    "validation image less": (lambda data: (data / "val/class0/2.png").unlink(), "(val.images: 6 before and 5 now"),
    "other content of validation": (_edit("val"), "(val.sizes: '"),
    "class renamed": (_rename_class, "other"),
}


@pytest.mark.parametrize(("change", "key"), CHANGES.values(), ids=CHANGES.keys())
def test_resume_on_other_images_raises(change: Callable[[Path], object], key: str, tmp_path: Path) -> None:
    data, log_dir, config = make_images(tmp_path / "data"), tmp_path / "log", make_config()
    with pytest.raises(TrainingInterrupted):
        run(config, data, log_dir, MemoryLog(_terminate_at(7)))
    saved = read(log_dir / CHECKPOINT)
    change(data)
    train = partial(run, config, data, log_dir, MemoryLog(), resume="auto")
    refused(CheckpointError, train, key, "--weights", "--log-dir")
    assert differences(read(log_dir / CHECKPOINT), saved) == []


def test_finished_run_on_other_validation_images_raises(data: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(data, tmp_path / "data"))
    run(make_config(), own, tmp_path / "log", MemoryLog())
    _edit("val")(own)
    train = partial(run, make_config(), own, tmp_path / "log", MemoryLog(), resume="auto")
    refused(CheckpointError, train, "val.sizes")


def _terminate_at(step: int) -> Callable[[TrainMetrics], None]:
    def send(metrics: TrainMetrics) -> None:
        if metrics.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return send


@pytest.mark.parametrize("step", [3, 5, 7])
def test_signal_saves_at_step_and_resumed_run_is_bit_identical(data: Path, tmp_path: Path, step: int) -> None:
    run(make_config(), data, tmp_path / "straight", MemoryLog())
    with pytest.raises(TrainingInterrupted, match=rf"SIGTERM at step {step} ") as caught:
        run(make_config(), data, tmp_path / "stopped", MemoryLog(_terminate_at(step)))
    assert caught.value.exit_code == 75
    assert read(tmp_path / "stopped" / CHECKPOINT)["position"]["step"] == step
    run(make_config(), data, tmp_path / "stopped", MemoryLog(), resume="auto")
    ends = [read(tmp_path / name / CHECKPOINT) for name in ("straight", "stopped")]
    assert differences(*ends) == []
