"""Lean training equals plain training for shared, overwritten and foreign memory, and for interrupted passes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Shard

from tests.refusals import refused
from tests.remat.programs import are_equal, assert_same_step, gradients, held, images
from zoo.memory.report import memory_report
from zoo.remat._lean import lean
from zoo.remat._recipes import RecipeError

SIZE_PX = 96  # 8 channels of 96 x 96 px take more than 64 KiB, up to which tensors are kept


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Network(nn.Module):
    """A convolution and a norm, a module of the test, and another convolution."""

    def __init__(self, middle: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.norm(self.conv(x))))


def train(model: nn.Module, *inputs: Any) -> list[Tensor]:
    """Return the gradients of a step."""
    torch.manual_seed(1)
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return gradients(model)


def assert_lean_is_plain(model: nn.Module, *inputs: Any) -> None:
    plain = copy.deepcopy(model)
    assert_same_step(lean(model), plain, *inputs)
    assert are_equal(plain.buffers(), model.buffers())


def test_running_statistics_that_backward_reads_may_change_before_backward() -> None:
    models = Network(F.relu), lean(Network(F.relu))
    for model in models:
        model.eval()
        loss = model(images(SIZE_PX)).square().mean()
        model.train()
        model(5 + images(SIZE_PX))
        loss.backward()
    assert are_equal(*(gradients(model.out) for model in models))


class Accumulating(torch.autograd.Function):
    """A matrix product whose backward adds the gradient of the weight to its own buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_weight = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        if not hasattr(weight, "main_grad"):
            return dy @ weight, of_weight
        assert isinstance(weight, nn.Parameter)
        weight.main_grad.add_(of_weight)
        weight.was_added = getattr(weight, "was_added", 0) + 1
        return dy @ weight, None if weight.is_dummy else torch.zeros_like(weight)


class Weight(nn.Parameter):
    """A subclass of parameters."""


@pytest.mark.parametrize("kind", [nn.Parameter, Weight])
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("case", ["trained", "frozen", "used twice", "dummy gradient", "double backward", "own norm"])
def test_custom_backward_reads_and_sets_attributes_of_parameter(
    kind: type[nn.Parameter], budget: float | None, case: str
) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = kind(torch.randn(64, 64), requires_grad=case != "frozen")
            self.weight.main_grad, self.weight.is_dummy = torch.zeros(64, 64), case == "dummy gradient"
            self.other, self.norm = kind(torch.randn(64, 64)), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            x = Accumulating.apply(F.gelu(self.norm(x)), self.weight).sigmoid()
            x = x * self.weight if case == "own norm" else x
            return Accumulating.apply(x, self.weight if case == "used twice" else self.other)

    results = []
    for model in (Fused(), lean(Fused(), budget)):
        x = torch.randn(8, 64, 64, generator=generator(1), requires_grad=True)
        for _ in range(2):
            loss = model(x).square().mean()
            if case == "double backward":
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            model.weight.main_grad.zero_()  # planning runs backward, too
            model.weight.was_added = 0
            loss.backward()
        results.append([model.weight.main_grad, torch.tensor(model.weight.was_added), *gradients(model)])
    assert results[0][1] > 0
    assert are_equal(*results)


def test_distributed_tensors_train_unchanged() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])

        def middle(h: Tensor) -> Tensor:
            rows = DTensor.from_local(h.flatten(1), mesh, [Shard(0)])
            rows = (rows.relu() * 2).sigmoid() * rows
            return rows.to_local().view_as(h).tanh()

        assert_lean_is_plain(Network(middle), images(SIZE_PX))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_mode_and_no_hook_stays_after_interruption(error: type[BaseException]) -> None:
    is_interrupted = True

    def middle(h: Tensor) -> Tensor:
        if is_interrupted:
            raise error
        return h.relu()

    model = lean(Network(middle))
    with pytest.raises(error):
        model(images(SIZE_PX))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch.func.grad(lambda x: x.sin())(torch.tensor(1.0))
    is_interrupted = False
    expected = train(Network(F.relu), images(SIZE_PX))
    assert are_equal(expected, train(model, images(SIZE_PX)))


def test_non_module_raises_type_error() -> None:
    refused(TypeError, lambda: lean("resnet50"), "torch.nn.Module", "str 'resnet50'", "zoo.get")


def test_intermediate_parts_of_concatenation_in_recipe_are_freed() -> None:
    references = []

    def rotary(h: Tensor) -> Tensor:
        a, b = h.chunk(2, 1)
        turned = torch.cat([-b, a], 1)
        parts = -b
        references.append(weakref.ref(parts.untyped_storage()))
        whole = torch.cat([parts, a], 1)
        del parts
        return whole * 2 + turned

    out = lean(Network(rotary))(images(SIZE_PX))
    assert references[0]() is None
    out.sum().backward()


