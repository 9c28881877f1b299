"""Cases for the kernels of the norm, and the errors by which every back end is judged."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formula import activated_batch_norm, relative_error
from tests.ops import small_scales
from zoo.ops.abn import triton
from zoo.ops.abn.kernels import KERNELS
from zoo.ops.abn.reference import NormSettings
from zoo.ops.operators import accumulate_dtype

REFERENCE, TRITON = KERNELS["reference"], KERNELS["triton"]
ACTIVATIONS = {"leaky_relu": 0.01, "elu": 0.7, "identity": 0.01}
LAYOUTS = ["contiguous", "channels_last"]
FLOATS = ["float32", "bfloat16", "float16"]
# All activations in one dtype and each other dtype with one: the interpreter is slow.
KINDS = {"float64": [*ACTIVATIONS], "float32": ["elu"], "bfloat16": ["leaky_relu"], "float16": ["identity"]}


class Case(NamedTuple):
    """Arguments of the kernels: the ``layout`` of x, the ``gradient`` dz, and how many ``programs`` run at once."""

    dtype: str = "float32"
    layout: str = "contiguous"
    activation: str = "leaky_relu"
    shape: tuple[int, ...] = (3, 3, 7, 5)
    shortcut: bool = False
    affine: bool = True
    training: bool = True
    gradient: str = "same"
    mean: float = 0.5
    weight: float | tuple[float, ...] | None = None
    programs: int | None = None


CASES = {
    **{
        f"{dtype} {layout} {activation} {'with' if shortcut else 'without'} shortcut": Case(
            dtype, layout, activation, shortcut=shortcut
        )
        for dtype, activations in KINDS.items()
        for layout in LAYOUTS
        for activation in activations
        for shortcut in [activation == "leaky_relu"]
    },
    **{
        f"{what} {layout}": Case("float64", layout, **settings)
        for layout in LAYOUTS
        for what, settings in {
            "one channel": {"shape": (3, 1, 6, 6)},
            "one image": {"shape": (1, 3, 7, 5), "shortcut": True},
            "one position": {"shape": (9, 5, 1, 1)},
            "several splits": {"shape": (3, 2, 33, 41), "activation": "elu", "shortcut": True},
            "no affine": {"affine": False, "shortcut": True},
            "evaluation": {"training": False, "activation": "elu", "shortcut": True},
            "zero scale": {"weight": 0.0},
            "negative scale": {"weight": -0.7, "activation": "elu"},
            "tiny scale with shortcut": {"weight": 1e-3, "shortcut": True},
            "scales around zero": {"weight": (0.0, -0.0, 1e-3, -1e-4, 1.0), "shape": (6, 5, 13, 11), "shortcut": True},
            "expanded gradient": {"gradient": "expanded"},
            "transposed gradient": {"gradient": "transposed", "shortcut": True},
            "contiguous gradient": {"gradient": "contiguous"},
            "channels_last gradient": {"gradient": "channels_last", "shortcut": True},
            "strided gradient": {"gradient": "strided"},
        }.items()
    },
    "many channels": Case("float64", "channels_last", shape=(2, 200, 3, 3), shortcut=True),
    "many rows": Case("float64", "channels_last", shape=(1300, 3)),
    "many steps contiguous": Case("float64", shape=(80, 2, 8, 16), shortcut=True, programs=4),
    "many steps channels_last": Case("float64", "channels_last", shape=(4000, 3), shortcut=True, programs=3),
    "more strips than programs contiguous": Case("float64", shape=(3, 5, 8, 6), shortcut=True, programs=2),
    "more strips than programs channels_last": Case("float64", "channels_last", shape=(2, 200, 3, 3), programs=1),
    **{
        f"odd planes {dtype} {activation}{' with shortcut' if shortcut else ''}": Case(
            dtype, activation=activation, shape=(13, 16, 3, 5), shortcut=shortcut
        )
        for dtype, activations in KINDS.items()
        for activation in activations
        for shortcut in [activation == "leaky_relu"]
    },
    "odd planes in evaluation": Case("bfloat16", shape=(13, 16, 3, 5), training=False, shortcut=True),
    "odd planes of few images": Case("bfloat16", shape=(3, 16, 7, 7), shortcut=True),
    "odd planes in many steps": Case("float64", shape=(70, 6, 7, 3), shortcut=True, programs=5),
    "odd planes in more strips than programs": Case("float64", shape=(20, 6, 7, 11), shortcut=True, programs=3),
    "halves of vectors": Case("float16", shape=(14, 5, 14, 14), shortcut=True),
    "misaligned odd planes": Case("float64", "misaligned", shape=(5, 4, 3, 3)),
    "three spatial dimensions": Case("float64", "channels_last", shape=(2, 3, 2, 3, 4)),
    "transposed input": Case("float64", "transposed", shortcut=True, shape=(3, 4, 6, 6)),
    "strided input": Case("float64", "strided", shortcut=True),
    "misaligned input": Case("float64", "misaligned", shape=(3, 4, 4, 4)),
}


def lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
    if layout == "expanded":
        return x[:1, :, :1, :1].expand(x.shape)
    if layout == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x.contiguous()


def make(case: Case, device: str, exact: bool = False) -> tuple[Tensor, Tensor, Tensor | None, NormSettings]:
    """Return x, dz, shortcut and the settings of a case; with ``exact`` the same values in float64."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x, dz, shortcut = (torch.randn(case.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    channels = case.shape[1]
    weight = torch.linspace(-1.2, 1.6, channels) if case.weight is None else torch.tensor(case.weight).expand(channels)
    vectors = [weight, torch.linspace(0.6, -0.4, channels)]
    gradient = case.layout if case.gradient == "same" else case.gradient
    x, dz, shortcut, *vectors = (
        v.to(device, dtype).to(torch.float64 if exact else dtype) for v in (x * 2 + case.mean, dz, shortcut, *vectors)
    )
    x, dz, shortcut = lay_out(x, case.layout), lay_out(dz, gradient), lay_out(shortcut, case.layout)
    settings = NormSettings(
        *vectors if case.affine else (None, None), 1e-5, case.activation, ACTIVATIONS[case.activation]
    )
    return x, dz, shortcut if case.shortcut else None, settings


