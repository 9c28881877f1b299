"""The best classes of single images by a network, and their probabilities."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.data.folder import Batch
from zoo.data.location import DataPath
from zoo.data.reading import read_bytes
from zoo.data.seeding import random_of_torch
from zoo.data.transforms import Transform, prepare
from zoo.errors import DataError, printable

TOP = 5
BATCH_SIZE = 16


class Prediction(NamedTuple):
    """The best classes of one image, the best first, and their probabilities (0 to 1).

    ``target`` is the class that the image belongs to, None where it is not known.
    """

    path: str
    target: int | None
    classes: tuple[int, ...]
    probabilities: tuple[float, ...]


class Recorder:
    """Collects the predictions of a validation; ``data`` is the folder that their paths are relative to."""

    def __init__(self, data: DataPath, top: int = TOP) -> None:
        self.predictions: list[Prediction] = []
        self._data = data
        self._top = top

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Keep the best classes of each image of ``batch``, whose logits are (N, classes)."""
        best = best_classes(logits, self._top)
        for path, target, (classes, probabilities) in zip(batch.paths, batch.targets.tolist(), best, strict=True):
            name = Path(os.path.relpath(path, self._data)).as_posix()
            self.predictions.append(Prediction(name, target, classes, probabilities))


def best_classes(logits: Tensor, top: int = TOP) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the ``top`` classes (all, if there are fewer) and their probabilities for logits (N, classes).

    The softmax is taken in float64 on the CPU. Of equal logits the class with the smaller number comes first, which
    `torch.topk` leaves open.
    """
    probabilities, classes = logits.detach().cpu().double().softmax(dim=1).sort(dim=1, descending=True, stable=True)
    top = min(top, logits.shape[1])
    pairs = zip(classes[:, :top].tolist(), probabilities[:, :top].tolist(), strict=True)
    return [(tuple(best), tuple(values)) for best, values in pairs]


def predict(
    model: nn.Module,
    paths: Sequence[Path],
    transform: Transform,
    device: torch.device,
    top: int = TOP,
    advance: Callable[[int], object] | None = None,
) -> tuple[list[Prediction], list[str]]:
    """Return the predictions of ``model`` for the image files in ``paths``, and a line for each file that has none.

    An image has no prediction if it cannot be read or ``transform`` cannot use it; its line says what is wrong and
    names the file.

    Args:
    - `model`: images (N, 3, h, w) -> logits (N, classes); it is put into evaluation mode and moved to ``device``.
    - `paths`: the image files.
    - `transform`: image -> (3, h, w), of one size for all images.
    - `device`: device on which the network computes.
    - `top`: number of classes of a prediction.
    - `advance`: called with 1 after every batch of 16 images.
    """
    model = model.to(device).eval()
    predictions: list[Prediction] = []
    faults: list[str] = []
    for start in range(0, len(paths), BATCH_SIZE):
        images: list[Tensor] = []
        names: list[str] = []
        for path in paths[start : start + BATCH_SIZE]:
            try:
                encoded = read_bytes(path)
                images.append(prepare(encoded, printable(path), transform, "pil", random_of_torch()).finished())
                names.append(str(path))
            except DataError as error:
                faults.append(str(error))
        if images:
            with torch.inference_mode():
                best = best_classes(model(torch.stack(images).to(device)), top)
            predictions += [
                Prediction(name, None, *best_of_image) for name, best_of_image in zip(names, best, strict=True)
            ]
        if advance is not None:
            advance(1)
    return predictions, faults
