"""Compiled networks equal eager networks: outputs, gradients, running statistics, with at least six norm layers.

Small networks hide the faults that in-place operations cause in compiled graphs; six layers show them.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync, checkpoint, init_weights
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.resnet import ResidualBlock

LAYERS = 6
# raised by torch while it traces and compiles
pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()  # all Sequentials share one code object, whose recompilations are limited


def chain(norm, activation="leaky_relu", layers=LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    modules = [nn.Conv2d(3, 8, 3, padding=1, bias=False)]
    for _ in range(layers):
        modules += [norm(8, activation=activation), nn.Conv2d(8, 8, 3, padding=1, bias=False)]
    return nn.Sequential(*modules)


def blocks() -> nn.Sequential:
    """Residual blocks of both kinds, with in-place and out-of-place norms: 8 norms."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        IdentityResidualBlock(8, (4, 4, 16), InPlaceABN, stride=2, groups=2),
        nn.Conv2d(16, 8, 1, bias=False),
        InPlaceABN(8),
        ResidualBlock(8, (4, 4, 16), InPlaceABN, stride=2),
    )
    init_weights(network)
    return network


def step(model, network, x):
    """Return output, input and parameter gradients, and buffers after one training step of ``model``."""
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    out.square().mean().backward()
    gradients = [p.grad.clone() for p in network.parameters()]
    return [out.detach(), leaf.grad, *gradients, *[b.clone() for b in network.buffers()]]


def compare(make, compile_model, tolerance=2e-4):
    """Run the same step eagerly and compiled, twice, and compare all results."""
    eager, network = make(), make()
    compiled = compile_model(network)
    for seed in range(2):
        x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
        for model in (eager, network):
            model.zero_grad()
        for ours, truth in zip(step(compiled, network, x), step(eager, eager, x), strict=True):
            assert relative_error(ours, truth) < tolerance


def test_inductor_with_fullgraph_equals_eager():
    compare(blocks, lambda network: torch.compile(network, fullgraph=True))


@pytest.mark.parametrize(
    ("norm", "activation"),
    [
        (ABN, "leaky_relu"),
        pytest.param(InPlaceABN, "elu", marks=pytest.mark.smoke),
        (InPlaceABNSync, "identity"),
    ],
)
def test_functionalized_graphs_equal_eager(norm, activation):
    compare(
        lambda: chain(norm, activation), lambda network: torch.compile(network, fullgraph=True, backend="aot_eager")
    )


def test_cumulative_average_compiles_without_graph_break():
    compare(
        lambda: chain(lambda c, activation: InPlaceABN(c, momentum=None, activation=activation)),
        lambda network: torch.compile(network, fullgraph=True, backend="aot_eager"),
    )


DYNAMIC_SHAPES = [(4, 3, 12, 10), (7, 3, 16, 20), (5, 3, 18, 30)]


def compare_dynamic(norm, activation: str, momentum: float | None, backend: str) -> int:
    """Compare steps with changing numbers and sizes of images with eager steps, in training and evaluation.

    Returns the number of graphs in training.
    """
    layers = 2 if backend == "eager" else LAYERS  # six layers only matter for functionalized graphs
    eager = chain(lambda c, activation: norm(c, momentum=momentum, activation=activation), activation, layers)
    network = copy.deepcopy(eager)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(network, dynamic=True, fullgraph=True, backend=counter)
    for training in (True, False):
        for shape in DYNAMIC_SHAPES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            for model in (eager.train(training), network.train(training)):
                model.zero_grad()
            for ours, truth in zip(step(compiled, network, x), step(eager, eager, x), strict=True):
                assert relative_error(ours, truth) < 2e-4
        if training:
            graphs = counter.frame_count
    return graphs


@pytest.mark.parametrize(
    ("norm", "activation", "momentum"),
    [
        (InPlaceABN, "elu", 0.1),
        (ABN, "leaky_relu", None),
        (InPlaceABN, "identity", None),
    ],
)
def test_one_graph_serves_all_dynamic_shapes(norm, activation, momentum):
    """The compiler then replaces numbers of a layer by symbols, which only support comparisons."""
    assert compare_dynamic(norm, activation, momentum, "eager") == 1


@pytest.mark.parametrize(
    ("norm", "activation", "backend"),
    [
        (InPlaceABNSync, "elu", "aot_eager"),
        pytest.param(InPlaceABN, "elu", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_graphs_of_dynamic_shape_equal_eager(norm, activation, backend):
    compare_dynamic(norm, activation, 0.1, backend)


def _ddp_and_compile(order: str, norm: type, backend: str) -> float:
    def compiled(model):
        return torch.compile(model, backend=backend)

    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(dist.get_rank()))
    eager, network = chain(norm), chain(norm)
    ddp = nn.parallel.DistributedDataParallel
    model = compiled(ddp(network)) if order == "compile(DDP(m))" else ddp(compiled(network))
    pairs = zip(step(model, network, x), step(ddp(eager), eager, x), strict=True)
    return max(relative_error(ours, truth) for ours, truth in list(pairs))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("order", "norm", "backend"),
    [
        pytest.param("compile(DDP(m))", InPlaceABN, "inductor", marks=pytest.mark.exhaustive),
        ("DDP(compile(m))", InPlaceABNSync, "aot_eager"),
    ],
)
def test_compiled_ddp_equals_eager_ddp(order, norm, backend):
    assert max(run_distributed(_ddp_and_compile, 2, order, norm, backend)) < 2e-4


class Recomputed(nn.Module):
    """A chain whose middle is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = chain(InPlaceABN)  # seeds the generator
        self.first = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x):
        return checkpoint(self.middle, self.first(x))


def test_recomputation_compiles_and_counts_batch_once():
    compare(Recomputed, lambda network: torch.compile(network, backend="aot_eager"))
