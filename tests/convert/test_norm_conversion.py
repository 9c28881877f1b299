"""convert_norm replaces the norms of any model if this is safe; otherwise it lists them and changes nothing."""

from __future__ import annotations

import copy
import logging
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import zoo
from tests.convert.networks import IMAGES, scramble
from tests.refusals import refused
from zoo.convert import convert_norm
from zoo.convert._norm_conversion import plan_norms
from zoo.errors import ConversionError
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync

KINDS = {"standard": ABN, "inplace": InPlaceABN, "sync": InPlaceABNSync}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def scrambled(model: nn.Module, positive: bool = False) -> nn.Module:
    return scramble(model, positive=positive).double()


def chain(activation: nn.Module) -> nn.Sequential:
    """Two convolutions with norms of both signs; the second norm has no activation."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), activation, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    return scrambled(nn.Sequential(*layers))


def kept_tensors(module, *inputs):
    """Return the tensors that one call saves for backward, each storage once. Does not change the module."""
    kept, module = {}, copy.deepcopy(module)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        module(*inputs)
    return list(kept.values())


class Calls(nn.Module):
    """A module with given parts, whose forward pass is a function of the module and the input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.function(self, x)


def assert_same_training(model, twin, images=IMAGES):
    """Outputs, gradients of all parameters and running statistics of both agree, up to the rounding of float64."""
    for net in (model, twin):
        net.train().zero_grad()
    expected, found = (net(images.clone()) for net in (model, twin))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-9)
    for output in (expected, found):
        (output * output.detach().cos()).sum().backward()
    parameters = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        q = parameters[name]
        close = (p.grad.abs() - q.grad.abs()).norm() <= 1e-6 * p.grad.norm() + 1e-9  # filters may be negated
        assert close, name
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffers[name].double().abs(), buffer.double().abs(), rtol=1e-8, atol=1e-9), name
    with torch.no_grad():
        assert torch.allclose(twin.eval()(images.clone()), model.eval()(images), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.LeakyReLU(0.2, inplace=True), nn.ELU(0.7)])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_statistics_are_preserved(kind, activation, training):
    model = chain(copy.deepcopy(activation)).train(training)
    twin = copy.deepcopy(model)
    weights = list(twin.parameters())
    assert convert_norm(twin, kind) is twin
    assert [type(part) for part in twin] == [nn.Conv2d, KINDS[kind], nn.Identity, nn.Conv2d, KINDS[kind]]
    assert all(a is b for a, b in zip(twin.parameters(), weights, strict=True))
    expected, found = model(IMAGES), twin(IMAGES.clone())
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.allclose(twin[1].bias.grad, model[1].bias.grad, rtol=1e-7, atol=1e-8)
    assert torch.allclose(twin[1].running_var, model[1].running_var, rtol=1e-9)
    assert twin[1].training == training


#: Layers that can absorb the signs of scales, and the shape of their images.
LINEAR_LAYERS = {
    "linear": (nn.Linear(4, 6), 1, (5, 4)),
    "linear without bias": (nn.Linear(4, 6, bias=False), 1, (5, 4)),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2), 2, (2, 4, 5, 5)),
    **{f"convolution {dims}d": (CONV[dims](4, 6, 3), dims, (2, 4, *[5] * dims)) for dims in CONV},
    **{
        f"transposed {dims}d, groups {groups}": (
            TRANSPOSED[dims](4, 6, 3, stride=2, groups=groups, bias=groups == 1),
            dims,
            (2, 4, *[5] * dims),
        )
        for dims in TRANSPOSED
        for groups in (1, 2)
    },
}


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_signs_of_scales_move_into_each_linear_layer(name):
    layer, dims, shape = LINEAR_LAYERS[name]
    torch.manual_seed(0)
    model = scrambled(nn.Sequential(layer, NORM[dims](6), nn.LeakyReLU(0.1), nn.Flatten()))
    assert (model[1].weight < 0).any()
    assert (model[1].weight > 0).any()
    images = torch.randn(shape, dtype=torch.float64)
    twin = convert_norm(copy.deepcopy(model), "inplace")
    assert type(twin[1]) is InPlaceABN
    assert_same_training(model, twin, images)
    assert_same_training(model, convert_norm(twin, "standard"), images)