def running_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean and a variance other than the statistics of x."""
    vector = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
    return 0.3 * vector, 1.7 * vector


def run(
    kernels: Any, case: Case, device: str = "cpu", output: Tensor | None = None, exact: bool = False
) -> dict[str, Tensor]:
    """Return the results of the five kernels, called as by the autograd function; backward from ``output`` if given."""
    x, dz, shortcut, settings = make(case, device, exact)
    mean, var = kernels.statistics(x) if case.training else running_statistics(x)
    z = kernels.apply(x, mean, var, settings, shortcut)
    overwritten = lay_out(x.clone(), case.layout)
    kernels.apply_(overwritten, mean, var, settings, shortcut)
    output = z if output is None else output
    sums = kernels.backward_reduce(output, dz, settings, shortcut)
    means = tuple(s / (x.numel() / x.shape[1]) for s in sums) if case.training else None
    dx, dshortcut = kernels.backward_apply(output, dz, var, means, settings, shortcut)
    results = {"mean": mean, "var": var, "z": z, "z in place": overwritten, "dx": dx, "dbias": sums[0]}
    dweight = sums[1] if settings.weight is None else torch.where(settings.weight < 0, -sums[1], sums[1])
    results |= {"dweight": dweight} if case.affine else {}
    assert (dshortcut is None) == (shortcut is None)
    if kernels is not KERNELS["native"] or case.layout in LAYOUTS:  # the CPU kernels write no other layouts
        assert z.stride() == torch.empty_like(x).stride()
    return results | ({"dshortcut": dshortcut} if case.shortcut else {})


def run_formula(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Return the same results by float64 autograd of the formula."""
    x, dz, shortcut, settings = make(case, device, exact=True)
    weight, bias = (x.new_zeros(x.shape[1]) if v is None else v for v in settings[:2])
    leaves = [v.clone().requires_grad_() for v in (x, weight, bias, torch.zeros_like(x))]
    statistics = None if case.training else running_statistics(x)
    affine = leaves[1:3] if case.affine else (None, leaves[2])
    u = activated_batch_norm(leaves[0], *affine, settings.eps, "identity", statistics=statistics) + leaves[3]
    u = u if shortcut is None else u + shortcut
    z = {"elu": F.elu, "leaky_relu": F.leaky_relu}.get(settings.activation, lambda v, _: v)(
        u, settings.activation_param
    )
    gradients = torch.autograd.grad(z, leaves, dz, allow_unused=True)
    names = ("dx", "dweight", "dbias", "dshortcut")
    return {"z": z, "z in place": z, **dict(zip(names, gradients, strict=True))}


