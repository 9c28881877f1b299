"""Each row of the table of repeated operations, called as the row says, is repeated in backward with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.remat.programs import assert_same, gradients_of, runs
from zoo.ops import backend
from zoo.remat import _recipes as recipes
from zoo.remat._lean import lean
from zoo.remat._operations import aten
from zoo.remat._recipes import TrackedTensor
from zoo.remat._rules import ENLARGING, OTHERS, RULES, VIEWS, Rule, in_place_of, rule_of

X, Y = torch.randn(2, 2, 4, 6, 6, generator=torch.Generator().manual_seed(0))

# The arguments after the first tensor, of two tensors x and y of 2 x 4 x 6 x 6.
Arguments = Callable[[Tensor, Tensor], tuple[Any, ...]]


def nothing(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return ()


def second(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return (y,)


def scalar(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return (0.25,)


ARGUMENTS: dict[str, Arguments] = {
    **dict.fromkeys(
        (
            "relu.default", "silu.default", "gelu.default", "hardswish.default", "hardsigmoid.default",
            "sigmoid.default", "leaky_relu.default", "elu.default", "celu.default", "mish.default", "tanh.default",
            "hardtanh.default", "softplus.default", "neg.default", "abs.default", "sqrt.default", "rsqrt.default",
            "exp.default", "reciprocal.default", "logical_not.default", "log_sigmoid_forward.default",
            "mean.default", "sum.default", "unbind.int",
        ),
        nothing,
    ),
    **dict.fromkeys(
        (
            "clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor", "add.Tensor", "sub.Tensor", "rsub.Tensor",
            "mul.Tensor", "div.Tensor", "pow.Tensor_Tensor", "maximum.default", "minimum.default", "eq.Tensor",
            "ne.Tensor", "gt.Tensor", "ge.Tensor", "lt.Tensor", "le.Tensor",
        ),
        second,
    ),
    **dict.fromkeys(
        (
            "clamp.default", "clamp_min.default", "clamp_max.default", "add.Scalar", "sub.Scalar", "rsub.Scalar",
            "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar", "eq.Scalar", "ne.Scalar", "gt.Scalar", "ge.Scalar",
            "lt.Scalar", "le.Scalar",
        ),
        scalar,
    ),
    "threshold.default": lambda x, y: (0.1, 0.2), "lerp.Scalar": lambda x, y: (y, 0.3),
    "lerp.Tensor": lambda x, y: (y, y), "addcmul.default": lambda x, y: (x, y), "addcdiv.default": lambda x, y: (x, y),
    "masked_fill.Scalar": lambda x, y: (y > 1, 0.5), "masked_fill.Tensor": lambda x, y: (y > 1, y.mean()),
    "roll.default": lambda x, y: ([1], [2]), "flip.default": lambda x, y: ([2],),
    "constant_pad_nd.default": lambda x, y: ([1, 2, 0, 1],), "reflection_pad2d.default": lambda x, y: ([1] * 4,),
    "replication_pad2d.default": lambda x, y: ([1] * 4,), "im2col.default": lambda x, y: ([2] * 2, [1] * 2, [0] * 2,
    [1] * 2), "pixel_shuffle.default": lambda x, y: (2,), "pixel_unshuffle.default": lambda x, y: (2,),
    "channel_shuffle.default": lambda x, y: (2,), "upsample_bilinear2d.default": lambda x, y: ([9, 7], False),
    "upsample_nearest2d.default": lambda x, y: ([9, 7],), "avg_pool2d.default": lambda x, y: ([2, 2],),
    "avg_pool3d.default": lambda x, y: ([2, 2, 2],), "_adaptive_avg_pool2d.default": lambda x, y: ([3, 3],),
    "_adaptive_avg_pool3d.default": lambda x, y: ([2, 3, 3],), "mean.dim": lambda x, y: ([2, 3], True),
    "sum.dim_IntList": lambda x, y: ([1],), "amax.default": lambda x, y: ([1], True),
    "amin.default": lambda x, y: ([1], True), "var_mean.correction": lambda x, y: ([1],),
    "std_mean.correction": lambda x, y: ([1],), "linalg_vector_norm.default": lambda x, y: (2, [1]),
    "native_layer_norm.default": lambda x, y: ([6], y[0, 0, 0], y[0, 0, 1], 1e-5),
    "native_group_norm.default": lambda x, y: (y[0, :, 0, 0], y[0, :, 0, 1], 2, 4, 36, 2, 1e-5),
    "max_pool2d_with_indices.default": lambda x, y: ([2, 2],),
    "max_pool3d_with_indices.default": lambda x, y: ([2, 2, 2],),
    "view.default": lambda x, y: ((8, 36),), "_unsafe_view.default": lambda x, y: ((8, 36),),
    "_reshape_alias.default": lambda x, y: ((8, 36), (36, 1)),
    "transpose.int": lambda x, y: (1, 2), "permute.default": lambda x, y: ([0, 2, 3, 1],),
    "slice.Tensor": lambda x, y: (1, 1, 3), "select.int": lambda x, y: (1, 1), "unsqueeze.default": lambda x, y: (1,),
    "squeeze.dim": lambda x, y: (0,), "squeeze.dims": lambda x, y: ([0, 1],),
    "expand.default": lambda x, y: ([3, *x.shape],), "split.Tensor": lambda x, y: (2, 1),
    "split_with_sizes.default": lambda x, y: ([1, 3], 1), "unfold.default": lambda x, y: (3, 2, 1),
    "diagonal.default": nothing, "_prelu_kernel.default": lambda x, y: (y[:1, :, :1, :1],),
    "index_select.default": lambda x, y: (1, torch.tensor([2, 0, 2])), "repeat.default": lambda x, y: ([2, 1, 1, 1],),
    "index.Tensor": lambda x, y: ([None, torch.tensor([2, 0, 2])],),
    "gather.default": lambda x, y: (3, torch.tensor([2, 0, 2]).expand(2, 4, 6, 3)),
    "_softmax.default": lambda x, y: (1, False), "_log_softmax.default": lambda x, y: (1, False),
    "_safe_softmax.default": lambda x, y: (3,), "glu.default": lambda x, y: (1,),
    "upsample_bicubic2d.default": lambda x, y: ([9, 7], False),
    "elu_backward.default": lambda x, y: (1, 1, 1, False, y),
    "hardswish_backward.default": second,
    "hardtanh_backward.default": lambda x, y: (y, 0.5, 1), "leaky_relu_backward.default": lambda x, y: (y, 0.1, False),
    "softplus_backward.default": lambda x, y: (y, 1, 20),
    "_softmax_backward_data.default": lambda x, y: (y, 1, x.dtype),
    "_log_softmax_backward_data.default": lambda x, y: (y, 1, x.dtype),
}  # fmt: skip
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where the first argument is not a tensor of that shape.
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat.default": lambda x, y: aten.cat.default([x, y, x], 1), "t.default": lambda x, y: aten.t.default(x[0, 0]),
    "stack.default": lambda x, y: aten.stack.default([x, y], 1), "pow.Scalar": lambda x, y: aten.pow.Scalar(1.5, x),
    "where.self": lambda x, y: aten.where.self(x > y, x, y),
    "bitwise_not.default": lambda x, y: x * aten.bitwise_not.default(x > 0),
    "logical_not.default": lambda x, y: x * aten.logical_not.default(x > 0),
    "_to_copy.default": lambda x, y: aten._to_copy.default(x, dtype=torch.bfloat16),
    "clone.default": lambda x, y: aten.clone.default(x.transpose(1, 3), memory_format=torch.contiguous_format),
    "div.Tensor_mode": lambda x, y: x * aten.div.Tensor_mode(x, y, rounding_mode="floor"),
    "div.Scalar_mode": lambda x, y: x * aten.div.Scalar_mode(x, 0.3, rounding_mode="trunc"),
    "squeeze.default": lambda x, y: aten.squeeze.default(x[:1]),
    "embedding.default": lambda x, y: aten.embedding.default(x[0, 0], torch.tensor([[5, 0], [5, 2]])),
    "upsample_linear1d.default": lambda x, y: aten.upsample_linear1d.default(x[0], [9], False),
    "upsample_trilinear3d.default": lambda x, y: aten.upsample_trilinear3d.default(x[None], [3, 9, 7], False),
    "upsample_nearest1d.default": lambda x, y: aten.upsample_nearest1d.default(x[0], [9]),
    "upsample_nearest3d.default": lambda x, y: aten.upsample_nearest3d.default(x[None], [3, 9, 7]),
    "view.dtype": lambda x, y: x * aten.view.dtype(x.detach(), INTEGERS[x.itemsize]),
}  # fmt: skip
IN_PLACE_CALLS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "div.Tensor_mode": lambda operation, x, y: operation(x, y, rounding_mode="floor"),
    "div.Scalar_mode": lambda operation, x, y: operation(x, 0.3, rounding_mode="trunc"),
    "addcmul.default": lambda operation, x, y: operation(x, y, y),
    "addcdiv.default": lambda operation, x, y: operation(x, y, y),
    "bitwise_not.default": lambda operation, x, y: x * operation(y > 1),
}


def name_of(operation: Any) -> str:
    return str(operation).removeprefix("aten.")


def is_seen(operation: Any) -> bool:
    """Return whether recordings see an overload: not if it consists of others, or is only for TorchScript."""
    keys = torch._C.DispatchKey
    try:
        return not torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), keys.CompositeImplicitAutograd)
    except RuntimeError:
        return False


def pointwise() -> list[Any]:
    """Return the pointwise operations of torch that are recomputed and that recordings see."""
    names = [each.removeprefix("aten::").partition(".") for each in torch._C._dispatch_get_all_op_names()]
    operations = [getattr(getattr(aten, name, None), overload or "default", None) for name, _, overload in names]
    tagged = [each for each in operations if torch.Tag.pointwise in getattr(each, "tags", ())]
    return [each for each in tagged if rule_of(each) is not None and is_seen(each)]


POINTWISE = pointwise()
LISTED = {operation: rule for operation, rule in RULES.items() if is_seen(operation)}
#: The operations that the tables above have arguments for.
ROWS = {
    operation: rule
    for operation, rule in LISTED.items()
    if operation not in POINTWISE or name_of(rule.repeat) in {**ARGUMENTS, **CALLS}
}


def functional(operation: Any) -> Any:
    """Return an operation, or its functional variant if it overwrites its input."""
    return ROWS[operation].repeat if ROWS[operation].overwrites else operation


def example(operation: Any, rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a program in which a product saves the output of a row, called with products of its inputs."""
    name = name_of(functional(operation))

    def program(x: Tensor, y: Tensor) -> Tensor:
        x, y = (x * y).abs() + 0.5, y * y + 0.5
        if rule.overwrites:
            z = x * 1.5  # the tensor that is overwritten, which nobody else needs
            if name in IN_PLACE_CALLS:
                out = IN_PLACE_CALLS[name](operation, z, y)
            else:
                out = operation(z, *ARGUMENTS[name](x, y))
        elif name in CALLS:
            out = CALLS[name](x, y)
        else:
            out = operation(x, *ARGUMENTS[name](x, y))
        out = out[0] if isinstance(out, (tuple, list)) else out
        return ((out if out.is_floating_point() else x * out) ** 2).sin()

    return program


