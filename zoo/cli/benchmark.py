"""``zoo benchmark``: time and memory of layers, networks and the input pipeline."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import positive, whole_number
from zoo.data.places import place_of
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.benchmark.network_setup import Setup
    from zoo.benchmark.results import Results


DEFAULT_OUT = Path("runs/benchmark")
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last")
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``benchmark`` and its subcommands."""
    parser = commands.add_parser("benchmark", help="measure time and memory of norms, networks and strategies")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to measure; see KIND --help")
    _add_layer(kinds).set_defaults(measure=_measure_layer)
    _add_model(kinds).set_defaults(measure=_measure_model)
    _add_pareto(kinds).set_defaults(measure=_measure_pareto)
    _add_max_batch(kinds).set_defaults(measure=_measure_max_batch)
    _add_lean(kinds).set_defaults(measure=_measure_lean)
    _add_input(kinds).set_defaults(measure=_measure_input)
    for kind, subparser in kinds.choices.items():
        _add_common(subparser, kind)
    parser.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the options of all subcommands."""
    parser.add_argument(
        "--out", metavar="STEM", type=Path, default=DEFAULT_OUT / kind,
        help="output files: STEM.json and STEM.md, for input also STEM.png, for pareto STEM.png and STEM_both.png "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: one per core)")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _add_layer(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark layer``."""
    parser = kinds.add_parser("layer", help="one norm with its activation, forward and backward, with every back end")
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", metavar="NxCxHxW",
        help="input shapes (default: those of a ResNet, and small ones)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"],
        help="dtypes of input and output (default: float32 bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help="memory layouts of the input (default: both)",
    )
    _add_rounds(parser, 20, least=1)
    return parser


