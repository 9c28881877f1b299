"""Conversions of DeepLab are exact if they are exact for its body, and are refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.convert.networks import IMAGES, scramble, spec_of
from tests.refusals import refused
from zoo.convert import inplace_to_standard, standard_to_inplace
from zoo.errors import ConversionError

pytestmark = pytest.mark.usefixtures("small_networks")

ARCH = "deeplab_resnet18"
POOLED = {"pooling_size": (2, 3)}
IN_FRONT_OF_NO_CONVOLUTION = ("head.map_bn", "head.red_bn", "body.bn_out")


def outputs(state_dict: dict[str, Tensor], **arguments: Any) -> Tensor:
    model = zoo.get(ARCH, num_classes=4, **arguments).double().eval()
    model.load_state_dict(state_dict)
    with torch.no_grad():
        return model(IMAGES.clone())


def given(positive: tuple[str, ...] | bool = False, **arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return scramble(zoo.get(ARCH, num_classes=4, **arguments), positive=positive).double().state_dict()


@pytest.mark.slow
def test_in_place_norms_convert_to_standard_and_back() -> None:
    source = given(norm="inplace", **POOLED)
    standard, spec, report = inplace_to_standard(source, spec_of(ARCH, norm="inplace", **POOLED))
    assert report.exact
    assert len(report.layers) == 17
    assert torch.allclose(outputs(standard, **POOLED), outputs(source, norm="inplace", **POOLED), rtol=1e-9)
    back, _, _ = standard_to_inplace(standard, spec)
    assert all(torch.allclose(back[key].abs(), source[key].abs(), rtol=1e-9, atol=1e-12) for key in source)


def test_negative_scales_fold_into_filters_or_raise() -> None:
    source = given(positive=IN_FRONT_OF_NO_CONVOLUTION)
    converted, _, report = standard_to_inplace(source, spec_of(ARCH))
    assert report.exact
    assert "head.global_pooling_conv" in report.layers
    assert torch.allclose(outputs(converted, norm="inplace"), outputs(source), rtol=1e-7, atol=1e-10)
    names = ["2 of 17 norms", "head.map_bn", "head.red_bn", "allow_approximate=True"]
    refused(ConversionError, lambda: standard_to_inplace(given(), spec_of(ARCH)), *names)