def repeated_by(program: Callable[..., Tensor], *inputs: Tensor) -> set[Any]:
    """Return the operations that recipes repeat in backward."""
    repeated: set[Any] = set()
    compute = recipes.compute

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            repeated.add(operation)
            return operation(*args, **(kwargs or {}))

    def watched(value: TrackedTensor, keeps: Callable[[TrackedTensor], bool]) -> Tensor:
        with Seen():
            return compute(value, keeps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "compute", watched)
        gradients_of(program, inputs, with_recipes=True, num_passes=2)
    return repeated


@pytest.mark.parametrize(
    "operation", [each for each in ROWS if each not in {aten.alias.default, aten.detach.default}], ids=name_of
)
def test_every_rule_recomputes_bit_identical_to_autograd(operation: Any) -> None:
    program, repeat = example(operation, ROWS[operation]), functional(operation)
    assert repeated_by(program, X, Y) & {repeat, in_place_of(repeat)}
    assert_same(program, X, Y)
    for change in ({"dtype": torch.bfloat16}, {"memory_format": torch.channels_last}):
        x, y = X.to(**change), Y.to(**change)
        if runs(program, x, y):  # torch lacks some operations
            assert_same(program, x, y)


def test_recordings_cover_every_listed_operation() -> None:
    names = {each for kind in (OTHERS, ENLARGING, VIEWS) for each in kind}
    assert names <= {name_of(functional(operation)).partition(".")[0] for operation in ROWS}


