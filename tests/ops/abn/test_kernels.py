"""Back ends override kernels of the reference, and inherit the others."""

from __future__ import annotations

import inspect

import pytest
import torch

from zoo.ops import backend
from zoo.ops.abn.kernels import KERNELS, kernels_for
from zoo.ops.abn.reference import ReferenceKernels

COMPILED = [type(KERNELS[name]) for name in backend.DEVICES]


@pytest.mark.parametrize("back_end", COMPILED)
def test_back_end_overrides_kernels_of_reference_with_the_same_signatures(back_end):
    kernels = {name: kernel for name, kernel in vars(back_end).items() if inspect.isfunction(kernel)}
    assert {"statistics", "apply", "apply_", "backward_reduce", "backward_apply"} <= kernels.keys()
    for name, kernel in kernels.items():
        assert inspect.signature(kernel) == inspect.signature(getattr(ReferenceKernels, name))
        assert kernel.__doc__ is None, "a kernel is documented once, in the reference"


def test_every_kernel_of_the_reference_is_documented():
    kernels = {name: kernel for name, kernel in vars(ReferenceKernels).items() if inspect.isfunction(kernel)}
    assert [name for name, kernel in kernels.items() if not kernel.__doc__] == []


def test_tensor_gets_kernels_of_back_end_of_its_device():
    x = torch.zeros(1, 1)
    assert kernels_for(x) is KERNELS[backend.name_for(x.device)]
    with backend.force_back_end("reference"):
        assert type(kernels_for(x)) is ReferenceKernels
