"""Modules whose forward changes buffers or attributes: chains and checkpoints have the results of plain training."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils.parametrizations import spectral_norm

from tests.nets import build
from tests.refusals import refused
from zoo.layers import InPlaceABN, ReversibleBlock, ReversibleSequential, checkpoint
from zoo.layers.reversible import ShiftBlock
from zoo.ops.chain import run_chain

EXACT = 1e-9


class RunningScale(nn.Module):
    """Divides by a moving average of the root mean square, which it assigns, overwrites or writes to ``.data``."""

    def __init__(self, how="overwrite"):
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        rms = x.detach().square().mean((0, 2, 3)).sqrt()
        y = x / (0.5 * rms + self.scale).view(1, -1, 1, 1)
        if self.how == "assign":
            self.scale = 0.7 * self.scale + 0.3 * rms
        else:
            (self.scale.data if self.how == "data" else self.scale).mul_(0.7).add_(0.3 * rms)
        return y


class WarmUp(nn.Module):
    """Scales by the number of calls: a Python number."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * min(1.0, 0.2 * self.calls)


class Membrane(nn.Module):
    """Adds a tensor of the latest call, which does not exist in the first."""

    def forward(self, x):
        y = x + getattr(self, "potential", 0)
        self.potential = y.detach().tanh()
        return y


class Created(nn.Module):
    """Registers its buffer in the first call, and grows it."""

    def forward(self, x):
        if not hasattr(self, "total"):
            self.register_buffer("total", torch.zeros(0))
        if not self.total.numel():
            self.total.resize_(1).fill_(0.5)
        y = x * self.total.clone()
        self.total += 0.25
        return y


class ActNorm(nn.Module):
    """Initializes its parameters from the first batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                self.scale.copy_(1 / x.std((0, 2, 3), keepdim=True))
                self.initialized.fill_(True)
        return x * self.scale


class Renorm(nn.BatchNorm2d):
    """Reads its running statistics in training."""

    def forward(self, x):
        seen = self.running_var.clone()
        return super().forward(x) * (1 + seen).sqrt().view(1, -1, 1, 1)


#: Where a layer may draw a random number, and the generator that it holds for this.
GENERATORS = {
    "random": (lambda _: random.random(), lambda: None),
    "numpy": (lambda _: np.random.uniform(), lambda: None),
    "its own of Python": (lambda generator: generator.gauss(1, 1), lambda: random.Random(3)),
    "its own of numpy": (lambda generator: generator.normal(1, 1), lambda: np.random.default_rng(3)),
    "its own of numpy, legacy": (lambda generator: generator.normal(1, 1), lambda: np.random.RandomState(3)),
    "its own of torch": (
        lambda generator: torch.rand(1, generator=generator).item(),
        lambda: torch.Generator().manual_seed(3),
    ),
}


class Noisy(nn.Module):
    """Scales by a random number, and drops the channels that a shuffled list names."""

    def __init__(self, name):
        super().__init__()
        self.name, self.generator = name, GENERATORS[name][1]()

    def forward(self, x):
        kept = [0, 1, 1, 1]
        if self.name == "random":
            random.shuffle(kept)
        return x * torch.tensor(kept).view(-1, 1, 1) * GENERATORS[self.name][0](self.generator)


def conv():
    return nn.Conv2d(4, 4, 3, padding=1)


def fake_quantize():
    return FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about hooks of spectral norm and quantization
        yield


STATEFUL = {
    "spectral norm": lambda: spectral_norm(conv()),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(conv()),
    "running scale": RunningScale,
    "running scale, assigned": partial(RunningScale, "assign"),
    "running scale, .data": partial(RunningScale, "data"),
    "fake quantization": fake_quantize,
    "warm-up": WarmUp,
    "membrane": Membrane,
    "created buffer": Created,
    "ActNorm": ActNorm,
    "batch renorm": lambda: Renorm(4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "in-place norm": lambda: nn.Sequential(conv(), InPlaceABN(4)),
    **{f"random numbers of {name}": partial(Noisy, name) for name in GENERATORS},
}


def branch(layer):
    return nn.Sequential(conv(), layer(), nn.ReLU(), conv())


def reversible(layer, grid_bits=None):
    blocks = (ReversibleBlock(branch(layer), branch(layer)) for _ in range(2))
    return ReversibleSequential(blocks, grid_bits=grid_bits)


def shifted(layer):
    return ReversibleSequential([ShiftBlock(branch(layer), 1), ShiftBlock(branch(layer), 1)])


class Checkpointed(nn.Module):
    """A convolution, and a branch in a checkpoint or stored."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.branch, self.store = nn.Conv2d(8, 4, 1), branch(layer), False

    def forward(self, x):
        x = self.first(x)
        return self.branch(x) if self.store else checkpoint(self.branch, x)


class Twice(nn.Module):
    """Runs a branch twice, first in a checkpoint."""

    def __init__(self, branch):
        super().__init__()
        self.branch, self.store = branch, False

    def forward(self, x):
        return (self.branch(x) if self.store else checkpoint(self.branch, x)) * 2 - self.branch(x)


def nested(layer):
    network = Checkpointed(layer)
    network.branch = Twice(network.branch)
    return network


class Shared(nn.Module):
    """A chain that calls one branch four times."""

    def __init__(self, layer):
        super().__init__()
        shared = branch(layer)
        self.block, self.store = ReversibleBlock(shared, shared), False

    def forward(self, x):
        return torch.cat(run_chain([self.block, self.block], *x.chunk(2, 1), store=self.store), 1)


