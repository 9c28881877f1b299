"""`zoo.check`: tests whether a variant of a network trains bit-identically to plain training, and measures both."""

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
from zoo.memory.progress import show_progress
from zoo.memory.release import release_gradients as start_release
from zoo.memory.scenarios import SCENARIOS, STEPS, BuildOptimizer, Scenario, Training, match_names, plain_sgd
from zoo.memory.timing import Clock, time_interleaved, training_step
from zoo.memory.trial import (
    ModelInputs,
    copy_network,
    copy_tensors,
    default_loss,
    device_of,
    trained_outputs,
)
from zoo.memory.values import Difference, Value, difference, value_of
from zoo.ops.recomputation import restore_generators
from zoo.remat._lean import lean
from zoo.tables import counted

ROUNDS = 5  # rounds of interleaved timing
WHERE = "zoo.check"  # named in errors

Variant = Callable[[nn.Module], nn.Module]


@dataclass
class Check:
    """Result of `check`; its string has at most eleven lines.

    Args:
    - `same`: whether all compared values are bit-identical to plain training; None if plain training is not
      deterministic.
    - `values`: number of compared values.
    - `difference`: the first difference between plain training and the variant or, if `same` is None, between two runs
      of plain training.
    - `fixed`: conditions that all steps share, because the network or the loss raises an error for others: "batch",
      "batch size", "evaluation mode".
    - `scenarios`: scenarios with the same bits, such as "second derivatives".
    - `skipped`: scenarios in which plain training raises an error or is not deterministic.
    - `errors`: scenarios in which only the variant raises an error, with the error.
    - `plain`, `variant`: bytes of a training step.
    - `time_ratio`: step time of the variant divided by plain step time, the median of interleaved steps.
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
        """``same`` in words."""
        return {True: "same bits", False: "different bits", None: "plain training is not deterministic"}[self.same]

    def __str__(self) -> str:
        steps, values = counted(self.steps, "step"), counted(self.values, "value")
        lines = [f"{self.name}, {self.mode}, {steps}: {self.verdict} ({values} compared)"]
        if self.difference is not None:
            lines.append(str(self.difference))
        if self.same is None:
            lines.append("  torch.use_deterministic_algorithms(True) makes training steps repeatable")
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

    The values are outputs, losses, gradients of parameters and inputs, inputs and buffers after each pass, parameters
    and optimizer states after each step, and the states of the random number generators of torch, numpy and Python. NaN
    equals NaN.
    Step 1 trains on the inputs, step 2 accumulates the gradients of two other batches, step 3 trains on a smaller
    batch, and each further step on another batch. An evaluation pass follows. Other batches are the inputs rolled along
    the batch dimension; floating-point inputs are also scaled.

    The same copies then train in other scenarios (`zoo.memory.scenarios`): several passes before backward, evaluation
    before backward and between steps, second derivatives, autocast, other frozen parameters, overwritten inputs and
    outputs. Faults that only larger inputs or more passes trigger are not found.

    If a value differs, plain training runs again, to tell a nondeterministic operation from a fault of the variant. The
    network, the generators and the inputs do not change. Side effects of forward elsewhere, such as on variables of
    hooks, remain.

        zoo.check(model, images)
        zoo.check(model, images, variant=functools.partial(zoo.lean, budget=0.4))
        zoo.check(model, loss=lambda outputs: outputs.loss, **batch)

    Args:
    - `model`: the network, in the mode to check.
    - `inputs`, `keywords`: arguments of the network.
    - `variant`: returns a variant of a network. It may change its argument, a copy. Renamed parameters and buffers are
      matched by their order.
    - `loss`: computes a scalar from the output of the network. Default: the sum of all scalars in the output, or
      without scalars the cross-entropy of all tensors over the last dimension.
    - `steps`: number of training steps.
    - `optimizer`: builds the optimizer of a list of parameters, such as ``torch.optim.AdamW``. Default: plain SGD.
    - `release_gradients`: also release the gradients of the variant (`zoo.release_gradients`). The check then compares
      parameters instead of their gradients, measures steps with the optimizer, and runs no other scenarios.

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
    with show_progress(WHERE) as show, restore_generators(model):
        show("other batches")
        run = _Run.of(model, (inputs, keywords), loss, steps)
        run.optimizer = optimizer
        if release_gradients:
            run.releases, run.scenarios = True, ()
            run.update_of(copy.deepcopy(model), releases=True)  # raises for an optimizer that cannot
        result = run.compare(variant, show=show)
        # The loss may raise an error for the output of a faulty variant. The difference says more than this error.
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
    """Check the first step only, without the place of a difference, bytes and times."""
    with restore_generators(model):
        return _Run(model, [[((images,), {})]], default_loss).compare(variant, places=False)


@dataclass
class _Run:
    """The network, loss and batches of a check. Each scenario starts from the current random states.

    Args:
    - `steps`: the batches of each step.
    - `batches`: the batches of the scenarios.
    - `scenarios`: the scenarios after the steps.
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
        """Return a run with different batches, as far as the network and the loss accept them."""
        run = cls(model, [[batch]], partial(_compute_loss, loss or _default_loss))
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
        """Return whether the network accepts a batch between passes of the given one. It may have stored sizes."""
        model, given = copy.deepcopy(self.model), self.steps[0][0]
        with restore_generators(self.model), torch.set_grad_enabled(training):
            try:
                if training:
                    for args, keywords in map(copy_tensors, (given, batch, given)):
                        self.loss(model(*args, **keywords))
                else:
                    args, keywords = copy_tensors(batch)
                    model.eval()(*args, **keywords)
            except Exception:  # networks raise anything for batches that do not fit
                return False
        return True

    def compare(self, variant: Variant, places: bool = True, show: Callable[[str], None] = lambda _: None) -> Check:
        """Compare the values of all scenarios, without bytes and times.

        Args:
        - `places`: also find the place of a difference.
        - `show`: displays the running scenario.
        """
        mode = "training mode" if self.model.training else "evaluation mode"
        mode += ", released gradients" if self.releases else ""
        result = Check(type(self.model).__name__, mode, len(self.steps), True, 0, None, self.fixed)
        trained: list[Scenario] = []  # scenarios in which the current copies have trained
        for scenario in (STEPS, *self.scenarios):
            show(scenario.name)
            if not trained:
                plain, other = self._trainings(variant)
            trained.append(scenario)
            try:
                with self._isolate(scenario):
                    expected = list(_values(plain, scenario))
            except Exception:  # networks raise anything in scenarios that they do not support
                if scenario is STEPS:
                    raise
                result.skipped += (scenario.name,)
                trained.clear()
                continue
            try:
                with self._isolate(scenario):
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
            if again is not None and scenario is not STEPS:  # nondeterministic in this scenario only
                result.skipped += (scenario.name,)
                trained.clear()
                continue
            if again is not None:
                build, found = _identity, again
            result.values += len(expected)
            result.same = False if again is None else None
            index, each = found
            show("the place of the difference")
            place = self._place_of(trained, index, each.value, build) if places else ""
            result.difference = each._replace(place=place, scenario="" if scenario is STEPS else scenario.name)
            break
        return result

    def _trainings(self, variant: Variant) -> tuple[Training, Training]:
        """Return the trainings of a copy of the network and of the variant of another copy."""
        plain, own = copy.deepcopy(self.model), copy.deepcopy(self.model)
        modules = dict(own.named_modules())
        other = self._build(variant, own)
        used = set(other.modules())
        shared = {name: each for name, each in modules.items() if each in used}
        same = {name: plain.get_submodule(name) for name in shared}
        options = (self.steps, self.batches, self.loss, self.evaluates, self.optimizer, not self.releases)
        return (
            Training(plain, self.model, same, *options),
            Training(other, self.model, shared, *options, releases=self.releases),
        )

    def _build(self, variant: Variant, model: nn.Module) -> nn.Module:
        """Build the variant of a copy of the network. Raises ConfigError for other parameters or buffers."""
        with restore_generators(self.model):  # building may draw random numbers
            built = variant(model)
        if not isinstance(built, nn.Module):
            kind = type(built).__name__
            raise TypeError(f"variant must return a module, not {kind}; end it with return model")
        for name in ("named_parameters", "named_buffers"):
            match_names(dict(getattr(self.model, name)()), dict(getattr(built, name)()))
        return built

    def forward_of(self, model: nn.Module) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the first batch."""
        inputs, keywords = copy_tensors(self.steps[0][0])
        return lambda: self.loss(model(*inputs, **keywords))

    def update_of(self, model: nn.Module, releases: bool = False) -> Callable[[], object]:
        """Return the function that ends a measured step: with released gradients, a step of the optimizer."""
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
    def _isolate(self, scenario: Scenario) -> Iterator[None]:
        """Restores the random number generators after a scenario. Hides warnings unless it is the steps."""
        with restore_generators(self.model), warnings.catch_warnings():
            if scenario is not STEPS:  # the user may never train like this
                warnings.simplefilter("ignore")
            yield

    def _difference_of_plain(self, scenarios: list[Scenario], expected: list[Value]) -> tuple[int, Difference] | None:
        """Repeat plain training; return its first difference from the expected values of the last scenario."""
        plain, _ = self._trainings(_identity)
        for scenario in scenarios:
            with self._isolate(scenario):
                values = _values(plain, scenario)
                if scenario is scenarios[-1]:
                    return _first_difference(expected, values)
                deque(values, maxlen=0)
        return None

    def _place_of(self, scenarios: list[Scenario], index: int, value: str, variant: Variant) -> str:
        """Repeat both runs and record digests; return the first module and operation whose values differ.

        Args:
        - `scenarios`: the scenarios of the two copies. A value of the last one differs.
        - `index`, `value`: number and name of this value.
        """
        both = []
        for training in self._trainings(variant):
            for scenario in scenarios[:-1]:
                with self._isolate(scenario):
                    deque(_values(training, scenario), maxlen=0)
            with self._isolate(scenarios[-1]), warnings.catch_warnings(), StepDigests(training.modules) as digests:
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
    """Run a scenario; yield its values and the attributes that training has changed."""
    if scenario is not STEPS:
        training.model.zero_grad()
    for name, value in scenario.values(training):
        yield value_of(training.step, name, value)
    for name, value in training.changed_attributes():
        yield value_of(0, name, value)


def _first_difference(expected: list[Value], values: Iterator[Value]) -> tuple[int, Difference] | None:
    """Return the index of the first value that differs, and the difference; None if all bits are the same."""
    for index, (value, other) in enumerate(zip(expected, values, strict=False)):
        found = difference(value, other)
        if found is not None:
            return index, found
    return None


def _other_batches(batch: ModelInputs, number: int, part: int) -> Iterator[ModelInputs]:
    """Yield perturbed batches with 1 / ``part`` of the samples. Labels, masks and probabilities stay valid.

    All batches have slightly smaller floating-point and complex numbers. The first is also rolled by ``number`` places
    along the first dimension with several elements, in all tensors with the batch size of the first tensor.
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
            yield copy_tensors(batch, partial(change, rolls=rolls))