def _add_model(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark model``."""
    parser = kinds.add_parser(
        "model", help="step time and its breakdown, and memory, of networks with each norm, eager and compiled"
    )
    _add_setup(parser, batch=4, size=224, nargs="+")
    _add_strategies(parser)
    _add_budgets(parser)
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"],
        help="execution modes; compiling a deep network takes minutes (default: both)",
    )  # fmt: skip
    _add_rounds(parser, 5)
    return parser


def _add_pareto(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark pareto``."""
    parser = kinds.add_parser("pareto", help="time against memory of all memory strategies, with a plot")
    _add_setup(parser, batch=16, size=128)
    _add_strategies(parser, ["*"])
    _add_budgets(parser)
    parser.add_argument("--no-picture", action="store_true", help="do not draw the plots, which need matplotlib")
    _add_rounds(parser, 7)
    return parser


def _add_max_batch(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark max-batch``."""
    parser = kinds.add_parser(
        "max-batch",
        help="predict the largest batch that fits in memory, without running a step",
        description="Counts the memory of training with SGD and momentum in float32: parameters, gradients, momentum, "
        "the tensors of a step, and the scratch memory of convolutions, measured by running each convolution with 4 "
        "and with 8 images. The memory of the process itself is not counted. Exit code 2: nothing fits; 3: a checked "
        "prediction is off by more than 5 %.",
    )
    _add_setup(parser, batch=None, size=224)
    _add_strategies(parser, ["*"])
    parser.add_argument("--memory", metavar="SIZE", help="memory available to tensors, such as 16GiB")
    parser.add_argument(
        "--check", type=_two_or_more, nargs="+", metavar="N",
        help="compare the predictions for batches of N with real steps; --memory may then be omitted",
    )  # fmt: skip
    return parser


def _add_lean(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark lean``."""
    parser = kinds.add_parser(
        "lean",
        help="bit-exactness, memory and time of zoo.lean on networks of zoo, timm and torchvision",
        description="Runs a training step of each network, plain and lean. Networks of timm need that package.",
    )
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=["torchvision:resnet50"],
        help="architectures of zoo, and names or shell-style patterns of other packages, such as timm:resnet50 and "
        "'torchvision:*' (default: torchvision:resnet50)",
    )  # fmt: skip
    parser.add_argument(
        "--one-per-family", action="store_true",
        help="among names with the same first word, such as resnet, measure the network with the fewest parameters",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=_two_or_more, default=4, metavar="N", help="images per step (default: %(default)s)"
    )
    parser.add_argument(
        "--size", type=positive, default=224, metavar="PX",
        help="image size, for networks that accept any size (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", metavar="SIZE",
        help="skip networks whose plain training is predicted to need more, such as 4GiB",
    )  # fmt: skip
    parser.add_argument("--budget", metavar="X", help="budget of zoo.lean: bytes, a fraction below 1, or '40 FLOP/B'")
    parser.add_argument(
        "--inexact", action="store_true", help="fuse norms and activations; results then agree only up to rounding"
    )
    _add_rounds(parser, 7)
    return parser


def _add_input(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark input``."""
    parser = kinds.add_parser(
        "input",
        help="images per second and core of the input pipeline, relative to torchvision's bare decoder",
        description="Reads, decodes and augments JPEG files of DATA/train as the experiment does, and files of "
        "DATA/val as the published networks were scored, with each decoder, on one core.",
    )
    parser.add_argument("config", metavar="CONFIG", help="experiment file or name whose input section is measured")
    parser.add_argument("data", metavar="DATA", type=place_of, help="data set, as for zoo train")
    parser.add_argument(
        "--images", type=positive, default=64, metavar="N",
        help="number of files per split, evenly spaced (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the JSON to FILE")
    parser.add_argument("--no-picture", action="store_true", help="do not draw the plot, which needs matplotlib")
    _add_rounds(parser, 9, least=1)
    return parser


def _add_setup(parser: argparse.ArgumentParser, *, batch: int | None, size: int, nargs: str | None = None) -> None:
    parser.add_argument(
        "network", metavar="NETWORK", nargs=nargs,
        help="architecture, such as resnet50, or a network of another package, such as timm:resnet50",
    )  # fmt: skip
    if batch is not None:
        parser.add_argument(
            "--batch", type=_two_or_more, default=batch, metavar="N", help="images per step (default: %(default)s)"
        )
        parser.add_argument(
            "--dtype", choices=DTYPES[:2], default="float32",
            help="bfloat16 is autocast (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--size", type=positive, default=size, metavar="PX", help="image size (default: %(default)s)")
    parser.add_argument(
        "--structure", type=_numbers, metavar="NxNxNxN", help="blocks per stage (default: the architecture's)"
    )
    parser.add_argument("--input-3x3", action="store_true", help="use the stem of three 3x3 convolutions")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="memory layout of images and weights")


def _add_strategies(parser: argparse.ArgumentParser, default: list[str] | None = None) -> None:
    shown = "all strategies of the network" if default else "each norm, in the modes of --modes"
    parser.add_argument(
        "--strategies", nargs="+", default=default, metavar="NAME",
        help=f"names or shell-style patterns; std-BN is always measured (default: {shown})",
    )  # fmt: skip


def _add_budgets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budgets", type=_share, nargs="*", default=list(BUDGETS), metavar="X",
        help=f"activation memory budgets of torch.compile, from 0 to 1 (default: {' '.join(map(str, BUDGETS))})",
    )  # fmt: skip


def _add_rounds(parser: argparse.ArgumentParser, rounds: int, least: int = 0) -> None:
    parser.add_argument(
        "--rounds", type=positive if least else whole_number, default=rounds, metavar="N",
        help="interleaved timings of each step" + ("" if least else "; 0 measures memory only")
        + " (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, write its files and print the table; returns 0."""
    if args.kind == "input":
        args.threads = 1  # rates are per core
    _set_up_threads(args.threads)
    import torch

    from zoo.benchmark.results import Results
    from zoo.benchmark.timing import Clock, describe_timing, involuntary_switches, keep_heap
    from zoo.run.environment import warn_of_changes

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available; command line: omit --device, or give --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    warn_of_changes()
    settings = describe_timing(Clock(device), keep_heap(), getattr(args, "rounds", 0))
    results = Results(args.kind, args.command_line, device, settings)
    before = involuntary_switches()
    try:
        args.measure(args, results)
    finally:
        settings["involuntary context switches"] = involuntary_switches() - before
        if results.records:
            print(results.write(args.out))
            print(f"written to {args.out}.json and {args.out}.md")
    return 0


def _measure_layer(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.layer import SHAPES, measure_layers

    measure_layers(results, args.shapes or SHAPES, args.dtypes, args.layouts, args.rounds)


def _measure_model(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.model import measure_networks, measure_strategies
    from zoo.benchmark.strategies import all_strategies, choose_strategies

    setups = [_setup(args, results, network) for network in args.network]
    if args.strategies is None:
        measure_networks(results, setups, args.modes, args.rounds)
        return
    strategies = choose_strategies(all_strategies(args.budgets), args.strategies, args.dtype)
    for setup in setups:
        measure_strategies(results, setup, strategies, args.rounds)


def _measure_pareto(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.model import measure_strategies
    from zoo.benchmark.pareto_plot import write_plots
    from zoo.benchmark.strategies import all_strategies, choose_strategies
    from zoo.run.plot_style import check_matplotlib

    with_plot = not args.no_picture and args.rounds > 0
    if with_plot:
        check_matplotlib()
    strategies = choose_strategies(all_strategies(args.budgets), args.strategies, args.dtype)
    measure_strategies(results, _setup(args, results, args.network), strategies, args.rounds)
    if with_plot:
        write_plots(args.out, results.content())


def _measure_max_batch(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.max_batch import check_predictions, parse_bytes, report_fits
    from zoo.benchmark.strategies import EAGER, choose_strategies

    if args.memory is None and args.check is None:
        raise ConfigError("nothing to do; command line: give --memory SIZE, --check N, or both")
    setup = _setup(args, results, args.network)
    strategies = choose_strategies(EAGER, args.strategies)
    memory_bytes = None if args.memory is None else parse_bytes(args.memory)
    fits = memory_bytes is None or report_fits(results, setup, strategies, memory_bytes)
    if args.check is not None:
        check_predictions(results, setup, strategies, args.check)
    if not fits:
        raise ConfigError(
            f"no batch fits in {memory_bytes:,} bytes, see the notes of the table; --memory: increase it, or choose a "
            "smaller --size or network"
        )


def _measure_lean(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.lean_networks import measure_lean_network, measure_overhead, summarize_networks
    from zoo.benchmark.max_batch import parse_bytes
    from zoo.benchmark.network_setup import Setup
    from zoo.models.external import list_networks, smallest_of_each_family, split_name
    from zoo.remat.budget import Budget

    found = [each for name in args.models for each in ([name] if split_name(name) is None else list_networks(name))]
    if args.one_per_family:
        print(f"choosing the smallest of each family among {len(found)} networks", file=sys.stderr, flush=True)
        found = smallest_of_each_family(found)
    names = list(dict.fromkeys(found))
    budget = None if args.budget is None else _number_or_text(args.budget)
    Budget.parse(budget)  # raises for a bad value before anything is measured
    max_bytes = None if args.max_memory is None else parse_bytes(args.max_memory)
    for index, name in enumerate(names):
        print(f"{name} ({index + 1} of {len(names)})", file=sys.stderr, flush=True)
        setup = Setup(name, args.batch, args.size, device=results.device)
        measure_lean_network(
            results, setup, rounds=args.rounds, budget=budget, max_bytes=max_bytes, exact=not args.inexact
        )
        results.write(args.out)  # keep what was measured if the next network fails
    summarize_networks(results)
    if args.rounds > 0:
        measure_overhead(results)


def _measure_input(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.input_pipeline import draw_plot, measure_input_pipeline
    from zoo.config import load_experiment
    from zoo.files import write_json
    from zoo.run.plot_style import check_matplotlib

    if not args.no_picture:
        check_matplotlib()
    results.settings["clock"] = "CPU time of the process"
    measure_input_pipeline(results, load_experiment(args.config), args.data, num_images=args.images, rounds=args.rounds)
    if args.json is not None:
        write_json(args.json, results.content())
    if not args.no_picture:
        draw_plot(args.out.with_name(args.out.name + ".png"), results.summary)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _setup(args: argparse.Namespace, results: Results, network: str) -> Setup:
    from zoo.benchmark.network_setup import Setup

    batch, dtype = getattr(args, "batch", 2), getattr(args, "dtype", "float32")  # `max-batch` has neither
    return Setup(network, batch, args.size, args.structure, args.input_3x3, dtype, args.layout, results.device)


def _set_up_threads(threads: int | None) -> None:
    """Pin OpenMP threads to cores; does nothing if torch is imported, because OpenMP has then read its settings."""
    if "torch" in sys.modules:
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))


def _shape(text: str) -> tuple[int, ...]:
    shape = _numbers(text)
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not an NxCxHxW shape such as 32x64x56x56")
    return shape


def _numbers(text: str) -> tuple[int, ...]:
    words = text.replace(",", "x").split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 2x3x4x2")
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
        raise argparse.ArgumentTypeError("batch statistics need at least 2 images")
    return int(text)
