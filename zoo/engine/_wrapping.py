"""Wrappers around a trained network: torch.compile and DistributedDataParallel."""

# No postponed annotations here: DistributedDataParallel checks the annotations of its communication hook.
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo.engine._process import Process
from zoo.remat._lean import is_lean, lean
from zoo.remat.inductor._partition import inductor_options
from zoo.torch_internals.compiler import uncompiled
from zoo.torch_internals.data import ALL_GATHER

_NAMES = ("forward_sync_buffers", "broadcast_buffers")  # new versions of torch warn about the second one
_BUFFER_OPTION = next(name for name in _NAMES if name in inspect.signature(DistributedDataParallel).parameters)


def compile_network(model: nn.Module) -> nn.Module:
    """Compile the model with torch.compile.

    The graphs of a `zoo.lean` network save the same tensors as lean training, see `zoo.remat.inductor_options`; the
    network itself is no longer lean.
    """
    if not is_lean(model):
        return torch.compile(model)  # type: ignore[return-value]
    return torch.compile(lean(model, enabled=False), options=inductor_options())  # type: ignore[return-value]


def distribute(network: nn.Module, process: Process) -> nn.Module:
    """Wrap ``network`` in DistributedDataParallel if there are several processes.

    Broadcasts rank 0's weights to all ranks. Does not broadcast buffers in each step, because training does not read
    running statistics; `zoo.engine._state.broadcast_buffers` broadcasts them before they are read or saved.
    """
    if process.world_size == 1:
        return network
    options: dict[str, Any] = {_BUFFER_OPTION: False}
    if process.device.type == "cuda":
        options["device_ids"] = [process.device]
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True, **options)
    if process.device.type == "cpu" and process.world_size > 2:
        wrapped.register_comm_hook(None, _average_in_rank_order)
    return wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Return the bare network inside DistributedDataParallel and torch.compile; ``model`` itself without wrappers.

    Calling it starts no collective operation of a wrapper, and no compilation for another batch size.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else uncompiled(model)
    return model if inner is model else unwrap(inner)


def _average_in_rank_order(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: overwrite the bucket with its mean over all ranks, summed from rank 0 to the last.

    Gloo's all-reduce starts at another rank for each part of a bucket, and DistributedDataParallel rebuilds its buckets
    after the first step. With more than two ranks, the first step after a resume would differ in the last bit from the
    same step of an uninterrupted run. Like a ring all-reduce, this hook sends and receives twice the size of the
    bucket.
    """
    world_size, flat = dist.get_world_size(), bucket.buffer()
    parts = F.pad(flat, (0, -flat.numel() % world_size)).view(world_size, -1)
    # A reduce-scatter (rank r sums part r of all ranks) and an all-gather.
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    total = received[0].clone()
    for part in received[1:]:
        total += part
    means = parts.view(-1)
    getattr(dist, ALL_GATHER)(means, total / world_size)
    flat.copy_(means[: flat.numel()])
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(flat)
    return done
