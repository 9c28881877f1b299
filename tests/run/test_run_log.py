"""A run's numbers reach the text log, the JSON lines and TensorBoard, at the right step and only once.

The metrics file holds whole JSON lines only, even after a crash.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zoo
from tests.cli.conftest import events
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment
from zoo.engine._reporting import TrainMetrics
from zoo.run.log_folder import METRICS_FILE
from zoo.run.run_log import JsonLines, RunLog, histogram_parameters
from zoo.tasks.classification import ClassificationResult

CPU = torch.device("cpu")
RESULT = ClassificationResult(top1=61.0, top5=91.0, loss=1.25, count=998, protocol="center224")


@pytest.fixture(autouse=True)
def _all_messages() -> Iterator[None]:
    logger = logging.getLogger("zoo")
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


@pytest.fixture
def config() -> Experiment:
    content = {
        "network": {"arch": "resnet18", "classes": 10},
        "input": {"mean": [0.5, 0.4, 0.3], "std": [0.25, 0.5, 0.125]},
        "seed": 7,
    }
    return parse_experiment(content, "test")


def _metrics(step: int, **changes: Any) -> TrainMetrics:
    values: dict[str, Any] = {
        "step": step, "epoch": 1, "batch": step, "num_batches": 63, "loss": 2.0, "scores": {"top1": 30.0, "top5": 70.0},
        "epoch_loss": 2.5, "epoch_scores": {"top1": 25.0, "top5": 65.0}, "lr": 0.1, "images_per_s": 812.0,
        "step_s": 0.08, "data_s": 0.01, "peak_memory_bytes": 1_200_000_000, "eta_s": 61.0,
    }  # fmt: skip
    return TrainMetrics(**{**values, **changes})


def _events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _events(folder).Scalars(tag)]


def test_text_json_and_tensorboard_have_numbers_at_their_step(tmp_path: Path, config: Experiment) -> None:
    with RunLog(tmp_path, 0, config) as log:
        log.begin(0, CPU, world_size=2, images={"train": {"images": 5}})
        log.train_metrics(_metrics(10))
        log.train_metrics(_metrics(20, loss=1.5))
        log.validation(1, 63, RESULT, is_best=True)
    assert _scalars(tmp_path, "train/loss") == [(10, 2.0), (20, 1.5)]
    assert _scalars(tmp_path, "train/lr") == [(10, pytest.approx(0.1)), (20, pytest.approx(0.1))]
    for tag, value in (("val/top1", 61.0), ("val/top5", 91.0), ("val/loss", 1.25)):
        assert _scalars(tmp_path, tag) == [(63, value)]
    text = _events(tmp_path).Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text) == json.loads(config.model_dump_json())
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    start, train, _, validation, end = events(tmp_path)
    assert (end["event"], end["seconds"] >= 0) == ("end", True)
    assert (start["world_size"], start["config_digest"]) == (2, config.digest())
    assert start["images"] == {"train": {"images": 5}}
    assert start["environment"]["torch"] == torch.__version__
    assert (train["step"], train["loss"], train["images_per_s"]) == (10, 2.0, 812.0)
    assert (validation["epoch"], validation["top1"], validation["is_best"]) == (1, 61.0, True)

    of_train, _, of_validation = (tmp_path / "training_0.log").read_text().splitlines()
    assert of_train.partition(" - ")[2] == (
        "epoch 2 [10/63] time 0.080 s, data 0.010 s, loss 2.0000 (2.5000), top-1 30.00 (25.00), "
        "top-5 70.00 (65.00), lr 0.1, 812 images/s, 1.20 GB, ETA 0:01:01"
    )
    assert of_validation.partition(" - ")[2] == (
        "epoch 2 validation: top-1 61.00 ± 1.54, top-5 91.00 ± 0.91, loss 1.2500 over 998 images, the best so far"
    )


def test_non_finite_numbers_are_null(tmp_path: Path, config: Experiment) -> None:
    with RunLog(tmp_path, 0, config) as log:
        log.record("gradient_angle", step=50, degrees=0.25)
        log.record("gradient_angle", step=100, degrees=math.nan)
    found = [(each["event"], each["step"], each["degrees"]) for each in events(tmp_path)]
    assert found == [("gradient_angle", 50, 0.25), ("gradient_angle", 100, None)]


def test_resume_hides_records_beyond_its_step(tmp_path: Path, config: Experiment) -> None:
    for first_step, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        with RunLog(tmp_path, 0, config) as log:
            log.begin(first_step, CPU, world_size=1, images={})
            for step in steps:
                log.train_metrics(_metrics(step, loss=float(first_step + step)))
    assert _scalars(tmp_path, "train/loss") == [(10, 10.0), (20, 20.0), (30, 50.0), (40, 60.0)]
    assert [record["event"] for record in events(tmp_path)] == [
        *("start", "train", "train", "train", "end", "resume", "train", "train", "end"),
    ]
    assert events(tmp_path)[5]["step"] == 20


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("revcol_tiny", ["cls.classifier.1"]),
        ("revvit_s", ["head.projection", "norm"]),
        ("wider_resnet16", ["bn_out", "classifier.fc"]),
        ("torchvision:densenet121", ["classifier"]),
    ],
)
def test_histograms_are_of_classifier_and_last_norm(name: str, modules: list[str]) -> None:
    with torch.device("meta"):
        model = zoo.get(name)
    assert sorted(histogram_parameters(model)) == [
        f"{module}.{key}" for module in modules for key in ("bias", "weight")
    ]


def test_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"event": "start"}\n{"event": "tra')
    lines = JsonLines(path)
    lines.write("resume")
    lines.close()
    assert [record["event"] for record in events(tmp_path)] == ["start", "resume"]
