"""`zoo.memory_report`: the memory that each module holds between forward and backward, plain and lean, and why."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from zoo.errors import ConfigError, join_names, truncate
from zoo.memory.containers import tensors_in
from zoo.memory.fit import Fit, Subject
from zoo.memory.held import ModuleMemory, held_memory
from zoo.memory.plot import draw_timelines, format_of, save
from zoo.memory.progress import show_progress
from zoo.memory.release import OptimizerTwin
from zoo.memory.trial import NoGradientsError, Timeline, Trial
from zoo.ops.meta_attention import kernel_device, meta_attention
from zoo.ops.recomputation import restore_generators
from zoo.remat._budget import Budget, parse_limit
from zoo.tables import Cell, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGA = 1e6
NUM_MODULES = 5  # rows of the printed report
SHOWN_BYTES = 5000  # minimum that a table shows: 0.01 MB, rounded
MAX_NAME_CHARS, MAX_KIND_CHARS = 32, 18


class WithBudget(NamedTuple):
    """A training step with a budget of `zoo.lean`.

    Args:
    - `budget`: the budget, a fraction.
    - `held`: bytes held between forward and backward.
    - `peak`: peak bytes of the step; None if not measured.
    """

    budget: float
    held: int
    peak: float | None


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Memory that a network holds between forward and backward; its string is a summary of at most fifteen lines.

    A peak counts all tensors of a training step: parameters, buffers, gradients, inputs, the state of the optimizer and
    temporary tensors. It is infinite if a GPU runs out of memory, and None if not measured.

    Args:
    - `modules`: the modules that hold memory, in the order of execution.
    - `plain_step`: a step of plain training. With a limit on the peak, it is measured only on the meta device.
    - `lean_step`: a step of lean training. No step is measured if no output requires gradients.
    - `checkpointed_step`: a step of plain training with a checkpoint per block; None if `blocks_of` finds no blocks, or
      if a checkpoint fails.
    - `with_budget`: the smallest budget whose recomputation takes at most half the time of forward; None if the report
      has a budget or none helps.
    - `counted_for`: on the meta device, the device whose attention kernels were counted, "CUDA" or "the CPU"; else "".
    - `subject`: the network and its inputs, for `largest_batch`.
    """

    modules: list[ModuleMemory]
    plain_step: Timeline | None = None
    lean_step: Timeline | None = None
    checkpointed_step: Timeline | None = None
    with_budget: WithBudget | None = None
    counted_for: str = ""
    subject: Subject | None = field(default=None, compare=False)

    @property
    def plain_peak(self) -> float | None:
        """Peak of plain training."""
        return None if self.plain_step is None else self.plain_step.peak

    @property
    def peak(self) -> float | None:
        """Peak of lean training."""
        return None if self.lean_step is None else self.lean_step.peak

    @property
    def with_checkpoints(self) -> float | None:
        """Peak of plain training with a checkpoint per block."""
        return None if self.checkpointed_step is None else self.checkpointed_step.peak

    @property
    def timelines(self) -> dict[str, Timeline]:
        """The steps that `plot` draws: plain and lean training, if measured and not out of memory."""
        steps = {"plain training": self.plain_step, "lean training": self.lean_step}
        return {name: step for name, step in steps.items() if step is not None and step.peak < math.inf}

    def fits(self, memory: int | str, *, plain: bool = False, optimizer_states: int = 0) -> Fit:
        """Return whether a lean training step with these inputs fits into memory, and the margin.

        >>> import torch, torchvision, zoo
        >>> report = zoo.memory_report(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64))
        >>> if report.fits("24GB", optimizer_states=1):
        ...     print("trains")
        trains

        Args:
        - `memory`: bytes, as "24GB", "22 GiB" or an int. The scratch memory of operations is not counted: leave room.
        - `plain`: count plain training instead.
        - `optimizer_states`: size of the optimizer's state in copies of the trained parameters: 1 for SGD with
          momentum, 2 for Adam. Ignored if the report has an optimizer or the optimizer has stepped, since the peak
          then includes its state.

        Raises ConfigError if ``memory`` is not an amount of memory, or if the step was not measured.
        """
        limit = parse_limit(memory, "MemoryReport.fits")
        peak = self.plain_peak if plain else self.peak
        if peak is None or self.subject is None:
            remedy = "make the report without a budget in bytes" if plain else "return outputs that require gradients"
            raise ConfigError("no training step was measured", "MemoryReport.fits", remedy)
        return Fit(peak + self.subject.missing_bytes(optimizer_states), limit)

    def largest_batch(self, memory: int | str, *, plain: bool = False, optimizer_states: int = 0) -> int:
        """Return the largest batch whose lean training step fits into memory; 0 if none does.

        Counts steps on the meta device, with a copy of the network. The batch is the first dimension of the first input
        and of each input with the same length. With a budget in bytes, all products are recomputed. Scratch memory and
        fragmentation are not counted: leave about a tenth of a GPU for them.

        Args:
        - `memory`, `plain`, `optimizer_states`: as for `fits`.

        Raises ConfigError if ``memory`` is not an amount of memory, if the network does not run on the meta device or
        has an `nn.LSTM`, `nn.GRU` or `nn.RNN`, whose fused kernels do not run there, if the memory of a step does not
        depend on the batch, or if the report was made under autocast.
        """
        if self.subject is None:
            raise ConfigError("the report has no network", "MemoryReport.largest_batch")
        return self.subject.largest_batch(memory, is_plain=plain, copies=optimizer_states)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the bytes of tensors over a training step, plain and lean, with both peaks.

        Time counts allocations and deallocations. The axis names the children of the network at the start of their
        forward. A notebook shows the figure. ``path`` also writes it, in the format of its suffix, such as .pdf, .svg
        or .png.

        Raises ConfigError for another suffix, if no step was measured, or if matplotlib is not installed.
        """
        if path is not None:
            format_of(Path(path))
        if not self.timelines:
            raise ConfigError(
                "no training step was measured", "MemoryReport.plot", "make the report without a budget in bytes"
            )
        figure = draw_timelines("memory of a training step", self.timelines)
        if path is not None:
            save(figure, Path(path))
        return figure

    @property
    def plain(self) -> int:
        """Bytes that plain training holds."""
        return sum(module.plain for module in self.modules)

    @property
    def lean(self) -> int:
        """Bytes that lean training holds."""
        return sum(module.lean for module in self.modules)

    def table(self) -> str:
        """Return a Markdown table with a row per module: bytes held, operations kept and why, operations recomputed.

        Omits entries below `SHOWN_BYTES`.
        """
        headers = ("module", "kind", "plain, MB", "lean, MB", "kept", "recomputed")
        rows = [
            [
                each.name or "(itself)", each.kind, f"{each.plain / MEGA:.2f}", f"{each.lean / MEGA:.2f}",
                "; ".join(f"{made_by} {size / MEGA:.2f} ({reason})" for (made_by, reason), size
                          in each.held.items() if size >= SHOWN_BYTES),
                "; ".join(f"{made_by} {size / MEGA:.2f}" for made_by, size in each.recomputed.items()
                          if size >= SHOWN_BYTES),
            ]
            for each in self.modules if max(each.plain, each.lean) >= SHOWN_BYTES
        ]  # fmt: skip
        rows.append(["all", "", f"{self.plain / MEGA:.2f}", f"{self.lean / MEGA:.2f}", "", ""])
        return markdown_table(headers, rows)

    def __repr__(self) -> str:
        """Return the totals, the peaks, and the modules that hold the most, in at most fifteen lines."""
        if self.plain == 0:
            return "plain training holds nothing for backward: no operation saves a tensor"
        total = f"held for backward: {self.plain / MEGA:.2f} MB in plain training, {self._share(self.lean)} in lean"
        details = "print(report.table()) shows all modules, what each keeps and why"
        if self.counted_for:
            details += f"; on the meta device, attention is counted as on {self.counted_for}"
        return "\n".join([f"{total} training", self._peaks(), self._largest(), details])

    def _peaks(self) -> str:
        """Return a line with the measured peaks."""
        if self.peak is None:
            return "peak of a training step: not measured, as no output requires gradients"
        peaks = {"plain": self.plain_peak, "lean": self.peak, "checkpoints": self.with_checkpoints}
        if self.with_budget is not None:
            peaks[f"budget {self.with_budget.budget}"] = self.with_budget.peak
        texts = []
        for name, peak in peaks.items():
            if peak is not None:
                text = "out of memory" if peak == math.inf else _rounded(peak)
                if self.plain_peak is not None and name != "plain" and max(peak, self.plain_peak) < math.inf:
                    text += f" ({100 * peak / self.plain_peak:.0f} %)"
                texts.append(f"{name} {text}")
        return f"peak of a training step: {', '.join(texts)}"

    def _largest(self) -> str:
        """Return a table of the modules that hold the most in plain training, and a row for all others."""
        ranked = sorted(self.modules, key=lambda module: (-module.plain, -module.lean))
        shown, others = ranked[:NUM_MODULES], ranked[NUM_MODULES:]
        rows: list[list[Cell]] = []
        for each in shown:
            name, kind = _shorten(each.name or "(itself)", MAX_NAME_CHARS), _shorten(each.kind, MAX_KIND_CHARS)
            rows.append([name, kind, *self._cells(each.plain, each.lean)])
        if others:
            plain, lean = sum(each.plain for each in others), sum(each.lean for each in others)
            rows.append([f"{len(others)} others", "", *self._cells(plain, lean)])
        return markdown_table(["module", "kind", "plain MB", "%", "lean MB", "%"], rows)

    def _cells(self, plain: int, lean: int) -> list[float]:
        """Return megabytes and shares of the network's total in percent, plain and lean."""
        return [plain / MEGA, 100 * plain / self.plain, lean / MEGA, 100 * lean / max(1, self.lean)]

    def _share(self, size: int) -> str:
        """Return megabytes and the share of plain training's total in percent."""
        return f"{size / MEGA:.2f} MB ({100 * size / self.plain:.0f} %)"


