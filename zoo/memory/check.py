"""`zoo.check`: whether a variant of a network trains bit-identically to plain training, and what it saves."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ConfigError, truncate
from zoo.memory.allocations import Memory, measure_memory
from zoo.memory.containers import tensors_in
from zoo.memory.places import StepDigests
from zoo.memory.progress import progress
from zoo.memory.release import release_gradients as start_release
from zoo.memory.scenarios import SCENARIOS, STEPS, BuildOptimizer, Scenario, Training, match_names, plain_sgd
from zoo.memory.timing import Clock, time_interleaved, training_step
from zoo.memory.trial import (
    ModelInputs,
    copied,
    copy_network,
    default_loss,
    device_of,
    trained_outputs,
)
from zoo.memory.values import Difference, Value, difference, value_of
from zoo.ops.recomputation import restore_generators
from zoo.remat.lean import lean
from zoo.tables import counted

ROUNDS = 5  # of timed steps
WHERE = "zoo.check"  # in messages

Variant = Callable[[nn.Module], nn.Module]


@dataclass
class Check:
    """Result of `check`; its string has at most eleven lines.

    Args:
    - `same`: whether all compared values are bit-identical to plain training; None if plain training is not
      deterministic.
    - `values`: number of compared values.
    - `difference`: the first value that differs between plain training and the variant or, if `same` is None, between
      two runs of plain training.
    - `fixed`: what the steps could not vary because the network or the loss raised an error: "batch", "batch size",
      "evaluation mode".
    - `scenarios`: other ways to train that gave the same bits, such as "second derivatives".
    - `skipped`: scenarios in which plain training raises an error or is not deterministic.
    - `errors`: scenarios in which the variant alone raises an error, and the error.
    - `plain`, `variant`: bytes of a training step.
    - `time_ratio`: time of a step of the variant divided by the time of a plain step: the median over interleaved
      forward and backward passes.
    """

    name: str
    mode: str
    steps: int
    same: bool | None
    values: int
    difference: Difference | None
    fixed: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    plain: Memory | None = None
    variant: Memory | None = None
    time_ratio: float | None = None

    @property
    def verdict(self) -> str:
        """What ``same`` means."""
        return {True: "same bits", False: "other bits", None: "plain training is not deterministic"}[self.same]

    def __str__(self) -> str:
        steps, values = counted(self.steps, "step"), counted(self.values, "value")
        lines = [f"{self.name}, {self.mode}, {steps}: {self.verdict} ({values} compared)"]
        if self.difference is not None:
            lines.append(str(self.difference))
        if self.same is None:
            lines.append("  torch.use_deterministic_algorithms(True) makes the steps of a network repeatable")
        for title, names in (
            ("not varied", self.fixed),
            ("also compared", self.scenarios),
            ("not compared, as plain training fails", self.skipped),
            ("the variant alone raises an error", self.errors),
        ):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        if self.plain is not None and self.variant is not None:
            for title, a, b in (
                ("held after forward", self.plain.held, self.variant.held),
                ("peak", self.plain.peak, self.variant.peak),
            ):
                lines.append(f"{title}: {a / 1e6:.1f} MB -> {b / 1e6:.1f} MB ({b / max(1, a):.2f})")
        if self.time_ratio is not None:
            lines.append(f"time of a step: {self.time_ratio:.2f} of a plain step")
        return "\n".join(lines)


def check(
    model: nn.Module,
    *inputs: Any,
    variant: Variant = lean,
    loss: Callable[[Any], Tensor] | None = None,
    steps: int = 3,
    optimizer: BuildOptimizer = plain_sgd,
    release_gradients: bool = False,
    **keywords: Any,
) -> Check:
    """Train copies of a network plainly and as a variant, compare all values bit for bit, and print the result.

    The values are outputs, the loss, gradients of parameters and inputs, the inputs after the pass, buffers, parameters
    and the optimizer's state after a step, and the states of the random number generators of torch, numpy and Python.
    NaN equals NaN.
    Step 1 trains on the inputs, step 2 on two other batches whose gradients add up, step 3 on a smaller batch, and
    further steps on one other batch each. An evaluation pass follows. The other batches are the inputs rolled along
    the batch dimension, and scaled if they are not integers.

    Then the same copies are trained in other ways (`zoo.memory.scenarios`): several passes before backward,
    evaluation before backward and between steps, second derivatives, autocast, other frozen parameters, inputs and
    outputs that are overwritten. The size of the inputs and the number of passes bound the faults that can be found.

    If a value differs, plain training runs again, so that a nondeterministic operation is not taken for a fault of the
    variant. The network, the generators and the inputs are unchanged afterwards. What forward changes elsewhere, such
    as variables of hooks, stays changed.

        zoo.check(model, images)
        zoo.check(model, images, variant=functools.partial(zoo.lean, budget=0.4))
        zoo.check(model, loss=lambda outputs: outputs.loss, **batch)

    Args:
    - `model`: the network, in the mode to check.
    - `inputs`, `keywords`: arguments of the network.
    - `variant`: returns a variant of a network. It may change its argument, which is a copy. It may rename parameters
      and buffers, which are then matched by their order.
    - `loss`: computes a scalar of the output of the network. By default it is the sum of the scalars of the output,
      or without scalars the cross-entropy of its tensors over the last dimension.
    - `steps`: number of training steps.
    - `optimizer`: returns the optimizer of a list of parameters, such as ``torch.optim.AdamW``; plain SGD by default.
    - `release_gradients`: also release the gradients of the variant (`zoo.release_gradients`). Then gradients of
      parameters are not compared, but the parameters after each step are, and bytes and time are of steps with the
      optimizer. The other ways to train are left out.

    Raises ConfigError if the network cannot be copied or trained, or if the variant has other parameters or buffers,
    and TypeError for an argument of another type.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model is a module, not {kind}; pass an instance")
    if not callable(variant):
        kind = type(variant).__name__
        raise TypeError(f"variant is a function from a module to a module, not {kind} {variant!r}; pass zoo.lean")
    if steps < 1:
        raise ConfigError(f"steps={steps} compares nothing", WHERE, "use at least 1")
    _check_trainable(model, inputs, keywords)
    with progress(WHERE) as show, restore_generators(model):
        show("other batches")
        run = _Run.of(model, (inputs, keywords), loss, steps)
        run.optimizer = optimizer
        if release_gradients:
            run.releases, run.scenarios = True, ()
            run.update_of(copy.deepcopy(model), releases=True)  # raises for an optimizer that cannot
        result = run.compared(variant, show=show)
        # What a variant with a fault returns may be no output for the loss. The difference says more than an error.
        with suppress(*([Exception] if result.same is False else [])):
            show("bytes and times")
            plain, other = copy.deepcopy(model), variant(copy.deepcopy(model))
            forwards = [run.forward_of(each) for each in (plain, other)]
            updates = [run.update_of(plain), run.update_of(other, releases=release_gradients)]
            result.plain, result.variant = (
                measure_memory(forward, _trained_parameters(each), update=update)
                for forward, each, update in zip(forwards, (plain, other), updates, strict=True)
            )
            calls = {
                name: training_step(forward, each, update)
                for name, forward, each, update in zip(
                    ("plain", "variant"), forwards, (plain, other), updates, strict=True
                )
            }
            times = time_interleaved(calls, Clock(device_of(model)), rounds=ROUNDS)
            result.time_ratio = median(b / a for a, b in zip(times["plain"], times["variant"], strict=True))
    print(result)
    return result


