"""DeepLabV3 on the bodies: agreement with plain torch, arguments and options."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.formula import activated_batch_norm, relative_error
from tests.layers.test_deeplab_head import paper_head
from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES
from zoo.layers import ABN, freeze_norms

DEEPLABS = [name for name, record in ARCHITECTURES.items() if record.family == "deeplab"]


def build_meta(name: str, **arguments) -> nn.Module:
    with torch.device("meta"):
        return zoo.get(name, **arguments)


def plain_model(x: Tensor, model: nn.Module, norm: str, training: bool, dilations: dict[int, int]) -> Tensor:
    """Return the logits of deeplab_resnet18 as plain operations compute them, of mod4 and mod5 with ``dilations``."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))

    def normed(x: Tensor, name: str, activation: str = "leaky_relu", shortcut: Tensor | None = None) -> Tensor:
        weight, bias, mean, var = (
            tensors[f"{name}.{key}"] for key in ("weight", "bias", "running_mean", "running_var")
        )
        return activated_batch_norm(
            x, weight, bias, activation=activation, statistics=None if training else (mean, var),
            signed=norm == "standard", shortcut=shortcut,
        )  # fmt: skip

    y = normed(F.conv2d(x, tensors["body.mod1.conv1.weight"], stride=2, padding=3), "body.mod1.bn1")
    y = F.max_pool2d(y, 3, stride=2, padding=1)
    for module in (2, 3, 4, 5):
        dilation = dilations.get(module, 1)
        for block in (1, 2):
            name = f"body.mod{module}.block{block}"
            stride = 2 if block == 1 and module > 2 and dilation == 1 else 1
            shortcut = y
            if block == 1 and module > 2:
                projected = F.conv2d(y, tensors[f"{name}.proj_conv.weight"], stride=stride)
                shortcut = normed(projected, f"{name}.proj_bn", "identity")
            settings = {"padding": dilation, "dilation": dilation}
            y = F.conv2d(y, tensors[f"{name}.convs.conv1.weight"], stride=stride, **settings)
            y = F.conv2d(normed(y, f"{name}.convs.bn1"), tensors[f"{name}.convs.conv2.weight"], **settings)
            y = normed(y, f"{name}.convs.bn2", shortcut=shortcut)
    y = F.conv2d(paper_head(y, model.head, norm, training, (2, 1, 3)), tensors["cls.weight"], tensors["cls.bias"])
    return F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize(
    ("norm", "stride", "dilations", "training"),
    [
        ("inplace", 8, {4: 2, 5: 4}, True),
        ("standard", 16, {5: 2}, False),
    ],
)
def test_whole_network_and_its_gradients_equal_plain_torch(norm, stride, dilations, training) -> None:
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", num_classes=5, norm=norm, output_stride=stride, pooling_size=(3, 4),
                    memory="plain", head_dilations=(2, 1, 3))  # fmt: skip
    model.double().train(training)
    for name, tensor in model.state_dict().items():
        if "bn" in name and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 57, 40, dtype=torch.float64, requires_grad=True)
    truth = plain_model(x, model, norm, training, dilations)
    dz = torch.randn_like(truth)
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(truth, leaves, dz)
    actual = model(x * 1)
    assert relative_error(actual, truth) < 1e-11
    for ours, theirs in zip(torch.autograd.grad(actual, leaves, dz), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-8


def test_every_dilatable_body_has_deeplab_with_its_strategies() -> None:
    bodies = [name for name, record in ARCHITECTURES.items() if record.dilations]
    assert [f"deeplab_{name}" for name in bodies] == DEEPLABS
    for body in bodies:
        record = ARCHITECTURES[f"deeplab_{body}"]
        assert record.memory == ARCHITECTURES[body].memory
        assert ("input_3x3" in record.options.model_fields) == ("input_3x3" in ARCHITECTURES[body].options.model_fields)
        assert {8, 16} <= set(ARCHITECTURES[body].dilations)


@pytest.mark.parametrize(
    ("name", "stride"), [("deeplab_resnext50", 8), ("deeplab_densenet121", 16), ("deeplab_wider_resnet16_a2", 16)]
)
def test_bodies_are_dilated_and_head_sees_the_same_distances(name, stride) -> None:
    model = build_meta(name, output_stride=stride, num_classes=5)
    assert model.feature_info.reduction()[-1] == stride
    assert [conv.dilation[0] for conv in model.head.map_convs] == {8: [1, 12, 24, 36], 16: [1, 6, 12, 18]}[stride]
    logits = model.forward_logits(torch.empty(2, 3, 64, 96, device="meta"))
    assert logits.shape == (2, 5, 64 // stride, 96 // stride)
    assert model(torch.empty(2, 3, 65, 97, device="meta")).shape == (2, 5, 65, 97)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            {"features_only": True},
            ["zoo.get('resnet18', features_only=True, output_stride=8)"],
        ),
        ({"out_indices": [0]}, ["out_indices", "features_only=True"]),
        ({"drop_rate": 0.1}, ["drop_rate = 0.1", "DeepLab"]),
        ({"pretrained": True}, ["published weights"]),
    ],
)
def test_unsupported_arguments_raise_with_remedy(arguments, names) -> None:
    refused(zoo.ZooError, lambda: build_meta("deeplab_resnet18", **arguments), *names)


def test_images_of_other_channels_and_all_kinds_of_norms_train() -> None:
    assert zoo.get("deeplab_resnet18").num_classes == 19
    for norm in ("sync", lambda channels: ABN(channels, activation="relu")):
        model = zoo.get("deeplab_resnet18", num_classes=2, norm=norm, in_chans=4)
        model(torch.randn(2, 4, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    freeze_norms(model)
    assert model.train()(torch.randn(1, 4, 32, 32)).shape == (1, 2, 32, 32)


def test_transforms_crop_whole_images_only_on_request() -> None:
    model = build_meta("deeplab_resnet18")
    assert (model.pretrained_cfg["scale"], model.pretrained_cfg["crop"]) == (None, None)
    assert model.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)
    for arguments in ({}, {"training": True}, {"crop": 64}):
        refused(zoo.ConfigError, partial(zoo.transforms, model, **arguments), "zoo segment")
    assert zoo.transforms(model, scale=-1, crop=32)(torch.rand(3, 40, 50)).shape == (3, 32, 32)
