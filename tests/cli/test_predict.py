"""``zoo predict`` names what is in pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import zoo
from tests.cli.conftest import Run
from zoo.cli import main
from zoo.data.reading import read_picture
from zoo.weights import read_checkpoint

PNG_MAGIC = b"\x89PNG\r\n"


def _predict(capsys: pytest.CaptureFixture[str], *command: object) -> list[dict[str, Any]]:
    assert main(["predict", *map(str, command), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_predictions_are_those_of_the_network_with_its_own_preprocessing(
    finished: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = finished.data / "val" / "class1" / "1.png"
    model = zoo.get(finished.checkpoint).eval()
    with torch.no_grad():
        expected = model(zoo.transforms(model)(read_picture(picture))[None]).softmax(1)[0]
    (found,) = _predict(capsys, finished.checkpoint, picture, "--classes", finished.data / "train")
    assert found["path"] == str(picture)
    assert [entry["name"] for entry in found["predictions"]] == [
        f"class{entry['class']}" for entry in found["predictions"]
    ]
    for entry in found["predictions"]:
        assert entry["probability"] == pytest.approx(float(expected[entry["class"]]), rel=1e-4)


def test_a_checkpoint_names_its_classes_and_top_limits_them(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = _predict(capsys, finished.checkpoint, finished.data / "val/class0/0.png", "--top", 1)
    assert [entry["name"] for entry in found["predictions"]] == [f"class{found['predictions'][0]['class']}"]


def test_without_names_classes_are_numbers(finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {key: value for key, value in read_checkpoint(finished.checkpoint).items() if key != "network"}
    torch.save(content, tmp_path / "old.pth.tar")
    (found,) = _predict(capsys, tmp_path / "old.pth.tar", finished.data / "val/class0/0.png")
    assert [entry["name"] for entry in found["predictions"]] == [str(entry["class"]) for entry in found["predictions"]]


def test_a_thousand_classes_have_imagenet_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18")
    with torch.no_grad():
        model.classifier.fc.bias[281] = 1e4
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    Image.new("RGB", (300, 260)).save(tmp_path / "cat.jpg")
    (found,) = _predict(capsys, "resnet18", tmp_path / "cat.jpg", "--weights", tmp_path / "weights.pth")
    assert found["predictions"][0] == {"class": 281, "name": "tabby", "probability": 1.0}
    assert len(found["predictions"]) == 5


def test_the_table_has_a_line_per_class_and_the_grid_is_drawn(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = sorted(map(str, finished.data.glob("val/*/*.png")))
    grid = tmp_path / "new" / "grid.png"
    assert main(["predict", str(finished.checkpoint), *pictures, "--grid", str(grid)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(pictures)
    assert grid.read_bytes().startswith(PNG_MAGIC)


def test_an_unreadable_picture_ends_with_its_name_and_no_output(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken := tmp_path / "broken.jpg").write_bytes(b"no picture")
    good = str(finished.data / "val/class0/0.png")
    assert main(["predict", str(finished.checkpoint), good, str(broken), "--grid", str(tmp_path / "g.png")]) == 2
    output = capsys.readouterr()
    assert "broken.jpg" in output.err
    assert output.out == ""
    assert not (tmp_path / "g.png").exists()


def test_a_grid_that_is_no_png_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "no-such-network", "no-such-picture", "--grid", "grid.jpg"]) == 2
    assert "grid.jpg is not called .png" in capsys.readouterr().err


def test_a_picture_predicted_alone_is_what_validation_scored(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "predictions.csv"
    assert main(["validate", str(finished.checkpoint), str(finished.data), "-j", "0", "--predictions", str(file)]) == 0
    capsys.readouterr()
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]]
    found = _predict(capsys, finished.checkpoint, *(finished.data / line[0] for line in lines))
    assert [str(entry["predictions"][0]["class"]) for entry in found] == [line[2] for line in lines]
