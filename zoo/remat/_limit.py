"""Plans the forward passes of a network while it trains, within a limit on memory if there is one.

The first pass of a kind saves as little as possible and is recorded. Later passes follow a plan. For a limit in bytes,
the second pass follows the smallest plan and its step is measured. This gives the peak of every plan. Without a limit,
later passes recompute cheap operations only. They run plainly if there is nothing to recompute.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zoo.errors import ConfigError
from zoo.remat._budget import Budget
from zoo.remat._follow import Follower
from zoo.remat._plan import Plan, Planner, planner_of
from zoo.remat._record import GraphRecorder
from zoo.remat._step_log import StepLog, log_of, other_logs
from zoo.tables import bytes_text
from zoo.torch_internals.data import storage_id, tensors_of
from zoo.torch_internals.dispatch import call_after_backward, is_profiling

PLACE = "budget of zoo.lean"  # names the budget in error messages
MARGIN = 0.02  # fraction of a limit that plans leave free, since steps vary
MIN_WARNED_BYTES = 2**20  # no warning if plain training saves fewer bytes
MAX_KINDS = 64  # remembered kinds of calls
MAX_DEPARTURES = 3  # a kind of calls is no longer planned after so many departures from plans
NUM_FORGIVEN = 20  # departures are counted from 1 again after so many passes that followed a plan
NUM_PLAIN = 100  # one pass is recorded after so many plain ones, as the network may have grown
MAX_MEASURED = 8  # measured steps per kind of calls
BACKWARD_ENDS, OVER = "end", " over"  # mark the end of backward and of a read in a log

Observer = GraphRecorder | Follower


class BelowFloor(UserWarning):
    """A budget is a smaller fraction than the network can train with."""


@dataclass(frozen=True)
class Profile:
    """The bytes of a step beside the blocks that its plan saves and recomputes, mostly gradients.

    Args:
    - `forward`: set of blocks that a forward pass saved -> the peak of this pass, these blocks included.
    - `before`: bytes before each read of backward; see `Plan`.
    - `after`: most bytes between each read and the next.
    """

    forward: Mapping[frozenset[int], int]
    before: Sequence[int]
    after: Sequence[int]

    def peak(self, plan: Plan, sizes: Sequence[int]) -> int:
        """Return the predicted peak of a step that follows a plan for blocks of these sizes.

        Forward holds at most the bytes of a measured forward pass and of the blocks that only this plan saves. It
        usually holds at most the blocks that this plan saves and the most other bytes of a measured pass.
        """

        def bytes_of(blocks: Iterable[int]) -> int:
            return sum(sizes[block] for block in blocks)

        rest = max(total - bytes_of(saved) for saved, total in self.forward.items())
        bounds = [total + bytes_of(plan.saved - saved) for saved, total in self.forward.items()]
        forward = min(plan.saved_bytes + rest, *bounds)
        during = (ours + other for ours, other in zip(plan.during, self.before, strict=True))
        after = (ours + other for ours, other in zip(plan.after, self.after, strict=True))
        return max(forward, *during, *after)

    def joined(self, other: Profile | None) -> Profile:
        """Return the maximum of two profiles at each time of backward and for each forward pass."""
        if other is None:
            return self
        before, after = zip(self.before, other.before, strict=True), zip(self.after, other.after, strict=True)
        forward = {
            saved: max(peaks.get(saved, 0) for peaks in (self.forward, other.forward))
            for saved in {**self.forward, **other.forward}
        }
        return Profile(forward, list(map(max, before)), list(map(max, after)))

    @classmethod
    def of_log(cls, plan: Plan, log: StepLog) -> Profile | None:
        """Return the profile of a logged step that followed a plan; None if backward read nothing."""
        if not log.marks:
            return None
        totals = log.totals()
        ends = [index for _, index in log.marks[1:]]
        before: dict[int, int] = {}
        after: dict[int, int] = {}
        forward = max(totals[: log.marks[0][1] + 1])
        for (name, index), end in zip(log.marks, [*ends, len(totals) - 1], strict=True):
            if name == BACKWARD_ENDS:
                break
            number, is_over, _ = name.partition(OVER)
            time = int(number)
            if is_over:
                after[time] = max(0, max(totals[index : end + 1]) - plan.after[time], after.get(time, 0))
            else:
                before[time] = max(0, totals[index] - plan.before[time], before.get(time, 0))
        if not before:
            return None
        rest = [0]  # reads of tensors that autograd holds itself have no marks
        for time in range(len(plan.during)):
            rest.append(after.get(time, rest[-1]))
        reads = [before.get(time, rest[time]) for time in range(len(plan.during))]
        return cls({plan.saved: forward}, reads, rest[1:])


class Measurement:
    """Measures a step from the start of forward to the end of backward.

    On a CPU, the log stays open until `finish`: the autograd engine lets no profiler end within backward. No other
    profiler can begin in between.
    """

    _of_thread = threading.local()  # a profiler belongs to a thread

    def __init__(self, plan: Plan, log: StepLog, on_end: Callable[[Profile | None], None]) -> None:
        self._plan, self._log, self._on_end = plan, log, on_end
        self._is_open, self._has_read = True, False
        log.__enter__()
        Measurement._of_thread.open = self

    def read(self, time: int, is_over: bool) -> None:
        """Mark that backward starts or ends the read of a saved tensor. It may run in another thread."""
        if not self._is_open:
            return
        if not self._has_read:
            self._has_read = True
            call_after_backward(self._end_backward)
        self._log.mark(f"{time}{OVER if is_over else ''}")

    def _end_backward(self) -> None:
        if self._is_open:
            self._log.mark(BACKWARD_ENDS)

    @classmethod
    def finish(cls) -> bool:
        """End the open measurement; return whether there was one."""
        measurement: Measurement | None = getattr(cls._of_thread, "open", None)
        if measurement is None:
            return False
        cls._of_thread.open, measurement._is_open = None, False
        measurement._log.__exit__(None, None, None)
        measurement._on_end(Profile.of_log(measurement._plan, measurement._log))
        return True


@dataclass
class Kind:
    """The calls of a module with inputs of the same shapes in the same mode.

    Args:
    - `planner`: plans of the last recorded pass; None if the next pass is to be recorded.
    - `profile`: bytes beside the plan; None before the first measurement.
    - `num_departures`: number of passes that departed from the recorded one.
    - `num_followed`: number of passes that followed their plan since the last departure.
    - `num_plain`: number of plain passes since the last recorded one.
    - `num_in_flight`: maximum number of passes that waited for their backward at once, this one included.
    - `measured`: indices of the plans of the front whose steps were measured.
    - `peaks`: predicted peak of a step with each plan of the front.
    - `saved_bytes`: bytes that the last pass would save in plain training, and bytes that it saved.
    """

    planner: Planner | None = None
    profile: Profile | None = None
    num_departures: int = 0
    num_followed: int = 0
    num_plain: int = 0
    num_in_flight: int = 1
    measured: set[int] = field(default_factory=set)
    peaks: list[int] = field(default_factory=list)
    saved_bytes: tuple[int, int] = (0, 0)

    def add(self, position: int, profile: Profile | None) -> None:
        """Add the profile of a step with a plan of the front; None if its backward did not run."""
        if profile is None or self.planner is None:
            self.measured.discard(position)
            return
        self.profile = profile.joined(self.profile)
        self.peaks = [self.profile.peak(plan, self.planner.sizes) for plan in self.planner.front]

    def forget(self) -> None:
        """Forget the recorded pass after a departure from it."""
        self.planner = self.profile = None
        self.measured.clear()
        self.peaks = []
        self.num_departures = 1 if self.num_followed >= NUM_FORGIVEN else self.num_departures + 1
        self.num_followed = 0


class Limiter:
    """Plans the passes of a module, within a budget if there is one."""

    def __init__(self, budget: Budget) -> None:
        self._share, self._peak_bytes, self._has_limit = budget.share, budget.peak_bytes, budget.has_limit
        self._has_warned = False
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._in_flight: WeakSet[Observer] = WeakSet()  # observers of passes that wait for their backward
        self._lock = threading.RLock()  # replicas of a network in several threads share the limiter

    def runs_plainly(self, key: Hashable) -> bool:
        """Return whether a pass without a limit needs no recipes, because its plan recomputes nothing.

        Plain passes are not compared with the recorded one, so one in `NUM_PLAIN` is recorded again.
        """
        with self._lock:
            kind = self._kinds.get(key)
            planner = None if kind is None else kind.planner
            if kind is None or planner is None or planner.graph.has_frozen or planner.least.cost > 0:
                return False
            kind.num_plain += 1
            if kind.num_plain > NUM_PLAIN:
                kind.planner, kind.num_plain = None, 0
            return kind.planner is not None

    def begin(
        self, key: Hashable, is_permanent: Callable[[Tensor], bool], existing: Callable[[], int]
    ) -> Observer | None:
        """Return an observer for a new forward pass, which follows a plan or records the pass.

        None after too many departures of this kind of passes. Raises ConfigError if no plan is within the limit.

        Args:
        - `key`: equal for calls that track the same tensors.
        - `is_permanent`: as for `GraphRecorder`.
        - `existing`: returns the bytes that exist before the pass.
        """
        Measurement.finish()
        with self._lock:
            kind = self._kinds.setdefault(key, Kind())
            self._kinds.move_to_end(key)
            if len(self._kinds) > MAX_KINDS:
                del self._kinds[self._least_useful()]
            observer = self._observer(kind, is_permanent, existing)
            if observer is not None:
                self._in_flight.add(observer)
            return observer

    def _least_useful(self) -> Hashable:
        """Return the kind to forget: the latest of the kinds never planned, this one excepted, or else the oldest.

        Inputs of ever-changing shapes then displace no plans, and most of many alternating kinds keep theirs.
        """
        *others, _ = self._kinds
        unused = [key for key in others if self._kinds[key].num_followed + self._kinds[key].num_plain == 0]
        return unused[-1] if unused else others[0]

    def _observer(
        self, kind: Kind, is_permanent: Callable[[Tensor], bool], existing: Callable[[], int]
    ) -> Observer | None:
        is_new = len(self._in_flight) >= kind.num_in_flight  # more passes at once than in earlier steps
        kind.num_in_flight = max(kind.num_in_flight, 1 + len(self._in_flight))
        if kind.planner is None:
            return GraphRecorder(is_permanent) if kind.num_departures < MAX_DEPARTURES else None
        if self._peak_bytes is not None:
            return self._within_bytes(kind, existing, is_new)
        return Follower(kind.planner.graph, self._plan(kind.planner))

    def planner(self, key: Hashable) -> Planner | None:
        """Return the planner of a kind of passes; None before one was recorded."""
        return None if key not in self._kinds else self._kinds[key].planner

    def saved_bytes(self) -> tuple[int, int]:
        """Return the bytes that the largest pass would save in plain training, and the bytes that it last saved."""
        with self._lock:
            return max((kind.saved_bytes for kind in self._kinds.values()), default=(0, 0))

    def end(self, key: Hashable, observer: Observer | None, is_whole: bool, saved_bytes: int) -> None:
        """Note the end of a forward pass and its saved bytes. Ignores a pass that ended with an exception."""
        is_as_recorded = observer.end() if isinstance(observer, Follower) else True
        if not is_whole and observer is not None:
            self._in_flight.discard(observer)  # a traceback may keep it alive
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None or not is_whole:
                return
            if isinstance(observer, GraphRecorder) and (observer.graph.packs or not self._has_limit):
                kind.planner = planner_of(observer.graph)
            if kind.planner is not None:
                plain_bytes = kind.planner.plain_bytes
                saved_bytes = observer.plan.saved_bytes if isinstance(observer, Follower) else saved_bytes
                kind.saved_bytes = plain_bytes, min(plain_bytes, saved_bytes)
            if is_as_recorded:
                kind.num_followed += isinstance(observer, Follower)
            else:
                kind.forget()

    def _plan(self, planner: Planner) -> Plan:
        """Return the plan within the fraction, or the plan without a limit."""
        if self._share is None:
            return planner.least
        plan = planner.within(self._share * planner.plain_bytes)
        if plan is not None:
            return plan
        least = planner.front[-1]
        if self._share == 0 or self._has_warned or planner.plain_bytes < MIN_WARNED_BYTES:
            return least
        self._has_warned = True
        share = least.live / planner.plain_bytes
        warnings.warn(
            f"zoo.lean cannot hold as little as {self._share:.2g} of plain training: it holds {share:.2f}, the least "
            "that takes no more than one more forward pass",
            BelowFloor,
            stacklevel=2,
        )
        return least

    def _within_bytes(self, kind: Kind, existing: Callable[[], int], is_new: bool) -> Follower:
        assert self._peak_bytes is not None
        assert kind.planner is not None
        front, device = kind.planner.front, torch.device(kind.planner.graph.device)
        position = len(front) - 1
        waiting = [each.plan.saved_bytes for each in self._in_flight if isinstance(each, Follower)]
        if kind.profile is not None:
            in_flight = 0 if device.type == "cuda" else sum(waiting)
            margin = MARGIN * kind.num_in_flight  # plans do not include the outputs of other passes
            room = (1 - margin) * self._peak_bytes - existing() - in_flight
            others = kind.num_in_flight - 1 - len(self._in_flight)
            taken = [peak + others * plan.saved_bytes for peak, plan in zip(kind.peaks, front, strict=True)]
            fitting = [index for index, num_bytes in enumerate(taken) if num_bytes <= room]
            if not fitting and not is_new:
                least = self._peak_bytes + (min(taken) - room) / (1 - margin)
                raise ConfigError(
                    f"a training step takes at least {bytes_text(least)}, more than the limit of "
                    f"{bytes_text(self._peak_bytes)}",
                    PLACE,
                    "raise the limit, or train with smaller batches",
                )
            position = fitting[0] if fitting else len(front) - 1
        measurement = None
        can_measure = device.type != "cpu" or not is_profiling()  # the user may have a profiler
        if position not in kind.measured and len(kind.measured) < MAX_MEASURED and can_measure:
            kind.measured.add(position)
            measurement = Measurement(front[position], log_of(device), partial(kind.add, position))
        return Follower(kind.planner.graph, front[position], None if measurement is None else measurement.read)


other_logs.append(Measurement.finish)


def existing_bytes(parameters: Callable[[], Sequence[Tensor]], inputs: Iterable[Tensor]) -> int:
    """Return the bytes that exist before a step: parameters, buffers, gradients, optimizer states and inputs.

    On a GPU, returns all bytes that the process has allocated.
    """
    own = parameters()
    if own and own[0].device.type == "cuda":
        return torch.cuda.memory_allocated(own[0].device)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    tensors = (*own, *gradients, *optimizer_states(own), *inputs)
    storages = {storage_id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


_optimizers: WeakSet[Optimizer] = WeakSet()


def optimizer_states(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the state for these parameters of all optimizers that have made a step."""
    return tensors_of([optimizer.state.get(parameter) for optimizer in _optimizers for parameter in parameters])


def _finish_measurement(*_: object) -> None:
    Measurement.finish()


@cache
def watch_optimizers() -> None:
    """Register all optimizers at their next step, and end measurements before their steps."""
    register_optimizer_step_pre_hook(_finish_measurement)
    register_optimizer_step_post_hook(lambda optimizer, *_: _optimizers.add(optimizer))
