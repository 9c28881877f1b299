"""``zoo predict`` prints the classes of images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import zoo
from tests.cli.conftest import Run
from tests.data.sample_images import random_image
from zoo.cli import main
from zoo.data.reading import read_image


def _predict(capsys: pytest.CaptureFixture[str], *command: object) -> list[dict[str, Any]]:
    assert main(["predict", *map(str, command), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_predictions_equal_network_with_its_own_preprocessing(
    finished: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    image = finished.data / "val" / "class1" / "1.png"
    model = zoo.get(finished.checkpoint).eval()
    with torch.no_grad():
        expected = model(zoo.transforms(model)(read_image(image))[None]).softmax(1)[0]
    (found,) = _predict(capsys, finished.checkpoint, image)
    assert found["path"] == str(image)
    assert [entry["name"] for entry in found["predictions"]] == [
        f"class{entry['class']}" for entry in found["predictions"]
    ]
    for entry in found["predictions"]:
        assert entry["probability"] == pytest.approx(float(expected[entry["class"]]), rel=1e-4)


def test_thousand_classes_have_imagenet_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18")
    with torch.no_grad():
        model.classifier.fc.bias[281] = 1e4
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    Image.new("RGB", (300, 260)).save(tmp_path / "cat.jpg")
    (found,) = _predict(capsys, "resnet18", tmp_path / "cat.jpg", "--weights", tmp_path / "weights.pth")
    assert found["predictions"][0] == {"class": 281, "name": "tabby", "probability": 1.0}
    assert len(found["predictions"]) == 5


def test_bad_images_are_named_and_the_others_keep_their_results(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken := tmp_path / "broken.jpg").write_bytes(b"no image")
    good = str(finished.data / "val/class0/0.png")
    images = [str(broken), good, str(tmp_path / "missing.png")]
    command = ["predict", str(finished.checkpoint), *images, "--json"]
    assert main(command) == 2
    output = capsys.readouterr()
    assert [entry["path"] for entry in json.loads(output.out)] == [good]
    assert "broken.jpg" in output.err
    assert "missing.png" in output.err
    assert "2 of 3 images" in output.err


def test_no_usable_image_fails_without_output(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{index}.jpg" for index in range(12)]
    command = ["predict", str(finished.checkpoint), *map(str, paths)]
    assert main(command) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "11.jpg" in output.err


def test_names_are_exact_in_json_and_escaped_in_text(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / os.fsdecode("\x1b[31mé\n|".encode() + b"\xff.png")
    random_image(0).save(path)
    command = ["predict", str(finished.checkpoint), str(path)]
    assert main([*command, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.isascii()  # for every encoding of the terminal
    (found,) = json.loads(output)
    assert os.fsencode(found["path"]) == os.fsencode(path)
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert r"\x1b[31mé\n\|\udcff.png" in lines[2]


def test_single_prediction_equals_validation(finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "predictions.csv"
    assert main(["validate", str(finished.checkpoint), str(finished.data), "-j", "0", "--predictions", str(file)]) == 0
    capsys.readouterr()
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]]
    found = _predict(capsys, finished.checkpoint, *(finished.data / line[0] for line in lines))
    assert [str(entry["predictions"][0]["class"]) for entry in found] == [line[2] for line in lines]
