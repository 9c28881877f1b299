"""The quickstart trains once and is scored in every call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SETTINGS, Cli, Run
from tests.data.sample_labels import make_labeled
from zoo.cli.quickstart import DURATIONS
from zoo.config.parse import experiments_dir
from zoo.data.prepare.scenes import GARMENTS_DIR

RESULTS = Path(__file__).parents[2] / "docs" / "results"
pytestmark = pytest.mark.slow  # trains several times


@pytest.fixture
def in_small(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where the quickstart takes the settings and images of the tiny run."""
    _replace_experiments(monkeypatch, tmp_path / "experiments", quickstart_fashion_mnist=SETTINGS)
    monkeypatch.setattr("zoo.data.prepare.sample.unpack_sample", lambda: finished.data)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def _replace_experiments(monkeypatch: pytest.MonkeyPatch, folder: Path, **experiments: dict[str, Any]) -> None:
    """Make ``folder`` the folder of the bundled experiments, with other settings in some of them."""
    shutil.copytree(experiments_dir(), folder)
    for name, content in experiments.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr("zoo.config.parse.experiments_dir", lambda: folder)


def test_second_quickstart_only_scores_and_prints_the_same(in_small: Path, cli: Cli) -> None:
    first, second = cli("quickstart"), cli("quickstart")
    assert "epoch 2 validation" in first.err
    assert "validation:" not in second.err
    assert second.out == first.out
    for text in ("center10-scale12", "runs/quickstart/checkpoint.pth.tar", "tensorboard"):
        assert text in first.out
    assert (in_small / "runs" / "quickstart" / "checkpoint.pth.tar").is_file()
    assert "less than a minute on two CPU cores" in first.err
    (suggested,) = [line.split()[3:] for line in first.out.splitlines() if line.startswith("try next      zoo ")]
    cli(*suggested)


@pytest.mark.exhaustive
def test_real_quickstart_reaches_its_score(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Results of three seeds are in docs/results/quickstart.json; chance is 10.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    row, _ = [
        line.split("|") for line in cli("quickstart").out.splitlines() if "center" in line
    ]  # the other row is expected
    assert float(row[3]) > 80


def test_duration_of_segmentation_is_the_measured_one() -> None:
    runs = json.loads((RESULTS / "quickstart_segmentation.json").read_text())["runs"]
    assert [round(run["seconds"] / 30) / 2 for run in runs] == [2.5, 2.5, 2.5]
    assert DURATIONS["segmentation"] == "about two and a half minutes"


def test_segmentation_quickstart_explains_classes(
    finished: Run, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 3},
        "optimizer": {"batch_size": 4, "schedule": {"epochs": 1}},
        "input": {"crop_train": 16},
    }
    body = SETTINGS | {"network": SETTINGS["network"] | {"arch": "resnet18"}}
    experiments = {"quickstart_scenes": settings, "quickstart_scenes_body": body}
    _replace_experiments(monkeypatch, tmp_path / "experiments", **experiments)
    data = make_labeled(tmp_path / "data", num_train=4, num_val=3)
    shutil.copytree(finished.data, data / GARMENTS_DIR)
    (data / "classes.txt").write_text("sky\nsea\nship\n")
    monkeypatch.setattr("zoo.data.prepare.scenes.unpack_scenes", lambda: data)
    monkeypatch.chdir(tmp_path)
    output = cli("quickstart", "--task", "segmentation")
    assert "training takes about two and a half minutes" in output.err
    assert output.err.index("training resnet18") < output.err.index("training deeplab_resnet18")
    assert "head and cls keep their initial values" in output.err  # the body is pretrained on garments
    assert "| mIoU % | pixel accuracy % |" in output.out
    assert [row[0] for row in output.rows if row[0].startswith("s")] == ["sky", "sea", "ship"]
