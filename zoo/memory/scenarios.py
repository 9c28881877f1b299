"""Training scenarios in which `zoo.check` compares a variant with plain training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zoo.errors import ConfigError, join_names
from zoo.memory.containers import PLAIN, tensors_in, walk
from zoo.memory.places import StepDigests
from zoo.memory.release import GradientRelease, release_gradients
from zoo.memory.trial import ModelInputs, copy_tensors, device_of, trained_outputs
from zoo.memory.values import Value, difference, value_of
from zoo.torch_internals.data import DropoutBase, is_wrapper

LEARNING_RATE = 0.01

NamedValues: TypeAlias = Iterator[tuple[str, Any]]
BuildOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training:
    """Trains a network and names its values as in another network.

    Args:
    - `model`: the trained network. It may rename parameters and buffers of ``network``, in the same order.
    - `network`: the network with the names.
    - `modules`: the modules whose attributes are compared, by their names in ``network``.
    - `steps`: the batches of each step of `train_in_steps`.
    - `batches`: three batches for the other scenarios.
    - `loss`: computes a scalar from an output.
    - `evaluates`: whether an evaluation pass follows the steps.
    - `optimizer`: builds the optimizer of a list of parameters.
    - `compares_gradients`: whether gradients of parameters are compared.
    - `releases`: whether `zoo.release_gradients` frees gradients in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        network: nn.Module,
        modules: dict[str, nn.Module],
        steps: list[list[ModelInputs]],
        batches: tuple[ModelInputs, ...],
        loss: Callable[[Any], Tensor],
        evaluates: bool,
        optimizer: BuildOptimizer,
        compares_gradients: bool = True,
        releases: bool = False,
    ) -> None:
        self.model, self.steps, self.loss, self.evaluates = model, steps, loss, evaluates
        self._build_optimizer, self._compares_gradients, self._releases = optimizer, compares_gradients, releases
        self._batches = batches
        self.step = 0  # number of the current step of `train_in_steps`
        self.digests: StepDigests | None = None  # records the last pass
        self._network, self.modules = network, modules
        self._first_attributes = {name: _values_in(value) for name, value in self._attributes().items()}

    def batch(self, number: int = 0) -> ModelInputs:
        """Return a copy of a batch for scenarios."""
        found: ModelInputs = copy_tensors(self._batches[number])
        return found

    def forward(self, batch: ModelInputs) -> Any:
        """Return the output of a batch."""
        if self.digests is not None and torch.is_grad_enabled():
            self.digests.clear()
        return self.model(*batch[0], **batch[1])

    def loss_of(self, batch: ModelInputs) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self.forward(batch))

    def backward(self, result: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of a loss or an output to the gradients of parameters and inputs."""
        if self.digests is not None:
            self.digests.begin_backward(result)
        result.backward(gradient)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return match_names(dict(self._network.named_parameters()), dict(self.model.named_parameters()))

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that require gradients by name."""
        return {name: each for name, each in self.parameters().items() if each.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name. Forward may have added some or resized them."""
        expected, buffers = dict(self._network.named_buffers()), dict(self.model.named_buffers())
        is_wrapped = len(expected) == len(buffers) and expected.keys() != buffers.keys()
        return dict(zip(expected, buffers.values(), strict=True)) if is_wrapped else buffers

    def optimizer(self) -> tuple[torch.optim.Optimizer, GradientRelease | None]:
        """Build the optimizer; return it and the release of its gradients, if any."""
        built = self._build_optimizer(list(self.model.parameters()))
        return built, release_gradients(self.model, built) if self._releases else None

    def states(self, optimizer: torch.optim.Optimizer) -> NamedValues:
        """Yield the state of an optimizer, by parameter."""
        for name, each in self.parameters().items():
            if state := optimizer.state.get(each):
                yield from walk(f"state of the optimizer for {name}", dict(state))

    def gradients(self) -> NamedValues:
        """Yield the gradients of parameters in the order of backward, the last parameter first."""
        if not self._compares_gradients:
            return
        for name, each in reversed(self.parameters().items()):
            yield f"gradient of {name}", each.grad

    def state(self, batch: ModelInputs) -> NamedValues:
        """Yield the state that forward may change: inputs, buffers, random number generators and the mode."""
        yield from named_inputs(batch)
        for name, each in self.buffers().items():
            yield f"buffer {name}", each
        for name, each in _random_states(self._network).items():
            yield f"state of the random numbers of {name}", each
        yield "training mode", self.model.training

    def changed_attributes(self) -> NamedValues:
        """Yield the attributes of modules that training has changed."""
        changed = {
            name: value
            for name, value in self._attributes().items()
            if name not in self._first_attributes or not _are_same(self._first_attributes[name], _values_in(value))
        }
        yield from walk("changed attributes", changed)

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes with data that untrained modules have, too."""
        return {
            f"{name}.{key}".lstrip("."): vars(module).get(key)
            for name, module in self.modules.items()
            for key, value in vars(self._network.get_submodule(name)).items()
            if not key.startswith("_") and _is_data(value) and _is_data(vars(module).get(key))
        }


class Scenario(NamedTuple):
    """A way to train a network.

    Args:
    - `name`: name in the report of `zoo.check`.
    - `values`: trains, and yields each value before training continues.
    """

    name: str
    values: Callable[[Training], NamedValues]


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def train_in_steps(training: Training) -> NamedValues:
    """Train in steps, then evaluate."""
    optimizer, release = training.optimizer()
    for training.step, batches in enumerate(training.steps, 1):  # noqa: B020
        outputs: list[Any] = []
        for number, batch in enumerate(map(copy_tensors, batches), 1):
            output, values = _forward_with_layouts(training, batch)
            outputs.append(output)
            yield from values
            loss = training.loss(output)
            yield "loss", loss
            with nullcontext() if release is None or number == len(batches) else release.accumulate():
                training.backward(loss)
            yield from training.gradients()
            yield from _gradients_of_inputs(batch)
            yield from training.state(batch)
        yield from walk("output of the first batch, after the second", outputs[:-1])  # later passes must not write it
        optimizer.step()
        optimizer.zero_grad()
        for name, each in training.parameters().items():
            yield f"parameter {name}", each
        yield from training.states(optimizer)
    if release is not None:
        release.remove()
    training.step = 0
    if training.evaluates:
        with _evaluation_mode(training.model):
            batch = copy_tensors(training.steps[0][0])
            with torch.no_grad():
                _, values = _forward_with_layouts(training, batch)
            yield from values
            yield from training.state(batch)


def delay_backward(training: Training) -> NamedValues:
    """Run three passes, then backward of the first and the third."""
    losses = [training.loss_of(training.batch(number)) for number in range(3)]
    for loss in (losses[0], losses[2]):
        training.backward(loss)
        yield from training.gradients()


def evaluate_before_backward(training: Training) -> NamedValues:
    """Evaluate between forward and backward."""
    batch = training.batch(1)
    loss = training.loss_of(batch)
    with _evaluation_mode(training.model):
        with torch.no_grad():
            yield from walk("output", training.forward(training.batch(2)))
        training.backward(loss)
    yield from training.gradients()
    yield from training.state(batch)


def retain_graph(training: Training) -> NamedValues:
    """Compute gradients with `torch.autograd.grad`, then run backward of half the loss through the same graph."""
    loss = training.loss_of(training.batch(1))
    trained = training.trained_parameters()
    gradients = torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True)
    yield from walk("gradients", dict(zip(trained, gradients, strict=True)))
    training.backward(loss / 2)
    yield from training.gradients()


def train_between_evaluations(training: Training) -> NamedValues:
    """Evaluate between steps, run passes without gradients in training mode, and change weights through ``data``."""
    kept: list[dict[str, Tensor | None]] = []
    for number in range(2):
        batch = training.batch(number)
        training.backward(training.loss_of(batch))
        yield from training.gradients()
        kept.append({name: each.grad for name, each in training.parameters().items()})
        for each in training.parameters().values():
            if each.grad is not None:
                each.data.add_(each.grad, alpha=-LEARNING_RATE)
        training.model.zero_grad()
        with torch.no_grad():
            if training.evaluates:
                with _evaluation_mode(training.model):
                    yield from walk("output in evaluation", training.forward(training.batch()))
            yield from walk("output without gradients", training.forward(batch))
        yield from training.state(batch)
    yield from walk("gradients of the first step, after the second", kept[0])


def change_settings(training: Training) -> NamedValues:
    """Unfreeze all parameters and change the rates of dropout; then freeze half of the parameters."""
    parameters = [each for each in training.parameters().values() if each.is_floating_point()]
    dropouts = [each for each in training.modules.values() if isinstance(each, DropoutBase)]
    before = [each.requires_grad for each in parameters], [each.p for each in dropouts]
    try:
        for number in (0, 1):
            for index, parameter in enumerate(parameters):
                parameter.requires_grad_(number == 0 or index >= len(parameters) // 2)
            for dropout in dropouts:
                dropout.p = (dropout.p + 0.5) / 2
            yield from walk("output", output := training.forward(training.batch(number)))
            training.backward(training.loss(output))
            yield from training.gradients()
            training.model.zero_grad()
    finally:
        for parameter, requires_grad in zip(parameters, before[0], strict=True):
            parameter.requires_grad_(requires_grad)
        for dropout, rate in zip(dropouts, before[1], strict=True):
            dropout.p = rate


def refill_inputs(training: Training) -> NamedValues:
    """Train on two batches in the same memory."""
    batch = training.batch()
    yield from walk("output", training.forward(batch))
    _refill(batch, training.batch(1))
    yield from walk("output of the second batch", output := training.forward(batch))
    training.backward(training.loss(output))
    yield from training.gradients()


def refill_inputs_before_backward(training: Training) -> NamedValues:
    """Load the next batch into the same memory between forward and backward."""
    batch = training.batch()
    loss = training.loss_of(batch)
    _refill(batch, training.batch(1))
    training.backward(loss)
    yield from training.gradients()


def start_from_gradient(training: Training) -> NamedValues:
    """Run backward from a given gradient of the last output to inputs that require gradients."""
    batch = training.batch()
    for each in tensors_in(batch):
        each.requires_grad_(each.requires_grad or each.is_floating_point() or each.is_complex())
    last = trained_outputs(tensors_in(training.forward(batch)))[-1]
    yield "last output", last
    gradient = last.detach().cos()
    training.backward(last, gradient)
    yield "gradient of the caller", gradient
    yield from training.gradients()
    yield from _gradients_of_inputs(batch)


def leave_autocast(training: Training) -> NamedValues:
    """Run forward under autocast, and backward outside."""
    with torch.autocast(device_of(training.model).type, torch.bfloat16):
        loss = training.loss_of(training.batch(1))
    yield "loss", loss
    training.backward(loss)
    yield from training.gradients()


def differentiate_twice(training: Training) -> NamedValues:
    """Run backward of the squared norm of the gradients."""
    loss, trained = training.loss_of(training.batch(1)), training.trained_parameters()
    gradients = torch.autograd.grad(loss, [*trained.values()], create_graph=True, allow_unused=True)
    yield from walk("gradients", dict(zip(trained, gradients, strict=True)))
    squares = [each.abs().square().sum() for each in gradients if each is not None]
    training.backward(torch.stack([each.float() for each in squares]).sum())
    yield from training.gradients()


def overwrite_outputs(training: Training) -> NamedValues:
    """Change the outputs in place before the loss."""
    output = training.forward(training.batch(1))
    for each in trained_outputs(tensors_in(output)):
        each.neg_().add_(1)  # probabilities stay probabilities
    training.backward(training.loss(output))
    yield from training.gradients()


STEPS = Scenario("steps", train_in_steps)

#: The scenarios after the steps. Plain training of many networks raises an error in the last ones.
SCENARIOS = (
    Scenario("three passes before backward", delay_backward),
    Scenario("evaluation before backward", evaluate_before_backward),
    Scenario("retained graph", retain_graph),
    Scenario("evaluation between steps", train_between_evaluations),
    Scenario("other frozen parameters and dropout rates", change_settings),
    Scenario("refilled inputs", refill_inputs),
    Scenario("gradients of inputs", start_from_gradient),
    Scenario("autocast", leave_autocast),
    Scenario("second derivatives", differentiate_twice),
    Scenario("overwritten outputs", overwrite_outputs),
    Scenario("overwritten inputs", refill_inputs_before_backward),
)


def match_names(expected: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters or buffers of a variant under the expected names.

    Renamed tensors are matched by their order, which wrappers keep. Raises ConfigError if numbers or shapes differ.
    """
    names = expected.keys() == tensors.keys()
    pairs = [(name, name) for name in expected] if names else [*zip(expected, tensors, strict=False)]
    wrong = [
        f"{other} of shape {tuple(tensors[other].shape)} instead of {name} of shape {tuple(expected[name].shape)}"
        for name, other in pairs
        if expected[name].shape != tensors[other].shape
    ]
    if len(expected) != len(tensors):
        only = [f"{name} only in the variant" for name in tensors.keys() - expected.keys()]
        wrong = [f"{len(tensors)} instead of {len(expected)}", *only]
    if wrong:
        raise ConfigError(
            f"the variant has other parameters or buffers than the network: {join_names(wrong)}",
            "zoo.check",
            "keep their number, order and shapes",
        )
    return {name: tensors[other] for name, other in pairs}


def named_inputs(batch: ModelInputs) -> NamedValues:
    """Yield the inputs and their contents, by name."""
    return walk("input", dict(enumerate(batch[0])) | batch[1])


def _forward_with_layouts(training: Training, batch: ModelInputs) -> tuple[Any, NamedValues]:
    """Return the output, and its values with their strides and the owners of their memory."""
    known = (*named_inputs(batch), *training.parameters().items(), *training.buffers().items())
    owners = {each.data_ptr(): name for name, each in known if _has_memory(each)}
    output = training.forward(batch)

    def values() -> NamedValues:
        for name, each in walk("output", output):
            yield name, each
            if _has_memory(each):  # views of the output and writes into it depend on its layout
                owner = owners.setdefault(each.data_ptr(), name)
                yield f"layout of {name}", f"strides {each.stride()}" + (f" in {owner}" if owner != name else "")

    return output, values()


def _gradients_of_inputs(batch: ModelInputs) -> NamedValues:
    for name, each in named_inputs(batch):
        if isinstance(each, Tensor):
            yield f"gradient of {name}", each.grad if each.is_leaf else None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets a network to evaluation mode."""
    modes = [(each, each.training) for each in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for each, training in modes:  # submodules may have another mode than the network
            if each.training is not training:
                each.train(training)


@torch.no_grad()
def _refill(batch: ModelInputs, other: ModelInputs) -> None:
    """Copy the values of another batch into the tensors of a batch."""
    for tensor, values in zip(tensors_in(batch), tensors_in(other), strict=True):
        tensor.copy_(values)


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


def _has_memory(value: Any) -> bool:
    """Return whether a value is a tensor with elements, strides and an address."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or is_wrapper(value))
        and value.numel() > 0
    )


def _is_data(value: Any) -> bool:
    """Return whether a value is a number, string, array or tensor, or a container of them."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple | deque | set | frozenset):
        return all(map(_is_data, value))
    return isinstance(value, (*PLAIN, Tensor, np.ndarray))


def _values_in(value: Any) -> list[Value]:
    return [value_of(0, name, each) for name, each in walk("", value)]


def _are_same(values: list[Value], others: list[Value]) -> bool:
    return len(values) == len(others) and not any(map(difference, values, others))
