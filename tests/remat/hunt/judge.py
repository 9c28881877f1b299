"""Judges programs by their truth, and shrinks failing programs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.remat.hunt.operations import EAGER, HIDES, KIND_OF, WRITES
from tests.remat.hunt.programs import Program
from tests.remat.hunt.runner import Compiled, Result, Runner
from tests.remat.hunt.writer import write
from zoo.remat._recipes import RecipeError


def same(a: Result, b: Result) -> str:
    """Return the name of the first tensor whose bits differ between two results, "" if none does. NaNs are equal."""
    if len(a.tensors) != len(b.tensors):
        return "number of gradients"
    return next((name for (name, x), (_, y) in zip(a.tensors, b.tensors, strict=True) if not same_bits(x, y)), "")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are bit-identical. NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    is_same = a == b
    if a.is_floating_point():
        is_same = is_same & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(is_same.all())


#: HIDDEN: wrong where plain training is right, after a write through ``.data`` or numpy into what was computed, which
#: nothing can see. INVALID: without a truth.
RIGHT, BOTH_RAISE, ALLOWED, FAILS, WRONG, HIDDEN, LIKE_PLAIN, OTHERWISE, INVALID = (
    "right", "both raise", "raises RecipeError", "fails when lean", "silently wrong", "hidden write",
    "wrong like plain", "wrong, not like plain", "invalid",
)  # fmt: skip
FAILURES = (FAILS, WRONG)


class Verdict(NamedTuple):
    """A verdict, and a description of the fault."""

    verdict: str
    detail: str

    @property
    def is_failure(self) -> bool:
        return self.verdict in FAILURES

    @property
    def reason(self) -> str:
        """Properties that distinguish failures with different causes, as far as known without shrinking."""
        return self.detail if self.verdict == FAILS else self.verdict


def judge(program: Program, truth: Result | None = None) -> Verdict:
    """Return whether a program trains correctly with recipes."""
    plain = Runner(program, "plain").run()
    lean = Runner(program, "lean").run()
    truth = truth or Runner(program, "truth").run()
    if truth.error is not None:
        return Verdict(INVALID, _told(truth)) if plain.error is not None else Verdict(INVALID, "only the truth raises")
    if lean.error is not None:
        if plain.error is not None:
            return Verdict(BOTH_RAISE, _told(lean))
        if isinstance(lean.error, RecipeError) and lean.stage == "backward" and _may_raise(program):
            return Verdict(ALLOWED if not same(plain, truth) else LIKE_PLAIN, _told(lean))
        return Verdict(FAILS, _told(lean))
    wrong = same(lean, truth)
    if not wrong:
        return Verdict(RIGHT, "")
    kinds = {"write behind autograd" if step.name == "data" else KIND_OF[step.name] for step in program.steps}
    if plain.error is not None:
        # If it had gone on, a refill or other data could have made it wrong, and so could statistics that move: torch's
        # norm in evaluation saves them, and its norm in training moves them without a version.
        has_unseen = bool(kinds & {*HIDES, "refill", "replaced data"}) or any(
            step.name in ("norm_eval", "norm_frozen") or (step.name.startswith("frozen_") and step.k == 1)
            for step in program.steps
        )
        return Verdict(HIDDEN if has_unseen else WRONG, f"{wrong}; plain: {_told(plain)}")
    if not same(plain, truth):
        return Verdict(HIDDEN if kinds & HIDES else WRONG, wrong)
    return Verdict(OTHERWISE if same(lean, plain) else LIKE_PLAIN, wrong)


def judge_compiled(program: Program) -> Verdict:
    """Return whether a program has the results of Inductor when Inductor uses the lean rule.

    Fusion rounds otherwise. A result is wrong if it is close neither to Inductor's nor to the one of plain training.
    """
    program = replace(program, is_module=False, is_inside=False)
    torchs = Compiled(program, "inductor").run()
    lean = Compiled(program, "lean rule").run()
    if torchs.error is not None:
        return Verdict(BOTH_RAISE if lean.error is not None else OTHERWISE, _told(torchs))
    if lean.error is not None:  # torch itself fails now and then where operators are traced, with the rule and without
        return Verdict(OTHERWISE if "INTERNAL ASSERT FAILED" in str(lean.error) else FAILS, _told(lean))
    plain = Runner(replace(program, budget=None), "plain").run()
    expected = dict(zip(_numbered(torchs), (tensor for _, tensor in torchs.tensors), strict=True))
    of_plain = dict(zip(_numbered(plain), (tensor for _, tensor in plain.tensors), strict=True))
    is_low = {"bfloat16", "autocast", "type_as"} & {step.name for step in program.steps}
    tolerance = 0.05 if is_low else 1e-3
    for key, (name, tensor) in zip(_numbered(lean), lean.tensors, strict=True):
        other = expected.pop(key, None)
        if other is None:
            return Verdict(WRONG, f"{name}: Inductor has none")
        if not _is_close(tensor, other, tolerance) and not _is_close(tensor, of_plain.get(key, other), tolerance):
            return Verdict(WRONG, name)
    return Verdict(RIGHT, "") if not expected else Verdict(WRONG, f"{next(iter(expected))[0]}: missing")


def _numbered(result: Result) -> list[tuple[str, int]]:
    """Return the names of the tensors of a result, each with the number of its earlier occurrences."""
    names = [name for name, _ in result.tensors]
    return [(name, names[:index].count(name)) for index, name in enumerate(names)]


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    a, b = a.nan_to_num(posinf=1e9, neginf=-1e9), b.nan_to_num(posinf=1e9, neginf=-1e9)
    return a.numel() == 0 or bool((a - b).abs().max() <= tolerance * max(1e-3, b.abs().max()))


def _told(result: Result) -> str:
    line = re.sub(r" object at 0x\w+", "", str(result.error).splitlines()[0])
    return f"{type(result.error).__name__} in {result.stage}: {line[:160]}"


def _may_raise(program: Program) -> bool:
    """Return whether a program overwrites tensors after forward, or without autograd's knowledge."""
    steps = program.between + program.later
    if program.forwards > 1:
        steps += program.forward
    return (
        any(KIND_OF[step.name] in WRITES for step in steps)
        or any("behind" in KIND_OF[step.name] or KIND_OF[step.name] == "refill" for step in program.forward)
        or any(step.name.startswith("overwrites") for step in program.forward)
    )


