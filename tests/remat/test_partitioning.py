"""Compiled networks at any activation memory budget get the gradients of the random numbers that forward drew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from tests.formula import relative_error
from zoo.engine import wrapping
from zoo.remat import partitioning

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it compiles
]

BUDGETS = (0.99, 0.5, 0.0)


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor rewrites and partitions graphs, and torch runs them: kernels would take a compiler a minute."""
    import torch._inductor.compile_fx  # here, as it warns in torch 2.11

    def run(graph: fx.GraphModule, _: Any, **options: Any) -> Callable[[list[Any]], Any]:
        def call(values: list[Any]) -> Any:
            return graph(*values)

        call._boxed_call = True  # type: ignore[attr-defined]  # it takes a list of values
        return call

    compile_fx = functools.partial(torch._inductor.compile_fx.compile_fx, inner_compile=run)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Multiply(nn.Module):
    """Multiplies its input by a mask, which a function of the input draws."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask(x)


class Attention(nn.Module):
    """Self-attention of two heads with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        return x + heads.transpose(1, 2).flatten(2)


class MultiheadAttention(nn.MultiheadAttention):
    """torch's module, with one input."""

    def __init__(self) -> None:
        super().__init__(16, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x, x, x, need_weights=False)[0]


class Residual(nn.Module):
    """A branch that is dropped for some images."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.drop = StochasticDepth(0.4, "row")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.branch(x))


class Region(nn.Sequential):
    """Layers that torch compiles once, into a graph of their own, wherever they repeat."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _layers(drop: Callable[[], nn.Module]) -> list[nn.Module]:
    return [nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), drop()]


def _convolutions() -> nn.Module:
    def block() -> list[nn.Module]:
        return [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)]

    return nn.Sequential(*[layer for _ in range(3) for layer in block()])


def _repeated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[make(), make()])


def _in_chain(drop: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return _repeated(lambda: nn.Sequential(*_layers(drop)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": _convolutions,
    "stochastic depth": _repeated(Residual),
    "attention": _repeated(Attention),
    "multi-head attention": _repeated(MultiheadAttention),
    "bernoulli": _in_chain(lambda: Multiply(lambda x: torch.bernoulli(torch.full_like(x, 0.7)))),
    "rand_like": _in_chain(lambda: Multiply(lambda x: torch.rand_like(x) > 0.3)),
    "nested region": _repeated(lambda: Region(*_layers(lambda: nn.Dropout(0.3)))),
    "checkpoint": lambda: nn.Sequential(*_layers(nn.Dropout), Checkpointed(*_layers(nn.Dropout)), *_layers(nn.Dropout)),
}
QUICK = ("stochastic depth", "bernoulli", "nested region", "checkpoint")


def _gradients(network: nn.Module, parameters: list[nn.Parameter], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    gradients = torch.autograd.grad(network(x).square().sum(), parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in QUICK)) for name in NETWORKS],
)
def test_gradients_are_those_of_eager_at_every_budget(name: str) -> None:
    if name == "nested region" and torch.__version__.startswith("2.11."):
        pytest.skip("compiling it is an AttributeError with torch 2.11, as a saved value is a tuple")
    torch.manual_seed(0)
    network = NETWORKS[name]()
    x = torch.randn(4, 4, 8, 8) if name == "dropout" else torch.randn(16, 8, 16)
    parameters = list(network.parameters())
    expected = _gradients(network, parameters, x)
    for budget in BUDGETS:
        torch._dynamo.reset()
        with torch._inductor.config.patch(fallback_random=True):  # the numbers that eager draws
            ours = _gradients(wrapping.compile_network(network, budget), parameters, x)
        assert relative_error(ours, expected) < 1e-5, budget


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """The forward and backward graphs that torch makes from now on."""
    made = []
    partition = partitioning.partition_by_min_cut

    def remember(*args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        made.append(partition(*args, **options))
        return made[-1]

    monkeypatch.setattr(partitioning, "partition_by_min_cut", remember)
    return made


def _targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize("budget", [0.3, 0.0])
def test_of_inductors_random_operations_the_seeds_are_saved_and_the_masks_recomputed(
    budget: float, graphs: list[tuple[fx.GraphModule, fx.GraphModule]]
) -> None:
    network = _convolutions()
    x = torch.randn(4, 4, 8, 8)
    wrapping.compile_network(network, budget)(x).sum().backward()
    ((forward, backward),) = graphs
    prims = torch.ops.prims
    assert _targets(forward).count(prims.inductor_seeds.default) == 1
    assert prims.inductor_seeds.default not in _targets(backward)
    assert _targets(backward).count(prims.inductor_random.default) > 1


@pytest.mark.usefixtures("_no_kernels")
def test_attention_without_dropout_is_recomputed(graphs: list[tuple[fx.GraphModule, fx.GraphModule]]) -> None:
    class Plain(Attention):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
            return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    wrapping.compile_network(_repeated(Plain)(), 0.01)(torch.randn(16, 8, 16)).sum().backward()
    ((_, backward),) = graphs
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _targets(backward).count(attention) > 0


@pytest.mark.usefixtures("_no_kernels")
def test_a_random_operation_in_both_graphs_is_an_error_that_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partitioning.partition_by_min_cut

    def without_marks(joint: fx.GraphModule, *args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
            node.meta["memory_budget"] = 0.0  # how torch's contexts for the budget of a region tell it
        return partition(joint, *args, **options)

    monkeypatch.setattr(partitioning, "partition_by_min_cut", without_marks)
    compiled = wrapping.compile_network(_convolutions(), 0.3)
    with pytest.raises(Exception, match=r"(?s)ConfigError.*redraw.*\.3.* \(Dropout\).*in backward.*budget to 1"):
        compiled(torch.randn(4, 4, 8, 8))


@pytest.mark.exhaustive  # Inductor's kernels
def test_kernels_of_inductor_draw_the_masks_of_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are not those of eager; at a budget of 1 torch saves the masks."""
    torch.manual_seed(0)
    network = _convolutions()
    x, parameters = torch.randn(4, 4, 8, 8), list(network.parameters())
    gradients = []
    for budget in (1.0, 0.3, 0.0):
        torch._dynamo.reset()
        gradients.append(_gradients(wrapping.compile_network(network, budget), parameters, x))
    assert relative_error(gradients[1], gradients[0]) < 1e-5
    assert relative_error(gradients[2], gradients[0]) < 1e-5
