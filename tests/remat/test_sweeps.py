"""Operators of torch have the results of plain training in a `Rematerializer`, with autocast and without, and the
kernels that replace kernels of torch have their bits and layouts.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.remat.hunt.judge import same_bits
from tests.remat.hunt.runner import copied
from zoo.remat import Rematerializer
from zoo.remat._exact_norms import FASTER, batch_norm, max_pool_with_indices
from zoo.remat._operations import aten

NUM_SAMPLES = 8  # examples per operator
#: Operators that return memory without writing it, and one that torch itself refuses under autocast unless it is empty.
LEFT_OUT = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.pinv",
}  # fmt: skip


def fresh(arguments: Any) -> Any:
    """Return arguments with new leaves in place of tensors, one for each."""
    leaves: dict[int, Tensor] = {}

    def leaf(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if id(each) not in leaves:
            leaves[id(each)] = copied(each).requires_grad_(each.requires_grad)
        return leaves[id(each)]

    return tree_map(leaf, arguments)


def results_of(
    call: Callable[..., Any],
    arguments: Any,
    context: AbstractContextManager[Any],
    is_cast: bool,
    is_inference: bool = False,
) -> list[Tensor]:
    """Return the outputs of a call, the gradients by its arguments, what it left in them, and a random number."""
    args, kwargs = fresh(arguments)
    torch.manual_seed(0)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=is_cast), torch.inference_mode(is_inference):
        out = call(*args, **kwargs)
    outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    results = [each.detach().clone() for each in outputs]
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    wanted = list({id(each): each for each in leaves if each.requires_grad and each.is_leaf}.values())
    loss = [
        (each * torch.linspace(-1, 2, each.numel()).view(each.shape)).sum().abs()
        for each in outputs
        if each.requires_grad and each.layout is torch.strided
    ]
    if loss and wanted:
        results += [each for each in torch.autograd.grad(loss, wanted, allow_unused=True) if each is not None]
    return [*results, *(each.detach() for each in leaves), torch.rand(1)]


def are_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.layout == b.layout and same_bits(*(each.to_dense().resolve_conj().resolve_neg() for each in (a, b)))
        for a, b in zip(found, expected, strict=True)
    )


def difference(call: Callable[..., Any], arguments: Any, **settings: bool) -> str:
    """Return in a few words how a recorded call differs from the plain call; "" if it does not.

    A call that fails plainly, or has other results each time, does not differ.
    """
    try:
        expected = results_of(call, arguments, nullcontext(), **settings)
        if not are_same(results_of(call, arguments, nullcontext(), **settings), expected):
            return ""
    except Exception:
        return ""
    try:
        found = results_of(call, arguments, Rematerializer(smallest_bytes=0), **settings)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return "" if are_same(found, expected) else "differs" + how_much(found, expected)


def how_much(found: list[Tensor], expected: list[Tensor]) -> str:
    for index, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f" in result {index}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if a.layout is torch.strided and not same_bits(a.resolve_conj(), b.resolve_conj()):
            wide = torch.complex128 if a.is_complex() else torch.float64
            largest = (a.to(wide) - b.to(wide)).abs().max().item()
            return f" in result {index} by {largest:.2g} of {b.to(wide).abs().max().item():.2g}"
    return ""


def operators() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield torch's own examples of its operators and modules: name, call, (args, kwargs)."""
    if "expecttest" not in sys.modules:  # torch's tests need it, and these examples do not
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for operator in op_db:
        if not operator.supports_dtype(torch.float32, "cpu") or operator.name in LEFT_OUT:
            continue
        torch.manual_seed(0)
        try:
            samples = list(
                itertools.islice(
                    operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd), NUM_SAMPLES
                )
            )
        except Exception:  # needs a package that is not there
            continue
        for sample in samples:
            arguments = (sample.input, *sample.args), sample.kwargs
            yield operator.formatted_name, operator.op, arguments
            inplace = operator.inplace_variant
            if inplace is not None and isinstance(sample.input, Tensor):
                name = f"{operator.formatted_name}, in place"
                yield name, lambda x, *args, f=inplace, **kwargs: f(x.clone(), *args, **kwargs), arguments
    for info in module_db:
        for is_training in (True, False):
            torch.manual_seed(0)
            examples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=is_training
            )
            for example in itertools.islice(examples, NUM_SAMPLES):
                if example.forward_input is None:
                    continue
                made = example.constructor_input
                module = info.module_cls(*made.args, **made.kwargs).train(is_training)

                def call(state: dict[str, Tensor], *args: Any, module: nn.Module = module, **kwargs: Any) -> Any:
                    return torch.func.functional_call(module, state, args, kwargs)

                state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                inputs = example.forward_input
                yield info.name, call, ((state, *inputs.args), inputs.kwargs)


