"""Tensors, modules and data loaders of torch have the behavior that the package relies on."""

from __future__ import annotations

import os
import signal
import time
import types

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.torch_internals.test_dispatch import Watch
from zoo.torch_internals import data
from zoo.torch_internals.dispatch import in_custom_backward


def test_tensor_is_detached_below_dispatch_modes():
    x = torch.ones(4, requires_grad=True).exp()[1:]
    with Watch() as watch:
        alias = data.detach(x)
    assert watch.seen == []
    assert type(alias) is Tensor
    assert not alias.requires_grad
    assert (alias.stride(), data.memory_id(alias)) == (x.stride(), data.memory_id(x))
    with torch.no_grad():
        x.add_(1)
    assert alias._version == x._version == 1


def test_tensor_without_memory_has_shape_and_dispatches_to_its_class():
    class Empty(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise ValueError(str(func))

    like = torch.ones(2**40, dtype=torch.bfloat16, device="meta").view(2**20, -1).t()
    empty = data.without_memory(Empty, like)
    assert (empty.shape, empty.dtype, empty.stride()) == (like.shape, like.dtype, like.stride())
    with pytest.raises(ValueError, match=r"aten\.add"):
        empty.add_(1)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = data.without_memory(Empty, weight)
    with pytest.raises(ValueError, match=r"aten\.add_"):  # autograd adds another gradient with it
        weight.sum().backward()


def test_unpacked_parameter_shares_its_attributes():
    """Autograd detaches the result of a hook, through `__torch_dispatch__` if it is defined."""
    seen = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return weight * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((*ctx.saved_tensors, in_custom_backward()))
            seen[0][0].from_backward = 2
            return grad

    weight = nn.Parameter(torch.ones(4))
    weight.from_forward = 1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, data.unpacked):
        loss = Reads.apply(weight).sum()
    assert not in_custom_backward()
    loss.backward()
    ((found, is_custom),) = seen
    assert is_custom
    assert found is not weight
    assert (type(found), found.requires_grad, found.is_leaf) == (nn.Parameter, True, True)
    assert (found.from_forward, weight.from_backward, found.data_ptr()) == (1, 2, weight.data_ptr())
    assert torch.equal(weight.grad, torch.ones(4))


def test_tensors_share_id_of_storage_if_they_share_memory():
    x = torch.ones(4)
    storage = data.storage_id(x.untyped_storage())
    assert data.storage_id(x[2:].untyped_storage()) == storage
    assert data.storage_id(x.detach().untyped_storage()) == storage
    assert data.storage_id(x.clone().untyped_storage()) != storage
    assert data.memory_id(x[2:]) == data.memory_id(nn.Parameter(x)) == storage
    meta = [torch.empty(4, device="meta") for _ in range(2)]  # their storages have no address
    assert len({data.storage_id(x.untyped_storage()) for x in meta}) == 2


def test_elements_overlap_in_windows_and_not_in_dense_tensors():
    x = torch.ones(2, 4, 3, 3)
    assert not data.may_overlap(x)
    assert not data.may_overlap(x.contiguous(memory_format=torch.channels_last).transpose(1, 2))
    assert data.may_overlap(x.unfold(3, 2, 1))
    assert data.may_overlap(x[:, :, :1].expand(-1, -1, 5, -1))


def test_read_only_tensors_are_recognized():
    x = torch.ones(2, 4, 3, requires_grad=True) * 1
    assert data.has_repeated_elements(x[:, :, :1].expand(-1, -1, 5))
    assert not data.has_repeated_elements(x)
    assert not data.has_repeated_elements(x[:, ::2])
    assert [data.is_read_only_view(y) for y in (*x.chunk(2, 1), *x.unbind(0))] == [True] * 4
    assert [data.is_read_only_view(y) for y in (x, x[:, :2], x.view(8, 3), x.transpose(1, 2))] == [False] * 4


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_every_kind_of_hook_of_module_is_seen(kind):
    module, other = nn.Identity(), nn.Identity()
    handle = getattr(module, f"register_{kind}")(lambda *args: None)
    assert data.has_hooks(module)
    assert not data.has_hooks(other)
    handle.remove()
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *args: None)
    try:
        assert data.has_hooks(other)
    finally:
        handle.remove()
    assert not data.has_hooks(module)


def test_replaced_module_functions_are_detected_until_restored():
    conv = nn.Conv2d(2, 2, 1)
    assert not data.changed_methods(conv)
    conv.forward = lambda x: x
    conv._conv_forward = conv._conv_forward
    assert data.changed_methods(conv) == ["forward"]
    conv.forward = types.MethodType(nn.Conv2d.forward, conv)
    assert not data.changed_methods(conv)
    conv.compile()
    assert data.changed_methods(conv) == ["_compiled_call_impl"]


def test_layer_on_another_device_than_its_input_is_not_plain():
    conv, x = nn.Conv2d(2, 2, 1), torch.ones(1, 2, 3, 3)
    assert data.is_plain_layer(conv, x, nn.Conv2d)
    assert not data.is_plain_layer(conv, x, nn.Linear, nn.BatchNorm2d)
    assert not data.is_plain_layer(conv.to("meta"), x, nn.Conv2d)
    assert data.is_plain_layer(conv, x.to("meta"), nn.Conv2d)
    weight = conv.weight
    del conv.weight
    conv.weight = weight.detach()  # like in a replica
    assert not data.is_plain_layer(conv, x.to("meta"), nn.Conv2d)


def test_hanging_loader_workers_are_killed():
    loader = DataLoader(range(4), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    os.kill(workers[0].pid, signal.SIGSTOP)
    start = time.monotonic()
    data.end_workers(iterator, grace_s=0.5)
    assert time.monotonic() - start < 30  # torch waits without a timeout
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize(("value", "serves"), [(None, False), ("False", False), ("True", True)])
def test_launcher_that_serves_store_is_detected(monkeypatch: pytest.MonkeyPatch, value: str | None, serves: bool):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    assert data.launcher_serves_store() is serves
