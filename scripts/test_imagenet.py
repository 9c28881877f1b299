"""``zoo validate`` with the arguments of the original project's test script: CONFIG CHECKPOINT DATA."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from zoo.cli import run_script
from zoo.cli.options import Command, DataFolder, Positive, argument, option
from zoo.cli.validate import ScoreOptions, Validate, scale
from zoo.tasks.protocols import PROTOCOLS


@dataclass(frozen=True, kw_only=True)
class ScoreImageNet(Command, ScoreOptions):
    """Score a checkpoint on DATA/val."""

    config: str = argument("CONFIG")
    """Experiment file."""
    checkpoint: Path = argument("CHECKPOINT")
    """Checkpoint, weights file or published name."""
    data: DataFolder = argument("DATA")
    """Folder with val/, one folder per class."""
    log_every: Positive = option("-p", "--print-freq", default=10)
    """Batches between two log lines."""
    crop: Positive | None = option("-c", metavar="PX")
    """Side of the crop (default: 224)."""
    scale: Annotated[int, scale] | None = option("-s", metavar="PX")
    """Shorter side before the crop, -1 to keep the size (default: 256)."""

    def run(self) -> int:
        """Score the checkpoint as ``zoo validate`` does, by default with the original's crop whatever CONFIG says."""
        options = {field.name: getattr(self, field.name) for field in fields(ScoreOptions)}
        scored = Validate(
            name=self.config, weights=self.checkpoint, data=self.data, default_crop=PROTOCOLS["center224"], **options
        )
        return scored.run()


if __name__ == "__main__":
    raise SystemExit(run_script(ScoreImageNet))
