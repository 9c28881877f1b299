"""Image and classes are scaled, cropped, mirrored and padded together."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tvF

from tests.data.sample_images import random_image
from tests.data.sample_labels import IGNORE
from zoo.config.experiment import Input
from zoo.data.segmentation.transforms import Pixel, SegmentationTrain, SegmentationVal, scale_to_longest_side

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def _places(height: int, width: int) -> tuple[Image.Image, np.ndarray]:
    """Return an image and classes that encode the position of each pixel: red the row, green the column, class both."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([4 * rows, 4 * columns, np.full_like(rows, 255)], axis=-1).astype(np.uint8)
    return Image.fromarray(image), (rows * 64 + columns).astype(np.int32)


def _transform(crop: int, low: float = 1.0, high: float = 1.0, **settings: object) -> SegmentationTrain:
    values = {"mean": [0.0] * 3, "std": [1.0] * 3} | settings
    return SegmentationTrain(Input(crop_train=crop, **values), (low, high), IGNORE)


@pytest.mark.parametrize("factor", [0.5, 0.61, 0.7, 1.0, 1.37, 2.0])
def test_crop_is_part_of_whole_scaled_image_or_its_mirror_image(factor: float) -> None:
    image = random_image(3, 53, 41)
    classes = np.arange(53 * 41, dtype=np.int32).reshape(41, 53)
    width, height = round(53 * factor), round(41 * factor)
    whole = tvF.to_tensor(image.resize((width, height), Image.Resampling.BILINEAR))
    columns, rows = (((np.arange(n) + 0.5) * side / n).astype(int) for n, side in ((width, 53), (height, 41)))
    whole_classes = torch.from_numpy(classes[rows][:, columns]).long()
    seen = set()
    for seed in range(20 if factor == 1 else 4):
        crop, target = _transform(16, factor, factor)(image, classes, None, Random(seed))
        assert (crop.dtype, crop.shape, target.dtype) == (torch.float32, (3, 16, 16), torch.int64)
        for mirrored in (False, True):
            found = target.flip(-1) if mirrored else target
            corners = (whole_classes == found[0, 0]).nonzero().tolist()
            fits = [(y, x) for y, x in corners if torch.equal(whole_classes[y : y + 16, x : x + 16], found)]
            if fits:
                break
        top, left = fits[0]  # fails if the classes are not a part of the scaled whole
        part = whole[:, top : top + 16, left : left + 16]
        # PIL rounds positions of scaled crops.
        assert ((crop.flip(-1) if mirrored else crop) - part).abs().max() <= (0 if factor == 1 else 1.01 / 255)
        seen.add((mirrored, top, left))
    assert factor != 1 or (len(seen) > 15 and len({mirrored for mirrored, *_ in seen}) == 2)


def test_small_image_is_padded_with_mean_and_void() -> None:
    image, classes = _places(6, 5)
    for seed in range(6):
        crop, target = _transform(8, mean=MEAN, std=STD, color_jitter_train=True, lighting_train=True)(
            image, classes, None, Random(seed)
        )
        assert torch.equal(crop[:, 6:], torch.zeros(3, 2, 8))
        assert torch.equal(crop[:, :, 5:], torch.zeros(3, 8, 3))
        assert (target[6:] == IGNORE).all()
        assert (target[:, 5:] == IGNORE).all()
        assert (target[:6, :5] != IGNORE).all()


def test_factors_are_uniform_in_the_range() -> None:
    image, classes = Image.new("RGB", (100, 100)), np.zeros((100, 100), dtype=np.int32)
    transform, generator = _transform(250, 0.5, 2.0), Random(0)
    sides = np.array([int((transform(image, classes, None, generator)[1][0] != IGNORE).sum()) for _ in range(300)])
    assert (sides.min() >= 50, sides.max() <= 200) == (True, True)
    assert np.abs(np.quantile(sides, [0.25, 0.5, 0.75]) - [87.5, 125, 162.5]).max() < 12


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
def test_crop_contains_requested_pixel(factor: float) -> None:
    image, classes = _places(33, 47)
    transform = _transform(12, factor, factor)
    generator = Random(0)
    for _ in range(60):
        row, column = generator.randrange(33), generator.randrange(47)
        target = transform(image, classes, Pixel(row, column), generator)[1]
        found = target[target != IGNORE]
        near = ((torch.div(found, 64, rounding_mode="floor") - row).abs() <= 1) & ((found % 64 - column).abs() <= 1)
        assert near.any()
        assert factor < 1 or (found == row * 64 + column).any()


@pytest.mark.parametrize(("size", "scaled"), [((13, 9), (20, 13)), ((9, 13), (13, 20)), ((40, 30), (20, 15))])
def test_longer_side_is_scaled_and_label_map_is_not(size: tuple[int, int], scaled: tuple[int, int]) -> None:
    image = random_image(0, *size)
    tensor, target = SegmentationVal([0.0] * 3, [1.0] * 3, 20)(
        image, np.zeros((size[1], size[0]), dtype=np.int32), None, Random(0)
    )
    assert torch.equal(tensor, tvF.to_tensor(image.resize(scaled, Image.Resampling.BILINEAR)))
    assert target.shape == (size[1], size[0])


def test_sides_are_truncated_like_original_script() -> None:
    """2048 / 3136 * 3136 is less than 2048 in floats, so that the published network was given one pixel less."""
    assert scale_to_longest_side(Image.new("RGB", (3136, 2352)), 2048).size == (2047, 1535)
    assert scale_to_longest_side(Image.new("RGB", (4032, 3024)), 2048).size == (2048, 1536)