def called_by_schema(operation: Any, x: Tensor, y: Tensor) -> Any:
    """Return the result of a pointwise operation whose tensors are x, then y, with numbers of their types."""
    tensors = iter((x, y, y))
    numbers = {"float": 0.5, "number": 0.5 if x.is_floating_point() else 1, "int": 1, "bool": True}
    args, keywords = [], {}
    for each in operation._schema.arguments:
        kind = str(each.type)
        if not each.has_default_value():
            value = next(tensors) if kind == "Tensor" else numbers.get(kind)
            if each.kwarg_only:
                keywords[each.name] = value
            else:
                args.append(value)
    return operation(*args, **keywords)


def test_pointwise_operations_are_recomputed_bit_identically() -> None:
    for operation in POINTWISE:

        def program(x: Tensor, y: Tensor, change: Callable[[Tensor], Tensor], operation: Any = operation) -> Tensor:
            x, y = (x * y).sigmoid(), y.sigmoid()
            out = called_by_schema(operation, change(x), change(y))
            out = out[0] if isinstance(out, (tuple, list)) else out
            return (out.float() * y).sin()

        # Some have no derivative, and some are for integers or Booleans.
        changes = (lambda x: x * 1, lambda x: x.detach() * 1, lambda x: (6 * x).long(), lambda x: x > 0.5)
        programs = [partial(program, change=each) for each in changes]
        found = next((each for each in programs if runs(each, X, Y)), None)
        assert found is not None or operation in ROWS, name_of(operation)
        if found is not None:
            plain, lean = (gradients_of(found, (X, Y), with_recipes=each) for each in (False, True))
            for expected, actual in zip(plain, lean, strict=True):
                assert torch.equal(expected.view(torch.int32), actual.view(torch.int32)), name_of(operation)