def _tied():
    """Two convolutions with the same filters."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model[2].weight = model[0].weight
    return model


def _decoder(dims):
    """A transposed convolution that is called as a function."""
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    model = Calls(lambda m, x: m.act(m.norm(function(x, m.filters))), norm=NORM[dims](6), act=nn.ELU())
    model.filters = nn.Parameter(torch.randn(4, 6, *[3] * dims))
    return model


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(3)), (2, 3, 4)),  # its channels are not the features
        (lambda: nn.Sequential(shared := nn.Linear(4, 4), nn.BatchNorm1d(4), shared), (5, 4)),
        (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 1), nn.MaxPool2d(1), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
        (_tied, (2, 4, 5, 5)),
        *((partial(_decoder, dims), (2, 4, *[5] * dims)) for dims in TRANSPOSED),
    ],
)
def test_negative_scales_without_layer_to_take_signs_raise(model, shape):
    torch.manual_seed(0)
    model = scrambled(model())
    refused(ConversionError, lambda: convert_norm(model, "inplace"), "BatchNorm", "negative scales")
    for norm in model.modules():
        if getattr(norm, "running_mean", None) is not None:
            norm.weight.data.abs_()
    images = torch.randn(shape, dtype=torch.float64)
    assert_same_training(model, convert_norm(copy.deepcopy(model), "inplace"), images)


def test_unrepresentable_scales_raise_or_become_eps():
    model = chain(nn.LeakyReLU())
    with torch.no_grad():
        model[1].weight[0] = 0
    refused(ConversionError, lambda: convert_norm(model, "inplace"), "1 (BatchNorm2d)", "1 scales", "eps = 1e-05")
    twin = convert_norm(copy.deepcopy(model), "inplace", allow_approximate=True)
    assert twin[1].weight[0] == 0
    assert torch.allclose(twin(IMAGES.clone()), model(IMAGES), atol=1e-3)


def test_only_standard_norm_absorbs_relu():
    model = chain(nn.ReLU())
    twin = convert_norm(copy.deepcopy(model), "standard")
    assert twin[1].activation == "relu"
    assert torch.allclose(twin(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-12)
    names = ["1 (BatchNorm2d)", "2 (ReLU)", 'relu="leaky_relu"', "zoo.lean"]
    refused(ConversionError, lambda: convert_norm(model, "inplace"), *names)


UNSAFE = {
    "another reader of its input": (lambda m, y: m.act(m.bn(y)) + y, ("output of 3.conv", "is also read by `")),
    "a producer that keeps its output": (lambda m, y: m.act(m.bn(torch.sigmoid(y))), ("comes from `", "sigmoid(y)")),
    "a view": (lambda m, y: m.act(m.bn(y[:, :, 1:])), ("comes from `", "y[:, :, 1:]")),
    "an activation without in-place form": (lambda m, y: m.gelu(m.bn(y)), ("3.gelu (GELU) has no",)),
    "a function without in-place form": (lambda m, y: F.gelu(m.bn(y)), ("activation `", "F.gelu")),
    "an output that is overwritten": (lambda m, y: m.act(m.bn(y)).add_(1), ("is overwritten by `", "add_(1)")),
    "a module that overwrites": (lambda m, y: m.drop(m.bn(y)), ("is overwritten by 3.drop", "inplace=False")),
    "a flag without a name": (lambda m, y: F.threshold(m.bn(y), 0.1, 0, True), ("is overwritten by `", "threshold")),
    "a view that is overwritten": (
        lambda m, y: m.act(m.bn(y))[:, 1:].flatten(1).mul_(2),
        ("is overwritten by `", "mul_"),
    ),
    "the same tensor, overwritten": (lambda m, y: F.dropout(m.same(m.bn(y))).relu_(), ("is overwritten by `", "relu_")),
    "two calls": (lambda m, y: m.bn(m.conv(m.bn(y)[:, :3])), ("2 times",)),
    "no call": (lambda m, y: y, ("0 times",)),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe_neighbors_are_named_and_nothing_is_converted(case):
    rest, names = UNSAFE[case]
    parts = {"conv": nn.Conv2d(3, 4, 3, bias=False), "bn": nn.BatchNorm2d(4), "act": nn.LeakyReLU(0.1)}
    parts |= {"gelu": nn.GELU(), "same": nn.Identity(), "drop": nn.Dropout(inplace=True)}
    tail = Calls(lambda m, x: rest(m, m.conv(x)), **parts)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(), tail)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    refused(ConversionError, lambda: convert_norm(model, "inplace"), "3.bn", *names)
    assert [type(part) for part in model.modules()].count(nn.BatchNorm2d) == 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Summing(nn.Module):
    """A sum in the forward pass of the whole network, over several lines of source."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        x -= self.body(
            x,
        )
        return x


