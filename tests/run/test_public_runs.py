"""`zoo.train` is a whole run: no process to open, no deep import."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import zoo
import zoo.run.training
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.engine._checkpoint import read
from zoo.run.training import TrainingResult

SETTINGS = {
    "network": {"arch": "resnet32_cifar", "classes": 2},
    "optimizer": {"batch_size": 4, "learning_rate": 0.01, "schedule": {"epochs": 1}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10},
}


pytestmark = pytest.mark.usefixtures("small_networks")


@pytest.fixture(scope="module")
def run(small_networks: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    """A folder with data and the log folder runs/mine of one call of `zoo.train`, and its result."""
    root = tmp_path_factory.mktemp("public")
    make_images(root / "data", num_train=4, num_val=3)
    experiment = parse_experiment(SETTINGS, "test")
    return root, zoo.train(experiment, root / "data", log_dir=str(root / "runs" / "mine"), log_every=1)


def test_train_returns_scores_of_the_last_validation(run: tuple[Path, TrainingResult]) -> None:
    root, result = run
    log_dir = root / "runs" / "mine"
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    (validation,) = [record for record in records if record["event"] == "validation"]
    assert result.scores == {name: validation[name] for name in ("top1", "top5")}
    assert (result.best_score, result.best_epoch) == (validation["top1"], 0)
    for path in (result.checkpoint, result.best_weights):
        assert path is not None
        assert zoo.score(path, root / "data").top1 == result.scores["top1"]
    assert "epoch 1 validation: " in (log_dir / "training_0.log").read_text()


def test_train_names_the_authors_number_of_gpus(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=4, num_val=2)
    expected = {"source": "a paper", "gpus": 4, "scores": {"center224": {"top1": 50}}}
    experiment = parse_experiment({**SETTINGS, "expected": expected}, "test")
    zoo.train(experiment, data, log_dir=tmp_path / "run", replicas=2)
    text = (tmp_path / "run" / "training_0.log").read_text()
    assert "cpu, 1 process, 2 replicas; the authors had 4 GPUs: --replicas 4 has their batch statistics" in text
    assert "epoch 1 digest: " in text


def test_train_says_how_many_images_replicas_with_synchronized_norms_hold(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=8, num_val=2)
    settings = {"network.norm": "sync", "network.activation": "leaky_relu", "optimizer.accumulate_steps": 2}
    zoo.train(
        parse_experiment(SETTINGS, "test"), data, log_dir=tmp_path / "run", replicas=2, batch_size=8, settings=settings
    )
    assert re.search(r"memory +of 4 images at a time", (tmp_path / "run" / "training_0.log").read_text())


def test_train_continues_from_a_loaded_network(run: tuple[Path, TrainingResult], tmp_path: Path) -> None:
    root, result = run
    loaded = zoo.load_network(result.checkpoint)
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    again = zoo.train(loaded, root / "data", log_dir=tmp_path / "again", epochs=2)
    assert again.model is loaded.model
    assert read(again.checkpoint)["config"]["optimizer"]["schedule"]["epochs"] == 2
    assert again.scores.keys() == result.scores.keys()
    assert any(not torch.equal(value, before[key]) for key, value in again.model.state_dict().items())
    train = partial(zoo.train, loaded, root / "data", log_dir=tmp_path / "plain", memory="plain")
    refused(zoo.ConfigError, train, "ResNet: memory = 'plain'")
    refused(zoo.ConfigError, lambda: zoo.score(loaded, root / "data", weights=result.checkpoint), "weights")
