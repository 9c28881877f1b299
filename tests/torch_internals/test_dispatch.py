"""Dispatch and autograd of torch have the behavior that the package relies on."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import utils as control_flow
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zoo.torch_internals import dispatch


class Watch(dispatch.TorchDispatchMode):
    """Notes the names of the operations that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_active_modes_are_counted():
    assert dispatch.num_dispatch_modes() == 0
    with Watch(), Watch():
        assert dispatch.num_dispatch_modes() == 2
    assert dispatch.num_dispatch_modes() == 0


def test_disabled_dispatch_hides_operations_from_modes():
    with Watch() as watch:
        with dispatch.DisableTorchDispatch():
            assert torch.equal(torch.ones(2).exp(), torch.full((2,), torch.e))
        assert watch.seen == []
        torch.ones(2)
    assert watch.seen == ["aten.ones"]


def test_outer_modes_are_inactive_in_context():
    with Watch() as around, dispatch.without_dispatch_modes(), Watch() as inside:
        torch.ones(2)
    assert around.seen == []
    assert inside.seen == ["aten.ones"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_transforms_are_active_inside_only(transform):
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(dispatch.are_transforms_active())
        return x.sum()

    transform(function)(torch.ones(2))
    assert seen == [True]
    assert not dispatch.are_transforms_active()


@pytest.mark.parametrize("kind", ["mm", "convolution"])
def test_kernels_without_autograd_get_unchanged_arguments(kind):
    end = (1, 1) if kind == "convolution" else ()
    x, weight = torch.ones(4, 4, *end), torch.ones(4, 4, *end, requires_grad=True)
    function = nn.functional.conv2d if kind == "convolution" else torch.mm
    with torch.autocast("cpu", torch.bfloat16):
        cast = function(x, weight)
        with dispatch.skip_autograd_and_autocast():
            plain = function(x, weight)
    assert (cast.dtype, cast.requires_grad) == (torch.bfloat16, True)
    assert (plain.dtype, plain.requires_grad) == (torch.float32, False)


def test_views_without_autograd_count_writes():
    x = torch.ones(2)
    with Watch() as watch, dispatch.skip_autograd_and_autocast():
        x[1:].add_(1)
    assert watch.seen == ["aten.slice", "aten.add_"]
    assert x._version == 1


def test_selective_checkpoint_modes_are_recognized():
    assert dispatch.TorchDispatchMode not in dispatch.SELECTIVE_CHECKPOINT_MODES  # all names were found
    seen: list[list[bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append([isinstance(mode, dispatch.SELECTIVE_CHECKPOINT_MODES) for mode in dispatch.dispatch_modes()])
        return x.sin().exp()

    save_sines = partial(
        create_selective_checkpoint_contexts,
        lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if operation == torch.ops.aten.sin.default else CheckpointPolicy.MUST_RECOMPUTE
        ),
    )
    with Watch():
        x = torch.ones(2, requires_grad=True)
        checkpoint(function, x, use_reentrant=False, context_fn=save_sines).sum().backward()
    assert [modes.count(True) for modes in seen] == [1, 1]  # in forward and in recomputation
    assert not isinstance(Watch(), dispatch.SELECTIVE_CHECKPOINT_MODES)


def test_saved_tensor_hooks_are_hidden_from_aot_autograd():
    set_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        before = set_tracing(True)
        try:
            found = [dispatch.top_saved_tensors_hooks(ignore) is not None for ignore in (False, True)]
        finally:
            set_tracing(before)
    assert found == [False, True]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        lambda x: while_loop(lambda x: x.sum() > 0, lambda x: (x - 1,), (x,)),
    ],
    ids=["cond", "while_loop"],
)
def test_control_flow_enters_context(call, monkeypatch):
    """Eager control flow looks up the function that sets up its compilation at each call."""
    seen = []

    @contextmanager
    def noted():
        seen.append("entered")
        yield

    @contextmanager
    def compiles_nothing():
        seen.append("compiled")
        raise InterruptedError
        yield

    monkeypatch.setattr(control_flow, "setup_compilation_env", compiles_nothing)
    dispatch.around_control_flow(noted)
    with pytest.raises(InterruptedError):
        call(torch.ones(2))
    assert seen == ["entered", "compiled"]