def module(made: nn.Module, *inputs: Tensor, **kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """Return a call that also has gradients by the parameters of a module, and its arguments."""
    state = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    return lambda state, *args: torch.func.functional_call(made, state, args, kwargs), ((state, *inputs), {})


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Any]:
    return function, (args, kwargs)


#: Products that custom operators call.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "einsum": lambda x, w: torch.einsum("bti,oi->bto", x, w),
    "conv1d": lambda x, w: F.conv1d(x.mT, w[..., None]).mT.contiguous(),
}


def custom_operator(name: str) -> Any:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return PRODUCTS[name](x.float(), w.float()).float()

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.flatten(0, 1).mT @ x.flatten(0, 1)

    operator = torch.library.custom_op(f"zoo_test::{name}", kernel, mutates_args=())
    operator.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return operator


OPERATORS = {name: custom_operator(name) for name in PRODUCTS}


def examples() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Return calls of composite operators, whose kernels call others."""
    torch.manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    def z(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.complex64, requires_grad=True)

    labels, lengths = torch.randint(1, 5, (3, 6)), (torch.full((3,), 10), torch.full((3,), 6))
    query, key, value = (r(2, 3, 5, 4) for _ in range(3))
    ids = torch.tensor([[1, 2], [3, 0]])
    return {
        "affine_grid": call(F.affine_grid, r(2, 2, 3), (2, 3, 4, 5)),
        "affine_grid of corners": call(F.affine_grid, r(2, 2, 3), (2, 3, 4, 5), align_corners=True),
        "affine_grid of volumes": call(F.affine_grid, r(2, 3, 4), (2, 3, 4, 5, 3)),
        "grid_sample": call(F.grid_sample, r(2, 3, 6, 6), r(2, 4, 4, 2)),
        "spatial transformer": call(
            lambda x, theta: F.grid_sample(x, F.affine_grid(theta, x.shape)), r(2, 3, 6, 6), r(2, 2, 3)
        ),
        "attention": call(F.scaled_dot_product_attention, query, key, value),
        "attention with a mask": call(F.scaled_dot_product_attention, query, key, value, r(2, 3, 5, 5)),
        "attention with dropout": call(
            F.scaled_dot_product_attention, query, key, value, dropout_p=0.3, is_causal=True
        ),
        "multi-head attention": module(nn.MultiheadAttention(8, 2), r(5, 2, 8), r(5, 2, 8), r(5, 2, 8)),
        "multi-head attention without weights": module(
            nn.MultiheadAttention(8, 2, 0.1), r(5, 2, 8), r(5, 2, 8), r(5, 2, 8), need_weights=False
        ),
        "encoder": module(nn.TransformerEncoderLayer(8, 2, 16), r(5, 2, 8)),
        "encoder in evaluation mode": module(nn.TransformerEncoderLayer(8, 2, 16).eval(), r(5, 2, 8)),
        "bilinear": call(F.bilinear, r(3, 4), r(3, 5), r(6, 4, 5), r(6)),
        "ctc_loss": call(lambda x: F.ctc_loss(x.log_softmax(2), labels, *lengths), r(10, 3, 5)),
        "embedding_bag": call(F.embedding_bag, ids, r(5, 4), mode="mean"),
        "weighted embedding_bag": call(F.embedding_bag, ids, r(5, 4), mode="sum", per_sample_weights=r(2, 2)),
        "RNNCell": module(nn.RNNCell(4, 5), r(3, 4)),
        "GRUCell": module(nn.GRUCell(4, 5), r(3, 4)),
        "LSTMCell": module(nn.LSTMCell(4, 5), r(3, 4)),
        "RNN": module(nn.RNN(4, 5), r(6, 3, 4)),
        "GRU": module(nn.GRU(4, 5, bidirectional=True), r(6, 3, 4)),
        "LSTM": module(nn.LSTM(4, 5, 2), r(6, 3, 4)),
        "einsum": call(lambda *args: torch.einsum("ij,jk,kl->il", *args), r(3, 4), r(4, 5), r(5, 2)),
        "multi_dot": call(lambda *args: torch.linalg.multi_dot(args), r(3, 4), r(4, 5), r(5, 2)),
        "tensordot": call(torch.tensordot, r(3, 4), r(4, 5), 1),
        "inner": call(torch.inner, r(3, 4), r(5, 4)),
        "matrix_power": call(torch.linalg.matrix_power, r(4, 4), 3),
        "cov": call(torch.cov, r(3, 5)),
        "lstsq": call(lambda x, y: torch.linalg.lstsq(x, y).solution, r(5, 3), r(5, 2)),
        "complex lstsq": call(lambda x: torch.linalg.lstsq(x, x[:, :2] * 2 + 1).solution, z(5, 3)),
        **{f"custom operator of {name}": call(OPERATORS[name], r(2, 3, 4), r(4, 4)) for name in OPERATORS},
        "pinverse": call(torch.pinverse, r(5, 4)),
        "pinv": call(torch.linalg.pinv, r(5, 4)),
        "hermitian pinv": call(torch.linalg.pinv, r(5, 5), hermitian=True),
        "complex pinv": call(torch.linalg.pinv, z(5, 4)),
        "polar": call(torch.linalg.polar, r(5, 4)),
        "matrix_exp": call(torch.matrix_exp, r(5, 5)),
        "cdist": call(torch.cdist, r(30, 4), r(40, 4)),
        "svd_lowrank": call(torch.svd_lowrank, r(8, 6), 2),
        "batch norm without affine": module(nn.BatchNorm2d(8, affine=False), r(2, 8, 4, 4)),
        "batch norm of a convolution": module(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.SiLU()), r(2, 3, 6, 6)
        ),
        "spectral norm": module(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), r(3, 4)),
        "weight norm": module(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), r(3, 4)),
    }


EXAMPLES = examples()
if hasattr(torch.linalg, "matrix_sqrth"):  # since torch 2.15
    EXAMPLES["matrix_sqrth"] = call(
        lambda x: torch.linalg.matrix_sqrth(x.mH @ x + torch.eye(3)), torch.randn(5, 3, dtype=torch.complex128)
    )
MODES = {"autocast": (True, False), "float32": (False, False), "autocast in inference mode": (True, True)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_composite_operator_has_results_of_plain_training(name: str, mode: str) -> None:
    is_cast, is_inference = MODES[mode]
    assert not difference(*EXAMPLES[name], is_cast=is_cast, is_inference=is_inference)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "float32"])
def test_every_operator_of_torch_has_results_of_plain_training(is_cast: bool) -> None:
    differences = {}
    for name, function, arguments in operators():
        found = difference(function, arguments, is_cast=is_cast)
        if found:
            differences.setdefault(name, found)
    assert not differences


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
#: Ways to lay out a tensor of this shape in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "part of the channels": lambda x: torch.cat([x, x], 1)[:, x.shape[1] :],
    "part of the batch": lambda x: torch.cat([x[:1], x])[1:],
    "expanded batch": lambda x: x[:1].expand_as(x),
    "expanded image": lambda x: x[..., :1].expand_as(x),
    "negative": lambda x: x.flip(-1),
    "other strides of ones": lambda x: x.as_strided(
        x.shape, [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    ),
}


def numbers(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Return numbers with ties, an infinity and NaN, laid out in memory in some way."""
    torch.manual_seed(0)
    x = 3 * torch.randn(shape) + 1
    x = torch.where(torch.rand(shape) < 0.3, x.round(), x)
    if x.numel() > 40:
        x.view(-1)[torch.tensor([5, 17, 30])] = torch.tensor([torch.nan, -torch.inf, torch.nan])
    return LAYOUTS[layout](x.to(dtype))


