"""Code for inplace_abn runs with `zoo.inplace_abn`: each use that public repositories make of it, restated."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo.inplace_abn  # makes the names below importable
from tests.formula import relative_error
from tests.refusals import refused
from zoo import layers
from zoo.convert import convert_norm

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync  # isort: skip
from inplace_abn.bn import InPlaceABNSyncWrapper, InPlaceABNWrapper  # isort: skip
from inplace_abn.functions import ACT_ELU, ACT_LEAKY_RELU, ACT_NONE, ACT_RELU, inplace_abn, inplace_abn_sync  # isort: skip

CLASSES = [ABN, InPlaceABN, InPlaceABNSync]


def images(channels: int = 4, *spatial: int) -> Tensor:
    return torch.randn(3, channels, *(spatial or (5, 6)), generator=torch.Generator().manual_seed(0)).double()


def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and the parameters."""
    leaf = x.clone().requires_grad_()
    out = network(leaf * 1)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), leaf.grad, *(parameter.grad for parameter in network.parameters())]


def check_equal(network: nn.Module, twin: nn.Module, x: Tensor) -> None:
    for ours, theirs in zip(gradients(network, x), gradients(twin, x), strict=True):
        assert relative_error(ours, theirs) < 1e-4, "the scale is |weight| + eps"


def test_modules_have_names_of_all_releases() -> None:
    """seamseg and MiB import the group functions, sssegmentation all three classes, old code the module bn."""
    import inplace_abn
    import inplace_abn.abn
    import inplace_abn.bn
    import inplace_abn.group

    assert inplace_abn.abn.InPlaceABNSync is inplace_abn.InPlaceABNSync
    for name in ("ABN", "InPlaceABN", "InPlaceABNSync"):
        assert issubclass(getattr(inplace_abn.bn, name), getattr(inplace_abn, name))
    assert inplace_abn.group.active_group is inplace_abn.active_group is layers.active_group
    assert inplace_abn.set_active_group is layers.set_active_group
    assert (ACT_RELU, ACT_LEAKY_RELU, ACT_ELU, ACT_NONE) == ("relu", "leaky_relu", "elu", "none")
    assert inplace_abn.__version__ == "1.1.0"
    namespace: dict[str, Any] = {}
    exec("from inplace_abn.bn import *", namespace)
    assert namespace["InPlaceABN"] is inplace_abn.bn.InPlaceABN
    assert {"inplace_abn", "inplace_abn_sync", "InPlaceABNWrapper", "InPlaceABNSyncWrapper"} <= set(namespace)


@pytest.mark.parametrize("kind", CLASSES)
def test_fifth_positional_argument_may_be_activation(kind: type[ABN]) -> None:
    """Releases 0.x and 1.0 had the activation there, seamseg's subclasses still have."""
    old, new = kind(4, 1e-5, 0.1, True, "elu", 0.5), kind(4, 1e-5, 0.1, True, True, "elu", 0.5)
    for norm in (old, new):
        assert (norm.track_running_stats, norm.activation, norm.activation_param) == (True, "elu", 0.5)
    assert kind(4, 1e-5, 0.1, True, False).running_mean is None
    refused(TypeError, lambda: kind(4, 1e-5, 0.1, True, "elu", 0.5, None, None), "positional arguments")


def test_slope_is_activation_param() -> None:
    assert InPlaceABN(4, slope=0.2).activation_param == InPlaceABN(4, slope=0.2).slope == 0.2
    assert InPlaceABN(4, activation=ACT_ELU, slope=0.01).activation_param == 1, "alpha was always 1"
    assert InPlaceABN(4, 1e-5, 0.1, True, ACT_ELU, slope=0.01).activation_param == 1
    for arguments, names in (((), {"activation_param": 0.1}), ((1e-5, 0.1, True, "leaky_relu", 0.1), {})):
        refused(TypeError, partial(InPlaceABN, 4, *arguments, slope=0.2, **names), "slope", "activation_param")


@pytest.mark.parametrize("activation", ["leaky_relu", "elu"])
def test_slope_can_be_set(activation: str) -> None:
    norm = ABN(4, activation=activation, slope=0.01).double()
    norm.slope = 0.3
    nonlinearity = nn.LeakyReLU(0.3) if activation == "leaky_relu" else nn.ELU()
    check_equal(norm, nn.Sequential(nn.BatchNorm2d(4).double(), nonlinearity), images())
    assert norm.slope == norm.activation_param == (0.3 if activation == "leaky_relu" else 1)


