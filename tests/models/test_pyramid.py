"""RevBiFPN with the head of HRNetV2 equals plain torch and is bit-identical to stored activations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.formula import relative_error
from tests.nets import build, small_architectures
from tests.refusals import refused
from zoo.models.pyramid import Pyramid
from zoo.tasks.tta import segment_image

NAME = "pyramid_revbifpn_s0"


def plain_model(model: Pyramid, x: Tensor, maps: list[Tensor]) -> Tensor:
    """Return the logits by the formula of the paper: one convolution of the upsampled, concatenated maps."""
    head = model.head
    upsampled = [F.interpolate(each, size=maps[0].shape[2:], mode="bilinear") for each in maps]
    y = F.conv2d(torch.cat(upsampled, 1), torch.cat([conv.weight for conv in head.convs], 1))
    y = F.relu(F.batch_norm(y, None, None, head.norm.weight, head.norm.bias, training=True))
    y = F.conv2d(y, model.cls.weight, model.cls.bias)
    rows, columns = (math.ceil(side / 4) for side in x.shape[2:])
    return F.interpolate(y[:, :, :rows, :columns], size=x.shape[2:], mode="bilinear")


@pytest.mark.parametrize("sides", [(32, 64), (20, 35)])
def test_logits_and_gradients_equal_plain_torch(sides: tuple[int, int]) -> None:
    model = build(NAME, noise=0.1, memory="plain").double()
    x = torch.randn(2, 3, *sides, dtype=torch.float64)
    padded = torch.zeros(2, 3, 32, 64, dtype=torch.float64)
    padded[:, :, : sides[0], : sides[1]] = x
    truth = plain_model(model, x, model.body(padded))
    actual = model(x)
    assert actual.shape == (2, 5, *sides)
    assert relative_error(actual, truth) < 1e-11
    dz = torch.randn_like(truth)
    leaves = list(model.parameters())
    expected = torch.autograd.grad(truth, leaves, dz)
    for ours, theirs in zip(torch.autograd.grad(actual, leaves, dz), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)  # gradients of biases before a norm are 0


def test_features_of_the_body_are_not_selected_here() -> None:
    assert build(NAME).feature_info.reduction() == [4, 8, 16, 32]
    refused(zoo.ConfigError, lambda: zoo.get(NAME, features_only=True), "zoo.get('revbifpn_s0', features_only=True)")


@pytest.mark.parametrize("sides", [(32, 32), (33, 64), (50, 67)])
@torch.no_grad()
def test_logits_of_map_segment_image_without_padding(sides: tuple[int, int]) -> None:
    """Scoring and `zoo.segment` resize the logits of the map to the size of the image themselves."""
    model, x = build(NAME, noise=0.1).eval(), torch.randn(2, 3, *sides)
    classes, _ = segment_image(model.forward_logits, x[0])
    assert torch.equal(classes, model(x[:1]).argmax(1)[0].to(classes.dtype))


@small_architectures()
def test_weights_of_a_classifier_initialize_the_body(tmp_path: Path) -> None:
    network = zoo.get("revbifpn_s0", num_classes=7)
    expected = network.state_dict()
    for content in ({"state_dict": expected, "network": network.built_as.model_dump(mode="json")}, expected):
        torch.save(content, tmp_path / "w.pth")
        body = zoo.get(NAME, num_classes=5, body_weights=tmp_path / "w.pth").body
        assert all(torch.equal(tensor, expected[key]) for key, tensor in body.state_dict().items())