def measure(case: Case, device: str, kernels: Any) -> dict[str, dict[str, float]]:
    """Return the errors of every result against the formula and, from the same output, against the reference."""
    truth, plain = run_formula(case, device), run(REFERENCE, case, device)
    few = {"_resident_programs": lambda *_: case.programs, "_compiled": {}, "COMBINED_SPLITS": 2}
    with patch.multiple(triton, **few) if case.programs else nullcontext():
        ours = run(kernels, case, device)
    half = case.dtype in ("bfloat16", "float16")
    same_output = run(kernels, case, device, plain["z"]) if half else ours
    return {
        "formula": {name: relative_error(ours[name], truth[name]) for name in ours if name in truth},
        "reference": {name: relative_error(same_output[name], plain[name]) for name in ours},
        "dtypes": {name: ours[name].dtype == plain[name].dtype for name in ours},
    }


def assert_equals_the_formula(case: Case, result: dict[str, dict[str, float]]) -> None:
    tolerance = 1e-10 if case.dtype == "float64" else 16 * torch.finfo(getattr(torch, case.dtype)).eps
    assert {name: error for name, error in result["formula"].items() if not error < tolerance} == {}


def assert_equals_the_reference(case: Case, result: dict[str, dict[str, float]]) -> None:
    """Allow half precision one unit in the last place, which the interpreter truncates, and float32 another order."""
    accumulated = ("mean", "var", "dweight", "dbias")
    for name, error in result["reference"].items():
        half = case.dtype in ("bfloat16", "float16") and name not in accumulated
        unit = 1.01 * torch.finfo(getattr(torch, case.dtype)).eps
        assert error < (unit if half else 1e-10 if case.dtype == "float64" else 1e-5), (name, error)
    assert all(result["dtypes"].values())


def measure_large_mean(layout: str, device: str, kernels: Any) -> float:
    """Return the largest relative error of the variance of float32 values with a mean far above their deviation."""
    errors = []
    for shape in ((4, 3, 30, 40), (16, 3, 40, 50), (256, 24, 2, 2), (3000, 5)):
        x = 3000 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
        x[0] += 500  # unlike the other images
        x = lay_out(x.to(device), layout)
        errors.append(relative_error(kernels.statistics(x)[1], REFERENCE.statistics(x.double())[1]))
    return max(errors)


def measure_saturated(dtype: str, layout: str, device: str, kernels: Any) -> dict[str, Any]:
    """Return errors against the reference of an elu that saturates, and whether all is finite."""
    torch.manual_seed(0)
    x = torch.cat([torch.full((1, 2, 4, 4), -60.0), torch.randn(3, 2, 4, 4)]).to(device, getattr(torch, dtype))
    x, ones = lay_out(x, layout), torch.ones(2, device=device, dtype=accumulate_dtype(x.dtype))
    saturated, finite, errors, inverse_errors = [], [], [], []
    for alpha in (1.0, 0.1, 3.0):
        settings = NormSettings(30 * ones, -25 * ones, 1e-5, "elu", alpha)
        mean, var = REFERENCE.statistics(x)
        z = REFERENCE.apply(x, mean, var, settings)
        saturated.append(bool((z == -torch.tensor(alpha, dtype=z.dtype)).any()))
        for dz in (torch.randn_like(z), torch.zeros_like(z)):  # for zeros, dx is x_hat up to a factor
            results = []
            for each in (kernels, REFERENCE):
                sums = each.backward_reduce(z, dz, settings)
                means = (sums[0] / 64, sums[1] / 64 - float(not dz.any()))
                results.append([*sums, each.backward_apply(z, dz, var, means, settings)[0]])
            finite += [bool(value.isfinite().all()) for value in results[0]]
            deviations = [relative_error(*pair) for pair in zip(*results, strict=True)]
            errors += deviations if dz.any() else []
            inverse_errors += [] if dz.any() else deviations
    return {"saturated": all(saturated), "finite": all(finite), "errors": errors, "inverse errors": inverse_errors}


