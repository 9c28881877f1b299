"""What a segmentation is reported with: the table of its classes, and the pictures of examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from zoo.config import parse_experiment
from zoo.data.folder import Batch
from zoo.run.label_images import palette_for
from zoo.run.segmentation_scores import TITLE_PX, write_examples
from zoo.tasks.segmentation import SegmentationTask

EXPERIMENT = parse_experiment({"network": {"arch": "deeplab_resnet18", "classes": 3}}, "test")


def test_the_first_images_are_drawn_beside_labels_and_predictions(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 300, 3), dtype=np.uint8)  # wide enough as it is
    Image.fromarray(pixels).save(tmp_path / "image.png")
    labels, predictions = (torch.randint(0, 3, (1, 10, 300)) for _ in range(2))
    labels[0, 0, 0] = 255
    logits = torch.nn.functional.one_hot(predictions, 3).permute(0, 3, 1, 2).float()
    palette = palette_for(3)
    record = write_examples(tmp_path / "out", SegmentationTask(EXPERIMENT), palette, count=2)
    for _ in range(3):
        record(Batch(torch.zeros(1, 3, 10, 300), labels, [], [str(tmp_path / "image.png")]), logits)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1-image.png", "2-image.png"]
    sheet = np.array(Image.open(tmp_path / "out" / "1-image.png").convert("RGB"))[TITLE_PX : TITLE_PX + 10]
    assert np.array_equal(sheet[:, :300], pixels)
    for place, classes in ((1, labels), (2, predictions)):
        colors = np.array([*palette.colors, [0, 0, 0]])[classes[0].clamp(max=3)]
        shown = sheet[:, 300 * place : 300 * (place + 1)].astype(int)
        assert np.abs(shown - (pixels.astype(int) + colors) / 2).max() <= 1
