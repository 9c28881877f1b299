"""``zoo train``: train the network of an experiment on a folder of images."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from zoo.cli.options import (
    Command,
    DataFolder,
    Positive,
    ProcessOptions,
    WholeNumber,
    argument,
    default_workers,
    option,
)

if TYPE_CHECKING:
    from zoo.engine._state import TrainState

RUNS_DIR = Path("runs")


def parse_setting(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE into key and value. A value that is not JSON is text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as optimizer.learning_rate=0.1")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


@dataclass(frozen=True, kw_only=True)
class Train(Command, ProcessOptions):
    """Train an experiment on DATA/train and validate on DATA/val."""

    example = "zoo train resnet18 DATA --log-dir runs/mine"
    config: str = argument("CONFIG")
    """Bundled experiment, experiment file, or architecture (also timm:NAME and torchvision:NAME). An architecture is
    trained with default settings and the number of classes of DATA."""
    data: DataFolder = argument("DATA")
    """Folder with train/ and val/: one folder per class in each, or images/ and labels/ for segmentation (see
    segmentation.layout); or shards, also by URL (https://, s3://, gs://); or a data set by name, torchvision:CIFAR10 or
    hf:NAME."""
    workers: WholeNumber = option("-j", default=default_workers(2))
    """Worker processes that read images, per process of the run (default: number of cores, at most 2)."""
    log_every: Positive = option("-p", default=10)
    """Batches between two log lines."""
    resume: str | None = option(metavar="PATH")
    """Checkpoint to continue from; 'auto' uses the newest intact checkpoint of the log folder, if there is one."""
    weights: str | None = option(metavar="FILE")
    """Weights file, or name of published weights, to start from instead of random weights. A segmentation network takes
    a classifier's weights into its body."""
    pretrained: bool = False
    """Start from the published weights of CONFIG (zoo list --pretrained), or of torchvision:NAME or timm:NAME, which
    are downloaded. A classifier for other classes is new."""
    settings: tuple[Annotated[tuple[str, Any], parse_setting], ...] = option(
        "--set", action="append", nargs=None, metavar="KEY=VALUE"
    )
    """Replace one setting of the experiment, such as optimizer.learning_rate=0.1; can be repeated. VALUE is JSON or
    text; zoo settings lists the keys."""
    epochs: Positive | None = None
    """Train for N epochs instead of the experiment's optimizer.schedule.epochs. With --resume, a larger number extends
    the run, even a finished one."""
    batch_size: Positive | None = None
    """Images per step, over all processes, instead of the experiment's optimizer.batch_size."""
    replicas: Positive | None = None
    """Divide each batch among N replicas, like the GPUs of a paper, instead of the experiment's optimizer.replicas. Up
    to N processes then train bit-identical weights."""
    memory: str | None = option(metavar="STRATEGY")
    """Memory strategy instead of the experiment's network.memory; "lean" halves the activation memory of any
    network."""
    log_dir: Path | None = option(metavar="DIR")
    """Folder for checkpoints, settings, text log, metrics.jsonl and TensorBoard events (default: runs/ and the name of
    the experiment)."""
    seed: WholeNumber | None = None
    """Seed of all random numbers instead of the experiment's."""
    log_hist: bool = False
    """Write histograms of the classifier and the last norm to TensorBoard every 10 steps."""

    @classmethod
    def hint(cls, name: str, options: Iterable[str]) -> str:
        from zoo.config.setting_hints import hint_for

        return hint_for(name, options, "--", lambda key: f"--set {key}=VALUE")

    def run(self) -> int:
        state, log_dir = self.train()
        if state.process.is_main:
            print(self._next_steps(log_dir, state.best_epoch is not None))
        return 0

    def _next_steps(self, log_dir: Path, validates: bool) -> str:
        """Return commands that score, use and plot the run."""
        from zoo.config.parse import load_experiment
        from zoo.engine._checkpoint import BEST, CHECKPOINT
        from zoo.run.log_folder import SETTINGS_FILE

        weights = log_dir / (BEST if validates else CHECKPOINT)
        settings = log_dir / SETTINGS_FILE
        segments = settings.exists() and load_experiment(settings).task == "segmentation"
        commands = {
            "score": ["zoo", "validate", weights, self.data],
            "use": ["zoo", "segment", weights, "IMAGES", "OUT"] if segments else ["zoo", "predict", weights, "IMAGE"],
            "curves": ["zoo", "plot", log_dir],
            "TensorBoard": ["tensorboard", "--logdir", log_dir],
        }
        return "\n".join(f"{name:13} {shlex.join(map(str, words))}" for name, words in commands.items())

    def train(self) -> tuple[TrainState, Path]:
        """Train, and return the state at the end and the log folder."""
        from zoo.config.parse import parse_experiment
        from zoo.data.named import open_data
        from zoo.engine._process import open_process
        from zoo.registry.experiments import experiment_for, with_pretrained
        from zoo.run.training import train_experiment

        data, log_dir = open_data(self.data), self.log_dir or RUNS_DIR / Path(self.config).name.removesuffix(".json")
        network: Any = self.config
        weights = self.weights
        if self.pretrained:
            network, weights = with_pretrained(network, weights)
        config = experiment_for(
            network, data, self.epochs, self.batch_size, self.memory,
            replicas=self.replicas, replaced=dict(self.settings or ()), weights=weights,
        )  # fmt: skip
        if self.seed is not None:
            config = parse_experiment({**config.model_dump(mode="json"), "seed": self.seed}, f"seed {self.seed}")
        with open_process(self.dist_backend) as process:
            state = train_experiment(
                config, data, log_dir, process,
                workers=self.workers, log_every=self.log_every, resume=self.resume, weights=weights,
                log_hist=self.log_hist,
            )  # fmt: skip
        return state, log_dir
