"""Every decoder gives the pixels that PIL gives, for files of every kind, and damaged files are named."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.data.sample_images import random_image
from zoo.config import Decoder, parse_experiment
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.pixels import Box, PILPixels, decode_jpeg, jpeg_frame, open_pixels
from zoo.data.reading import Unreadable, read_bytes
from zoo.data.transforms import TrainTransform, ValTransform, prepare, random_box
from zoo.spec.limits import MAX_PIXELS

DECODERS: tuple[Decoder, ...] = ("pil", "torchvision")
GOLDEN = Path(__file__).parents[1] / "golden" / "image.jpg"


def _encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "JPEG", "quality": 90} | options))
    return file.getvalue()


def _pil(encoded: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"subsampling": 1}),
        ("RGB", {"progressive": True}),
        ("RGB", {"keep_rgb": True}),
        ("RGB", {"restart_marker_blocks": 3}),
        ("L", {}),
        ("CMYK", {}),
        ("RGB", {"format": "PNG"}),
        ("P", {"format": "PNG"}),
        ("RGB", {"format": "WEBP"}),
    ],
)
def test_the_pixels_are_those_of_pil(mode: str, options: dict) -> None:
    encoded = _encoded(random_image(0, width=75, height=53).convert(mode), **options)
    image = open_pixels(encoded, "a.jpg", "torchvision")
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


def _rearranged(encoded: bytes, sampling: int, width: int, height: int) -> bytes:
    """Return a JPEG file with the same blocks in another order: other subsampling and size, as many blocks."""
    found = bytearray(encoded)
    frame = jpeg_frame(encoded)
    assert frame is not None
    found[frame.place + 5 : frame.place + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    found[frame.place + 11] = sampling
    return bytes(found)


def _files() -> dict[str, bytes]:
    """Return JPEG files of all kinds."""
    image = random_image(0, width=64, height=48)
    exif = Image.Exif()
    exif[274] = 6
    files = {f"4:2:0, {w} x {h}": _encoded(random_image(1, w, h)) for w, h in [(1, 1), (17, 16), (16, 33), (40, 250)]}
    files |= {name: _encoded(image, subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0")}
    files |= {
        "4:4:0": _rearranged(files["4:2:2"], 0x12, 48, 64),
        "4:1:1": _rearranged(files["4:2:0"], 0x41, 128, 24),
        "h1v4": _rearranged(files["4:2:0"], 0x14, 32, 96),
        "gray": _encoded(image.convert("L")),
        "gray with subsampling": _rearranged(_encoded(image.convert("L")), 0x22, 64, 48),
        "CMYK": _encoded(image.convert("CMYK")),
        "EXIF": _encoded(image, exif=exif),
        "RGB": _encoded(image, keep_rgb=True),
        "progressive": _encoded(image, progressive=True),
        "restarts": _encoded(image, restart_marker_blocks=3),
        "restarts of rows": _encoded(image, restart_marker_rows=1),
        "optimized": _encoded(image, optimize=True, quality=30),
    }
    return files


FILES = _files()


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as in a worker of a loader, although this process is none."""
    monkeypatch.setattr("zoo.data.pixels.get_worker_info", object)


