"""What every back end of the norm computes: reference, compiled CPU kernels, and Triton's interpreted or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops import small_scales
from tests.ops.norm_cases import (
    CASES,
    ELU_ERRORS,
    FLOATS,
    LAYOUTS,
    SMALL_SCALES,
    assert_equals_the_formula,
    assert_equals_the_reference,
    report,
)
from zoo.ops.abn.kernels import KERNELS
from zoo.ops.backend import unavailable_reason


def needs(back_end: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(unavailable_reason(back_end) is not None, reason=str(unavailable_reason(back_end)))


BACK_ENDS = [
    "reference",
    pytest.param("native", marks=needs("native")),
    pytest.param("interpreter", marks=[pytest.mark.slow, needs("triton")]),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs("triton")]),
]


@pytest.fixture(scope="module", params=BACK_ENDS)
def found(request: pytest.FixtureRequest, interpreted: Any) -> dict[str, Any]:
    """Return the errors of a back end in all cases."""
    if request.param == "interpreter":
        return interpreted()
    return report("cuda", KERNELS["triton"]) if request.param == "cuda" else report("cpu", KERNELS[request.param])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_formula_and_reference(found, name):
    assert_equals_the_formula(CASES[name], found["cases"][name])
    assert_equals_the_reference(CASES[name], found["cases"][name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_variance_is_accurate_at_large_mean(found, layout):
    assert found["large mean"][layout] < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_saturated_elu_gives_finite_gradients_of_reference(found, dtype, layout):
    result = found["saturated"][f"{dtype} {layout}"]
    assert result["saturated"]
    assert result["finite"]
    assert max(result["errors"]) < 2 * torch.finfo(getattr(torch, dtype)).eps + 4e-6


@pytest.mark.parametrize("dtype", ELU_ERRORS)
def test_elu_near_zero_does_not_cancel(found, dtype):
    assert found["small elu"][dtype]["value"] < ELU_ERRORS[dtype]
    assert found["small elu"][dtype]["inverse"] < ELU_ERRORS[dtype]


@pytest.mark.parametrize("activation", small_scales.ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "layout"), SMALL_SCALES)
def test_gradient_errors_are_bounded(found, dtype, layout, activation):
    small_scales.assert_bounded(found["small scales"][f"{dtype} {layout} {activation}"], dtype)


def test_tensors_without_elements_give_zeros_and_empty_results(found):
    assert all(found["empty"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_running_statistics_update_like_torchs_alone_and_over_group(found, dtype, layout):
    errors = found["running"][f"{dtype} {layout}"]
    assert len(errors) == 9
    assert max(errors.values()) < (1e-12 if dtype == "float64" else 1e-6), errors


@pytest.mark.parametrize("types", ["float32 float32", "bfloat16 float32", "bfloat16 bfloat16"])
def test_gradients_of_parameters_have_their_dtype(found, types):
    errors = found["gradients"][types]
    assert len(errors) == 4 + 3 + 3 + 2
    assert max(errors.values()) < (1e-2 if types.endswith("bfloat16") else 1e-5), errors