def pools() -> Iterator[tuple[Any, ...]]:
    """Yield arguments of max pools, without the tensor, whose shape, layout and dtype come first."""
    shapes = [
        *itertools.product((1, 2), (1, 3, 8, 19), (1, 2, 6), (1, 5)), (0, 8, 4, 4), (2, 0, 4, 4), (8, 6, 5), (16, 1, 1),
        (1, 6, 5), (2, 16, 7, 7),
    ]  # fmt: skip
    settings = (
        ([2, 2], [2, 2], [0, 0], [1, 1], False), ([2, 2], [2, 2], [0, 0], [1, 1], True),
        ([3, 3], [2, 2], [1, 1], [1, 1], False), ([3, 3], [2, 2], [1, 1], [1, 1], True),
        ([3, 2], [1, 2], [1, 0], [2, 1], False), ([5, 6], [5, 6], [2, 3], [1, 1], True),
        ([1, 1], [], [0, 0], [1, 1], False), ([2], [], [0], [1], False), ([6, 5], [1, 1], [0, 0], [1, 1], False),
    )  # fmt: skip
    for shape, layout, dtype, setting in itertools.product(shapes, LAYOUTS, DTYPES, settings):
        yield (shape, layout, dtype), *setting


def norms() -> Iterator[tuple[Any, ...]]:
    """Yield arguments of batch norms as `pools` does; a number stands for a vector of the channels."""
    shapes = [
        *itertools.product((1, 3), (1, 3, 8, 24), (1, 4), (1, 5)), (0, 8, 4, 4), (2, 8, 0, 4), (4, 8), (1, 8),
        (2, 16, 5), (1, 8, 1), (2, 8, 2, 3, 2), (1, 16, 1, 1, 1),
    ]  # fmt: skip
    settings = (
        (0, 1, 2, 3, True, 0.1, 1e-5), (0, 1, 2, 3, False, 0.1, 1e-5), (None, None, None, None, True, 0.1, 1e-5),
        (0, None, None, None, True, 0.0, 1e-3), (None, None, 2, 3, True, 1.0, 1e-5), (None, 1, 2, 3, False, 0.1, 1e-5),
    )  # fmt: skip
    for shape, layout, dtype, setting in itertools.product(shapes, LAYOUTS, DTYPES, settings):
        for vector_dtype in {dtype, torch.float32}:
            yield (
                (shape, layout, dtype),
                *(None if each is None else (vector_dtype, each) for each in setting[:4]),
                *setting[4:],
            )


