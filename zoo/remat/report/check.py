"""`zoo.check`: whether a variant of a network trains with the bits of plain training, and what it saves.

Tested by tests/remat/report/test_check.py.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from zoo.errors import ConfigError
from zoo.remat.lean import lean
from zoo.remat.memory_use import Memory, measure_memory
from zoo.remat.timing import Clock, time_interleaved, training_step
from zoo.remat.trial import as_leaf, clone, default_loss, device_of, unchanged
from zoo.torch_internals.data import tensors_of, tree_map

LEARNING_RATE = 0.01
ROUNDS = 5  # of timed steps
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # in the names of compiled and checkpointed modules

Variant = Callable[[nn.Module], nn.Module]


class Difference(NamedTuple):
    """The first value of a training step that differs from plain training.

    Args:
    - `step`: counts from 1.
    - `value`: such as "gradient of layer1.0.conv1.weight".
    - `place`: the first module and operation whose values differ, such as "layer1.0.bn1 (BatchNorm2d), in backward:
      NativeBatchNormBackward0"; "" if the variant runs other operations than plain training, as a compiled network.
    - `differing`, `size`: elements that differ, and elements in all.
    - `largest`: the largest absolute difference; NaN if the shapes differ.
    """

    step: int
    value: str
    place: str
    differing: int
    size: int
    largest: float

    def __str__(self) -> str:
        where = f"\n  first in {self.place}" if self.place else ""
        return (
            f"step {self.step}, {self.value}: {self.differing:,} of {self.size:,} elements differ, at most by "
            f"{self.largest:.2g}{where}"
        )


@dataclass
class Check:
    """What `check` found. ``str`` of it is at most ten lines.

    Args:
    - `same`: whether all values have the bits of plain training; None if plain training has no bits of its own, as two
      runs of it differ.
    - `values`: number of tensors that were compared.
    - `difference`: the first value that differs between plain training and the variant, or if `same` is None between
      two runs of plain training.
    - `plain`, `variant`: bytes of a training step.
    - `time_ratio`: the time of a step of the variant, relative to one of plain training: the median of interleaved
      forward and backward passes.
    """

    name: str
    mode: str
    steps: int
    same: bool | None
    values: int
    difference: Difference | None
    plain: Memory | None = None
    variant: Memory | None = None
    time_ratio: float | None = None

    @property
    def verdict(self) -> str:
        """What ``same`` means."""
        return {True: "same bits", False: "other bits", None: "plain training is not deterministic"}[self.same]

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.mode}, {self.steps} steps: {self.verdict} ({self.values:,} tensors compared)"]
        if self.difference is not None:
            lines.append(str(self.difference))
        if self.same is None:
            lines.append("  torch.use_deterministic_algorithms(True) makes the steps of a network repeatable")
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
    steps: int = 2,
    **keywords: Any,
) -> Check:
    """Train copies of a network plainly and as a variant, compare all values bit for bit, and print the result.

    The values are outputs, the loss, gradients of parameters and inputs, buffers, parameters after a step of SGD, and
    the states of torch's random number generators. Plain training runs twice, so that a nondeterministic operation is
    not taken for a fault of the variant. The network, the generators and the inputs are unchanged afterwards::

        zoo.check(model, images)
        zoo.check(model, images, variant=functools.partial(zoo.lean, budget=0.4))
        zoo.check(model, loss=lambda outputs: outputs.loss, **batch)

    Args:
    - `model`: the network, in the mode in which it shall be checked.
    - `inputs`, `keywords`: arguments of the network.
    - `variant`: returns a variant of a network. It may change its argument, which is a copy.
    - `loss`: computes a scalar of the output of the network. By default it is the sum of the scalars of the output,
      or if there are none the cross-entropy of its tensors over the last dimension.
    - `steps`: number of training steps.

    Raises ConfigError if nothing requires gradients, or if the variant has other parameters or buffers, and TypeError
    if ``variant`` is no function or returns no module.
    """
    if not callable(variant):
        kind = type(variant).__name__
        raise TypeError(f"variant is a function from a module to a module, not {kind} {variant!r}; pass zoo.lean")
    with unchanged(model):
        run = _Run(inputs, keywords, loss or default_loss, steps)
        result = run.compared(model, variant)
        if result.difference is not None:
            place = run.place_of(result.difference, model, variant if result.same is False else _itself)
            result.difference = result.difference._replace(place=place)
        plain, other = copy.deepcopy(model), variant(copy.deepcopy(model))
        forwards = [run.forward_of(each) for each in (plain, other)]
        result.plain, result.variant = (
            measure_memory(forward, _trained(each)) for forward, each in zip(forwards, (plain, other), strict=True)
        )
        named = {"plain": training_step(forwards[0], plain), "variant": training_step(forwards[1], other)}
        times = time_interleaved(named, Clock(device_of(model)), rounds=ROUNDS)
        result.time_ratio = median(b / a for a, b in zip(times["plain"], times["variant"], strict=True))
    print(result)
    return result


def compare(model: nn.Module, images: Tensor, variant: Variant) -> Check:
    """Return the result of `check` for one step, without the place of a difference, bytes and times."""
    with unchanged(model):
        return _Run((images,), {}, default_loss, steps=1).compared(model, variant)


@dataclass
class _Run:
    """What all runs of a check have in common. Each starts with the present state of the random number generators."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    loss: Callable[[Any], Tensor]
    steps: int

    def compared(self, model: nn.Module, variant: Variant) -> Check:
        mode = "training mode" if model.training else "evaluation mode"
        with unchanged(model):
            first = [
                (step, {name: value.clone() for name, value in values})
                for step, values in self._train(copy.deepcopy(model))
            ]
        result = Check(type(model).__name__, mode, self.steps, True, sum(len(values) for _, values in first), None)
        for same, build in ((None, _itself), (False, variant)):
            with unchanged(model):  # a variant may draw random numbers when it is built
                twin = build(copy.deepcopy(model))
            if not isinstance(twin, nn.Module):
                kind = type(twin).__name__
                raise TypeError(f"variant has to return a module, and returned {kind}; end it with return model")
            if _names_of(twin) != _names_of(model):
                raise ConfigError(
                    "the variant has other parameters or buffers than the network", "zoo.check", "keep their names"
                )
            with unchanged(model):
                result.difference = self._first_difference(first, twin)
            if result.difference is not None:
                result.same = same
                break
        return result

    def _leaves(self) -> Any:
        """Return copies of the inputs and keywords."""
        return tree_map(lambda each: as_leaf(clone(each)), (self.inputs, self.keywords))

    def forward_of(self, model: nn.Module) -> Callable[[], Tensor]:
        inputs, keywords = self._leaves()
        return lambda: self.loss(model(*inputs, **keywords))

    def _train(
        self, model: nn.Module, trace: _Trace | None = None
    ) -> Iterator[tuple[int, Iterator[tuple[str, Tensor]]]]:
        """Yield the number of each step and its values, which must be read before the next step."""
        if not _trained(model):
            raise ConfigError("no parameter requires gradients", "zoo.check", "train some of the parameters")
        optimizer = torch.optim.SGD(_trained(model), lr=LEARNING_RATE)
        for step in range(1, self.steps + 1):
            inputs, keywords = self._leaves()
            output = model(*inputs, **keywords)
            loss = self.loss(output)
            if not loss.requires_grad:
                raise ConfigError("the loss does not require gradients", "zoo.check", "train some of the parameters")
            if trace is not None:
                trace.begin_backward(loss)
            loss.backward()
            yield step, self._values(model, optimizer, output, loss, (inputs, keywords))

    def _values(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, output: Any, loss: Tensor, inputs: Any
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of a step in the order in which training computes them."""
        floats = [each for each in tensors_of(output) if each.is_floating_point()]
        for index, each in enumerate(floats):
            yield f"output {index}", each.detach()
        yield "loss", loss.detach()
        parameters = [(WRAPPERS.sub("", name), each) for name, each in model.named_parameters()]
        for name, each in reversed(parameters):
            if each.grad is not None:
                yield f"gradient of {name}", each.grad
        for index, each in enumerate(tensors_of(inputs)):
            if each.grad is not None:
                yield f"gradient of input {index}", each.grad
        for name, each in model.named_buffers():
            yield f"buffer {WRAPPERS.sub('', name)}", each
        for name, state in _random_states(model).items():
            yield f"state of the random numbers of {name}", state
        optimizer.step()
        optimizer.zero_grad()
        for name, each in parameters:
            yield f"parameter {name}", each.detach()

    def _first_difference(self, first: Sequence[tuple[int, dict[str, Tensor]]], model: nn.Module) -> Difference | None:
        for (step, expected), (_, values) in zip(first, self._train(model), strict=True):
            found: Difference | None = None
            unseen = dict(expected)
            for name, value in values:  # to their end, when the parameters are updated
                other = unseen.pop(name, None)
                if found is None and (other is None or not _same_bits(value, other)):
                    note = " (plain training has none)" if other is None else ""
                    found = Difference(step, f"{name}{note}", "", *_difference(value, other))
            if found is None and unseen:
                name, value = next(iter(unseen.items()))
                found = Difference(step, f"{name} (the variant has none)", "", *_difference(value, None))
            if found is not None:
                return found
        return None

    def place_of(self, difference: Difference, model: nn.Module, variant: Variant) -> str:
        """Return the first module and operation whose values differ, from two more runs whose values are recorded."""
        traces = []
        for build in (_itself, variant):
            copied = copy.deepcopy(model)
            with unchanged(model):
                twin = build(copied)
            with unchanged(model), warnings.catch_warnings(), _Trace(copied) as trace:
                warnings.filterwarnings("ignore", ".*global hooks on modules")  # torch.compile does not call them
                for step, values in self._train(twin, trace):
                    if step == difference.step:
                        break
                    for _ in values:
                        pass  # the parameters are updated at their end
                    trace.clear()
            traces.append(trace)
        found = traces[0].first_difference(traces[1])
        if not found and difference.value.startswith("buffer "):
            name = difference.value.removeprefix("buffer ").rpartition(".")[0]
            found = f"{name} ({type(model.get_submodule(name)).__name__})"
        return found


class _Trace:
    """Records in a step digests of the outputs of modules, and of the gradients that each node of autograd computes.

    Nodes of eager training are numbered from the loss on; each belongs to the innermost module that made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {each: f"{name} ({type(each).__name__})".lstrip() for name, each in model.named_modules()}
        self.clear()

    def clear(self) -> None:
        """Forget a step."""
        self._outputs: list[tuple[str, str, list[int]]] = []
        self._owners: dict[Any, str] = {}
        self._nodes: list[tuple[str, str]] = []  # owner and operation
        self._gradients: dict[int, list[int]] = {}  # by the number of a node, in the order of execution

    def __enter__(self) -> _Trace:
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

    def first_difference(self, other: _Trace) -> str:
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
    """Return the states of torch's random number generators, by device."""
    states = {"the CPU": torch.get_rng_state()}
    for device in {each.device for each in model.parameters() if each.device.type == "cuda"}:
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


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


def _digest(tensor: Tensor) -> int:
    """Return a number that depends on all bits of a tensor and on their order."""
    return hash(_bits(tensor).cpu().numpy().tobytes())


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(_bits(a), _bits(b))


def _difference(a: Tensor, b: Tensor | None) -> tuple[int, int, float]:
    """Return how many elements differ, of how many, and by how much at most."""
    if b is None or a.shape != b.shape:
        return a.numel(), a.numel(), float("nan")
    a, b = (each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (a, b))
    differ = a.ne(b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a.ne(b)
    largest = (a[differ].double() - b[differ].double()).abs().max().item() if differ.any() else 0.0
    return int(differ.sum()), a.numel(), largest


def _names_of(model: nn.Module) -> set[str]:
    return {WRAPPERS.sub("", name) for name, _ in (*model.named_parameters(), *model.named_buffers())}


def _itself(model: nn.Module) -> nn.Module:
    return model


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]
