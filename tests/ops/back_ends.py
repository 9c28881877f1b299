"""The results of every back end; as a program, prints those of the Triton kernels in Triton's interpreter as JSON.

`tests.ops.triton_stub.interpret` starts the program with TRITON_INTERPRET=1, because Triton decides at import whether
it interprets.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ops import grid_cases, norm_cases, pooling_cases
from tests.ops.triton_stub import interpret
from zoo.ops import backend
from zoo.ops.backend import force_back_end, unavailable_reason


def needs(back_end: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(unavailable_reason(back_end) is not None, reason=str(unavailable_reason(back_end)))


BACK_ENDS = [
    "reference",
    pytest.param("native", marks=needs("native")),
    pytest.param("interpreter", marks=[pytest.mark.slow, needs("triton")]),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs("triton")]),
]
#: The back ends of the CPU.
ON_CPU = BACK_ENDS[:2]


def report(device: str, back_end: str) -> dict[str, Any]:
    """Return the results of a back end in all cases on a device."""
    return {
        "norms": norm_cases.report(device, norm_cases.KERNELS[back_end]),
        "pooling": pooling_cases.report(device, back_end),
        "grid": grid_cases.report(device, back_end),
    }


def results_of(name: str) -> dict[str, Any]:
    """Return the results of one of `BACK_ENDS`."""
    if name == "interpreter":
        return interpret("tests.ops.back_ends")
    if name == "cuda":
        return report("cuda", "triton")
    with force_back_end(name):
        return report("cpu", name)


if __name__ == "__main__":
    backend._chosen["cpu"] = "triton"  # the interpreter's tensors are on the CPU
    checks = {"operators": norm_cases.check_operators(), "compiled": norm_cases.measure_compiled()}
    print(json.dumps(report("cpu", "triton") | checks))
