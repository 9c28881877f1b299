"""``zoo quickstart``: the whole path on the bundled sample, from images to a table, in minutes on a CPU."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zoo.cli.options import whole_number
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.engine.process import Process
    from zoo.engine.task import Result

EXPERIMENT = "quickstart_fashion_mnist"
LOG_DIR = Path("runs/quickstart")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``quickstart``."""
    parser = commands.add_parser("quickstart", help="train and score a small network on the bundled sample")
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path,
        help=f"where the run is written, and continued if it is there already (default: {LOG_DIR})",
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
    """Unpack the sample, train or take the trained run, score with centre crop and ten crops; returns 0."""
    from zoo.config import experiments_dir, load_experiment
    from zoo.data.sample import unpack_sample
    from zoo.engine.process import open_process
    from zoo.report.tables import results_table

    if args.log_dir is not None and args.seed is not None and len(args.seed) > 1:
        raise ConfigError("--log-dir is the folder of one run; leave it out for several seeds, or give one --seed")
    data = unpack_sample()
    config = load_experiment(experiments_dir() / f"{EXPERIMENT}.json")
    configs = {args.log_dir or LOG_DIR: config}
    if args.seed is not None:
        configs = {
            args.log_dir or LOG_DIR.with_name(f"{LOG_DIR.name}-seed{seed}"): config.model_copy(update={"seed": seed})
            for seed in args.seed
        }
    with open_process() as process:
        runs = [_train_and_score(config, log_dir, data, process) for log_dir, config in configs.items()]
        if process.is_main:
            if args.json is not None:
                _write_json(args, runs, process)
            results = [result for run in runs for result in run.results]
            _report(list(configs), data, results_table(EXPERIMENT, results, config.expected))
    return 0


class Run(NamedTuple):
    """One trained network: its seed, its scores, and the seconds that both took (None if it was trained before)."""

    seed: int
    results: list[Result]
    seconds: float | None


def _train_and_score(config: Experiment, log_dir: Path, data: Path, process: Process) -> Run:
    """Train in ``log_dir``, or continue the run there; then score its checkpoint on ``data``/val by both protocols."""
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.start import AUTO
    from zoo.scoring import load_network, score
    from zoo.tasks.protocols import center_crop
    from zoo.training import TrainOptions, train_experiment

    is_new, start_s = not (log_dir / CHECKPOINT).exists(), time.monotonic()
    train_experiment(config, data, log_dir, process, TrainOptions(workers=1, resume=AUTO))
    subject = load_network(log_dir / CHECKPOINT)
    center = center_crop(config)
    protocols = [center, center._replace(ten_crops=True)]
    results = [score(subject, data, protocol, process=process) for protocol in protocols]
    return Run(config.seed, results, round(time.monotonic() - start_s, 1) if is_new else None)


def _write_json(args: argparse.Namespace, runs: Sequence[Run], process: Process) -> None:
    from zoo.files import write_json
    from zoo.report.environment import describe_environment, warn_of_changes

    warn_of_changes()
    words = ["zoo", "quickstart", *(["--log-dir", str(args.log_dir)] if args.log_dir else [])]
    words += ["--seed", *map(str, args.seed)] if args.seed else []
    content = {
        "benchmark": "quickstart",
        "command": shlex.join([*words, "--json", str(args.json)]),
        "environment": describe_environment(process.device),
        "runs": [run._asdict() | {"results": [result.record() for result in run.results]} for run in runs],
    }
    write_json(args.json, content)


def _report(folders: Sequence[Path], data: Path, table: str) -> None:
    from zoo.engine.checkpoint import CHECKPOINT

    lines = [table, ""]
    for folder in folders:
        lines += [
            f"checkpoint    {folder / CHECKPOINT}",
            f"log           {folder}/training_0.log, {folder}/metrics.jsonl",
            f"TensorBoard   tensorboard --logdir {folder}",
        ]
    print("\n".join([*lines, f"sample        {data}"]))
