"""Lean training equals plain training for shared, overwritten and foreign memory, and for interrupted passes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

from tests.refusals import refused
from tests.remat.programs import are_equal, assert_same_step, gradients, held, images
from zoo.memory.report import memory_report
from zoo.remat.lean import lean
from zoo.remat.recipes import RecipeError
from zoo.torch_internals.dispatch import TorchDispatchMode

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


def test_large_tensor_may_be_overwritten_through_data_within_forward() -> None:
    def middle(h: Tensor) -> Tensor:
        y = h.sin()
        z = y * 2
        y.data.zero_()
        return z.sigmoid() + y.cumsum(1).exp().relu()

    expected, found = train(Network(middle), images(SIZE_PX)), train(lean(Network(middle)), images(SIZE_PX))
    assert are_equal(expected[-2:], found[-2:])  # gradients of the last layer


@pytest.mark.parametrize("is_training", [False, True])
def test_running_statistics_may_change_before_backward(is_training: bool) -> None:
    models = Network(F.relu), lean(Network(F.relu))
    for model in models:
        model.train(is_training)
        loss = model(images(SIZE_PX)).square().mean()
        model.train()
        model(5 + images(SIZE_PX))
        loss.backward()
    assert are_equal(*(gradients(model.out) for model in models))


class Program(Network):
    """A network whose middle is a program of the table, with two more parameters for it."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda h: PROGRAMS[name](self, h))
        self.scale, self.codes = nn.Parameter(torch.randn(8, 1, 1)), nn.Parameter(torch.randn(2, 8 * SIZE_PX**2))


def double_array(array: Any) -> None:
    array[...] *= 2


def write_array_of_clone(_: Program, h: Tensor) -> Tensor:
    b = h.relu().clone()
    double_array(b.detach().numpy())
    return b


def write_array_of_output(_: Program, h: Tensor) -> Tensor:
    h = h * 0.5  # plain training saves no output of a product, which the array would change
    double_array(h.detach().numpy())
    return h


def write_array_and_read_clone(_: Program, h: Tensor) -> Tensor:
    b = h.tanh().clone()
    double_array(b.detach().numpy()[:, :4])
    return b.sigmoid() * b + b.exp()


def write_array_of_view(_: Program, h: Tensor) -> Tensor:
    h = F.silu(h)
    double_array(h[:, :4].detach().numpy())
    a, b = h.chunk(2, 1)
    return torch.cat([a.sin(), b * a], 1)


def write_arrays_of_two_clones(_: Program, h: Tensor) -> Tensor:
    h = h.tanh()
    a = h.clone()
    double_array(a.detach().numpy())
    b = a.clone()
    double_array(b.detach().numpy())
    return h.exp() + a.exp() + b.exp()


def write_shared_memory(_: Program, h: Tensor) -> Tensor:
    b = h.sigmoid().clone()
    b.detach().share_memory_()
    double_array(b.detach().numpy())
    return b.exp()


def set_data_of_activation(_: Program, h: Tensor) -> Tensor:
    h = F.hardtanh(h)
    h.data = h.data.sign()
    return h * 2 + h.sigmoid()


def set_data_of_activation_twice(_: Program, h: Tensor) -> Tensor:
    h = h.tanh()
    h.data = h.data.sign()
    h.data = h.data * 0.5  # at the address of the first storage, perhaps
    return (h.sigmoid() * h).relu()


def set_data_of_parameter(net: Program, h: Tensor) -> Tensor:
    h = (h * net.scale).sigmoid()
    net.scale.data = net.scale.data.clamp(-1, 1) * 1.5
    return h.tanh() * net.scale


def set_data_of_codebook(net: Program, h: Tensor) -> Tensor:
    codes = F.embedding(torch.arange(2), net.codes).view_as(h)
    h = (h * codes).sigmoid()
    net.codes.data = net.codes.data + 1
    return h * codes.relu()


def use_jagged_tensors(_: Program, h: Tensor) -> Tensor:
    rows = h.flatten(2)
    nested = torch.nested.as_nested_tensor([rows[0, :, :5000].T, rows[1, :, :].T], layout=torch.jagged)
    nested = F.silu(nested * 2)
    return torch.nested.to_padded_tensor(nested, 0.0).transpose(1, 2).reshape_as(h).relu()