def test_write_missing_from_schema_gives_correct_gradients() -> None:
    @torch.library.custom_op("zoo_tests::hidden_write", mutates_args=())
    def hidden_write(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum((2, 3), keepdim=True)

    def middle(h: Tensor) -> Tensor:
        y = (h * 0.5).relu()
        z = y.sigmoid() + hidden_write(y.detach())
        return z * y.exp() + y * y

    refused(RuntimeError, lambda: train(Network(middle), images(SIZE_PX)), "modified")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        expected = train(Network(middle), images(SIZE_PX))
    assert are_equal(expected, train(lean(Network(middle)), images(SIZE_PX)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning")  # torch 2.11's own compiler
def test_parameters_in_foreign_memory_are_inputs_of_recipes(tmp_path: Path) -> None:
    """Plain training reads them in backward, too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
            self.scale = nn.Parameter(torch.randn(8, SIZE_PX, SIZE_PX))
            self.register_buffer("shift", torch.randn(8, SIZE_PX, SIZE_PX))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.conv(x) * self.scale + self.shift)

    def mapped() -> nn.Module:
        torch.save(Scaled().state_dict(), tmp_path / "weights.pt")
        model = Scaled()
        model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
        assert not any(each.untyped_storage().resizable() for each in (model.scale, model.shift))
        return model

    x = images(SIZE_PX)
    of_mapped, of_own = (held(lean(each), x) for each in (mapped(), Scaled()))
    assert of_mapped == of_own < held(Scaled(), x)
    assert_lean_is_plain(mapped(), x)


@pytest.mark.parametrize("budget", [None, 0.5, "1GB"])
def test_report_runs_layer_that_casts_in_inference_mode(budget: Any) -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.teacher = nn.Linear(64, 64), nn.LSTM(64, 64, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            with torch.inference_mode():
                target = self.teacher(x.detach())[0]
            return (x - target.clone()).square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        assert memory_report(Distilled(), torch.randn(4, 48, 64), budget=budget).plain > 0


@pytest.mark.parametrize("budget", [0.3, 0.6, "1GB"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_strided_nested_tensors_train_within_budget(budget: Any) -> None:
    class Nested(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([x[0, :100], x[1]])
            return torch.nested.to_padded_tensor(super().forward(nested), 0.0)

    x = torch.randn(2, 150, 64)
    plain = Nested(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = lean(copy.deepcopy(plain), budget)
    for _ in range(3):
        assert_same_step(model, plain, x)
    report = memory_report(plain, x)
    assert {module.name: module.plain for module in report.modules if module.plain} == dict.fromkeys(
        ("", "0", "1"), 4 * 250 * 64
    )


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_outputs_train_within_limit(layout: torch.layout) -> None:
    rows = [torch.randn(count, 64, generator=torch.Generator().manual_seed(count)) for count in (100, 150)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    gradients = []
    for budget in (None, "1GB"):
        torch.manual_seed(0)
        model = lean(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), budget)
        for _ in range(3):
            torch.stack([each.square().sum() for each in model(x).unbind()]).sum().backward()
        gradients.append([each.grad for each in model.parameters()])
    assert are_equal(*gradients)


class Tagged(Tensor):
    """A subclass of tensors, whose operations return new objects for the same elements."""


class Made(Tensor):
    """A subclass with a constructor that takes a tensor."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Made:
        return Tensor._make_subclass(cls, data)


class WideActivations(nn.Module):
    """A product, an alias of it of another class, and activations of more bytes than the product."""

    def __init__(self, alias: Callable[[Tensor], Tensor], enlarge: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.alias, self.enlarge = alias, enlarge
        self.first = nn.Linear(64, 64, bias=False)
        example = enlarge(torch.zeros(1, 1, 64))
        self.heads = nn.ModuleList(nn.Linear(example.shape[-1], 8, dtype=example.dtype) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.first(x)  # alive as long as its alias is used
        aliased = self.alias(product)
        wide = self.enlarge(aliased).as_subclass(Tensor)
        activations = (torch.relu, torch.sin, torch.exp)
        return aliased, sum(head(each(wide)) for head, each in zip(self.heads, activations, strict=True))


@pytest.mark.parametrize("alias", [lambda x: x.as_subclass(Tagged), Made, Weight], ids=["Tagged", "Made", "Weight"])
@pytest.mark.parametrize("enlarge", [lambda x: x.repeat(1, 1, 2), lambda x: x.double()], ids=["repeat", "double"])
def test_write_through_alias_of_reshaped_product_raises(
    alias: Callable[[Tensor], Tensor], enlarge: Callable[[Tensor], Tensor]
) -> None:
    model = lean(WideActivations(alias, enlarge))
    for _ in range(3):  # the first pass saves the enlarged tensor, later ones the product
        aliased, out = model(torch.randn(64, 64, 64))
        with torch.no_grad():
            aliased.mul_(2)
        with suppress(RecipeError):
            (of_head,) = torch.autograd.grad(out.sum(), model.heads[0].weight)
            expected = torch.relu(enlarge(aliased.detach().as_subclass(Tensor) / 2)).sum((0, 1)).expand(8, -1)
            torch.testing.assert_close(of_head, expected)
