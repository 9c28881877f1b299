"""Mixed images and targets equal timm's and torchvision's, and do not depend on how a batch is divided."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from zoo.config.regularization import Regularization
from zoo.data.transforms.mixing import Mix, draw_mix, mix_images, mix_targets, partners
from zoo.data.transforms.pixels import Box

NUM_CLASSES = 7


def _batch(num_images: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_images)
    images = torch.randn(num_images, 3, 10, 12, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_images,), generator=generator)


@pytest.mark.parametrize("cutmix", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_images_and_targets_equal_timm(cutmix: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timm_mixup = pytest.importorskip("timm.data.mixup")
    settings = Regularization(cutmix=0.6) if cutmix else Regularization(mixup=0.8)
    generator = Random(seed)
    mix = draw_mix(settings, 10, 12, generator)
    assert mix is not None
    # timm gets the draws: the weight before the box is cut off, and the center of the box.
    replayed = Random(seed)
    replayed.random()
    weight = replayed.betavariate(*[settings.cutmix or settings.mixup] * 2)
    centers = iter([replayed.randrange(10), replayed.randrange(12)]) if cutmix else iter(())
    monkeypatch.setattr(np.random, "beta", lambda *args, **options: weight)
    monkeypatch.setattr(np.random, "randint", lambda *args, **options: next(centers))
    monkeypatch.setattr(np.random, "rand", lambda: 0.0)
    reference = timm_mixup.Mixup(settings.mixup, settings.cutmix, label_smoothing=0.0, num_classes=NUM_CLASSES)
    images, targets = _batch(8)
    # timm mixes the first with the last image: in this order those are the pairs of two halves.
    order = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4])
    expected, shares = reference(images[order], targets[order])
    pairs = partners(8, half=4)
    assert pairs.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    torch.testing.assert_close(mix_images(images, mix, pairs)[order], expected)
    torch.testing.assert_close(mix_targets(targets, NUM_CLASSES, mix, pairs)[order], shares)


@pytest.mark.parametrize("seed", range(4))
def test_images_and_targets_equal_torchvision(seed: int) -> None:
    images, targets = _batch(2)  # each image is mixed with its neighbor
    for reference in (v2.MixUp(alpha=0.8, num_classes=NUM_CLASSES), v2.CutMix(alpha=1.0, num_classes=NUM_CLASSES)):
        torch.manual_seed(seed)
        expected, shares = reference(images, targets)
        torch.manual_seed(seed)
        drawn = reference.make_params([images])
        mix = Mix(float(drawn["lam"])) if "lam" in drawn else Mix(drawn["lam_adjusted"], _box(*drawn["box"]))
        torch.testing.assert_close(mix_images(images, mix, partners(2, 1)), expected)
        torch.testing.assert_close(mix_targets(targets, NUM_CLASSES, mix, partners(2, 1)), shares)


def _box(left: int, top: int, right: int, bottom: int) -> Box:
    return Box(top, left, bottom - top, right - left)


def test_draws_have_probabilities_of_settings() -> None:
    generator, count = Random(0), 4000
    settings = Regularization(mixup=0.4, cutmix=1.0, mix_probability=0.75)
    drawn = [draw_mix(settings, 32, 32, generator) for _ in range(count)]
    mixed = [mix for mix in drawn if mix is not None]
    cut = [mix for mix in mixed if mix.box is not None]
    # Four standard deviations of a binomial distribution.
    assert len(mixed) / count == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / count) ** 0.5)
    assert len(cut) / len(mixed) == pytest.approx(0.5, abs=4 * (0.5 * 0.5 / len(mixed)) ** 0.5)
    # The variance of Beta(a, a) is 1 / (4 (2 a + 1)).
    weights = np.array([mix.weight for mix in mixed if mix.box is None])
    assert weights.mean() == pytest.approx(0.5, abs=0.03)
    assert weights.var() == pytest.approx(1 / (4 * 1.8), rel=0.06)
    assert draw_mix(Regularization(), 32, 32, generator) is None
    assert all(draw_mix(Regularization(mixup=1.0), 8, 8, generator).box is None for _ in range(9))  # type: ignore[union-attr]


@pytest.mark.parametrize("num_images", [24, 20, 13, 12, 5])
def test_image_has_the_same_partner_with_any_number_of_processes(num_images: int) -> None:
    """The full batch has 24 images; others are last batches, in which images may have no partner."""
    whole = partners(num_images, half=12).tolist()
    paired = [index for index, partner in enumerate(whole) if partner != index]
    assert paired == [index for index in range(num_images) if (index + 12) % 24 < num_images]
    assert all(whole[whole[index]] == index for index in range(num_images))
    for world_size in (2, 3, 4, 6, 12):
        together = [0] * num_images
        for rank in range(world_size):
            numbers = list(range(num_images))[rank::world_size]
            if numbers:
                own = partners(len(numbers), half=12 // world_size).tolist()
                together[rank::world_size] = [numbers[index] for index in own]
        assert together == whole
