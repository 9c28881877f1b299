"""What every back end computes: reference, compiled CPU kernels, and Triton's interpreted or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops import grid_cases, pooling_cases, small_scales
from tests.ops.back_ends import BACK_ENDS, needs
from tests.ops.norm_cases import (
    CASES,
    ELU_ERRORS,
    LAYOUTS,
    assert_equals_the_formula,
    assert_equals_the_reference,
)


@pytest.fixture(scope="module", params=BACK_ENDS)
def found(request: pytest.FixtureRequest, results: Any) -> dict[str, Any]:
    """Return the errors of a back end in all cases."""
    return results(request.param)


@pytest.mark.parametrize("name", pooling_cases.CASES)
def test_pooling_has_bits_of_torch(found, name):
    assert [kind for kind, is_same in found["pooling"][name].items() if not is_same] == []


def test_pooling_of_large_maps_has_bits_of_torch(found):
    large = {name: kinds for name, kinds in found["pooling"].items() if name not in pooling_cases.CASES}
    assert large
    assert {name: kinds for name, kinds in large.items() if not all(kinds.values())} == {}


def test_sums_on_grid_have_bits_of_separate_operations(found):
    assert found["grid"] == dict.fromkeys(grid_cases.CASES, True)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_formula_and_reference(found, name):
    assert_equals_the_formula(CASES[name], found["norms"]["cases"][name])
    assert_equals_the_reference(CASES[name], found["norms"]["cases"][name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_variance_is_accurate_at_large_mean(found, layout):
    assert found["norms"]["large mean"][layout] < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", small_scales.DTYPES)
def test_saturated_elu_gives_finite_gradients_of_reference(found, dtype, layout):
    result = found["norms"]["saturated"][f"{dtype} {layout}"]
    assert result["saturated"]
    assert result["finite"]
    unit = torch.finfo(getattr(torch, dtype)).eps
    accumulated = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    assert max(result["errors"]) < 2 * unit + 4e-6
    # Back ends compute the logarithm differently, and the bias is 25 times as large as x_hat.
    assert max(result["inverse errors"]) < 8 * unit + 1024 * accumulated


@pytest.mark.parametrize("dtype", ELU_ERRORS)
def test_elu_near_zero_does_not_cancel(found, dtype):
    assert found["norms"]["small elu"][dtype]["value"] < ELU_ERRORS[dtype]
    assert found["norms"]["small elu"][dtype]["inverse"] < ELU_ERRORS[dtype]


@pytest.mark.parametrize("activation", small_scales.ACTIVATIONS)
def test_gradient_errors_are_bounded(found, activation):
    errors = {case: of_case for case, of_case in found["norms"]["small scales"].items() if activation in case}
    assert len(errors) >= 2
    for case, of_case in errors.items():
        small_scales.assert_bounded(of_case, case.partition(" ")[0])


def test_tensors_without_elements_give_zeros_and_empty_results(found):
    assert all(found["norms"]["empty"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_running_statistics_update_like_torchs_alone_and_over_group(found, dtype, layout):
    errors = found["norms"]["running"][f"{dtype} {layout}"]
    assert len(errors) == 9
    assert max(errors.values()) < (1e-12 if dtype == "float64" else 1e-6), errors


@pytest.mark.parametrize("types", ["float32 float32", "bfloat16 float32", "bfloat16 bfloat16"])
def test_gradients_of_parameters_have_their_dtype(found, types):
    errors = found["norms"]["gradients"][types]
    assert len(errors) == 4 + 3 + 3 + 2
    assert max(errors.values()) < (1e-2 if types.endswith("bfloat16") else 1e-5), errors


@pytest.mark.slow
@needs("triton")
def test_torch_accepts_every_operator_of_triton_and_compiles_it(results):
    assert len(results("interpreter")["operators"]) == 8
    assert max(results("interpreter")["compiled"]) < 1e-12
