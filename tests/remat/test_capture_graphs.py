"""What captured graphs keep, save and recompute where a network draws, writes or reads more than its results show."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.remat.programs import COMPILES, Convolutions, are_equal, assert_same_step, gradients, held
from zoo.remat import inductor_options
from zoo.remat.budget import Budget
from zoo.remat.graph import capture, cut
from zoo.remat.lean import lean
from zoo.torch_internals import compiler

pytestmark = COMPILES

SIZE = 40  # of images, so that their maps are not small


class OfIntegers(Convolutions):
    """Scales images of uint8, channels last in memory or not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.movedim(-1, 1).float() / 255).relu())


class OfFloats(Convolutions):
    """Reads its input as it is, and a function of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        return self.first(x) + self.first(x.sigmoid() * 2)


@pytest.mark.parametrize("first_is_foreign", [True, False])
@pytest.mark.parametrize("network", [OfIntegers, OfFloats])
def test_a_refilled_array_has_the_gradients_of_plain_training(
    network: Callable[[], nn.Module], first_is_foreign: bool
) -> None:
    """Between forward and backward, as a data loader does; the graph is also captured for memory of torch."""
    dtype = torch.uint8 if network is OfIntegers else torch.float32
    values = (255 * torch.rand(2, SIZE, SIZE, 3)).to(dtype)

    def refilled(module: nn.Module) -> list[Tensor]:
        module(torch.from_numpy(values.clone().numpy()) if first_is_foreign else values.clone())
        array = values.clone().numpy()
        output = module(torch.from_numpy(array))
        array[...] = array[::-1].copy()
        output.sum().backward()
        return gradients(module)

    assert are_equal(refilled(lean(network(), capture=True)), refilled(network()))


def test_inductor_compiles_a_dropout_that_nothing_reads() -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(x.sin(), 0.5)
            return F.dropout(x.cos(), 0.5)

    with torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False):
        compiled = torch.compile(Network(), options=inductor_options())
        results = []
        for call in (compiled, Network()):
            torch.manual_seed(0)
            x = torch.ones(100, requires_grad=True)
            call(x).sum().backward()
            results.append((x.grad, torch.get_rng_state()))
    (gradient, state), (expected, expected_state) = results
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_saves_the_masks_that_it_draws_on_cuda(device: str) -> None:
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
    saved = cut.Cut(nodes, {nodes[2]}, set(), set(), {}, Budget()).saved
    assert saved == ({nodes[0]} if device == "cpu" else {nodes[2]})


class OfHalfPrecision(nn.Module):
    """A convolution, a batch norm and linear layers, of which one may be read twice."""

    def __init__(self, reads_twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 8)
        self.reads_twice = reads_twice

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(self.norm(self.conv(x)).relu().mean((2, 3))))
        return self.linear(y) if self.reads_twice else y


def half_precision_gradients(module: nn.Module, calls: int, caches: bool = True) -> list[Tensor]:
    """Return the gradients of the sum of the losses of several calls in one context of autocast."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
        loss = sum((index + 1) * module(torch.randn(4, 3, 20, 20)).square().mean() for index in range(calls))
    loss.backward()
    return gradients(module)


@pytest.mark.parametrize(
    ("reads_twice", "calls", "caches"),
    [(False, 2, True), (False, 3, True), (True, 1, True), (True, 1, False), (False, 2, False)],
)
def test_gradients_are_summed_in_the_precision_of_eager_autocast(reads_twice: bool, calls: int, caches: bool) -> None:
    plain, captured = OfHalfPrecision(reads_twice), lean(OfHalfPrecision(reads_twice), capture=True)
    expected = half_precision_gradients(plain, calls, caches)
    assert are_equal(half_precision_gradients(captured, calls, caches), expected)


def test_a_context_of_autocast_does_not_keep_what_it_has_cast() -> None:
    captured = lean(OfHalfPrecision(), capture=True)
    for _ in range(2):  # contexts
        half_precision_gradients(captured, calls=2)
    weight = weakref.ref(captured.conv.weight)
    torch._dynamo.reset()
    del captured
    gc.collect()
    assert weight() is None


