"""The compiled CPU kernels against reference.py in float64, which is tested against autograd of the formula."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.formula import relative_error
from tests.ops.back_ends import needs
from tests.ops.norm_cases import LAYOUTS, lay_out
from tests.ops.threads import num_threads
from tests.refusals import refused
from zoo.ops.abn.kernels import KERNELS
from zoo.ops.abn.reference import NormSettings, update_running
from zoo.ops.operators import accumulate_dtype

native, reference = KERNELS["native"], KERNELS["reference"]

pytestmark = needs("native")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [("leaky_relu", 0.01), ("elu", 1.0), ("identity", 0.0)]
# One channel; one value per channel; sizes that no vector length divides; planes shorter and longer than a vector and
# than what is summed at once; more channels than a period; tensors that are split between threads; empty tensors.
SHAPES = [
    (2, 3, 7, 5),
    (1, 1, 7, 5),
    (3, 1, 1, 1),
    (5, 17),
    (33, 700),
    (4, 6, 3),
    (2, 3, 71, 67),
    (2, 70, 4, 4),
    (2, 3, 2, 5, 4),
    (3, 40, 29, 31),
    (1, 2, 301, 300),
    (0, 3, 4, 4),
    (2, 0, 4, 4),
    (2, 3, 0, 4),
]


def make(shape, dtype=torch.float64, layout="contiguous", seed=0):
    """Return x, dz, shortcut, and weight (of both signs) and bias; float64 parameters for float64 only."""
    generator = torch.Generator().manual_seed(seed)
    x, dz, shortcut = torch.randn(3, *shape, generator=generator, dtype=torch.float64) * 2 + 0.5
    x, dz, shortcut = (lay_out(t.to(dtype), layout) for t in (x, dz, shortcut))
    weight, bias = torch.rand(2, shape[1], generator=generator, dtype=accumulate_dtype(dtype)) + 0.4
    weight[1::2] *= -1
    return x, dz, shortcut, weight, bias - 0.9


def exact(function, *arguments):
    """Return the results of a reference function for the arguments in float64."""

    def convert(value):
        if isinstance(value, tuple):
            items = [convert(item) for item in value]
            return NormSettings(*items) if isinstance(value, NormSettings) else tuple(items)
        return value.double() if isinstance(value, Tensor) else value

    return function(*map(convert, arguments))


def assert_near(ours, truths, tolerance: float) -> None:
    for mine, truth in zip(ours, truths, strict=True):
        assert (mine is None) == (truth is None)
        assert mine is None or (mine.shape == truth.shape and relative_error(mine, truth) < tolerance)


def located(mean, var):
    """Return mean and standard deviation in one tensor, so that errors of the mean are relative to the deviation."""
    return torch.stack([mean, var.sqrt()])


def compare(x, dz, shortcut, settings, evaluation=False):
    """Compare the five functions with the reference in float64, each given the same inputs."""
    unit, accumulated = torch.finfo(x.dtype).eps, torch.finfo(accumulate_dtype(x.dtype)).eps
    if x.dtype == torch.float64:  # here the reference rounds like the kernels
        unit, accumulated = 16 * unit, 16 * accumulated
    mean, var = native.statistics(x)
    assert mean.dtype == var.dtype == accumulate_dtype(x.dtype)
    assert_near([located(mean, var)], [located(*exact(reference.statistics, x))], 8 * accumulated)
    z, again = native.apply(x, mean, var, settings, shortcut), x.clone()
    assert_near([z], [exact(reference.apply, x, mean, var, settings, shortcut)], 8 * unit)
    native.apply_(again, mean, var, settings, shortcut)
    assert torch.equal(again, z)
    sums = native.backward_reduce(z, dz, settings, shortcut)
    assert_near(sums, exact(reference.backward_reduce, z, dz, settings, shortcut), 512 * accumulated)
    count = max(1, x.numel() // max(1, x.shape[1]))
    means = None if evaluation else (sums[0] / count, sums[1] / count)
    gradients, tolerance = native.backward_apply(z, dz, var, means, settings, shortcut), 8 * unit + 512 * accumulated
    assert_near(gradients, exact(reference.backward_apply, z, dz, var, means, settings, shortcut), tolerance)
    assert z.dtype == gradients[0].dtype == x.dtype
    return mean, var, z, *sums, *gradients


@pytest.mark.parametrize(
    ("dtype", "layout", "activation", "param"),
    [
        *((dtype, layout, *activation) for dtype in DTYPES for layout in LAYOUTS for activation in ACTIVATIONS),
        *(
            (torch.float32, layout, *activation)
            for layout in LAYOUTS
            for activation in [("leaky_relu", 2.0), ("elu", 0.3)]
        ),
        *((dtype, "strided", "leaky_relu", 0.01) for dtype in DTYPES),
    ],
)
def test_every_function_agrees_with_reference_in_float64(dtype, layout, activation, param):
    for shape in SHAPES:
        x, dz, shortcut, weight, bias = make(shape, dtype, layout)
        if activation == "elu":  # avoid saturation, which has a separate test
            shortcut, weight, bias = (t / 4 for t in (shortcut, weight, bias))
        settings = NormSettings(weight, bias, 1e-5, activation, param)
        compare(x, dz, None, settings)
        compare(x, dz, shortcut, settings)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("parameters", ["none", "weight", "bias", "float64", "bfloat16", "strided"])
def test_parameters_may_be_missing_or_of_another_dtype_and_stride(parameters, evaluation):
    x, dz, shortcut, weight, bias = make((4, 37, 9, 7), torch.float32)
    if parameters in ("float64", "bfloat16"):
        weight, bias = (t.to(getattr(torch, parameters)) for t in (weight, bias))
    elif parameters == "strided":
        weight, bias = torch.stack([weight, bias], dim=1).unbind(1)
    settings = NormSettings(
        None if parameters in ("none", "bias") else weight, None if parameters in ("none", "weight") else bias, 1e-3,
        "leaky_relu", 0.01,
    )  # fmt: skip
    compare(x, dz, None, settings, evaluation)
    compare(x, dz, shortcut, settings, evaluation)


@pytest.mark.parametrize("function", ["elu", "log1p"])
def test_exp_and_log_are_accurate_to_few_ulps_of_float32(function):
    y = -torch.logspace(-30, 1.2, 40007).view(1, 1, -1)
    zero, one, settings = torch.zeros(1), torch.ones(1), NormSettings(None, None, 0.0, "elu", 1.0)
    if function == "elu":
        ours, truth = native.apply(y, zero, one, settings), torch.expm1(y.double())
    else:
        z = y[y > -1 + 2**-23].view(1, 1, -1)
        ours = native.backward_apply(z, torch.zeros_like(z), one, (zero, -one), settings)[0]
        truth = torch.log1p(z.double())
    assert ((ours.double() - truth) / truth).abs().max() < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_numbers_are_rounded_like_torch(dtype, layout):
    """With the identity: every number of the dtype, the midpoints between them, and values out of range."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    settings = NormSettings(None, None, 0.0, "identity", 0.0)
    x = lay_out(every.view(1, 2, -1), layout)
    assert native.apply(x, torch.zeros(2), torch.ones(2), settings).equal(x) or torch.equal(
        native.apply(x, torch.zeros(2), torch.ones(2), settings).nan_to_num(7), x.nan_to_num(7)
    )
    for scale in (1 + 2**-11, 3.0, 2.0**-14, 2.0**20, 1 / 3):
        var = torch.full((2,), 1 / scale**2, dtype=torch.float64).float()
        slope = 1 / var.sqrt()
        ours, truth = native.apply(x, torch.zeros(2), var, settings), (x.float() * slope.view(1, 2, 1)).to(dtype)
        assert torch.equal(ours.isnan(), truth.isnan())
        assert torch.equal(ours.nan_to_num(7), truth.nan_to_num(7))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_misaligned_halves_are_bit_identical(dtype, layout):
    """They are read and written in pairs or more, at any address and for any number of elements."""
    for shape in ((3, 5, 7, 7), (5, 17), (3, 1, 1, 1), (3, 1, 4, 1), (2, 3, 71, 67)):
        x, dz, shortcut, weight, bias = make(shape, dtype, layout)
        settings = NormSettings(weight, bias, 1e-5, "leaky_relu", 0.01)
        expected = compare(x, dz, shortcut, settings)
        odd = [torch.full((x.numel() + 2,), 7, dtype=dtype) for _ in range(3)]
        views = [memory[1:-1].as_strided(x.shape, x.stride()) for memory in odd]
        for view, values in zip(views, (x, dz, shortcut), strict=True):
            view.copy_(values)
        ours = compare(*views, settings)
        assert all(torch.equal(mine, truth) for mine, truth in zip(ours, expected, strict=True))
        native.apply_(views[0], *ours[:2], settings, views[2])
        assert torch.equal(views[0], ours[2])
        assert all(memory[[0, -1]].tolist() == [7, 7] for memory in odd)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_and_in_its_channel(dtype, layout):
    x, dz, _, weight, bias = make((3, 4, 6, 7), dtype, layout)
    x[1, 2, 3, 3] = torch.nan
    weight[0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the NaN with all bits set
    settings = NormSettings(weight, bias, 1e-5, "leaky_relu", 0.01)
    mean, var = native.statistics(x)
    z = native.apply(x, mean, var, settings)
    sums = native.backward_reduce(z, dz, settings)
    dx, _ = native.backward_apply(z, dz, var, sums, settings)
    assert var.isnan().tolist() == [False, False, True, False]
    for t in (z, dx):
        assert t.isnan().all(dim=3).all(dim=2).all(dim=0).tolist() == [True, False, True, False]
        assert not t[:, 1::2].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_repeat_with_the_same_number_of_threads(layout):
    x, dz, shortcut, weight, bias = make((8, 30, 33, 17), torch.float32, layout)
    settings = NormSettings(weight, bias, 1e-5, "leaky_relu", 0.01)
    results = {}
    for count in (1, 2, 3, 2):
        with num_threads(count):
            result = compare(x, dz, shortcut, settings)
        for ours, before in zip(result, results.setdefault(count, result), strict=True):
            assert torch.equal(ours, before)
    for count in (2, 3):
        for ours, truth in zip(results[count], results[1], strict=True):
            assert relative_error(ours, truth) < 1e-5


def test_threads_write_all_values_of_few_planes():
    """Memory that was NaN before comes back from the allocator as the output."""
    settings = NormSettings(None, None, 1e-5, "leaky_relu", 0.01)
    for count, shape in ((3, (1, 1, 257, 311)), (7, (1, 3, 263, 269)), (5, (2, 1000, 33)), (4, (70001, 3))):
        with num_threads(count):
            x, dz = torch.randn(2, *shape)
            mean, var = native.statistics(x)
            poison = [torch.full(shape, torch.nan) for _ in range(4)]
            del poison
            z = native.apply(x, mean, var, settings)
            assert_near([z], [exact(reference.apply, x, mean, var, settings)], 1e-6)
            assert all(t.isfinite().all() for t in native.backward_apply(z, dz, var, (mean, var), settings, x))


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("shape", [(3, 20, 6, 5), (33, 700), (0, 3, 4, 4), (2, 0, 4, 4)])
def test_fused_backward_is_bit_identical_to_separate_steps(shape, layout, batch):
    x, dz, _, weight, bias = make(shape, torch.float32, layout)
    count = max(1, x.numel() // max(1, shape[1]))
    weight[:2] = torch.tensor([0.0, -0.0])[: len(weight)]  # the sign of both is +1
    for settings in (NormSettings(weight, bias, 1e-5, "leaky_relu", 0.01), NormSettings(None, None, 1e-5, "elu", 1.0)):
        mean, var = native.statistics(x)
        z = native.apply(x, mean, var, settings)
        sum_dy, sum_dy_xhat = native.backward_reduce(z, dz, settings)
        means = (sum_dy / count, sum_dy_xhat / count) if batch else None
        dx, dweight, dbias = native.backward(z, dz, var, count if batch else None, settings)
        assert torch.equal(dx, native.backward_apply(z, dz, var, means, settings)[0])
        if settings.weight is None:
            assert (dweight, dbias) == (None, None)
        else:
            assert torch.equal(dweight, sum_dy_xhat * (1 - 2 * (weight < 0).float()))
            assert torch.equal(dbias, sum_dy)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_large_planes_equals_reference(dtype, batch):
    """They are computed channel by channel; memory that was NaN before comes back from the allocator as dx."""
    x, dz, _, weight, bias = make((3, 13, 141, 133), dtype)
    settings = NormSettings(weight, bias, 1e-5, "leaky_relu", 0.01)
    mean, var = native.statistics(x)
    z = native.apply(x, mean, var, settings)
    sums = exact(reference.backward_reduce, z, dz, settings)
    num_values = 3 * 141 * 133 if batch else None
    means = tuple(t / num_values for t in sums) if batch else None
    expected = (
        exact(reference.backward_apply, z, dz, var.double(), means, settings)[0],
        sums[1] * weight.sign(),
        sums[0],
    )
    results = []
    for count in (1, 2, 3):
        with num_threads(count):
            poison = torch.full_like(z, torch.nan)
            del poison
            results.append(native.backward(z, dz, var, num_values, settings))
    unit, accumulated = torch.finfo(dtype).eps, torch.finfo(var.dtype).eps
    assert_near(results[0], expected, 8 * unit + 512 * accumulated)
    assert all(torch.equal(mine, first) for result in results for mine, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_running_statistics_update_like_separate_call(dtype, momentum):
    x = make((3, 20, 6, 5), torch.float32)[0]
    mean, var = native.statistics(x)
    truth, contiguous, strided = ([torch.full((20,), v, dtype=dtype) for v in (0.5, 2.0)] for _ in range(3))
    strided = [torch.stack([t, t], dim=1)[:, 1] for t in strided]
    update_running(*truth, mean, var, 90, momentum)
    for ours in (contiguous, strided):
        versions = [t._version for t in ours]
        for result, alone in zip(native.track_statistics(x, *ours, momentum), (mean, var), strict=True):
            assert torch.equal(result, alone)
        for running, expected, version in zip(ours, truth, versions, strict=True):
            assert running.dtype == dtype
            assert relative_error(running, expected) < torch.finfo(dtype).eps + 2e-7
            assert running._version > version


def test_running_statistics_of_another_size_raise_before_any_update():
    mean, var = torch.zeros(3), torch.ones(4)
    refused(RuntimeError, lambda: native.track_statistics(torch.ones(2, 3), mean, var, 0.1), "3 numbers", "4")
    assert not mean.any()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"x": torch.ones(3)}, ["tensor"]),
        ({"x": torch.ones(2, 3, dtype=torch.long)}, ["float32"]),
        ({"var": torch.ones(4)}, ["3 numbers", "got 4"]),
        ({"shortcut": torch.ones(2, 4)}, ["size 3", "dimension 1", "got 4"]),
        ({"shortcut": torch.ones(2, 3, 1)}, ["2 dimensions", "got 3"]),
    ],
)
def test_incompatible_tensors_raise_before_memory_is_accessed(change, names):
    given = {"x": torch.ones(2, 3), "mean": torch.zeros(3), "var": torch.ones(3), "shortcut": None} | change
    settings = NormSettings(None, None, 1e-5, "identity", 0)
    call = partial(native.apply, given["x"], given["mean"], given["var"], settings, given["shortcut"])
    refused(RuntimeError, call, *names)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck_accepts_every_operator(dtype, layout):
    x, dz, shortcut, weight, bias = make((2, 3, 4, 5), dtype, layout)
    mean, var = native.statistics(x)
    settings, means = (weight, bias, 1e-5, 0, 0.01), (mean, var)
    # The autograd Function above the operators has the gradients.
    tests = ("test_schema", "test_faketensor")
    for name, arguments in {
        "statistics": (x,),
        "apply": (x, mean, var, *settings, shortcut),
        "apply_": (x.clone(), mean, var, *settings, None),
        "backward_reduce": (x, dz, *settings, None),
        "backward_apply": (x, dz, var, None, None, *settings),
        "backward_apply_shortcut": (x, dz, var, *means, *settings, shortcut),
        "backward": (x, dz, var, True, *settings),
        "track_statistics": (x, mean.clone(), var.clone(), 0.1),
    }.items():
        torch.library.opcheck(getattr(torch.ops.zoo, f"abn_{name}").default, arguments, test_utils=tests)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_more_than_two_to_31_elements_are_right(layout):
    x = torch.zeros(2, 2, 2**29 + 5, dtype=torch.bfloat16)
    x = x if layout == "contiguous" else x.view(2, 2**29 + 5, 2).transpose(1, 2)
    x[0, 0], x[1, 0], x[1, 1, -1] = 1, 3, 4
    mean, var = native.statistics(x)
    assert_near((mean, var), (torch.tensor([2, 4 / (2**30 + 10)]), torch.tensor([1, 16 / (2**30 + 10)])), 1e-5)
    native.apply_(x, torch.tensor([2.0, 0.0]), torch.ones(2), NormSettings(None, None, 0.0, "leaky_relu", 0.5))
    for channel, values in ((0, (-0.5, 1.0)), (1, (0.0, 0.0))):
        for image, value in enumerate(values):
            assert (x[image, channel, :-1] == value).all()
    assert x[1, 1, -1] == 4
