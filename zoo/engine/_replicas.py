"""Replicas of a network that share a batch, and the sum of their gradients in a step.

By default each process is a replica, and DistributedDataParallel averages the gradients of several processes:
`Replicas`. With ``optimizer.replicas`` any number of processes trains the same weights, to the bit: `ExactReplicas`.
The schemes differ in the last bits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.config.experiment import Experiment
from zoo.data.sampler import replicas_of
from zoo.engine._attributes import attribute_values, changed_attribute
from zoo.engine._lockstep import Lockstep
from zoo.engine._precision import at_least_float32
from zoo.engine._process import Process, broadcast_tensors, seed_everything
from zoo.engine._wrapping import distribute
from zoo.errors import ConfigError, join_names
from zoo.layers.norm import InPlaceABNSync, set_active_group
from zoo.ops.recomputation import restore_buffers
from zoo.torch_internals.data import has_backward_hooks, is_wrapper

# Gradients are added as multiples of 2^-40. Gradients above 2^-16 keep all digits of float32; smaller ones are off by
# up to 2^-41. Gradients of a replica's mean loss may be as large as 2^22: batch norms over few values with a tiny
# variance have gradients of hundreds of thousands.
GRID_BITS = 40
SUM_BITS = 62  # sums in int64 stay below 2^62
CHUNK = 2**17  # number of elements added at a time on the CPU


class Replicas:
    """One replica per process. DistributedDataParallel averages the gradients in backward.

    Args:
    - `model`: the bare network.
    - `config`: the settings of the run.
    - `process`: this process of the run.

    Attributes:
    - `own`: the numbers of the replicas that this process runs.
    - `loss_factor`: factor applied to the mean loss over the global batch, so that averages of gradients become sums.
    """

    def __init__(self, model: nn.Module, config: Experiment, process: Process) -> None:
        self.own = replicas_of(process.rank, process.world_size, config.optimizer.replicas)
        self.loss_factor = process.world_size
        self._model, self._config, self._process = model, config, process
        self._network = model

    def wrap(self, network: nn.Module) -> nn.Module:
        """Wrap ``network``, the possibly compiled model, for training on all ranks."""
        self._network = distribute(network, self._process)
        return self._network

    def run(
        self,
        backward: Callable[[int, nn.Module], None],
        step: int,
        shapes: Sequence[torch.Size],
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Call ``backward(index, network)`` for each own replica.

        Args:
        - `backward`: runs forward and backward of the network on the images of the replica ``own[index]``.
        - `step`: number of completed steps.
        - `shapes`: shapes of the images of each own replica.
        - `scaler`: scales the gradients.
        """
        backward(0, self._network)

    @contextmanager
    def reduce_gradients(self, network: nn.Module, step: int, is_last: bool) -> Iterator[None]:
        """Averages gradients over the ranks in the last micro-batch of a step. Surrounds its forward and backward.

        Raises ConfigError if a parameter got no gradient on this rank: the averages would never be complete.
        """
        if not isinstance(network, DistributedDataParallel):
            yield
            return
        if not is_last:
            with network.no_sync():
                yield
            return
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        former = [parameter.grad for parameter in trained.values()]  # gradients of earlier micro-batches
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

    def set_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Set each parameter's gradient to the sum over all replicas, times the loss scale of ``scaler``."""


