"""`zoo.check`: whether a variant of a network trains with the bits of plain training, and what it saves.

Tested by tests/remat/report/test_check.py.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from zoo.errors import ConfigError, join_names, truncate
from zoo.remat.lean import lean
from zoo.remat.memory_use import Memory, measure_memory
from zoo.remat.report.values import (
    Difference,
    Value,
    bits,
    copied,
    difference,
    elements_of,
    named,
    tensors_in,
    value_of,
)
from zoo.remat.timing import Clock, time_interleaved, training_step
from zoo.remat.trial import default_loss, device_of, trained_outputs, unchanged
from zoo.torch_internals.data import is_wrapper, tensors_of

LEARNING_RATE = 0.01
ROUNDS = 5  # of timed steps
WHERE = "zoo.check"  # in messages

Variant = Callable[[nn.Module], nn.Module]


@dataclass
class Check:
    """Result of `check`; its string has at most ten lines.

    Args:
    - `same`: whether all values have the bits of plain training; None if plain training is not deterministic.
    - `values`: number of compared values.
    - `difference`: the first value that differs between plain training and the variant or, if `same` is None, between
      two runs of plain training.
    - `fixed`: what the steps could not vary because the network or the loss raised an error: "batch", "batch size",
      "evaluation mode".
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
    plain: Memory | None = None
    variant: Memory | None = None
    time_ratio: float | None = None

    @property
    def verdict(self) -> str:
        """What ``same`` means."""
        return {True: "same bits", False: "other bits", None: "plain training is not deterministic"}[self.same]

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.mode}, {self.steps} steps: {self.verdict} ({self.values:,} values compared)"]
        if self.difference is not None:
            lines.append(str(self.difference))
        if self.same is None:
            lines.append("  torch.use_deterministic_algorithms(True) makes the steps of a network repeatable")
        if self.fixed:
            lines.append(f"not varied: {', '.join(self.fixed)}")
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
    **keywords: Any,
) -> Check:
    """Train copies of a network plainly and as a variant, compare all values bit for bit, and print the result.

    The values are outputs, the loss, gradients of parameters and inputs, the inputs after the pass, buffers, parameters
    after a step of SGD, and the states of the random number generators of torch, numpy and Python. NaN equals NaN.
    Step 1 trains on the inputs, step 2 on two other batches whose gradients add up, step 3 on a smaller batch, and
    further steps on one other batch each. An evaluation pass follows. The other batches are the inputs rolled along
    the batch dimension, and scaled if they are not integers.

    Plain training runs twice, so that a nondeterministic operation is not taken for a fault of the variant. The
    network, the generators and the inputs are unchanged afterwards::

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
    with unchanged(model):
        run = _Run.of(model, (inputs, keywords), loss, steps)
        result = run.compared(variant)
        # What a variant with a fault returns may be no output for the loss. The difference says more than an error.
        with suppress(*([Exception] if result.same is False else [])):
            plain, other = copy.deepcopy(model), variant(copy.deepcopy(model))
            forwards = [run.forward_of(each) for each in (plain, other)]
            result.plain, result.variant = (
                measure_memory(forward, _trained(each)) for forward, each in zip(forwards, (plain, other), strict=True)
            )
            calls = {"plain": training_step(forwards[0], plain), "variant": training_step(forwards[1], other)}
            times = time_interleaved(calls, Clock(device_of(model)), rounds=ROUNDS)
            result.time_ratio = median(b / a for a, b in zip(times["plain"], times["variant"], strict=True))
    print(result)
    return result


def compare(model: nn.Module, images: Tensor, variant: Variant) -> Check:
    """Return the result of `check` for the first step, without the place of a difference, bytes and times."""
    with unchanged(model):
        return _Run(model, [[((images,), {})]], default_loss).compared(variant, places=False)


ModelInputs = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keywords of a network


@dataclass
class _Run:
    """The network, loss and batches of all runs of a check. Each run starts with the current random states.

    Args:
    - `steps`: the batches of each step.
    - `evaluates`: whether an evaluation pass follows.
    - `fixed`: as in `Check`.
    """

    model: nn.Module
    steps: list[list[ModelInputs]]
    loss: Callable[[Any], Tensor]
    evaluates: bool = False
    fixed: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, batch: ModelInputs, loss: Callable[[Any], Tensor] | None, steps: int) -> _Run:
        """Return a run of steps with batches that differ as far as the network and the loss accept them."""
        run = cls(model, [[batch]], partial(_scalar, loss or _default_loss))
        with unchanged(model):
            if not run.forward_of(copy.deepcopy(model))().requires_grad:
                raise ConfigError("the loss does not require gradients", WHERE, "train some of the parameters")
        fixed = []

        def other(number: int, part: int = 1) -> ModelInputs:
            found = next(filter(run._accepts, _others(batch, number, part)), None)
            if found is None:
                fixed.append("batch" if part == 1 else "batch size")
                return batch if part == 1 else other(number)
            return found

        for step in range(2, steps + 1):
            run.steps.append([other(1), other(2)] if step == 2 else [other(step, part=2 if step == 3 else 1)])
        run.evaluates = run._accepts(batch, training=False)
        run.fixed = (*dict.fromkeys(fixed), *([] if run.evaluates else ["evaluation mode"]))
        return run

    def _accepts(self, batch: ModelInputs, training: bool = True) -> bool:
        """Return whether the network accepts a batch between two given ones, whose sizes it may have stored."""
        model, given = copy.deepcopy(self.model), self.steps[0][0]
        with unchanged(self.model), torch.set_grad_enabled(training):
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

    def compared(self, variant: Variant, places: bool = True) -> Check:
        """Return the result of a check without bytes and times; with ``places``, it has the place of a difference."""
        mode = "training mode" if self.model.training else "evaluation mode"
        with unchanged(self.model):
            expected = list(self._train(copy.deepcopy(self.model)))
        result = Check(type(self.model).__name__, mode, len(self.steps), True, len(expected), None, self.fixed)
        for same, build in ((None, _itself), (False, variant)):
            twin = self._built(build, copy.deepcopy(self.model))
            with unchanged(self.model):
                compared = enumerate(map(difference, expected, self._train(twin)))
                index, found = next((each for each in compared if each[1] is not None), (0, None))
            if found is not None:
                place = self._place_of(index, found.value, build) if places else ""
                result.same, result.difference = same, found._replace(place=place)
                break
        return result

    def _built(self, build: Variant, model: nn.Module) -> nn.Module:
        """Return the variant of a copy of the network."""
        with unchanged(self.model):  # a variant may draw random numbers when it is built
            twin = build(model)
        if not isinstance(twin, nn.Module):
            kind = type(twin).__name__
            raise TypeError(f"variant has to return a module, and returned {kind}; end it with return model")
        self._parameters(twin)  # an error names what does not match
        _matched(dict(self.model.named_buffers()), dict(twin.named_buffers()))
        return twin

    def forward_of(self, model: nn.Module) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the first batch."""
        inputs, keywords = copied(self.steps[0][0])
        return lambda: self.loss(model(*inputs, **keywords))

    def _train(self, model: nn.Module, digests: _StepDigests | None = None) -> Iterator[Value]:
        """Yield the values of training in the order in which it computes them.

        They are named as in the network. Nothing after a value is computed before the next value is asked for.
        """
        optimizer = torch.optim.SGD(list(model.parameters()), lr=LEARNING_RATE)
        for step, batches in enumerate(self.steps, 1):
            outputs: list[Any] = []
            for batch in batches:
                for name, value in self._pass(model, copied(batch), outputs, digests):
                    yield value_of(step, name, value)
            for name, value in named("output of the first batch, after the second", outputs[:-1]):
                yield value_of(step, name, value)  # a later pass must not overwrite it
            optimizer.step()
            optimizer.zero_grad()
            for name, value in self._parameters(model).items():
                yield value_of(step, f"parameter {name}", value)
        if self.evaluates:
            model.eval()
            batch = copied(self.steps[0][0])
            with torch.no_grad():
                values = list(self._forward(model, batch, [], digests))
            for name, value in (*values, *self._state(model, batch)):
                yield value_of(0, name, value)

    def _pass(
        self, model: nn.Module, batch: ModelInputs, outputs: list[Any], digests: _StepDigests | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the values of forward and backward, and add the output to ``outputs``."""
        yield from self._forward(model, batch, outputs, digests)
        loss = self.loss(outputs[-1])
        yield "loss", loss
        if digests is not None:
            digests.begin_backward(loss)
        loss.backward()
        for name, each in reversed(self._parameters(model).items()):
            yield f"gradient of {name}", each.grad
        for name, each in _inputs(batch):
            if isinstance(each, Tensor):
                yield f"gradient of {name}", each.grad if each.is_leaf else None
        yield from self._state(model, batch)

    def _forward(
        self, model: nn.Module, batch: ModelInputs, outputs: list[Any], digests: _StepDigests | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the values of the output, and add the output to ``outputs``."""
        if digests is not None:
            digests.clear()
        known = (*_inputs(batch), *self._parameters(model).items(), *self._buffers(model).items())
        owners = {each.data_ptr(): name for name, each in known if _has_memory(each)}
        outputs.append(model(*batch[0], **batch[1]))
        for name, each in named("output", outputs[-1]):
            yield name, each
            if _has_memory(each):  # what a view of the output, or a write into it, depends on
                owner = owners.setdefault(each.data_ptr(), name)
                yield f"layout of {name}", f"strides {each.stride()}" + (f" in {owner}" if owner != name else "")

    def _parameters(self, model: nn.Module) -> dict[str, Tensor]:
        return _matched(dict(self.model.named_parameters()), dict(model.named_parameters()))

    def _buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a trained variant. Forward may have added some or resized them."""
        named, others = dict(self.model.named_buffers()), dict(model.named_buffers())
        is_wrapped = len(named) == len(others) and named.keys() != others.keys()
        return dict(zip(named, others.values(), strict=True)) if is_wrapped else others

    def _state(self, model: nn.Module, batch: ModelInputs) -> Iterator[tuple[str, Any]]:
        """Yield what forward may overwrite: inputs, buffers, the states of random number generators, and the mode."""
        yield from _inputs(batch)
        for name, each in self._buffers(model).items():
            yield f"buffer {name}", each
        for name, each in _random_states(self.model).items():
            yield f"state of the random numbers of {name}", each
        yield "training mode", model.training

    def _place_of(self, index: int, value: str, variant: Variant) -> str:
        """Return the first module and operation whose values differ, from two more runs whose values are recorded.

        Args:
        - `index`, `value`: number and name of the first value that differs.
        """
        both = []
        for build in (_itself, variant):
            own = copy.deepcopy(self.model)
            twin = self._built(build, own)
            with unchanged(self.model), warnings.catch_warnings(), _StepDigests(own) as digests:
                warnings.filterwarnings("ignore", ".*global hooks on modules")  # torch.compile does not call them
                for _ in islice(self._train(twin, digests), index + 1):
                    pass
            both.append(digests)
        found = both[0].first_difference(both[1])
        if not found and value.startswith("buffer "):
            name = value.removeprefix("buffer ").rpartition(".")[0]
            found = f"{name} ({type(self.model.get_submodule(name)).__name__})"
        return found


class _StepDigests:
    """Records in a step digests of the outputs of modules, and of the gradients that each node of autograd computes.

    Nodes of eager training are numbered from the loss on; each belongs to the innermost module that made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {each: f"{name} ({type(each).__name__})".lstrip() for name, each in model.named_modules()}
        self.clear()

    def clear(self) -> None:
        """Forget the recorded step."""
        self._outputs: list[tuple[str, str, list[int]]] = []
        self._owners: dict[Any, str] = {}
        self._nodes: list[tuple[str, str]] = []  # owner and operation
        self._gradients: dict[int, list[int]] = {}  # by the number of a node, in the order of execution

    def __enter__(self) -> _StepDigests:
        self._handle = module_hooks.register_module_forward_hook(self._see_output)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self._owners.clear()

    def _see_output(self, module: nn.Module, _: Any, output: Any) -> None:
        if module not in self._names or torch.compiler.is_compiling():
            return
        outputs = tensors_of(output)
        name = self._names[module]
        for each in outputs:
            for node in _nodes_from(each.grad_fn, self._owners):
                self._owners[node] = name
        operations = [each.grad_fn.name() for each in outputs if each.grad_fn is not None]
        self._outputs.append((name, operations[-1] if operations else "", [_digest(each) for each in outputs]))

    def begin_backward(self, loss: Tensor) -> None:
        """Let all nodes of the loss record the gradients that they compute."""
        for number, node in enumerate(_nodes_from(loss.grad_fn, {})):
            self._nodes.append((self._owners.get(node, "the loss"), node.name()))
            node.register_hook(partial(self._see_gradients, number))

    def _see_gradients(self, number: int, gradients: Any, _: Any) -> None:
        self._gradients[number] = [_digest(each) for each in gradients if each is not None]

    def first_difference(self, other: _StepDigests) -> str:
        """Return the module and operation of the first value that differs, or ""."""
        for (name, operation, found), (other_name, _, others) in zip(self._outputs, other._outputs, strict=False):
            if name != other_name:
                break
            if found != others:
                return f"{name}, in forward: {operation.removesuffix('0').removesuffix('Backward')}"
        if self._nodes == other._nodes:
            for number, found in self._gradients.items():
                if found != other._gradients.get(number):
                    name, operation = self._nodes[number]
                    return f"{name}, in backward: {operation}"
        return ""


def _random_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the states of the global random number generators, by name."""
    states = {"the CPU": torch.get_rng_state()}
    for device in {each.device for each in model.parameters() if each.device.type == "cuda"}:
        states[str(device)] = torch.cuda.get_rng_state(device)
    _, words, *rest = np.random.get_state()
    states["numpy"] = torch.tensor([*np.asarray(words).tolist(), *rest], dtype=torch.float64)
    _, words, gauss = random.getstate()
    states["Python"] = torch.tensor([*words, gauss or 0.0], dtype=torch.float64)
    return states


def _digest(tensor: Tensor) -> int:
    """Return a number that depends on all bits of a tensor and on their order."""
    return hash(bits(elements_of(tensor)).cpu().numpy().tobytes())


def _inputs(batch: ModelInputs) -> Iterator[tuple[str, Any]]:
    return named("input", dict(enumerate(batch[0])) | batch[1])


def _has_memory(value: Any) -> bool:
    """Return whether a value is a tensor with elements, strides and an address."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or is_wrapper(value))
        and value.numel() > 0
    )


