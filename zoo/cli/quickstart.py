"""``zoo quickstart``: the whole path on the bundled sample, from pictures to a table, in minutes on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo.cli.options import whole_number

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
        "--seed", metavar="N", type=whole_number,
        help="another seed than the experiment's, in a folder of its own: how much do the scores scatter?",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Unpack the sample, train or take the trained run, score with centre crop and ten crops; returns 0."""
    from zoo.cli.scoring import load_subject, score
    from zoo.cli.train import train_experiment
    from zoo.config import experiments_dir, load_experiment
    from zoo.data.sample import unpack_sample
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.process import open_process
    from zoo.report.results import results_table

    data = unpack_sample()
    config = load_experiment(experiments_dir() / f"{EXPERIMENT}.json")
    log_dir = args.log_dir or LOG_DIR
    if args.seed is not None:
        config = config.model_copy(update={"seed": args.seed})
        log_dir = args.log_dir or LOG_DIR.with_name(f"{LOG_DIR.name}-seed{args.seed}")
    with open_process() as process:
        train_experiment(config, process, _train_arguments(data, log_dir))
        subject = load_subject(str(log_dir / CHECKPOINT))
        protocols = [subject.own_protocol, subject.own_protocol._replace(ten_crops=True)]
        results = [score(subject, protocol, process, data, workers=0) for protocol in protocols]
        if process.is_main:
            _report(log_dir, data, results_table(EXPERIMENT, results, config.expected))
    return 0


def _report(log_dir: Path, data: Path, table: str) -> None:
    from zoo.engine.checkpoint import CHECKPOINT

    print(
        f"{table}\n\n"
        f"checkpoint    {log_dir / CHECKPOINT}\n"
        f"log           {log_dir}/training_0.log, {log_dir}/metrics.jsonl\n"
        f"TensorBoard   tensorboard --logdir {log_dir}\n"
        f"sample        {data}"
    )


def _train_arguments(data: Path, log_dir: Path) -> argparse.Namespace:
    """Return what ``zoo train DATA --resume auto --log-dir LOG_DIR`` would have parsed."""
    from zoo.cli import build_parser

    command = ["train", EXPERIMENT, str(data), "--resume", "auto", "--log-dir", str(log_dir), "--workers", "1"]
    return build_parser().parse_args(command)
