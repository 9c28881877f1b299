"""Weights of other packages are scored with bit-identical preprocessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.models import ResNet50_Weights, get_model_weights

import zoo
from tests.data.sample_images import random_image
from zoo.config.record import Preprocessing
from zoo.data.transforms.classification import ValTransform
from zoo.models.external import own_preprocessing

# Landscape, portrait, smaller than the crop, square, and elongated.
IMAGES = [random_image(i, *size) for i, size in enumerate([(300, 251), (231, 307), (60, 90), (224, 224), (500, 61)])]
TIMM = [
    "resnet50",  # size and crop_pct differ between tests and training
    "resnet50.tv_in1k",  # a tag with another preprocessing, bilinear
    "vit_base_patch16_224.augreg2_in21k_ft_in1k",  # mean and std of 0.5
    "convnext_xxlarge.clip_laion2b_soup_ft_in1k",  # CLIP's mean and std, squash
    "tiny_vit_5m_224.dist_in22k_ft_in1k",
    "efficientnet_b3",
    "inception_v3.tf_in1k",
]


def _assert_same(transform: Any, reference: Any) -> None:
    for image in IMAGES:
        expected: Tensor = reference(image)
        assert torch.equal(transform(image), expected), image.size


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "swin_t", "efficientnet_b3", "inception_v3"])
def test_torchvision(name: str) -> None:
    _assert_same(zoo.transforms(f"torchvision:{name}"), get_model_weights(name).DEFAULT.transforms())


def test_torchvisions_weights_are_recognized_by_their_digest() -> None:
    for weights in ResNet50_Weights:
        digest = weights.url.rpartition("-")[2].removesuffix(".pth")
        images = own_preprocessing("torchvision:resnet50", digest + "0" * 56)
        transform = ValTransform(images.scale_val, images.crop_val, images.mean, images.std)
        _assert_same(transform, weights.transforms())
    assert own_preprocessing("torchvision:resnet50", "0" * 64) == own_preprocessing("torchvision:resnet50")


def test_weights_without_crop_have_default_preprocessing() -> None:
    assert own_preprocessing("torchvision:fcn_resnet50") == Preprocessing()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    _assert_same_as_timm(name)


def _assert_same_as_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict(), use_test_size=True)
    _assert_same(zoo.transforms(f"timm:{name}"), timm.data.create_transform(**config))


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_any_crop_mode_and_interpolation(crop_mode: Any, interpolation: Any) -> None:
    data = pytest.importorskip("timm.data")
    mean, std = (0.2, 0.5, 0.7), (0.3, 0.2, 0.1)
    reference = data.create_transform(
        48, crop_pct=0.75, crop_mode=crop_mode, interpolation=interpolation, mean=mean, std=std
    )
    _assert_same(
        ValTransform(64, 48, mean, std, interpolation=interpolation, crop_mode=crop_mode), reference
    )  # 48 / 0.75 is exact


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_tensors_are_close_to_images(crop_mode: Any) -> None:
    transform = ValTransform(48, 40, (0.5,) * 3, (0.25,) * 3, interpolation="bicubic", crop_mode=crop_mode)
    image = random_image(0, 90, 70).resize((180, 140), Image.Resampling.BICUBIC)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert (transform(values) - transform(image)).abs().max() < 3 / 255 / 0.25
