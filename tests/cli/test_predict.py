"""``zoo predict`` prints the classes of images."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from PIL import Image

import zoo
from tests.cli.conftest import Cli, Run
from tests.data.sample_images import random_image


def test_command_prints_predictions_of_python(finished: Run, cli: Cli) -> None:
    folder = finished.data / "val"
    printed = json.loads(cli("predict", finished.checkpoint, folder, "--json").out)
    found = zoo.predict(finished.checkpoint, folder, verbose=False)
    assert [entry["path"] for entry in printed] == [path for path, _ in found]
    assert [[(each["name"], each["probability"]) for each in entry["predictions"]] for entry in printed] == [
        [(each.name, each.probability) for each in classes] for _, classes in found
    ]


def test_thousand_classes_have_imagenet_names(cli: Cli, tmp_path: Path) -> None:
    model = zoo.get("resnet18")
    with torch.no_grad():
        model.classifier.fc.bias[281] = 1e4
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    Image.new("RGB", (300, 260)).save(tmp_path / "cat.jpg")
    printed = cli("predict", "resnet18", tmp_path / "cat.jpg", "--weights", tmp_path / "weights.pth", "--json").out
    (found,) = json.loads(printed)
    assert found["predictions"][0] == {"class": 281, "name": "tabby", "probability": 1.0}
    assert len(found["predictions"]) == 5


def test_bad_images_are_named_and_the_others_keep_their_results(finished: Run, cli: Cli, tmp_path: Path) -> None:
    (broken := tmp_path / "broken.jpg").write_bytes(b"no image")
    good = finished.data / "val/class0/0.png"
    printed = cli("predict", finished.checkpoint, broken, good, tmp_path / "missing.png", "--json", code=2)
    assert [entry["path"] for entry in json.loads(printed.out)] == [str(good)]
    for name in ("broken.jpg", "missing.png", "2 of 3 images"):
        assert name in printed.err


def test_names_are_exact_in_json_and_escaped_in_text(finished: Run, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode("\x1b[31mé\n|".encode() + b"\xff.png")
    random_image(0).save(path)
    output = cli("predict", finished.checkpoint, path, "--json").out
    assert output.isascii()  # for every encoding of the terminal
    (found,) = json.loads(output)
    assert os.fsencode(found["path"]) == os.fsencode(path)
    lines = cli("predict", finished.checkpoint, path).out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert r"\x1b[31mé\n\|\udcff.png" in lines[2]


def test_predictions_equal_validation(finished: Run, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "predictions.csv"
    cli("validate", finished.checkpoint, finished.data, "-j", 0, "--predictions", file)
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]]
    found = zoo.predict(finished.checkpoint, [finished.data / line[0] for line in lines], verbose=False)
    assert [str(classes[0].index) for _, classes in found] == [line[2] for line in lines]
