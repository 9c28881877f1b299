"""Augmentations equal those of torchvision and timm for the same random numbers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2
from torchvision.transforms import functional as tvF

from tests.data.sample_images import random_image
from tests.refusals import refused
from zoo.config.experiment import Input
from zoo.config.parse import parse_experiment
from zoo.data.seeding import seed_global_generators
from zoo.data.transforms.classification import TrainTransform
from zoo.data.transforms.pixels import PILPixels
from zoo.data.transforms.policies import Policy
from zoo.errors import ConfigError

BILINEAR = InterpolationMode.BILINEAR
CASES = {
    "randaugment": (
        {"num_ops": 3, "magnitude": 12, "interpolation": "bilinear"},
        v2.RandAugment(3, 12, interpolation=BILINEAR),
    ),
    "trivialaugment": ({}, v2.TrivialAugmentWide()),
    "autoaugment": (
        {"policy": "cifar10", "interpolation": "bilinear"},
        v2.AutoAugment(AutoAugmentPolicy.CIFAR10, interpolation=BILINEAR),
    ),
    "augmix": ({"severity": 5}, v2.AugMix(5)),
}


def _input(**settings: object) -> Input:
    """Return settings as an experiment file gives them."""
    return parse_experiment({"input": settings}, "test").input


def _tensor(image: Image.Image) -> Tensor:
    return tvF.pil_to_tensor(image)


def _check(policy: Policy, reference: Any, image: Image.Image) -> int:
    """Compare a policy with its reference; return how often it changed the image."""
    changed = 0
    for seed in range(12):
        ours = policy(_tensor(image), Random(seed))
        with seed_global_generators(Random(seed)):
            assert torch.equal(ours, _tensor(reference(image)))
        changed += not torch.equal(ours, _tensor(image))
    return changed


@pytest.mark.parametrize("name", CASES)
def test_augmentations_equal_torchvision(name: str) -> None:
    params, reference = CASES[name]
    policy = Policy(_input(augment_train=name, augment_params_train=params))
    assert _check(policy, reference, random_image(0, width=40, height=30)) >= 8


@pytest.mark.parametrize("aa", ["rand-m9-mstd0.5-inc1", "original", "3a", "augmix-m3-w2"])
@pytest.mark.parametrize("interpolation", ["bicubic", "random"])
def test_policies_named_after_timm_equal_timms(aa: str, interpolation: str) -> None:
    timm_data = pytest.importorskip("timm.data")
    settings = _input(augment_train=f"timm:{aa}", crop_train=24, interpolation_train=interpolation)
    options = {"auto_augment": aa, "color_jitter": None, "interpolation": interpolation, "mean": settings.mean}
    # The second of three stages follows crop and flip.
    stages = timm_data.create_transform(24, is_training=True, separate=True, **options)
    assert _check(Policy(settings), stages[1], random_image(0, width=24, height=24)) >= 3


def test_number_is_strength_of_torchvisions_color_jitter() -> None:
    image = random_image(0, width=20, height=20)
    policy = Policy(_input(augment_train="trivialaugment", color_jitter_train=0.3))
    reference = v2.Compose([v2.TrivialAugmentWide(), v2.ColorJitter(0.3, 0.3, 0.3)])
    assert _check(policy, reference, image) == 12
    assert Policy(_input(color_jitter_train=True)).transforms == []
    assert Policy(_input(color_jitter_train=0)).transforms == []


def test_policy_runs_between_flip_and_normalization() -> None:
    image = random_image(0, width=40, height=30)
    plain, augmented = Input(crop_train=16), _input(crop_train=16, augment_train="randaugment")
    for seed in range(6):
        generator = Random(seed)
        cropped = TrainTransform(plain).draw(PILPixels(image), generator)
        drawn = TrainTransform(augmented).draw(PILPixels(image), Random(seed))
        assert torch.equal(drawn.pixels, Policy(augmented)(cropped.pixels, generator))
        assert drawn.normalization == cropped.normalization
    values = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    rounded = (values * 255).round().byte()
    assert torch.equal(Policy(augmented)(values, Random(1)), Policy(augmented)(rounded, Random(1)))


def test_policy_rejected_by_timm_names_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _input(augment_train="timm:rand-z9")
    with monkeypatch.context() as patch:
        patch.setattr("zoo.data.transforms.policies.find_spec", lambda name: None)
        refused(ConfigError, lambda: TrainTransform(settings), "augment_train = timm:rand-z9", "pip install timm")
    pytest.importorskip("timm")
    refused(ConfigError, lambda: TrainTransform(settings), "augment_train = timm:rand-z9", "timm:rand-m9")


def test_arguments_rejected_by_torchvision_name_setting() -> None:
    for name, value in (("magnitde", 3), ("interpolation", "cubic")):
        settings = _input(augment_train="randaugment", augment_params_train={name: value})
        refused(ConfigError, lambda: TrainTransform(settings), "augment_params_train = ", name, str(value))  # noqa: B023
