"""Programs: training steps written as a line per operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Step(NamedTuple):
    """An operation on two tensors and a small number. Its outputs replace the tensors named in ``to``."""

    to: str
    name: str
    a: str
    b: str
    k: int

    def __str__(self) -> str:
        arguments = [self.a, *([self.b] if self.b != self.a else []), *([str(self.k)] if self.k else [])]
        return f"{self.to} = {self.name}({', '.join(arguments)})"

    @classmethod
    def parse(cls, line: str) -> Step:
        """Return the step of a line as `str` writes it: the second tensor defaults to the first, the number to 0."""
        to, _, rest = line.partition(" = ")
        name, _, arguments = rest.strip().rstrip(")").partition("(")
        a, *others = arguments.split(", ")
        k = int(others.pop()) if others and others[-1].isdigit() else 0
        return cls(to.strip(), name, a, others[0] if others else a, k)


@dataclass(frozen=True)
class Program:
    """A training step: a forward pass, writes before backward, and backward.

    Args:
    - `forward`: steps of the forward pass.
    - `between`: steps after it, of the inputs and of what it returned.
    - `later`: steps between two backward passes.
    - `returns`: the names of what forward returns.
    - `loss`: of them, those that the loss is made of.
    - `backward`: "once", "retained" (twice), "double" (of a gradient), "penalty" (of a gradient, with the loss) or
      "parts" (one for each output).
    - `is_early`: whether the loss is computed before the steps between.
    - `forwards`: passes before the first backward.
    - `is_module`: whether the network itself is made lean, instead of running inside of a `Rematerializer`.
    - `is_inside`: whether backward runs in a `Rematerializer` too.
    - `smallest_bytes`: of the recording.
    - `budget`: within which the steps are trained; None without one.
    - `turn`: index of the training step in which the program is another; 0 for none.
    - `other`: the steps of its forward pass then; none for the same steps.
    - `turns`: what else is other then: "frozen" (half of the parameters), "narrow" (half of the inputs is left),
      "fails" (forward, at its end), "budget" (from then on); "" for nothing.
    - `knows_parameters`: whether the `Rematerializer` gets the parameters.
    - `seed`: of inputs and random numbers.
    """

    forward: tuple[Step, ...]
    returns: str
    loss: str
    between: tuple[Step, ...] = ()
    later: tuple[Step, ...] = ()
    backward: str = "once"
    is_early: bool = True
    forwards: int = 1
    is_module: bool = False
    is_inside: bool = False
    smallest_bytes: int = 0
    budget: float | None = None
    turn: int = 0
    other: tuple[Step, ...] = ()
    turns: str = ""
    knows_parameters: bool = False
    seed: int = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.forward, *self.other, *self.between, *self.later)

    def __str__(self) -> str:
        """Return the program as an expression of Python, with a line per step."""
        text = 'program("""' + "".join(f"\n    {step}" for step in self.forward)
        for name in ("between", "later", "other"):
            if steps := getattr(self, name):
                text += f'\n""", {name}="""' + "".join(f"\n    {step}" for step in steps)
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings())
        return f'{text}\n""", {settings})'

    def settings(self) -> Iterator[tuple[str, Any]]:
        for name, each in self.__dataclass_fields__.items():
            value = getattr(self, name)
            default = self.returns if name == "loss" else each.default
            if name not in ("forward", "between", "later", "other") and value != default:
                yield name, value


def program(
    forward: str, *, between: str = "", later: str = "", other: str = "", returns: str, **settings: Any
) -> Program:
    """Return the program of an expression written by `Program.__str__`. By default the loss reads all outputs."""
    texts = forward, between, later, other
    parts = [tuple(Step.parse(line) for line in text.strip().splitlines()) for text in texts]
    return Program(parts[0], returns, settings.pop("loss", returns), *parts[1:3], other=parts[3], **settings)
