"""Writes random programs."""

from __future__ import annotations

import random
from dataclasses import replace

from torch import Tensor

from tests.remat.hunt.operations import KIND_OF, KINDS, Network
from tests.remat.hunt.programs import Program, Step
from tests.remat.hunt.runner import Result, Runner, execute

#: Names of the tensors of a program: x, y and e require gradients, u (uint8) and f are views of numpy arrays.
INPUTS = "xyeuf"
RESULTS = "abcdghkl"
#: How often a kind is drawn.
WEIGHTS: dict[str, float] = {
    "layer": 16, "norm": 10, "activation": 14, "elementwise": 22, "promotion": 4, "shape": 10, "view": 10,
    "several views": 9, "alias": 9, "in place": 10, "write": 6, "write into a view": 6, "write through an alias": 3,
    "write behind autograd": 0.2, "refill": 0.3, "buffer": 6, "parameter": 4, "parameter behind autograd": 0.2,
    "function": 4, "inference": 1, "random": 4, "operator": 1.5, "context": 2, "transform": 1,
    "layout": 6, "replaced data": 1, "cast": 1.5, "region": 3, "gradient inside": 1, "chain": 1, "subclass": 0.8,
    "higher order": 0.6, "frozen": 2,
}  # fmt: skip
ORDINARY = (
    "layer", "norm", "activation", "elementwise", "shape", "view", "several views", "alias", "layout", "cast", "frozen",
)  # fmt: skip
#: The same between forward and backward.
BETWEEN: dict[str, float] = {
    "in place": 8, "write": 6, "write into a view": 5, "write through an alias": 4, "write behind autograd": 1,
    "refill": 4, "buffer": 5, "parameter": 1, "parameter behind autograd": 0.2, "norm": 2, "random": 1, "operator": 1,
    "layer": 1, "alias": 2, "several views": 1, "view": 1,
}  # fmt: skip


class Writer(Runner):
    """Writes a program while running it for the reference; drops steps for which torch raises an error."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        backward = r.choices(["once", "retained", "parts", "double", "penalty"], [12, 3, 3, 2, 2])[0]
        is_module = r.random() < 0.25
        program = Program(
            (), "", "", backward=backward, is_early=r.random() < 0.6, forwards=2 if r.random() < 0.12 else 1,
            is_module=is_module, is_inside=not is_module and r.random() < 0.08,
            smallest_bytes=r.choices([0, 100, 300, 600, 2**16], [8, 3, 3, 1, 1])[0],
            budget=r.choices([None, 0.6, 0.3, 0.05], [6, 2, 2, 1])[0],
            turn=r.choice([0, 0, 0, 1, 2, 3]), turns=r.choice(["", "", "", "frozen", "narrow", "fails", "budget"]),
            knows_parameters=r.random() < 0.5, seed=r.randrange(1000),
        )  # fmt: skip
        super().__init__(program, "truth")
        self.count = r.choice([4, 6, 8, 10, 12, 16, 24, 32])
        # Each program has a few kinds more often. A third of them does what most networks do and writes nothing.
        favorites = r.sample(list(WEIGHTS), 3)
        self.weights = {kind: weight * (3 if kind in favorites else 1) for kind, weight in WEIGHTS.items()}
        if r.random() < 0.35:
            self.weights = {kind: self.weights[kind] for kind in ORDINARY}
        self.last = ""
        self.between_count = r.choice([0, 0, 0, 1, 1, 2])
        self.num_written = 0  # steps of training

    def _draw(self, weights: dict[str, float], tensors: dict[str, Tensor]) -> Step:
        r = self.random
        kind = r.choices(list(weights), list(weights.values()))[0]
        name = r.choice(list(KINDS[kind]))
        to = r.sample(RESULTS, 4 if kind == "several views" or name in ("side", "var") else 1)
        own = [name for name in tensors if name in RESULTS]
        names = own * 3 + [name for name in INPUTS if name in tensors]
        a, b = r.choice(names), r.choice(names)
        if self.last in tensors and r.random() < 0.3:  # tensors with several readers are where faults are
            a = self.last
        self.last = a
        if r.random() < 0.7:  # most pairs of other shapes would be refused
            b = r.choice([name for name in names if tensors[name].shape == tensors[a].shape])
        return Step("".join(to), name, a, b, r.randrange(3))

    def _grow(
        self, count: int, weights: dict[str, float], net: Network, tensors: dict[str, Tensor]
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        for _ in range(6 * count):
            if len(steps) == count:
                break
            step = self._draw(weights, tensors)
            try:
                execute(step, net, tensors)
            except (RuntimeError, TypeError, IndexError, ValueError):
                continue
            steps.append(step)
        return tuple(steps)

    def _step(self, net: Network, inputs: dict[str, Tensor], number: int) -> None:
        super()._step(net, inputs, number)
        self.num_written += 1

    def _turned(self) -> tuple[Step, ...]:
        """Return the forward pass with another number, argument, operation, order, or number of steps."""
        r, steps = self.random, list(self.program.forward)
        index = r.randrange(len(steps))
        step = steps[index]
        how = r.choice(["number", "argument", "swap", "order", "less", "repeat", "name"])
        if how == "less":
            del steps[index]
        elif how == "repeat":
            steps.insert(index, step)
        elif how == "order" and index > 0:
            steps[index - 1 : index + 1] = reversed(steps[index - 1 : index + 1])
        elif how == "argument":
            steps[index] = step._replace(a=r.choice([each.to[0] for each in steps[:index]] + ["x", "y"]))
        elif how == "swap":
            steps[index] = step._replace(a=step.b, b=step.a)
        elif how == "name":
            steps[index] = step._replace(name=r.choice(list(KINDS[KIND_OF[step.name]])))
        else:
            steps[index] = step._replace(k=(step.k + 1) % 3)
        return tuple(steps)

    def forward(self, net: Network, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.program.forward:
            return super().forward(net, tensors)
        tensors = dict(tensors)
        steps = self._grow(self.count, self.weights, net, tensors)
        own = [name for name in tensors if name in RESULTS]
        returns = [name for name in own if self.random.random() < 0.6] or own[-1:]
        differentiable = [name for name in own if tensors[name].requires_grad and tensors[name].is_floating_point()]
        loss = [name for name in returns if name in differentiable]
        if len(loss) > 1:
            loss = [name for name in loss if self.random.random() < 0.8] or loss[:1]
        elif not loss and differentiable:
            loss = differentiable[-1:]
            returns += loss
        self.program = replace(self.program, forward=steps, returns="".join(returns), loss="".join(loss))
        if not loss:
            raise RuntimeError("nothing has a gradient")
        if self.program.turn > 0 and not self.program.turns:
            self.program = replace(self.program, other=self._turned())
        return {name: tensors[name] for name in returns}

    def change(self, net: Network, tensors: dict[str, Tensor], stage: str) -> None:
        steps = getattr(self.program, stage)
        if steps or self.between_count == 0 or self.num_written > 0:
            return super().change(net, tensors, stage)
        steps = self._grow(self.between_count, BETWEEN, net, tensors)
        self.program = replace(self.program, **{stage: steps})


def write(seed: int) -> tuple[Program, Result]:
    """Return a random program and its reference result."""
    writer = Writer(seed)
    truth = writer.run()
    return writer.program, truth
