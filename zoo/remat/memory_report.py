"""What each module of a network holds between forward and backward in plain and in lean training, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.errors import truncate
from zoo.ops.context import restored_buffers
from zoo.remat import Rematerializer
from zoo.remat.budget import RECOMPUTED, Budget, Decision
from zoo.tables import Cell, markdown_table
from zoo.torch_internals import tree_leaves

MEGA = 1e6
NUM_MODULES = 5  # rows of the printed report
NUM_REASONS = 2  # lines of it that tell why tensors are kept
MAX_NAME_CHARS, MAX_KIND_CHARS, MIN_NAME_CHARS, MAX_LINE_CHARS = 32, 18, 10, 100
SMALL_SHARE = 0.01  # of what lean training holds: the printed report leaves less out


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
    """

    modules: list[ModuleMemory]
    with_budget: tuple[str, int] | None = None

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
        """Return the totals, the modules that hold most, and what would help, in lines of at most 100 characters."""
        if self.plain == 0:
            return "plain training holds nothing for backward: no operation saves a tensor"
        total = f"held for backward: {self.plain / MEGA:.2f} MB in plain training, {self._share(self.lean)} in lean"
        details = "print(report.table()) shows all modules, what each keeps and why"
        return "\n".join([f"{total} training", self._largest(), *self._advice(), details])

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

    def _advice(self) -> Iterator[str]:
        """Yield a line about a budget, and one for each of the main reasons why no budget helps with the rest."""
        if self.with_budget is not None:
            budget, held = self.with_budget
            yield f'zoo.lean(model, "{budget}") recomputes cheap convolutions and products too: {self._share(held)}'
        held_by, places = Counter[tuple[str, str]](), dict[tuple[str, str], dict[str, None]]()
        for module in self.modules:
            for tensor in module.tensors:
                if tensor.lean_bytes > 0 and tensor.flops_per_byte is None:
                    cause = tensor.made_by, tensor.reason
                    held_by[cause] += tensor.bytes
                    places.setdefault(cause, {})[module.name or "(itself)"] = None
        for (made_by, reason), size in held_by.most_common(NUM_REASONS):
            if size >= SMALL_SHARE * self.lean:
                yield _reason_line(made_by or "input", size, list(places[made_by, reason]), reason)

    def _share(self, held: int) -> str:
        """Return megabytes and the percentage of what plain training holds."""
        return f"{held / MEGA:.2f} MB ({100 * held / self.plain:.0f} %)"


def memory_report(model: nn.Module, *inputs: Any, budget: float | int | str | None = None) -> MemoryReport:
    """Return what each module of a network holds between forward and backward, in plain and in lean training.

    Runs forward passes in the network's current mode and with gradients, and restores buffers, such as running
    statistics, and the state of the random number generators afterwards. Bytes are those of distinct memory that
    autograd saves; inputs, parameters and buffers are not counted. Without a budget the first pass makes the report,
    and a second one measures a budget that helps. With one, passes are repeated until it is met.

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
    with _unchanged(model), torch.enable_grad():
        while True:  # a budget of bytes is raised after each pass that exceeds it, up to the costliest product
            flops_per_byte = limit.flops_per_byte
            decisions = _decisions(model, inputs, limit)
            if limit.flops_per_byte == flops_per_byte:
                break
        suggested = _suggested_budget(decisions) if budget is None else None
        with_budget = None
        if suggested is not None:
            held = sum(decision.lean_bytes for decision in _decisions(model, inputs, Budget.parse(suggested)))
            with_budget = (suggested, held) if held < sum(decision.lean_bytes for decision in decisions) else None
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    by_place: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_place.setdefault(decision.place, []).append(decision)
    modules = [ModuleMemory(place, kinds[place], tensors) for place, tensors in by_place.items()]
    return MemoryReport(modules, with_budget)


def _decisions(model: nn.Module, inputs: tuple[Any, ...], budget: Budget) -> list[Decision]:
    """Return the decisions of one forward pass."""
    log: list[Decision] = []
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    rematerializer = Rematerializer(budget, parameters=[*model.parameters(), *model.buffers(), *tensors], log=log)
    with _named(model, rematerializer), rematerializer:
        model(*inputs)
    return log


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


def _reason_line(made_by: str, size: int, places: list[str], reason: str) -> str:
    """Return which operation keeps how much, where and why, with the first of the modules."""
    before = f"{made_by} keeps {size / MEGA:.2f} MB in "
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    room = MAX_LINE_CHARS - len(f"{before}{more}: {reason}")
    return f"{before}{_shortened(places[0], max(MIN_NAME_CHARS, room))}{more}: {reason}"[:MAX_LINE_CHARS]


def _shortened(name: str, length: int) -> str:
    """Return the end of a name, which tells siblings apart, behind "..." where it is too long."""
    return name if len(name) <= length else "..." + name[3 - length :]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Context that restores buffers and random number generators at its end."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), restored_buffers(model):
        yield


@contextmanager
def _named(model: nn.Module, rematerializer: Rematerializer) -> Iterator[None]:
    """Return a context in which the rematerializer knows the name of the module that runs."""
    running: list[str] = [""]

    def enter(name: str, *_: Any) -> None:
        running.append(name)
        rematerializer.place = name

    def leave(*_: Any) -> None:
        running.pop()
        rematerializer.place = running[-1]

    handles: list[Any] = []
    for name, module in model.named_modules():
        begin: Callable[..., None] = partial(enter, name)
        handles.append(module.register_forward_pre_hook(begin, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
