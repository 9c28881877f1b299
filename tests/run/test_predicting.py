"""`zoo.predict` returns the most likely classes of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.cli.conftest import Run
from tests.refusals import refused
from zoo.data.reading import read_image


def test_predictions_use_preprocessing_of_network(finished: Run) -> None:
    folder = finished.data / "val" / "class0"
    found = zoo.predict(finished.checkpoint, folder, top=2, verbose=False)
    assert [path for path, _ in found] == sorted(map(str, folder.iterdir()))
    model = zoo.get(finished.checkpoint).eval()
    for path, classes in found:
        with torch.no_grad():
            expected = model(zoo.transforms(model)(read_image(path))[None]).softmax(1)[0]
        assert [each.name for each in classes] == [f"class{each.index}" for each in classes]
        assert [each.probability for each in classes] == pytest.approx(
            expected.sort(descending=True)[0].tolist(), abs=2e-6
        )


@pytest.mark.parametrize("kind", ["path", "text", "list", "loaded network"])
def test_images_and_networks_may_be_given_in_any_form(kind: str, finished: Run) -> None:
    image = finished.data / "val" / "class0" / "0.png"
    network = zoo.load_network(finished.checkpoint) if kind == "loaded network" else finished.checkpoint
    images = {"text": str(image), "list": [image, image.parent]}.get(kind, image)
    found = zoo.predict(network, images, verbose=False)
    assert len(found) == (5 if kind == "list" else 1)
    (expected,) = zoo.predict(finished.checkpoint, [image], verbose=False)
    assert found[0].path == expected.path
    assert [each.index for each in found[0].classes] == [each.index for each in expected.classes]


def test_unreadable_image_raises_with_its_name(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    images = [tmp_path / "x.png", finished.data / "val" / "class0" / "0.png"]
    refused(zoo.DataError, lambda: zoo.predict(finished.checkpoint, images), "1 of 2 images", "x.png")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"top": 0}, "top = 0"), ({"weights": "x.pth", "network": "loaded"}, "is loaded with its weights")],
)
def test_wrong_arguments_raise(arguments: dict[str, object], error: str, finished: Run) -> None:
    network = zoo.load_network(finished.checkpoint) if arguments.pop("network", None) else finished.checkpoint
    predict: Any = partial(zoo.predict, network, finished.data, **arguments)
    refused(zoo.ConfigError, predict, error)