def _check_trainable(model: nn.Module, *inputs: Any) -> None:
    """Raise ConfigError if a network is lazy, on the meta device or frozen, or if it or an input cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(each) for each in tensors):
        raise ConfigError("the network has lazy parameters without a shape", WHERE, "run one forward pass first")
    if any(each.is_meta for each in (*tensors, *tensors_in(inputs))):
        raise ConfigError("the network or an input is on the meta device", WHERE, "move both to a CPU or GPU")
    if not _trained_parameters(model):
        raise ConfigError("no parameter requires gradients", WHERE, "train some of the parameters")
    copy_network(model, WHERE)
    try:
        copy_tensors(inputs)
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


def _compute_loss(loss: Callable[[Any], Any], output: Any) -> Tensor:
    """Return the loss of an output. Raises TypeError or ConfigError for an invalid function or result."""
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(output)
    except TypeError as error:
        kind = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(f"loss is a function of the output, not {kind}: {error}; pass a lambda") from None
    except ValueError:  # the function has no signature
        pass
    found = loss(output)
    if not isinstance(found, Tensor):
        raise TypeError(f"loss must return a tensor, not {type(found).__name__}; leave out .item()")
    if found.numel() != 1 or not found.is_floating_point():
        what = f"loss returned a tensor of dtype {found.dtype} and shape {tuple(found.shape)}"
        raise ConfigError(what, WHERE, "return one real number, such as a mean")
    return found


def _identity(model: nn.Module) -> nn.Module:
    return model


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]
