"""``zoo benchmark``: time and memory of networks and their parts, of the input pipeline, scaling and checkpoints.

Nothing is measured by ``predict``, which tells what norms should take on a GPU that need not be there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import positive, whole_number
from zoo.data.places import place_of
from zoo.errors import ConfigError, printable

if TYPE_CHECKING:
    from zoo.benchmark.network_setup import Setup
    from zoo.benchmark.results import Results


OUT = Path("runs/benchmark")
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last")
GPUS = ("A100", "H100", "H200", "B200")
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``benchmark`` and its kinds."""
    parser = commands.add_parser("benchmark", help="time and memory of norms, networks and strategies")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to measure: see KIND --help")
    _add_layer(kinds).set_defaults(measure=_measure_layer)
    _add_model(kinds).set_defaults(measure=_measure_model)
    _add_pareto(kinds).set_defaults(measure=_measure_pareto)
    _add_fit(kinds).set_defaults(measure=_measure_fit)
    _add_lean(kinds).set_defaults(measure=_measure_lean)
    _add_data(kinds).set_defaults(measure=_measure_data)
    _add_scaling(kinds).set_defaults(measure=_measure_scaling)
    _add_checkpoint(kinds).set_defaults(measure=_measure_checkpoint)
    _add_predict(kinds).set_defaults(measure=_measure_predict)
    for kind, subparser in kinds.choices.items():
        _add_common(subparser, kind)
        subparser.set_defaults(parser=subparser)
    parser.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the options that all kinds have."""
    parser.add_argument(
        "--out", metavar="STEM", type=Path, default=OUT / kind,
        help="the files are STEM.json, STEM.md, for data STEM.png, for pareto STEM.png and STEM_both.png (default: "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads on the CPU (default: one per core)")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _add_layer(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark layer``."""
    parser = kinds.add_parser("layer", help="one norm with its activation, forward and backward, by every back end")
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", metavar="NxCxHxW",
        help="of the input (default: those of a ResNet, and small ones)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"],
        help="of input and output (default: float32 bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of the input (default: both)"
    )
    _add_rounds(parser, 20, least=1)
    return parser


