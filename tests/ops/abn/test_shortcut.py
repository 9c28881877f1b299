"""Norm, residual sum and activation in one operation against float64 autograd, and the limits of its precision."""

from __future__ import annotations

import pytest
import torch

from tests.formula import activated_batch_norm, relative_error
from tests.ops.abn.test_functional import ACTIVATIONS, make, run, run_formula
from tests.refusals import refused
from zoo.ops.abn.functional import inplace_abn

SHAPE = (3, 4, 6, 5)
# The smaller the last scale, the fewer digits of x_hat the sum retains.
LAST_SCALES = [1.0, 0.2, 1e-2, 1e-3, 0.0]


def make_with_shortcut(shape=SHAPE, dtype=torch.float64, weight=None):
    x, w, b, dz = make(shape, dtype, weight)
    shortcut = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    return x, w, b, dz, shortcut


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("shape", [SHAPE, (4, 3), (1, 1, 7, 5)])
def test_float64_outputs_and_gradients_equal_autograd_of_formula(shape, activation, param, inplace):
    case = make_with_shortcut(shape)
    settings = {"activation": activation, "activation_param": param}
    for ours, truth in zip(run(*case, inplace=inplace, **settings), run_formula(*case, **settings), strict=True):
        assert relative_error(ours, truth) < 1e-10


@pytest.mark.parametrize("scale", LAST_SCALES)
def test_float32_is_as_exact_as_its_rounding_over_scale_allows(scale):
    case = make_with_shortcut((6, 4, 9, 7), torch.float32, torch.full((4,), scale, dtype=torch.float64))
    lost = torch.finfo(torch.float32).eps * 2 / (scale + 1e-5)  # rms of the sum: below 2
    for name, ours, truth in zip(["z", "dx", "dw", "db", "ds"], run(*case), run_formula(*case), strict=True):
        assert relative_error(ours, truth) < 1e-5 + (0 if name in ("z", "ds", "db") else 4 * lost)


@pytest.mark.parametrize("scale", [1.0, 0.2, 1e-2])
@pytest.mark.parametrize(("dtype", "worst"), [(torch.bfloat16, 0.35), (torch.float16, 0.05)])
def test_half_precision_is_accurate_where_scale_follows_rule(dtype, worst, scale):
    case = make_with_shortcut((6, 4, 9, 7), dtype, torch.full((4,), scale, dtype=torch.float64))
    for ours, truth in zip(run(*case), run_formula(*case), strict=True):
        ours, truth = ours.double(), truth.double()
        # the root mean square: single elements next to the activation's kink differ by more
        assert (ours - truth).square().mean().sqrt() < worst * truth.square().mean().sqrt()


def test_half_precision_with_scale_of_zero_loses_gradient_of_scale():
    case = make_with_shortcut((6, 4, 9, 7), torch.bfloat16, torch.zeros(4, dtype=torch.float64))
    ours, truth = run(*case)[2], run_formula(*case)[2]
    assert relative_error(ours, truth) > 0.5


def test_evaluation_uses_running_statistics_and_gives_gradients_of_constants():
    x, w, b, dz, shortcut = make_with_shortcut()
    mean, var = torch.randn(4).double(), torch.rand(4).double() + 0.5
    leaves = [t.clone().requires_grad_() for t in (x, shortcut, w, b)]
    z = inplace_abn(leaves[0] * 1, *leaves[2:], mean, var, training=False, shortcut=leaves[1])
    truth_leaves = [t.clone().requires_grad_() for t in (x, shortcut, w, b)]
    truth = activated_batch_norm(truth_leaves[0], *truth_leaves[2:], statistics=(mean, var), shortcut=truth_leaves[1])
    assert relative_error(z, truth) < 1e-12
    for ours, expected in zip(
        torch.autograd.grad(z, leaves, dz), torch.autograd.grad(truth, truth_leaves, dz), strict=True
    ):
        assert relative_error(ours, expected) < 1e-10


def test_only_result_is_new_and_shortcut_stays_unchanged():
    x, w, b, _, shortcut = make_with_shortcut()
    kept = []
    leaf, shortcut_leaf = x.clone().requires_grad_(), shortcut.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        z = inplace_abn(leaf * 1, w, b, None, None, shortcut=shortcut_leaf)
    big = {t.data_ptr() for t in kept if t.numel() == x.numel()}
    assert big == {z.data_ptr(), shortcut_leaf.data_ptr()} | ({leaf.data_ptr()} & big)
    assert torch.equal(shortcut_leaf, shortcut)


def test_shortcut_overwritten_before_backward_raises():
    x, w, b, dz, shortcut = make_with_shortcut()
    s = shortcut.clone()
    z = inplace_abn(x.clone().requires_grad_() * 1, w, b, None, None, shortcut=s)
    s.zero_()
    refused(RuntimeError, lambda: z.backward(dz), "modified by an inplace operation")


@pytest.mark.parametrize("bad", [torch.zeros(3, 4, 6, 1).double(), torch.zeros(SHAPE)])
def test_shortcut_of_another_shape_or_dtype_raises(bad):
    x, w, b, _, _ = make_with_shortcut()
    refused(ValueError, lambda: inplace_abn(x, w, b, None, None, shortcut=bad), "shortcut")


@pytest.mark.parametrize("layout", ["channels_last", "strided"])
def test_layouts_may_differ_between_input_and_shortcut(layout):
    x, w, b, dz, shortcut = make_with_shortcut()
    other = shortcut.to(memory_format=torch.channels_last) if layout == "channels_last" else shortcut.mT.clone().mT
    for ours, same in zip(run(x, w, b, dz, other), run(x, w, b, dz, shortcut), strict=True):
        assert relative_error(ours, same) < 1e-12


def test_shortcut_aliasing_the_input_raises():
    x, w, b, _, _ = make_with_shortcut()
    refused(ValueError, lambda: inplace_abn(x, w, b, None, None, shortcut=x.view(-1).view(x.shape)), "share memory")
    assert inplace_abn(x, w, b, None, None, shortcut=x, inplace=False).isfinite().all()