def change_kernels_within_forward(_: Program, h: Tensor) -> Tensor:
    """oneDNN's GELU has other bits than torch's own."""
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        h = F.gelu(h)
    h = F.gelu(h * 2)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        return F.gelu(h.sin()) * h


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, h: torch.func.grad(lambda x: f(x).sum())(h),
    "vmap of grad": lambda f, h: torch.func.vmap(torch.func.grad(lambda x: f(x[None]).sum()))(h),
    "jvp": lambda f, h: torch.func.jvp(f, (h,), (h,))[1],
}


def transformed(name: str) -> Callable[[Program, Tensor], Tensor]:
    def middle(_: Program, h: Tensor) -> Tensor:
        h = h.relu() + 1
        return (TRANSFORMS[name](lambda x: (x * x).sin(), h).sigmoid() * h).tanh()

    return middle


#: Uses of an inference tensor with other data, which has no version counter and can be neither viewed nor written.
OF_OTHER_DATA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "read": lambda h, x: h + x,
    "recomputed from": lambda h, x: (h + x.sin().exp()).sigmoid() * x.clone(),
    "concatenated": lambda h, x: torch.cat((h, x), 1).sin()[:, 4:12],
    "written into": lambda h, x: h.clone().add_(x).mul_(x.sign()).sigmoid(),
}


def with_other_data(name: str) -> Callable[[Program, Tensor], Tensor]:
    def middle(_: Program, h: Tensor) -> Tensor:
        with torch.inference_mode():
            x = torch.ones(h.shape)
        x.data = h.detach() * 0.5
        return OF_OTHER_DATA[name](h, x)

    return middle


#: Name -> what a network does between its layers.
PROGRAMS: dict[str, Callable[[Program, Tensor], Tensor]] = {
    "array of a clone is written": write_array_of_clone,
    "array of an output is written": write_array_of_output,
    "array is written and its clone read": write_array_and_read_clone,
    "array of a view is written": write_array_of_view,
    "arrays of two clones are written": write_arrays_of_two_clones,
    "shared memory is written": write_shared_memory,
    "data of an activation is set": set_data_of_activation,
    "data of an activation is set twice": set_data_of_activation_twice,
    "data of a parameter is set": set_data_of_parameter,
    "data of a codebook is set": set_data_of_codebook,
    "jagged tensors": use_jagged_tensors,
    "kernels change within forward": change_kernels_within_forward,
    **{f"transform: {name}": transformed(name) for name in TRANSFORMS},
    **{f"inference tensor with other data is {name}": with_other_data(name) for name in OF_OTHER_DATA},
}


