"""Programs: training steps written as a short text per operation."""

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
    - `budget`: as for `zoo.lean`.
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
    budget: float | str | None = None
    turn: int = 0
    other: tuple[Step, ...] = ()
    turns: str = ""
    knows_parameters: bool = False
    seed: int = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.forward, *self.other, *self.between, *self.later)

    def __str__(self) -> str:
        """Return the program as an expression of Python, with its steps in one line."""
        parts = {name: "; ".join(map(str, getattr(self, name))) for name in ("forward", "between", "later", "other")}
        forward = parts.pop("forward")
        settings = [*((name, steps) for name, steps in parts.items() if steps), *self.settings()]
        return f"program({', '.join([repr(forward), *(f'{name}={value!r}' for name, value in settings)])})"

    def settings(self) -> Iterator[tuple[str, Any]]:
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            default = {"returns": self.forward[-1].to[:1], "loss": self.returns}.get(name, field.default)
            if name not in ("forward", "between", "later", "other") and value != default:
                yield name, value


def program(forward: str, *, returns: str = "", **settings: Any) -> Program:
    """Return the program of an expression written by `Program.__str__`.

    By default it returns the result of its last step, and the loss reads all outputs.
    """
    texts = forward, *(settings.pop(name, "") for name in ("between", "later", "other"))
    parts = [tuple(Step.parse(line.strip()) for line in text.split(";") if line.strip()) for text in texts]
    returns = returns or parts[0][-1].to[:1]
    return Program(parts[0], returns, settings.pop("loss", returns), *parts[1:3], other=parts[3], **settings)