@pytest.mark.parametrize(("smaller", "larger"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_values_written_into_tensor_are_rounded_to_its_dtype(smaller: torch.dtype, larger: torch.dtype) -> None:
    """The operation that only returns the same would return the larger dtype."""
    for operation, rule in ROWS.items():

        def program(x: Tensor, y: Tensor, operation: Any = operation, name: str = name_of(rule.repeat)) -> Tensor:
            z, y = ((x * y).abs() + 0.5).to(smaller), (y * y + 0.5).to(larger)
            write = IN_PLACE_CALLS.get(name)
            out = operation(z, *ARGUMENTS[name](z, y)) if write is None else write(operation, z, y)
            return (out * out).sin()

        if rule.overwrites and runs(program, X, Y):
            try:
                assert_same(program, X, Y)
            except AssertionError as error:
                raise AssertionError(name_of(operation)) from error


def test_other_norms_without_compiled_kernels_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning about the norms of this package is for those who use them."""
    monkeypatch.setitem(backend.DEVICES, "native", ("cpu", lambda: "not built"))
    backend._warn_of_reference.cache_clear()
    norm = lean(torch.nn.Sequential(torch.nn.BatchNorm2d(16), torch.nn.ReLU()))
    with backend.force_back_end("auto"):
        norm(torch.randn(2, 16, 4, 4)).sum().backward()
    assert backend._warn_of_reference.cache_info().currsize == 0