def programs(count: int, seed: int) -> Iterator[tuple[Program, Verdict]]:
    """Yield random programs and their verdicts."""
    for index in range(count):
        program, truth = write(seed * 10**9 + index)
        if truth.error is not None:
            yield program, Verdict(INVALID, _told(truth))
            continue
        verdict = judge(program, truth)
        if verdict.is_failure:
            verdict = judge(program)  # on its own
        yield program, verdict


def compiled_programs(count: int, seed: int) -> Iterator[tuple[Program, Verdict]]:
    """Yield random programs and their verdicts when Inductor compiles them."""
    for index in range(count):
        program, truth = write(seed * 10**9 + index)
        # Dynamo does not know that an array shares its memory with a tensor.
        writes_array = any(KIND_OF[step.name] == "refill" for step in program.forward)
        kinds = {KIND_OF[step.name] for step in program.steps}
        if truth.error is None and not writes_array and not kinds & (HIDES | EAGER):
            is_double = program.backward in ("double", "penalty")
            program = replace(program, backward="once" if is_double else program.backward)
            yield program, judge_compiled(program)


def _smaller(program: Program) -> Iterator[Program]:
    """Yield slightly simpler programs."""
    for name in ("later", "between", "other", "forward"):
        steps = getattr(program, name)
        for size in (len(steps) // 2, len(steps) // 4, 2, 1):
            if size > 0:
                for start in range(len(steps) - size, -1, -1):
                    yield replace(program, **{name: steps[:start] + steps[start + size :]})
    for name, _ in program.settings():
        if name not in ("returns", "loss"):
            yield replace(program, **{name: Program.__dataclass_fields__[name].default})
    for name in ("returns", "loss"):
        letters = getattr(program, name)
        for letter in letters:
            left = letters.replace(letter, "")
            if left:
                yield replace(program, **{name: left})
    for name in ("forward", "between", "later", "other"):
        steps = getattr(program, name)
        for position, step in enumerate(steps):
            simpler = [step._replace(k=0)] if step.k else []
            simpler += [step._replace(b=step.a)] if step.b != step.a else []
            simpler += [step._replace(to=step.to[:-1])] if len(step.to) > 1 else []
            simpler += [step._replace(a=other) for other in "xa" if step.a not in ("x", other)]
            simpler += [step._replace(name="shift", b=step.a)] if KIND_OF[step.name] not in ("elementwise",) else []
            simpler += [step._replace(name="sigmoid", b=step.a)] if step.name not in ("sigmoid", "shift") else []
            for each in simpler:
                yield replace(program, **{name: (*steps[:position], each, *steps[position + 1 :])})


def _size(program: Program) -> tuple[int, ...]:
    return (len(program.steps), sum(len(step.to) for step in program.steps), len(program.returns))


def shrink(program: Program, seconds: float = 20.0, judge: Callable[[Program], Verdict] = judge) -> Program:
    """Return the simplest program found that fails in the same way."""
    wanted = judge(program).reason
    seen: set[str] = set()
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for each in _smaller(program):
            if str(each) in seen or _size(each) > _size(program):
                continue
            seen.add(str(each))
            if judge(each).reason == wanted:
                program, is_smaller = each, True
                break
    return program