@pytest.mark.parametrize("kind", FILES)
def test_workers_decode_the_top_of_a_file_to_the_same_bits(
    kind: str, in_worker: None, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = open_pixels(FILES[kind], "a.jpg", "torchvision").tensor()
    height, width = whole.shape[1:]
    for end in range(1, height + 1):
        image = open_pixels(FILES[kind], "a.jpg", "torchvision")
        part = image.part(Box(end // 2, 0, end - end // 2, width)).tensor()
        assert torch.equal(part, whole[:, end // 2 : end]), end
    assert capfd.readouterr() == ("", "")


def test_workers_decode_only_the_rows_of_the_crop(in_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr("zoo.data.pixels.decode_jpeg", lambda file: decoded.append(decode_jpeg(file)) or decoded[-1])
    for kind in ("4:4:4", "4:2:0", "gray", "progressive"):
        for end in (7, 8, 31, 32, 48):
            open_pixels(FILES[kind], "a.jpg", "torchvision").part(Box(0, 0, end, 9))
    assert [image.shape[1] for image in decoded] == [
        *(8, 16, 32, 40, 48),  # units of 8 rows, and the row below
        *(16, 16, 32, 48, 48),
        *(8, 16, 32, 40, 48),
        *(48, 48, 48, 48, 48),
    ]


def test_a_file_that_is_truncated_below_the_crop_is_found(in_worker: None) -> None:
    for encoded in (FILES["4:2:0"], FILES["restarts"], FILES["progressive"]):
        with pytest.raises(Unreadable, match=r"a\.jpg: .*truncated"):
            open_pixels(encoded[:-40], "a.jpg", "torchvision").part(Box(0, 0, 3, 9))


def test_the_whole_way_to_the_network_has_the_same_bits() -> None:
    settings = parse_experiment({"input": {"crop_train": 24, "color_jitter_train": True, "lighting_train": True}}, "x")
    encoded = _encoded(random_image(0, width=40, height=33))
    for transform in (
        TrainTransform(settings.input),
        ValTransform(36, 24, [0.5] * 3, [0.5] * 3),
        ValTransform(36, 24, [0.5] * 3, [0.5] * 3, ten_crops=True),
        ValTransform(-1, 24, [0.5] * 3, [0.5] * 3),
    ):
        for seed in range(4):
            drawn = [prepare(encoded, "a.jpg", transform, one, Random(seed)) for one in DECODERS]
            assert drawn[0].pixels.dtype == torch.uint8
            assert torch.equal(drawn[0].finished(), drawn[1].finished())


@pytest.mark.parametrize("orientation", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("decoder", DECODERS)
def test_an_orientation_noted_in_the_file_is_not_applied(decoder: Decoder, orientation: int) -> None:
    image = random_image(0, width=75, height=53)
    exif = Image.Exif()
    exif[274] = orientation
    box, (plain, noted) = Box(8, 16, 30, 40), (_encoded(image), _encoded(image, exif=exif))
    assert torch.equal(open_pixels(noted, "a.jpg", decoder).part(box).tensor(), _pil(plain)[:, 8:38, 16:56])


@pytest.mark.parametrize("decoder", DECODERS)
def test_damaged_files_are_named(decoder: Decoder) -> None:
    encoded = _encoded(random_image(0, width=75, height=53))
    for damaged in (encoded[:60], encoded[: len(encoded) // 2], b"\xff\xd8\xff", b""):
        with pytest.raises(Unreadable, match=r"^a\.jpg: an image cannot be read: [^/\n]+$"):
            open_pixels(damaged, "a.jpg", decoder).part(Box(0, 0, 53, 75)).tensor()


def test_a_size_that_no_image_may_have_is_refused_before_memory_is_taken() -> None:
    encoded = bytearray(_encoded(random_image(0, width=75, height=53)))
    place = encoded.index(b"\xff\xc0") + 5
    encoded[place : place + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(Unreadable, match=f"a.jpg: .*65535 x 65535 px, not between 1 and {MAX_PIXELS:,}"):
        open_pixels(bytes(encoded), "a.jpg", "torchvision")


def test_workers_decode_regions_and_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for index in range(8):
        path = tmp_path / "train" / "ab"[index % 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encoded(random_image(index, width=75, height=53)))
    batches = []
    for one, workers in (("pil", 0), ("torchvision", 0), ("torchvision", 2)):
        content = {"network": {"classes": 2}, "optimizer": {"batch_size": 4}, "input": {"crop_train": 40}}
        content["input"] |= {"decoder": one}
        loader = build_train_loader(tmp_path, parse_experiment(content, "x"), LoaderOptions(workers=workers))
        batches.append(torch.cat([batch.on(torch.device("cpu")) for batch in loader]))
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], batches[2])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_changed_decoder_or_resizer_is_noticed(decoder: Decoder) -> None:
    """The published scores belong to these bits. If this fails after an update of PIL or torchvision, so do they."""
    drawn = prepare(read_bytes(GOLDEN), "image.jpg", ValTransform(48, 40, [0.5] * 3, [0.25] * 3), decoder, Random(0))
    assert hashlib.sha256(drawn.pixels.contiguous().numpy().tobytes()).hexdigest() == (
        "1355141793842b268c57acac278414950fc863fb6d56ebc77729834887ecf71d"
    )
    assert drawn.finished().double().mean().item() == pytest.approx(0.0, abs=1)
