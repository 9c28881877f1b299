"""Programs in which memory is shared, overwritten, interrupted or not torch's own train lean as they train plain."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Shard

from tests.remat.programs import are_equal
from zoo.remat.lean import lean
from zoo.remat.memory_report import memory_report
from zoo.remat.memory_use import measure_memory
from zoo.remat.recipes import RecipeError
from zoo.torch_internals import TorchDispatchMode

SIZE_PX = 96  # 8 channels of 96 x 96 px take more than 64 KiB, up to which tensors are kept


def images() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 3, SIZE_PX, SIZE_PX)


class Network(nn.Module):
    """A convolution and a norm, then what a test gives, then another convolution."""

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
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_lean_is_plain(model: nn.Module, *inputs: Any) -> None:
    plain = copy.deepcopy(model)
    expected = train(plain, *copy.deepcopy(inputs))
    found = train(lean(model), *copy.deepcopy(inputs))
    assert expected
    assert are_equal(expected, found)
    assert are_equal(plain.buffers(), model.buffers())


# --------------------------------------------------------------------------------------------- recomputed memory
MULTIPLE_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, 1),
    "split": lambda h: h.split(4, 1),
    "split_with_sizes": lambda h: h.split([4, 4], 1),
    "tensor_split": lambda h: h.tensor_split(2, 1),
    "unbind": lambda h: [each.squeeze(1) for each in h.unflatten(1, (2, 4)).unbind(1)],
    "slices": lambda h: (h[:, :4], h[:, 4:]),
}


@pytest.mark.parametrize("views", MULTIPLE_VIEWS)
def test_recomputed_memory_that_a_view_shows_is_not_overwritten(views: str) -> None:
    def middle(h: Tensor) -> Tensor:
        a, _ = MULTIPLE_VIEWS[views](h)
        b, _ = MULTIPLE_VIEWS[views](h * 0.5)
        return b + a

    assert_lean_is_plain(Network(middle, channels=4), images())


class Overwriting(torch.autograd.Function):
    """Doubles x; its backward overwrites what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.zero_()
        return gradient * 2


@pytest.mark.parametrize("view", [lambda h: h, lambda h: h[:, :4]], ids=["itself", "a view of it"])
def test_a_saved_tensor_that_a_backward_overwrites_is_recomputed_for_the_next_reader(view: Any) -> None:
    def middle(h: Tensor, function: Callable[[Tensor], Tensor] = Overwriting.apply) -> Tensor:
        h = h.relu()
        return h.sin() + h * h + function(view(h)).repeat(1, h.shape[1] // view(h).shape[1], 1, 1)

    expected = train(Network(lambda h: middle(h, lambda x: x * 2)), images())
    found = train(lean(Network(middle)), images())
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(expected, found, strict=True))


# -------------------------------------------------------------------------------------- writes that no one notices
class Conditioned(nn.Module):
    """A network that adds an embedding to its features and returns both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.embed = nn.Linear(5, 8)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embed(condition)
        return self.out((self.norm(self.conv(x)) + e[:, :, None, None]).sigmoid()), e


@pytest.mark.parametrize("write", [lambda e: e.mul_(2), lambda e: e.clamp_(0), lambda e: e.data.zero_()])
def test_a_small_tensor_may_be_overwritten_after_forward(write: Callable[[Tensor], Any]) -> None:
    assert_lean_is_plain(Conditioned(), images(), torch.randn(2, 5), between=lambda out: write(out[1].detach()))
    assert_lean_is_plain(Conditioned(), images(), torch.randn(2, 5), between=lambda out: _without_grad(write, out[1]))


def _without_grad(write: Callable[[Tensor], Any], e: Tensor) -> None:
    with torch.no_grad():
        write(e)


def test_a_small_tensor_may_be_overwritten_through_an_alias_within_forward() -> None:
    class Alias(Conditioned):
        def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
            e = self.embed(condition)
            h = self.norm(self.conv(x)) + e[:, :, None, None]
            e.data.mul_(3)
            return self.out(h.sigmoid()), e

    assert_lean_is_plain(Alias(), images(), torch.randn(2, 5))


def test_a_large_tensor_may_be_overwritten_through_data_within_forward() -> None:
    def middle(h: Tensor) -> Tensor:
        y = h.sin()
        z = y * 2
        y.data.zero_()
        return z.sigmoid() + y.cumsum(1).exp().relu()

    plain = Network(middle)
    expected = []
    for model in (plain, lean(copy.deepcopy(plain))):
        torch.manual_seed(1)
        model(images()).square().mean().backward()
        expected.append([model.out.weight.grad, model.out.bias.grad])
    assert are_equal(*expected)


class Statistics(nn.Module):
    """Reads running statistics that its own norm moves, which does not count as a modification in torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        shift = self.norm.running_mean[None, :, None, None]
        before = h + shift
        h = self.norm(before)
        return self.out((h.sigmoid() - shift) * before)


