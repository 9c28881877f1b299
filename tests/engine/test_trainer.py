"""The loop reports, validates, saves and stops when it should."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import SIDE_PX, Drive, MemoryLog, build_net, differences, make_config, make_images, run
from tests.refusals import refused
from zoo.engine._checkpoint import BEST, CHECKPOINT, PREVIOUS, read
from zoo.engine._state import TrainState, all_finite
from zoo.engine._validation import validate
from zoo.errors import CheckpointError, DataError, NonFiniteLossError

NUM_BATCHES, EPOCHS = 5, 3
SCHEDULE = {"type": "cosine", "mode": "step", "warmup_epochs": 0.5}


class Finished(NamedTuple):
    """A run that has ended: its log, with a report after every second step, its folder and its state."""

    log: MemoryLog
    folder: Path
    state: TrainState


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    log, folder = MemoryLog(), tmp_path_factory.mktemp("finished")
    return Finished(log, folder, run(make_config(), data, folder, log, log_interval=2))


def test_reports_come_at_interval_and_end_of_epoch(finished: Finished) -> None:
    metrics = finished.log.metrics
    assert [(m.epoch, m.batch, m.step) for m in metrics] == [
        (epoch, batch, epoch * NUM_BATCHES + batch) for epoch in range(EPOCHS) for batch in (2, 4, 5)
    ]
    schedule = finished.state.config.optimizer.schedule
    rates = [0.05 * schedule.factor(m.epoch, m.batch - 1, NUM_BATCHES, 0.05) for m in metrics]
    assert [m.lr for m in metrics] == rates
    assert len(set(rates)) == len(rates)
    assert all(m.images_per_s > 0 and m.peak_memory_bytes > 10**6 and m.step_s >= m.data_s > 0 for m in metrics)
    assert metrics[0].eta_s > metrics[-1].eta_s == 0
    assert finished.log.bars[:2] == [("epoch 1/3", NUM_BATCHES, 0), ("validation", 1, 0)]


def test_interval_averages_combine_to_epoch_average(finished: Finished) -> None:
    for end in (3, 6, 9):
        records, sizes = [part.record() for part in finished.log.metrics[end - 3 : end]], (16, 16, 8)
        for key in ("loss", "top1", "top5"):
            mean = sum(record[key] * size for record, size in zip(records, sizes, strict=True)) / 40
            assert mean == pytest.approx(records[-1][f"epoch_{key}"])


def test_epoch_ends_with_validation_and_checkpoint(finished: Finished) -> None:
    log, folder, state = finished
    assert [(epoch, step) for epoch, step, _, _ in log.validations] == [(0, 5), (1, 10), (2, 15)]
    scores = [result.score for _, _, result, _ in log.validations]
    bests = [top1 > max(scores[:epoch], default=-1) for epoch, top1 in enumerate(scores)]
    assert [is_best for *_, is_best in log.validations] == bests
    assert all(result.count == 6 for _, _, result, _ in log.validations)
    content = read(folder / CHECKPOINT)
    assert content["position"] == {"epoch": 3, "batch": 0, "step": 15}
    assert content["best_prec1"] == max(scores)
    assert read(folder / PREVIOUS)["epoch"] == 2
    last_best = max(epoch for epoch, is_best in enumerate(bests) if is_best)
    assert torch.load(folder / BEST, weights_only=True)["epoch"] == last_best + 1
    assert state.ema is not None
    assert differences(content["ema"], state.ema.state_dict()) == []
    assert differences(content["ema"], content["state_dict"]) != []


def test_moving_average_is_scored_if_present(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[nn.Module] = []

    def spy(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scored.append(model)
        return validate(model, *args, **kwargs)

    monkeypatch.setattr("zoo.engine._trainer.validate", spy)
    for name, decay in (("with", 0.9), ("without", None)):
        state = run(make_config(optimizer={"ema_decay": decay}), data, tmp_path / name, MemoryLog())
        assert scored[-1] is (state.model if state.ema is None else state.ema)


def _statistics_that_are_scored(data: str, log_dir: str) -> list[float]:
    seen: list[float] = []

    def spy(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(model[1].running_mean.sum().item())
        return validate(model, *args, **kwargs)

    with mock.patch("zoo.engine._trainer.validate", spy):
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
        "zoo.engine._checkpoint.CheckpointWriter.save",
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


@pytest.mark.parametrize(("count", "saved"), [(0, []), (40, [CHECKPOINT])])
def test_fault_of_first_batch_of_epoch_saves_nothing_further(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, saved: list[str]
) -> None:
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", Drive("train", count, errno.ESTALE))
    message = refused(DataError, partial(run, make_config(), data, tmp_path / "log", MemoryLog()), "Stale file handle")
    assert (str(tmp_path / "log" / CHECKPOINT) in message) == bool(saved)
    assert [path.name for path in (tmp_path / "log").glob("checkpoint*")] == saved


def test_error_names_data_fault_and_failed_save(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.save", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", Drive("train", 17, errno.ESTALE))
    train = partial(run, make_config(), data, tmp_path / "log", MemoryLog())
    refused(DataError, train, "Stale file handle", "Input/output error")


def _rename(data: Path, *pairs: tuple[str, str]) -> None:
    for old, new in pairs:
        (data / old).rename(data / new)


def _blacken(path: Path) -> None:
    Image.new("RGB", (SIDE_PX, SIDE_PX)).save(path)


def _rename_all(data: Path) -> None:
    for file in [*(data / "train").glob("*/*")]:
        file.rename(file.with_name(f"image_{file.name}"))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image more": (lambda data: make_images(data, num_train=42), "(train.images: 40 before and 42 now"),
    "replaced": (lambda data: _rename(data, ("train/class0/4.png", "train/class0/400.png")), "(train.names: '"),
    "moved to another class": (
        lambda data: _rename(data, ("train/class0/4.png", "train/class1/4.png")),
        "(train.names: '",
    ),
    "renamed": (_rename_all, "(train.names: '"),
    "other content": (lambda data: _blacken(data / "train/class1/3.png"), "(train.sizes: '"),
    "validation image less": (lambda data: (data / "val/class0/2.png").unlink(), "(val.images: 6 before and 5 now"),
    "other content of validation": (lambda data: _blacken(data / "val/class1/3.png"), "(val.sizes: '"),
    "class renamed": (
        lambda data: _rename(data, ("train/class1", "train/other"), ("val/class1", "val/other")),
        "other",
    ),
}


@pytest.mark.parametrize(("change", "key"), CHANGES.values(), ids=CHANGES.keys())
def test_resume_on_other_images_raises(
    change: Callable[[Path], object], key: str, data: Path, finished: Finished, tmp_path: Path
) -> None:
    own, log_dir = shutil.copytree(data, tmp_path / "data"), shutil.copytree(finished.folder, tmp_path / "log")
    change(own)
    for config in (make_config(), make_config(optimizer={"schedule": SCHEDULE | {"epochs": EPOCHS + 1}})):
        train = partial(run, config, own, log_dir, MemoryLog(), resume="auto")
        refused(CheckpointError, train, key, "--weights", "--log-dir")
    assert differences(read(log_dir / CHECKPOINT), read(finished.folder / CHECKPOINT)) == []