# How far from the truth an elu and its inverse may be, relative to it: a rounding of the dtype, which the interpreter
# truncates to, and in float32 the errors of polynomial, exponential and logarithm.
ELU_ERRORS = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def measure_small_elu(dtype: str, device: str, kernels: Any) -> dict[str, float]:
    """Return the largest relative errors, value by value, of an elu of tiny and large values and its inverse."""
    smallest = -4 if dtype == "float16" else -7  # smaller numbers have fewer digits
    if dtype == "bfloat16" and kernels is KERNELS["native"]:
        smallest = -4  # in half precision, the CPU kernels compute log1p(z) with the rounding error of 1 + z in float32
    y = -torch.logspace(smallest, 1.1, 400, device=device).to(getattr(torch, dtype)).view(-1, 1)
    vector = torch.float64 if dtype == "float64" else torch.float32
    zero, one = torch.zeros(1, device=device, dtype=vector), torch.ones(1, device=device, dtype=vector)
    settings = NormSettings(None, None, 0.0, "elu", 1.0)
    z = kernels.apply(y, zero, one, settings)
    # With dz = 0, mean(dy) = 0 and mean(dy x_hat) = -1, dx is x_hat = f^-1(z).
    inverse = kernels.backward_apply(z, torch.zeros_like(z), one, (zero, -one), settings)[0]
    truths = F.elu(y.double()), torch.log1p(z.double())
    errors = [((ours - truth) / truth).abs() for ours, truth in zip((z, inverse), truths, strict=True)]
    return {"value": errors[0].max().item(), "inverse": errors[1][y > -4].max().item()}


def measure_small_scales(dtype: str, layout: str, activation: str, device: str, kernels: Any) -> small_scales.Errors:
    """Return the errors of gradients where scales are small against biases."""
    x, dz, settings = small_scales.make(dtype, activation)
    vectors = (v.to(device) for v in settings[:2] if v is not None)
    x, dz = (lay_out(v.to(device), layout) for v in (x, dz))
    return small_scales.measure_kernels(kernels, x, dz, NormSettings(*vectors, *settings[2:]))


def measure_empty(shape: tuple[int, ...], device: str, kernels: Any) -> bool:
    """Return whether every function takes a tensor without elements: sums are zeros, the rest is empty."""
    x, vector = torch.zeros(shape, device=device), torch.ones(shape[1], device=device)
    settings = NormSettings(vector, vector, 1e-5, "leaky_relu", 0.01)
    kernels.apply_(x, vector, vector, settings, x)
    sums = [*kernels.statistics(x), *kernels.backward_reduce(x, x, settings)]
    full = [
        kernels.apply(x, vector, vector, settings),
        *kernels.backward_apply(x, x, vector, (vector, vector), settings, x),
    ]
    return all(torch.equal(s, torch.zeros_like(vector)) for s in sums) and all(f.shape == shape for f in full)


def check_operators() -> list[str]:
    """Run torch's own checks of the operators; return the names of those that pass."""
    x, dz, shortcut, settings = make(Case(layout="channels_last", shortcut=True), "cpu")
    vector = torch.ones(3)
    row = TRITON.local_statistics(x)
    arguments = {
        "statistics": (x,),
        "track_statistics": (x, vector.clone(), vector.clone(), 0.1),
        "local_statistics": (x,),
        "group_statistics": (torch.stack([row, row]), torch.float32, vector.clone(), vector.clone(), 0.1),
        "apply": (x, vector, vector, shortcut, *settings),
        "apply_": (x, vector, vector, None, *settings),
        "reduce_gradients": (x, dz, 105, None, *settings),
        "backward_apply": (x, dz, vector, vector, vector, shortcut, *settings),
    }
    for name, values in arguments.items():
        torch.library.opcheck(getattr(torch.ops.zoo_triton, name).default, values)
    return list(arguments)


def measure_compiled() -> list[float]:
    """Return the deviations of output and gradients of two norms, compiled in one graph, from eager ones."""
    from zoo.ops.abn.functional import inplace_abn

    def network(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        for _ in range(2):
            x = inplace_abn(x * 1.5, weight, bias, None, None, activation="elu") + x.mean()
        return x.square().sum()

    x, _, _, settings = make(Case(dtype="float64"), "cpu")
    results = []
    for function in (network, torch.compile(network, fullgraph=True, backend="aot_eager")):
        leaves = [v.clone().requires_grad_() for v in (x, *settings[:2])]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves)])
    assert results[0][1].abs().max() > 1e-3
    return [relative_error(*pair) for pair in zip(*results, strict=True)]


