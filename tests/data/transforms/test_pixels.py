"""Files of every kind have the pixels that PIL gives, and damaged files are named."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.data.sample_images import random_image
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.data.reading import Unreadable, read_bytes
from zoo.data.transforms import pixels
from zoo.data.transforms.classification import TrainTransform, ValTransform, prepare, random_box
from zoo.data.transforms.pixels import Box, PILPixels, open_pixels

GOLDEN = Path(__file__).parents[2] / "golden" / "image.jpg"


def _encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "JPEG", "quality": 90} | options))
    return file.getvalue()


def _pil(encoded: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture(params=["torchvision", "torchcodec", "neither"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package that decodes JPEG files."""
    if request.param != "torchvision":
        monkeypatch.setattr(torch.ops, "image", SimpleNamespace())
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec.decoders", exc_type=ImportError)
    if request.param == "neither":
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    pixels._jpeg_decoder.cache_clear()
    yield
    pixels._jpeg_decoder.cache_clear()


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"subsampling": 1}),
        ("RGB", {"progressive": True}),
        ("RGB", {"keep_rgb": True}),
        ("RGB", {"restart_marker_blocks": 3}),
        ("RGB", {"optimize": True, "quality": 30}),
        ("L", {}),
        ("CMYK", {}),
        ("RGB", {"format": "PNG"}),
        ("P", {"format": "PNG"}),
        ("RGB", {"format": "WEBP"}),
    ],
)
def test_pixels_equal_pil(mode: str, options: dict) -> None:
    encoded = _encoded(random_image(0, width=75, height=53).convert(mode), **options)
    image = open_pixels(encoded, "a.jpg")
    assert (image.height, image.width) == (53, 75)
    assert torch.equal(image.tensor(), _pil(encoded))
    generator = Random(0)
    for _ in range(8):
        box = random_box(53, 75, generator)
        expected = _pil(encoded)[:, box.top : box.top + box.height, box.left : box.left + box.width]
        assert torch.equal(image.part(box).tensor(), expected)
        assert torch.equal(
            image.part(box).resized(20, 30).tensor(), PILPixels(_as_image(expected)).resized(20, 30).tensor()
        )


def _as_image(tensor: Tensor) -> Image.Image:
    return Image.fromarray(tensor.permute(1, 2, 0).contiguous().numpy())


@pytest.mark.usefixtures("decoder")
def test_whole_input_pipeline_is_bit_identical() -> None:
    settings = parse_experiment({"input": {"crop_train": 24, "color_jitter_train": True, "lighting_train": True}}, "x")
    encoded = _encoded(random_image(0, width=40, height=33))
    for transform in (
        TrainTransform(settings.input),
        ValTransform(36, 24, [0.5] * 3, [0.5] * 3),
        ValTransform(36, 24, [0.5] * 3, [0.5] * 3, ten_crops=True),
        ValTransform(-1, 24, [0.5] * 3, [0.5] * 3),
    ):
        for seed in range(4):
            drawn = prepare(encoded, "a.jpg", transform, Random(seed))
            expected = transform.draw(PILPixels(Image.open(io.BytesIO(encoded))), Random(seed))
            assert drawn.pixels.dtype == torch.uint8
            assert torch.equal(drawn.finished(), expected.finished())


@pytest.mark.parametrize("orientation", [1, 2, 3, 6, 8])
def test_exif_orientation_is_not_applied(orientation: int) -> None:
    image = random_image(0, width=75, height=53)
    exif = Image.Exif()
    exif[274] = orientation
    box, (plain, noted) = Box(8, 16, 30, 40), (_encoded(image), _encoded(image, exif=exif))
    assert torch.equal(open_pixels(noted, "a.jpg").part(box).tensor(), _pil(plain)[:, 8:38, 16:56])


@pytest.mark.usefixtures("decoder")
def test_damaged_files_are_named() -> None:
    encoded = _encoded(random_image(0, width=75, height=53))
    for damaged in (encoded[:60], encoded[: len(encoded) // 2], b"\xff\xd8\xff", b""):
        read = partial(open_pixels, damaged, "a.jpg")
        message = refused(Unreadable, lambda: read().part(Box(0, 0, 53, 75)).tensor(), "a.jpg: ")  # noqa: B023
        assert "\n" not in message


def test_changed_decoder_or_resizer_is_noticed() -> None:
    """The published scores belong to these bits. If this fails after an update of PIL or torchvision, so do they."""
    for image in (PILPixels(Image.open(GOLDEN)), open_pixels(read_bytes(GOLDEN), "image.jpg")):
        pixels = ValTransform(48, 40, [0.5] * 3, [0.25] * 3).draw(image, Random(0)).pixels
        assert hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest() == (
            "1355141793842b268c57acac278414950fc863fb6d56ebc77729834887ecf71d"
        )
