"""Predictions of single images are the softmax's best classes, under the right file names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from zoo.data.folder import Batch
from zoo.data.transforms import ValTransform
from zoo.tasks.prediction import Recorder, best_classes, predict

CPU = torch.device("cpu")


class Colours(nn.Module):
    """Says which of red, green and blue an image is; with dropout, so that a forgotten eval() is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.9)

    def forward(self, images: Tensor) -> Tensor:
        return self.drop(images.mean(dim=(2, 3)) * 10)


def _save(folder: Path, *colours: str) -> list[Path]:
    paths = [folder / f"{index}_{colour}.png" for index, colour in enumerate(colours)]
    for path, colour in zip(paths, colours, strict=True):
        Image.new("RGB", (12, 10), colour).save(path)
    return paths


def test_probabilities_are_the_softmax_of_all_classes_in_falling_order() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ((classes, probabilities),) = best_classes(logits, top=2)
    assert classes == (1, 3)
    assert probabilities == pytest.approx(logits.double().softmax(1)[0, [1, 3]].tolist())


def test_of_equal_logits_the_smaller_class_comes_first() -> None:
    assert best_classes(torch.zeros(1, 1000))[0][0] == (0, 1, 2, 3, 4)


def test_a_network_with_few_classes_names_them_all() -> None:
    ((classes, probabilities),) = best_classes(torch.tensor([[0.0, 1.0]]))
    assert (classes, len(probabilities)) == ((1, 0), 2)


def test_a_recorder_writes_paths_relative_to_the_data(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, top=1)
    paths = [str(tmp_path / "val" / "b" / "1.png"), str(tmp_path / "val" / "a" / "2.png")]
    recorder(Batch(torch.zeros(2, 3, 4, 4), torch.tensor([1, 0]), [], paths), torch.eye(2))
    assert [(line.path, line.target, line.classes) for line in recorder.predictions] == [
        ("val/b/1.png", 1, (0,)),
        ("val/a/2.png", 0, (1,)),
    ]


TRANSFORM = ValTransform(10, 8, [0.0] * 3, [1.0] * 3)


def test_images_are_told_apart_in_the_order_given_and_in_any_number(tmp_path: Path) -> None:
    colours = ["red", "blue", "lime"] * 7  # more than go through the network at once
    paths = _save(tmp_path, *colours)
    paths.append(paths[-1])
    found, faults = predict(Colours().train(), paths, TRANSFORM, CPU, top=1)
    assert [line.classes[0] for line in found] == [*[0, 2, 1] * 7, 1]
    assert [line.path for line in found] == [str(path) for path in paths]
    assert faults == []


def test_images_that_cannot_be_used_are_named_and_the_others_keep_their_results(tmp_path: Path) -> None:
    paths = _save(tmp_path, *["red", "blue", "lime"] * 12)
    for path in paths[:20]:  # more than go through the network at once
        path.write_bytes(b"no image")
    Image.new("RGB", (5, 4)).save(paths[30])
    paths.append(tmp_path / "missing.png")
    batches: list[int] = []
    transform = ValTransform(-1, 8, [0.0] * 3, [1.0] * 3)
    found, faults = predict(Colours(), paths, transform, CPU, top=1, advance=batches.append)
    good = [index for index in range(20, 36) if index != 30]
    assert [(line.path, line.classes) for line in found] == [(str(paths[i]), ((0, 2, 1)[i % 3],)) for i in good]
    assert len(faults) == 22
    assert all(str(path) in fault for path, fault in zip([*paths[:20], paths[30], paths[-1]], faults, strict=True))
    assert "a crop of 8 px does not fit" in faults[20]
    assert batches == [1, 1, 1]