def test_running_statistics_that_forward_reads_and_moves() -> None:
    assert_lean_is_plain(Statistics(), images())


@pytest.mark.parametrize("is_training", [False, True])
def test_running_statistics_that_move_between_forward_and_backward(is_training: bool) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        model.train(is_training)
        loss = model(images()).square().mean()
        model.train()
        model(5 + images())
        loss.backward()
        return [model.out.weight.grad, model.out.bias.grad]

    model = Network(F.relu)
    expected = gradients(copy.deepcopy(model))
    assert are_equal(expected, gradients(lean(model)))


LOADERS: dict[str, Callable[[np.ndarray], Tensor]] = {
    "numpy": torch.from_numpy,
    "dlpack": torch.from_dlpack,
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.uint8).view(array.shape),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_an_input_buffer_may_be_refilled_from_outside_of_torch(loader: str) -> None:
    class Normalizing(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.float() / 255 - 0.5) / 0.25)

    def gradients(model: nn.Module, is_refilled: bool) -> list[Tensor]:
        buffer = np.random.default_rng(0).integers(0, 255, (2, 3, SIZE_PX, SIZE_PX), dtype=np.uint8)
        return train(model, LOADERS[loader](buffer), between=lambda _: buffer.fill(7) if is_refilled else None)

    expected = gradients(Normalizing(F.relu), is_refilled=False)
    found = gradients(lean(Normalizing(F.relu)), is_refilled=True)
    assert are_equal(expected, found)


def test_memory_that_autograd_keeps_and_others_refill_starts_no_recipe() -> None:
    def gradients(is_lean: bool) -> Tensor:
        buffer = np.random.default_rng(0).standard_normal((1, 3, SIZE_PX, SIZE_PX), dtype=np.float32)
        weight = torch.ones(3, 1, 1, requires_grad=True)
        module = nn.Module()
        module.forward = lambda x: ((x * weight).sum() * 0, (x.sigmoid() * 2) * weight)
        x = torch.from_numpy(buffer)
        _, out = (lean(module) if is_lean else module)(x)
        buffer.fill(0)
        out.sum().backward()
        return weight.grad

    assert torch.equal(gradients(False), gradients(True))


# ------------------------------------------------------------------------------------------- tensors it leaves alone
def test_distributed_tensors_train_as_they_are() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])

        def middle(h: Tensor) -> Tensor:
            rows = DTensor.from_local(h.flatten(1), mesh, [Shard(0)])
            rows = (rows.relu() * 2).sigmoid() * rows
            return rows.to_local().view_as(h).tanh()

        assert_lean_is_plain(Network(middle), images())
    finally:
        torch.distributed.destroy_process_group()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, h: torch.func.grad(lambda x: f(x).sum())(h),
    "jacrev": lambda f, h: torch.func.jacrev(lambda x: f(x).sum((2, 3)))(h[:1, :2, :2, :2]).sum() * h,
    "vjp": lambda f, h: torch.func.vjp(f, h)[1](h)[0],
    "vmap of grad": lambda f, h: torch.func.vmap(torch.func.grad(lambda x: f(x[None]).sum()))(h),
    "jvp": lambda f, h: torch.func.jvp(f, (h,), (h,))[1],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # from torch, which prepares jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_inside_of_forward(transform: str) -> None:
    def middle(h: Tensor) -> Tensor:
        h = h.relu() + 1
        return (TRANSFORMS[transform](lambda x: (x * x).sin(), h).sigmoid() * h).tanh()

    assert_lean_is_plain(Network(middle), images())