@pytest.mark.parametrize("name", ["ABN", "InPlaceABN", "InPlaceABNSync"])
def test_alpha_of_module_bn_is_always_one(name: str) -> None:
    kind = getattr(zoo.inplace_abn.bn, name)
    for norm in (kind(4, activation="elu"), kind(4, 1e-5, 0.1, True, "elu", 0.2), kind(4, activation="elu", slope=0.2)):
        assert norm.activation_param == 1
    check_equal(kind(4, activation="elu").double(), nn.Sequential(nn.BatchNorm2d(4), nn.ELU()).double(), images())
    assert kind(4).slope == 0.01
    assert kind(4, slope=0.2).slope == 0.2
    assert issubclass(kind, zoo.inplace_abn.bn.ABN)
    assert not issubclass(zoo.inplace_abn.bn.ABN, InPlaceABN)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("devices", [None, [0], [0, 1], (0, 1), range(2)])
def test_devices_of_synchronized_norm_are_dropped(devices: Any, positional: bool) -> None:
    """The second argument of releases 0.0.1 to 0.1.1."""
    place, names = ([devices], {}) if positional else ([], {"devices": devices})
    norm = InPlaceABNSync(4, *place, eps=1e-6, slope=0.2, **names).double()
    assert (norm.eps, norm.momentum, norm.slope, norm.group) == (1e-6, 0.1, 0.2, None)
    check_equal(norm, nn.Sequential(nn.BatchNorm2d(4, eps=1e-6), nn.LeakyReLU(0.2)).double(), images())


@pytest.mark.parametrize("devices", [None, [0, 1]])
def test_arguments_after_devices_follow(devices: Any) -> None:
    norm = InPlaceABNSync(4, devices, 1e-3, 0.2, False, "leaky_relu", 0.5)
    assert (norm.eps, norm.momentum, norm.affine, norm.activation, norm.slope) == (1e-3, 0.2, False, "leaky_relu", 0.5)
    assert InPlaceABNSync(4, devices, activation="elu").activation_param == 1, "alpha was always 1"
    norm = InPlaceABNSync(4, 1e-3, 0.2, False, "elu", 0.5)
    assert (norm.eps, norm.momentum, norm.affine, norm.activation, norm.slope) == (1e-3, 0.2, False, "elu", 0.5)


#: Arguments -> the attributes of the norm, and the activation that follows an ordinary norm. openseg, STDC-Seg, BiSeNet
#: and face parsing have "none", CCNet has "identity". segmentation_models.pytorch writes ReLU as a slope of 0, for
#: which the original let gradients pass where its output was 0.
ACTIVATIONS: list[tuple[dict[str, Any], tuple[str, float], nn.Module]] = [
    ({"activation": nn.LeakyReLU(0.2)}, ("leaky_relu", 0.2), nn.LeakyReLU(0.2)),
    ({"activation": nn.LeakyReLU(0.2, inplace=True)}, ("leaky_relu", 0.2), nn.LeakyReLU(0.2)),
    ({"activation": nn.ELU(0.7)}, ("elu", 0.7), nn.ELU(0.7)),
    ({"activation": nn.Identity()}, ("identity", 0.01), nn.Identity()),
    ({"activation": None}, ("identity", 0.01), nn.Identity()),
    ({"activation": "none"}, ("none", 0.01), nn.Identity()),
    ({"activation": "identity"}, ("identity", 0.01), nn.Identity()),
    ({"activation": "leaky_relu", "activation_param": 0.0}, ("leaky_relu", 0.0), nn.ReLU()),
]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("arguments", "attributes", "activation"), ACTIVATIONS)
def test_activation_may_be_module_or_name_of_any_release(
    kind: type[ABN], arguments: dict[str, Any], attributes: tuple[str, float], activation: nn.Module
) -> None:
    norm = kind(4, **arguments).double()
    assert (norm.activation, norm.activation_param) == attributes
    assert list(norm.children()) == []
    check_equal(norm, nn.Sequential(nn.BatchNorm2d(4), activation).double(), images())


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.LeakyReLU(0.2), nn.Identity()])
def test_second_positional_argument_of_abn_may_be_module(activation: nn.Module) -> None:
    """ABN of release 0.0.1 passed the other arguments to BatchNorm2d."""
    norm = ABN(4, activation, eps=1e-3, momentum=0.2).double()
    assert (norm.eps, norm.momentum) == (1e-3, 0.2)
    check_equal(norm, nn.Sequential(nn.BatchNorm2d(4, eps=1e-3), copy.deepcopy(activation)).double(), images())


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"activation": nn.GELU()},
        {"activation": nn.PReLU()},
        {"activation": nn.ReLU},
        {"activation": F.relu},
        {"activation": 0.01},
        {"activation": type("Shifted", (nn.LeakyReLU,), {})(0.2)},
        {"activation": nn.LeakyReLU(0.2), "slope": 0.2},
        {"activation": nn.LeakyReLU(0.2), "activation_param": 0.2},
        {"eps": "elu"},
        {"eps": True},
        {"eps": torch.tensor(1e-5)},
        {"momentum": "elu"},
        {"momentum": [0.1]},
    ],
)
def test_unknown_arguments_raise_at_construction(kind: type[ABN], arguments: dict[str, Any]) -> None:
    value = next(iter(arguments.values()))
    shown = type(value).__name__ if isinstance(value, nn.Module) else getattr(value, "__name__", str(value))
    message = refused((TypeError, ValueError), lambda: kind(4, **arguments), shown)
    assert next(iter(arguments)) in message.lower()


