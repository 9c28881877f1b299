"""The generated tables of the documentation, by the names of their markers.

A table stands between the lines ``<!-- name -->`` and ``<!-- /name -->`` of a page. Its numbers come from golden files,
result files, experiments and the package. ``python -m tests.golden`` regenerates all of them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from zoo.config.architectures import ARCHITECTURES, network_sizes
from zoo.config.describe import SectionText, describe_options, describe_settings
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.config.parse import experiments_dir, load_experiment
from zoo.config.published import published
from zoo.models.revnet import REVERSIBLE_TWINS
from zoo.reproduce.scoreboard import verdict_lines
from zoo.reproduce.scoreboard_files import read_rows, summary

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
FOLDERS = ("", "docs", "docs/tutorials", "docs/results", "experiments", "tests", "csrc")
PAGES = {
    str(path.relative_to(ROOT)): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md"))
    if folder != "docs/results" or path.name == "README.md"  # the others are generated from result files
}
MARKERS = re.compile(r"(<!-- (\w+) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)  # around generated tables
BASELINE = "std-BN"
PARETO = ("resnet50", "resnext101", "densenet264")
REVNETS = {"revnet104": "pareto_revnet104", "revnet164_cifar": "pareto_revnet164"}


@cache
def golden(name: str) -> Any:
    """Return the content of a golden file."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())


