"""Images reach the network as in the training of the published networks."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator
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
from zoo.data.transforms.classification import TrainTransform, ValTransform, random_box
from zoo.data.transforms.pixels import PILPixels, TensorPixels, open_pixels

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CFG = {"mean": MEAN, "std": STD, "scale": 12, "crop": 8, "interpolation": "bilinear", "source": None}
GRAY = np.array([0.299, 0.587, 0.114])
TO_TENSOR = tv.ToTensor()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads, like a main process and unlike a loader's worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _normalized(image: Image.Image) -> np.ndarray:
    values = (np.asarray(image, dtype=np.float64) / 255 - MEAN) / STD
    return values.transpose(2, 0, 1)


def _close(result: Tensor, expected: np.ndarray) -> bool:
    return result.shape == expected.shape and bool(np.allclose(result.numpy(), expected, atol=1e-5))


def test_validation_resizes_shorter_side_and_cuts_center() -> None:
    image = random_image(0, width=40, height=20)
    scaled = image.resize((32, 16), Image.Resampling.BILINEAR)
    expected = _normalized(scaled.crop((11, 3, 21, 13)))
    assert _close(ValTransform(16, 10, MEAN, STD)(image), expected)


def test_ten_crops_are_corners_center_and_their_mirror_images() -> None:
    image = random_image(0, width=20, height=14)
    whole = _normalized(image)
    mirrored = whole[:, :, ::-1]
    tops_and_lefts = [(0, 0), (0, 12), (6, 0), (6, 12), (3, 6)]
    windows = [part[:, y : y + 8, x : x + 8] for part in (whole, mirrored) for y, x in tops_and_lefts]
    assert _close(ValTransform(-1, 8, MEAN, STD, ten_crops=True)(image), np.stack(windows))


@pytest.mark.parametrize("scale", [-1, 24])
def test_training_crops_at_random_flips_and_normalizes(scale: int) -> None:
    image = random_image(0, width=40, height=30)
    scaled = image if scale == -1 else tv.Resize(scale)(image)
    transform = TrainTransform(Input(scale_train=scale, crop_train=16))
    for seed in range(8):
        result = transform.draw(PILPixels(image), Random(seed)).finished()
        generator = Random(seed)
        box = random_box(scaled.height, scaled.width, generator)
        crop = tvF.resized_crop(scaled, *box, [16, 16])
        expected = TO_TENSOR(tvF.hflip(crop) if generator.random() < 0.5 else crop)
        assert torch.equal(result, tv.Normalize(MEAN, STD)(expected))


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


@pytest.mark.parametrize("scale", [-1, 28])
def test_bicubic_crops_are_bit_identical_to_pil(scale: int) -> None:
    image = random_image(0, width=40, height=30)
    encoded = io.BytesIO()
    image.save(encoded, format="JPEG")
    transform = TrainTransform(Input(scale_train=scale, crop_train=16, interpolation_train="bicubic"))
    for seed in range(4):
        pixels = [PILPixels(Image.open(encoded)), open_pixels(encoded.getvalue(), "x")]
        first, second = (transform.draw(each, Random(seed)).pixels for each in pixels)
        assert torch.equal(first, second)
    decoded = Image.open(encoded)
    resized = PILPixels(decoded).resized(16, 12, interpolation="bicubic").tensor()
    assert torch.equal(resized, tvF.pil_to_tensor(decoded.resize((12, 16), Image.Resampling.BICUBIC)))
    smooth = TensorPixels(tvF.to_tensor(decoded)).resized(16, 12, interpolation="bicubic").tensor()
    assert float((smooth - resized / 255).abs().max()) < 1.01 / 255  # PIL rounds twice


def test_random_interpolation_is_bilinear_or_bicubic() -> None:
    image = PILPixels(random_image(0, width=40, height=30))
    kinds = {kind: TrainTransform(Input(crop_train=16, interpolation_train=kind)) for kind in ("bilinear", "bicubic")}
    chosen = []
    for seed in range(40):
        generator = Random(seed)
        chosen.append("bilinear" if generator.random() < 0.5 else "bicubic")
        expected = kinds[chosen[-1]].draw(image, generator).pixels
        assert torch.equal(
            TrainTransform(Input(crop_train=16, interpolation_train="random")).draw(image, Random(seed)).pixels,
            expected,
        )
    assert 8 < chosen.count("bicubic") < 32


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
    settings = Input(crop_train=16, random_erasing_train=1.0)
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    drawn = TrainTransform(settings).draw(image, Random(0))
    assert drawn.normalization is None
    erased = (drawn.pixels == 0).all(dim=0)
    assert 0.02 * 256 * 0.8 < int(erased.sum()) < 256 / 3 * 1.2
    torch.testing.assert_close(drawn.pixels[:, ~erased], white[:, None].expand(3, int((~erased).sum())))


def _shapes(boxes: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """Return areas and aspect ratios of boxes (n, 4), and their positions relative to the possible range."""
    top, left, rows, columns = boxes.T
    return [
        rows * columns, columns / rows, rows, columns,
        top / np.maximum(height - rows, 1), left / np.maximum(width - columns, 1),
    ]  # fmt: skip


def test_training_jitters_then_lights_then_normalizes() -> None:
    image = random_image(0, width=40, height=30)
    settings = Input(crop_train=16, color_jitter_train=True, lighting_train=True)
    result = TrainTransform(settings).draw(PILPixels(image), Random(1)).finished()
    generator = Random(1)
    crop = tvF.resized_crop(image, *random_box(30, 40, generator), [16, 16])
    values = TO_TENSOR(tvF.hflip(crop) if generator.random() < 0.5 else crop).double().numpy()
    colors = np.array(draw_colors(jitter=True, lighting=True, generator=generator))
    for kind in range(3):
        values = _blended(values, kind, colors[kind])
    expected = (values + colors[3:, None, None] - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    assert _close(result, expected)


@pytest.mark.parametrize(("mode", "filling"), [("zeros", "constant"), ("reflect", "reflect")])
def test_padded_images_are_cropped_uniformly(mode: str, filling: str) -> None:
    image = random_image(0, width=4, height=4)
    plain = _normalized(image)
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


def _blended(image: np.ndarray, kind: int, factor: float) -> np.ndarray:
    gray = (GRAY[:, None, None] * image).sum(axis=0, keepdims=True)
    other = [gray, np.zeros_like(image), np.full_like(image, gray.mean())][kind]
    return image * factor + other * (1 - factor)


UNCHANGED = Normalization([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_jitter_blends_saturation_brightness_and_contrast(order: list[int]) -> None:
    images, generator = torch.stack([_as_tensor(random_image(seed)) for seed in range(12)]), Random(0)
    colors = torch.tensor([draw_colors(jitter=True, lighting=False, generator=generator) for _ in images])
    for image, change, result in zip(images, colors, finish(images, colors, UNCHANGED), strict=True):
        expected = image.double().numpy() / 255
        for kind in order:
            expected = _blended(expected, kind, float(change[kind]))
        assert _close(result, expected)


def test_jitter_draws_factors_from_its_whole_range_and_does_not_clamp() -> None:
    generator = Random(0)
    colors = torch.tensor([draw_colors(jitter=True, lighting=False, generator=generator) for _ in range(2000)])
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
    generator = Random(0)
    colors = torch.tensor([draw_colors(jitter=False, lighting=True, generator=generator) for _ in range(4000)])
    assert torch.equal(colors[:, :3], torch.ones(4000, 3))
    images = _as_tensor(random_image(0)).expand(4000, -1, -1, -1)[:50]
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


@pytest.mark.usefixtures("two_threads")
def test_large_image_does_not_depend_on_number_of_threads() -> None:
    settings = Input(crop_train=256, color_jitter_train=True, lighting_train=True)
    transform, image = TrainTransform(settings), random_image(0, width=300, height=300)
    for seed in range(3):
        torch.manual_seed(seed)
        shared = transform(image)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        assert torch.equal(transform(image), shared)
        torch.set_num_threads(2)


SMALL = Input(crop_train=8, pad_train=2, cutout_train=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValTransform(12, 8, MEAN, STD, True),
        lambda: TrainTransform(Input()),
        lambda: TrainTransform(SMALL),
    ],
)
def test_transforms_travel_to_workers_not_forked(make: object) -> None:
    image = random_image(0)
    transform = make()
    copy = pickle.loads(pickle.dumps(transform))
    torch.manual_seed(0)
    expected = transform(image)
    torch.manual_seed(0)
    assert torch.equal(copy(image), expected)


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("options", [{}, {"ten_crops": True}])
def test_arrays_equal_their_images(options: dict) -> None:
    for mode in ("RGB", "L", "RGBA"):
        image = random_image(0, width=30, height=20).convert(mode)
        expected = transforms(CFG, **options)(image)
        assert torch.equal(transforms(CFG, **options)(np.asarray(image)), expected)


@pytest.mark.parametrize("options", [{}, {"ten_crops": True}])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_tensor_without_resize_is_bit_identical_to_image(options: dict, dtype: torch.dtype) -> None:
    image = random_image(0, width=30, height=20)
    tensor = _as_tensor(image)
    if dtype != torch.uint8:
        tensor = tensor.to(dtype) / 255
    transform = transforms(CFG, scale=-1, **options)
    result = transform(tensor)
    assert result.dtype == torch.float32
    if dtype == torch.float64:
        assert torch.allclose(result, transform(image), atol=1e-6)
    else:
        assert torch.equal(result, transform(image))


@pytest.mark.parametrize("options", [{}, {"ten_crops": True}])
def test_batch_is_treated_image_by_image(options: dict) -> None:
    batch = torch.stack([_as_tensor(random_image(seed, width=30, height=20)) for seed in range(3)])
    transform = transforms(CFG, **options)
    assert torch.equal(transform(batch), torch.stack([transform(image) for image in batch]))
