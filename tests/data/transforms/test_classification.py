"""Images reach the network as in the training of the published networks."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv
from torchvision.transforms import functional as tvF

from tests.data.sample_images import random_image
from zoo import transforms
from zoo.config.experiment import Input
from zoo.data.seeding import random_of_torch
from zoo.data.transforms.augmentation import Normalization, draw_colors, erase_randomly, finish
from zoo.data.transforms.classification import TrainTransform, Transform, ValTransform, random_box
from zoo.data.transforms.pixels import PILPixels, TensorPixels, open_pixels

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CFG = {"mean": MEAN, "std": STD, "scale": 12, "crop": 8, "interpolation": "bilinear", "source": None}
UNCHANGED = Normalization([0.0] * 3, [1.0] * 3)
GRAY = np.array([0.299, 0.587, 0.114])
BILINEAR, BICUBIC = tv.InterpolationMode.BILINEAR, tv.InterpolationMode.BICUBIC


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _values(image: Image.Image) -> np.ndarray:
    """Return the values from 0 to 1 in float64, (3, h, w)."""
    return np.asarray(image, dtype=np.float64).transpose(2, 0, 1) / 255


def _normalized(values: np.ndarray) -> np.ndarray:
    return (values - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))


def _close(result: Tensor, expected: np.ndarray) -> bool:
    return result.shape == expected.shape and bool(np.allclose(result.numpy(), expected, atol=1e-5))


def _blended(image: np.ndarray, kind: int, factor: float) -> np.ndarray:
    gray = (GRAY[:, None, None] * image).sum(axis=0, keepdims=True)
    other = [gray, np.zeros_like(image), np.full_like(image, gray.mean())][kind]
    return image * factor + other * (1 - factor)


# References: (image, generator) -> normalized values


def _center_crop(image: Image.Image, generator: Random) -> np.ndarray:
    scaled = image.resize((21, 16), Image.Resampling.BILINEAR)
    return _normalized(_values(scaled.crop((6, 3, 16, 13))))


def _ten_crops(image: Image.Image, generator: Random) -> np.ndarray:
    whole = _normalized(_values(image))
    places = [(0, 0), (0, 32), (22, 0), (22, 32), (11, 16)]
    return np.stack([part[:, y : y + 8, x : x + 8] for part in (whole, whole[:, :, ::-1]) for y, x in places])


def _random_crop(
    image: Image.Image, generator: Random, scale: int = -1, kind: str = "bilinear", colored: bool = False
) -> np.ndarray:
    if kind == "random":
        kind = "bilinear" if generator.random() < 0.5 else "bicubic"
    mode = BICUBIC if kind == "bicubic" else BILINEAR
    scaled = image if scale == -1 else tvF.resize(image, [scale], mode)
    crop = tvF.resized_crop(scaled, *random_box(scaled.height, scaled.width, generator), [16, 16], mode)
    values = _values(tvF.hflip(crop) if generator.random() < 0.5 else crop)
    if colored:
        colors = np.array(draw_colors(jitter=True, lighting=True, generator=generator))
        for change in range(3):
            values = _blended(values, change, colors[change])
        values = values + colors[3:, None, None]
    return _normalized(values)


#: A transform and its reference.
REFERENCES: dict[str, tuple[Transform, Callable[[Image.Image, Random], np.ndarray]]] = {
    "validation": (ValTransform(16, 10, MEAN, STD), _center_crop),
    "ten crops": (ValTransform(-1, 8, MEAN, STD, ten_crops=True), _ten_crops),
    **{
        f"{kind}, scale {scale}": (
            TrainTransform(Input(scale_train=scale, crop_train=16, interpolation_train=kind)),
            partial(_random_crop, scale=scale, kind=kind),
        )
        for kind in ("bilinear", "bicubic", "random")
        for scale in (-1, 28)
    },
    "jitter and lighting": (
        TrainTransform(Input(crop_train=16, color_jitter_train=True, lighting_train=True)),
        partial(_random_crop, colored=True),
    ),
}


@pytest.mark.parametrize(("transform", "reference"), REFERENCES.values(), ids=REFERENCES.keys())
def test_transform_equals_pil_and_torchvision(transform: Transform, reference: Callable[..., np.ndarray]) -> None:
    """Of a PIL image and of a JPEG file, also after the transform traveled to a worker that was not forked."""
    random_image(0, width=40, height=30).save(encoded := io.BytesIO(), format="JPEG")
    image, copy = Image.open(encoded), pickle.loads(pickle.dumps(transform))
    for seed in range(8):
        result = transform.draw(PILPixels(image), Random(seed))
        assert _close(result.finished(), reference(image, Random(seed)))
        assert torch.equal(transform.draw(open_pixels(encoded.getvalue(), "x"), Random(seed)).pixels, result.pixels)
        assert torch.equal(copy.draw(PILPixels(image), Random(seed)).pixels, result.pixels)


def test_colors_are_finished_without_rounding_to_pixels() -> None:
    """The result without colors is bit-identical to torchvision's."""
    image = random_image(0, width=40, height=30)
    transform = TrainTransform(Input(crop_train=16))
    drawn = transform.draw(PILPixels(image), Random(0))
    expected = tv.Normalize(MEAN, STD)(tv.ToTensor()(Image.fromarray(drawn.pixels.permute(1, 2, 0).numpy())))
    assert torch.equal(drawn.finished(), expected)


