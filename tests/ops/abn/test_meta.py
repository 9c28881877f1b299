"""The kernels for meta tensors return tensors of the same shapes, dtypes and layouts as those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo.ops.abn import meta, reference
from zoo.ops.abn.kernels import NormSettings
from zoo.remat.memory_use import StorageLog

SETTINGS = NormSettings(torch.ones(5), torch.zeros(5), 1e-5, "leaky_relu", 0.01)


def on_meta(value: Tensor | NormSettings | tuple[Tensor, Tensor] | None) -> object:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        moved = [on_meta(entry) if isinstance(entry, Tensor) else entry for entry in value]
        return NormSettings(*moved) if isinstance(value, NormSettings) else tuple(moved)
    return value


def described(result: object) -> object:
    if isinstance(result, tuple):
        return [described(entry) for entry in result]
    return (result.shape, result.dtype, result.stride()) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("with_shortcut", [False, True])
def test_results_look_like_those_of_the_reference(
    dtype: torch.dtype, layout: torch.memory_format, with_shortcut: bool
) -> None:
    x, dz, shortcut = (torch.randn(2, 5, 3, 4).to(dtype).contiguous(memory_format=layout) for _ in range(3))
    shortcut = shortcut if with_shortcut else None
    mean, var = reference.statistics(x)
    for name, arguments in {
        "statistics": (x,),
        "apply": (x, mean, var, SETTINGS, shortcut),
        "apply_": (x, mean, var, SETTINGS, shortcut),
        "backward_reduce": (x, dz, SETTINGS, shortcut),
        "backward_apply": (x, dz, var, (mean, var), SETTINGS, shortcut),
    }.items():
        expected = getattr(reference, name)(*arguments)
        found = getattr(meta, name)(*map(on_meta, arguments))
        assert described(found) == described(expected), name


def test_nothing_is_made_beside_the_results() -> None:
    x, vector = torch.empty(2, 5, 3, 4, device="meta"), torch.empty(5, device="meta")
    settings = on_meta(SETTINGS)
    with StorageLog() as log:
        meta.apply_(x, vector, vector, settings)
        dx, _ = meta.backward_apply(x, x, vector, (vector, vector), settings)
    assert [change.size for change in log.changes] == [dx.nbytes]
