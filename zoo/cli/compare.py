"""``zoo compare``: score files of predictions again, and test whether two of them differ by more than chance."""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo.cli.options import check_writable
from zoo.errors import ConfigError, printable


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="test whether the predictions of two networks differ by more than chance",
        description="Both files are of the same images, as zoo validate --predictions writes them. The test is "
        "McNemar's in its exact form: it looks at the images that only one of the two has right.",
    )
    parser.add_argument("first", metavar="A.csv", type=Path, help="predictions of a network")
    parser.add_argument(
        "second", metavar="B.csv", type=Path, nargs="?", help="those of another network; without it A alone is scored"
    )
    parser.add_argument(
        "--real", metavar="FILE", type=Path,
        help="score by the labels of ImageNet-ReaL, which are in real.json of google-research/reassessed-imagenet, in "
        "place of the classes of the folders",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the scores and the test to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the scores and what follows from them, and write the file that was asked for; returns 0."""
    import torch

    from zoo.files import write_json
    from zoo.run.environment import describe_environment
    from zoo.run.paired_predictions import score_files

    check_writable(args.json)
    inputs = [file for file in (args.first, args.second) if file is not None]
    for file in (*inputs, args.real):
        if args.json is not None and file is not None and args.json.resolve() == file.resolve():
            raise ConfigError(f"--json would overwrite what is read; {printable(file)}: name another file")
    scored = score_files(inputs, args.real)
    print(scored.table("folders" if args.real is None else "ImageNet-ReaL"))
    if args.json is not None:
        environment = describe_environment(torch.device("cpu"))
        write_json(args.json, {"command": args.command_line, "environment": environment, **scored.to_json()})
    return 0
