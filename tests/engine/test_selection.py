"""Early stopping and the best weights follow the validation scores, over interruptions too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from zoo.config.experiment import Experiment
from zoo.engine._checkpoint import BEST, RANKED, ranked_name
from zoo.engine._observers import Observer
from zoo.engine._state import TrainState
from zoo.engine._task import Result
from zoo.engine._trainer import Trainer

SCORES = [50.0, 70.0, 60.0, 70.0, 80.0, 10.0, 75.0, 60.0, 90.0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=16)


def _config(epochs: int = len(SCORES), patience: int | None = None, keep_best: int = 1) -> Experiment:
    schedule = {"epochs": epochs, "patience": patience}
    return make_config(optimizer={"schedule": schedule}, checkpoint={"keep_best": keep_best, "every_steps": 1})


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Return a function that sets the scores of the epochs."""
    validate = Trainer._validation

    def set_scores(scores: Sequence[float]) -> None:
        def fake(trainer: Trainer, loader: Any) -> Result:
            return replace(validate(trainer, loader), top1=scores[trainer.state.epoch])  # type: ignore[type-var]

        monkeypatch.setattr(Trainer, "_validation", fake)

    return set_scores


@pytest.mark.parametrize(
    ("patience", "scores", "epochs"),
    [
        (1, [50, 60, 60, 70], 3),
        (2, [50, 60, 60, 70, 69, 68, 90], 6),
        (3, [50, 40, 30, 50, 60], 4),
        (3, [50, 40, 30, 60, 50], 5),
        (None, [50, 40, 30, 20, 10], 5),
    ],
)
def test_run_ends_when_scores_are_stale(
    patience: int | None, scores: list[float], epochs: int, data: Path, tmp_path: Path, scored: Any
) -> None:
    scored(scores)
    state = run(_config(len(scores), patience), data, tmp_path, log := MemoryLog())
    assert len(log.validations) == state.epoch == epochs
    assert state.best_epoch == max(range(epochs), key=lambda epoch: (scores[epoch], -epoch))
    assert state.is_done


@pytest.mark.parametrize("breaks", [[], [2, 5]])
def test_run_counts_and_keeps_best_epochs_over_breaks(
    breaks: list[int], data: Path, tmp_path: Path, scored: Any
) -> None:
    scored(SCORES)
    for epochs in (*breaks, len(SCORES)):
        state = run(_config(epochs, patience=3, keep_best=3), data, tmp_path, MemoryLog(), resume="auto")
    assert state.epoch == 8
    names = sorted(path.name for path in tmp_path.glob(RANKED))
    assert names == [ranked_name(70, 1), ranked_name(75, 6), ranked_name(80, 4)]


def test_stopped_run_continues_only_with_more_patience(data: Path, tmp_path: Path, scored: Any) -> None:
    scored(SCORES)
    assert run(_config(patience=1), data, tmp_path, MemoryLog()).epoch == 3
    assert run(_config(patience=1), data, tmp_path, log := MemoryLog(), resume="auto").epoch == 3
    assert log.numbers == []
    assert run(_config(patience=3), data, tmp_path, MemoryLog(), resume="auto").epoch == 8


def test_best_weights_are_those_of_their_epochs(data: Path, tmp_path: Path, scored: Any) -> None:
    weights = []

    class Copies(Observer):
        def after_epoch(self, state: TrainState, result: Result | None) -> None:
            weights.append({name: value.clone() for name, value in state.scored_model.state_dict().items()})

    scored(SCORES)
    run(_config(7, keep_best=2), data, tmp_path, MemoryLog(), observers=[Copies()])
    kept = sorted(tmp_path.glob(RANKED))
    assert [path.name for path in kept] == ["best_075.000_epoch0007.pth.tar", "best_080.000_epoch0005.pth.tar"]
    for path, epoch, score in zip(kept, (6, 4), (75.0, 80.0), strict=True):
        content = torch.load(path, weights_only=True)
        assert differences(content["state_dict"], weights[epoch]) == []
        assert (content["best_prec1"], content["best_epoch"], content["epoch"]) == (score, epoch, epoch + 1)
    assert differences(torch.load(tmp_path / BEST, weights_only=True)["state_dict"], weights[4]) == []


def test_names_sort_by_score() -> None:
    entries = [(9.5, 0), (10.0, 20), (99.999, 3), (100.0, 1), (0.0, 9999)]
    assert sorted(ranked_name(*entry) for entry in entries) == [ranked_name(*entry) for entry in sorted(entries)]


def test_lower_keep_best_removes_files(data: Path, tmp_path: Path, scored: Any) -> None:
    scored(SCORES)
    run(_config(3, keep_best=3), data, tmp_path, MemoryLog())
    assert len(list(tmp_path.glob(RANKED))) == 3
    run(_config(5, keep_best=1), data, tmp_path, MemoryLog(), resume="auto")
    assert list(tmp_path.glob(RANKED)) == []


def test_public_result_of_early_stop_has_last_scores(data: Path, tmp_path: Path, scored: Any) -> None:
    scored([50.0, 40.0, 60.0])
    config = _config(3, patience=1).model_dump(mode="json")
    config["network"] = {"arch": "resnet32_cifar", "num_classes": 2}
    result = zoo.train(zoo.config.parse.parse_experiment(config, "test"), data, log_dir=tmp_path, verbose=False)
    assert (result.best_score, result.best_epoch, result.scores["top1"]) == (50.0, 0, 40.0)
    assert "stopped after epoch 2, 1 epoch without a better score" in (tmp_path / "training_0.log").read_text()
