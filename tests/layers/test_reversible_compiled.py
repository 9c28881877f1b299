"""Compiled networks with reversible blocks break the graph once per chain and equal eager networks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.formula import relative_error
from tests.layers.test_reversible import images, network
from tests.step import step
from zoo.layers import ABN, InPlaceABN

# raised by torch while it traces and compiles
pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Graphs:
    """A backend of torch.compile that counts the graphs it is given and runs them unchanged."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph, _):
        self.number += 1
        return graph


class Chains(nn.Module):
    """One or two chains, with layers before and after each."""

    def __init__(self, norm, number):
        super().__init__()
        self.stem, self.first, self.middle = network(norm)
        self.second, self.head = network(norm)[1:] if number == 2 else (None, None)

    def forward(self, x):
        x = self.middle(self.first(self.stem(x)))
        return x if self.second is None else self.head(self.second(x))


def test_graph_breaks_once_per_chain_and_gradients_are_right():
    number = 2
    net = Chains(InPlaceABN, number).double()
    twin = copy.deepcopy(net)
    graphs = Graphs()
    compiled = _Both(torch.compile(twin, backend=graphs), twin)
    for _ in range(2):
        assert max(map(relative_error, step(compiled, images()), step(net, images()))) < 1e-10
    assert graphs.number == number + 1
    assert torch._dynamo.explain(net)(images()).graph_break_count == number


class _Both(nn.Module):
    """Runs the compiled module and has the parameters of the module itself."""

    def __init__(self, compiled, module):
        super().__init__()
        self.module = module
        self.run = lambda x: compiled(x)

    def forward(self, x):
        return self.run(x)


def test_inductor_backend_has_gradients_too():
    net = network(InPlaceABN)
    twin = copy.deepcopy(net)
    x = images(dtype=torch.float32)
    truth = step(net, x)
    assert max(map(relative_error, step(_Both(torch.compile(twin), twin), x), truth)) < 1e-3


def test_autocast_is_the_same_compiled_in_training_and_evaluation():
    net, x = network(ABN), images(dtype=torch.float32)
    twin = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        truth = step(net, x)
        ours = step(_Both(torch.compile(twin, backend=Graphs()), twin), x)
        with torch.no_grad():
            half = net[1](x.new_ones(2, 8, 4, 4, dtype=torch.bfloat16))
            blocks = torch.compile(twin[1], backend=Graphs(), fullgraph=True)
            compiled = blocks(x.new_ones(2, 8, 4, 4, dtype=torch.bfloat16))
    assert max(map(relative_error, ours, truth)) < 1e-2
    assert (half.dtype, compiled.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("store", [True, False])
def test_no_graph_break_occurs_without_gradients_or_with_stored_activations(store):
    net = network(ABN).double()
    net[1].store = store
    x = images()
    with torch.set_grad_enabled(store):
        expected = copy.deepcopy(net)(x)
        assert relative_error(torch.compile(net, backend=Graphs(), fullgraph=True)(x), expected) < 1e-12


def test_compiled_branches_of_eager_chain_are_right():
    net = network(InPlaceABN).double()
    twin = copy.deepcopy(net)
    for block in twin[1]:
        block.f.compile(backend="aot_eager")
        block.g.compile(backend="aot_eager")
    for _ in range(2):
        assert max(map(relative_error, step(twin, images()), step(net, images()))) < 1e-10