@cache
def result(name: str) -> Any:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def records(name: str, metric: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the records of a benchmark (at least one) with this metric and the ``wanted`` values."""
    wanted["metric"] = metric
    found = [record for record in result(name)["records"] if all(record[key] == wanted[key] for key in wanted)]
    assert found, (name, wanted)
    return found


def median(name: str, metric: str, **wanted: Any) -> float:
    """Return the median of the only such record."""
    (record,) = records(name, metric, **wanted)
    return float(record["median"])


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table with left-aligned text columns, followed by right-aligned columns."""
    rule = f"|{' --- |' * text_columns}{' ---: |' * (len(headers) - text_columns)}"
    return "\n".join([f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(text: str) -> str:
    """Return ``text`` with escaped stars."""
    return text.replace("*", r"\*")


# --- zoo reproduce ---


def reproduction() -> str:
    """Return sentences that count the published numbers, and the accuracies among them, by verdict."""
    rows = read_rows(RESULTS)
    states = [row.state for row in rows if row.number.evidence.startswith("accuracy")]
    agreeing, missing = states.count("reproduced") + states.count("better"), states.count("not measured")
    assert agreeing == 0  # as the sentence says
    return (
        f"{verdict_lines(rows)[0]}\n"
        f"**None of the {len(states)} accuracies among them is reproduced yet**: {missing} are not measured, for want\n"
        f"of ImageNet and of GPUs, and {len(states) - missing} have too few runs. What is measured are counts, memory, "
        "times\nand signal-to-noise ratios."
    )


def scoreboard() -> str:
    """Return the published numbers by kind of evidence and by table of a paper."""
    return summary(read_rows(RESULTS)).removesuffix("\n")


# --- golden files ---


def networks() -> str:
    """The networks that classify, with their numbers of parameters."""
    cases = network_sizes()
    rows = []
    for name in (case for case in cases if "+" not in case and ARCHITECTURES[case].task == "classification"):
        stem = cases.get(f"{name}+input_3x3")
        sizes = [f"{case['parameters']:,}" if case else "" for case in (cases[name], stem)]
        rows.append([f"`{name}`", f"`{ARCHITECTURES[name].family}`", *sizes])
    return table(["network", "family", "parameters", "with `input_3x3`"], rows, text_columns=2)


def options() -> str:
    """The options of networks, with the families that have them."""
    families: dict[tuple[str, str], dict[str, None]] = {}
    for arch in ARCHITECTURES.values():
        for option, meaning in describe_options(arch).items():
            families.setdefault((option, meaning), {})[f"`{arch.family}`"] = None
    rows = [
        [f"`{option}`", ", ".join(names), _plain(meaning)]
        for (option, meaning), names in families.items()
        if option != "memory"
    ]
    return table(["option", "families", "what it does"], rows, text_columns=3)


def published_scores() -> str:
    """The scores and the files of the original project's published weights."""
    rows, segmenting = [], []
    for name, entry in published().items():
        if entry.digest.kind != "md5":
            continue  # not of the original project
        if entry.experiment.task == "segmentation":
            ((protocol, score),) = entry.scores.items()
            segmenting.append(
                f"`{name}` segments street scenes: {score['miou']:.2f} % mIoU ({protocol}) on the test images of "
                f"Mapillary Vistas ([file]({entry.page}), md5 `{entry.digest.digits}`)."
            )
            continue
        scores = [entry.scores[key] for key in ("center224", "tencrop224", "center320")]
        columns = [f"{score['top1']:.2f} / {score['top5']:.2f}" for score in scores]
        rows.append([f"`{name}`", *columns, f"[file]({entry.page}) `{entry.digest.digits}`"])
    return "\n\n".join(
        [table(["name", "224", "224, ten crops", "320", "weights, md5"], rows, text_columns=5), *segmenting]
    )


def held() -> str:
    """Bytes that the original project's networks hold for backward with each memory strategy."""
    strategies = list(dict.fromkeys(key for row in golden("held_bytes").values() for key in row))
    rows = [
        [f"`{name}`", *(_share(row[key], key) if key in row else "" for key in strategies)]
        for name, row in golden("held_bytes").items()
    ]
    return table(["network", "std-BN, MB", *(f"`{memory}`" for memory in strategies[1:])], rows)


def reversible() -> str:
    """Bytes that reversible networks and their plain twins hold for backward."""
    strategies = list(golden("reversible_bytes")["resnet101_preact"])
    rows = [
        [f"`{name}`, `{REVERSIBLE_TWINS[name]}`", *(_share(row[key], key) for key in strategies)]
        for name, row in golden("reversible_bytes").items()
    ]
    return table(["network", "std-BN, MB", *strategies[1:]], rows)


def families() -> str:
    """Megabytes that the other families hold for backward with each memory strategy."""
    strategies = ("plain", "lean", "checkpoint", "auto")
    rows = [
        [f"`{name}`", *(f"{row[key]:.1f}" if key in row else "" for key in strategies)]
        for name, row in golden("family_bytes").items()
    ]
    return table(["MB held", *(f"`{memory}`" for memory in strategies)], rows)


def depth() -> str:
    """Megabytes held by vision transformers of several depths."""
    found = records("depth", "held")
    depths = list(dict.fromkeys(record["subject"] for record in found))
    rows = [
        [provider, *(f"{median('depth', 'held', subject=each, provider=provider):.1f}" for each in depths)]
        for provider in dict.fromkeys(record["provider"] for record in found)
    ]
    return table(["MB held", *depths], rows)


def _share(value: float, key: str) -> str:
    return f"{value:.{1 if key == 'standard_mb' else 3}f}"


# --- zoo quickstart ---


def quickstart_means() -> dict[str, dict[str, float]]:
    """Return the means over seeds by crop, in the format of the experiment's "expected" section."""
    runs = [run["results"] for run in result("quickstart")["runs"]]
    return {
        scores[0]["protocol"].partition("-")[0]: {
            key: round(statistics.mean(s[key] for s in scores), 2) for key in ("top1", "top5")
        }
        for scores in zip(*runs, strict=True)
    }


# --- zoo train --replicas ---


def replicas() -> str:
    """The digests of two runs of replicas on each number of processes, and what they were measured with."""
    files = result("replicas"), result("replicas_sync")
    plain, synchronized = ({run["processes"]: f"`{run['digest'][:32]}`" for run in found["runs"]} for found in files)
    rows = [[str(count), digest, synchronized[count]] for count, digest in plain.items()]
    environments = [found["environment"] for found in files]
    about = dict.fromkeys(f"{e['cpu']}, {e['instructions']}, PyTorch {e['torch']}" for e in environments)
    heads = ["processes", "in-place norms", "synchronized norms"]
    return f"{table(heads, rows, text_columns=3)}\n\nFirst halves of the digests. {'; '.join(about)}."


# --- zoo benchmark layer ---


LAYER_SHAPES = [[32, 64, 112, 112], [32, 256, 56, 56], [32, 512, 28, 28], [32, 1024, 14, 14]]


def layers() -> str:
    """Time of in-place norms relative to standard batch norm, by shape."""

    def row(title: str, provider: str, dtype: str, layout: str) -> list[str]:
        about = {"subject": "norm + activation", "provider": provider, "dtype": dtype, "layout": layout}
        return [title, *(f"{median('layer_cpu', 'time ratio', shape=shape, **about):.2f}" for shape in LAYER_SHAPES)]

    cases = [(dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("contiguous", "channels_last")]
    rows = [row(", ".join(case), "iABN native", *case) for case in cases]
    compiled = "the same by torch.compile of the two modules, float32, contiguous"
    rows.append(row(compiled, "compiled std-BN", "float32", "contiguous"))
    return table(["", *(f"{shape[1]} x {shape[2]}²" for shape in LAYER_SHAPES)], rows)


# --- zoo benchmark model and pareto ---


def headline() -> str:
    """Memory and time of a training step, relative to plain training or to standard batch norm."""
    resnet, external = "lean_resnet50", "torchvision:resnet50"
    rows = [
        _headline(
            "any network, such as torchvision's ResNet-50", "zoo.lean(model)", resnet, external, "std-BN lean",
            on_gpu=("lean_h100", external, "lean"),
        ),
        _headline(
            "beside it: a checkpoint of each block", "torch.utils.checkpoint", resnet, external, "std-BN checkpointed"
        ),
        _released_headline(),
        _headline(
            "faster, with other rounding", "torch.compile(model, options=zoo.remat.inductor_options())",
            resnet, external, "compiled std-BN, lean rule 1", on_gpu=("lean_h100", external, "Inductor, lean rule"),
        ),
        _headline("beside it: the compiler alone", "torch.compile(model)", resnet, external, "compiled std-BN 1"),
        _headline(
            "a ResNet-50 to train from scratch", 'zoo.get("resnet50", norm="inplace")', "model_cpu", "resnet50", "iABN",
            on_gpu=("model_h100", "resnet50", "iABN"),
        ),
        _headline(
            "a DenseNet-264 to train from scratch", 'zoo.get("densenet264", norm="inplace", input_3x3=True)',
            "model_cpu_3x3", "densenet264 3x3 stem", "iABN",
        ),
        _headline(
            "a new, reversible network", 'zoo.get("revnet164_cifar", norm="inplace")',
            "pareto_revnet164", "resnet164_cifar", "RevNet, iABN",
        ),
    ]  # fmt: skip
    return table(
        ["network", "call", "peak memory", "activations held", "time, H100", "time, CPU"], rows, text_columns=2
    )


def _released_headline() -> list[str]:
    """Return the row of released gradients, at a small batch."""
    about = {"subject": "torchvision:resnet50", "shape": [2, 3, 128, 128], "provider": "lean, released gradients"}
    peak, time = (median("step", f"{each} ratio", **about) for each in ("peak above parameters", "step"))
    title = "the same, at two images of 128 px: the gradients are the peak"
    return [title, "`zoo.release_gradients(model, optimizer)`", f"{peak:.2f}", "", "", f"{time:.2f}"]


def _headline(
    title: str, call: str, file: str, subject: str, provider: str, *, on_gpu: tuple[str, str, str] | None = None
) -> list[str]:
    about = {"subject": subject, "provider": provider}
    peak, held, on_cpu = (f"{median(file, each, **about):.2f}" for each in ("peak ratio", "held ratio", "step ratio"))
    on_gpu_text = ""
    if on_gpu is not None:
        on_gpu_text = f"{median(on_gpu[0], 'step ratio', subject=on_gpu[1], provider=on_gpu[2]):.2f}"
    return [title, f"`{call}`", peak, held, on_gpu_text, on_cpu]


def step_times() -> str:
    """Times of a step of ResNet-50 by the ways that a report lists, relative to plain training."""
    ways = {"lean": "lean", "with checkpoints": "checkpointed blocks", "within the budget 0.2": "lean, budget 0.2"}
    found = [
        f"{median('lean_budgets', LEAN_METRICS[2], subject='torchvision:resnet50', provider=provider):.2f} {title}"
        for title, provider in ways.items()
    ]
    return f"Time of a step on a CPU, relative to plain training: {', '.join(found)} (two images of 128 x 128)."


def models() -> str:
    """Time and peak memory of networks with in-place norms, relative to standard batch norm."""
    files = {
        "resnet50": "model_cpu",
        "resnet101": "model_cpu",
        "resnext101": "model_cpu_3x3",
        "densenet264": "model_cpu_3x3",
    }

    def row(title: str, metric: str) -> list[str]:
        values = []
        for name, file in files.items():
            subject = name if file == "model_cpu" else f"{name} 3x3 stem"
            values.append(f"{median(file, metric, subject=subject, provider='iABN'):.2f}")
        return [title, *values]

    rows = [row("time", "step ratio"), row("peak bytes, parameter gradients included", "peak ratio")]
    return table(["", *(f"`{name}`" for name in files)], rows)


def fastest() -> str:
    """Time with its spread and peak memory of the fastest compiled budget, for each norm."""

    def cells(name: str, norm: str) -> list[str]:
        found = [r for r in records(f"pareto_{name}", "step ratio") if r["provider"].startswith(f"compiled {norm} ")]
        best = min(found, key=lambda record: record["median"])
        peak = median(f"pareto_{name}", "peak ratio", provider=best["provider"])
        return [f"{best['median']:.2f} ({best['spread']:.2f})", f"{peak:.2f}"]

    rows = [
        [f"compiled {norm}, its fastest budget", *(cell for name in PARETO for cell in cells(name, norm))]
        for norm in ("std-BN", "iABN")
    ]
    return table(["", *(head for name in PARETO for head in (f"`{name}` time", "peak"))], rows)


def revnets() -> str:
    """Time and peak memory of RevNets beside checkpointing and in-place norms."""
    rows = {"ResNet, checkpointed": "std-BN checkpointed", "ResNet, iABN": "iABN", "RevNet": "RevNet",
            "ResNet, iABN, checkpointed": "iABN checkpointed", "RevNet, iABN": "RevNet, iABN"}  # fmt: skip
    order = [*list(rows)[:2], "ResNet, iABN, checkpointed", "RevNet", "RevNet, iABN"]
    cells = [
        [title, *(f"{median(file, metric, provider=rows[title]):.2f}"
                  for file in REVNETS.values() for metric in ("step ratio", "peak ratio"))]
        for title in order
    ]  # fmt: skip
    return table(["", *(head for name in REVNETS for head in (f"`{name}` time", "peak"))], cells)


# --- zoo benchmark lean ---

LEAN_NETWORKS = {
    "torchvision:resnet50": "ResNet-50",
    "timm:efficientnet_b0": "EfficientNet-B0",
    "timm:mobilenetv3_large_100": "MobileNetV3-L",
    "torchvision:densenet121": "DenseNet-121",
    "timm:convnext_tiny": "ConvNeXt-T",
    "timm:vit_small_patch16_224": "ViT-S/16",
}


#: What a row of the table of lean networks is -> the result file and the provider in it.
LEAN_WAYS = {
    "`zoo.lean`": ("lean_networks", "lean"),
    "Inductor, lean rule": ("lean_inductor", "Inductor, lean rule"),
}
LEAN_METRICS = ("held ratio", "peak without gradients ratio", "step ratio")


def lean_networks() -> str:
    """Memory and time of a step relative to plain training, for each network and each way in which it was measured."""
    rows = []
    for subject, title in LEAN_NETWORKS.items():
        for way, (file, provider) in LEAN_WAYS.items():
            about = {"subject": subject, "provider": provider}
            found = {r["metric"]: r for r in result(file)["records"] if about.items() <= r.items()}
            if found.keys() >= {*LEAN_METRICS}:
                rows.append([title, way, *(_with_spread(found[metric]) for metric in LEAN_METRICS)])
    return table(["", "", "bytes held", "peak bytes", "time of a step"], rows, text_columns=2)


TITLES = ("held", "peak", "time")


def libraries() -> str:
    """Memory and time of lean steps of other packages' networks, beside their own gradient checkpointing."""
    names = dict.fromkeys(record["subject"] for record in result("libraries")["records"])
    rows = []
    for name in names:
        row = [name, f"{median('libraries', 'held, plain', subject=name, provider='zoo.lean'):.0f} MB"]
        for provider in ("zoo.lean", "its own checkpointing"):
            found = {
                record["metric"]: record["median"]
                for record in result("libraries")["records"]
                if (record["subject"], record["provider"]) == (name, provider)
            }
            assert found.get("same bits", 1) == 1, (name, provider)  # as the page says
            row += [f"{found[f'{title} ratio']:.2f}" if found else "" for title in TITLES]
        rows.append(row)
    headers = [f"{provider} {title}" for provider in ("lean:", "checkpointing:") for title in TITLES]
    return table(["network", "held", *headers], rows)


def whole_steps() -> str:
    """Peaks and times of whole steps with AdamW: plain, lean, and lean with released gradients."""
    plain, lean_, released = "plain", "lean", "lean, released gradients"
    rows = []
    for record in records("step", "whole peak", provider=plain):
        about = {"subject": record["subject"], "shape": record["shape"]}
        by = {
            (each["provider"], each["metric"]): each["median"]
            for each in result("step")["records"]
            if all(each[key] == value for key, value in about.items())
        }
        assert all(by.get((name, "same bits"), 1) == 1 for name in (lean_, released)), about  # as the page says
        batch, *_, side = record["shape"]
        times = [by.get((released, metric)) for metric in ("time of the release", "step ratio")]
        rows.append([
            f"{LEAN_NETWORKS[record['subject']]}, {batch} x {side} px",
            f"{by[plain, 'parameters and states']:.0f}", f"{by[plain, 'gradients']:.0f}",
            *(f"{by[each, 'peak above parameters']:.0f}" for each in (plain, lean_, released)),
            f"{by[released, 'saved, share of the gradients']:.2f}",
            *("" if each is None else f"{each:.2f}" for each in times),
        ])  # fmt: skip
    peaks = ["peak above them: plain", "lean", "lean, released"]
    headers = ["network", "parameters and states", "gradients", *peaks, "saved / gradients", "time / lean"]
    return table([*headers, "time / plain"], rows)


def lean_summary() -> str:
    """Memory and time of a step with `zoo.lean`, relative to plain training, on a CPU and on a GPU."""
    shown = [
        ("lean_networks", "torchvision:resnet50", "on a CPU"),
        ("lean_h100", "torchvision:resnet50", "on an H100"),
        ("lean_h100", "timm:vit_small_patch16_224", "on an H100"),
    ]
    rows = [
        [
            f"{LEAN_NETWORKS[name]}, {place}",
            *(f"{median(file, m, subject=name, provider='lean'):.2f}" for m in LEAN_METRICS),
        ]
        for file, name, place in shown
    ]
    return table(["", "bytes held", "peak bytes", "time of a step"], rows)


def lean_little() -> str:
    """Networks of which lean training saves little, with the reason."""
    shown = [
        ("a convolution and a ReLU, no norm", "lean_sweep_torchvision", "torchvision:vgg11"),
        ("the same", "lean_sweep_torchvision", "torchvision:alexnet"),
        ("recurrent layers", "lean_sweep", "timm:sequencer2d_s"),
        ("gates, products of two maps", "lean_sweep", "timm:focalnet_tiny_srf"),
        ("attention and linear layers", "lean_sweep_torchvision", "torchvision:vit_b_16"),
        ("parameters", "libraries", "torchvision: Faster R-CNN"),
        ("the same", "libraries", "MONAI: DynUNet"),
        ("the same", "libraries", "segmentation_models_pytorch: Unet"),
    ]
    rows = []
    for reason, file, subject in shown:
        provider, peak = ("zoo.lean", "peak ratio") if file == "libraries" else ("lean", LEAN_METRICS[1])
        ratios = [median(file, metric, subject=subject, provider=provider) for metric in ("held ratio", peak)]
        rows.append([reason, subject, *(f"{each:.2f}" for each in ratios)])
    return table(["what is most of it", "network", "bytes held", "peak bytes"], rows, text_columns=2)


def lean_sweep() -> str:
    """The smallest network of each family of timm and torchvision, trained lean for a step."""
    rows = []
    for package, file in (("timm", "lean_sweep"), ("torchvision", "lean_sweep_torchvision")):
        counts = [
            sum(r["median"] for r in records(file, metric, provider="lean")) for metric in ("trains", "same bits")
        ]
        left_out = sum(note.startswith("not measured") for note in result(file)["notes"])
        ratios = sorted(r["median"] for r in records(file, "held ratio", provider="lean"))
        shown = [statistics.median(ratios), statistics.quantiles(ratios, n=10, method="inclusive")[-1], ratios[-1]]
        texts = [*(f"{count:.0f}" for count in counts), str(left_out), *(f"{ratio:.2f}" for ratio in shown)]
        rows.append([package, *texts, *_median_step_ratios(file)])
    headers = ["", "trained lean", "with the same bits", "not trainable in plain training either"]
    headers += ["bytes held: median", "90th percentile", "worst"]
    return table([*headers, "time of a step: median", "of the half with longer steps"], rows)


def _median_step_ratios(file: str) -> list[str]:
    """Return the median over all networks, and over the half whose plain steps take longer; empty if not timed."""
    if not any(record["metric"] == "step ratio" for record in result(file)["records"]):
        return ["", ""]
    ratios = {r["subject"]: r["median"] for r in records(file, "step ratio", provider="lean")}
    by_duration = [r["subject"] for r in sorted(records(file, "step", provider="plain"), key=itemgetter("median"))]
    longer = by_duration[len(by_duration) // 2 :]
    return [f"{statistics.median(ratios[name] for name in names):.2f}" for names in (by_duration, longer)]


def lean_budgets() -> str:
    """Peak bytes and time of a step within fractions of what plain training saves, beside checkpoints of blocks."""
    providers = list(dict.fromkeys(r["provider"] for r in records("lean_budgets", "held ratio")))
    providers = [name for name in providers if name != "plain"]
    rows = []
    for subject in dict.fromkeys(r["subject"] for r in records("lean_budgets", "held ratio")):
        row = [subject.partition(":")[2]]
        for provider in providers:
            found = {
                r["metric"]: r["median"]
                for r in result("lean_budgets")["records"]
                if (r["subject"], r["provider"]) == (subject, provider)
            }
            assert found.get("same bits", 1) == 1, (subject, provider)  # as the page says
            row.append(
                "".join(f"{found[m]:.2f}, {found[LEAN_METRICS[2]]:.2f}" for m in LEAN_METRICS[1:2] if m in found)
            )
        rows.append(row)
    titles = [name.replace("lean, budget ", "").replace("lean", "no budget") for name in providers]
    return table(["peak, time", *titles], rows)


def lean_beside() -> str:
    """Memory and time of a step of ResNet-50 with each strategy, relative to plain training."""
    rows = []
    for record in records("lean_resnet50", "step ratio"):
        name = record["provider"]
        others = [f"{median('lean_resnet50', metric, provider=name):.2f}" for metric in ("held ratio", "peak ratio")]
        rows.append([name, *others, _with_spread(record)])
    return table(["", "bytes held", "peak bytes", "time of a step"], rows)


def report_error() -> str:
    """The peaks that `zoo.memory_report` states, relative to the allocator's, over networks of timm and torchvision."""
    rows = []
    for provider in ("plain", "lean"):
        ratios = sorted(
            record["median"] for record in records("report_error", "reported peak ratio", provider=provider)
        )
        decile = statistics.quantiles(ratios, n=10, method="inclusive")[0]
        shown = (statistics.median(ratios), decile, ratios[0], ratios[-1])
        rows.append([f"{provider} training", str(len(ratios)), *(f"{ratio:.2f}" for ratio in shown)])
    return table(["", "networks", "median", "10th percentile", "lowest", "highest"], rows)


def _with_spread(record: dict[str, Any]) -> str:
    return f"{record['median']:.2f}" + (f" ({record['spread']:.2f})" if record["n"] > 1 else "")


# --- on a GPU ---

GPU_COLUMNS = ("bytes held", "peak bytes", "time of a step", "time as a CUDA graph")


def gpu_layers() -> str:
    """Time of a norm on a GPU, relative to standard batch norm."""
    shapes = list(dict.fromkeys(tuple(each["shape"]) for each in records("layer_h100", "time ratio")))
    rows = [
        [provider, *(f"{median('layer_h100', 'time ratio', provider=provider, shape=list(s)):.2f}" for s in shapes)]
        for provider in ("iABN triton", "compiled std-BN", "compiled iABN")
    ]
    return table(["", *(f"{batch} x {channels} x {side}²" for batch, channels, side, _ in shapes)], rows)


def gpu_models() -> str:
    """Memory and time of a step of ResNet-50 on a GPU, relative to standard batch norm."""
    metrics = ("held ratio", "peak ratio", "step ratio", "step as CUDA graph ratio")
    providers = [record["provider"] for record in records("model_h100", "held ratio")]
    rows = [
        [name, *(f"{median('model_h100', m, provider=name, subject='resnet50'):.2f}" for m in metrics)]
        for name in providers
    ]
    return table(["", *GPU_COLUMNS], rows)


def gpu_lean() -> str:
    """Memory and time of a lean step on a GPU, relative to a plain one."""
    metrics = ("held ratio", "peak without gradients ratio", "step ratio", "step as CUDA graph ratio")
    rows = []
    for name in ("lean_h100", "lean_h100_bf16"):
        found = [{(r["subject"], r["provider"]): r["median"] for r in records(name, metric)} for metric in metrics]
        for record in records(name, "trains"):
            key = record["subject"], record["provider"]
            ratios = [f"{each[key]:.2f}" if key in each else "" for each in found]  # no graph captures checkpoints
            title = f"{LEAN_NETWORKS[record['subject']]}, {record['shape'][0]} images, {record['dtype']}"
            rows.append([title, record["provider"], *ratios])
    return table(["", "", *GPU_COLUMNS], rows, text_columns=2)


def lean_inductor() -> str:
    """Held and peak memory and time of a step with Inductor, relative to a plain eager step, for each budget."""

    def cell(subject: str, provider: str) -> str:
        about = {"subject": subject, "provider": f"Inductor, {provider}"}
        return " / ".join(f"{median('lean_inductor', metric, **about):.2f}" for metric in LEAN_METRICS)

    budgets = (1, 0.99, 0.5, 0.3)
    rows = []
    for subject in dict.fromkeys(record["subject"] for record in records("lean_inductor", "held ratio")):
        title = LEAN_NETWORKS[subject]
        rows.append([title, "torch", *(cell(subject, f"budget {budget}") for budget in budgets)])
        with_budgets = [cell(subject, f"lean rule, budget {budget}") for budget in budgets[1:]]
        rows.append([title, "lean", cell(subject, "lean rule"), *with_budgets])
    return table(["", "rule", *(f"budget {budget}" for budget in budgets)], rows, text_columns=2)


# --- training runs ---

CIFAR_RUNS = {  # title: file, label of the runs that reconstruct, label of those that store
    "RevNeXt, hybrid 1-1": ("revnext_runs", "revnext_cifar10, blocks 1-1", "revnext_cifar10, blocks 1-1, stored"),
    "RevNeXt, hybrid 1-2": ("revnext_runs", "revnext_cifar10", "revnext_cifar10, stored"),
    "RevNeXt, flat 1-1-1, 48 channels": ("revnext_runs", "revnext_flat_cifar10, layers 1-1-1, channels 48", None),
    "RevNeXt, flat 1-1-1, 32 channels": ("revnext_runs", None, "revnext_flat_cifar10, layers 1-1-1, stored"),
    "RevNeXt, flat 3-3-3, 32 channels": (
        "revnext_runs", "revnext_flat9_cifar10_short", "revnext_flat9_cifar10_short, stored"
    ),
    "ResNet-32": ("revnet_runs", None, "resnet32_cifar10_short"),
    "RevNet-38": ("revnet_runs", "revnet38_cifar10_short", "revnet38_cifar10_short, stored"),
    "RevNet-38, grid_bits=14": ("revnet_runs", "revnet38_cifar10_short, grid_bits 14", None),
    "RevBiFPN-S0": ("family_runs", "revbifpn_s0_cifar10_short", "revbifpn_s0_cifar10_short, stored"),
    "RevBiFPN-S0, grid_bits=14": (
        "family_runs", "revbifpn_s0_cifar10_short, grid_bits 14", "revbifpn_s0_cifar10_short, grid_bits 14, stored"
    ),
    "RevCol-T": ("family_runs", "revcol_tiny_cifar10_short", "revcol_tiny_cifar10_short, stored"),
}  # fmt: skip


def cifar10() -> str:
    """Test errors on CIFAR-10 with reconstructed and with stored activations."""
    headers = ["", "training images", "epochs", "standard error, points", "reconstructed", "stored"]
    rows = []
    for title in CIFAR_RUNS:
        by_label = _runs_of(title)
        runs = [run for of_label in by_label for run in of_label]
        finished = [run["epochs"][-1]["val_top1"] for run in runs if run["status"] == "finished"]
        (trained,), (scored,), (epochs,) = (
            {value(run) for run in runs}
            for value in (
                lambda run: run["num_training_images"],
                lambda run: run["num_validation_images"],
                lambda run: run["settings"]["optimizer"]["schedule"]["epochs"],
            )
        )
        share = statistics.mean(finished) / 100
        error = 100 * math.sqrt(share * (1 - share) / scored)
        rows.append([title, f"{trained:,}", str(epochs), f"{error:.1f}", *map(_final, by_label)])
    return table(headers, rows)


def _runs_of(title: str) -> list[list[dict[str, Any]]]:
    """Return the runs that reconstruct and those that store."""
    file, *labels = CIFAR_RUNS[title]
    return [[run for run in result(file)["runs"] if run["label"] == label] for label in labels]


def _final(runs: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{run['epochs'][-1]['val_top1']:.2f}" if run["status"] == "finished" else "diverged" for run in runs
    )


# --- experiments ---

PAPERS = {  # the first pattern that matches the name of a file
    "imagenet_resnet50_a?": "ResNet strikes back",
    "imagenet_convnext_*": "ConvNeXt",
    "imagenet_deit_*": "DeiT",
    "imagenet_swin_*": "Swin",
    "imagenet_revcol_*": "RevCol",
    "revcol_*": "RevCol",
    "*revbifpn_*": "RevBiFPN",
    "imagenet_*": "",
    "cityscapes_*": "InPlace-ABN",
    "coco_stuff_*": "InPlace-ABN",
    "vistas_*": "InPlace-ABN",
    "*_ipabn*_lr_*": "InPlace-ABN",
    "*_stdbn_lr_*": "InPlace-ABN",
    "*revnext*": "RevNeXt",
    "irevnet*": "i-RevNet",
    "*revnet*": "RevNet",
    "resnet101_preact": "RevNet",
    "resnet*_cifar10*": "RevNet",
}
SCORED_RUNS = {  # experiment: file of the results of its runs
    "quickstart_fashion_mnist": "quickstart",
    "quickstart_scenes": "quickstart_segmentation",
    "scenes_revbifpn_s0_short": "scenes_revbifpn",
}
SHORT_RUNS = {  # experiment: title of its runs in `CIFAR_RUNS`
    "resnet32_cifar10_short": "ResNet-32",
    "revnet38_cifar10_short": "RevNet-38",
    "revnext_flat9_cifar10_short": "RevNeXt, flat 3-3-3, 32 channels",
}


def experiments() -> str:
    """The experiments with the settings that their scores depend on."""
    rows = []
    for path in sorted(experiments_dir().glob("*.json")):
        experiment, name = load_experiment(path), path.stem
        network, optimizer = experiment.network, experiment.optimizer
        norm = network.norm if isinstance(network, NetworkSpec) else "its own"
        paper = next((paper for pattern, paper in PAPERS.items() if fnmatchcase(name, pattern)), "")
        recipe = [str(optimizer.batch_size), str(optimizer.schedule.epochs)] if experiment.has_recipe else ["", ""]
        rows.append([f"[`{name}`]({path.name})", f"`{network.arch}`", norm, paper, _expected(experiment),
                     _measured(name), *recipe])  # fmt: skip
    headers = ["experiment", "network", "norm", "paper", "expected", "measured here", "batch", "epochs"]
    return table(headers, rows, text_columns=6)


def _expected(experiment: Experiment) -> str:
    """The score of the first protocol under "expected"."""
    if experiment.expected is None:
        return ""
    protocol, score = next(iter(experiment.expected.scores.items()))
    if score.miou is not None:
        return f"{score.miou:.2f} mIoU ({protocol})"
    return f"{score.top1:.2f}{'' if score.top5 is None else f' / {score.top5:.2f}'} ({protocol})"


def _measured(name: str) -> str:
    if name in SCORED_RUNS:
        score = "miou" if load_experiment(name).task == "segmentation" else "top1"
        return ", ".join(f"{run['results'][0][score]:.2f}" for run in _scored_runs(name))
    return _final(_runs_of(SHORT_RUNS[name])[0] or _runs_of(SHORT_RUNS[name])[1]) if name in SHORT_RUNS else ""


def _scored_runs(name: str) -> list[dict[str, Any]]:
    """Return the runs of an experiment of `SCORED_RUNS`."""
    return list(result(SCORED_RUNS[name])["runs"])


def training_recipes() -> str:
    """The recipes for ImageNet, with the scores of their sources."""
    rows = []
    for name in (path.stem for path in sorted(experiments_dir().glob("imagenet_*.json"))):
        experiment = load_experiment(name)
        expected, optimizer = experiment.expected, experiment.optimizer
        assert expected is not None
        score = expected.scores["center224"]
        size, link = f"{optimizer.batch_size:,}", f"[`{name}`]({name}.json)"
        scores = [f"{score.top1}", "" if score.top5 is None else f"{score.top5}"]
        rows.append([link, expected.source, str(optimizer.schedule.epochs), size, *scores])
    headers = ["experiment", "source of the scores", "epochs", "batch size", "top-1, %", "top-5, %"]
    return table(headers, rows, text_columns=2)


# --- grids ---


def grids() -> str:
    """Values in reversible networks, errors of their reconstruction, and what a grid changes in their logits."""
    rows = []
    for name in ("grid", "grid_revnet104"):
        for subject in dict.fromkeys(record["subject"] for record in result(name)["records"]):
            values = [each["median"] for each in records(name, "largest value", subject=subject)]
            metric = "largest relative error of reconstruction"
            error = records(name, metric, subject=subject, provider="float32")[0]["median"]
            logits = [
                records(name, "logits, relative difference to float32", subject=subject, provider=provider)[0]["median"]
                for provider in (*(f"grid {bits}" for bits in (10, 12, 14, 16)), "bfloat16")
            ]
            shown = [f"{value:.1e}" for value in (error, *logits)]
            (time,) = records(name, "step ratio", subject=subject, provider="grid 14")
            rows.append([f"`{subject}`", _range(values, ".0f"), *shown, f"{time['median']:.2f}"])
    columns = ("10 bits", "12 bits", "14 bits", "16 bits", "bfloat16")
    logits_of = [f"logits, {column}" for column in columns]
    return table(["network", "largest values", "error without a grid", *logits_of, "time, 14 bits"], rows)


# --- settings ---


def settings() -> str:
    """All settings of experiment files, a table per section."""
    return "\n\n".join(_section(section) for section in describe_settings())


def _section(section: SectionText) -> str:
    rows = []
    for setting in section.settings:
        default = setting.default if setting.default == "required" else f"`{setting.default}`"
        rows.append([f"`{setting.key}`", setting.type, default, _plain(setting.meaning)])
    headers = ["setting", "type", "default", "meaning"]
    title = section.path[:1].upper() + section.path[1:] if " " in section.path else section.path
    return f"## {title}\n\n{_plain(section.meaning)}\n\n{table(headers, rows, text_columns=4)}"


# --- zoo benchmark loaders ---

LOADERS = {
    "zoo-shards": "zoo, shards",
    "dali": "DALI, on the CPU",
    "torchvision-tensors": "torchvision, 8-bit tensors",
    "torchvision": "torchvision, reference pipeline (float32)",
    "timm": "timm",
    "spdl": "SPDL",
    "webdataset": "webdataset, PIL",
}


def loaders() -> str:
    """Images per second and core of training loaders with each number of workers, relative to zoo's."""
    files = [result(f"loaders_{name}") for name in ("images_110kb", "images_resized")]
    columns = {
        f"{file['settings']['mean bytes'] / 1000:.0f} KB, {workers} worker{'s' * (workers != '1')}": own
        for file in files
        for workers, own in file["loaders"].items()
    }
    found = list(columns.values())

    def cell(own: dict[str, Any], name: str) -> str:
        if name not in own:
            return ""
        ratio, (least, most) = own[name]["per core"]["ratio"], own[name]["per core"]["range"]
        return f"{ratio:.2f} ({least:.2f} to {most:.2f})"

    rows = [["zoo, images/s and core", *(f"{own['zoo']['per core']['images_per_s']:.0f}" for own in found)]]
    rows += [[text, *(cell(own, name) for own in found)] for name, text in LOADERS.items()]
    return table(["", *columns], rows)


def _range(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


SECTIONS: dict[str, Callable[[], str]] = {
    "training_recipes": training_recipes,
    "lean_sweep": lean_sweep,
    "lean_little": lean_little,
    "libraries": libraries,
    "gpu_layers": gpu_layers,
    "gpu_models": gpu_models,
    "gpu_lean": gpu_lean,
    "lean_inductor": lean_inductor,
    "headline": headline,
    "step_times": step_times,
    "reproduction": reproduction,
    "scoreboard": scoreboard,
    "networks": networks,
    "options": options,
    "published": published_scores,
    "held": held,
    "grids": grids,
    "reversible": reversible,
    "families": families,
    "depth": depth,
    "cifar10": cifar10,
    "layers": layers,
    "models": models,
    "fastest": fastest,
    "revnets": revnets,
    "whole_steps": whole_steps,
    "lean_summary": lean_summary,
    "lean_networks": lean_networks,
    "lean_beside": lean_beside,
    "lean_budgets": lean_budgets,
    "report_error": report_error,
    "loaders": loaders,
    "replicas": replicas,
    "experiments": experiments,
    "settings": settings,
}


def sections_of(text: str) -> dict[str, str]:
    """Return the text between each pair of markers, by name."""
    return {match[2]: match[3] for match in MARKERS.finditer(text)}


def rewrite(text: str) -> str:
    """Return ``text`` with all generated tables up to date."""
    return MARKERS.sub(lambda match: f"{match[1]}{SECTIONS[match[2]]()}\n{match[4]}", text)
