"""Replicas of a network that share a batch, and the sum of their gradients in a step.

By default each process is a replica, and DistributedDataParallel averages the gradients of several processes:
`Replicas`. With ``optimizer.replicas`` any number of processes trains the same weights, to the bit: `ExactReplicas`.
Each scheme of adding defines bits of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.config.experiment import Experiment
from zoo.data.sampler import replicas_of
from zoo.engine.attributes import attribute_values, changed_attribute
from zoo.engine.precision import at_least_float32
from zoo.engine.process import Process, broadcast_tensors, seed_everything
from zoo.engine.wrapping import distribute
from zoo.errors import ConfigError, join_names
from zoo.ops.recomputation import restored_buffers
from zoo.torch_internals.data import is_wrapper

# Gradients are added as multiples of 2^-40. Gradients above 2^-16 keep all digits of float32; smaller ones are off by
# up to 2^-41. Gradients of a replica's mean loss may be as large as 2^22, because batch norms of few values, whose
# variance may be tiny, have gradients of hundreds of thousands.
GRID_BITS = 40
SUM_BITS = 62  # of an int64; the largest sum is below 2^62


class Replicas:
    """The replicas that this process runs: itself alone. DistributedDataParallel averages gradients in backward.

    Args:
    - `model`: the bare network.
    - `config`: the settings of the run.
    - `process`: this process of the run.

    Attributes:
    - `own`: the numbers of the replicas that this process runs.
    - `loss_factor`: factor of the mean loss over the global batch, by which averages of the gradients become sums.
    """

    def __init__(self, model: nn.Module, config: Experiment, process: Process) -> None:
        self.own = replicas_of(process.rank, process.world_size, config.optimizer.replicas)
        self.loss_factor = process.world_size
        self._model, self._config, self._process = model, config, process

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return ``network``, the possibly compiled model, as a step calls it."""
        return distribute(network, self._process)

    def running(self, replica: int, step: int, shape: torch.Size) -> AbstractContextManager[None]:
        """Return the context of the passes of a replica, on images of a ``shape``, in the step after ``step`` steps."""
        return nullcontext()

    @contextmanager
    def averaging(self, wrapped_model: nn.Module, step: int, is_last: bool) -> Iterator[None]:
        """Context of forward and backward of a micro-batch. Gradients are averaged in the last one of a step.

        That waits for the gradients of all parameters. Raises ConfigError if a parameter got none on this rank: the
        averages would never be complete.
        """
        if not isinstance(wrapped_model, DistributedDataParallel):
            yield
            return
        if not is_last:
            with wrapped_model.no_sync():
                yield
            return
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        former = [parameter.grad for parameter in trained.values()]  # of earlier micro-batches
        yield
        # An averaged gradient is another tensor, a view of a bucket.
        unused = [name for (name, parameter), old in zip(trained.items(), former, strict=True) if parameter.grad is old]
        if unused:
            raise ConfigError(
                f"{len(unused)} of {len(trained)} parameters got no gradient on rank {self._process.rank} in step "
                f"{step + 1} ({join_names(unused)}), but several processes average the gradients of all parameters",
                self._config.network.arch,
                "freeze them with requires_grad_(False), use them in each forward pass, or set optimizer.replicas",
            )

    def add_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Add the gradients of a replica, which ``scaler`` has scaled, to the sum over all replicas."""

    def set_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Set each parameter's gradient to the sum over all replicas, scaled as by ``scaler``."""