@pytest.mark.parametrize(
    ("kinds", "args", "settings", "error", "names"),
    [
        (CLASSES, (), {"activation": nn.LeakyReLU(-0.2)}, ValueError, ("activation_param", "leaky_relu", "-0.2")),
        ([ABN], (1e-3,), {"eps": 1e-3}, TypeError, ("eps",)),
        ([ABN], (nn.ReLU(),), {"activation": "elu"}, TypeError, ("activation",)),
        ([ABN], (nn.ReLU(), 1e-3), {}, TypeError, ("positional arguments", "3")),
        ([ABN], (1e-5, 0.1, True, "off"), {}, ValueError, ("off",)),
        ([ABN, InPlaceABN], ([0, 1],), {}, TypeError, ("eps",)),
        ([ABN, InPlaceABN], (), {"devices": [0, 1]}, TypeError, ("devices",)),
        ([InPlaceABN, InPlaceABNSync], (), {"activation": nn.ReLU()}, ValueError, ("relu",)),
        ([InPlaceABN, InPlaceABNSync], (), {"activation": nn.ReLU(inplace=True)}, ValueError, ("relu",)),
        ([InPlaceABN, InPlaceABNSync], (), {"activation": "relu"}, ValueError, ("relu",)),
    ],
)
def test_impossible_arguments_raise(
    kinds: list[type[ABN]], args: Any, settings: dict[str, Any], error: Any, names: tuple[str, ...]
) -> None:
    for kind in kinds:
        refused(error, partial(kind, 4, *args, **settings), *names)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True)])
def test_abn_takes_relu_module(activation: nn.Module) -> None:
    assert ABN(4, activation=activation).activation == "relu"


@pytest.mark.parametrize("kind", CLASSES)
def test_activation_set_to_none_is_identity(kind: type[ABN]) -> None:
    norm = kind(4).double()
    norm.activation = None
    check_equal(norm, nn.BatchNorm2d(4).double(), images())


@pytest.mark.parametrize("wrapper", [InPlaceABNWrapper, InPlaceABNSyncWrapper])
def test_wrappers_hold_norm_as_bn(wrapper: type[nn.Module]) -> None:
    """Release 0.0.1 has them to give the norms the keys of its ABN."""
    norm = wrapper(4, eps=1e-6, activation="elu").double()
    assert set(norm.state_dict()) == {f"bn.{key}" for key in InPlaceABN(4).state_dict()}
    check_equal(norm, nn.Sequential(nn.BatchNorm2d(4, eps=1e-6), nn.ELU()).double(), images())


def test_activation_is_read_in_each_call() -> None:
    """MiB and PLOP set it after construction, and compute a gain from both attributes."""
    norm = partial(InPlaceABN, activation="leaky_relu", activation_param=0.01)(4).double()
    assert nn.init.calculate_gain(norm.activation, norm.activation_param) == pytest.approx(2**0.5, rel=1e-3)
    norm.activation = "identity"
    check_equal(norm, nn.BatchNorm2d(4).double(), images())
    norm.activation = "none"
    norm.zero_grad()
    check_equal(norm, nn.BatchNorm2d(4).double(), images())


@pytest.mark.parametrize("spatial", [(), (6,), (5, 6), (2, 3, 4)])
def test_network_trained_with_one_class_loads_into_other(spatial: tuple[int, ...]) -> None:
    """CasMVSNet, mvsnerf and pointnerf train with InPlaceABN and evaluate with ABN, on images and volumes."""
    x = torch.randn(6, 4, *spatial).double()
    trained, other = InPlaceABN(4).double(), ABN(4).double()
    for _ in range(3):
        trained(x * 1)
    with torch.no_grad():
        trained.weight.uniform_(0.5, 2)
    other.load_state_dict(trained.state_dict(), strict=True)
    assert torch.allclose(trained.eval()(x * 1), other.eval()(x), atol=1e-4)
    state = {key: value for key, value in trained.state_dict().items() if key != "num_batches_tracked"}
    other.load_state_dict(state, strict=True)  # as releases before 1.1 wrote it


