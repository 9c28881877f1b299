"""The fused operation against float64 autograd of its formula: outputs, all gradients, running statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.formula import activated_batch_norm, relative_error
from tests.refusals import refused
from zoo.layers import InPlaceABN
from zoo.ops.abn.functional import inplace_abn

ACTIVATIONS = [("leaky_relu", 0.01), ("leaky_relu", 0.3), ("elu", 1.0), ("elu", 0.5), ("identity", 0.01)]
SHAPES = [(4, 3), (2, 1, 5), (1, 5, 7, 5), (3, 4, 6, 6), (2, 3, 2, 3, 4), (8, 17, 1, 1)]


def make(shape, dtype=torch.float64, weight=None, seed=0):
    """Return x, weight, bias and a gradient of the output, away from the activation's kink at 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 0.5
    w = torch.randn(shape[1], generator=generator, dtype=torch.float64) if weight is None else weight
    b = torch.randn(shape[1], generator=generator, dtype=torch.float64) * 0.5
    dz = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), w.to(dtype), b.to(dtype), dz.to(dtype)


def run(x, w, b, dz, shortcut=None, **settings):
    """Return z and the gradients of x, weight, bias and the shortcut, if given, of the operation under test."""
    leaves = [t.clone().requires_grad_() for t in (x, w, b, shortcut) if t is not None]
    z = inplace_abn(
        leaves[0] * 1, *leaves[1:3], None, None, shortcut=None if shortcut is None else leaves[3], **settings
    )
    return z, *torch.autograd.grad(z, leaves, dz)


def run_formula(x, w, b, dz, shortcut=None, **settings):
    leaves = [t.double().clone().requires_grad_() for t in (x, w, b, shortcut) if t is not None]
    z = activated_batch_norm(*leaves[:3], shortcut=None if shortcut is None else leaves[3], **settings)
    return z, *torch.autograd.grad(z, leaves, dz.double())


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float64_outputs_and_gradients_equal_autograd_of_formula(shape, activation, param):
    case = make(shape)
    settings = {"activation": activation, "activation_param": param}
    for ours, truth in zip(run(*case, **settings), run_formula(*case, **settings), strict=True):
        assert relative_error(ours, truth) < 1e-10


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_agrees_within_its_own_rounding(dtype, activation, param):
    weight = torch.tensor([1.0, -0.7, 0.4, 1.5], dtype=torch.float64)
    case = make((6, 4, 9, 7), dtype, weight)
    settings = {"activation": activation, "activation_param": param}
    eps = torch.finfo(dtype).eps
    for ours, truth in zip(run(*case, **settings), run_formula(*case, **settings), strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, truth) < 16 * eps


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity"])
def test_half_precision_input_keeps_float32_statistics(activation):
    x, w, b, dz = make((6, 4, 9, 7), torch.float32, torch.tensor([1.0, -0.7, 0.4, 1.5]))
    running = [torch.zeros(4), torch.ones(4)]
    half = x.bfloat16()
    z = inplace_abn(half.clone(), w, b, *running, momentum=1.0, activation=activation)
    assert z.dtype == torch.bfloat16
    assert torch.allclose(running[0], half.float().mean((0, 2, 3)), rtol=1e-6)
    grads = [t.clone().requires_grad_() for t in (w, b)]
    inplace_abn(half.clone(), *grads, None, None, activation=activation).backward(dz.bfloat16())
    assert [g.grad.dtype for g in grads] == [torch.float32, torch.float32]


@pytest.mark.parametrize("scale", [-1.0, -1e-3, 0.0, 1e-6, 1e-3])
def test_negative_zero_and_tiny_scales_give_the_right_gradients(scale):
    case = make((4, 3, 6, 6), weight=torch.full((3,), scale, dtype=torch.float64))
    for ours, truth in zip(run(*case), run_formula(*case), strict=True):
        assert relative_error(ours, truth) < 1e-7


def test_derivative_of_scale_at_zero_is_plus_one():
    zero, above = torch.zeros(3, dtype=torch.float64), torch.full((3,), 1e-30, dtype=torch.float64)
    gradients = [run(*make((4, 3, 6, 6), weight=weight))[2] for weight in (zero, above)]
    assert gradients[0].abs().min() > 0
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("momentum", [0.3, 1, None])
@pytest.mark.parametrize("inplace", [True, False])
def test_batches_are_counted_where_running_statistics_update(inplace, momentum, dtype):
    x, w, b, _ = make((4, 3, 5, 5))
    mean, var = torch.full((3,), 2.0).double(), torch.full((3,), 3.0).double()
    num_batches = torch.tensor(3, dtype=dtype)
    inplace_abn(x.clone(), w, b, mean, var, momentum=momentum, inplace=inplace, num_batches=num_batches)
    moved = 0.25 if momentum is None else momentum
    assert num_batches == 4
    assert num_batches._version == 1
    assert torch.allclose(mean, (1 - moved) * 2 + moved * x.mean((0, 2, 3)))
    inplace_abn(x.clone(), w, b, mean, var, training=False, inplace=inplace, num_batches=num_batches)
    refused(
        ValueError,
        lambda: inplace_abn(x[:1, :, :1, :1], w, b, mean, var, inplace=inplace, num_batches=num_batches),
        "value per channel",
    )
    assert num_batches == 4


def test_cumulative_average_without_num_batches_raises():
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    before = x.clone()
    refused(ValueError, lambda: inplace_abn(x, None, None, mean, var, momentum=None), "num_batches", "momentum")
    assert torch.equal(x, before)
    assert not mean.any()