def test_bicubic_floats_are_clamped_and_not_rounded() -> None:
    image = random_image(0, width=40, height=30)
    resized = PILPixels(image).resized(16, 12, interpolation="bicubic").tensor()
    assert torch.equal(resized, tvF.pil_to_tensor(image.resize((12, 16), Image.Resampling.BICUBIC)))
    smooth = TensorPixels(tvF.to_tensor(image)).resized(16, 12, interpolation="bicubic").tensor()
    assert float((smooth - resized / 255).abs().max()) < 1.01 / 255  # PIL rounds twice


def _shapes(boxes: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """Return areas and aspect ratios of boxes (n, 4), and their positions relative to the possible range."""
    top, left, rows, columns = boxes.T
    return [
        rows * columns, columns / rows, rows, columns,
        top / np.maximum(height - rows, 1), left / np.maximum(width - columns, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (60, 500)])
def test_boxes_have_distribution_of_torchvision(height: int, width: int) -> None:
    count, generator = 4000, random_of_torch()
    ours = np.array([random_box(height, width, generator) for _ in range(count)], dtype=float)
    whole = torch.empty(3, height, width)
    published = [tv.RandomResizedCrop.get_params(whole, [0.08, 1], [3 / 4, 4 / 3]) for _ in range(count)]
    for one, other in zip(_shapes(ours, height, width), _shapes(np.array(published), height, width), strict=True):
        # The two-sample statistic of Kolmogorov and Smirnov; 1.95 is passed once in a thousand times.
        places = np.sort(np.concatenate([one, other]))
        shares = [np.searchsorted(np.sort(sample), places, side="right") / count for sample in (one, other)]
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * (2 / count) ** 0.5


def test_boxes_have_areas_and_ratios_of_settings() -> None:
    boxes = np.array([random_box(300, 400, random_of_torch(), (0.3, 0.5), (0.9, 1.2)) for _ in range(500)], dtype=float)
    areas, ratios, *_ = _shapes(boxes, 300, 400)
    assert 0.295 * 120_000 < areas.min() < 0.31 * 120_000
    assert 0.49 * 120_000 < areas.max() < 0.505 * 120_000
    assert 0.89 < ratios.min() < 0.92
    assert 1.18 < ratios.max() < 1.21


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_random_erasing_equals_timm(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = pytest.importorskip("timm.data.random_erasing")
    theirs = reference.RandomErasing(0.6, mode=mode, device="cpu")
    image, erased = torch.full((3, 20, 30), 7.0), 0
    for seed in range(30):
        generator = Random(seed)
        monkeypatch.setattr(reference, "random", generator)  # the same draws, in the same order
        # The noise of the patch is drawn last, from a generator that is seeded by the sample's.
        monkeypatch.setattr(reference, "_get_pixels", partial(_noise, generator))
        expected = theirs(image.clone())
        assert torch.equal(erase_randomly(image, 0.6, mode, Random(seed)), expected)
        erased += not torch.equal(expected, image)
    assert 10 < erased < 27
    assert torch.equal(image, torch.full((3, 20, 30), 7.0))


def _noise(generator: Random, per_pixel: bool, rand_color: bool, shape: tuple[int, int, int], **_: object) -> Tensor:
    if not per_pixel and not rand_color:
        return torch.zeros(shape[0], 1, 1)
    torch.manual_seed(generator.getrandbits(63))
    return torch.empty(shape if per_pixel else (shape[0], 1, 1)).normal_()


def test_rectangle_is_erased_after_normalization() -> None:
    image = PILPixels(Image.new("RGB", (40, 40), (255, 255, 255)))
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    drawn = TrainTransform(Input(crop_train=16, random_erasing_train=1.0)).draw(image, Random(0))
    assert drawn.normalization is None
    erased = (drawn.pixels == 0).all(dim=0)
    assert 0.02 * 256 * 0.8 < int(erased.sum()) < 256 / 3 * 1.2
    torch.testing.assert_close(drawn.pixels[:, ~erased], white[:, None].expand(3, int((~erased).sum())))


@pytest.mark.parametrize(("mode", "filling"), [("zeros", "constant"), ("reflect", "reflect")])
def test_padded_images_are_cropped_uniformly(mode: str, filling: str) -> None:
    image = random_image(0, width=4, height=4)
    plain = _normalized(_values(image))
    padded = [np.pad(part, [(0, 0), (2, 2), (2, 2)], mode=filling) for part in (plain, plain[:, :, ::-1])]
    windows = [part[:, y : y + 6, x : x + 6] for part in padded for y in range(3) for x in range(3)]
    transform = TrainTransform(Input(crop_train=6, pad_train=2, pad_mode_train=mode))
    counts = [0] * len(windows)
    for _ in range(720):
        cropped = transform(image)
        counts[next(index for index, window in enumerate(windows) if _close(cropped, window))] += 1
    assert 15 < min(counts) <= max(counts) < 70  # 40 on average, with a standard deviation of 6


def test_cutout_blanks_one_square_to_mean_color() -> None:
    image = Image.fromarray(np.full((6, 6, 3), 255, dtype=np.uint8))
    transform = TrainTransform(Input(crop_train=6, pad_train=0, cutout_train=4))
    places = set()
    for _ in range(200):
        blank = (transform(image) == 0).all(0)
        rows, columns = blank.any(1).nonzero().flatten(), blank.any(0).nonzero().flatten()
        assert blank.sum() == 16
        assert (rows[-1] - rows[0], columns[-1] - columns[0]) == (3, 3)
        places.add((int(rows[0]), int(columns[0])))
    assert places == set(itertools.product(range(3), range(3)))


def _draw_many(count: int, **kinds: bool) -> Tensor:
    generator = Random(0)
    return torch.tensor([draw_colors(generator=generator, **kinds) for _ in range(count)])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_jitter_blends_saturation_brightness_and_contrast(order: list[int]) -> None:
    images = torch.stack([_tensor(random_image(seed)) for seed in range(12)])
    colors = _draw_many(12, jitter=True, lighting=False)
    for image, change, result in zip(images, colors, finish(images, colors, UNCHANGED), strict=True):
        expected = image.double().numpy() / 255
        for kind in order:
            expected = _blended(expected, kind, float(change[kind]))
        assert _close(result, expected)


def test_jitter_draws_factors_from_its_whole_range_and_does_not_clamp() -> None:
    colors = _draw_many(2000, jitter=True, lighting=False)
    factors = colors[:, :3]
    assert torch.equal(colors[:, 3:], torch.zeros(2000, 3))
    assert (factors.amin(0) >= 0.6).all()
    assert (factors.amax(0) <= 1.4).all()
    # Each factor has the mean and variance of a uniform distribution, and no two factors are alike.
    assert torch.allclose(factors.mean(0), torch.ones(3), atol=0.02)
    assert torch.allclose(factors.T.cov(), torch.eye(3) * 0.8**2 / 12, atol=0.005)
    white = torch.full((2000, 3, 2, 2), 255, dtype=torch.uint8)  # neither saturation nor contrast changes it
    assert torch.allclose(finish(white, colors, UNCHANGED)[:, 0, 0, 0], factors[:, 1], atol=1e-6)


def test_lighting_adds_one_color_along_published_components() -> None:
    colors = _draw_many(4000, jitter=False, lighting=True)
    assert torch.equal(colors[:, :3], torch.ones(4000, 3))
    images = _tensor(random_image(0)).expand(50, -1, -1, -1)
    shifts = finish(images, colors[:50], UNCHANGED) - finish(images, None, UNCHANGED)
    assert torch.allclose(shifts, colors[:50, 3:, None, None].expand_as(shifts), atol=1e-6)
    colors = colors[:, 3:].double()
    vectors = torch.tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], dtype=torch.float64
    )
    variances = torch.diag((0.1 * torch.tensor([0.2175, 0.0188, 0.0045], dtype=torch.float64)) ** 2)
    expected = vectors @ variances @ vectors.T
    assert torch.allclose(colors.T.cov(), expected, atol=0.05 * expected.abs().max().item())
    components = (colors @ vectors).T.cov().diag()  # the two small ones are invisible in the matrix above
    assert torch.allclose(components, variances.diag(), rtol=0.1)


