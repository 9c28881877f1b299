"""Training steps on copies of a network, which `zoo.check` and `zoo.memory_report` run."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError, join_names, truncate
from zoo.memory.block_checkpointing import checkpoint_blocks
from zoo.memory.containers import tensors_in
from zoo.memory.release import OptimizerTwin, ReleasedGradient, release_gradients, unhooked_step
from zoo.remat._budget import Budget
from zoo.remat._lean import make_plain
from zoo.remat._limit import Measurement, existing_bytes, optimizer_states
from zoo.remat._plan import Planner
from zoo.remat._rematerializer import Rematerializer
from zoo.remat._step_log import StorageLog
from zoo.torch_internals.data import observer, tensors_of

ModelInputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a network


class NoGradientsError(ConfigError):
    """No output of a call requires gradients."""


def default_loss(output: Any) -> Tensor:
    """Return the sum of the scalar outputs, or without scalars the cross-entropy of the outputs.

    Raises NoGradientsError if no output requires gradients.
    """
    outputs = trained_outputs(output)
    if not outputs:
        has_tensors = bool(tensors_of(output))
        raise NoGradientsError(
            f"no tensor in the output of type {type(output).__name__} requires gradients, as a training step needs",
            remedy="train some of the parameters" if has_tensors else "return tensors, or lists and dicts of them",
        )
    scalars = [each for each in outputs if each.ndim == 0]
    losses = [each.real.float() for each in scalars] or [_cross_entropy(each) for each in outputs]
    return torch.stack(losses).sum()


def trained_outputs(output: Any) -> list[Tensor]:
    """Return the outputs that backward can start from: nonempty tensors that require gradients."""
    return [each for each in tensors_of(output) if each.requires_grad and each.numel() > 0]


def _cross_entropy(output: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension. The target is the first class."""
    if output.is_nested:
        return torch.stack([_cross_entropy(each) for each in output.unbind()]).sum()
    scores = (output.abs() if output.is_complex() else output.float()).reshape(-1, output.shape[-1])
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def copy_tensors(value: Any, change: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """Return a deep copy of a value. ``change`` returns the copy of a tensor, which becomes a leaf of autograd."""
    changed = {id(each): change(each) for each in tensors_in(value)}
    return copy.deepcopy(
        value, {key: each.detach().requires_grad_(each.requires_grad) for key, each in changed.items()}
    )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter; the CPU without parameters."""
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def copy_network(model: nn.Module, place: str) -> nn.Module:
    """Return a copy of a network for training steps. Gradients become zeros.

    Raises ConfigError for ``place`` if the network cannot be copied.
    """
    results = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if any(each.grad_fn is not None for each in tensors_of(value))
    ]
    if results:  # torch cannot copy tensors with a history
        what = f"the network cannot be copied, because it keeps the results of operations in {join_names(results)}"
        raise ConfigError(what, place, "detach them, and use torch.nn.utils.parametrizations for weight norm")
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(f"the network cannot be copied: {truncate(error)}", place, "support copy.deepcopy") from error
    for mine, original in zip(copied.parameters(), model.parameters(), strict=True):
        if original.grad is not None:
            mine.grad = torch.zeros_like(original.grad)
    return copied


@dataclass(frozen=True)
class Timeline:
    """The memory of a training step after each allocation and deallocation.

    Args:
    - `bytes`: all allocated bytes, including parameters, buffers and inputs.
    - `end_of_forward`: number of changes in the forward pass.
    - `starts`: children of the network, with the number of changes before each starts.
    """

    bytes: Sequence[float]
    end_of_forward: int = 0
    starts: Sequence[tuple[int, str]] = ()

    @property
    def peak(self) -> float:
        """The maximum of `bytes`; infinite if the step ran out of memory."""
        return max(self.bytes)

    def time_of(self, change: float) -> float:
        """Return the time of a change: 0 to 1 in forward, 1 to 2 in backward."""
        end = max(1, self.end_of_forward)
        return change / end if change <= end else 1 + (change - end) / max(1, len(self.bytes) - 1 - end)


OUT_OF_MEMORY = Timeline([math.inf])
MAX_STEPS = 4  # maximum number of steps until a budget has its final plan


class Trial:
    """Counts the bytes of training steps of copies of a network, all with the same inputs.

    A step raises NoGradientsError if no output requires gradients.

    Args:
    - `inputs`: arguments of the network. They are copied.
    - `place`: place that errors name for a network or an input that cannot be copied.
    - `twin`: builds the optimizer. Its step ends each training step, and its state exists before. Lean steps release
      gradients if the twin does.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs, place: str, twin: OptimizerTwin | None = None) -> None:
        self._model, self._place, self._twin = model, place, twin
        try:
            self.inputs: ModelInputs = copy_tensors(inputs)
        except Exception as error:  # classes may raise anything
            raise ConfigError(
                f"an input cannot be copied: {truncate(error)}", place, "support copy.deepcopy"
            ) from error
        known = optimizer_states(list(model.parameters())) if twin is None else tensors_of([twin.optimizer.state])
        self._existing = [*tensors_in(self.inputs), *known]
        self._needs_states = twin is not None and not known
        self._existing_bytes = existing_bytes(lambda: [*model.parameters(), *model.buffers()], self._existing)

    def copy(self) -> nn.Module:
        """Return a copy of the network without lean parts."""
        return make_plain(copy_network(self._model, self._place))

    def options(self, network: nn.Module) -> dict[str, Any]:
        """Return the options of the `Rematerializer` for a copy."""
        return {"parameters": [*network.parameters(), *network.buffers()], "existing": self._existing}

    def plain(self) -> Timeline:
        """Return the memory of a step of plain training."""
        return self._step(self.copy(), nullcontext())

    def checkpointed(self) -> Timeline:
        """Return the memory of a step with a checkpoint per block. Raises the errors of `checkpoint_blocks`."""
        return self._step(checkpoint_blocks(self.copy()), nullcontext())

    def lean(self, budget: Budget) -> Timeline:
        """Return the memory of a step that follows the final plan for a budget.

        Raises ConfigError if no step is within a limit in bytes.
        """
        self._lean_step(budget)  # records the pass
        for _ in range(MAX_STEPS):
            timeline = self._lean_step(budget)
            if not Measurement.finish():
                break
        return timeline

    def planner(self) -> Planner | None:
        """Return the plans for a forward pass; None if nothing can be recomputed."""
        network, budget = self.copy(), Budget(share=0.0)
        with Rematerializer(budget, **self.options(network)):
            network(*self.inputs[0], **self.inputs[1])
        planner: Planner | None = budget.limiter.planner(None)
        return planner

    def _lean_step(self, budget: Budget) -> Timeline:
        network = self.copy()
        return self._step(network, Rematerializer(budget, **self.options(network)), is_lean=True)

    def _step(self, network: nn.Module, context: AbstractContextManager[Any], is_lean: bool = False) -> Timeline:
        """Train a copy of the network for one step, with forward in ``context``."""
        args, kwargs = copy_tensors(self.inputs)  # forward may overwrite them
        existing, optimizer = self._existing_bytes, None
        if self._twin is not None:
            optimizer = self._twin.build(network)
            if self._needs_states:
                existing += sum(each.nbytes for each in tensors_of([optimizer.state]))
            if is_lean and self._twin.releases:
                release_gradients(network, optimizer)
        log = StorageLog()
        gc.collect()
        try:
            with ExitStack() as hooks, log:
                for name, child in network.named_children():
                    start = observer(lambda *_, name=name: log.mark(name))
                    hooks.callback(child.register_forward_pre_hook(start).remove)
                with context:
                    output = network(*args, **kwargs)
                end = len(log.changes)
                default_loss(output).backward()
                if optimizer is not None:
                    for each in network.parameters():
                        if isinstance(each.grad, ReleasedGradient):
                            each.grad = None
                    unhooked_step(optimizer)(optimizer)
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY
        starts = [(index, name) for name, index in log.marks]
        return Timeline([existing + each for each in log.totals()], end, starts)