def test_nan_in_unused_running_buffers_does_not_reach_output():
    x, w, b, _ = make((4, 3, 5, 5))
    poison = torch.full((3,), torch.nan).double()
    assert inplace_abn(x.clone(), w, b, poison, poison.clone(), training=True).isfinite().all()


def test_input_is_overwritten_and_only_output_is_saved():
    x = torch.randn(4, 3, 6, 6).mul(1.0).requires_grad_() * 1
    storage = x.data_ptr()
    z = inplace_abn(x, torch.ones(3), torch.zeros(3), None, None)
    assert z.data_ptr() == storage
    kept = {t.data_ptr(): t.numel() for t in z.grad_fn.saved_tensors if t is not None}
    assert sum(numel for pointer, numel in kept.items() if pointer != storage) <= 4 * 3


@pytest.mark.parametrize("kind", ["expanded", "shared", "transposed", "channels_last"])
def test_incoming_gradients_are_never_overwritten(kind):
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    dz = {
        "expanded": torch.ones((), dtype=torch.float64).expand(4, 3, 6, 6),
        "shared": torch.randn(4, 3, 6, 6, dtype=torch.float64),
        "transposed": torch.randn(4, 3, 6, 6, dtype=torch.float64).transpose(2, 3),
        "channels_last": torch.randn(4, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last),
    }[kind]
    before = dz.clone()
    z = inplace_abn(x * 1, w, None, None, None)
    other = x * 1
    (grad,) = torch.autograd.grad([z, other], x, [dz, dz])
    truth_leaf = x.detach().clone().requires_grad_()
    (truth,) = torch.autograd.grad(activated_batch_norm(truth_leaf, w, None), truth_leaf, before)
    assert torch.equal(dz, before)
    assert relative_error(grad, truth + before) < 1e-12


@pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d", "strided", "transposed", "permuted batch"])
def test_every_layout_gives_values_and_preserves_strides(layout):
    x = torch.randn(4, 3, 6, 8, dtype=torch.float64)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "channels_last_3d":
        x = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64).to(memory_format=torch.channels_last_3d)
    elif layout == "strided":
        x = torch.randn(4, 6, 6, 16, dtype=torch.float64)[:, ::2, :, ::2]
    elif layout == "transposed":
        x = x.transpose(2, 3)
    else:
        x = torch.randn(3, 4, 6, 8, dtype=torch.float64).transpose(0, 1)
    truth = activated_batch_norm(x, None, None)
    strides = x.stride()
    z = inplace_abn(x, None, None, None, None)
    assert relative_error(z, truth) < 1e-12
    assert z.stride() == strides


def test_func_grad_equals_backward_and_updates_buffers():
    x, w, b, dz = make((4, 3, 5, 5))

    def loss(x, w, b, mean, var):
        mean, var = mean.clone(), var.clone()
        return (inplace_abn(x * 1, w, b, mean, var) * dz).sum(), mean

    buffers = torch.zeros(3).double(), torch.ones(3).double()
    gradients, mean = torch.func.grad(loss, (0, 1, 2), has_aux=True)(x, w, b, *buffers)
    for ours, truth in zip(gradients, run_formula(x, w, b, dz)[1:], strict=True):
        assert relative_error(ours, truth) < 1e-10
    assert torch.allclose(mean, 0.1 * x.mean((0, 2, 3)))


def test_only_requested_gradients_are_computed():
    x, w, b, dz = make((4, 3, 5, 5))
    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        leaves = [t.detach().clone().requires_grad_(flag) for t, flag in zip((x, w, b), wanted, strict=True)]
        inplace_abn(leaves[0] * 1, *leaves[1:], None, None).backward(dz)
        truths = run_formula(x, w, b, dz)[1:]
        for leaf, flag, truth in zip(leaves, wanted, truths, strict=True):
            assert (leaf.grad is not None) == flag
            assert not flag or relative_error(leaf.grad, truth) < 1e-10


def _base(requires_grad: bool) -> Tensor:
    x = torch.randn(4, 8, 3, 3).requires_grad_(requires_grad)
    return x * 1


def _view_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[:, :4]


INPUTS = {
    "expanded": lambda x: x[:, :1].expand(4, 4, 3, 3),
    "expanded over the batch": lambda x: x[:1, :4].expand(4, 4, 3, 3),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "split": lambda x: x.split(4, 1)[1],
    "unbind": lambda x: x.view(2, 2, 8, 3, 3)[:, :, :4].unbind(0)[0],
    "view without grad": _view_without_grad,
    "slice": lambda x: x[:, :4],
    "view": lambda x: x.view(8, 4, 3, 3),
    "transposed": lambda x: x[:, :4].transpose(2, 3),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("kind", INPUTS)
def test_any_input_raises_or_equals_reference(kind: str, requires_grad: bool, grad: bool) -> None:
    torch.manual_seed(0)
    norm, x = InPlaceABN(4), INPUTS[kind](_base(requires_grad))
    before, given = {key: value.clone() for key, value in norm.state_dict().items()}, x.detach().clone()
    failure, y = None, x
    with torch.set_grad_enabled(grad):
        try:
            y = norm(x)
        except RuntimeError as error:
            failure = str(error)
    if failure is None:
        expected = torch.nn.functional.leaky_relu(torch.nn.BatchNorm2d(4)(given), 0.01)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert "expanded" not in kind
        return
    assert "cannot be overwritten; put an operation before the norm" in failure
    assert all(map(torch.equal, norm.state_dict().values(), before.values()))
    assert torch.equal(x.detach(), given)
    assert kind not in ("slice", "view", "transposed")