def _add_model(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark model``."""
    parser = kinds.add_parser(
        "model", help="step time, what takes it, and bytes of networks with each norm, eager and compiled"
    )
    _add_setup(parser, batch=4, size=224, nargs="+")
    _add_strategies(parser)
    _add_budgets(parser)
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"],
        help="how to run them; compiling a deep network takes minutes (default: both)",
    )  # fmt: skip
    _add_rounds(parser, 5)
    return parser


def _add_pareto(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark pareto``."""
    parser = kinds.add_parser("pareto", help="time against bytes of all strategies to save memory, with a plot")
    _add_setup(parser, batch=16, size=128)
    _add_strategies(parser, ["*"])
    _add_budgets(parser)
    parser.add_argument("--no-picture", action="store_true", help="write no plots, which need matplotlib")
    _add_rounds(parser, 7)
    return parser


def _add_fit(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark fit``."""
    parser = kinds.add_parser(
        "fit",
        help="the largest batch that fits into an amount of memory, predicted without running a step",
        description="Counts the tensors of training with SGD and momentum in float32: parameters, gradients, momentum, "
        "all tensors of a step, and the scratch memory of convolutions, for which each convolution is run with 4 and "
        "with 8 images. The memory of the process itself is not counted. Exit code 2: nothing fits; 3: a prediction "
        "that was checked is off by more than 5 %.",
    )
    _add_setup(parser, batch=None, size=224)
    _add_strategies(parser, ["*"])
    parser.add_argument("--memory", metavar="SIZE", help="memory that the tensors may take, such as 16GiB")
    parser.add_argument(
        "--check", type=_two_or_more, nargs="+", metavar="N",
        help="compare the prediction for batches of N with a real step, instead of or besides --memory",
    )  # fmt: skip
    return parser


def _add_lean(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark lean``."""
    parser = kinds.add_parser(
        "lean",
        help="what zoo.lean does to networks of zoo, timm and torchvision: the same bits? bytes and time",
        description="Trains a step of each network plain and lean. Networks of timm need that package.",
    )
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=["torchvision:resnet50"],
        help="architectures of zoo, and names or shell-style patterns such as timm:resnet50 and 'torchvision:*' "
        "(default: torchvision:resnet50)",
    )  # fmt: skip
    parser.add_argument(
        "--one-per-family", action="store_true",
        help="of names that begin with the same word, such as resnet, take the one with the fewest parameters",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=_two_or_more, default=4, metavar="N", help="images per step (default: %(default)s)"
    )
    parser.add_argument(
        "--size", type=positive, default=224, metavar="PX",
        help="side of an image, where the network takes any (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", metavar="SIZE",
        help="leave out networks whose plain training is predicted to take more, such as 4GiB",
    )  # fmt: skip
    parser.add_argument("--budget", metavar="X", help="that of zoo.lean: bytes, a share below 1, or '40 FLOP/B'")
    parser.add_argument("--inexact", action="store_true", help="fuse norms and activations, equal to rounding only")
    _add_rounds(parser, 7)
    return parser


def _add_data(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark data``."""
    parser = kinds.add_parser(
        "data",
        help="images per second and core of reading, decoding and augmenting, beside torchvision's bare decoder",
        description="Prepares JPEG files of DATA/train as the experiment trains on them, and of DATA/val as the "
        "published networks were scored, by each decoder, on one core.",
    )
    parser.add_argument("config", metavar="CONFIG", help="experiment whose input section is measured: its file or name")
    parser.add_argument("data", metavar="DATA", type=place_of, help="data, as for zoo train")
    parser.add_argument(
        "--images", type=positive, default=64, metavar="N",
        help="files of each split, spread over all of them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the JSON to FILE, too")
    parser.add_argument("--no-picture", action="store_true", help="write no plot, which needs matplotlib")
    _add_rounds(parser, 9, least=1)
    return parser


def _add_scaling(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark scaling``."""
    parser = kinds.add_parser(
        "scaling",
        help="training on 1 to 1,024 accelerators, predicted by a model that is checked with processes of this machine",
        description="Predicts steps, efficiency, and what a day needs, of the speed of one accelerator, of what "
        "connects them and of the cores that decode. The model is that of zoo/benchmark/scaling.py. It is checked "
        "with 1, 2 and 3 processes here, on the CPU with one thread each.",
    )
    _add_setup(parser, batch=256, size=224)
    parser.add_argument("--norm", choices=("standard", "inplace", "sync"), default="sync", help="default: %(default)s")
    parser.add_argument(
        "--images-per-s", type=_above_0, required=True, metavar="X", help="that one accelerator trains alone"
    )
    parser.add_argument(
        "--bandwidth", type=_above_0, required=True, metavar="GB/S", help="of each accelerator, in each direction"
    )
    parser.add_argument("--latency", type=_above_0, required=True, metavar="US", help="of a message, in microseconds")
    parser.add_argument(
        "--decode", required=True, metavar="X",
        help="images that a core decodes and augments in a second, or the JSON file of zoo benchmark data, of which "
        "the training pipeline is taken",
    )  # fmt: skip
    parser.add_argument(
        "--cores", type=positive, metavar="N", help="that decode for one accelerator (default: as many as it needs)"
    )
    parser.add_argument(
        "--image-kb", type=_above_0, default=110.0, metavar="KB", help="mean size of a file (default: %(default)s)"
    )
    parser.add_argument(
        "--check-batch", type=_two_or_more, default=4, metavar="N", help="images of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--check-size", type=positive, default=96, metavar="PX", help="side of their images (default: %(default)s)"
    )
    _add_rounds(parser, 9)
    return parser


def _add_checkpoint(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark checkpoint``."""
    parser = kinds.add_parser(
        "checkpoint",
        help="how long training stands still for a checkpoint",
        description="Takes steps of training with SGD, momentum and a moving average of the weights, and writes "
        "checkpoints to the folder of --out, beside steps and waited for. They are removed again.",
    )
    _add_setup(parser, batch=4, size=128)
    _add_rounds(parser, 15, least=1)
    return parser


def _add_predict(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add and return the parser of ``zoo benchmark predict``."""
    parser = kinds.add_parser(
        "predict",
        help="bytes, launches and time of the norms of a network on a GPU, predicted from the compiled kernels",
        description="Compiles the Triton kernels of each norm for a GPU, which need not be there, and predicts their "
        "time by the model of zoo/benchmark/norm_prediction.py. Nothing is measured. The network is not run.",
    )
    _add_setup(parser, batch=256, size=224)
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="that it is predicted for (default: %(default)s)")
    return parser


def _add_setup(parser: argparse.ArgumentParser, *, batch: int | None, size: int, nargs: str | None = None) -> None:
    parser.add_argument(
        "network", metavar="NETWORK", nargs=nargs,
        help="architecture, such as resnet50, or network of another package, such as timm:resnet50",
    )  # fmt: skip
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
        "--structure", type=_numbers, metavar="NxNxNxN", help="blocks per stage (default: the architecture's)"
    )
    parser.add_argument("--input-3x3", action="store_true", help="the stem of three 3x3 convolutions")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of images and weights")


def _add_strategies(parser: argparse.ArgumentParser, default: list[str] | None = None) -> None:
    shown = "all that the network has" if default else "each norm, in the modes of --modes"
    parser.add_argument(
        "--strategies", nargs="+", default=default, metavar="NAME",
        help=f"names or shell-style patterns; std-BN is always measured (default: {shown})",
    )  # fmt: skip


def _add_budgets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budgets", type=_share, nargs="*", default=list(BUDGETS), metavar="X",
        help=f"activation memory budgets of torch.compile, 0 to 1 (default: {' '.join(map(str, BUDGETS))})",
    )  # fmt: skip