def test_norms_become_abn_by_keys_of_state_dict() -> None:
    """TResNet, ASL and ML_Decoder copy the tensors, with |weight| + eps, and then fuse norm and convolution."""
    source = InPlaceABN(num_features=4, activation="leaky_relu", activation_param=1e-2).double().eval()
    with torch.no_grad():
        source.weight.uniform_(-2, 2)
        source.running_mean.normal_()
    target = ABN(4, activation=source.activation, activation_param=source.activation_param).double().eval()
    for key, value in source.state_dict().items():
        target.state_dict()[key].copy_(value.abs() + source.eps if key == "weight" else value)
    assert torch.allclose(target(images()), source(images()))
    assert isinstance(source, InPlaceABN)
    assert isinstance(InPlaceABNSync(4), InPlaceABN), "unlike the original's, on which no use depends"
    source.weight = nn.Parameter(torch.zeros_like(source.weight))
    assert source(images()).abs().max() < 1e-3


def test_networks_of_partial_norms_are_initialized_by_class_name() -> None:
    """CCNet and OCNet look for the name of the class; MonoFlex and pytorch-tools build by a name."""
    norm_act = partial(InPlaceABNSync, activation="identity")
    network = nn.Sequential(nn.Conv2d(4, 8, 1), norm_act(8), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), norm_act(4))
    found = [each for each in network.modules() if type(each).__name__.find("InPlaceABN") != -1]
    assert len(found) == 2
    network(images().float())
    InPlaceABN(4, momentum=0.05, activation="leaky_relu")(images().float())


def test_statistics_and_momentum_may_be_replaced() -> None:
    """Self-Correction-Human-Parsing resets them to average over a data set."""
    norm = InPlaceABNSync(4).double()
    norm.running_mean, norm.running_var = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
    norm.momentum = 1.0
    norm(images())
    assert torch.allclose(norm.running_mean, images().mean((0, 2, 3)))


def test_subclass_of_release_1_0_replaces_norm() -> None:
    """seamseg derives a group norm, without running statistics, and passes its arguments in the order of 1.0."""

    class ActivatedGroupNorm(ABN):
        def __init__(self, channels: int, groups: int, activation: str = "leaky_relu", slope: float = 0.01) -> None:
            super().__init__(channels, 1e-5, 0.1, True, activation, slope)
            self.groups = groups
            del self.running_mean, self.running_var

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(F.group_norm(x, self.groups, self.weight, self.bias, self.eps), self.activation_param)

    norm = ActivatedGroupNorm(4, 2)
    assert norm(images().float()).shape == (3, 4, 5, 6)
    assert norm.activation_param == 0.01


def test_frozen_norms_stay_in_evaluation() -> None:
    norm = InPlaceABN(4).eval()
    norm.requires_grad_(False)
    before = copy.deepcopy(norm.state_dict())
    norm(images().float())
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


@pytest.mark.parametrize("function", [inplace_abn, inplace_abn_sync])
@pytest.mark.parametrize(("activation", "parameter"), [("leaky_relu", 0.01), ("none", 0.01), ("leaky_relu", 0.0)])
def test_functions_take_arguments_of_original(function: Any, activation: str, parameter: float) -> None:
    """timm passes ten positional arguments, and looks whether the result is a tuple."""
    twin = InPlaceABN(4, activation=activation, activation_param=parameter).double()
    weight, bias, mean, var = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4)
    vectors = [each.double() for each in (weight, bias, mean, var)]
    out = function(images(), *vectors, True, 0.1, 1e-5, activation, parameter)
    assert not isinstance(out, tuple)
    assert torch.equal(out, twin(images()))
    assert torch.equal(vectors[2], twin.running_mean)


def test_half_precision_autocast_and_copies() -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 1), InPlaceABN(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(images().float()).dtype == torch.bfloat16
    assert copy.deepcopy(network)(images().float()).shape == (3, 4, 5, 6)
    assert InPlaceABN(4).half().float()(images().float()).isfinite().all()


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of checks
def test_network_is_traced_after_conversion_to_standard_norms() -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 1), InPlaceABN(4)).eval()
    x = images().float()
    with pytest.raises(torch.jit.TracingCheckError, match="not supported in the JIT"):
        torch.jit.trace(network, x)
    traced = torch.jit.trace(convert_norm(copy.deepcopy(network), "standard"), x)
    torch.testing.assert_close(traced(x), network(x))