class ExactReplicas(Replicas):
    """A fixed number of replicas, divided among any number of processes. Sums their gradients exactly.

    A step with S replicas is S forward and backward passes of B / S images each. Each pass depends on its replica
    alone: images, shape, random numbers and batch statistics. The gradients are added as integers, because integers
    have the same sum in any order.

    Broadcasts rank 0's weights and buffers, so every rank has to construct it. Raises ConfigError for sharded
    parameters, and for norms whose synchronization only works with a replica per process.

    Args: see `Replicas`; ``optimizer.replicas`` of the settings is set.
    """

    def __init__(self, model: nn.Module, config: Experiment, process: Process) -> None:
        super().__init__(model, config, process)
        assert config.optimizer.replicas is not None
        self.count, self.loss_factor = config.optimizer.replicas, 1
        self._where = f"optimizer.replicas = {self.count}"
        if any(is_wrapper(parameter) for parameter in self._model.parameters()):
            raise ConfigError("the parameters are sharded (FSDP2), and replicas need whole ones", self._where)
        self._check_norms()
        if process.world_size > 1:
            broadcast_tensors([*model.parameters(), *model.buffers()])
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad and each.numel()}
        self._names, self._parameters = list(trained), list(trained.values())
        sizes = [parameter.numel() for parameter in self._parameters]
        # One message: the sums; for each parameter the number of replicas with a gradient, with one that is not finite,
        # and with one beyond the range; and the number of processes in which forward changed an attribute.
        parts = [*sizes, 3 * len(sizes), 1]
        self._sums = torch.zeros(sum(parts), dtype=torch.int64, device=process.device)
        *self._totals, tallies, self._num_changed = self._sums.split(parts)
        self._tallies = tallies.view(3, len(sizes))
        self._shapes: set[torch.Size] = set()
        self._has_checked = False
        self._changed: str | None = None
        self._chunk = CHUNK if process.device.type == "cpu" else sum(sizes)
        self._found: list[tuple[int, Tensor]] = []  # index of a parameter, and the largest absolute value of a gradient
        self._factor = torch.ones((), device=process.device)  # converts gradients to multiples of 2^-GRID_BITS

    def _check_norms(self) -> None:
        """Raise ConfigError for synchronized norms, unless each process runs one replica."""
        if self._process.world_size == self.count:
            return
        for name, module in self._model.named_modules():
            if is_synchronized(module):
                is_own = isinstance(module, InPlaceABNSync)
                raise ConfigError(
                    f"the norm {name} ({type(module).__name__}) is synchronized over all replicas, but "
                    f"{self._process.world_size} process(es) run them one after the other",
                    self._where,
                    f"start {self.count} processes, or {'do not compile it' if is_own else 'use InPlaceABNSync'}",
                )

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return ``network``."""
        self._network = network
        return network

    def run(
        self,
        backward: Callable[[int, nn.Module], None],
        step: int,
        shapes: Sequence[torch.Size],
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Call ``backward`` for each own replica, each with its own random numbers.

        Only replica 0 updates running statistics and other buffers, once per step. It runs last, because all replicas
        of a step begin with the same buffers.
        """
        self._begin(scaler)
        for index in reversed(range(len(self.own))):
            replica = self.own[index]
            with (
                self._check_attributes(self._model, shapes[index]),
                nullcontext() if replica == 0 else restore_buffers(self._model),
            ):
                seed_everything(self._config.seed, step, replica)
                backward(index, self._network)
        self._end()

    def _begin(self, scaler: torch.amp.GradScaler) -> None:
        self._found, self._factor = [], 2.0**GRID_BITS / self._loss_scale(scaler)

    @contextmanager
    def _check_attributes(self, network: nn.Module, shape: torch.Size) -> Iterator[None]:
        """Looks for attributes that the pass of a replica over images of a ``shape`` changes.

        Checkpoints and other processes do not get attributes. The first pass over images of a ``shape`` may fill
        caches. The first pass over a shape that was there before must change no attribute; otherwise `set_gradients`
        raises ConfigError.
        """
        is_repeated = shape in self._shapes
        self._shapes.add(shape)
        before = attribute_values(network) if is_repeated and not self._has_checked else None
        yield
        if before is not None:
            self._has_checked = True
            self._changed = changed_attribute(network, before)
            self._num_changed.fill_(int(self._changed is not None))

    def _refuse_attribute(self) -> None:
        """Raise ConfigError for the attribute that a pass on any rank has changed."""
        found = self._process.broadcast(self._process.gather(self._changed))
        what = f"forward changes the attribute {next(filter(None, found))}"
        remedy = "checkpoints and other processes do not get attributes: make it a buffer (register_buffer)"
        raise ConfigError(what, self._where, f"{remedy}, or train without replicas")

    def _parameters_of(self, network: nn.Module) -> Sequence[Tensor]:
        """Return the trained parameters of a network that a pass runs."""
        return self._parameters

    @contextmanager
    def reduce_gradients(self, network: nn.Module, step: int, is_last: bool) -> Iterator[None]:
        """Adds gradients to the sums in the last micro-batch of a step. Surrounds its forward and backward.

        Adds each gradient as soon as it is complete, and frees its memory.
        """
        if not is_last:
            yield
            return
        parameters = self._parameters_of(network)
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._add_gradient, index))
            for index, parameter in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:  # only earlier micro-batches used the parameter
                self._add_gradient(index, parameter)

    def _add_gradient(self, index: int, parameter: Tensor) -> None:
        """Add the gradient of a replica, divided by the loss scale, to the sum, and set it to None.

        The loss scale is a power of two, so that the division is exact. Does not wait for the device.
        """
        assert parameter.grad is not None
        gradient, total = at_least_float32(parameter.grad), self._totals[index].view(parameter.shape)
        parameter.grad = None
        # Parts that fit into a cache: the largest weights have tens of megabytes.
        num_parts = -(-gradient.numel() // self._chunk) if gradient.dim() else 1
        for part, of_total in zip(gradient.tensor_split(num_parts), total.tensor_split(num_parts), strict=True):
            if part.numel():
                low, high = part.mul_(self._factor).aminmax()
                self._found.append((index, torch.maximum(-low, high).float()))
                of_total.add_(part.round_().long())

    def _end(self) -> None:
        """Tally the gradients that have been added."""
        if not self._found:
            return
        indices, values = zip(*self._found, strict=True)
        largest, rows = torch.stack(values), torch.tensor(indices, device=self._tallies.device)
        is_beyond = largest.isfinite() & (largest >= 2.0**SUM_BITS / self.count)
        tallies = torch.stack([torch.ones_like(rows), ~largest.isfinite(), is_beyond])
        self._tallies.index_add_(1, rows, tallies)
        self._found = []

    @torch.no_grad()
    def set_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Set each parameter's gradient to the sum over all replicas, rounded once, times the loss scale.

        It is None if no replica has one, and NaN if a replica has one that is not finite. Every rank also gets replica
        0's buffers. Waits for the device. Raises, on every rank, OverflowError for a gradient beyond the range, and
        ConfigError if a pass has changed an attribute.
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
        """Return the loss scale, 0-d; 1 if ``scaler`` is disabled."""
        return scaler.scale(torch.ones((), device=self._process.device))


class SynchronizedReplicas(ExactReplicas):
    """Replicas that run in lockstep: in each synchronized norm, they wait for the statistics of one another.

    Each own replica has a copy of the network with its own buffers and gradients; the copies share the memory of the
    parameters. The activations of all own replicas are in memory at the same time.

    Raises ConfigError for hooks of parameters, because the copies would lack them, and for norms with their own process
    group.

    Args: see `ExactReplicas`.
    """

    def __init__(self, model: nn.Module, config: Experiment, process: Process) -> None:
        super().__init__(model, config, process)
        self._lockstep = Lockstep(self.count, process)
        for name, module in model.named_modules():
            if is_synchronized(module) and getattr(module, "group", None) not in (None, dist.group.WORLD):
                what = f"the norm {name} has a process group of its own, and replicas synchronize over all replicas"
                raise ConfigError(what, self._where, "leave out group")
        if hooked := [name for name, each in model.named_parameters() if has_backward_hooks(each)]:
            what = f"parameters have hooks ({join_names(hooked, 3)}), which copies of the network for replicas lack"
            raise ConfigError(what, self._where, f"remove them, or start {self.count} processes without replicas")

    def _check_norms(self) -> None:
        """Do nothing: norms may be synchronized."""

    def _parameters_of(self, network: nn.Module) -> Sequence[Tensor]:
        """Return the trained parameters of the copy ``network``."""
        return next(replica.parameters for replica in self._copies if replica.network is network)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Copy ``network`` for each own replica, and return it."""
        self._copies = [_Copy(network, self._parameters, self._lockstep) for _ in self.own]
        return super().wrap(network)

    def run(
        self,
        backward: Callable[[int, nn.Module], None],
        step: int,
        shapes: Sequence[torch.Size],
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Call ``backward`` for all own replicas in lockstep, each with its own random numbers.

        All replicas of a step begin with the same buffers; the buffers of replica 0 remain. Raises ConfigError if
        gradients reach parameters of the network itself, because a function in a module refers to it.
        """

        def run_replica(index: int) -> None:
            seed_everything(self._config.seed, step, self.own[index])
            backward(index, self._copies[index].network)

        self._begin(scaler)
        for replica in self._copies:
            replica.copy_from_network()
        with self._check_attributes(self._copies[0].network, shapes[0]):
            self._lockstep.run([partial(run_replica, index) for index in range(len(self.own))])
        self._end()
        if 0 in self.own:
            self._copies[0].copy_to_network()
        if reached := [n for n, each in zip(self._names, self._parameters, strict=True) if each.grad is not None]:
            what = (
                f"a copy of the network for a replica uses parameters of the network itself ({join_names(reached, 3)})"
            )
            remedy = f"refer to modules by attributes, not in functions, or start {self.count} processes"
            raise ConfigError(what, self._where, f"{remedy} without replicas")


class _Copy:
    """A copy of a network that shares the memory of its parameters.

    Args:
    - `network`: the network.
    - `parameters`: its trained parameters, some or all.
    - `group`: synchronizes the norms of the copy.

    Attributes:
    - `network`: the copy.
    - `parameters`: the parameters of the copy that belong to ``parameters``.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor], group: Lockstep) -> None:
        shared: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for parameter in network.parameters()
        }
        self.parameters: list[Tensor] = [shared[id(parameter)] for parameter in parameters]
        self.network = copy.deepcopy(network, shared)
        set_active_group(self.network, group)
        self._pairs = [*zip(network.modules(), self.network.modules(), strict=True)]

    def copy_from_network(self) -> None:
        """Copy the buffers and the mode of each module from the network."""
        for original, own in self._pairs:
            own.training = original.training
            _copy_buffers(original, own)

    def copy_to_network(self) -> None:
        """Copy the buffers of each module to the network."""
        for original, own in self._pairs:
            _copy_buffers(own, original)


@torch.no_grad()
def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copy the buffers of a module, without its submodules, to another module; in place where the sizes are equal."""
    if source._buffers.keys() != target._buffers.keys():
        target._buffers.clear()
    for name, buffer in source._buffers.items():
        own = target._buffers.get(name)
        if buffer is None or own is None or (own.shape, own.dtype) != (buffer.shape, buffer.dtype):
            target._buffers[name] = None if buffer is None else buffer.detach().clone()
        else:
            own.copy_(buffer)


def build_replicas(model: nn.Module, config: Experiment, process: Process) -> Replicas:
    """Return the replicas of a run; see the classes for arguments and errors."""
    count = config.optimizer.replicas
    if count is None:
        return Replicas(model, config, process)
    norms = [module for module in model.modules() if is_synchronized(module)]
    in_lockstep = count > 1 and not config.training.compile and all(isinstance(norm, InPlaceABNSync) for norm in norms)
    return (SynchronizedReplicas if norms and in_lockstep else ExactReplicas)(model, config, process)


def is_synchronized(module: nn.Module) -> bool:
    """Return whether a module is a synchronized norm."""
    return isinstance(module, nn.SyncBatchNorm) or hasattr(module, "set_group")


@contextmanager
def fix_algorithms() -> Iterator[None]:
    """Makes equal operations return equal bits: selects deterministic algorithms, and one thread on the CPU.

    The number of threads may change the order of a sum, and differs between one process and several. TF32 has torch's
    defaults: on for convolutions, off for matrix products. Restores all settings on exit.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for deterministic cuBLAS
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