def test_large_image_does_not_depend_on_number_of_threads() -> None:
    """A main process has several threads, a worker of a loader has one."""
    transform = TrainTransform(Input(crop_train=256, color_jitter_train=True, lighting_train=True))
    image, before, results = PILPixels(random_image(0, width=300, height=300)), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([transform.draw(image, Random(seed)).finished() for seed in range(3)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


SMALL = TrainTransform(Input(crop_train=8, pad_train=2, cutout_train=3))


def test_call_draws_from_torchs_generator() -> None:
    image, copy = random_image(0), pickle.loads(pickle.dumps(SMALL))
    torch.manual_seed(0)
    expected = SMALL(image)
    torch.manual_seed(0)
    assert torch.equal(copy(image), expected)


# Arrays and tensors in place of images

TEN_CROPS = pytest.mark.parametrize("options", [{}, {"ten_crops": True}])


@TEN_CROPS
def test_arrays_equal_their_images(options: dict) -> None:
    for mode in ("RGB", "L", "RGBA"):
        image = random_image(0, width=30, height=20).convert(mode)
        expected = transforms(CFG, **options)(image)
        assert torch.equal(transforms(CFG, **options)(np.asarray(image)), expected)


@TEN_CROPS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_tensor_without_resize_is_bit_identical_to_image(options: dict, dtype: torch.dtype) -> None:
    image = random_image(0, width=30, height=20)
    tensor = _tensor(image) if dtype == torch.uint8 else _tensor(image).to(dtype) / 255
    transform = transforms(CFG, scale=-1, **options)
    result = transform(tensor)
    assert result.dtype == torch.float32
    if dtype == torch.float64:
        assert torch.allclose(result, transform(image), atol=1e-6)
    else:
        assert torch.equal(result, transform(image))


@TEN_CROPS
def test_batch_is_treated_image_by_image(options: dict) -> None:
    batch = torch.stack([_tensor(random_image(seed, width=30, height=20)) for seed in range(3)])
    transform = transforms(CFG, **options)
    assert torch.equal(transform(batch), torch.stack([transform(image) for image in batch]))
