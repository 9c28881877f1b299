"""Runs programs plainly, with recipes, with a clone of each saved tensor, or compiled by Inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.remat.hunt.operations import OPERATIONS, SHAPE, At, Network
from tests.remat.hunt.programs import Program, Step
from zoo.remat import Rematerializer, inductor_options
from zoo.remat._budget import Budget
from zoo.remat.inductor import _cut as cut

NUM_STEPS = 3  # training steps; later steps follow a plan made from the first step
MORE_STEPS = 5  # if one of them is another: a pass that leaves its plan is recorded again


def _templates(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs, parameters and buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = {
            "x": torch.randn(SHAPE), "y": torch.randn(SHAPE), "e": torch.randn(2, 4, 1, 1),
            "u": torch.randint(0, 256, SHAPE, dtype=torch.uint8), "f": torch.randn(SHAPE),
        }  # fmt: skip
        weights = {
            "w3": 0.2 * torch.randn(4, 4, 3, 3), "b3": torch.randn(4), "w1": 0.5 * torch.randn(4, 4, 1, 1),
            "wd": 0.3 * torch.randn(4, 1, 3, 3), "gamma": 1 + 0.1 * torch.randn(4), "beta": torch.randn(4),
            "p": torch.randn(SHAPE),
        }  # fmt: skip
        buffers = {
            "mean1": torch.randn(4), "var1": torch.rand(4) + 0.5, "mean2": torch.randn(4), "var2": torch.rand(4) + 0.5,
            "scale": torch.rand(4, 1, 1) + 0.5, "big": torch.randn(SHAPE),
        }  # fmt: skip
    return inputs, weights, buffers


OTHER_BUDGET = 0.45  # used after the turn of a program
TEMPLATES = [_templates(seed) for seed in range(4)]
_weights: dict[Any, Tensor] = {}


def _weight_of(x: Tensor) -> Tensor:
    """Return the gradient of the loss by a tensor."""
    key = x.shape, x.dtype
    if key not in _weights:
        _weights[key] = torch.arange(1, x.numel() + 1).view(x.shape).to(torch.float64).cos().to(x.dtype)
    return _weights[key]


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same memory layout."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def clones_of_saved() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves a clone of each tensor, and unpacks another clone each time."""
    return torch.autograd.graph.saved_tensors_hooks(copied, copied)


@contextmanager
def smallest(size: int) -> Iterator[None]:
    """Set the default size in bytes below which recordings keep a tensor itself."""
    defaults = Rematerializer.__init__.__kwdefaults__
    before = defaults["smallest_bytes"]
    defaults["smallest_bytes"] = size
    try:
        yield
    finally:
        defaults["smallest_bytes"] = before


@torch.no_grad()
def _descend(net: Network) -> None:
    """Change the parameters by a step of gradient descent, and cut the history of the buffers."""
    for each in net.parameters():
        if each.grad is not None:
            each -= 0.05 * each.grad.nan_to_num().clamp(-1, 1)
        each.grad = None
    for name, buffer in list(net.named_buffers()):
        if buffer.requires_grad:
            setattr(net, name, buffer.detach())


@dataclass
class Result:
    """Results of a run in order, or its error and the place that raised it."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    stage: str = ""

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.tensors.append((name, copied(tensor)))


def execute(step: Step, net: Network, tensors: dict[str, Tensor]) -> None:
    """Run a step."""
    out = OPERATIONS[step.name](At(net, tensors[step.a], tensors[step.b], step.k))
    store(tensors, step.to, step.name.endswith("_"), out)


def store(tensors: dict[str, Tensor], names: Sequence[str], is_unused: bool, out: Any) -> None:
    """Store the results of a step under their names."""
    if isinstance(out, Tensor):
        if not is_unused:
            tensors[names[0]] = out
    elif isinstance(out, (tuple, list)):
        tensors.update(zip(names, out, strict=False))


class DoNothing(TorchDispatchMode):
    """Runs operations unchanged."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class FailedForwardError(Exception):
    """Raised at the end of a forward pass, like an interrupt by the user."""


