"""The memory that plain and lean training hold between forward and backward, by module and by operation."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.memory.trial import Trial
from zoo.remat._budget import Budget
from zoo.remat._cost import LINEAR, PRODUCTS
from zoo.remat._operations import BATCH_NORMS, call_in_mode
from zoo.remat._plan import LEAST_SAVING
from zoo.remat._recording import traits_of
from zoo.remat._rematerializer import Rematerializer
from zoo.remat._rules import MASKS, rule_of
from zoo.remat._step_log import StorageLog
from zoo.remat._tracking import SMALLEST_BYTES
from zoo.torch_internals.compiler import never_compile
from zoo.torch_internals.data import is_wrapper, memory_id, observer, storage_id, tensors_of
from zoo.torch_internals.dispatch import TorchDispatchMode

# Why lean training frees memory that plain training holds.
RECOMPUTED = "recomputed in backward"
NOT_READ = "not read by backward"  # inputs of layers with frozen weights
# Why lean training holds memory.
SMALL = "small"
NOT_RECOMPUTABLE = "not an operation that can be recomputed"
WITH_BUDGET = "recomputed only if the budget allows it"
WITHIN_BUDGET = "the budget has room for it"
NOT_SMALLER = "the inputs of its recipe are not smaller"
INPUT = "input of a recipe"  # plain training frees it


class HeldMemory(NamedTuple):
    """Memory that plain or lean training holds between forward and backward.

    Args:
    - `place`: name of the first module that saves it; for memory that no module saves, of the module that computes it.
    - `made_by`: operation that computed its contents, such as "aten.convolution"; "zoo.lean" for bits and copies.
    - `plain`, `lean`: bytes that plain and lean training hold.
    - `reason`: why lean training holds or frees it.
    """

    place: str
    made_by: str
    plain: int
    lean: int
    reason: str


class ModuleMemory(NamedTuple):
    """Memory that the operations of one module hold, without its submodules.

    Args:
    - `name`: qualified name of the module; "" for the network itself.
    - `kind`: class of the module.
    - `memory`: memory whose `place` is this module.
    """

    name: str
    kind: str
    memory: list[HeldMemory]

    @property
    def plain(self) -> int:
        """Bytes that plain training holds."""
        return sum(each.plain for each in self.memory)

    @property
    def lean(self) -> int:
        """Bytes that lean training holds."""
        return sum(each.lean for each in self.memory)

    @property
    def held(self) -> dict[tuple[str, str], int]:
        """Bytes that lean training holds, by operation and reason, largest first."""
        return _largest_first(((each.made_by, each.reason), each.lean) for each in self.memory)

    @property
    def recomputed(self) -> dict[str, int]:
        """Bytes that lean training recomputes, by operation, largest first."""
        return _largest_first((each.made_by, each.plain) for each in self.memory if each.reason == RECOMPUTED)


def _largest_first(sizes: Iterator[tuple[Any, int]]) -> dict[Any, int]:
    """Return the total bytes per key, largest first, without zeros."""
    sums: Counter[Any] = Counter()
    for key, size in sizes:
        sums[key] += size
    return {key: size for key, size in sums.most_common() if size > 0}


def held_memory(trial: Trial, budget: Budget) -> list[ModuleMemory]:
    """Run a lean forward pass; return the modules that hold memory after it, in the order of execution.

    The pass follows the plan for the budget, if there is one already.
    """
    network, log = trial.copy(), HeldLog()
    kinds = {name: type(module).__name__ for name, module in network.named_modules()}
    with log.track_modules(network), log.record(budget, **trial.options(network)):
        network(*trial.inputs[0], **trial.inputs[1])
    del network  # tensors in its attributes are not held for backward
    gc.collect()
    by_place: dict[str, list[HeldMemory]] = {}
    for each in log.memory(budget.has_limit):
        by_place.setdefault(each.place, []).append(each)
    return [ModuleMemory(place, kinds[place], memory) for place, memory in by_place.items()]


@dataclass(eq=False)
class _Storage:
    """A storage that forward has created.

    Args:
    - `size`: bytes of the storage.
    - `place`: as in `HeldMemory`.
    - `operation`: operation that computed its contents; None for memory that lean training adds.
    - `is_saved`: whether autograd saves it in plain training.
    """

    size: int
    place: str
    operation: Any = None
    is_saved: bool = False


class HeldLog(StorageLog):
    """Logs the storages that a lean forward pass creates, and which of them autograd saves.

    The log keeps saved memory alive. After the outputs of the pass are freed, all memory still alive is held for
    backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places = [""]  # names of the running modules, innermost last
        self._created: list[_Storage] = []
        self._alive: dict[int, _Storage] = {}  # address -> storage
        self._packed: list[Any] = []

    @contextmanager
    def record(self, budget: Budget | None = None, **options: Any) -> Iterator[Rematerializer]:
        """Logs a forward pass in a `Rematerializer` with these options, which it yields."""
        with self, _LoggedRematerializer(self, budget, **options) as rematerializer, _LogOperations(self):
            yield rematerializer

    @contextmanager
    def track_modules(self, model: nn.Module) -> Iterator[None]:
        """Lets the log know the name of the running module."""

        def leave(*_: Any) -> None:
            self._places.pop()

        with ExitStack() as hooks:
            for name, module in model.named_modules():
                enter = observer(lambda *_, name=name: self._places.append(name))
                hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                hooks.callback(module.register_forward_hook(observer(leave), always_call=True).remove)
            yield

    def note_created(self, storage: torch.UntypedStorage) -> None:
        """Log that a storage was created, unless it is known."""
        address = storage_id(storage)
        if address not in self._known:
            self._alive[address] = _Storage(storage.nbytes(), self._places[-1])
            self._created.append(self._alive[address])
        super().note_created(storage)

    def _forget(self, address: int) -> None:
        super()._forget(address)
        self._alive.pop(address, None)

    def note_operation(self, operation: Any, out: Tensor) -> None:
        """Record the operation that computed the contents of a tensor."""
        if memory_id(out) in self._alive:
            self._alive[memory_id(out)].operation = operation

    def note_saved(self, tensor: Tensor, packed: Any) -> None:
        """Record that autograd saves a tensor and holds ``packed`` in its place."""
        self._packed.append(packed)
        storage = self._alive.get(memory_id(tensor)) if _has_memory(tensor) else None
        if storage is not None and not storage.is_saved:
            storage.is_saved, storage.place = True, self._places[-1]

    def memory(self, has_limit: bool = False) -> list[HeldMemory]:
        """Return the memory that is held now or would be held in plain training, in the order of creation.

        Args:
        - `has_limit`: whether a budget allows to recompute convolutions and products.
        """
        found = []
        alive = set(self._alive.values())
        for each in self._created:
            is_held = each in alive
            if is_held or each.is_saved:
                made_by = "zoo.lean" if each.operation is None else str(each.operation).rpartition(".")[0]
                reason = _reason_to_hold(each, has_limit) if is_held else _reason_to_free(each, has_limit)
                found.append(HeldMemory(each.place, made_by, each.size * each.is_saved, each.size * is_held, reason))
        return found