def measure_running(dtype: str, layout: str, device: str, kernels: Any) -> dict[str, float]:
    """Return the errors of running statistics after a batch, alone and in a group of three, relative to torch's."""
    momentum, x = 0.3, make(Case(dtype, layout, shape=(6, 5, 7, 5)), device)[0]
    expected = [v.double().to(device) for v in (torch.linspace(-1, 1, 5), torch.linspace(0.5, 2, 5))]
    start = [v.to(torch.float64 if dtype == "float64" else torch.float32, copy=True) for v in expected]
    F.batch_norm(x.double(), *expected, None, None, True, momentum)
    truth = REFERENCE.statistics(x.double())
    alone = [v.clone() for v in start]
    statistics = kernels.track_statistics(x, *alone, momentum)
    assert [v._version for v in alone] == [1, 1]
    together = [v.clone() for v in start]
    parts = [lay_out(part, layout) for part in (x[:1], x[1:1], x[1:])]  # one of them has no elements
    gathered = torch.stack([kernels.local_statistics(part) for part in parts])
    *of_group, count = kernels.group_statistics(gathered, start[0].dtype, *together, momentum)
    assert [v._version for v in together] == [1, 1]
    assert (count.item(), count.shape, count.dtype) == (x.numel() // 5, (), start[0].dtype)
    results = {"running": alone, "running of a group": together}, {"statistics": statistics, "of a group": of_group}
    errors = {
        f"{name} {n}": relative_error(value, exact)
        for found, truths in zip(results, (expected, truth), strict=True)
        for name, values in found.items()
        for n, (value, exact) in enumerate(zip(values, truths, strict=True))
    }
    column = torch.stack([start[0], start[0]], 1)[:, 0]  # running statistics need not be contiguous
    kernels.track_statistics(x, column, start[1].clone(), momentum)
    return errors | {"strided": relative_error(column, expected[0])}


def measure_gradients(dtype: str, parameters: str, device: str, kernels: Any) -> dict[str, float]:
    """Return the errors of the two means and the parameters' gradients, for parameters of another dtype than z."""
    z, dz, shortcut, settings = make(Case(dtype, "channels_last", shortcut=True, shape=(300, 3, 3, 3)), device)
    weight, bias = (None if v is None else v.to(getattr(torch, parameters)) for v in settings[:2])
    assert weight is not None
    weight[1] = 0
    sums = REFERENCE.backward_reduce(z, dz, NormSettings(weight, bias, *settings[2:]), shortcut)
    errors = {}
    for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
        own = NormSettings(*given, *settings[2:])
        sums = REFERENCE.backward_reduce(z, dz, own, shortcut)
        means, dweight, dbias = kernels.reduce_gradients(z, dz, 7, own, shortcut)
        sign = 1 if given[0] is None else torch.where(given[0] < 0, -1, 1)
        for name, ours, truth, like in (
            ("dy", means[0], sums[0] / 7, sums[0]),
            ("dy x_hat", means[1], sums[1] / 7, sums[1]),
            ("dweight", dweight, sign * sums[1], given[0]),
            ("dbias", dbias, sums[0], given[1]),
        ):
            assert (ours is None) == (like is None)
            if ours is not None and like is not None:
                assert ours.dtype == like.dtype
                errors[f"{name} {[v is None for v in given]}"] = relative_error(ours, truth.to(like.dtype))
    return errors


def report(device: str, kernels: Any) -> dict[str, Any]:
    """Return the errors of kernels in all cases on a device."""
    scales = [(dtype, layout) for dtype in small_scales.DTYPES for layout in LAYOUTS]
    if kernels is TRITON and device == "cpu":
        scales = [("float32", "channels_last"), ("bfloat16", "contiguous")]  # the interpreter is slow
    return {
        "cases": {name: measure(case, device, kernels) for name, case in CASES.items()},
        "large mean": {layout: measure_large_mean(layout, device, kernels) for layout in LAYOUTS},
        "saturated": {
            f"{dtype} {layout}": measure_saturated(dtype, layout, device, kernels)
            for dtype in small_scales.DTYPES
            for layout in LAYOUTS
        },
        "small elu": {dtype: measure_small_elu(dtype, device, kernels) for dtype in ELU_ERRORS},
        "small scales": {
            f"{dtype} {layout} {activation}": measure_small_scales(dtype, layout, activation, device, kernels)
            for dtype, layout in scales
            for activation in small_scales.ACTIVATIONS
        },
        "running": {
            f"{dtype} {layout}": measure_running(dtype, layout, device, kernels)
            for dtype in ("float64", "float32", "bfloat16")
            for layout in LAYOUTS
        },
        "gradients": {
            f"{dtype} {parameters}": measure_gradients(dtype, parameters, device, kernels)
            for dtype, parameters in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
        },
        "empty": [measure_empty(shape, device, kernels) for shape in ((0, 3, 4, 4), (2, 3, 0, 4), (0, 3), (2, 0, 3))],
    }
