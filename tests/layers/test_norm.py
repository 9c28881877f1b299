"""The norm modules: their formula, published interface, state dict, copies, freezing, autocast and recomputation."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.formula import activated_batch_norm, relative_error
from tests.refusals import refused
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync, freeze_norms, norm_act

CLASSES = [ABN, InPlaceABN, InPlaceABNSync]
STATE_KEYS = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def scrambled(layer: nn.Module, seed: int = 0) -> nn.Module:
    """Give a float64 layer weights of both signs and random running statistics."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in layer.double().state_dict().items():
        if name != "num_batches_tracked":
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    if layer.running_var is not None:
        layer.running_var.abs_().add_(0.1)
    return layer


@pytest.mark.parametrize("cls", CLASSES)
def test_constructor_defaults_and_attributes_are_published_ones(cls):
    layer = cls(7)
    values = (layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    assert values == (7, 1e-5, 0.1, True, True)
    assert (layer.activation, layer.activation_param) == ("leaky_relu", 0.01)
    assert list(layer.state_dict()) == STATE_KEYS
    expected = [torch.ones(7), torch.zeros(7), torch.zeros(7), torch.ones(7), torch.tensor(0)]
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), expected, strict=True))
    positional = cls(7, 1e-3, 0.2, False, False, "elu", 0.5)
    assert positional.weight is None
    assert positional.running_var is None
    assert (positional.eps, positional.momentum, positional.activation_param) == (1e-3, 0.2, 0.5)
    assert list(positional.state_dict()) == []


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracking", [True, False])
def test_outputs_and_gradients_follow_formula_in_every_mode(cls, training, affine, tracking):
    layer = scrambled(cls(3, affine=affine, track_running_stats=tracking)).train(training)
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    dz = torch.randn_like(x)
    fixed = (layer.running_mean.clone(), layer.running_var.clone()) if tracking and not training else None
    leaf, truth_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    truth_parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()] or [None, None]
    truth = activated_batch_norm(truth_leaf, *truth_parameters, statistics=fixed, signed=cls is ABN)
    truth.backward(dz)
    z = layer(leaf * 1)
    z.backward(dz)
    assert relative_error(z, truth) < 1e-11
    assert relative_error(leaf.grad, truth_leaf.grad) < 1e-11
    for parameter, expected in zip(layer.parameters(), truth_parameters, strict=False):
        assert relative_error(parameter.grad, expected.grad) < 1e-11


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_update_like_torchs_batch_norm(cls, momentum):
    layer, torch_layer = cls(3, momentum=momentum).double(), nn.BatchNorm2d(3, momentum=momentum).double()
    counter = layer.num_batches_tracked
    for step in range(4):
        x = torch.randn(4, 3, 5, 6, dtype=torch.float64) * (step + 1) + step
        torch_layer(x)
        layer(x.clone())
        for name, buffer in torch_layer.named_buffers():
            assert torch.allclose(layer.get_buffer(name), buffer, rtol=1e-12)
    assert layer.num_batches_tracked is counter  # the same tensor, not a new one each step
    layer.eval()(x.clone())
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("cls", [InPlaceABN, InPlaceABNSync])
def test_in_place_layers_overwrite_their_input_unless_switched_off(cls):
    layer, x = cls(3), torch.randn(4, 3, 5, 5)
    assert layer(x).data_ptr() == x.data_ptr()
    layer.inplace = False
    before = x.clone()
    assert layer(x).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "settings",
    [{"activation": "gelu"}, *({"activation_param": value} for value in (0.0, -1.0, "0.1", float("inf"), None))],
)
def test_bad_activations_fail_at_construction(cls, settings):
    refused(ValueError, lambda: cls(3, **settings), "activation")
    if cls is ABN:
        cls(3, activation="relu")
    else:
        refused(ValueError, lambda: cls(3, activation="relu"), "'relu'", "leaky_relu, elu, identity")


@pytest.mark.parametrize("cls", CLASSES)
def test_activation_is_read_at_each_call(cls):
    layer, x = cls(3).double(), torch.randn(4, 3, 5, 6, dtype=torch.float64)
    layer.activation = "identity"
    assert relative_error(layer(x.clone()), activated_batch_norm(x, torch.ones(3), None, activation="identity")) < 1e-4
    layer.activation = "gelu"
    refused(ValueError, lambda: layer(x.clone()), "gelu")