def test_a_parameter_that_is_cast_in_two_contexts_is_not_captured() -> None:
    def run(linear: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x).float()
        with torch.autocast("cpu", torch.bfloat16):
            return linear(y).float() + linear(x)

    x, layers = torch.randn(300, 64), (nn.Linear(64, 64), nn.Linear(64, 64))
    layers[1].load_state_dict(layers[0].state_dict())
    run(layers[0], x).square().mean().backward()
    with pytest.warns(capture.NotCaptured, match="may be cast in several contexts of autocast"):
        torch.compile(run, backend=capture.backend)(layers[1], x).square().mean().backward()
    assert are_equal(*map(gradients, layers))


def test_backward_inside_of_the_context_of_autocast_is_not_cast() -> None:
    class Network(OfHalfPrecision):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.linear(y)

    def step(module: nn.Module, is_inside: bool) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.randn(4, 3, 20, 20)).square().mean()
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()
        return gradients(module)

    inside, outside = (step(Network(), is_inside) for is_inside in (True, False))
    assert not are_equal(inside, outside)
    for is_inside in (True, False):
        assert are_equal(step(lean(Network(), capture=True), is_inside), outside)


def test_parameters_that_the_loss_does_not_depend_on_get_zeros() -> None:
    class Network(Convolutions):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x.repeat(1, 3, 1, 1)[:, :8])

    captured = lean(Network(), capture=True)
    captured(torch.rand(2, 3, SIZE, SIZE))[0].sum().backward()
    assert captured.second.weight.grad.count_nonzero() == 0


def test_a_layer_read_twice_by_each_of_two_calls_under_autocast_differs_by_rounding() -> None:
    plain, captured = OfHalfPrecision(reads_twice=True), lean(OfHalfPrecision(reads_twice=True), capture=True)
    expected = half_precision_gradients(plain, calls=2)
    found = half_precision_gradients(captured, calls=2)
    assert not are_equal(found, expected)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0.01 * float(truth.abs().max()))


def test_graphs_call_operators_directly_and_read_no_transpose_of_a_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.GraphModule] = []

    def boxed(graph: fx.GraphModule) -> Any:
        graphs.append(graph)
        return compiler.boxed(graph)

    monkeypatch.setattr(capture, "boxed", boxed)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    captured = lean(module, capture=True)
    captured(torch.rand(4, 8)).sum().backward()
    with monkeypatch.context() as patch:
        patch.delattr(torch._ops.OpOverload, "__call__")
        captured(torch.rand(4, 8)).sum().backward()
    assert len(graphs) == 2
    transposes = [node for graph in graphs for node in graph.graph.nodes if node.target is torch.ops.aten.t.default]
    assert transposes
    assert not any(node.args[0].target is node.target for node in transposes)


class OfTransposes(nn.Linear):
    """Returns transposes of transposes: of its input, of a parameter, of a result and of one that is returned too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, z = super().forward(x).relu(), super().forward(x).sigmoid()
        return x.t().t(), self.weight.t().t(), y.t().t(), z, z.t().t()


def test_transposes_of_transposes_are_returned_as_views() -> None:
    def run(module: nn.Module) -> tuple[list[Tensor], list[bool]]:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        outputs = module(x)
        sum(each.square().sum() for each in outputs).backward()
        known = [x, *module.parameters(), *outputs]
        shared = [a.data_ptr() == b.data_ptr() for a in outputs for b in known]
        return [*outputs, x.grad, *gradients(module)], shared

    plain = OfTransposes(8, 8)
    found, shared = run(lean(copy.deepcopy(plain), capture=True))
    expected, expected_shared = run(plain)
    for ours, truth in zip(found, expected, strict=True):  # torch adds up the gradients of views in another order
        torch.testing.assert_close(ours, truth)
    assert shared == expected_shared


class OfLowRank(nn.Module):
    """Scales the output of a LoRA adapter by a parameter, which needs this output for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)) * self.scale


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_a_product_of_low_rank_is_not_held(is_captured: bool) -> None:
    x = torch.randn(512, 128, requires_grad=True)
    networks = OfLowRank(), lean(OfLowRank(), capture=is_captured)
    plain, ours = (held(each, x) for each in networks)
    assert ours < plain - 0.9 * x.nbytes
    assert_same_step(*networks, x)