def _add_rounds(parser: argparse.ArgumentParser, rounds: int, least: int = 0) -> None:
    parser.add_argument(
        "--rounds", type=positive if least else whole_number, default=rounds, metavar="N",
        help="how often each step is timed, in turn with the others" + ("" if least else "; 0 measures memory only")
        + " (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and print the table; returns 0."""
    if args.kind == "data":
        args.threads = 1  # rates are those of one core
    if args.kind not in ("scaling", "checkpoint"):  # whose processes and threads would share a core
        _set_up_threads(args.threads)
    import torch

    from zoo.benchmark.results import Results
    from zoo.benchmark.timing import Clock, describe_timing, involuntary_switches, keep_heap
    from zoo.run.environment import warn_of_changes

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


def _measure_fit(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.largest_batch import check_predictions, parse_bytes, report_fits
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


def _measure_lean(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.largest_batch import parse_bytes
    from zoo.benchmark.lean_networks import measure_lean_network, measure_overhead, summarise_networks
    from zoo.benchmark.network_setup import Setup
    from zoo.models.external import list_networks, smallest_of_each_family, split_name
    from zoo.remat.budget import Budget

    found = [each for name in args.models for each in ([name] if split_name(name) is None else list_networks(name))]
    if args.one_per_family:
        print(f"choosing the smallest of each family among {len(found)} networks", file=sys.stderr, flush=True)
        found = smallest_of_each_family(found)
    names = list(dict.fromkeys(found))
    budget = None if args.budget is None else _number_or_text(args.budget)
    Budget.parse(budget)  # which tells a fault before anything is measured
    max_bytes = None if args.max_memory is None else parse_bytes(args.max_memory)
    for index, name in enumerate(names):
        print(f"{name} ({index + 1} of {len(names)})", file=sys.stderr, flush=True)
        setup = Setup(name, args.batch, args.size, device=results.device)
        measure_lean_network(
            results, setup, rounds=args.rounds, budget=budget, max_bytes=max_bytes, exact=not args.inexact
        )
        results.write(args.out)  # whatever happens to the next one
    summarise_networks(results)
    if args.rounds > 0:
        measure_overhead(results)


def _measure_data(args: argparse.Namespace, results: Results) -> None:
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


def _measure_predict(args: argparse.Namespace, results: Results) -> None:
    from dataclasses import replace

    import torch

    from zoo.benchmark.norm_prediction import predict_norms

    results.settings["clock"] = "none: predicted, not measured"
    predict_norms(results, replace(_setup(args, results, args.network), device=torch.device("meta")), args.gpu)


def _measure_scaling(args: argparse.Namespace, results: Results) -> None:
    from dataclasses import replace

    from zoo.benchmark.scaling import Link, check, job_of, predict

    decode = _decode_rate(args.decode)
    setup = _setup(args, results, args.network)
    job = job_of(setup, args.norm, setup.batch / args.images_per_s)
    if args.cores is not None:
        job = replace(job, input_images_per_s=args.cores * decode)
    link = Link(1e9 * args.bandwidth, 1e-6 * args.latency)
    results.settings |= {
        "norm": args.norm, "images/s of one accelerator": args.images_per_s, "bandwidth, GB/s": args.bandwidth,
        "latency, us": args.latency, "images/s of a core": decode, "cores of one accelerator": args.cores,
        "kB of an image": args.image_kb, "clock": "wall clock",
    }  # fmt: skip
    predict(results, setup, job, link, decode_images_per_s=decode, image_bytes=1e3 * args.image_kb)
    results.note("all of it is derived from the settings above, but for the processes, which were measured here")
    if args.rounds > 0:
        here = replace(setup, batch=args.check_batch, size=args.check_size)
        check(results, here, args.norm, args.rounds)


def _measure_checkpoint(args: argparse.Namespace, results: Results) -> None:
    from zoo.benchmark.checkpoint_pause import measure_pauses

    results.settings["clock"] = "wall clock"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    measure_pauses(results, _setup(args, results, args.network), args.out.parent, args.rounds)


def _decode_rate(text: str) -> float:
    """Return a rate in images per second and core, given as a number or as the JSON file of ``zoo benchmark data``."""
    from zoo.benchmark.input_pipeline import WHOLE

    path = Path(text)
    if path.suffix != ".json":
        try:
            return _above_0(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{error}; --decode: give images per second and core, or a JSON file") from None
    try:
        content = json.loads(path.read_text())
        return float(content["images_per_s"]["train"][WHOLE])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"it has no rate of the training pipeline ({printable(error)}); {printable(path)}: give the JSON file of "
            "zoo benchmark data"
        ) from None


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _setup(args: argparse.Namespace, results: Results, network: str) -> Setup:
    from zoo.benchmark.network_setup import Setup

    batch, dtype = getattr(args, "batch", 2), getattr(args, "dtype", "float32")  # `fit` has neither
    return Setup(network, batch, args.size, args.structure, args.input_3x3, dtype, args.layout, results.device)


def _set_up_threads(threads: int | None) -> None:
    """Pin the threads of OpenMP to cores.

    OpenMP reads the setting when torch is imported. After that nothing is changed.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes reports to stderr otherwise
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))


def _command(args: argparse.Namespace) -> str:
    """Return the command line with these arguments, without those that have their default."""
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


def _shape(text: str) -> tuple[int, ...]:
    shape = _numbers(text)
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not the shape of a batch of maps such as 32x64x56x56")
    return shape


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