@pytest.mark.parametrize(
    ("build", "counts", "norm", "call"),
    [
        (
            lambda: torchvision.models.resnet18(num_classes=4),
            "12 of 20",
            "layer1.0.bn2",
            "`out += identity` in layer1.0",
        ),
        (
            lambda: pytest.importorskip("timm").create_model("resnet18", num_classes=4),
            "12 of 20",
            "layer4.1.bn2",
            "`x += shortcut` in layer4.1",
        ),
        (lambda: torchvision.models.mobilenet_v2(num_classes=4, width_mult=0.25), "17 of 52", None, None),
        (Summing, "1 of 2", "stem.1", "`x -= self.body(`"),
    ],
)
def test_error_quotes_overwriting_source_line_and_offers_partial(build, counts, norm, call, caplog):
    model = build()
    message = refused(ConversionError, lambda: convert_norm(model, "inplace", relu="leaky_relu"), "partial=True")
    if norm is not None:
        line = next(line for line in message.splitlines() if norm in line)
        assert line.endswith(f"is overwritten by {call}")
    with caplog.at_level(logging.WARNING, "zoo"):
        convert_norm(model, "inplace", partial=True, relu="leaky_relu")
    (record,) = caplog.records
    assert f"converted {counts} norms" in record.message
    assert len(record.message) < 250


def test_model_without_norms_raises():
    refused(ConversionError, lambda: convert_norm(nn.Linear(2, 2), "inplace"), "Linear")
    frozen = torchvision.ops.FrozenBatchNorm2d(4).double()
    model = chain(nn.LeakyReLU()).append(frozen)
    convert_norm(model, "inplace")
    assert isinstance(model[1], InPlaceABN)
    assert model[-1] is frozen


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("arch", ["resnet18", "resnext50", "densenet121"])
def test_zoo_networks_convert_both_ways_with_the_same_gradients(arch):
    torch.manual_seed(0)
    model = scrambled(zoo.get(arch, num_classes=3), positive=True)
    built = zoo.get(arch, num_classes=3, norm="inplace")
    twin = convert_norm(copy.deepcopy(model), "inplace")
    for (name, part), other in zip(twin.named_modules(), built.modules(), strict=True):
        assert type(part) is type(other), name
    back = convert_norm(copy.deepcopy(twin), "standard")
    for net in (model, twin, back):
        net(IMAGES.clone()).square().sum().backward()
    for other in (twin, back):
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 1e-6 * p.grad.norm() + 1e-12, name


class Block(nn.Module):
    """As in torchvision: one activation after two norms and after the sum, and a function after a third norm."""

    def __init__(self, activation):
        super().__init__()
        self.act = activation
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)))
        y = F.elu(self.bn3(self.conv3(y)), alpha=0.5)
        return self.act(y + x)


