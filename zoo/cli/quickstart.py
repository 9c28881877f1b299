"""``zoo quickstart``: the whole path on bundled images, from training to a table, in minutes on a CPU.

One network learns to classify garments. Or its body does, and then learns to find them in scenes, pixel by pixel, as
the paper starts from bodies that were trained on ImageNet.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zoo.cli.options import whole_number
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.engine.process import Process
    from zoo.engine.task import Result
    from zoo.run.cost import CostMeter
    from zoo.run.scoring import LoadedNetwork
    from zoo.run.seeds import SeedRun

logger = logging.getLogger(__name__)

EXPERIMENTS = {"classification": "quickstart_fashion_mnist", "segmentation": "quickstart_scenes"}
LOG_DIRS = {"classification": Path("runs/quickstart"), "segmentation": Path("runs/quickstart-segmentation")}
BODY_EXPERIMENT, BODY = "quickstart_scenes_body", "body"  # its folder is within that of the segmentation
EXAMPLES, NUM_EXAMPLES = "examples", 6  # folder and number of the pictures of a segmentation


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``quickstart``."""
    parser = commands.add_parser("quickstart", help="train and score a small network on bundled images")
    parser.add_argument(
        "--task", choices=EXPERIMENTS, default="classification",
        help="what the network learns: the class of a garment, or that of each pixel of a scene (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path,
        help="where the run is written, and continued if it is there already (default: "
        f"{LOG_DIRS['classification']}, or {LOG_DIRS['segmentation']})",
    )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="N", type=whole_number, nargs="+",
        help="other seeds than the experiment's, each in a folder of its own: how much do the scores scatter?",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", type=Path,
        help="write the scores of each seed, the seconds that it took, the machine and the versions to FILE",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Unpack the images, train or take the trained run, score it and write what is told about it; returns 0."""
    from zoo.config import experiments_dir, load_experiment
    from zoo.data.sample import unpack_sample
    from zoo.data.scenes import unpack_scenes
    from zoo.engine.process import open_process
    from zoo.run.cost import CostMeter
    from zoo.run.results_table import results_table
    from zoo.run.seeds import seeds_table
    from zoo.run.training import seed_configs

    experiment, default_dir = EXPERIMENTS[args.task], LOG_DIRS[args.task]
    if args.log_dir is not None and args.seed is not None and len(args.seed) > 1:
        raise ConfigError("--log-dir is the folder of one run; leave it out for several seeds, or give one --seed")
    data = unpack_scenes() if args.task == "segmentation" else unpack_sample()
    config = load_experiment(experiments_dir() / f"{experiment}.json")
    configs = {args.log_dir or default_dir: config}
    if args.seed is not None:
        configs = seed_configs(config, default_dir, args.seed)
        if args.log_dir is not None:
            configs = {args.log_dir: next(iter(configs.values()))}
    with open_process() as process:
        cost = CostMeter(process.device, process.world_size)
        runs = [_train_and_score(config, log_dir, data, process) for log_dir, config in configs.items()]
        if process.is_main:
            by_protocol = _by_protocol(runs, list(configs))
            if args.json is not None:
                _write_json(args, runs, by_protocol, process, cost)
            results = [result for run in runs for result in run.results]
            tables = [results_table(experiment, results, config.expected), *(run.details for run in runs)]
            if len(runs) > 1:
                labels = results[0].labels
                tables += [f"{name}:\n\n{seeds_table(labels, seeds)}" for name, seeds in by_protocol.items()]
            _report(list(configs), data, "\n\n".join(filter(None, tables)), args.task)
    return 0


class Run(NamedTuple):
    """One trained network: its seed, its scores, the seconds that both took (None if it was trained before).

    ``details`` is a table of the classes of a segmentation, otherwise empty.
    """

    seed: int
    results: Sequence[Result]
    seconds: float | None
    details: str


def _by_protocol(runs: Sequence[Run], folders: Sequence[Path]) -> dict[str, list[SeedRun]]:
    """Return the scores of all seeds by the name of the protocol."""
    from zoo.run.seeds import SeedRun

    seeds: dict[str, list[SeedRun]] = {}
    for run, folder in zip(runs, folders, strict=True):
        for result in run.results:
            seeds.setdefault(result.protocol, []).append(SeedRun(run.seed, str(folder), result.scores()))
    return seeds


def _train_and_score(config: Experiment, log_dir: Path, data: Path, process: Process) -> Run:
    """Train in ``log_dir``, or continue the run there; then score its checkpoint on ``data``/val."""
    from zoo.data.scenes import ALONE
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.start import AUTO
    from zoo.run.scoring import load_network
    from zoo.run.training import TrainOptions, train_experiment

    is_new, start_s = not (log_dir / CHECKPOINT).exists(), time.monotonic()
    weights = None
    if config.task == "segmentation" and is_new:
        weights = _train_body(config, data / ALONE, log_dir / BODY, process)
    train_experiment(config, data, log_dir, process, TrainOptions(workers=1, resume=AUTO, weights=weights))
    score_all = _score_scenes if config.task == "segmentation" else _score_garments
    results, details = score_all(load_network(log_dir / CHECKPOINT), log_dir, data, process)
    return Run(config.seed, results, round(time.monotonic() - start_s, 1) if is_new else None, details)


def _train_body(config: Experiment, data: Path, log_dir: Path, process: Process) -> str:
    """Train the body of a segmentation to classify garments, ``data``, alone; return the file of its weights."""
    from zoo.config import experiments_dir, load_experiment
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.start import AUTO
    from zoo.run.training import TrainOptions, train_experiment

    body = load_experiment(experiments_dir() / f"{BODY_EXPERIMENT}.json").model_copy(update={"seed": config.seed})
    logger.info(
        "two stages:\n1. %s learns to classify single garments (%d epochs)\n"
        "2. %s learns to segment scenes of garments and begins with these weights (%d epochs)",
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
    """Return the scores of the centre crop and of ten crops."""
    from zoo.run.scoring import score
    from zoo.tasks.protocols import center_crop

    center = center_crop(subject.experiment)
    return [score(subject, data, way, process=process) for way in (center, center._replace(ten_crops=True))], ""


def _score_scenes(subject: LoadedNetwork, log_dir: Path, data: Path, process: Process) -> tuple[Sequence[Result], str]:
    """Return the scores of whole images and a table of the classes; write the first images with what was found."""
    from zoo.run.label_images import palette_of
    from zoo.run.scoring import score
    from zoo.run.segmentation_scores import class_table, write_examples
    from zoo.tasks.segmentation import SegmentationResult

    names = subject.class_names
    assert names is not None, "training writes the names into the checkpoint"
    record = None
    if process.is_main:
        record = write_examples(log_dir / EXAMPLES, subject.task, palette_of(subject.experiment, names), NUM_EXAMPLES)
    result = score(subject, data, process=process, record=record)
    assert isinstance(result, SegmentationResult)
    return [result], f"{log_dir}:\n\n{class_table(result, names)}"


def _write_json(
    args: argparse.Namespace,
    runs: Sequence[Run],
    by_protocol: Mapping[str, Sequence[SeedRun]],
    process: Process,
    cost: CostMeter,
) -> None:
    from zoo.files import write_json
    from zoo.run.environment import describe_environment, warn_of_changes
    from zoo.run.seeds import seeds_json

    warn_of_changes()
    content = {
        "benchmark": "quickstart",
        "command": args.command_line,
        "environment": describe_environment(process.device),
        "cost": cost.read(),
        "runs": [run._asdict() | {"results": [result.record() for result in run.results]} for run in runs],
        "summary": {protocol: seeds_json(seeds)["summary"] for protocol, seeds in by_protocol.items()},
    }
    write_json(args.json, content)


def _report(folders: Sequence[Path], data: Path, tables: str, task: str) -> None:
    from zoo.engine.checkpoint import CHECKPOINT

    lines = [tables, ""]
    for folder in folders:
        lines += [
            f"checkpoint    {folder / CHECKPOINT}",
            f"log           {folder}/training_0.log, {folder}/metrics.jsonl",
            f"TensorBoard   tensorboard --logdir {folder}",
        ]
        if task == "segmentation":
            lines.append(f"examples      {folder / EXAMPLES}")
    print("\n".join([*lines, f"sample        {data}"]))