NETWORKS = {
    "reversible": reversible,
    "grid": partial(reversible, grid_bits=14),
    "shifted": shifted,
    "checkpoint": Checkpointed,
    "shared": Shared,
    "nested": nested,
}
#: Layers with other mechanisms, which are also run with several pending passes and two backward passes.
PENDING = ["spectral norm", "spectral norm by hooks", "running scale", "warm-up", "ActNorm", "batch norm"]
PENDING += ["random numbers of numpy", "random numbers of its own of Python"]
RETAINED = ["spectral norm", "running scale", "running scale, assigned", "warm-up", "batch norm"]


def train(network, store, micro_batches=1, steps=3, retain=False):
    """Return gradients, parameters and buffers over steps of training."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if hasattr(module, "store"):
            module.store = store
    optimizer, seen = torch.optim.SGD(network.parameters(), lr=0.05), []
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [network(torch.randn(2, 8, 5, 5)).square().mean() for _ in range(micro_batches)]
        for loss in losses:
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        seen += [p.grad.clone() for p in network.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, *network.parameters(), *network.buffers()]


def assert_equal_training(network, **options):
    ours, truth = train(network, False, **options), train(network, True, **options)
    torch.testing.assert_close(ours, truth, rtol=EXACT, atol=1e-13)  # the gradient of a bias before a norm is 0


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("layer", "kind", "options"),
    [
        *((layer, kind, {}) for layer in STATEFUL for kind in NETWORKS if kind != "nested" or layer in RETAINED[:-1]),
        *((layer, kind, {"micro_batches": 2}) for layer in PENDING for kind in ("reversible", "shifted", "checkpoint")),
        *((layer, kind, {"retain": True}) for layer in RETAINED for kind in ("reversible", "checkpoint")),
    ],
    ids=str,
)
def test_training_equals_stored_activations_and_state_advances_once(layer, kind, options):
    assert_equal_training(NETWORKS[kind](STATEFUL[layer]), **options)


def test_shared_buffer_stays_shared_in_recomputation():
    class Reader(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("seen", scale)

        def forward(self, x):
            return x * self.seen.mean()

    def pair():
        writer = RunningScale()
        return nn.Sequential(writer, Reader(writer.scale))

    assert_equal_training(reversible(pair))


@pytest.mark.parametrize("name", ["revnet38_cifar", "wider_resnet16"])
def test_networks_with_spectral_norm_equal_stored_activations(name):
    torch.set_default_dtype(torch.float32)
    results = []
    for memory in ("auto" if "revnet" in name else "checkpoint", "plain"):
        network = build(name, norm="inplace", memory=memory).double()
        for module in network.modules():
            if type(module) is nn.Conv2d:
                spectral_norm(module)
        for _ in range(2):
            network.zero_grad()
            network(torch.ones(2, 3, 32, 32).double().cumsum(3).sin()).square().mean().backward()
        results.append([*(p.grad for p in network.parameters()), *network.buffers()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


class InPlaceAttribute(nn.Module):
    """Overwrites a tensor that is not registered."""

    def __init__(self):
        super().__init__()
        self.usage = torch.ones(4)

    def forward(self, x):
        self.usage.add_(1)
        return x / self.usage.view(1, -1, 1, 1)


class FrozenCodes(nn.Module):
    """Overwrites a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.codes.add_(1)
        return x / self.codes.view(1, -1, 1, 1)


@pytest.mark.parametrize("kind", ["reversible", "shifted", "checkpoint"])
@pytest.mark.parametrize(
    ("layer", "name"), [(InPlaceAttribute, "attribute 'usage'"), (FrozenCodes, "frozen parameter")]
)
def test_unrestorable_state_raises_with_module_name(layer, name, kind):
    network = NETWORKS[kind](layer)
    refused(RuntimeError, lambda: network(torch.randn(2, 8, 5, 5)), layer.__name__, name, "register_buffer")


class Tempered(nn.Module):
    """Reads a buffer that the caller may change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x):
        return x / self.temperature


@pytest.mark.parametrize("kind", ["reversible", "shifted", "checkpoint"])
@pytest.mark.parametrize("assign", [False, True])
def test_buffers_modified_before_backward_raise(kind, assign):
    network = NETWORKS[kind](Tempered)
    loss = network(torch.randn(2, 8, 5, 5)).square().mean()
    for module in network.modules():
        if isinstance(module, Tempered):
            module.temperature = module.temperature * 2 if assign else module.temperature.mul_(2)
    refused(RuntimeError, lambda: loss.backward(), "'temperature'", "Tempered")


def _replace(parameter):
    parameter.data = parameter.data * 2


def _overwrite(parameter):
    parameter.data_ptr()
    with torch.no_grad():
        parameter.mul_(2)


@pytest.mark.parametrize("kind", ["reversible", "shifted", "checkpoint"])
@pytest.mark.parametrize(("change", "frozen"), list(itertools.product([_replace, _overwrite], [False, True])))
def test_parameters_modified_before_backward_raise(kind, change, frozen):
    network = NETWORKS[kind](nn.Identity)
    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    convs[-1].requires_grad_(not frozen)
    loss = network(torch.randn(2, 8, 5, 5)).square().mean()
    change(convs[-1].weight)
    refused(RuntimeError, loss.backward, "modified ")


def test_backward_restores_module_state_after_forward():
    layer = RunningScale("assign")
    warm_up = WarmUp()
    module = nn.Sequential(layer, warm_up)
    y = checkpoint(module, torch.randn(2, 4, 5, 5, requires_grad=True))
    scale = layer.scale
    y.sum().backward()
    assert layer.scale is scale
    assert warm_up.calls == 1
