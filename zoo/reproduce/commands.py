"""What `zoo reproduce` is asked for, and the command line that asks for it, which the reports show."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.data.folder import OnBadImage

OUT = Path("runs/reproduce")


@dataclass(frozen=True)
class ImageNetOptions:
    """What `zoo reproduce imagenet` is asked for.

    Args:
        data: the folder with val/, which has one folder per class.
        models: names of published networks, shell-style patterns among them, and checkpoint files.
        protocols: names of published ways to score; None for all of them, and for checkpoints their own crop.
        limit: the number of images to score, spread evenly over the data; None for all.
        batch_size: images at once per process; None for the experiment's over the number of processes.
        workers: processes that read images, per process of the run.
        on_bad_image: whether to "stop" at an unreadable image or to "skip" it.
        print_freq: batches between two lines of the log.
        out: the folder of the report.
    """

    data: Path
    models: Sequence[str] = ("*",)
    protocols: Sequence[str] | None = None
    limit: int | None = None
    batch_size: int | None = None
    workers: int = 4
    on_bad_image: OnBadImage = "stop"
    print_freq: int | None = 10
    out: Path = OUT

    def command(self, model: str) -> str:
        """Return the command that scores one of the models."""
        words = ["zoo", "reproduce", "imagenet", "--data", str(self.data), "--models", model]
        words += ["--protocols", *self.protocols] if self.protocols else []
        words += ["--out", str(self.out)] if self.out != OUT else []
        words += ["--limit", str(self.limit)] if self.limit else []
        return shlex.join(words)


@dataclass(frozen=True)
class PaperOptions:
    """What `zoo reproduce` is asked for with the name of a paper.

    Args:
        paper: a key of `zoo.reproduce.papers.PAPERS`.
        data: the folder of images, for a figure that can use real ones; None for random images.
        runs: log folders of training runs, and files that hold the runs of such folders.
        plots: whether to draw plots, which needs matplotlib.
        out: the folder of the report.
    """

    paper: str
    data: Path | None = None
    runs: Sequence[Path] = ()
    plots: bool = True
    out: Path = OUT

    @property
    def command(self) -> str:
        """The command with these options."""
        words = ["zoo", "reproduce", self.paper]
        words += ["--data", str(self.data)] if self.data is not None else []
        words += ["--runs", *map(str, self.runs)] if self.runs else []
        words += ["--out", str(self.out)] if self.out != OUT else []
        words += [] if self.plots else ["--no-picture"]
        return shlex.join(words)
