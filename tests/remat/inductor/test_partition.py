"""Inductor's graphs with the lean rule save little, draw random numbers once, and equal plain training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.remat.programs import COMPILES, FrozenBody, gradients, held, images
from zoo.remat import inductor_options
from zoo.remat._budget import Budget
from zoo.remat._lean import lean
from zoo.remat.inductor._cut import Cut

pytestmark = COMPILES


def compiled(module: nn.Module, budget: float | int | str | None = None) -> Any:
    return torch.compile(module, options=inductor_options(budget))


def train(module: nn.Module, call: Any, steps: int = 3) -> list[Tensor]:
    """Return outputs, gradients, parameters and buffers of training steps with momentum, and the random state."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    results: list[Tensor] = []
    for index in range(steps):
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(index)).requires_grad_()
        optimizer.zero_grad()
        output = call(x)
        output.square().mean().backward()
        assert x.grad is not None
        results += [output.detach().clone(), x.grad, *(each.clone() for each in gradients(module))]
        optimizer.step()
    return [*results, *module.parameters(), *module.buffers(), torch.random.get_rng_state()]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 128, 3, padding=1), nn.BatchNorm2d(128), nn.SiLU(), nn.Conv2d(128, 128, 3, padding=1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(128), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(128, 8, 1))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Assert that results are equal up to the differences of Inductor's own kernels."""
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-4)


def test_compiled_network_holds_bytes_of_eager_lean_training() -> None:
    plain, module, eager = convolutions(), convolutions(), lean(convolutions())
    function = compiled(module)
    assert_close(train(module, function), train(plain, torch.compile(plain)))
    x = torch.randn(2, 3, 32, 32)
    assert held(function, x) < 1.1 * held(eager, x)  # no copies of weights either


def test_budget_holds_less_with_the_same_results() -> None:
    modules = [nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(512, 256)
    functions = compiled(modules[0]), compiled(modules[1], 0.3)
    bytes_held = [held(function, x) for function in functions]
    assert bytes_held[1] < 0.7 * bytes_held[0]
    results = []
    for module, function in zip(modules, functions, strict=True):
        function(x).square().mean().backward()
        results.append(gradients(module))
    assert_close(*results)


@pytest.mark.parametrize("has_frozen_norms", [True, False])
def test_frozen_layers_hold_little(has_frozen_norms: bool) -> None:
    plain, module = FrozenBody(has_frozen_norms), FrozenBody(has_frozen_norms)
    x = images(32)
    function = compiled(module)
    for call in (plain, function):
        call(x).square().sum().backward()
    assert_close(gradients(module), gradients(plain))
    if has_frozen_norms:
        assert held(function, x) < 0.5 * held(plain, x)


class WithSideEffects(nn.Module):
    """Counts its calls in a buffer, keeps a moving average, and draws masks that the result reads twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.conv(x).sigmoid()
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        dropped = F.dropout(x, 0.3)
        return self.out(dropped * dropped.tanh() + self.average.view(1, -1, 1, 1))


def test_masks_and_side_effects_occur_once() -> None:
    plain = WithSideEffects()
    module = copy.deepcopy(plain)
    with torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False):
        found = train(module, compiled(module))
    assert_close(found, train(plain, plain))
    assert module.calls == 3


def test_unused_dropout_advances_random_state() -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(x.sin(), 0.5)
            return F.dropout(x.cos(), 0.5)

    with torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False):
        results = []
        for call in (compiled(Network()), Network()):
            torch.manual_seed(0)
            x = torch.ones(100, requires_grad=True)
            call(x).sum().backward()
            results.append((x.grad, torch.get_rng_state()))
    (gradient, state), (expected, expected_state) = results
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_dropout_masks_are_saved(device: str) -> None:
    import torch._inductor.inductor_prims  # registers the operations

    with FakeTensorMode():
        seed, numbers = torch.zeros((), dtype=torch.int64, device=device), torch.rand(64, 1024, device=device)
    graph = fx.Graph()
    nodes = [
        graph.placeholder("seed"),
        graph.call_function(torch.ops.prims.inductor_random.default, ([64, 1024], next(iter(graph.nodes)), "rand")),
    ]
    nodes.append(graph.call_function(torch.ops.aten.gt.Scalar, (nodes[1], 0.5)))
    for node, value in zip(nodes, (seed, numbers, numbers.to(torch.bool)), strict=True):
        node.meta["val"] = value
    saved = Cut(nodes, [nodes[2]], set(), set(), Budget()).saved
    assert saved == (set() if device == "cpu" else {nodes[2]})


def layers(num_layers: int) -> tuple[list[Any], list[Any]]:
    """Return the nodes of a chain of products and activations, and the nodes that its backward reads, in order."""
    graph, values = fx.Graph(), torch.zeros(1024, 64)
    weight = graph.placeholder("weight")
    nodes = [weight, graph.placeholder("x")]
    for index in range(2 * num_layers):
        args = (nodes[-1],) if index % 2 else (nodes[-1], weight)
        operation = torch.ops.aten.gelu.default if index % 2 else torch.ops.aten.mm.default
        nodes.append(graph.call_function(operation, args))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in nodes:
            node.meta["val"] = torch.zeros(64, 64) if node is weight else torch.zeros_like(values)
    return nodes, nodes[:0:-1]


def test_cut_without_budget_saves_products() -> None:
    nodes, reads = layers(8)
    saved = Cut(nodes, reads, set(), set(), Budget()).saved
    assert saved == {node for node in nodes if node.target is torch.ops.aten.mm.default}


@pytest.mark.parametrize("share", [0.6, 0.4, 0.25])
def test_cut_within_budget_recomputes_what_planner_says(share: float) -> None:
    nodes, reads = layers(16)
    cut = Cut(nodes, reads, set(), set(), Budget(share))
    nbytes = nodes[1].meta["val"].nbytes
    stored: set[Any] = set()
    most = 0
    for time, read in enumerate(reads[:-1]):
        new, pending = set(), [read]
        for node in pending:
            if node.op == "call_function" and node not in cut.saved | stored | new:
                new.add(node)
                pending += node.args[:1]
        most = max(most, len(cut.saved & set(reads[time:])) + len(stored))
        stored = {each for each in stored | new if not cut.frees(each, time, is_new=each in new)}
    assert not stored
    assert len(cut.saved) * nbytes <= share * 2 * 16 * nbytes
    assert most * nbytes <= share * 2 * 16 * nbytes


def test_shapes_may_be_dynamic() -> None:
    plain = convolutions()
    module = copy.deepcopy(plain).eval()
    function = torch.compile(module, options=inductor_options(), dynamic=True)
    for size in (16, 24):
        x = torch.randn(2, 3, size, size)
        for network, call in ((module, function), (plain.eval(), plain)):
            network.zero_grad()
            call(x).square().mean().backward()
        assert_close(gradients(module), gradients(plain))