@pytest.mark.parametrize("size", [1, SIZE_PX])
def test_inference_tensors_are_read(size: int) -> None:
    with torch.inference_mode():
        mask = torch.rand(1, 8, size, size)
    assert_lean_is_plain(Network(lambda h: torch.cat([(h.relu() + mask).sigmoid() + mask[:, :1], h])[:2]), images())


def test_lazy_modules() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    torch.manual_seed(1)
    expected = train(Lazy(), images())
    torch.manual_seed(1)
    found = train(lean(Lazy()), images())
    assert are_equal(expected, found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    def middle(h: Tensor) -> Tensor:
        rows = h.flatten(2)
        nested = torch.nested.as_nested_tensor([rows[0, :, :5000].T, rows[1, :, :].T], layout=layout)
        nested = F.silu(nested * 2)
        return torch.nested.to_padded_tensor(nested, 0.0).transpose(1, 2).reshape_as(h).relu()

    assert_lean_is_plain(Network(middle), images())


# ------------------------------------------------------------------------------------------------------ interruptions
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_no_mode_and_no_hook_stays_after_an_interruption(error: type[BaseException]) -> None:
    is_interrupted = True

    def middle(h: Tensor) -> Tensor:
        if is_interrupted:
            raise error
        return h.relu()

    model = lean(Network(middle))
    with pytest.raises(error):
        model(images())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch.func.grad(lambda x: x.sin())(torch.tensor(1.0))
    is_interrupted = False
    expected = train(Network(F.relu), images())
    assert are_equal(expected, train(model, images()))


@pytest.mark.slow
def test_a_step_leaves_no_reference_cycle() -> None:
    model = lean(Network(F.relu))
    model(images())
    while gc.collect():  # finalizers of what other tests left may leave garbage of their own
        pass
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(images()).square().mean().backward()
        gc.collect()
        leaked = [type(found) for found in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [kind for kind in leaked if issubclass(kind, Tensor) or kind.__module__.startswith("zoo.")] == []


def test_what_is_not_a_module_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"zoo\.lean takes a torch\.nn\.Module, not str 'resnet50'.*zoo\.get"):
        lean("resnet50")


# --------------------------------------------------------------------------------------------------------- memory
def test_the_parts_of_a_concatenation_on_the_way_of_a_recipe_are_freed() -> None:
    references = []

    def rotary(h: Tensor) -> Tensor:
        a, b = h.chunk(2, 1)
        turned = torch.cat([-b, a], 1)
        parts = -b
        references.append(weakref.ref(parts.untyped_storage()))
        whole = torch.cat([parts, a], 1)
        del parts
        return whole * 2 + turned

    out = lean(Network(rotary))(images())
    assert references[0]() is None
    out.sum().backward()


def test_an_operator_whose_schema_hides_a_write() -> None:
    @torch.library.custom_op("zoo_tests::hidden_write", mutates_args=())
    def hidden_write(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum((2, 3), keepdim=True)

    @hidden_write.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:2], 1, 1))

    hidden_write.register_autograd(lambda ctx, gradient: None, setup_context=lambda ctx, inputs, output: None)

    def middle(h: Tensor) -> Tensor:
        y = (h * 0.5).relu()
        z = y.sigmoid() + hidden_write(y.detach())
        return z * y.exp() + y * y

    assert_true_or_refused(middle)


