"""What each module of a network holds between forward and backward in plain and in lean training, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.errors import truncate
from zoo.remat import Rematerializer
from zoo.remat.budget import RECOMPUTED, Budget, Decision, bytes_text
from zoo.remat.planning import plan, unchanged
from zoo.tables import Cell, markdown_table
from zoo.torch_internals import BatchNormBase, tree_leaves

MEGA = 1e6
CONTAINERS = (nn.Sequential, nn.ModuleList)
NUM_MODULES = 5  # rows of the printed report
MAX_NAME_CHARS, MAX_KIND_CHARS = 32, 18


class ModuleMemory(NamedTuple):
    """What the operations of one module, without those of its submodules, hold.

    Args:
    - `name`: qualified name of the module; "" for the network itself.
    - `kind`: its class.
    - `tensors`: a decision for each tensor that autograd saved, or that a recipe starts from, in this module.
    """

    name: str
    kind: str
    tensors: list[Decision]

    @property
    def plain(self) -> int:
        """Bytes that plain training holds."""
        return sum(tensor.plain_bytes for tensor in self.tensors)

    @property
    def lean(self) -> int:
        """Bytes that lean training holds."""
        return sum(tensor.lean_bytes for tensor in self.tensors)

    @property
    def kept(self) -> dict[tuple[str, str], int]:
        """Bytes that lean training keeps, by the operation that computed them and the reason; the most first."""
        return _most_first(((tensor.made_by, tensor.reason), tensor.lean_bytes) for tensor in self.tensors)

    @property
    def repeated(self) -> dict[str, int]:
        """Bytes that lean training recomputes, by the operation that computed them; the most first."""
        repeated = (tensor for tensor in self.tensors if tensor.reason == RECOMPUTED)
        return _most_first((tensor.made_by, tensor.bytes) for tensor in repeated)


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """What a network holds between forward and backward; printed, a summary of at most fifteen lines.

    Args:
    - `modules`: the modules that hold anything, in the order in which they first save a tensor.
    - `with_budget`: a budget that lets `zoo.lean` recompute half of what convolutions and matrix products still hold,
      and the bytes held with it; None if the report was made with a budget or if none helps.
    - `with_inplace_norms`: bytes held without the inputs of batch norms, which in-place norms overwrite; None without
      batch norms in training mode.
    - `with_checkpoints`: bytes held if each block is checkpointed: the inputs of blocks, and what other modules save.
      Blocks are the items of `nn.Sequential` and `nn.ModuleList` that have submodules; None without such blocks.
    - `peak`: bytes of a training step at its peak, if the budget limits it.
    """

    modules: list[ModuleMemory]
    with_budget: tuple[str, int] | None = None
    with_inplace_norms: int | None = None
    with_checkpoints: int | None = None
    peak: int | None = None

    @property
    def plain(self) -> int:
        """Bytes that plain training holds."""
        return sum(module.plain for module in self.modules)

    @property
    def lean(self) -> int:
        """Bytes that lean training holds."""
        return sum(module.lean for module in self.modules)

    def table(self) -> str:
        """Return a Markdown table with a row per module: bytes held, what is kept and why, what is recomputed."""
        headers = ("module", "kind", "plain, MB", "lean, MB", "kept", "recomputed")
        rows = [
            [
                each.name or "(itself)", each.kind, f"{each.plain / MEGA:.2f}", f"{each.lean / MEGA:.2f}",
                "; ".join(f"{made_by or 'input'} {size / MEGA:.2f} ({reason})" for (made_by, reason), size
                          in each.kept.items()),
                "; ".join(f"{made_by} {size / MEGA:.2f}" for made_by, size in each.repeated.items()),
            ]
            for each in self.modules
        ]  # fmt: skip
        rows.append(["all", "", f"{self.plain / MEGA:.2f}", f"{self.lean / MEGA:.2f}", "", ""])
        return markdown_table(headers, rows)

    def __repr__(self) -> str:
        """Return the totals, the modules that hold most, and what would help, in at most twelve lines."""
        if self.plain == 0:
            return "plain training holds nothing for backward: no operation saves a tensor"
        total = f"held for backward: {self.plain / MEGA:.2f} MB in plain training, {self._share(self.lean)} in lean"
        details = "print(report.table()) shows all modules, what each keeps and why"
        peak = [] if self.peak is None else [f"peak of a lean training step: {bytes_text(self.peak)}"]
        return "\n".join([f"{total} training", *peak, self._largest(), self._advice(), details])

    def _largest(self) -> str:
        """Return a table of the modules that hold most in plain training, and a row for all others."""
        ranked = sorted(self.modules, key=lambda module: (-module.plain, -module.lean))
        shown, others = ranked[:NUM_MODULES], ranked[NUM_MODULES:]
        rows: list[list[Cell]] = [[*_shown_name(each), *self._cells(each.plain, each.lean)] for each in shown]
        if others:
            plain, lean = sum(each.plain for each in others), sum(each.lean for each in others)
            rows.append([f"{len(others)} others", "", *self._cells(plain, lean)])
        return markdown_table(["module", "kind", "plain MB", "%", "lean MB", "%"], rows)

    def _cells(self, plain: int, lean: int) -> list[float]:
        """Return megabytes and the percentages of what the whole network holds, plain and lean."""
        return [plain / MEGA, 100 * plain / self.plain, lean / MEGA, 100 * lean / max(1, self.lean)]

    def _advice(self) -> str:
        """Return a line with what each remedy would save."""
        held = {"lean": self.lean, "in-place norms": self.with_inplace_norms, "checkpoints": self.with_checkpoints}
        if self.with_budget is not None:
            budget, held_with_budget = self.with_budget
            held[f'budget "{budget}"'] = held_with_budget
        saved = {name: self.plain - size for name, size in held.items() if size is not None and size < self.plain}
        most_first = sorted(saved.items(), key=lambda item: -item[1])
        return "would save: " + (
            ", ".join(f"{name} {self._share(size, '.3g')}" for name, size in most_first) or "nothing"
        )

    def _share(self, size: int, precision: str = ".2f") -> str:
        """Return megabytes and the percentage of what plain training holds."""
        megabytes = f"{size / MEGA:{precision}}" if size < 1000 * MEGA else f"{size / MEGA:.0f}"
        return f"{megabytes} MB ({100 * size / self.plain:.0f} %)"


def memory_report(model: nn.Module, *inputs: Any, budget: float | int | str | None = None) -> MemoryReport:
    """Return what each module of a network holds between forward and backward, in plain and in lean training.

    Runs forward passes in the network's current mode and with gradients, and restores buffers, such as running
    statistics, and the state of the random number generators afterwards. Bytes are those of distinct memory that
    autograd saves; inputs, parameters and buffers are not counted. Without a budget the first pass makes the report,
    and a second one measures a budget that helps. With one, passes are repeated until it is met. A limit on the peak
    also runs backward. With the network and its inputs on the meta device, this takes no memory and counts tensors
    only, without the scratch memory of operations.

    >>> import torch, torchvision, zoo
    >>> report = zoo.memory_report(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64))
    >>> print(f"lean training holds less: {report.lean < report.plain}")
    lean training holds less: True

    Args:
    - `model`: the network.
    - `inputs`: its positional inputs, as in ``model(*inputs)``: tensors, or lists and dicts of them.
    - `budget`: that of `zoo.lean`.

    Raises TypeError if ``model`` is not a module, ConfigError for a value that is not a budget.
    """
    if not isinstance(model, nn.Module):
        advice = f"; build the network first, as with zoo.get({model!r})" if isinstance(model, str) else ""
        raise TypeError(
            f"memory_report takes a torch.nn.Module, not {truncate(repr(model))} of type {type(model).__name__}{advice}"
        )
    limit = Budget.parse(budget)
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    rematerializer = partial(Rematerializer, parameters=[*model.parameters(), *model.buffers(), *tensors])
    block_inputs = dict.fromkeys(_block_names(model), 0)
    peak = with_budget = None
    with unchanged(model), torch.enable_grad():
        if limit.peak_bytes is not None:
            peak = plan(limit, model, rematerializer, model, inputs, {})
        while True:  # a fraction is raised after each pass that exceeds it, up to the costliest product
            flops_per_byte = limit.flops_per_byte
            decisions: list[Decision] = []
            with _named(model, rematerializer(limit, log=decisions), block_inputs):
                model(*inputs)
            if limit.flops_per_byte == flops_per_byte:
                break
        suggested = _suggested_budget(decisions) if budget is None else None
        if suggested is not None:
            log: list[Decision] = []
            with rematerializer(suggested, log=log):
                model(*inputs)
            held = sum(decision.lean_bytes for decision in log)
            with_budget = (suggested, held) if held < sum(decision.lean_bytes for decision in decisions) else None
    named = dict(model.named_modules())
    by_place: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_place.setdefault(decision.place, []).append(decision)
    modules = [ModuleMemory(place, type(named[place]).__name__, decided) for place, decided in by_place.items()]
    plain = sum(module.plain for module in modules)
    by_norms = [each.plain for each in modules if isinstance(named[each.name], BatchNormBase)]
    in_blocks = [each.plain for each in modules if _is_inside(each.name, block_inputs)]
    return MemoryReport(
        modules,
        with_budget,
        with_inplace_norms=plain - sum(by_norms) if by_norms and model.training else None,
        with_checkpoints=plain - sum(in_blocks) + sum(block_inputs.values()) if block_inputs else None,
        peak=peak,
    )


def _block_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of the blocks: the innermost items of nested containers that have submodules."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and not _is_inside(name, blocks):
            for item, child in module.named_children():
                has_blocks = isinstance(child, CONTAINERS) and any(map(_has_children, child.children()))
                if _has_children(child) and not has_blocks:
                    blocks.append(f"{name}.{item}" if name else item)
    yield from blocks


def _is_inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _suggested_budget(decisions: list[Decision]) -> str | None:
    """Return the budget that covers half of what convolutions and matrix products hold; None if that is nothing."""
    prices: Counter[int] = Counter()
    for decision in decisions:
        if decision.flops_per_byte is not None and decision.lean_bytes > 0:
            prices[math.ceil(decision.flops_per_byte)] += decision.bytes
    covered = 0
    for price in sorted(prices):
        covered += prices[price]
        if 2 * covered >= prices.total():
            return f"{price} FLOP/B"
    return None


def _most_first(sizes: Iterator[tuple[Any, int]]) -> dict[Any, int]:
    """Return the sums by key, without those of no bytes."""
    sums: Counter[Any] = Counter()
    for key, size in sizes:
        sums[key] += size
    return {key: size for key, size in sums.most_common() if size > 0}


def _shown_name(module: ModuleMemory) -> tuple[str, str]:
    return _shortened(module.name or "(itself)", MAX_NAME_CHARS), _shortened(module.kind, MAX_KIND_CHARS)


def _shortened(name: str, length: int) -> str:
    """Return the end of a name, which tells siblings apart, behind "..." where it is too long."""
    return name if len(name) <= length else "..." + name[3 - length :]


@contextmanager
def _named(model: nn.Module, rematerializer: Rematerializer, input_bytes: dict[str, int]) -> Iterator[None]:
    """Return a context of a rematerializer that knows the name of the running module.

    ``input_bytes`` receives the bytes of the inputs of the modules that it names.
    """
    running: list[str] = [""]

    def enter(name: str, _: nn.Module, inputs: Any) -> None:
        running.append(name)
        rematerializer.place = name
        if name in input_bytes:
            input_bytes[name] = sum(each.nbytes for each in tree_leaves(inputs) if isinstance(each, Tensor))

    def leave(*_: Any) -> None:
        running.pop()
        rematerializer.place = running[-1]

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with rematerializer:
            yield
    finally:
        for handle in handles:
            handle.remove()
