"""Networks equal torchvision's, and in-place norms equal standard norms; options and initial weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import zoo
from tests.formula import relative_error
from tests.nets import CLASSIFIERS, build, images
from zoo.config.architectures import ARCHITECTURES
from zoo.layers import InPlaceABN, init_weights

# Rounding errors grow in networks with invertible norms, and where the first norm reads channels of zeros.
SAME_WITH_BOTH_NORMS = [
    name
    for name in CLASSIFIERS
    if not ARCHITECTURES[name].fixed_layers and name not in ("irevnet_cifar", "revnext", "revnext_flat")
]


def build_meta(name, **kwargs):
    with torch.device("meta"):
        return zoo.get(name, **kwargs)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_equal_torchvision_with_the_same_weights(name):
    model = zoo.get(name, activation="relu").eval()
    theirs = getattr(torchvision.models, name)(weights=None).eval()
    torch.manual_seed(0)
    for buffer in theirs.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    ours = {}
    for key, value in theirs.state_dict().items():
        parts = key.split(".")
        if parts[0].startswith("layer"):
            parts[:2] = [f"mod{int(parts[0][5:]) + 1}", f"block{int(parts[1]) + 1}"]
            if parts[2] == "downsample":
                parts[2:4] = ["proj_conv" if parts[3] == "0" else "proj_bn"]
            else:
                parts.insert(2, "convs")
        else:
            parts[:1] = ["classifier", "fc"] if parts[0] == "fc" else ["mod1", parts[0]]
        ours[".".join(parts)] = value
    model.load_state_dict(ours)
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert relative_error(model(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("name", SAME_WITH_BOTH_NORMS)
def test_in_place_and_standard_norms_compute_the_same_network(name):
    standard, inplace = (build(name, norm=norm, activation_param=0.3).double() for norm in ("standard", "inplace"))
    inplace.load_state_dict(standard.state_dict())
    with torch.no_grad():  # scale |w| + eps against w
        for module in inplace.modules():
            if isinstance(module, InPlaceABN):
                module.weight.sub_(module.eps)
    x = images(dtype=torch.float64)
    for model in (standard, inplace):
        torch.manual_seed(1)  # the same dropout
        model(x.clone()).square().sum().backward()
    pairs = list(zip(inplace.parameters(), standard.parameters(), strict=True))
    assert max(relative_error(ours.grad, truth.grad) for ours, truth in pairs) < 1e-6
    for ours, truth in zip(inplace.buffers(), standard.buffers(), strict=True):
        assert relative_error(ours, truth) < 1e-9


@pytest.mark.parametrize(
    ("name", "dilation", "reductions"),
    [
        ("resnet18", 1, [4, 4, 8, 16, 32]),
        ("resnet18", [1, 1, 2, 4], [4, 4, 8, 8, 8]),
        ("resnet50", [2, 1, 1, 1], [2, 2, 4, 8, 16]),
        ("resnext50", [1, 1, 1, 2], [4, 4, 8, 16, 16]),
        ("wider_resnet16_a2", True, [1, 2, 4, 8, 8, 8, 8]),
        ("wider_resnet16_a2", (1, 2, 4, 4), [1, 2, 4, 8, 8, 8, 8]),
        ("wider_resnet16_a2", 1, [1, 2, 4, 8, 16, 32, 32]),
        ("densenet121", 2, [4, 4, 4, 4, 4]),
        ("densenet121", [1, 1, 2, 4], [4, 4, 8, 8, 8]),
    ],
)
def test_dilation_preserves_map_size_and_keys(name, dilation, reductions):
    model = build_meta(name, features_only=True, dilation=dilation)
    assert model.feature_info.reduction() == reductions
    sizes = [feature.shape[-1] for feature in model(torch.empty(2, 3, 64, 64, device="meta"))]
    assert sizes == [64 // reduction for reduction in reductions]
    assert list(model.state_dict()) == list(build_meta(name, features_only=True).state_dict())


def plain_resnext(x: torch.Tensor, model: nn.Module, settings: list[tuple[int, list[int]]]) -> torch.Tensor:
    """Return the logits of a ResNeXt in evaluation; ``settings`` has a module's stride and its blocks' dilations."""

    def norm(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        y = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
        return F.leaky_relu(y, 0.01)

    x = F.max_pool2d(F.conv2d(x, model.mod1.conv1.weight, stride=2, padding=3), 3, 2, 1)
    for number, (module_stride, dilations) in enumerate(settings, start=2):
        for index, (dilation, block) in enumerate(zip(dilations, getattr(model, f"mod{number}"), strict=True)):
            stride, convs = module_stride if index == 0 else 1, block.convs
            z = norm(x, block.bn1)
            x = F.conv2d(z, block.proj_conv.weight, stride=stride) if hasattr(block, "proj_conv") else x
            z = norm(F.conv2d(z, convs.conv1.weight, stride=stride), convs.bn2)
            z = F.conv2d(z, convs.conv2.weight, padding=dilation, dilation=dilation, groups=64)
            x = x + F.conv2d(norm(z, convs.bn3), convs.conv3.weight)
    return F.linear(norm(x, model.bn_out).mean((2, 3)), model.classifier.fc.weight, model.classifier.fc.bias)


@pytest.mark.parametrize(
    ("dilation", "settings"),
    [
        ([1, 1, [1, 2, 1, 2, 1, 2], [2, 3, 4]], [(1, [1] * 3), (2, [1] * 4), (1, [1, 2, 1, 2, 1, 2]), (1, [2, 3, 4])]),
        ([1, 1, 1, [1, 1, 1]], [(1, [1] * 3), (2, [1] * 4), (2, [1] * 6), (1, [1] * 3)]),
        (((1, 1, 2), 1, 2, 1), [(1, [1, 1, 2]), (2, [1] * 4), (1, [2] * 6), (2, [1] * 3)]),
    ],
)
def test_resnext_blocks_have_their_own_dilation(dilation, settings):
    torch.manual_seed(0)
    model = zoo.get("resnext50", num_classes=3, dilation=dilation).eval().double()
    found = [
        (module[0].convs.conv1.stride[0], [block.convs.conv2.dilation[0] for block in module])
        for module in (model.mod2, model.mod3, model.mod4, model.mod5)
    ]
    assert found == settings
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(model(x), plain_resnext(x, model, settings)) < 1e-12


def test_bottlenecks_have_strides_of_their_version():
    v1, pre = build_meta("resnet50").mod3.block1.convs, build_meta("resnext50").mod3.block1.convs
    assert [v1.get_submodule(f"conv{i}").stride[0] for i in (1, 2, 3)] == [1, 2, 1]
    assert [pre.get_submodule(f"conv{i}").stride[0] for i in (1, 2, 3)] == [2, 1, 1]
    assert pre.conv2.groups == 64


def test_wrapped_in_place_norm_does_not_overwrite_shortcut():
    torch.manual_seed(0)
    plain = zoo.get("resnext50", norm="inplace", num_classes=0)
    wrapped = zoo.get("resnext50", norm=lambda channels: nn.Sequential(InPlaceABN(channels)), num_classes=0)
    wrapped.load_state_dict(dict(zip(wrapped.state_dict(), plain.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(plain(x), wrapped(x))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_whole_networks_export_with_dynamic_batch(training):
    model = zoo.get("resnet18", norm="inplace", num_classes=5).train(training)
    x = torch.randn(4, 3, 64, 64)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(copy.deepcopy(model), (x,), dynamic_shapes={"x": {0: batch}})
    larger = torch.randn(6, 3, 64, 64)
    with torch.no_grad():
        assert relative_error(program.module()(larger), model(larger.clone())) < 1e-4


def test_whole_network_is_differentiated_by_func_grad():
    model = zoo.get("resnet18", norm="inplace", num_classes=5).double()
    x, target = torch.randn(4, 3, 64, 64, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters):
        own = {name: buffer.clone() for name, buffer in buffers.items()}  # in-place changes act on copies made inside
        return F.cross_entropy(torch.func.functional_call(model, (parameters, own), (x,)), target)

    gradients = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    F.cross_entropy(model(x), target).backward()
    for name, parameter in parameters.items():
        assert relative_error(gradients[name], parameter.grad) < 1e-9


def test_every_parameter_is_initialized_and_reproducible():
    torch.manual_seed(3)
    first = zoo.get("densenet121", num_classes=2).state_dict()
    torch.manual_seed(3)
    for key, value in zoo.get("densenet121", num_classes=2).state_dict().items():
        assert value.isfinite().all()
        assert torch.equal(value, first[key])
    fan = 3 * 49 + 64 * 49
    expected = (2 / (1 + 0.01**2)) ** 0.5 * (2 / fan) ** 0.5
    assert abs(first["mod1.conv1.weight"].std().item() / expected - 1) < 0.05


def test_truncated_normal_is_cut_at_two_deviations():
    conv, strided, fc = nn.Conv2d(64, 128, 3), nn.Conv2d(256, 512, 1, stride=2, bias=False), nn.Linear(300, 1000)
    init_weights(nn.Sequential(conv, strided, fc), "truncated_normal", 7.0, "relu")
    for layer, fan_out in ((conv, 9 * 128), (strided, 512)):
        scaled = layer.weight.detach() / (2 / fan_out) ** 0.5
        assert 1.99 < scaled.abs().max() <= 2.0 + 1e-6
        assert scaled.std().item() == pytest.approx(0.8796, rel=0.02)  # normal, truncated at two deviations
    assert 0.999 * 0.1 < fc.weight.abs().max() <= 0.1  # sqrt(3 / 300)
    assert fc.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.01)
    assert not conv.bias.any()
    assert not fc.bias.any()


@pytest.mark.parametrize("method", ["kaiming_normal", "kaiming_uniform", "xavier_uniform", "orthogonal"])
def test_initialization_has_scale_of_its_method(method):
    conv = nn.Conv2d(64, 128, 3, bias=False)
    init_weights(conv, method, 2.0, "leaky_relu", 0.1)
    gain, fan_in, fan_out = (2 / (1 + 0.1**2)) ** 0.5, 64 * 9, 128 * 9
    deviation = {
        "kaiming": gain / fan_in**0.5,
        "xavier": 2 * gain * (2 / (fan_in + fan_out)) ** 0.5,
        "orthogonal": 2 * gain / fan_in**0.5,
    }[method.partition("_")[0]]
    assert abs(conv.weight.std().item() / deviation - 1) < 0.05
