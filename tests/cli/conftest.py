"""Runs commands, and one tiny training run that several tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zoo
from tests.engine.tiny import make_images
from tests.hub_server import _package_and_hub, hub
from tests.nets import small_architectures
from zoo.cli import main

__all__ = ["_package_and_hub", "hub"]

SETTINGS = {
    "network": {"arch": "resnet32_cifar", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 2},
    "optimizer": {"batch_size": 8, "learning_rate": 0.01, "schedule": {"epochs": 2}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10},
}
NUM_VAL = 7


class Run(NamedTuple):
    """A finished run: its experiment file, its images, and the folder that it wrote."""

    config: Path
    data: Path
    log_dir: Path

    @property
    def checkpoint(self) -> Path:
        return self.log_dir / "checkpoint.pth.tar"


class Printed(NamedTuple):
    """The output of a command."""

    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the printed tables, without the lines below the headers."""
        lines = [line for line in self.out.splitlines() if line.startswith("|") and not line.startswith("| -")]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


Cli = Callable[..., Printed]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return the function that runs ``zoo`` with these arguments, checks its exit code and returns its output."""

    def run(*words: object, code: int = 0, run: Callable[[list[str]], int] = main) -> Printed:
        capsys.readouterr()
        found = run([*map(str, words)])
        printed = Printed(*capsys.readouterr())
        assert found == code, printed.err
        return printed

    return run


def events(log_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two epochs of 3 steps on 24 images, validated on 7 images."""
    root = tmp_path_factory.mktemp("run")
    config = root / "tiny.json"
    config.write_text(json.dumps(SETTINGS))
    data = make_images(root / "data", num_train=24, num_val=NUM_VAL)
    command = ["train", str(config), str(data), "--log-dir", str(root / "log"), "-j", "0", "-p", "1"]
    assert main(command) == 0
    return Run(config, data, root / "log")


@pytest.fixture
def small_networks() -> Iterator[None]:
    """Let one test build the small networks of tests/nets.py; the network of `finished` has its usual size."""
    with small_architectures():
        yield


@pytest.fixture(autouse=True)
def _committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands always see a clean checkout and a constant time."""
    monkeypatch.setattr("zoo.run.environment.checkout_commit", lambda: "0" * 40)
    monkeypatch.setattr("zoo.run.environment.utc_now", lambda: "2026-01-02T03:04:05+00:00")


def write_segmenter(root: Path) -> tuple[Path, Path]:
    """Write an experiment of a small network for Vistas, and weights as a snapshot of body, head and cls."""
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 65}
    settings = {"network": network, "segmentation": {"layout": "vistas", "longest_side_val": 48}}
    (root / "tiny.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", norm="inplace", num_classes=65).eval()
    parts = {part: getattr(model, part).state_dict() for part in ("body", "head", "cls")}
    torch.save({"state_dict": parts}, root / "model.pth.tar")
    return root / "tiny.json", root / "model.pth.tar"