class Blocks(nn.Module):
    """Two blocks, and a function after a norm in the forward pass of the whole network."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.one, self.two = Block(activation), Block(copy.deepcopy(activation))

    def forward(self, x):
        return self.two(self.one(torch.relu(F.leaky_relu(self.bn(self.conv(x)), 0.2))))


def blocks(activation):
    torch.manual_seed(0)
    return scrambled(Blocks(activation))


def activations_of(block):
    return [norm.activation for norm in block.children() if isinstance(norm, ABN)]


def test_functional_and_shared_activations_are_fused_by_rewriting_forward():
    model = blocks(nn.LeakyReLU(0.1))
    twin = convert_norm(copy.deepcopy(model), "inplace")
    assert activations_of(twin.one) == ["leaky_relu", "leaky_relu", "elu"]
    assert (twin.bn.activation, twin.bn.activation_param, twin.one.bn3.activation_param) == ("leaky_relu", 0.2, 0.5)
    assert type(twin.one) is Block
    assert list(twin.state_dict()) == list(model.state_dict())
    assert len(kept_tensors(twin, IMAGES.clone())) < len(kept_tensors(model, IMAGES.clone()))
    assert_same_training(model, twin)
    for duplicate in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert duplicate.forward.owner is duplicate
        assert duplicate.one.forward.owner is duplicate.one
        assert torch.equal(duplicate.eval()(IMAGES.clone()), twin.eval()(IMAGES.clone()))
    back = convert_norm(twin, "standard")
    assert {type(part) for part in back.modules() if isinstance(part, ABN)} == {ABN}
    assert_same_training(model, back)


def test_relu_becomes_leaky_relu_only_after_converted_norms():
    model = blocks(nn.ReLU(inplace=True))
    twin = convert_norm(copy.deepcopy(model), "inplace", relu="leaky_relu")
    assert activations_of(twin.one) == ["leaky_relu", "leaky_relu", "elu"]
    assert type(twin.one.act) is nn.ReLU
    reference = copy.deepcopy(model)
    for block in (reference.one, reference.two):
        block.bn1 = nn.Sequential(block.bn1, nn.LeakyReLU(0.01))
        block.bn2 = nn.Sequential(block.bn2, nn.LeakyReLU(0.01))
        block.forward = lambda x, b=block: F.relu(
            F.elu(b.bn3(b.conv3(b.bn2(b.conv2(b.bn1(b.conv1(x)))))), alpha=0.5) + x
        )
    assert torch.allclose(twin(IMAGES.clone()), reference(IMAGES.clone()), rtol=1e-8)
    for kind, relu in (("inplace", "elu"), ("standard", "leaky_relu")):
        refused(ConversionError, partial(convert_norm, model, kind, relu=relu), f"relu={relu!r}", repr(kind))


class Optional(Block):
    """Its calls depend on an optional argument."""

    def forward(self, x, more=None):
        y = F.leaky_relu(self.bn1(self.conv1(x)))
        return y if more is None else y + more


class Asking(Block):
    """Its calls depend on the type of its input."""

    def forward(self, x):
        return x[0] if isinstance(x, list) else F.leaky_relu(self.bn1(self.conv1(x)))


class Moody(Block):
    """Its calls depend on the mode."""

    def forward(self, x):
        y = F.leaky_relu(self.bn1(self.conv1(x)))
        return self.conv2(y) if self.training else y


class Counting(Block):
    """Its forward has a side effect."""

    def forward(self, x):
        self.count = 1
        return F.leaky_relu(self.bn1(self.conv1(x)))


class Passing(Block):
    """A module that returns its input is between norm and activation."""

    def __init__(self, activation):
        super().__init__(activation)
        self.same = Calls(lambda module, x: x)

    def forward(self, x):
        return self.act(self.same(self.bn1(self.conv1(x)))) + self.act(x)


NOT_REWRITABLE = {
    Optional: "takes optional arguments",
    Asking: "calls isinstance",
    Moody: "differs between evaluation and training",
    Counting: "sets attributes",
    Passing: "does not call directly after the norm",
}


@pytest.mark.parametrize("kind", NOT_REWRITABLE)
def test_untraceable_forward_passes_are_not_rewritten(kind):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), kind(nn.LeakyReLU()).train())
    names = "2.bn1", f"2 ({kind.__name__})", NOT_REWRITABLE[kind]
    refused(ConversionError, lambda: convert_norm(model, "inplace"), *names)
    plans, left = plan_norms(model, "inplace", partial=True)
    assert [plan.name for plan in plans] == ["1"]
    assert NOT_REWRITABLE[kind] in left["2.bn1 (BatchNorm2d)"]
    assert not any("forward" in vars(part) for part in model.modules())


def test_partial_converts_convertible_norms_and_names_the_rest(caplog):
    model = scrambled(torchvision.models.resnet18(num_classes=4))
    twin = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "zoo"):
        convert_norm(twin, "inplace", partial=True)
    assert [type(part) for name, part in twin.named_modules() if "downsample.1" in name] == [InPlaceABN] * 3
    assert "ResNet: converted 3 of 20 norms, all but bn1 (BatchNorm2d)" in caplog.text
    assert list(twin.state_dict()) == list(model.state_dict())
    assert_same_training(model, twin)
    single = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    refused(ConversionError, lambda: convert_norm(single, "inplace", partial=True), "1 of 1 norms", "InPlaceABN")


KEEPING = [nn.SiLU(inplace=True), nn.Hardswish(inplace=True), nn.GELU(), nn.Mish(), nn.PReLU(8)]


@pytest.mark.parametrize("activation", KEEPING, ids=lambda activation: type(activation).__name__)
def test_in_place_norm_saves_one_map_before_other_activations(activation):
    model = chain(copy.deepcopy(activation).double())
    twin = convert_norm(copy.deepcopy(model), "inplace", partial=True)
    assert isinstance(twin[1], InPlaceABN)
    assert type(twin[2]) is type(activation)
    size = model[0](IMAGES).numel()
    before, after = (sum(t.numel() >= size for t in kept_tensors(net, IMAGES.clone())) for net in (model, twin))
    assert (before, after) == (3, 2)
    assert_same_training(model, twin)
    assert_same_training(model, convert_norm(twin, "standard"))


def test_synchronized_norms_convert_to_synchronized_norms_only():
    torch.manual_seed(0)
    model = scrambled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4, process_group="group"), nn.ELU()))
    refused(ConversionError, lambda: convert_norm(model, "inplace"), "all processes", '"sync"')
    expected = model.eval()(IMAGES)
    twin = convert_norm(model, "sync")
    assert (type(twin[1]), twin[1].group) == (InPlaceABNSync, "group")
    assert torch.allclose(twin(IMAGES.clone()), expected, rtol=1e-9)


def _decide(module, x):
    """Make calls that depend on values; overwrite the output of the first part."""
    y = module.first(x)
    y += 1 if y.sum() > 0 else 2
    return module.last(module.second(y))


def test_untraceable_modules_stay_and_their_children_are_converted():
    torch.manual_seed(0)

    def part(*layers):
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), *layers)

    opaque = Calls(_decide, first=part(), second=part(nn.ELU(), nn.Conv2d(4, 4, 1)), last=nn.BatchNorm2d(4))
    model = scrambled(
        nn.Sequential(nn.Conv2d(3, 4, 1), *part(nn.ELU(), nn.Conv2d(4, 4, 1)), opaque, *part(), opaque.second)
    )
    _, left = plan_norms(model, "inplace", partial=True)
    assert list(left) == ["5.first.1 (BatchNorm2d)", "5.second.1 (BatchNorm2d)", "5.last (BatchNorm2d)"]
    first, second, last = left.values()
    assert "is overwritten by unknown readers of the output of 5.first" in first
    assert "5 cannot be traced (TraceError: symbolically traced" in second  # it has two names
    assert "5 cannot be traced (TraceError: symbolically traced" in last
    refused(ConversionError, lambda: convert_norm(model, "inplace"), "5 cannot be traced")
    assert_same_training(model, convert_norm(copy.deepcopy(model), "inplace", partial=True))
    whole = Calls(_decide, first=part(), second=part(nn.ELU(), nn.Conv2d(4, 4, 1)), last=part())
    refused(ConversionError, lambda: convert_norm(whole, "inplace"), "Calls")
    plans, _ = plan_norms(whole, "inplace", partial=True)
    assert [plan.name for plan in plans] == ["second.1"]


@pytest.mark.parametrize("training", [True, False])
def test_training_only_operations_are_traced_in_evaluation_too(training):
    doubling = Calls(lambda m, x: x * 2 if m.training else x)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), doubling, nn.ELU()).train(training)
    convert_norm(model, "inplace")
    assert (model[1].activation, type(model[3]), model[2].training) == ("identity", nn.ELU, training)


#: timm's norm with an activation -> how many maps of its size an in-place norm saves.
TIMM = {nn.ReLU: 1, nn.LeakyReLU: 1, nn.SiLU: 2, nn.PReLU: 2, None: 1}


@pytest.mark.parametrize("activation", TIMM)
def test_timm_norms_with_activation_are_converted(activation):
    layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    norm = layers.BatchNormAct2d(4, **({"act_layer": activation} if activation else {"apply_act": False}))
    model = scrambled(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 3, 1)))
    twin = copy.deepcopy(model)
    if activation is nn.ReLU:
        names = ["1 (BatchNormAct2d)", "1.act (ReLU)"]
        refused(ConversionError, lambda: convert_norm(twin, "inplace", partial=True), *names)
        model[1].act = nn.LeakyReLU(0.01)
    convert_norm(twin, "inplace", partial=True, relu="leaky_relu")
    assert type(twin[1]) is InPlaceABN
    assert list(twin.state_dict()) == list(model.state_dict())
    size = model[0](IMAGES).numel()
    assert sum(kept.numel() >= size for kept in kept_tensors(twin, IMAGES.clone())) == TIMM[activation]
    with torch.no_grad():
        net = pickle.loads(pickle.dumps(twin)).eval()
        assert torch.allclose(net(IMAGES.clone()), model.eval()(IMAGES), rtol=1e-8, atol=1e-9)
    assert_same_training(model, twin)
    assert_same_training(model, convert_norm(twin, "standard"))


def test_timm_norms_with_dropout_stay():
    layers = pytest.importorskip("timm.layers")
    dropping = layers.BatchNormAct2d(4, act_layer=nn.ELU, drop_layer=nn.Dropout)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ELU(), nn.Conv2d(4, 4, 1), dropping)
    _, left = plan_norms(model, "inplace", partial=True)
    assert "it drops values with Dropout" in left["4 (BatchNormAct2d)"]
