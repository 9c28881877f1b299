"""``zoo train`` with the arguments of the original training script: --print-freq is its --log-every."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.cli import run_script
from zoo.cli.options import Positive, option
from zoo.cli.train import Train


@dataclass(frozen=True, kw_only=True)
class OriginalTrain(Train):
    """Train an experiment on DATA/train and validate on DATA/val."""

    log_every: Positive = option("-p", "--print-freq", default=10)


if __name__ == "__main__":
    raise SystemExit(run_script(OriginalTrain))