@pytest.mark.filterwarnings("ignore::zoo.remat.limit.BelowFloor")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # from torch, which prepares jvp
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("budget", [None, 0.3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_within_forward_is_bit_identical_to_plain_training(name: str, budget: float | None) -> None:
    plain, model = Program(name), lean(Program(name), budget)
    for _ in range(3):
        assert_same_step(model, plain, images(SIZE_PX))
        assert are_equal(plain.buffers(), model.buffers())


class FrozenStem(nn.Module):
    """A frozen convolution and a ReLU in place, whose output a test saves in its own way."""

    def __init__(self, save: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stem.weight.requires_grad_(False)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16))
        self.save = save

    def forward(self, x: Tensor) -> Tensor:
        return self.save(self.body, F.relu_(self.stem(x) * 1.0)).mean((2, 3))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


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


def saves_on_cpu(body: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return body(x)


def saves_a_relu_elsewhere(body: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        x = F.relu(x - 0.1)
    return body(Square.apply(x))


@pytest.mark.parametrize(
    "save",
    [
        lambda body, x: checkpoint(body, x, use_reentrant=False),
        lambda body, x: checkpoint(body, x, use_reentrant=True),
        lambda body, x: body(Square.apply(x)),
        lambda body, x: body(Square.apply(Square.apply(x).relu())),
        saves_on_cpu,
        saves_a_relu_elsewhere,
    ],
)
def test_saved_relu_mask_after_frozen_layer_has_its_size(save: Callable[..., Tensor]) -> None:
    x = torch.randn(8, 3, 32, 32)
    assert are_equal(train(FrozenStem(save), x), train(lean(FrozenStem(save)), x))


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


def test_parameter_overwritten_in_forward_trains_correctly() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = nn.Embedding(200, 64, max_norm=1.0), nn.GELU(), nn.Linear(64, 64), nn.Tanh()
            self.tower = nn.Sequential(*layers)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.tower(a) * self.tower(b)

    rows = torch.randint(200, (2, 8, 128), generator=generator(0))
    assert_lean_is_plain(Twice(), *rows)
    model = Twice()
    lean(model.tower)
    assert_same_step(model, Twice(), *rows)  # two recordings before backward


LINALG: dict[str, Callable[[Tensor], Tensor]] = {
    "pinv": torch.linalg.pinv,
    "lstsq": lambda x: torch.linalg.lstsq(x, x[:, :2] * 2 + 1).solution,
}
if hasattr(torch.linalg, "matrix_sqrth"):  # since torch 2.15
    LINALG["matrix_sqrth"] = lambda x: torch.linalg.matrix_sqrth(x.mH @ x + torch.eye(3))


@pytest.mark.parametrize("name", LINALG)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_conjugating_complex_operations_train_correctly(name: str, requires_grad: bool) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return LINALG[name](x)

    results = []
    for model in (Complex(), lean(Complex())):
        torch.manual_seed(0)
        x = torch.randn(5, 3, dtype=torch.complex128, requires_grad=requires_grad)
        out = model(x)
        if requires_grad:
            out.abs().sum().backward()
        results.append([out.detach(), *([x.grad] if requires_grad else [])])
    assert are_equal(*([torch.view_as_real(each.resolve_conj()) for each in found] for found in results))


class Tagged(Tensor):
    """A subclass of tensors, whose operations return new objects for the same elements."""


@pytest.mark.parametrize("kind", [Tensor, Tagged])
@pytest.mark.parametrize("size", [8, 64])  # with small tensors, recipes start from copies
@pytest.mark.parametrize(
    "function",
    [
        lambda u: u * u.conj(),
        lambda u: (u @ u.mH).tanh(),
        lambda u: (u.imag * u.conj().imag).sin() * u.abs(),
        lambda u: torch.complex(u.imag, u.conj().imag).exp() * u.conj().clone(),
        lambda u: u.conj().resolve_conj().clone() * u.clone() * u[:1].conj(),
    ],
)
def test_conjugated_views_train_correctly(kind: type[Tensor], size: int, function: Callable[[Tensor], Tensor]) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(size, size, 2))

        def forward(self, x: Tensor) -> Tensor:
            return function((x * torch.view_as_complex(self.weight)).tanh()).abs()

    results = []
    for model in (Complex(), lean(Complex())):
        torch.manual_seed(1)
        x = torch.randn(size, size, dtype=torch.cfloat).as_subclass(kind).detach().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        results.append([out.detach(), torch.view_as_real(x.grad), *gradients(model)])
    assert are_equal(*results)


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


class Teacher(nn.Module):
    """The layers that a frozen network may call in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.ModuleDict(
            {kind: getattr(nn, kind)(64, 64, batch_first=True) for kind in ("GRU", "LSTM", "RNN")}
        )
        self.deep = nn.LSTM(64, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.cell, self.form = nn.GRUCell(64, 64), nn.Bilinear(64, 64, 8)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
        self.weight = nn.Parameter(torch.randn(64, 64))


def assert_lean_is_plain_in_autocast(build: Callable[[], Any]) -> None:
    results = []
    for model in (build(), lean(build())):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 48, 64, generator=generator(1))).float().square().sum().backward()
        results.append([model.target, *gradients(model)])
    assert are_equal(*results)


IN_INFERENCE_MODE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "einsum": lambda net, x: torch.einsum("bti,oi->bto", x, net.weight),
    "tensordot": lambda net, x: torch.tensordot(x.float(), net.weight, 1),
    "inner": lambda net, x: torch.inner(x.float(), net.weight),
    "multi_dot": lambda net, x: torch.linalg.multi_dot([x[0].float(), net.weight, net.weight]),
    "matrix_power": lambda net, _: torch.linalg.matrix_power(net.weight, 3),
    "pinv": lambda net, _: torch.linalg.pinv(net.weight),
    "pinverse": lambda net, _: torch.pinverse(net.weight),  # autocast runs all of it in single precision
    "cov": lambda _, x: torch.cov(x[0].float()),
    "bilinear": lambda net, x: net.form(x.float(), x.float()),
    "GRUCell": lambda net, x: net.cell(x[0]),
    "LSTM of two layers": lambda net, x: net.deep(x)[0],
    "encoder layer": lambda net, x: net.encoder(x),
    **{kind: lambda net, x, kind=kind: net.recurrent[kind](x)[0] for kind in ("GRU", "LSTM", "RNN")},  # type: ignore[misc]
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IN_INFERENCE_MODE)
def test_autocast_casts_inside_of_operations_in_inference_mode(name: str, dtype: torch.dtype) -> None:
    class Distilled(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            x = (x @ self.weight).tanh()
            with torch.inference_mode():
                target = IN_INFERENCE_MODE[name](self, x.detach().to(dtype))
            self.target = target.clone()
            return x * target.float().mean()

    assert_lean_is_plain_in_autocast(Distilled)


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x.float(), w),
    "einsum": lambda x, w: torch.einsum("bti,oi->bto", x.float(), w),
    "conv1d": lambda x, w: F.conv1d(x.float().mT, w[..., None]).mT.contiguous(),
}


@pytest.mark.parametrize("name", KERNELS)
def test_autocast_casts_inside_of_custom_operators(name: str) -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return KERNELS[name](x, w).float()

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.flatten(0, 1).mT @ x.flatten(0, 1).float()

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    operator = torch.library.custom_op(f"zoo_test::{name}", kernel, mutates_args=())
    operator.register_autograd(backward, setup_context=save)

    class Custom(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            self.target = operator(F.gelu(x @ self.weight), self.weight)
            return self.target

    assert_lean_is_plain_in_autocast(Custom)


@pytest.mark.parametrize("budget", [None, 0.5, "1GB"])
def test_report_runs_layer_that_casts_in_inference_mode(budget: Any) -> None:
    class Distilled(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            x = (x @ self.weight).tanh()
            with torch.inference_mode():
                target = self.recurrent["LSTM"](x.detach())[0]
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


@pytest.mark.parametrize("in_forward", [False, True])
def test_backward_recomputes_with_kernels_of_forward(in_forward: bool) -> None:
    class Seen(TorchDispatchMode):
        """Notes whether oneDNN was enabled in each GELU."""

        def __init__(self) -> None:
            super().__init__()
            self.enabled: list[bool] = []

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten.gelu.default:
                self.enabled.append(torch.backends.mkldnn.enabled)
            return operation(*args, **kwargs or {})

    with torch.backends.mkldnn.flags(enabled=in_forward, allow_tf32=None):
        loss = lean(Network(F.gelu))(images(SIZE_PX)).square().mean()
    with torch.backends.mkldnn.flags(enabled=not in_forward, allow_tf32=None), Seen() as seen:
        loss.backward()
        assert torch.backends.mkldnn.enabled is not in_forward
    assert seen.enabled == [in_forward]


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


#: Functions of bytes and of a float64 tensor. Their dtype, or the precision within, is the default.
OF_DEFAULT_DTYPE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "division": lambda codes, h: h * (codes / 255),
    "product": lambda codes, h: (codes * 0.1) * h,
    "sigmoid": lambda codes, h: h * codes.sigmoid().exp(),
    "root": lambda codes, h: (codes.sqrt() + 0.1).log() * h,
    "mean": lambda codes, h: h * (codes.int() / 7).mean(1, keepdim=True).tanh(),
}


@pytest.mark.parametrize("within", ["around forward", "within forward", "from the middle of forward on"])
@pytest.mark.parametrize("name", OF_DEFAULT_DTYPE)
def test_backward_recomputes_with_default_dtype_of_forward(name: str, within: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(64, 1, dtype=torch.float64, generator=generator(0)))

        def forward(self, codes: Tensor, h: Tensor) -> Tensor:
            h = (h * self.scale).sigmoid()
            with nullcontext() if within == "around forward" else double_by_default():
                h = OF_DEFAULT_DTYPE[name](codes, h)
                h = h.sin() if within == "from the middle of forward on" else h
            return h * self.scale * h.exp()

    codes = torch.randint(256, (64, 512), dtype=torch.uint8, generator=generator(1))
    h = torch.randn(64, 512, dtype=torch.float64, generator=generator(2))
    results = []
    for model in (Scaled(), lean(Scaled())):
        with double_by_default() if within == "around forward" else nullcontext():
            loss = model(codes, h).square().sum()
        loss.backward()
        assert torch.get_default_dtype() is torch.float32
        results.append([loss.detach(), *gradients(model)])
    assert are_equal(*results)
