"""What training puts around a network: torch.compile, and the averaging of gradients over processes."""

# No postponed annotations here: DistributedDataParallel checks those of its communication hook.
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.process import Process
from zoo.remat.partitioning import random_saving_partitioner
from zoo.torch_internals import ALL_GATHER, list_mode_options, lookup_backend, uncompiled
from zoo.torch_internals import activation_memory_budget as memory_budget

_NAMES = ("forward_sync_buffers", "broadcast_buffers")  # new versions of torch warn about the second one
_BUFFER_OPTION = next(name for name in _NAMES if name in inspect.signature(DistributedDataParallel).parameters)


def compile_network(
    model: nn.Module,
    activation_memory_budget: float | None,
    mode: str = "default",
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> nn.Module:
    """Return the compiled model; the budget (0 to 1, None: torch's choice) limits what it keeps for backward.

    With a budget, backward uses the random numbers of forward, such as dropout masks; torch alone may draw others.
    ``mode``, ``fullgraph`` and ``dynamic`` are those of torch.compile.  (torch's context for the budget of a region of
    a network, new in 2.15, refuses regions that update running statistics.)
    """
    if activation_memory_budget is None:
        return torch.compile(model, mode=mode, fullgraph=fullgraph, dynamic=dynamic)  # type: ignore[return-value]
    # With a backend of its own, torch.compile takes no mode.
    inductor = lookup_backend("inductor")
    options = {**list_mode_options(mode), "custom_partitioner_fn": random_saving_partitioner()}

    # torch.compile has no guard on the budget, so that a model that is compiled twice would keep the first one. With a
    # backend of its own, each compiled model has its own budget.
    def backend(graph: Any, inputs: Any) -> Any:
        with memory_budget(activation_memory_budget):
            return inductor(graph, inputs, config_patches=options)

    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)  # type: ignore[return-value]


def distribute(network: nn.Module, process: Process, compress: bool = False) -> nn.Module:
    """Return ``network`` itself for a single process, else in a wrapper that averages gradients over all ranks.

    All ranks get rank 0's weights here. Buffers are not broadcast at each step: in training nothing reads the
    running statistics, so that rank 0's are the same with and without; `zoo.engine.state.settle_buffers` spreads
    them where they are read or saved. With ``compress`` gradients travel in bfloat16.
    """
    if process.world_size == 1:
        return network
    options: dict[str, Any] = {_BUFFER_OPTION: False}
    if process.device.type == "cuda":
        options["device_ids"] = [process.device]
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True, **options)
    if process.device.type == "cpu" and (process.world_size > 2 or compress):
        wrapped.register_comm_hook(torch.bfloat16 if compress else None, _average_in_rank_order)
    elif compress:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel and torch.compile, or ``model`` itself if it has no wrapper.

    Calling the network inside starts no collective operation, and no compilation for a batch of another size.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else uncompiled(model)
    return model if inner is model else unwrap(inner)


def _average_in_rank_order(dtype: torch.dtype | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Overwrite the bucket with its mean over all ranks, each element added up from rank 0 to the last.

    Gloo's own sum starts at another rank for each part of a bucket, and DistributedDataParallel fills its buckets
    anew after the first step. With more than two ranks the first step after a resume would so differ, in the last
    bit, from the same step of an uninterrupted run. As in a ring, two times the bucket is sent and received, with a
    ``dtype`` rounded to it both times; sums have the dtype of the bucket.
    """
    world_size, flat = dist.get_world_size(), bucket.buffer()
    parts = F.pad(flat.to(dtype or flat.dtype), (0, -flat.numel() % world_size)).view(world_size, -1)
    # Rank r adds up part r of all ranks, then everybody gets all means.
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    total = received[0].to(flat.dtype)
    for part in received[1:]:
        total += part
    means = parts.view(-1)
    getattr(dist, ALL_GATHER)(means, (total / world_size).to(means.dtype))
    flat.copy_(means[: flat.numel()])
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(flat)
    return done
