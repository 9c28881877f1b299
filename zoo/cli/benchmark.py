"""``zoo benchmark``: time and memory of layers and networks."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from zoo.cli.options import Command, Group, Positive, WholeNumber, argument, option, positive
from zoo.errors import ConfigError
from zoo.tables import counted

if TYPE_CHECKING:
    from zoo.benchmark.network_setup import Setup
    from zoo.benchmark.results import Results


OUT_DIR = Path("runs/benchmark")
MemoryFormat = Literal["contiguous", "channels_last"]
LoaderName = Literal["zoo", "zoo-shards", "timm", "torchvision", "torchvision-tensors", "dali", "spdl", "webdataset"]


def _numbers(text: str) -> tuple[int, ...]:
    words = text.replace(",", "x").split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 2x3x4x2")
    return tuple(map(int, words))


def _shape(text: str) -> tuple[int, ...]:
    shape = _numbers(text)
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not an NxCxHxW shape such as 32x64x56x56")
    return shape


def _batch_and_size(text: str) -> tuple[int, int]:
    numbers = _numbers(text)
    if len(numbers) != 2 or numbers[0] < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxPX such as 8x224, of at least 2 images")
    return numbers[0], numbers[1]


def _fraction(text: str) -> float:
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


BatchSize = Annotated[int, _two_or_more]
Budgets = tuple[Annotated[float, _fraction], ...]


@dataclass(frozen=True, kw_only=True)
class Benchmark(Command):
    """Base of the benchmarks: `run` prepares the process, calls `measure` and writes the results."""

    kind: ClassVar[str]
    out: Path | None = option(metavar="STEM")
    """Output files: STEM.json and STEM.md, with a plot also STEM.png (default: runs/benchmark/KIND)."""
    device: Literal["cpu", "cuda"] | None = None
    """Device (default: cuda if available)."""
    threads: Positive | None = None
    """CPU threads (default: one per core)."""

    @property
    def stem(self) -> Path:
        """The output files without extension."""
        return self.out or OUT_DIR / self.kind

    def measure(self, results: Results) -> None:
        """Add the measurements to ``results``."""
        raise NotImplementedError

    def run(self) -> int:
        _set_up_threads(self.threads)
        import torch

        from zoo.benchmark.results import Results
        from zoo.memory.timing import Clock, describe_timing, keep_heap

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("no CUDA device is available", "command line", "omit --device, or give --device cpu")
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        settings = describe_timing(Clock(device), keep_heap(), getattr(self, "rounds", 0))
        results = Results(self.kind, self.command_line, device, settings)
        try:
            self.measure(results)
        finally:
            if results.records:
                print(results.write(self.stem))
                print(f"written to {self.stem}.json and {self.stem}.md")
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchmarkLayer(Benchmark):
    """Measure one norm with its activation, forward and backward, with every back end."""

    kind = "layer"
    example = "zoo benchmark layer --shapes 32x64x56x56"
    shapes: tuple[Annotated[tuple[int, ...], _shape], ...] | None = option(metavar="NxCxHxW")
    """Input shapes (default: shapes in a ResNet, and small shapes)."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """Number formats of input and output."""
    layouts: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
    """Memory layouts of the input."""
    rounds: Positive = 20
    """Interleaved timings of each step."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.layer import SHAPES, measure_layers

        measure_layers(results, self.shapes or SHAPES, self.dtypes, self.layouts, self.rounds)


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel(Benchmark):
    """Measure step time and memory of networks with each norm or memory strategy."""

    kind = "model"
    example = "zoo benchmark model resnet50 --batch 8"
    networks: tuple[str, ...] = argument("NETWORK")
    """Architectures such as resnet50, and networks of other packages such as timm:resnet50."""
    strategies: tuple[str, ...] = ("iABN plain", "iABN")
    """Names or shell-style patterns, such as 'compiled*' and '*' for all; std-BN is always measured."""
    rounds: WholeNumber = 5
    """Interleaved timings of each step; 0 measures memory only."""
    plot: bool = False
    """Draw memory against time; needs matplotlib."""
    batch: BatchSize = 4
    """Images per step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format; bfloat16 is autocast."""
    budgets: Budgets = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Activation memory budgets of torch.compile, from 0 to 1."""
    size: Positive = option(default=224, metavar="PX")
    """Image size."""
    structure: Annotated[tuple[int, ...], _numbers] | None = option(metavar="NxNxNxN")
    """Blocks per stage (default: the architecture's)."""
    input_3x3: bool = False
    """Use the stem of three 3x3 convolutions."""
    layout: MemoryFormat = "contiguous"
    """Memory layout of images and weights."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.model import draw_strategies, measure_strategies
        from zoo.benchmark.plot_style import check_matplotlib
        from zoo.benchmark.strategies import all_strategies, choose_strategies
        from zoo.files import write_bytes

        if self.plot:
            check_matplotlib()
            if self.rounds == 0:
                raise ConfigError("a plot needs times", "--plot", "give --rounds a number greater than 0")
        setups = [self.setup(network, results) for network in self.networks]
        strategies = choose_strategies(all_strategies(self.budgets), self.strategies)
        for setup in setups:
            measure_strategies(results, setup, strategies, self.rounds)
        if self.plot:
            write_bytes(self.stem.with_name(f"{self.stem.name}.png"), draw_strategies(results.content()))

    def setup(self, network: str, results: Results) -> Setup:
        """Return the network and the images to measure."""
        from zoo.benchmark.network_setup import Setup
        from zoo.config.network import parse_spec

        options = {"input_3x3": True} if self.input_3x3 else {}
        spec = parse_spec({"arch": network, "options": options}, network)
        return Setup(spec, self.batch, self.size, self.structure, self.dtype, self.layout, results.device)


@dataclass(frozen=True, kw_only=True)
class BenchmarkLean(Benchmark):
    """Measure bit-exactness, memory and time of zoo.lean on networks of zoo, timm and torchvision.

    Runs a training step of each network, plain and lean. Networks of timm need that package.
    """

    kind = "lean"
    example = "zoo benchmark lean --models timm:resnet50"
    models: tuple[str, ...] = ("torchvision:resnet50",)
    """Architectures of zoo, and names or shell-style patterns of other packages, such as timm:resnet50 and
    'torchvision:*'."""
    one_per_family: bool = False
    """Among names with the same first word, such as resnet, measure the network with the fewest parameters."""
    batch: BatchSize = 4
    """Images per step."""
    size: Positive = option(default=224, metavar="PX")
    """Image size, for networks that accept any size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format; bfloat16 is autocast."""
    layout: MemoryFormat = "contiguous"
    """Memory layout of images and weights."""
    max_memory: str | None = option(metavar="SIZE")
    """Skip networks whose plain training is predicted to need more, such as 4GiB."""
    budgets: Budgets = ()
    """Also measure zoo.lean within these fractions of what plain training saves, such as 0.4, and checkpoints of the
    network's blocks."""
    compiled_budgets: Budgets = ()
    """Also measure Inductor with these activation memory budgets, from 0 to 1, of torch and of the lean rule. Each
    compilation takes up to a minute."""
    rounds: WholeNumber = 7
    """Interleaved timings of each step; 0 measures memory only."""
    reports: bool = False
    """Also compare the peaks of zoo.memory_report with the allocator's."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.lean_networks import measure_lean_network
        from zoo.benchmark.network_setup import Setup
        from zoo.config.network import parse_spec
        from zoo.models.external import list_networks, smallest_of_each_family, split_name
        from zoo.remat._budget import parse_bytes

        found = [each for name in self.models for each in ([name] if split_name(name) is None else list_networks(name))]
        if self.one_per_family:
            print(
                f"choosing the smallest of each family among {counted(len(found), 'network')}",
                file=sys.stderr,
                flush=True,
            )
            found = smallest_of_each_family(found)
        names = list(dict.fromkeys(found))
        max_bytes = None if self.max_memory is None else parse_bytes(self.max_memory)
        for index, name in enumerate(names):
            print(f"{name} ({index + 1} of {len(names)})", file=sys.stderr, flush=True)
            spec = parse_spec({"arch": name}, name)
            setup = Setup(spec, self.batch, self.size, None, self.dtype, self.layout, results.device)
            measure_lean_network(
                results, setup, rounds=self.rounds, max_bytes=max_bytes, budgets=self.budgets,
                compiled_budgets=self.compiled_budgets, reports=self.reports,
            )  # fmt: skip
            results.write(self.stem)  # keeps earlier measurements if the next network fails


@dataclass(frozen=True, kw_only=True)
class BenchmarkStep(Benchmark):
    """Measure the peak memory and the time of whole training steps: plain, lean, and with released gradients.

    A step is forward, backward and the step of the optimizer. The weights are compared bit for bit.
    """

    kind = "step"
    example = "zoo benchmark step --shapes 2x128"
    models: tuple[str, ...] = ("torchvision:resnet50",)
    """Architectures of zoo, and networks of other packages such as timm:resnet50."""
    shapes: tuple[Annotated[tuple[int, int], _batch_and_size], ...] = option(default=((2, 128), (8, 224)), nargs="*",
        metavar="NxPX")  # fmt: skip
    """Images per step and their size, such as 8x224."""
    counted: tuple[Annotated[tuple[int, int], _batch_and_size], ...] = option(default=(), nargs="*", metavar="NxPX")
    """Also count the tensors of steps of these shapes, on the meta device, without times."""
    optimizer: str = "AdamW"
    """Optimizer of torch.optim; SGD has a momentum of 0.9."""
    rounds: WholeNumber = 7
    """Interleaved timings of each step; 0 measures memory only."""

    def measure(self, results: Results) -> None:
        import torch

        from zoo.benchmark.network_setup import Setup
        from zoo.benchmark.whole_step import measure_setup
        from zoo.config.network import parse_spec

        for name in self.models:
            spec = parse_spec({"arch": name}, name)
            devices = [(results.device, each) for each in self.shapes]
            devices += [(torch.device("meta"), each) for each in self.counted]
            for device, (batch, size) in devices:
                print(f"{name}, {batch} x {size} px, {device}", file=sys.stderr, flush=True)
                measure_setup(
                    results, Setup(spec, batch, size, device=device), optimizer=self.optimizer, rounds=self.rounds
                )


@dataclass(frozen=True, kw_only=True)
class BenchmarkGrid(Benchmark):
    """Measure the effect of grid_bits on reversible networks, and plot the reconstruction error over depth."""

    kind = "grid"
    example = "zoo benchmark grid revnet38_cifar"
    networks: tuple[str, ...] = argument("NETWORK")
    """Architectures such as revnet38_cifar."""
    bits: tuple[WholeNumber, ...] = (10, 12, 14, 16)
    """Values of grid_bits, beside float32."""
    batch: BatchSize = 16
    """Images per step."""
    size: Positive = option(default=32, metavar="PX")
    """Image size."""
    steps: Positive = 30
    """Training steps on random images and labels."""
    rounds: WholeNumber = 7
    """Timings of a step; 0 measures no times."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.grid import draw_errors, measure_grids
        from zoo.benchmark.network_setup import Setup
        from zoo.benchmark.plot_style import check_matplotlib
        from zoo.config.network import parse_spec

        check_matplotlib()
        for network in self.networks:
            setup = Setup(parse_spec({"arch": network}, network), self.batch, self.size, device=results.device)
            measure_grids(results, setup, self.bits, self.steps, self.rounds)
        draw_errors(self.stem, results.content(), self.steps)


@dataclass(frozen=True, kw_only=True)
class BenchmarkDepth(Benchmark):
    """Measure the memory of vision transformers over depth: stored, lean, checkpointed and reversible.

    Needs timm.
    """

    kind = "depth"
    example = "zoo benchmark depth --depths 6 12"
    device: Literal["cpu"] = "cpu"
    """Device."""
    depths: tuple[Positive, ...] = (6, 12, 24, 48)
    """Numbers of blocks."""
    batch: Positive = 2
    """Images per step."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.depth import measure_depths

        measure_depths(results, self.depths, self.batch)


@dataclass(frozen=True, kw_only=True)
class BenchmarkLoaders(Benchmark):
    """Compare the throughput of the training loader with loaders of other packages, on the same JPEG files.

    Loaders of packages that are not installed are skipped with a note. Needs Linux.
    """

    kind = "loaders"
    example = "zoo benchmark loaders DATA --loaders torchvision"
    data: Path = argument("DATA")
    """Data set with JPEG files in DATA/train."""
    device: Literal["cpu"] = "cpu"
    """Device."""
    loaders: tuple[LoaderName, ...] = get_args(LoaderName)
    """Loaders to measure in addition to zoo's."""
    workers: tuple[Positive, ...] = option("-j", default=(1, 2))
    """Numbers of worker processes, or of threads for loaders that use threads."""
    images: Positive = 512
    """Number of files, evenly spaced."""
    batch: Positive = 32
    """Images per batch."""
    rounds: Positive = 9
    """Interleaved epochs of each loader."""

    def measure(self, results: Results) -> None:
        from zoo.benchmark.loaders import measure_loaders

        measure_loaders(
            results, self.data, names=self.loaders, workers=self.workers, num_images=self.images,
            batch_size=self.batch, rounds=self.rounds,
        )  # fmt: skip


BENCHMARK = Group(
    "Measure time and memory of norms, networks, strategies and loaders",
    {
        "layer": BenchmarkLayer,
        "model": BenchmarkModel,
        "lean": BenchmarkLean,
        "step": BenchmarkStep,
        "grid": BenchmarkGrid,
        "depth": BenchmarkDepth,
        "loaders": BenchmarkLoaders,
    },
)


def _set_up_threads(threads: int | None) -> None:
    """Pin OpenMP threads to cores. Does nothing if torch is imported, because OpenMP has already read its settings."""
    if "torch" in sys.modules:
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))
