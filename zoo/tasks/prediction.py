"""Top-k predictions of single images."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.data.dataset import Batch
from zoo.data.reading import read_bytes
from zoo.data.seeding import random_of_torch
from zoo.data.sources.location import DataPath
from zoo.data.transforms.classification import Transform, prepare
from zoo.errors import DataError, escape

DEFAULT_TOP = 5
BATCH_SIZE = 16


class Prediction(NamedTuple):
    """The most likely classes of one image, best first, and their probabilities (0 to 1).

    ``target`` is the true class; None if unknown.
    """

    path: str
    target: int | None
    classes: tuple[int, ...]
    probabilities: tuple[float, ...]


class PredictionCollector:
    """Collects the predictions of a validation, with paths relative to the folder ``data``."""

    def __init__(self, data: DataPath) -> None:
        self.predictions: list[Prediction] = []
        self._data = data

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Add the five best classes of each image of ``batch`` with logits (N, classes)."""
        best = best_classes(logits)
        for path, target, (classes, probabilities) in zip(batch.paths, batch.targets.tolist(), best, strict=True):
            name = Path(os.path.relpath(path, self._data)).as_posix()
            self.predictions.append(Prediction(name, target, classes, probabilities))


def best_classes(logits: Tensor, top: int = DEFAULT_TOP) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return at most ``top`` classes and their probabilities for each row of logits (N, classes), best first.

    Computes the softmax in float64 on the CPU. Breaks ties in favor of the smaller class; `torch.topk` leaves their
    order undefined.
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
    top: int = DEFAULT_TOP,
    advance: Callable[[int], object] | None = None,
) -> tuple[list[Prediction], list[str]]:
    """Predict the classes of image files; return the predictions, and an error message for each file without one.

    A file has no prediction if it cannot be read or ``transform`` rejects the image.

    Args:
    - `model`: images (N, 3, h, w) -> logits (N, classes); set to evaluation mode and moved to ``device``.
    - `paths`: the image files.
    - `transform`: image -> (3, h, w), the same size for all images.
    - `device`: device of the network.
    - `top`: number of classes per prediction.
    - `advance`: called with 1 after each batch of 16 images.
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
                images.append(prepare(encoded, escape(path), transform, random_of_torch()).finished())
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