def read(case: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of a case, with new tensors."""
    arguments: list[Any] = [numbers(*case[0])]
    torch.manual_seed(1)
    vectors = torch.rand(4, case[0][0][1]) + 0.5
    for each in case[1:]:
        is_vector = isinstance(each, tuple) and isinstance(each[0], torch.dtype)
        arguments.append(vectors[each[1]].to(each[0]) if is_vector else each)
    return arguments


def bytes_of(tensor: Tensor) -> bytes:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).numpy().tobytes()


def written(kernel: Callable[..., Any], case: tuple[Any, ...]) -> list[Any]:
    """Return what a kernel gives back and writes: bits, dtype, and how they lie in memory; the kind of its error."""
    arguments = read(case)
    try:
        outputs = kernel(*arguments)
    except (RuntimeError, IndexError) as error:
        return [type(error)]
    tensors = [*outputs, *(each for each in arguments if isinstance(each, Tensor))]
    return [
        (
            each.shape,
            each.dtype,
            each.stride(),
            each.storage_offset(),
            bytes_of(each),
        )
        for each in tensors
    ]


#: Operations -> the kernel that replaces theirs, and its cases.
CASES = {
    aten.max_pool2d_with_indices.default: (max_pool_with_indices, pools),
    aten.native_batch_norm.default: (batch_norm, norms),
}


@pytest.mark.parametrize("operation", CASES, ids=str)
@pytest.mark.parametrize("count", [400, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_replaced_kernel_has_bits_and_layout_of_torch(operation: Any, count: int | None) -> None:
    kernel, cases = CASES[operation]
    chosen = list(cases())
    if count is not None:
        chosen = random.Random(0).sample(chosen, count)
    wrong = [case for case in chosen if written(kernel, case) != written(operation, case)]
    assert not wrong, f"{len(wrong)} of {len(chosen)}, such as {wrong[:5]}"


def test_every_replaced_kernel_is_swept() -> None:
    assert {operation: kernel for operation, (kernel, _) in CASES.items()} == FASTER
