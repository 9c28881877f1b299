"""A dataclass gives a parser its arguments, their help texts, and back the parsed command."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from zoo.cli.options import Command, Positive, add_options, argument, option, parsed


def percent(text: str) -> float:
    if not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} has no %")
    return float(text[:-1]) / 100


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of several commands."""

    limit: Positive | None = None
    """Images to read, 100 % if
    omitted."""
    workers: int = 4
    """Processes."""


@dataclass(frozen=True, kw_only=True)
class Resize(Command, Shared):
    """Resize images."""

    images: tuple[Path, ...] = argument("IMAGE")
    """Image files."""
    out: Path | None = argument("OUT", default=None)
    """Output folder."""
    workers: Positive = option("-j", default=2)
    share: Annotated[float, percent] = option("--part", default=0.5, metavar="P")
    """Share (default: half)."""
    sizes: tuple[Positive, ...] = (32, 64)
    """Sizes."""
    mode: Literal["crop", "pad"] = "crop"
    """Mode."""
    dry_run: bool = False
    """Write nothing."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="resize")
    add_options(parser, Resize)
    return parser


def parse(line: str) -> Resize:
    return parsed(Resize, make_parser().parse_args(shlex.split(line)), line)


def test_defaults_are_those_of_the_fields() -> None:
    assert parse("a.png") == Resize(images=(Path("a.png"),), command_line="a.png")


def test_each_type_is_parsed() -> None:
    line = "a b --sizes 8 16 -j 3 --part 25% --mode pad --dry-run --limit 7"
    expected = Resize(
        images=(Path("a"), Path("b")), sizes=(8, 16), workers=3, share=0.25, mode="pad", dry_run=True, limit=7,
        command_line=line,
    )  # fmt: skip
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: IMAGE"),
        ("a -j 0", "argument -j/--workers: '0' is not a whole number of at least 1"),
        ("a --sizes 8 x", "argument --sizes: 'x' is not a whole number"),
        ("a --part 25", "argument --part: '25' has no %"),
        ("a --mode zoom", "argument --mode: invalid choice: 'zoom'"),
        ("a --share 1%", "unrecognized arguments: --share"),
        ("a --command-line x", "unrecognized arguments: --command-line"),
    ],
)
def test_wrong_words_are_usage_errors(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(line)
    assert message in capsys.readouterr().err


def test_help_texts_are_the_docstrings_with_defaults_and_are_inherited() -> None:
    help_of = {action.dest: (action.help or "") % vars(action) for action in make_parser()._actions}
    assert help_of["images"] == "Image files"
    assert help_of["limit"] == "Images to read, 100 % if omitted"
    assert help_of["workers"] == "Processes (default: 2)"
    assert help_of["share"] == "Share (default: half)"
    assert help_of["sizes"] == "Sizes (default: 32 64)"
    assert help_of["mode"] == "Mode (default: crop)"
    assert help_of["dry_run"] == "Write nothing"
    assert "-j N, --workers N" in make_parser().format_help()


def test_options_of_the_command_come_before_those_that_it_inherits() -> None:
    names = [action.dest for action in make_parser()._actions]
    assert names == ["help", "images", "out", "workers", "share", "sizes", "mode", "dry_run", "limit", "debug"]
