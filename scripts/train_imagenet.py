"""``zoo train`` with the arguments of the original training script: --print-freq, and -e as ``zoo validate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.cli import run_script
from zoo.cli.options import Positive, option
from zoo.cli.train import Train
from zoo.cli.validate import Validate
from zoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OriginalTrain(Train):
    """Train an experiment on DATA/train and validate on DATA/val."""

    log_every: Positive = option("-p", "--print-freq", default=10)
    evaluate: bool = option("-e", default=False)
    """Only score the weights of --resume on DATA/val."""

    def run(self) -> int:
        if not self.evaluate:
            return super().run()
        if self.resume is None:
            raise ConfigError("--evaluate scores the weights of --resume", "command line", "give --resume PATH")
        scored = Validate(
            name=self.config, weights=Path(self.resume), data=self.data, workers=self.workers,
            log_every=self.log_every, dist_backend=self.dist_backend,
        )  # fmt: skip
        return scored.run()


if __name__ == "__main__":
    raise SystemExit(run_script(OriginalTrain))
