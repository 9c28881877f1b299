"""``zoo benchmark``: time and memory of norms, networks and memory-saving strategies; the largest batch that fits."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from zoo.cli import benchmark_options as options
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.benchmark.networks import Setup
    from zoo.benchmark.schema import Results


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``benchmark`` and its four kinds."""
    parser = commands.add_parser("benchmark", help="time and memory of norms, networks and strategies")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to measure: see KIND --help")
    options.add_layer(kinds).set_defaults(measure=_measure_layer)
    options.add_model(kinds).set_defaults(measure=_measure_model)
    options.add_pareto(kinds).set_defaults(measure=_measure_pareto)
    options.add_fit(kinds).set_defaults(measure=_measure_fit)
    for kind, subparser in kinds.choices.items():
        options.add_common(subparser, kind)
        subparser.set_defaults(parser=subparser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and print the table; returns 0."""
    _set_up_threads(args.threads)
    import torch

    from zoo.benchmark.schema import Results
    from zoo.benchmark.timing import Clock, describe_timing, involuntary_switches, keep_heap
    from zoo.report.environment import warn_of_changes

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device; leave --device out, or say --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    warn_of_changes()
    settings = describe_timing(Clock(device), keep_heap(), getattr(args, "rounds", 0))
    results = Results(args.kind, _command(args), device, settings)
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

    measure_layers(results, args.shapes or SHAPES, args.dtypes, args.layouts, args.rounds, args.blocks)


def _measure_model(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.model import measure_networks

    setups = [_setup(args, results, network) for network in args.network]
    measure_networks(results, setups, args.modes, args.rounds)


def _measure_pareto(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.pareto import measure_front
    from zoo.benchmark.plot import check_matplotlib, draw
    from zoo.benchmark.strategies import all_strategies, choose_strategies
    from zoo.files import write_bytes

    with_plot = not args.no_picture and args.rounds > 0
    if with_plot:
        check_matplotlib()
    strategies = choose_strategies(all_strategies(args.budgets), args.strategies, args.dtype)
    measure_front(results, _setup(args, results, args.network), strategies, args.rounds)
    if with_plot:
        write_bytes(args.out.with_name(args.out.name + ".png"), draw(results.content()))


def _measure_fit(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.fit import check_predictions, parse_bytes, report_fits
    from zoo.benchmark.strategies import EAGER, choose_strategies

    if args.memory is None and args.check is None:
        raise ConfigError("nothing to do: give --memory SIZE, --check N, or both")
    setup = _setup(args, results, args.network)
    strategies = choose_strategies(EAGER, args.strategies)
    memory_bytes = None if args.memory is None else parse_bytes(args.memory)
    fits = memory_bytes is None or report_fits(results, setup, strategies, memory_bytes)
    if args.check is not None:
        check_predictions(results, setup, strategies, args.check)
    if not fits:
        raise ConfigError(
            f"nothing fits in {memory_bytes:,} bytes, see the notes of the table; --memory: give more, or a smaller "
            "--size or network"
        )


def _setup(args: argparse.Namespace, results: Results, network: str) -> Setup:
    from zoo.benchmark.networks import Setup

    return Setup(
        network,
        getattr(args, "batch", 2),
        args.size,
        args.structure,
        args.input_3x3,
        getattr(args, "dtype", "float32"),
        args.layout,
        results.device,
    )


def _set_up_threads(threads: int | None) -> None:
    """Pin the threads of OpenMP to cores, which it reads when torch is imported; nothing where that has happened."""
    if "torch" in sys.modules:
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes reports to stderr otherwise
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))


def _command(args: argparse.Namespace) -> str:
    """Return the command line that has these arguments; defaults are left out."""
    words = ["zoo", "benchmark", args.kind]
    for action in args.parser._actions:
        value = getattr(args, action.dest, action.default)
        if action.dest in ("help", "debug") or value == action.default:
            continue
        words += action.option_strings[-1:]
        if action.nargs != 0:
            words += [_text(word) for word in (value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _text(value: Any) -> str:
    """Return an argument as it is written: a shape as 2x3x4x5."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