def memory_report(
    model: nn.Module,
    /,
    *inputs: Any,
    budget: float | int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **named_inputs: Any,
) -> MemoryReport:
    """Report the memory that each module holds between forward and backward, in plain and lean training.

    Runs ``model(*inputs, **named_inputs)`` on copies of the network and the inputs, in the current mode of the network
    and with gradients. Restores the random number generators, but not side effects of forward outside the network, such
    as variables of hooks. Held bytes are the distinct memory that autograd saves, without inputs, parameters and
    buffers. If the network computes a loss, as transformers do for ``labels``, they include the loss.

    Measures the peaks of a plain step, a lean step, a step with a helpful budget and a step with checkpoints. Scalar
    outputs are taken for losses; without any, the loss is the cross-entropy of the outputs. The scratch memory of
    operations is not counted. With a ``budget``, the report describes the lean step that follows the final plan. If the
    budget limits the peak, scratch memory is counted for the plan, and no plain step runs.

    With the network and its inputs on the meta device, the report takes no memory. Attention and the recomputation of
    norms are then counted as on this machine's GPU, or as on the CPU without one.

    >>> import torch, torchvision, zoo
    >>> report = zoo.memory_report(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64))
    >>> print(f"lean training holds less: {report.lean < report.plain}")
    lean training holds less: True

    Args:
    - `model`: the network.
    - `inputs`: positional inputs: tensors, or lists and dicts of tensors. A dict is one input.
    - `budget`: as for `zoo.lean`.
    - `optimizer`: the optimizer of the network, one of torch.optim. Steps then include its step and its state. If its
      gradients are released (`zoo.release_gradients`), lean steps release them, too.
    - `named_inputs`: inputs by name. For a dict of them: ``zoo.memory_report(model, **batch)``.

    Raises TypeError if ``model`` is not a module, or if its forward has an input named ``budget`` or ``optimizer``
    too. Raises ConfigError for an invalid budget, an optimizer that needs all gradients at once, a network or an input
    that cannot be copied, if only one of network and inputs is on the meta device, and for autocast on the meta device,
    where it has no effect.
    """
    _check_arguments(model, {"budget": budget, "optimizer": optimizer})
    limit = Budget.parse(budget)
    is_meta = _is_on_meta(model, inputs, named_inputs)
    twin = None if optimizer is None else OptimizerTwin.of(model, optimizer, "zoo.memory_report")
    trial = Trial(model, (inputs, named_inputs), "zoo.memory_report", twin)
    plain = lean = checkpointed = with_budget = None
    with (
        show_progress("zoo.memory_report") as show, restore_generators(model), torch.enable_grad(), meta_attention(),
        _explain_dict_inputs(model, inputs, named_inputs),
    ):  # fmt: skip
        with suppress(NoGradientsError):
            if limit.peak_bytes is None or is_meta:
                show("a plain step")
                plain = trial.plain()
                show("a step with checkpoints")
                with suppress(RuntimeError, ConfigError):  # no blocks, or not every block can be recomputed
                    checkpointed = trial.checkpointed()
            show("a lean step")
            lean = trial.lean(limit)
        show("bytes held")
        modules = held_memory(trial, limit)
        if lean is None:  # a plain step that ran out of memory did not reach the missing gradients
            plain = None
        elif budget is None:
            show("a budget")
            with_budget = _suggest_budget(trial, sum(module.lean for module in modules))
    counted_for = {"cuda": "CUDA", "cpu": "the CPU"}[kernel_device().type] if is_meta else ""
    return MemoryReport(
        modules, plain, lean, checkpointed, with_budget, counted_for, Subject(model, trial.inputs, limit, twin)
    )