class ExactReplicas(Replicas):
    """Several replicas, which the processes divide, and the exact sum of the gradients of all replicas.

    A step with S replicas is S forward and backward passes of B / S images each. Each pass is a function of its replica
    alone: its images, its shape, its random numbers, its batch statistics. The gradients are added as integers, because
    integers have the same sum in any order.

    Broadcasts rank 0's weights and buffers, so every rank has to construct it. Raises ConfigError for a network with
    synchronized norms, unless each process runs one replica, and for sharded parameters.

    Args: see `Replicas`; ``optimizer.replicas`` of the settings is set.
    """

    def __init__(self, model: nn.Module, config: Experiment, process: Process) -> None:
        super().__init__(model, config, process)
        assert config.optimizer.replicas is not None
        self.count, self.loss_factor = config.optimizer.replicas, 1
        self._check()
        if process.world_size > 1:
            broadcast_tensors([*model.parameters(), *model.buffers()])
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad and each.numel()}
        self._names, self._parameters = list(trained), list(trained.values())
        sizes = [parameter.numel() for parameter in self._parameters]
        # One message: the sums, how many replicas have a gradient, one that is not finite, one beyond the range, and
        # how many processes found an attribute that forward changes.
        parts = [*sizes, 3 * len(sizes), 1]
        self._sums = torch.zeros(sum(parts), dtype=torch.int64, device=process.device)
        *self._totals, tallies, self._num_changed = self._sums.split(parts)
        self._tallies = tallies.view(3, len(sizes))
        self._shapes: set[torch.Size] = set()
        self._has_checked = False
        self._changed: str | None = None
        self._rounded = torch.empty(max(sizes, default=0), dtype=torch.int64, device=process.device)  # reused buffer

    def _check(self) -> None:
        where = f"optimizer.replicas = {self.count}"
        if any(is_wrapper(parameter) for parameter in self._model.parameters()):
            raise ConfigError("the parameters are sharded (FSDP2), and replicas need whole ones", where)
        if self._process.world_size == self.count:
            return
        for name, module in self._model.named_modules():
            if isinstance(module, nn.SyncBatchNorm) or hasattr(module, "set_group"):
                raise ConfigError(
                    f"the norm {name} is synchronized over all replicas, but {self._process.world_size} process(es) "
                    "run them one after the other",
                    where,
                    f'use norms that are not synchronized (network.norm "inplace"), or start {self.count} processes',
                )

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return ``network``."""
        return network

    @contextmanager
    def running(self, replica: int, step: int, shape: torch.Size) -> Iterator[None]:
        """Context of the forward and backward passes of a replica, with random numbers of its own.

        Only replica 0 updates running statistics and other buffers, once per step. It has to run last, because all
        replicas of a step begin with the same buffers.

        Attributes move once per pass of this process, and checkpoints lack them. The first pass over images of a
        ``shape`` may fill caches. The first pass over a shape that was there before must change no attribute;
        otherwise `set_gradients` raises ConfigError.
        """
        is_repeated = shape in self._shapes
        self._shapes.add(shape)
        before = attribute_values(self._model) if is_repeated and not self._has_checked else None
        seed_everything(self._config.seed, step, replica)
        with nullcontext() if replica == 0 else restored_buffers(self._model):
            yield
        if before is not None:
            self._has_checked = True
            self._changed = changed_attribute(self._model, before)
            self._num_changed.fill_(int(self._changed is not None))

    def _refuse_attribute(self) -> None:
        """Raise ConfigError for the attribute that a pass on any rank has changed."""
        found = self._process.broadcast(self._process.gather(self._changed))
        what = f"forward changes the attribute {next(filter(None, found))}"
        remedy = "checkpoints and other processes do not get attributes: make it a buffer (register_buffer)"
        raise ConfigError(what, f"optimizer.replicas = {self.count}", f"{remedy}, or train without replicas")

    @torch.no_grad()
    def add_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Add the gradients of a replica, divided by the loss scale, to the sum, and set them to None.

        The loss scale is a power of two, so that the division is exact. Does not wait for the device.
        """
        loss_scale = self._loss_scale(scaler)
        lows, highs, zero, factor = [], [], loss_scale.new_zeros(()), 2.0**GRID_BITS / loss_scale
        present = torch.tensor([parameter.grad is not None for parameter in self._parameters])
        for parameter, total in zip(self._parameters, self._totals, strict=True):
            low = high = zero
            if parameter.grad is not None:
                scaled = at_least_float32(parameter.grad).mul_(factor)
                low, high = scaled.aminmax()
                rounded = self._rounded[: total.numel()].view(parameter.shape).copy_(scaled.round_())
                total.view(parameter.shape).add_(rounded)
                parameter.grad = None
            lows.append(low.float())
            highs.append(high.float())
        largest = torch.maximum(-torch.stack(lows), torch.stack(highs))
        is_beyond = largest.isfinite() & (largest >= 2.0**SUM_BITS / self.count)
        self._tallies += torch.stack([present.to(largest.device), ~largest.isfinite(), is_beyond])

    @torch.no_grad()
    def set_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Set each parameter's gradient to the sum over all replicas, rounded once, times the loss scale.

        It is None if no replica has one, and NaN if a replica has one that is not finite. Every rank also gets replica
        0's buffers. Waits for the device. Raises, on every rank, OverflowError for a gradient beyond the range, and
        ConfigError if a pass has changed an attribute, see `running`.
        """
        if self._process.world_size > 1:
            dist.all_reduce(self._sums)
        if self._num_changed.item():
            self._refuse_attribute()
        present, infinite, beyond = self._tallies.tolist()
        if any(beyond) and not any(infinite):
            name = next(name for name, count in zip(self._names, beyond, strict=True) if count)
            limit = f"{2.0 ** (SUM_BITS - GRID_BITS):,.0f}"
            raise OverflowError(f"the gradient of {name} exceeds {limit}, the range of optimizer.replicas")
        factor = 2.0**-GRID_BITS * self._loss_scale(scaler)
        tallied = zip(self._parameters, self._totals, present, infinite, strict=True)
        for parameter, total, num_present, num_infinite in tallied:
            if num_infinite:
                parameter.grad = torch.full_like(parameter, torch.nan)
            elif num_present:
                summed = torch.empty_like(parameter).copy_(total.view(parameter.shape))
                parameter.grad = summed.mul_(factor)
        self._sums.zero_()
        if self._process.world_size > 1:
            broadcast_tensors(list(self._model.buffers()))

    def _loss_scale(self, scaler: torch.amp.GradScaler) -> Tensor:
        """Return the factor of the gradients, 0-d; 1 if ``scaler`` is disabled."""
        return scaler.scale(torch.ones((), device=self._process.device))


@contextmanager
def fixed_algorithms() -> Iterator[None]:
    """Context in which equal operations have equal bits: deterministic algorithms, one thread on the CPU.

    The number of threads may change the order of a sum, and differs between one process and several. TF32 is as by
    default in torch: on for convolutions, off for matrix products.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch calls cuBLAS nondeterministic
    cudnn: Any = torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = [
        (cudnn, "benchmark", False),
        (cudnn.conv, "fp32_precision", "tf32"),
        (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ]
    before = [getattr(owner, name) for owner, name, _ in settings]
    was_deterministic, num_threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    for owner, name, value in settings:
        setattr(owner, name, value)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_num_threads(num_threads)