class Runner:
    """Runs a program in one of the three ways: "plain", "lean" or "truth"."""

    def __init__(self, program: Program, way: str) -> None:
        self.program, self.way = program, way
        self.result = Result()
        self.number = 0  # number of the training step

    def forward(self, net: Network, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors, program = dict(tensors), self.program
        for step in program.other if self.is_turn and program.other else program.forward:
            execute(step, net, tensors)
        if self.is_turn and program.turns == "fails":
            raise FailedForwardError
        return {name: tensors[name] for name in program.returns if name in tensors}

    @property
    def is_turn(self) -> bool:
        """Whether this training step runs the changed program."""
        return 0 < self.program.turn == self.number

    def change(self, net: Network, tensors: dict[str, Tensor], stage: str) -> None:
        for step in getattr(self.program, stage):
            execute(step, net, tensors)

    def run(self) -> Result:
        self.hooks = clones_of_saved() if self.way == "truth" else nullcontext()
        try:
            with warnings.catch_warnings(), self.hooks:
                warnings.simplefilter("ignore")
                self._run()
        except Exception as error:
            self.result.error = error.with_traceback(None)
        return self.result

    @property
    def num_steps(self) -> int:
        """Number of training steps."""
        return MORE_STEPS if self.program.turn > 0 else NUM_STEPS

    def _run(self) -> None:
        self.result.stage = "forward"
        seed = self.program.seed
        inputs, weights, buffers = TEMPLATES[seed % len(TEMPLATES)]
        torch.default_generator.manual_seed(seed)  # manual_seed() notes a traceback for each kind of device
        net = Network(weights, buffers)
        net.hooks = self.hooks
        self.budget = Budget.parse(self.program.budget)
        if self.way == "lean" and self.program.is_module:
            zoo.lean(net, self.program.budget)
        for number in range(self.num_steps):
            if number > 0:
                self.result.stage = "forward"
                _descend(net)
            self.number = number
            if self.is_turn and self.program.turns == "budget":
                self.budget = Budget.parse(OTHER_BUDGET)
                if self.way == "lean" and self.program.is_module:
                    zoo.lean(net, OTHER_BUDGET)
            is_frozen = self.is_turn and self.program.turns == "frozen"
            for each in list(net.parameters())[::2]:
                each.requires_grad_(not is_frozen)
            try:
                self._step(net, inputs, number)
            except FailedForwardError:
                self.result.add("random numbers", torch.rand(1))
        self.result.stage = ""

    def _step(self, net: Network, inputs: dict[str, Tensor], number: int) -> None:
        """Run a training step with inputs that differ from step to step."""
        result = self.result
        given = {name: tensor.roll(number, 1) for name, tensor in inputs.items()}
        if self.is_turn and self.program.turns == "narrow":
            given = {name: tensor[:1].clone() for name, tensor in given.items()}
        for name in "xye":
            given[name].requires_grad_()
        net.arrays = [given[name].numpy() for name in "uf"]
        given |= {name: torch.from_numpy(array) for name, array in zip("uf", net.arrays, strict=True)}
        leaves = [(name, given[name]) for name in "xye"] + list(net.named_parameters())
        passes = [self._pass(net, given) for _ in range(self.program.forwards)]
        for outputs in passes:
            for name, tensor in outputs.items():
                result.add(f"output {name}", tensor)
        losses = [self._losses(outputs) for outputs in passes] if self.program.is_early else []
        result.stage = "between"
        for outputs in passes:
            tensors = {**given, **outputs}
            self.change(net, tensors, "between")
        if not self.program.is_early:
            losses = [self._losses(outputs) for outputs in passes]
        del outputs, passes
        result.stage = "backward"
        self._backward([loss for each in losses for loss in each], leaves, net, given)
        for name, leaf in leaves:
            result.add(f"gradient of {name}", leaf.grad)
        for name, buffer in net.named_buffers():
            result.add(f"buffer {name}", buffer)
        result.add("random numbers", torch.rand(1))

    def _context(self, net: Network) -> AbstractContextManager[Any]:
        if self.way != "lean" or self.program.is_module:
            return nullcontext()
        program = self.program
        parameters = net.parameters() if program.knows_parameters else ()
        return Rematerializer(self.budget, smallest_bytes=program.smallest_bytes, parameters=parameters)

    def _pass(self, net: Network, given: dict[str, Tensor]) -> dict[str, Tensor]:
        net.body = lambda tensors: self.forward(net, tensors)
        with self._context(net), smallest(self.program.smallest_bytes) if self.program.is_module else nullcontext():
            return net(given)

    def _losses(self, outputs: dict[str, Tensor]) -> list[Tensor]:
        return [(outputs[name] * _weight_of(outputs[name])).sum() for name in self.program.loss if name in outputs]

    def _backward(
        self, losses: list[Tensor], leaves: list[tuple[str, Tensor]], net: Network, given: dict[str, Tensor]
    ) -> None:
        how = self.program.backward
        # torch takes other kernels in backward while any dispatch mode is active.
        inside = self._context(net) if self.way == "lean" else DoNothing()
        with inside if self.program.is_inside else nullcontext():
            if how == "once":
                torch.autograd.backward(losses)
            elif how == "retained":
                torch.autograd.backward(losses, retain_graph=True)
                for name, leaf in leaves:
                    self.result.add(f"first gradient of {name}", leaf.grad)
                self.change(net, given, "later")
                torch.autograd.backward(losses)
            elif how == "parts":
                for loss in losses:
                    loss.backward(retain_graph=True)
            elif how == "penalty":
                of = [given[name] for name in "xy"]
                gradients = torch.autograd.grad(losses, of, create_graph=True, allow_unused=True)
                penalties = [
                    (each.square().sum((1, 2, 3)) - 1).square().sum() for each in gradients if each is not None
                ]
                torch.autograd.backward([*losses, *(each for each in penalties if each.requires_grad)])
            else:
                gradients = torch.autograd.grad(
                    losses, [leaf for _, leaf in leaves], create_graph=True, allow_unused=True
                )
                found = [each for each in gradients if each is not None]
                for each in found:
                    self.result.add("gradient", each)
                self.change(net, given, "later")
                torch.autograd.backward([each.sin().sum() for each in found if each.requires_grad])


def _as_function(program: Program) -> Callable[[Network, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the forward pass as a function with one line per step, like a user's code.

    torch.compile continues in the line after a step that it cannot capture. It gives up a loop with such a step.
    """
    lines = ["def forward(net, tensors):", "    tensors = dict(tensors)"]
    for step in program.forward:
        names = ", ".join(f'"{name}"' for name in step.to)
        call = f'OPERATIONS["{step.name}"](At(net, tensors["{step.a}"], tensors["{step.b}"], {step.k}))'
        lines += [f"    out = {call}", f"    store(tensors, [{names}], {step.name.endswith('_')}, out)"]
    lines.append(f"    return {{name: tensors[name] for name in {program.returns!r} if name in tensors}}")
    scope = {"OPERATIONS": OPERATIONS, "At": At, "store": store}
    exec("\n".join(lines), scope)
    return scope["forward"]


class Compiled(Runner):
    """Runs a program that Inductor compiles, with the lean rule ("lean rule") or without it ("inductor")."""

    def __init__(self, program: Program, way: str) -> None:
        super().__init__(program, way)
        self.compiled: Any = None

    @property
    def num_steps(self) -> int:
        return 1

    def _pass(self, net: Network, given: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.compiled is None:
            options = (
                inductor_options(self.program.budget) if self.way == "lean rule" else {"layout_optimization": False}
            )
            self.compiled = torch.compile(_as_function(self.program), options=options)
        net.body = lambda tensors: self.compiled(net, tensors)
        return net.body(given)

    def run(self) -> Result:
        torch.compiler.reset()
        before, cut.MIN_BYTES = cut.MIN_BYTES, self.program.smallest_bytes
        try:
            with (
                torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False),
                torch.inference_mode(False),  # an error of Dynamo's own may leave it on
            ):
                return super().run()
        finally:
            cut.MIN_BYTES = before
