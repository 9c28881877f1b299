"""The options of ``zoo benchmark``, kind by kind."""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo.cli.options import positive, whole_number

OUT = Path("runs/benchmark")
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last")
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)


def add_common(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add what all kinds have."""
    parser.add_argument(
        "--out", metavar="STEM", type=Path, default=OUT / kind,
        help="the files are STEM.json, STEM.md and for pareto STEM.png (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads on the CPU (default: one per core)")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def add_layer(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark layer``."""
    parser = kinds.add_parser("layer", help="one norm with its activation, forward and backward, by every back end")
    parser.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="NxCxHxW",
        help="inputs (default: those of a ResNet, and small ones)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"],
        help="of input and output (default: float32 bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of the input (default: both)"
    )
    parser.add_argument(
        "--blocks", action="store_true",
        help="measure the paper's five strategies for norm, activation and convolution too, in float32",
    )  # fmt: skip
    _add_rounds(parser, 20, least=1)
    return parser


def add_model(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark model``."""
    parser = kinds.add_parser("model", help="step time and bytes of networks with each norm, eager and compiled")
    _add_setup(parser, batch=4, size=224, nargs="+")
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"],
        help="how to run them; compiling a deep network takes minutes (default: both)",
    )  # fmt: skip
    _add_rounds(parser, 5)
    return parser


def add_pareto(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark pareto``."""
    parser = kinds.add_parser("pareto", help="time against bytes of all strategies to save memory, with a plot")
    _add_setup(parser, batch=16, size=128)
    _add_strategies(parser)
    parser.add_argument(
        "--budgets", type=_share, nargs="*", default=list(BUDGETS), metavar="X",
        help=f"activation memory budgets of torch.compile, 0 to 1 (default: {' '.join(map(str, BUDGETS))})",
    )  # fmt: skip
    parser.add_argument("--no-picture", action="store_true", help="write no STEM.png, which needs matplotlib")
    _add_rounds(parser, 7)
    return parser


def add_fit(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark fit``."""
    parser = kinds.add_parser(
        "fit",
        help="the largest batch that fits in an amount of memory, foretold without a step",
        description="Counted are the tensors of training with SGD and momentum in float32: parameters, gradients, "
        "momentum, what a step keeps and makes, and what convolutions use inside, for which each is run with 4 and 8 "
        "images; not the process itself. Exit code 2: nothing fits; 3: a prediction that was checked is off by more "
        "than 5 %.",
    )
    _add_setup(parser, batch=None, size=224)
    _add_strategies(parser)
    parser.add_argument("--memory", metavar="SIZE", help="what tensors may take, such as 16GiB")
    parser.add_argument(
        "--check", type=_two_or_more, nargs="+", metavar="N",
        help="compare the prediction for batches of N with a real step, instead of or besides --memory",
    )  # fmt: skip
    return parser


def _add_setup(parser: argparse.ArgumentParser, *, batch: int | None, size: int, nargs: str | None = None) -> None:
    parser.add_argument("network", metavar="NETWORK", nargs=nargs, help="architecture, such as resnet50")
    if batch is not None:
        parser.add_argument(
            "--batch", type=_two_or_more, default=batch, metavar="N", help="images per step (default: %(default)s)"
        )
        parser.add_argument(
            "--dtype", choices=DTYPES[:2], default="float32",
            help="bfloat16 is autocast (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--size", type=positive, default=size, metavar="PX", help="side of an image (default: %(default)s)"
    )
    parser.add_argument(
        "--structure", type=_structure, metavar="NxNxNxN", help="blocks per stage (default: the architecture's)"
    )
    parser.add_argument("--input-3x3", action="store_true", help="the stem of three 3x3 convolutions")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of images and weights")


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", default=["*"], metavar="NAME",
        help="names or shell-style patterns, std-BN being there always (default: all that the network has)",
    )  # fmt: skip


def _add_rounds(parser: argparse.ArgumentParser, rounds: int, least: int = 0) -> None:
    parser.add_argument(
        "--rounds", type=positive if least else whole_number, default=rounds, metavar="N",
        help="times that each step is timed, in turn" + ("" if least else "; 0 measures memory only")
        + " (default: %(default)s)",
    )  # fmt: skip


def _shape(text: str) -> tuple[int, ...]:
    shape = _numbers(text)
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not the shape of a batch of maps such as 32x64x56x56")
    return shape


def _structure(text: str) -> tuple[int, ...]:
    return _numbers(text)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.replace(",", "x").split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a row of positive numbers such as 2x3x4x2")
    return tuple(map(int, words))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _two_or_more(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("a batch of 1 cannot be normed: give at least 2")
    return int(text)
