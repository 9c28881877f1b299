"""What each module of a network leaves held between forward and backward, plain and lean, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.ops.lean import Recording
from zoo.ops.lean.recording import Decision
from zoo.report.tables import markdown_table

MEGA = 1e6


class ModuleMemory(NamedTuple):
    """What the operations of one module, without those of the modules in it, leave held.

    Args:
    - `name`: of the module in the network; "" for the network's own operations.
    - `kind`: its class.
    - `plain`: bytes that autograd keeps.
    - `lean`: bytes that are kept with recipes.
    - `kept`: bytes that are kept, by the operation that made them and the reason, the most first.
    - `repeated`: bytes that are computed again, by operation.
    """

    name: str
    kind: str
    plain: int
    lean: int
    kept: dict[tuple[str, str], int]
    repeated: dict[str, int]


class MemoryReport(NamedTuple):
    """The modules in the order in which they first keep something, and the sums; as text, a table."""

    modules: list[ModuleMemory]

    @property
    def plain(self) -> int:
        """Bytes that plain training leaves held."""
        return sum(module.plain for module in self.modules)

    @property
    def lean(self) -> int:
        """Bytes that training with recipes leaves held."""
        return sum(module.lean for module in self.modules)

    def __str__(self) -> str:
        """Return a table with a row per module and one for all."""
        headers = ("module", "kind", "plain, MB", "lean, MB", "kept", "computed again")
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


def memory_report(model: nn.Module, example: Any, budget: float | int | str | None = None) -> MemoryReport:
    """Return what each module of a network leaves held between forward and backward, plain and with `zoo.lean`.

    The forward pass runs once, in the mode that the network is in and with gradients. Buffers, such as running
    statistics, and the state of the random number generators are as before afterwards. Bytes are those of distinct
    memory that autograd keeps; inputs, parameters and buffers are not counted.

    Args:
    - `model`: the network.
    - `example`: its input, or a tuple of its inputs.
    - `budget`: that of `zoo.lean`; one that limits bytes takes effect only after a pass, so it is not for a report.
    """
    log: list[Decision] = []
    inputs = example if isinstance(example, tuple) else (example,)
    own = [*model.parameters(), *model.buffers(), *(each for each in inputs if isinstance(each, Tensor))]
    recording = Recording(budget, parameters=own, log=log)
    with _unchanged(model), _named(model, recording), torch.enable_grad(), recording:
        model(*inputs)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    places = dict.fromkeys(decision.place for decision in log)
    return MemoryReport([_summary(place, kinds[place], [d for d in log if d.place == place]) for place in places])


def _summary(name: str, kind: str, decisions: list[Decision]) -> ModuleMemory:
    kept: Counter[tuple[str, str]] = Counter()
    repeated: Counter[str] = Counter()
    for decision in decisions:
        if decision.is_kept:
            kept[decision.made_by, decision.reason] += decision.bytes
        else:
            repeated[decision.made_by] += decision.bytes
    plain = sum(decision.plain_bytes for decision in decisions)
    most_first = {key: size for key, size in kept.most_common() if size > 0}
    return ModuleMemory(name, kind, plain, sum(kept.values()), most_first, dict(repeated.most_common()))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Return a context after which buffers and random number generators are as before."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])


@contextmanager
def _named(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Return a context in which the recording knows the name of the module that runs."""
    running: list[str] = [""]

    def enter(name: str, *_: Any) -> None:
        running.append(name)
        recording.place = name

    def leave(*_: Any) -> None:
        running.pop()
        recording.place = running[-1]

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
