"""``zoo quickstart``: ``zoo train`` and ``zoo validate`` on bundled images, in minutes on a CPU.

The task is to classify garments, or to segment scenes of garments. The segmentation network starts from a body that was
trained to classify; the paper starts from ImageNet weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zoo.cli.options import Command, option
from zoo.cli.train import Train
from zoo.cli.validate import Validate

logger = logging.getLogger(__name__)

LOG_DIRS = {"classification": Path("runs/quickstart"), "segmentation": Path("runs/quickstart-segmentation")}
# For segmentation as measured in docs/results/quickstart_segmentation.json.
DURATIONS = {"classification": "less than a minute", "segmentation": "about two and a half minutes"}


@dataclass(frozen=True, kw_only=True)
class Quickstart(Command):
    """Train and score a small network on bundled images."""

    example = "zoo quickstart"
    task: Literal["classification", "segmentation"] = "classification"
    """Classify images of garments, or segment scenes of them."""
    log_dir: Path | None = option(metavar="DIR")
    """Log folder; a run in it is resumed (default: runs/quickstart, or runs/quickstart-segmentation)."""

    def run(self) -> int:
        from zoo.data.prepare.sample import unpack_sample
        from zoo.data.prepare.scenes import GARMENTS_DIR, unpack_scenes
        from zoo.engine._checkpoint import CHECKPOINT

        log_dir = self.log_dir or LOG_DIRS[self.task]
        logger.info("training takes %s on two CPU cores, and is resumed if it was interrupted", DURATIONS[self.task])
        if self.task == "classification":
            data = unpack_sample()
            self._train("quickstart_fashion_mnist", data, log_dir)
        else:
            data, body = unpack_scenes(), log_dir / "body"
            self._train("quickstart_scenes_body", data / GARMENTS_DIR, body)
            self._train("quickstart_scenes", data, log_dir, str(body / CHECKPOINT))
        checkpoint = log_dir / CHECKPOINT
        Validate(command_line=self.command_line, name=str(checkpoint), data=data, workers=1).run()
        print(f"\ncheckpoint    {checkpoint}")
        print(f"log           {log_dir}/training_0.log, {log_dir}/metrics.jsonl")
        print(f"TensorBoard   tensorboard --logdir {log_dir}")
        print(f"sample        {data}")
        if self.task == "classification":
            image = next(path for path in sorted((data / "val").rglob("*")) if path.is_file())
            print(f"try next      zoo predict {checkpoint} {image}")
            print("your images   zoo train resnet18 DATA --log-dir runs/mine")
        else:
            print(f"try next      zoo segment {checkpoint} {data}/val/images {log_dir}/segmented")
        return 0

    def _train(self, config: str, data: Path, log_dir: Path, weights: str | None = None) -> None:
        run = Train(
            command_line=self.command_line, config=config, data=data, log_dir=log_dir, workers=1, resume="auto",
            weights=weights,
        )  # fmt: skip
        run.train()
