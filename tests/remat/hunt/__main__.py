"""Trains random programs plainly, with recipes, and with a clone of each tensor that autograd saves.

The third run is the truth: a write into a tensor after autograd saved it never reaches its clone, so that the
gradients belong to the values of the forward pass. A program is *silently wrong* if its results with recipes are not
the truth, and plain training has the truth or an error.

    python -m tests.remat.hunt --programs 20000 --seed 0

With ``--inductor``, torch.compile compiles the programs with the lean rule, which takes seconds each. They must have
the results of Inductor without the rule, up to rounding, and the same random numbers and side effects.

    python -m tests.remat.hunt --inductor --programs 100
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tests.remat.hunt.judge import WRONG, Verdict, compiled_programs, judge, judge_compiled, programs, shrink
from tests.remat.hunt.programs import Program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs, print small ones of those that fail, and count the verdicts; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inductor", action="store_true", help="let Inductor compile the programs")
    options = parser.parse_args(arguments)
    judged: Callable[[Program], Verdict] = judge_compiled if options.inductor else judge
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    found = set()
    for program, verdict in (compiled_programs if options.inductor else programs)(options.programs, options.seed):
        counts[verdict.verdict] += 1
        failures[verdict.reason] += verdict.is_failure
        if not verdict.is_failure or failures[verdict.reason] > (40 if verdict.verdict == WRONG else 3):
            continue
        program = shrink(program, 120.0 if options.inductor else 20.0, judged)
        names = frozenset(step.name for step in program.steps)
        if names not in found:
            found.add(names)
            verdict = judged(program)
            print(f"# {verdict.verdict}: {verdict.detail[:150]}\n{program}\n", flush=True)
    print(*(f"{count:6}  {verdict}" for verdict, count in counts.most_common()), sep="\n")
    return 1 if failures.total() else 0


if __name__ == "__main__":
    sys.exit(main())