def assert_true_or_refused(middle: Callable[[Tensor], Tensor]) -> None:
    """Assert that lean training has the gradients of a run that copies all that it saves, or says that it cannot."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        expected = train(Network(middle), images())
    with pytest.raises(RuntimeError, match="modified"):
        train(Network(middle), images())
    try:
        found = train(lean(Network(middle)), images())
    except RecipeError:
        return
    assert are_equal(expected, found)


@pytest.mark.parametrize(
    "write", [lambda y: torch._foreach_mul_([y], 1.1), lambda y: y.mul_(1.1)], ids=["foreach", "mul"]
)
def test_an_operation_that_overwrites_what_autograd_saved(write: Callable[[Tensor], Any]) -> None:
    def middle(h: Tensor) -> Tensor:
        y = h.sigmoid()
        z = y.exp()
        with torch.no_grad():
            write(y)
        return z * y.cos() + y * y

    assert_true_or_refused(middle)


def test_recomputation_of_integers_that_become_floats() -> None:
    def middle(h: Tensor) -> Tensor:
        u = (h.detach() * 10).to(torch.uint8)
        return F.layer_norm((u.square() + 1).sqrt() * h, (SIZE_PX,)) + (u.square() + 1).sqrt()

    assert_lean_is_plain(Network(middle), images())


# ----------------------------------------------------------------------------------------------- memory and settings
def test_parameters_in_memory_that_torch_does_not_own_are_inputs_of_recipes(tmp_path: Path) -> None:
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

    def held(model: nn.Module) -> int:
        return measure_memory(lambda: model(images()).square().mean(), model.parameters()).held

    assert held(lean(mapped())) == held(lean(Scaled())) < held(Scaled())
    assert_lean_is_plain(mapped(), images())


def test_a_parameter_that_each_forward_overwrites() -> None:
    class Renormalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(200, 64, max_norm=1.0), nn.Linear(64, 64)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.out(F.gelu(self.embed(a))).tanh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Renormalized()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.tower(a, b) * self.tower(b, a)

    rows = torch.randint(200, (2, 8, 128), generator=torch.Generator().manual_seed(0))
    assert_lean_is_plain(Twice(), *rows)
    plain = Twice()
    expected = train(copy.deepcopy(plain), *rows)
    lean(plain.tower)
    assert are_equal(expected, train(plain, *rows))  # two recordings before backward


LINALG: dict[str, Callable[[Tensor], Tensor]] = {
    "pinv": torch.linalg.pinv,
    "pinv with a tolerance": lambda x: torch.linalg.pinv(x, rtol=1e-3),
    "pinv of a Hermitian matrix": lambda x: torch.linalg.pinv(x.mH @ x, hermitian=True),
    "pinverse": torch.pinverse,
    "lstsq": lambda x: torch.linalg.lstsq(x, x[:, :2] * 2 + 1).solution,
}
if hasattr(torch.linalg, "polar"):  # since torch 2.15
    LINALG["polar"] = lambda x: torch.cat(torch.linalg.polar(x))
    LINALG["matrix_sqrth"] = lambda x: torch.linalg.matrix_sqrth(x.mH @ x + torch.eye(3))


@pytest.mark.parametrize("name", LINALG)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_complex_operations_that_conjugate_inside_of_their_kernel(name: str, requires_grad: bool) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return LINALG[name](x)

    torch.manual_seed(0)
    results = []
    for model in (Complex(), lean(Complex())):
        torch.manual_seed(0)
        x = torch.randn(5, 3, dtype=torch.complex128, requires_grad=requires_grad)
        out = model(x)
        if requires_grad:
            out.abs().sum().backward()
        results.append([out.detach(), *([x.grad] if requires_grad else [])])
    assert are_equal(*([torch.view_as_real(each.resolve_conj()) for each in found] for found in results))


@pytest.mark.parametrize("budget", [0.3, "40 FLOP/B", "1GB"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_strided_nested_tensors_with_a_budget(budget: Any) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([x[0, :100], x[1]])
            return torch.nested.to_padded_tensor(self.second(F.relu(self.first(nested))), 0.0)

    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(0))
    expected, model = train(Nested(), x), lean(Nested(), budget)
    for _ in range(2):
        assert are_equal(expected, train(model, x))
    assert {module.name for module in memory_report(Nested(), x).modules} == {"first", "second"}


@pytest.mark.parametrize("in_forward", [False, True])
def test_backward_recomputes_with_the_kernels_of_forward(in_forward: bool) -> None:
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
        loss = lean(Network(F.gelu))(images()).square().mean()
    with torch.backends.mkldnn.flags(enabled=not in_forward, allow_tf32=None), Seen() as seen:
        loss.backward()
        assert torch.backends.mkldnn.enabled is not in_forward
    assert seen.enabled == [in_forward]