@pytest.mark.parametrize("cls", CLASSES)
def test_shape_errors_name_shape(cls):
    refused(ValueError, lambda: cls(3)(torch.randn(4, 5, 2, 2)), "3 channels", "(4, 5, 2, 2)")
    refused(ValueError, lambda: cls(3)(torch.randn(3)), "(3,)")
    refused(ValueError, lambda: cls(3)(torch.zeros(4, 3, dtype=torch.long)), "torch.int64")
    refused(ValueError, lambda: cls(3)(torch.randn(1, 3, 1, 1)), "got 1", "(1, 3, 1, 1)")
    assert cls(3).eval()(torch.randn(0, 3, 2, 2)).shape == (0, 3, 2, 2)


@pytest.mark.parametrize("cls", CLASSES)
def test_unversioned_state_dict_may_lack_counter(cls):
    state = cls(3).state_dict()
    del state["num_batches_tracked"]
    refused(RuntimeError, lambda: cls(3).load_state_dict(state), "num_batches_tracked")
    layer = cls(3)
    layer.num_batches_tracked.fill_(9)
    layer.load_state_dict(dict(state))  # a plain dict does not have the version
    assert layer.num_batches_tracked.dtype == torch.long


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_and_pickles_compute_the_same(cls):
    layer = scrambled(cls(3, activation="elu", activation_param=0.7))
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(twin(x.clone()), copy.deepcopy(layer)(x.clone()))


@pytest.mark.parametrize("trained", [("x",), ("weight",), ("bias",), ("x", "weight", "bias")])
@pytest.mark.parametrize("cls", CLASSES)
def test_training_batch_between_evaluation_and_its_backward_is_allowed(cls, trained):
    layer, x = scrambled(cls(3)), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    tensors = {"x": x, "weight": layer.weight, "bias": layer.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    leaves = [tensors[name] for name in trained]
    expected = torch.autograd.grad(layer.eval()(x * 1).square().sum(), leaves)
    z = layer.eval()(x * 1)
    layer.train()(torch.randn(4, 3, 5, 5, dtype=torch.float64))
    for found, truth in zip(torch.autograd.grad(z.square().sum(), leaves), expected, strict=True):
        assert torch.equal(found, truth)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_gradients_can_be_taken_once(inplace, training):
    layer = scrambled(InPlaceABN(3)).train(training)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    layer.inplace = inplace
    (plain,) = torch.autograd.grad(layer(x * 1).square().sum(), x)
    (dx,) = torch.autograd.grad(layer(x * 1).square().sum(), x, create_graph=True)
    assert torch.equal(dx, plain)
    assert not plain.requires_grad
    refused(RuntimeError, lambda: dx.sum().backward(), "second derivatives")


@pytest.mark.parametrize("cls", [InPlaceABN, InPlaceABNSync])
def test_invalid_input_leaves_input_and_statistics_unchanged(cls):
    layer, leaf = cls(3), torch.randn(4, 3, 5, 5, requires_grad=True)
    single, before = torch.randn(1, 3, 1, 1), leaf.detach().clone()
    refused(RuntimeError, lambda: layer(leaf), "leaf tensor", "inplace = False")
    refused(ValueError, lambda: layer(single), "got 1")
    assert torch.equal(leaf, before)
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(3))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_parameters_and_statistics_in_float32(cls, dtype):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), cls(8), nn.Conv2d(8, 8, 3))
    with torch.autocast("cpu", dtype):
        hidden = net[:2](torch.randn(4, 3, 8, 8))
        out = net[2](hidden)
    out.float().square().mean().backward()
    assert hidden.dtype == dtype
    assert net[1].running_mean.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("cls", CLASSES)
def test_frozen_norms_use_and_keep_their_statistics_in_training_too(cls):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), scrambled(cls(4)).float())
    assert freeze_norms(net) == 1
    net.train()
    before = copy.deepcopy(net[1].state_dict())
    net(torch.randn(2, 3, 4, 4)).sum().backward()
    assert not net[1].training
    assert net[0].training
    assert all(torch.equal(before[key], value) for key, value in net[1].state_dict().items())
    assert net[1].weight.grad is None
    assert net[0].weight.grad is not None
    refused(ValueError, lambda: freeze_norms(nn.Linear(2, 2)), "ABN")
    refused(ValueError, lambda: freeze_norms(nn.Sequential(cls(3), nn.BatchNorm2d(3))), "1 (BatchNorm2d)")
    refused(ValueError, lambda: freeze_norms(cls(3, track_running_stats=False)), "running statistics")


@pytest.mark.parametrize("kind", ["standard", "inplace", "sync"])
def test_factory_builds_each_kind_with_its_activation(kind):
    layer = norm_act(kind, "elu", 0.5)(6)
    assert type(layer) is {"standard": ABN, "inplace": InPlaceABN, "sync": InPlaceABNSync}[kind]
    assert (layer.num_features, layer.activation, layer.activation_param) == (6, "elu", 0.5)