@pytest.mark.parametrize("kind", CLASSES)
def test_unversioned_file_may_lack_counters(kind: type[ABN]) -> None:
    """As in torch: a state dict with version 2 has them."""
    state = kind(4).state_dict()
    del state["num_batches_tracked"]
    kind(4).load_state_dict(dict(state), strict=True)
    for norm in (kind(4), nn.BatchNorm2d(4)):
        refused(RuntimeError, partial(norm.load_state_dict, state, strict=True), "num_batches_tracked")


@pytest.mark.parametrize(("activation", "parameter"), [("none", 0.01), ("leaky_relu", 0.0), ("elu", 1.0)])
def test_conversion_to_standard_norms_preserves_outputs(activation: str, parameter: float) -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 1), InPlaceABN(4, 1e-5, 0.1, True, activation, parameter)).double().eval()
    expected = network(images())
    converted = convert_norm(copy.deepcopy(network), "standard")
    assert torch.allclose(converted.eval()(images()), expected)


def old_module(release: str) -> nn.Module:
    """Return a module with the attributes that the class of a release had."""
    module = nn.Module()
    module.num_features, module.affine, module.eps, module.momentum = 4, True, 1e-5, 0.1
    module.activation = "leaky_relu" if release == "1.1" else "none"
    setattr(module, "slope" if release == "0.x" else "activation_param", 0.1)
    module.weight, module.bias = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.ones(4))
    module.register_buffer("running_mean", torch.zeros(4))
    module.register_buffer("running_var", torch.ones(4))
    if release == "1.1":
        module.track_running_stats = True
        module.register_buffer("num_batches_tracked", torch.tensor(3))
    else:
        module.activation = "leaky_relu"
    return module


@pytest.mark.parametrize("release", ["0.x", "1.0", "1.1"])
@pytest.mark.parametrize("name", ["ABN", "InPlaceABN", "InPlaceABNSync"])
def test_modules_pickled_by_original_load(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = "inplace_abn.bn" if release == "0.x" else "inplace_abn.abn"
    fake = ModuleType(home)
    old = type(name, (nn.Module,), {"__module__": home})
    setattr(fake, name, old)
    module = old_module(release)
    module.__class__ = old
    if name == "InPlaceABNSync":
        module.group = None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, home, fake)
        file = io.BytesIO()
        torch.save(nn.Sequential(nn.Conv2d(4, 4, 1), module), file)
    file.seek(0)
    network = torch.load(file, weights_only=False)
    assert type(network[1]) is getattr(sys.modules[home], name)
    twin = nn.Sequential(network[0], copy.deepcopy(network[1]))
    assert network.train()(images().float()).shape == (3, 4, 5, 6)
    assert network[1].num_batches_tracked == (4 if release == "1.1" else 1)
    assert network[1].activation_param == 0.1
    assert torch.load(_saved(twin), weights_only=False)[1].slope == 0.1
    assert pickle.loads(pickle.dumps(network[1])).activation == "leaky_relu"


def _saved(network: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return file


TIMM = """
import zoo.inplace_abn
import timm, torch
from timm.layers import create_norm_act_layer, get_norm_act_layer
from timm.layers.inplace_abn import InplaceAbn

assert isinstance(create_norm_act_layer("iabn", 8, "leaky_relu"), InplaceAbn)
layer = get_norm_act_layer("iabn")
network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), layer(8), torch.nn.Conv2d(8, 8, 3), layer(8, apply_act=False))
before = [parameter.clone() for parameter in network.parameters()]
network(torch.randn(2, 3, 9, 9)).square().sum().backward()
torch.optim.SGD(network.parameters(), 0.1).step()
print(sum(not torch.equal(a, b) for a, b in zip(before, network.parameters())), len(before))
"""


@pytest.mark.slow
def test_norms_of_timm_train() -> None:
    pytest.importorskip("timm")
    command = [sys.executable, "-W", "ignore", "-c", TIMM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changed, count = map(int, done.stdout.split())
    assert changed >= count - 2, "a bias before a norm has no gradient"


def test_already_imported_original_raises() -> None:
    code = "import sys, types; sys.modules['inplace_abn'] = types.ModuleType('inplace_abn'); import zoo.inplace_abn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: another inplace_abn is imported already" in done.stderr