def _check_arguments(model: object, options: dict[str, object]) -> None:
    """Raise TypeError unless the model is a module, and for an option that is also an input of its forward."""
    if not isinstance(model, nn.Module):
        advice = f"; build the network first, as with zoo.get({model!r})" if isinstance(model, str) else ""
        raise TypeError(
            f"memory_report takes a torch.nn.Module, not {truncate(repr(model))} of type {type(model).__name__}{advice}"
        )
    for name in [each for each, value in options.items() if value is not None]:
        if name not in inspect.signature(model.forward).parameters:
            continue
        raise TypeError(
            f"{name} is both an option of memory_report and an input of {type(model).__name__}.forward: pass the input "
            "by position, or rename it in a wrapper"
        )


@contextmanager
def _explain_dict_inputs(model: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Iterator[None]:
    """Raises TypeError if the network fails for a positional dict of its named inputs."""
    try:
        yield
    except Exception as error:
        names = inspect.signature(model.forward).parameters.keys()
        if len(inputs) == 1 and not named_inputs and isinstance(inputs[0], Mapping) and inputs[0].keys() <= names:
            raise TypeError(
                f"a dict is one input: pass its items ({join_names(inputs[0])}) to {type(model).__name__} as "
                "zoo.memory_report(model, **batch)"
            ) from error
        raise


def _suggest_budget(trial: Trial, held_bytes: int) -> WithBudget | None:
    """Return a step whose recomputation takes at most half the time of forward; None if it holds no less."""
    planner = trial.planner()
    plans = [] if planner is None else [each for each in planner.front if each.cost <= planner.forward_cost / 2]
    if planner is None or not plans or planner.plain_bytes == 0:
        return None
    share = math.ceil(100 * plans[-1].live / planner.plain_bytes) / 100
    if share >= 1:
        return None
    budget = Budget(share)
    peak = trial.lean(budget).peak
    held = sum(module.lean for module in held_memory(trial, budget))
    return WithBudget(share, held, peak) if held < held_bytes else None


def _is_on_meta(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the network and its inputs are on the meta device. Raises ConfigError if only one of them is."""
    own = {each.device for each in (*model.parameters(), *model.buffers())}
    given = {each.device for each in tensors_in((args, kwargs)) if each.ndim > 0}  # scalars may be anywhere
    meta = torch.device("meta")
    if own and ((own == {meta} and given - own) or (meta in given and meta not in own)):
        raise ConfigError(
            f"the network is on {join_names(own)}, an input on {join_names(given - own)}",
            "memory_report",
            "move both to the meta device, as with model.to('meta') and x.to('meta'), or none",
        )
    is_meta = meta in given or own == {meta}
    if is_meta and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        remedy = "leave autocast or the meta device"
        raise ConfigError("autocast has no effect on the meta device", "memory_report", remedy)
    return is_meta


def _rounded(count: float) -> str:
    """Return bytes with three digits: more would be wrong without scratch memory."""
    number, unit = (count / 1e9, "GB") if count >= 1e9 else (count / MEGA, "MB")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _shorten(name: str, length: int) -> str:
    """Replace the start of a long name by "...". The end tells siblings apart."""
    return name if len(name) <= length else "..." + name[3 - length :]
