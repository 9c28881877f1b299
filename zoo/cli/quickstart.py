"""``zoo quickstart``: train and score a small network on bundled images, in minutes on a CPU.

The task is to classify garments, or to segment scenes of garments. The segmentation network starts from a body trained
to classify, as the paper's starts from ImageNet weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from zoo.cli.options import Command, WholeNumber, option
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.engine.process import Process
    from zoo.engine.task import Result
    from zoo.run.cost import CostMeter
    from zoo.run.scoring import LoadedNetwork

logger = logging.getLogger(__name__)

EXPERIMENTS = {"classification": "quickstart_fashion_mnist", "segmentation": "quickstart_scenes"}
LOG_DIRS = {"classification": Path("runs/quickstart"), "segmentation": Path("runs/quickstart-segmentation")}
BODY_EXPERIMENT, BODY_DIR = "quickstart_scenes_body", "body"  # BODY_DIR is in the log folder


@dataclass(frozen=True, kw_only=True)
class Quickstart(Command):
    """Train and score a small network on bundled images."""

    task: Literal["classification", "segmentation"] = "classification"
    """Classify images of garments, or segment scenes of them."""
    log_dir: Path | None = option(metavar="DIR")
    """Log folder; a run in it is resumed (default: runs/quickstart, or runs/quickstart-segmentation)."""
    seeds: tuple[WholeNumber, ...] | None = None
    """Train with each of these seeds instead of the experiment's, each in its own folder, and print mean and spread of
    the scores."""
    json: Path | None = None
    """Write scores and duration of each seed, the machine and the versions to FILE."""

    def run(self) -> int:
        from zoo.config import experiments_dir, load_experiment
        from zoo.data.prepare.sample import unpack_sample
        from zoo.data.prepare.scenes import unpack_scenes
        from zoo.engine.process import open_process
        from zoo.run.cost import CostMeter
        from zoo.run.results_table import results_table
        from zoo.run.seeds import seeds_table
        from zoo.run.training import seed_configs
        from zoo.tasks import task_of

        experiment, default_dir = EXPERIMENTS[self.task], LOG_DIRS[self.task]
        if self.log_dir is not None and self.seeds is not None and len(self.seeds) > 1:
            raise ConfigError("--log-dir is the folder of one run", remedy="remove it, or give --seeds a single seed")
        data = unpack_scenes() if self.task == "segmentation" else unpack_sample()
        config = load_experiment(experiments_dir() / f"{experiment}.json")
        configs = {self.log_dir or default_dir: config}
        if self.seeds is not None:
            configs = seed_configs(config, default_dir, self.seeds)
            if self.log_dir is not None:
                configs = {self.log_dir: next(iter(configs.values()))}
        with open_process() as process:
            cost = CostMeter(process.device, process.world_size)
            runs = [_train_and_score(config, log_dir, data, process) for log_dir, config in configs.items()]
            if process.is_main:
                by_protocol: dict[str, dict[int, Mapping[str, float]]] = {}
                for run in runs:
                    for result in run.results:
                        by_protocol.setdefault(result.protocol, {})[run.seed] = result.scores()
                if self.json is not None:
                    _write_json(self.json, self.command_line, runs, by_protocol, process, cost)
                results = [result for run in runs for result in run.results]
                labels = task_of(config).shown_labels
                tables = [results_table(experiment, labels, results, config.expected), *(run.details for run in runs)]
                if len(runs) > 1:
                    tables += [f"{name}:\n\n{seeds_table(labels, seeds)}" for name, seeds in by_protocol.items()]
                _report(list(configs), data, "\n\n".join(filter(None, tables)))
        return 0


class Run(NamedTuple):
    """A trained network.

    Args:
    - `seed`: seed of the run.
    - `results`: the scores, one per protocol.
    - `seconds`: duration of training and scoring; None if the run already existed.
    - `details`: table of the classes for segmentation, otherwise empty.
    """

    seed: int
    results: Sequence[Result]
    seconds: float | None
    details: str


def _train_and_score(config: Experiment, log_dir: Path, data: Path, process: Process) -> Run:
    """Train in ``log_dir``, or resume the run there, and score its checkpoint on ``data``/val."""
    from zoo.data.prepare.scenes import GARMENTS_DIR
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.start import AUTO
    from zoo.run.scoring import load_network
    from zoo.run.training import TrainOptions, train_experiment

    is_new, start_s = not (log_dir / CHECKPOINT).exists(), time.monotonic()
    weights = None
    if config.task == "segmentation" and is_new:
        weights = _train_body(config, data / GARMENTS_DIR, log_dir / BODY_DIR, process)
    train_experiment(config, data, log_dir, process, TrainOptions(workers=1, resume=AUTO, weights=weights))
    score_all = _score_scenes if config.task == "segmentation" else _score_garments
    results, details = score_all(load_network(log_dir / CHECKPOINT), log_dir, data, process)
    return Run(config.seed, results, round(time.monotonic() - start_s, 1) if is_new else None, details)


def _train_body(config: Experiment, data: Path, log_dir: Path, process: Process) -> str:
    """Train the body of a segmentation network to classify garments, and return its checkpoint."""
    from zoo.config import experiments_dir, load_experiment
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.start import AUTO
    from zoo.run.training import TrainOptions, train_experiment

    body = load_experiment(experiments_dir() / f"{BODY_EXPERIMENT}.json").model_copy(update={"seed": config.seed})
    logger.info(
        "two stages:\n1. %s learns to classify single garments (%d epochs)\n"
        "2. %s starts from these weights and learns to segment scenes of garments (%d epochs)",
        body.network.arch,
        body.optimizer.schedule.epochs,
        config.network.arch,
        config.optimizer.schedule.epochs,
    )
    train_experiment(body, data, log_dir, process, TrainOptions(workers=1, resume=AUTO))
    return str(log_dir / CHECKPOINT)


def _score_garments(
    subject: LoadedNetwork, log_dir: Path, data: Path, process: Process
) -> tuple[Sequence[Result], str]:
    """Return the scores of the center crop and of ten crops."""
    from zoo.run.scoring import score
    from zoo.tasks.protocols import center_crop

    center = center_crop(subject.experiment)
    return [score(subject, data, way, process=process) for way in (center, center._replace(ten_crops=True))], ""


def _score_scenes(subject: LoadedNetwork, log_dir: Path, data: Path, process: Process) -> tuple[Sequence[Result], str]:
    """Return the scores of whole images and a table of the classes."""
    from zoo.run.results_table import class_table
    from zoo.run.scoring import score
    from zoo.tasks.segmentation import SegmentationResult

    names = subject.class_names
    assert names is not None, "training stores class names in the checkpoint"
    result = score(subject, data, process=process)
    assert isinstance(result, SegmentationResult)
    return [result], f"{log_dir}:\n\n{class_table(result, names)}"


def _write_json(
    file: Path,
    command_line: str,
    runs: Sequence[Run],
    by_protocol: Mapping[str, Mapping[int, Mapping[str, float]]],
    process: Process,
    cost: CostMeter,
) -> None:
    from zoo.files import write_json
    from zoo.run.environment import describe_environment, warn_of_changes
    from zoo.run.seeds import spreads_of

    warn_of_changes()
    content = {
        "benchmark": "quickstart",
        "command": command_line,
        "environment": describe_environment(process.device),
        "cost": cost.read(),
        "runs": [run._asdict() | {"results": [result.record() for result in run.results]} for run in runs],
        "summary": {
            protocol: {name: spread._asdict() for name, spread in spreads_of(seeds).items()}
            for protocol, seeds in by_protocol.items()
        },
    }
    write_json(file, content)


def _report(folders: Sequence[Path], data: Path, tables: str) -> None:
    from zoo.engine.checkpoint import CHECKPOINT

    lines = [tables, ""]
    for folder in folders:
        lines += [
            f"checkpoint    {folder / CHECKPOINT}",
            f"log           {folder}/training_0.log, {folder}/metrics.jsonl",
            f"TensorBoard   tensorboard --logdir {folder}",
        ]
    print("\n".join([*lines, f"sample        {data}"]))