def compare(model: nn.Module, images: Tensor, variant: Variant) -> Check:
    """Return the result of `check` for the first step, without the place of a difference, bytes and times."""
    with restore_generators(model):
        return _Run(model, [[((images,), {})]], default_loss).compared(variant, places=False)


@dataclass
class _Run:
    """The network, loss and batches of all runs of a check. Each scenario starts with the current random states.

    Args:
    - `steps`: the batches of each step.
    - `batches`: the batches of the scenarios.
    - `scenarios`: what follows the steps.
    - `evaluates`: whether an evaluation pass follows.
    - `fixed`: as in `Check`.
    - `optimizer`, `releases`: as in `check`.
    """

    model: nn.Module
    steps: list[list[ModelInputs]]
    loss: Callable[[Any], Tensor]
    batches: tuple[ModelInputs, ...] = ()
    scenarios: tuple[Scenario, ...] = ()
    evaluates: bool = False
    fixed: tuple[str, ...] = ()
    optimizer: BuildOptimizer = plain_sgd
    releases: bool = False

    @classmethod
    def of(cls, model: nn.Module, batch: ModelInputs, loss: Callable[[Any], Tensor] | None, steps: int) -> _Run:
        """Return a run of steps with batches that differ as far as the network and the loss accept them."""
        run = cls(model, [[batch]], partial(_scalar, loss or _default_loss))
        with restore_generators(model):
            if not run.forward_of(copy.deepcopy(model))().requires_grad:
                raise ConfigError("the loss does not require gradients", WHERE, "train some of the parameters")
        fixed = []

        def other(number: int, part: int = 1) -> ModelInputs:
            found = next(filter(run._accepts, _other_batches(batch, number, part)), None)
            if found is None:
                fixed.append("batch" if part == 1 else "batch size")
                return batch if part == 1 else other(number)
            return found

        others = [other(1), other(2)]
        for step in range(2, steps + 1):
            run.steps.append(others if step == 2 else [other(step, part=2 if step == 3 else 1)])
        run.batches, run.scenarios = (batch, *others), SCENARIOS
        run.evaluates = run._accepts(batch, training=False)
        run.fixed = (*dict.fromkeys(fixed), *([] if run.evaluates else ["evaluation mode"]))
        return run

    def _accepts(self, batch: ModelInputs, training: bool = True) -> bool:
        """Return whether the network accepts a batch between two given ones, whose sizes it may have stored."""
        model, given = copy.deepcopy(self.model), self.steps[0][0]
        with restore_generators(self.model), torch.set_grad_enabled(training):
            try:
                if training:
                    for args, keywords in map(copied, (given, batch, given)):
                        self.loss(model(*args, **keywords))
                else:
                    args, keywords = copied(batch)
                    model.eval()(*args, **keywords)
            except Exception:  # what a network raises for a batch that does not fit
                return False
        return True

    def compared(self, variant: Variant, places: bool = True, show: Callable[[str], None] = lambda _: None) -> Check:
        """Return the result of a check without bytes and times; with ``places``, it has the place of a difference.

        ``show`` displays the scenario that runs.
        """
        mode = "training mode" if self.model.training else "evaluation mode"
        mode += ", released gradients" if self.releases else ""
        result = Check(type(self.model).__name__, mode, len(self.steps), True, 0, None, self.fixed)
        trained: list[Scenario] = []  # by the same two copies of the network
        for scenario in (STEPS, *self.scenarios):
            show(scenario.name)
            if not trained:
                plain, other = self._trainings(variant)
            trained.append(scenario)
            try:
                with self._prepared(scenario):
                    expected = list(_values(plain, scenario))
            except Exception:  # what a network raises that cannot be trained in this way
                if scenario is STEPS:
                    raise
                result.skipped += (scenario.name,)
                trained.clear()
                continue
            try:
                with self._prepared(scenario):
                    found = _first_difference(expected, _values(other, scenario))
            except Exception as error:
                if scenario is STEPS:
                    raise
                result.errors += (f"{scenario.name} ({type(error).__name__}: {truncate(error)})",)
                trained.clear()
                continue
            if found is None:
                result.values += len(expected)
                result.scenarios += () if scenario is STEPS else (scenario.name,)
                continue
            build, again = variant, self._difference_of_plain(trained, expected)
            if again is not None and scenario is not STEPS:  # an operation of this scenario is not deterministic
                result.skipped += (scenario.name,)
                trained.clear()
                continue
            if again is not None:
                build, found = _unchanged_network, again
            result.values += len(expected)
            result.same = False if again is None else None
            index, each = found
            show("the place of the difference")
            place = self._place_of(trained, index, each.value, build) if places else ""
            result.difference = each._replace(place=place, scenario="" if scenario is STEPS else scenario.name)
            break
        return result

    def _trainings(self, variant: Variant) -> tuple[Training, Training]:
        """Return the training of a copy of the network, and of the variant of another copy."""
        plain, own = copy.deepcopy(self.model), copy.deepcopy(self.model)
        modules = dict(own.named_modules())
        other = self._built(variant, own)
        used = set(other.modules())
        shared = {name: each for name, each in modules.items() if each in used}
        same = {name: plain.get_submodule(name) for name in shared}
        options = (self.steps, self.batches, self.loss, self.evaluates, self.optimizer, not self.releases)
        return (
            Training(plain, self.model, same, *options),
            Training(other, self.model, shared, *options, releases=self.releases),
        )

    def _built(self, build: Variant, model: nn.Module) -> nn.Module:
        """Return the variant of a copy of the network."""
        with restore_generators(self.model):  # a variant may draw random numbers when it is built
            twin = build(model)
        if not isinstance(twin, nn.Module):
            kind = type(twin).__name__
            raise TypeError(f"variant has to return a module, and returned {kind}; end it with return model")
        for name in ("named_parameters", "named_buffers"):  # an error names what does not match
            match_names(dict(getattr(self.model, name)()), dict(getattr(twin, name)()))
        return twin

    def forward_of(self, model: nn.Module) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the first batch."""
        inputs, keywords = copied(self.steps[0][0])
        return lambda: self.loss(model(*inputs, **keywords))

    def update_of(self, model: nn.Module, releases: bool = False) -> Callable[[], object]:
        """Return what follows backward in a measured step: with released gradients, the step of the optimizer."""
        if not self.releases:
            return lambda: None
        optimizer = self.optimizer(list(model.parameters()))
        if releases:
            start_release(model, optimizer)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    @contextmanager
    def _prepared(self, scenario: Scenario) -> Iterator[None]:
        """Return a context for a scenario that restores what training changes beside the copies."""
        with restore_generators(self.model), warnings.catch_warnings():
            if scenario is not STEPS:  # the user may not train in this way
                warnings.simplefilter("ignore")
            yield

    def _difference_of_plain(self, scenarios: list[Scenario], expected: list[Value]) -> tuple[int, Difference] | None:
        """Return how plain training differs from the expected values of the last scenario when it is repeated."""
        plain, _ = self._trainings(_unchanged_network)
        for scenario in scenarios:
            with self._prepared(scenario):
                values = _values(plain, scenario)
                if scenario is scenarios[-1]:
                    return _first_difference(expected, values)
                deque(values, maxlen=0)
        return None

    def _place_of(self, scenarios: list[Scenario], index: int, value: str, variant: Variant) -> str:
        """Repeat both runs with recorded values; return the first module and operation whose values differ.

        Args:
        - `scenarios`: up to the one in which a value differs.
        - `index`, `value`: number and name of the value in this scenario.
        """
        both = []
        for training in self._trainings(variant):
            for scenario in scenarios[:-1]:
                with self._prepared(scenario):
                    deque(_values(training, scenario), maxlen=0)
            with self._prepared(scenarios[-1]), warnings.catch_warnings(), StepDigests(training.modules) as digests:
                warnings.filterwarnings("ignore", ".*global hooks on modules")  # torch.compile does not call them
                training.digests = digests
                deque(islice(_values(training, scenarios[-1]), index + 1), maxlen=0)
            both.append(digests)
        found = both[0].first_difference(both[1])
        if not found and value.startswith("buffer "):
            name = value.removeprefix("buffer ").rpartition(".")[0]
            found = f"{name} ({type(self.model.get_submodule(name)).__name__})"
        return found


def _values(training: Training, scenario: Scenario) -> Iterator[Value]:
    """Yield the values of a scenario, and the attributes that training has changed."""
    if scenario is not STEPS:
        training.model.zero_grad()
    for name, value in scenario.values(training):
        yield value_of(training.step, name, value)
    for name, value in training.changed_attributes():
        yield value_of(0, name, value)


def _first_difference(expected: list[Value], values: Iterator[Value]) -> tuple[int, Difference] | None:
    """Return the number of the first value that differs, and how; None if all have the same bits."""
    for index, (value, other) in enumerate(zip(expected, values, strict=False)):
        found = difference(value, other)
        if found is not None:
            return index, found
    return None


def _other_batches(batch: ModelInputs, number: int, part: int) -> Iterator[ModelInputs]:
    """Yield other batches, of 1 / ``part`` of the size, whose labels, masks and probabilities are as valid.

    The first is rolled by ``number`` places along the first dimension with several elements, in all tensors that have
    the batch size of the first tensor. In both, numbers that are not integers are a little smaller.
    """
    tensors = tensors_in(batch)
    size = next((len(each) for each in tensors if each.ndim and not each.is_nested), 0)

    def change(tensor: Tensor, rolls: bool) -> Tensor:
        other = tensor.detach().clone()
        if (other.is_floating_point() or other.is_complex()) and other.itemsize > 1:  # float8 has no products
            other *= 0.9375**number
        if other.layout is torch.strided and not other.is_nested and other.ndim and len(other) == size:
            if rolls:
                other = other.roll(number, next((axis for axis, each in enumerate(other.shape) if each > 1), 0))
            other = other[: size // part].clone()
        return other.requires_grad_(tensor.requires_grad)

    for rolls in (True, False):
        if size >= part and (rolls or any(each.is_floating_point() for each in tensors)):
            yield copied(batch, partial(change, rolls=rolls))


def _check_trainable(model: nn.Module, *inputs: Any) -> None:
    """Raise ConfigError if a network has no values or is frozen, or if it or an input cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(each) for each in tensors):
        raise ConfigError("the network has lazy parameters without a shape", WHERE, "run one forward pass first")
    if any(each.is_meta for each in (*tensors, *tensors_in(inputs))):
        raise ConfigError("the network or an input is on the meta device", WHERE, "move both to a CPU or GPU")
    if not _trained_parameters(model):
        raise ConfigError("no parameter requires gradients", WHERE, "train some of the parameters")
    copy_network(model, WHERE)
    try:
        copied(inputs)
    except Exception as error:  # classes may raise anything
        raise ConfigError(f"an input cannot be copied: {truncate(error)}", WHERE, "support copy.deepcopy") from error


def _default_loss(output: Any) -> Tensor:
    tensors = tensors_in(output)
    if not tensors:
        kind = type(output).__name__
        raise ConfigError(f"the output of type {kind} has no tensors", WHERE, "pass loss=, a function of the output")
    if not trained_outputs(tensors):
        raise ConfigError("no output requires gradients", WHERE, "train some of the parameters, outside of no_grad")
    return default_loss(tensors)


def _scalar(loss: Callable[[Any], Any], output: Any) -> Tensor:
    """Return the loss of an output. Raises TypeError or ConfigError if the function or its result is no loss."""
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(output)
    except TypeError as error:
        kind = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(f"loss is a function of the output, not {kind}: {error}; pass a lambda") from None
    except ValueError:  # a function without a signature
        pass
    found = loss(output)
    if not isinstance(found, Tensor):
        raise TypeError(f"loss has to return a tensor, and returned {type(found).__name__}; leave out .item()")
    if found.numel() != 1 or not found.is_floating_point():
        what = f"loss returned a tensor of {found.dtype} and of shape {tuple(found.shape)}"
        raise ConfigError(what, WHERE, "return one real number, such as a mean")
    return found


def _unchanged_network(model: nn.Module) -> nn.Module:
    return model


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]