def _others(batch: ModelInputs, number: int, part: int) -> Iterator[ModelInputs]:
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


def _matched(named: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters or buffers of a variant under the names that they have in the network.

    A wrapper changes names and keeps the order. Raises ConfigError if numbers, shapes or types differ.
    """
    pairs = [(name, name) for name in named] if named.keys() == others.keys() else [*zip(named, others, strict=False)]
    wrong = [
        f"{other} of shape {tuple(others[other].shape)} instead of {name} of shape {tuple(named[name].shape)}"
        for name, other in pairs
        if named[name].shape != others[other].shape
    ]
    if len(named) != len(others):
        only = [f"{name} only in the variant" for name in others.keys() - named.keys()]
        wrong = [f"{len(others)} instead of {len(named)}", *only]
    if wrong:
        raise ConfigError(
            f"the variant has other parameters or buffers than the network: {join_names(wrong)}",
            WHERE,
            "keep their number, order and shapes",
        )
    return {name: others[other] for name, other in pairs}


def _check_trainable(model: nn.Module, *inputs: Any) -> None:
    """Raise ConfigError if a network has no values or is frozen, or if it or an input cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(each) for each in tensors):
        raise ConfigError("the network has lazy parameters without a shape", WHERE, "run one forward pass first")
    if any(each.is_meta for each in (*tensors, *tensors_in(inputs))):
        raise ConfigError("the network or an input is on the meta device", WHERE, "move both to a CPU or GPU")
    if not _trained(model):
        raise ConfigError("no parameter requires gradients", WHERE, "train some of the parameters")
    results = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if any(each.grad_fn is not None for each in tensors_of(value))
    ]
    if results:  # autograd has no copies of them
        what = f"the network cannot be copied, because it keeps the results of operations in {join_names(results)}"
        raise ConfigError(what, WHERE, "detach them, and use torch.nn.utils.parametrizations for weight norm")
    for title, make_copy in (("the network", lambda: copy.deepcopy(model)), ("an input", lambda: copied(inputs))):
        try:
            make_copy()
        except Exception as error:  # classes may raise anything
            raise ConfigError(f"{title} cannot be copied: {truncate(error)}", WHERE, "support copy.deepcopy") from error


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


def _nodes_from(node: Any, known: Container[Any]) -> Iterator[Any]:
    """Yield a node of autograd and what it depends on, up to known nodes."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in known:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def _itself(model: nn.Module) -> nn.Module:
    return model


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]
