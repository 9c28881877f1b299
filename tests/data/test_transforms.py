"""Pictures reach the network as they reached the published ones."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms as tv

from tests.data.pictures import random_picture
from zoo import registry
from zoo.config import Input
from zoo.data.color import ColorJitter, Lighting
from zoo.data.transforms import train_transform, transforms, val_transform
from zoo.errors import ConfigError, DataError

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CFG = {"mean": MEAN, "std": STD, "scale": 12, "crop": 8, "interpolation": "bilinear", "source": None}
GRAY = np.array([0.299, 0.587, 0.114])
TO_TENSOR = tv.ToTensor()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch share its work among two threads, as a main process does and a loader's worker does not."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _normalised(image: Image.Image) -> np.ndarray:
    values = (np.asarray(image, dtype=np.float64) / 255 - MEAN) / STD
    return values.transpose(2, 0, 1)


def _close(result: Tensor, expected: np.ndarray) -> bool:
    return result.shape == expected.shape and bool(np.allclose(result.numpy(), expected, atol=1e-5))


def test_validation_resizes_the_shorter_side_and_cuts_the_centre() -> None:
    image = random_picture(0, width=40, height=20)
    scaled = image.resize((32, 16), Image.Resampling.BILINEAR)
    expected = _normalised(scaled.crop((11, 3, 21, 13)))
    assert _close(val_transform(16, 10, MEAN, STD)(image), expected)


def test_a_scale_of_minus_one_keeps_the_size() -> None:
    image = random_picture(0, width=41, height=21)
    expected = _normalised(image.crop((15, 5, 26, 16)))
    assert _close(val_transform(-1, 11, MEAN, STD)(image), expected)


def test_ten_crops_are_corners_centre_and_their_mirror_images() -> None:
    image = random_picture(0, width=20, height=14)
    whole = _normalised(image)
    mirrored = whole[:, :, ::-1]
    tops_and_lefts = [(0, 0), (0, 12), (6, 0), (6, 12), (3, 6)]
    windows = [part[:, y : y + 8, x : x + 8] for part in (whole, mirrored) for y, x in tops_and_lefts]
    assert _close(val_transform(-1, 8, MEAN, STD, ten_crops=True)(image), np.stack(windows))


@pytest.mark.parametrize("ten_crops", [False, True])
def test_a_crop_larger_than_the_scale_is_an_error_that_names_both(ten_crops: bool) -> None:
    with pytest.raises(ConfigError, match="a crop of 320 px does not fit into pictures scaled to 256 px"):
        val_transform(256, 320, MEAN, STD, ten_crops)


@pytest.mark.parametrize("ten_crops", [False, True])
def test_a_crop_larger_than_an_unscaled_picture_is_an_error_and_not_padded(ten_crops: bool) -> None:
    with pytest.raises(DataError, match=r"crop of 11 px .* picture of 40 x 10 px \(scale -1\)"):
        val_transform(-1, 11, MEAN, STD, ten_crops)(random_picture(0, width=40, height=10))


@pytest.mark.parametrize("scale", [-1, 24])
def test_training_crops_at_random_flips_and_normalises(scale: int) -> None:
    image = random_picture(0, width=40, height=30)
    resize = [] if scale == -1 else [tv.Resize(scale)]
    crop = tv.RandomResizedCrop(16, (0.08, 1), (3 / 4, 4 / 3))
    expected = tv.Compose([*resize, crop, tv.RandomHorizontalFlip(0.5), TO_TENSOR, tv.Normalize(MEAN, STD)])
    ours = train_transform(Input(scale_train=scale, crop_train=16))
    for seed in range(8):
        torch.manual_seed(seed)
        result = ours(image)
        torch.manual_seed(seed)
        assert torch.equal(result, expected(image))


def test_half_of_the_training_pictures_are_mirrored() -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 250, 5, dtype=np.uint8)[None, :, None], (50, 1, 3)))
    transform = train_transform(Input(crop_train=8))
    mirrored = sum(bool(image[0, 4, 0] > image[0, 4, -1]) for image in (transform(ramp) for _ in range(400)))
    assert 160 < mirrored < 240


def test_training_jitters_then_lights_then_normalises() -> None:
    image = random_picture(0, width=40, height=30)
    steps = [tv.RandomResizedCrop(16), tv.RandomHorizontalFlip(), TO_TENSOR, ColorJitter(), Lighting()]
    settings = Input(crop_train=16, color_jitter_train=True, lighting_train=True)
    torch.manual_seed(1)
    result = train_transform(settings)(image)
    torch.manual_seed(1)
    assert torch.equal(result, tv.Compose([*steps, tv.Normalize(MEAN, STD)])(image))


@pytest.mark.parametrize(("mode", "filling"), [("zeros", "constant"), ("reflect", "reflect")])
def test_small_pictures_are_mirrored_and_padded_and_every_place_is_cropped_equally_often(
    mode: str, filling: str
) -> None:
    image = random_picture(0, width=4, height=4)
    plain = _normalised(image)
    padded = [np.pad(part, [(0, 0), (2, 2), (2, 2)], mode=filling) for part in (plain, plain[:, :, ::-1])]
    windows = [part[:, y : y + 6, x : x + 6] for part in padded for y in range(3) for x in range(3)]
    transform = train_transform(Input(crop_train=6, pad_train=2, pad_mode_train=mode))
    counts = [0] * len(windows)
    for _ in range(720):
        cropped = transform(image)
        counts[next(index for index, window in enumerate(windows) if _close(cropped, window))] += 1
    assert 15 < min(counts) <= max(counts) < 70  # 40 on average, with a standard deviation of 6


def test_cutout_blanks_one_square_to_the_mean_colour_and_reaches_every_corner() -> None:
    image = Image.fromarray(np.full((6, 6, 3), 255, dtype=np.uint8))
    transform = train_transform(Input(crop_train=6, pad_train=0, cutout_train=4))
    places = set()
    for _ in range(200):
        blank = (transform(image) == 0).all(0)
        rows, columns = blank.any(1).nonzero().flatten(), blank.any(0).nonzero().flatten()
        assert blank.sum() == 16
        assert (rows[-1] - rows[0], columns[-1] - columns[0]) == (3, 3)
        places.add((int(rows[0]), int(columns[0])))
    assert places == set(itertools.product(range(3), range(3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_train": 13, "pad_train": 1}, r"a crop of 13 px does not fit into a picture of 20 x 10 px with 1 px"),
        ({"crop_train": 8, "pad_train": 10, "pad_mode_train": "reflect"}, "cannot be reflected by 10 px"),
    ],
)
def test_a_picture_too_small_for_its_padded_crop_is_an_error(settings: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_transform(Input(**settings))(random_picture(0, width=20, height=10))


def _blended(image: np.ndarray, kind: int, factor: float) -> np.ndarray:
    gray = (GRAY[:, None, None] * image).sum(axis=0, keepdims=True)
    other = [gray, np.zeros_like(image), np.full_like(image, gray.mean())][kind]
    return image * factor + other * (1 - factor)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_jitter_blends_saturation_brightness_and_contrast_and_any_order_is_the_same(order: list[int]) -> None:
    image = TO_TENSOR(random_picture(0))
    for seed in range(12):
        torch.manual_seed(seed)
        factors = (1 + torch.empty(3).uniform_(-0.4, 0.4)).tolist()
        expected = image.double().numpy()
        for kind in order:
            expected = _blended(expected, kind, factors[kind])
        torch.manual_seed(seed)
        assert _close(ColorJitter()(image), expected)


def test_jitter_draws_factors_from_its_whole_range_and_does_not_clamp() -> None:
    white = torch.ones(3, 2, 2)  # neither saturation nor contrast changes it: what is left is the brightness
    factors = [ColorJitter()(white)[0, 0, 0].item() for _ in range(400)]
    assert 0.6 <= min(factors) < 0.62
    assert 1.38 < max(factors) <= 1.4
    assert sum(factors) / len(factors) == pytest.approx(1, abs=0.04)


def test_lighting_adds_one_colour_along_the_published_components() -> None:
    image = TO_TENSOR(random_picture(0))
    shifts = [Lighting()(image) - image for _ in range(4000)]
    assert all(torch.allclose(shift, shift[:, :1, :1], atol=1e-6) for shift in shifts)
    colours = torch.stack([shift[:, 0, 0] for shift in shifts]).double()
    vectors = torch.tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], dtype=torch.float64
    )
    variances = torch.diag((0.1 * torch.tensor([0.2175, 0.0188, 0.0045], dtype=torch.float64)) ** 2)
    expected = vectors @ variances @ vectors.T
    assert torch.allclose(colours.T.cov(), expected, atol=0.05 * expected.abs().max().item())
    components = (colours @ vectors).T.cov().diag()  # the two small ones would drown in the matrix above
    assert torch.allclose(components, variances.diag(), rtol=0.1)


@pytest.mark.usefixtures("two_threads")
def test_a_large_picture_does_not_depend_on_the_number_of_threads() -> None:
    settings = Input(crop_train=256, color_jitter_train=True, lighting_train=True)
    transform, image = train_transform(settings), random_picture(0, width=300, height=300)
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
        lambda: val_transform(12, 8, MEAN, STD, True),
        lambda: train_transform(Input()),
        lambda: train_transform(SMALL),
    ],
)
def test_transforms_travel_to_workers_that_are_not_forked(make: object) -> None:
    image = random_picture(0)
    transform = make()
    copy = pickle.loads(pickle.dumps(transform))
    torch.manual_seed(0)
    expected = transform(image)
    torch.manual_seed(0)
    assert torch.equal(copy(image), expected)


def test_a_name_a_model_and_a_mapping_give_the_same_preprocessing() -> None:
    model = nn.Identity()
    model.pretrained_cfg = CFG | {"scale": 256, "crop": 224}
    image = random_picture(0, width=300, height=280, mode="L")
    expected = val_transform(256, 224, MEAN, STD)(image)
    for source in ("resnet18", model, model.pretrained_cfg):
        assert torch.equal(transforms(source)(image), expected)


def test_a_checkpoint_of_the_trainer_gives_the_preprocessing_that_it_was_trained_with(tmp_path: Path) -> None:
    network = {"arch": "resnet18", "activation": "leaky_relu", "classes": 2}
    config = {"network": network, "input": {"scale_val": 12, "crop_val": 8, "mean": MEAN, "std": STD}}
    weights = registry.get("resnet18", classes=2).state_dict()
    torch.save({"state_dict": weights, "config": config}, tmp_path / "checkpoint.pth.tar")
    image = random_picture(0, width=30, height=20)
    result = transforms(str(tmp_path / "checkpoint.pth.tar"))(image)
    assert torch.equal(result, val_transform(12, 8, MEAN, STD)(image))


def test_public_transforms_have_a_training_and_a_ten_crop_form() -> None:
    image = random_picture(0, width=30, height=20)
    assert torch.equal(transforms(CFG, ten_crops=True)(image), val_transform(12, 8, MEAN, STD, ten_crops=True)(image))
    first, second = transforms(CFG, training=True)(image), transforms(CFG, training=True)(image)
    assert first.shape == second.shape == (3, 8, 8)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (CFG, {"training": True, "ten_crops": True}, "ten crops are for validation"),
        (CFG | {"interpolation": "bicubic"}, {}, "interpolation is 'bicubic'"),
        (nn.Identity(), {}, "Identity has no pretrained_cfg"),
        ("rensett18", {}, "rensett18"),
    ],
)
def test_what_cannot_be_preprocessed_is_an_error(source: object, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transforms(source, **options)