class _LoggedRematerializer(Rematerializer):
    """A rematerializer that logs the tensors that autograd saves."""

    def __init__(self, log: HeldLog, budget: Budget | None, **options: Any) -> None:
        super().__init__(budget, **options)
        self._held = log

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a saved tensor."""
        packed = super().pack(tensor)
        self._held.note_saved(tensor, packed)
        return packed


class _LogOperations(TorchDispatchMode):
    """Logs the operations that the network calls, before the rematerializer replaces some of them."""

    supports_higher_order_operators = True

    def __init__(self, log: HeldLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = {memory_id(each) for each in tensors_of((args, kwargs)) if _has_memory(each)}
        result = call_in_mode(func, *args, **kwargs)
        for each in filter(_has_memory, tensors_of(result)):
            if memory_id(each) not in inputs or traits_of(func).is_writing:  # not a view
                self._log.note_operation(func, each)
        return result


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapper(tensor)


def _reason_to_hold(storage: _Storage, has_limit: bool) -> str:
    if not storage.is_saved:
        return INPUT
    if storage.size < LEAST_SAVING * SMALLEST_BYTES:
        return SMALL
    if storage.operation in PRODUCTS and not has_limit:
        return WITH_BUDGET
    if storage.operation not in PRODUCTS and not _is_cheap(storage.operation):
        return NOT_RECOMPUTABLE
    return WITHIN_BUDGET if has_limit else NOT_SMALLER


def _reason_to_free(storage: _Storage, has_limit: bool) -> str:
    return RECOMPUTED if has_limit or _is_cheap(storage.operation) or storage.operation in LINEAR else NOT_READ


def _is_cheap(operation: Any) -> bool:
    """Return whether an operation may be recomputed without a budget."""
    return operation in BATCH_NORMS or operation in MASKS or rule_of(operation) is not None
