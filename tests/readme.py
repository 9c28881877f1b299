"""The figures of the README and of the pages in docs/, experiments/ and tests/, made of golden and result files.

A figure stands between ``<!-- name -->`` and ``<!-- /name -->``. A table or a paragraph has a line for each of the two
markers. What stands within a sentence begins no line, where Markdown would take the marker for a block of HTML.
``python -m tests.readme`` writes all figures anew; tests/test_readme.py fails while a page differs from the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from zoo.architectures import ARCHITECTURES, OPTIONS, REVERSIBLE_TWINS
from zoo.config import Experiment, describe_settings, experiments_dir, load_experiment
from zoo.config.describe import SectionText
from zoo.registry import published
from zoo.reproduce.ledger import counts_in_words
from zoo.reproduce.page_figures import MARKERS
from zoo.run.results_table import results_table
from zoo.tasks.classification import ClassificationResult
from zoo.tasks.significance import standard_error

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs", "docs/results", "experiments", "tests", "csrc")
PAGES = {
    str(path.relative_to(ROOT)): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md"))
    if folder != "docs/results" or path.name == "README.md"  # the others are printed from the numbers beside them
}
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
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def records(name: str, metric: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the records of a benchmark about a metric, with those values; ``shape`` is a list."""
    wanted["metric"] = metric
    found = [record for record in result(name)["records"] if all(record[key] == wanted[key] for key in wanted)]
    assert found, (name, wanted)
    return found


def median(name: str, metric: str, **wanted: Any) -> float:
    """Return the median of the one record with those values."""
    (record,) = records(name, metric, **wanted)
    return float(record["median"])


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table whose first columns are to the left and the others, of numbers, to the right."""
    rule = f"|{' --- |' * text_columns}{' ---: |' * (len(headers) - text_columns)}"
    return "\n".join([f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(text: str) -> str:
    """Return ``text`` with stars that stay stars in Markdown."""
    return text.replace("*", r"\*")


# --- golden files ---


def networks() -> str:
    cases = golden("networks")
    rows = []
    for name in (case for case in cases if "+" not in case):
        stem = cases.get(f"{name}+input_3x3")
        other = ", ".join(f"`{option}`" for option in ARCHITECTURES[name].options if option != "input_3x3")
        rows.append([f"`{name}`", other, f"{cases[name]['parameters']:,}", f"{stem['parameters']:,}" if stem else ""])
    return table(["network", "options", "parameters", "with `input_3x3`"], rows, text_columns=2)


def options() -> str:
    rows = [[f"`{name}`", _plain(option.meaning), _plain(option.values)] for name, option in OPTIONS.items()]
    return table(["option", "what it does", "values"], rows, text_columns=3)


def published_scores() -> str:
    rows, segmenting = [], []
    for name, entry in published().items():
        if entry.experiment.task == "segmentation":
            ((protocol, score),) = entry.scores.items()
            segmenting.append(
                f"`{name}` segments street scenes: {score['miou']:.2f} % mIoU ({protocol}) on the test images of "
                f"Mapillary Vistas ([file]({entry.page}))."
            )
            continue
        scores = [entry.scores[key] for key in ("center224", "tencrop224", "center320")]
        columns = [f"{score['top1']:.2f} / {score['top5']:.2f}" for score in scores]
        rows.append([f"`{name}`", *columns, f"[file]({entry.page})"])
    return "\n\n".join([table(["name", "224", "224, ten crops", "320", "weights"], rows, text_columns=5), *segmenting])


def held() -> str:
    strategies = list(dict.fromkeys(key for row in golden("held_bytes").values() for key in row))
    rows = [
        [f"`{name}`", *(_share(row[key], key) if key in row else "" for key in strategies)]
        for name, row in golden("held_bytes").items()
    ]
    return table(["network", "std-BN, MB", *(f"`{memory}`" for memory in strategies[1:])], rows)


def reversible() -> str:
    strategies = list(golden("reversible_bytes")["resnet101_preact"])
    rows = [
        [f"`{name}`, `{REVERSIBLE_TWINS[name]}`", *(_share(row[key], key) for key in strategies)]
        for name, row in golden("reversible_bytes").items()
    ]
    return table(["network", "std-BN, MB", *strategies[1:]], rows)


def _share(value: float, key: str) -> str:
    return f"{value:.{1 if key == 'standard_mb' else 3}f}"


# --- zoo quickstart ---


def quickstart() -> str:
    """The table that the command prints."""
    experiment = load_experiment(experiments_dir() / "quickstart_fashion_mnist.json")
    first = next(run for run in result("quickstart")["runs"] if run["seed"] == experiment.seed)
    results = [ClassificationResult(**scores) for scores in first["results"]]
    return f"```\n{results_table('quickstart_fashion_mnist', results, experiment.expected)}\n```"


def quickstart_means() -> dict[str, dict[str, float]]:
    """Return the means over the seeds by crop, as the experiment's file has them under "expected"."""
    runs = [run["results"] for run in result("quickstart")["runs"]]
    return {
        scores[0]["protocol"].partition("-")[0]: {
            key: round(mean(s[key] for s in scores), 2) for key in ("top1", "top5")
        }
        for scores in zip(*runs, strict=True)
    }


def quickstart_seeds() -> str:
    runs, environment = result("quickstart")["runs"], result("quickstart")["environment"]
    seeds = " ".join(str(run["seed"]) for run in runs)
    center, ten_crops = (_listed([f"{run['results'][index]['top1']:.1f}" for run in runs]) for index in (0, 1))
    seconds = _range([run["seconds"] for run in runs], ".0f")
    count = runs[0]["results"][0]["count"]
    error = standard_error(mean(run["results"][0]["top1"] for run in runs), count)
    return (
        f"The seeds of `zoo quickstart --seed {seeds}` gave {center} % with the centre crop and {ten_crops} % with ten "
        f"crops\nafter four epochs on 4,000 images; chance is 10 %, and a score on {count:,} images has a standard "
        f"error of {error:.1f} points.\nTraining and scoring took {seconds} seconds each on {environment['threads']} "
        f"cores ({environment['cpu']}, PyTorch {environment['torch'].partition('+')[0]})."
    )


def quickstart_segmentation() -> str:
    runs, environment = (result("quickstart_segmentation")[key] for key in ("runs", "environment"))
    miou = _listed([f"{run['results'][0]['miou']:.1f}" for run in runs])
    seconds = _range([run["seconds"] for run in runs], ".0f")
    return (
        f"Its seeds {_listed([str(run['seed']) for run in runs])} gave {miou} % mIoU on "
        f"{runs[0]['results'][0]['count']} scenes. Training and scoring took {seconds} seconds each on "
        f"{environment['threads']} cores\n({environment['cpu']}, PyTorch {environment['torch'].partition('+')[0]})."
    )


# --- zoo benchmark layer ---


def reference_times() -> str:
    """How many times as long plain PyTorch operations take as the C++ kernels, float32, over all shapes and layouts."""
    return _range(_reference_over_native("float32"), ".1f")


def reference_times_half() -> str:
    """The same in bfloat16."""
    return _range(_reference_over_native("bfloat16"), ".1f")


def _reference_over_native(dtype: str) -> list[float]:
    about = {"subject": "norm + activation", "dtype": dtype}
    slow, fast = ([record["median"] for record in records("layer_cpu", "time", provider=f"iABN {name}", **about)]
                  for name in ("reference", "native"))  # fmt: skip
    return [mine / other for mine, other in zip(slow, fast, strict=True)]


LAYER_SHAPES = [[32, 64, 112, 112], [32, 256, 56, 56], [32, 512, 28, 28], [32, 1024, 14, 14]]


def layers() -> str:
    def row(title: str, provider: str, dtype: str, layout: str) -> list[str]:
        about = {"subject": "norm + activation", "provider": provider, "dtype": dtype, "layout": layout}
        return [title, *(f"{median('layer_cpu', 'time ratio', shape=shape, **about):.2f}" for shape in LAYER_SHAPES)]

    cases = [(dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("contiguous", "channels_last")]
    rows = [row(", ".join(case), "iABN native", *case) for case in cases]
    compiled = "the same by torch.compile of the two modules, float32, contiguous"
    rows.append(row(compiled, "compiled std-BN", "float32", "contiguous"))
    return table(["", *(f"{shape[1]} x {shape[2]}²" for shape in LAYER_SHAPES)], rows)


def minimal_traffic() -> str:
    """Time over that of the minimal traffic, over the cells of the table of layers."""
    about = {"subject": "norm + activation", "provider": "iABN native"}
    found = [
        record for shape in LAYER_SHAPES for record in records("layer_cpu", "/ minimal traffic", shape=shape, **about)
    ]
    return _range([record["median"] for record in found], ".2f")


# --- zoo benchmark model and pareto ---


def headline() -> str:
    """What a training step takes, divided by what it takes with standard batch norm."""
    files = {
        ("torchvision's ResNet-50, `zoo.lean`", "lean_resnet50"): ("torchvision:resnet50", "std-BN lean"),
        ("`resnet50`, in-place norms", "model_cpu"): ("resnet50", "iABN"),
        ("`resnext101`, in-place norms", "model_cpu_3x3"): ("resnext101 3x3 stem", "iABN"),
        ("`densenet264`, in-place norms", "model_cpu_3x3"): ("densenet264 3x3 stem", "iABN"),
        ("`revnet164_cifar`", "pareto_revnet164"): ("resnet164_cifar", "RevNet"),
        ("`revnet164_cifar`, in-place norms", "pareto_revnet164"): ("resnet164_cifar", "RevNet, iABN"),
    }
    rows = [
        [title, *(f"{median(file, metric, subject=subject, provider=provider):.2f}"
                  for metric in ("held ratio", "peak ratio", "step ratio"))]
        for (title, file), (subject, provider) in files.items()
    ]  # fmt: skip
    return table(["", "bytes held for backward", "peak bytes of a step", "time of a step"], rows)


def machine() -> str:
    """The machines, threads and versions of all benchmarks that the README quotes."""
    names = ["layer_cpu", "model_cpu", "model_cpu_3x3", *(f"pareto_{name}" for name in PARETO), *REVNETS.values()]
    found = {
        f"{result(name)['machine']['cpu']} with PyTorch {result(name)['versions']['torch'].partition('+')[0]}": None
        for name in names
    }
    return _listed(list(found))


def models() -> str:
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


def half_held() -> str:
    """What resnet50 holds under autocast, over standard batch norm."""
    return f"{median('model_cpu_bf16', 'held ratio', subject='resnet50', provider='iABN'):.2f}"


def fastest() -> str:
    """The fastest point of each compiled norm: time with its spread, and peak."""

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
    rows = {"ResNet, checkpointed": "std-BN checkpointed", "ResNet, iABN": "iABN", "RevNet": "RevNet",
            "ResNet, iABN, checkpointed": "iABN checkpointed", "RevNet, iABN": "RevNet, iABN"}  # fmt: skip
    order = [*list(rows)[:2], "ResNet, iABN, checkpointed", "RevNet", "RevNet, iABN"]
    cells = [
        [title, *(f"{median(file, metric, provider=rows[title]):.2f}"
                  for file in REVNETS.values() for metric in ("step ratio", "peak ratio"))]
        for title in order
    ]  # fmt: skip
    return table(["", *(head for name in REVNETS for head in (f"`{name}` time", "peak"))], cells)


def reconstruction_times() -> str:
    """The time of a step that reconstructs over that of the same RevNet with stored activations."""
    steps = [
        [median(file, "step", provider=provider) for provider in ("RevNet", "RevNet stored")]
        for file in REVNETS.values()
    ]
    return _listed([f"{reconstructed / stored:.2f}" for reconstructed, stored in steps])


# --- zoo benchmark lean ---

LEAN_NETWORKS = {
    "torchvision:resnet50": "ResNet-50",
    "timm:efficientnet_b0": "EfficientNet-B0",
    "torchvision:densenet121": "DenseNet-121",
    "timm:convnext_tiny": "ConvNeXt-T",
    "timm:vit_small_patch16_224": "ViT-S/16",
}


def lean_networks() -> str:
    """What a lean step holds and takes, divided by a plain one."""

    def cell(file: str, name: str, metric: str) -> str:
        about = {"subject": name, "provider": "lean", "metric": metric}
        found = [record for record in result(file)["records"] if about.items() <= record.items()]
        return _with_spread(found[0]) if found else ""

    metrics = ("held ratio", "peak without gradients ratio", "step ratio")
    rows = [
        [title, *(cell("lean_networks", name, metric) for metric in metrics), cell("lean_inexact", name, "step ratio")]
        for name, title in LEAN_NETWORKS.items()
    ]
    return table(["", "bytes held", "peak bytes", "time of a step", "time with `exact=False`"], rows)


def lean_sweep() -> str:
    """How many networks of timm and torchvision train lean with the same bits, and what they hold."""
    sentences = []
    for package, file in (("timm", "lean_sweep"), ("torchvision", "lean_sweep_torchvision")):
        found = {r["metric"]: r["median"] for r in result(file)["records"] if r["subject"].startswith("all ")}
        trained, same = (int(found[metric]) for metric in ("networks that train", "with the same bits"))
        left_out = sum(note.startswith("not measured") for note in result(file)["notes"])
        middle, high, worst = (
            f"{found[f'held ratio, {which}']:.2f}" for which in ("median", "90th percentile", "worst")
        )
        sentences.append(
            f"- {package}: the smallest network of each of {trained + left_out} families was to train a step; "
            f"{left_out} could not be trained\n"
            f"  plainly on such images alone. Of the other {trained}, {same} have the bits of plain training when "
            f"they are lean. Half of\n  them hold at most {middle} of the bytes, nine of ten at most {high}, and all "
            f"at most {worst}."
        )
    return "\n".join(sentences)


def lean_beside() -> str:
    """What a step of ResNet-50 takes in each strategy, divided by plain training."""
    rows = []
    for record in records("lean_resnet50", "step ratio"):
        name = record["provider"]
        others = [f"{median('lean_resnet50', metric, provider=name):.2f}" for metric in ("held ratio", "peak ratio")]
        rows.append([name, *others, _with_spread(record)])
    return table(["", "bytes held", "peak bytes", "time of a step"], rows)


def lean_overhead() -> str:
    """What Python takes for each operation."""
    (forward, nothing), (backward, _) = (
        [
            median("lean_networks", f"more per operation, {phase}", provider=name)
            for name in ("lean", "mode that does nothing")
        ]
        for phase in ("forward", "backward")
    )
    return (
        f"{forward:.0f} us in forward, of which any mode written in Python takes {nothing:.0f}, and {backward:.0f} us "
        "in backward"
    )


# --- zoo benchmark predict ---


def predicted_norms() -> str:
    """The norms of ResNet-50 by the shape of their input: bytes, predicted time and share of the copy's rate."""
    batches = (32, 256)
    rows = []
    for record in result(f"predict_resnet50_{batches[0]}")["records"]:
        if record["metric"] != "launches":
            continue
        everything = "all norms" in record["subject"]
        _, channels, height, width = record["shape"]
        row = ["all", ""] if everything else [f"{channels} x {height} x {width}", ""]
        for batch in batches:
            name = f"predict_resnet50_{batch}"
            given = {"subject": record["subject"], "shape": [batch, channels, height, width]}
            if not everything:
                row[1] = f"{median(name, 'layers', **given):.0f}"
            values = [median(name, metric, **given) for metric in ("bytes", "time", "all")]
            row += [f"{value:,.0f}" for value in values]
        rows.append(row)
    headers = [f"{what}, batch {batch}" for batch in batches for what in ("MB", "us predicted", "% of the copy's rate")]
    return table(["input of a norm", "norms", *headers], rows)


def predicted_assumptions() -> str:
    """What the predictions assume of the GPU, from their note."""
    (note,) = (note for note in result("predict_resnet50_256")["notes"] if note.startswith("assumed"))
    return str(note)


# --- zoo benchmark scaling and checkpoint ---

SCALING = "scaling_resnet50"


def scaling() -> str:
    """What the model says of each count of accelerators."""
    rows = []
    for provider in [record["provider"] for record in records(SCALING, "efficiency, nothing hidden")]:
        low, high = (
            f"{median(SCALING, f'efficiency, {which} hidden', provider=provider):.2f}"
            for which in ("nothing", "gradients")
        )
        cores = math.ceil(median(SCALING, "cores that decode", provider=provider))
        rates = [median(SCALING, metric, provider=provider) for metric in ("network of each", "disk")]
        values = [f"{cores:,}", *(f"{rate:,.0f}" for rate in rates)]
        images = f"{median(SCALING, 'images in a day', provider=provider):,.0f}"
        rows.append([f"{int(provider.split()[0]):,}", low if low == high else f"{low} to {high}", images, *values])
    headers = ["accelerators", "efficiency", "million images in a day", "cores that decode", "network of each, MB/s"]
    return table([*headers, "disk, MB/s"], rows)


def scaling_assumptions() -> str:
    """The settings that the model was given."""
    settings, (num_images, _, side, _) = result(SCALING)["settings"], records(SCALING, "disk")[0]["shape"]
    return "\n".join(
        [
            f"- ResNet-50 with norms that are synchronised, {num_images} images of {side} x {side} per accelerator",
            f"- {settings['images/s of one accelerator']:,.0f} images/s by one accelerator alone",
            f"- {settings['bandwidth, GB/s']:.0f} GB/s in each direction of each accelerator, and "
            f"{settings['latency, us']:.0f} us for a message",
            f"- {settings['images/s of a core']:,.0f} images/s read, decoded and augmented by a core, and as many "
            "cores as it takes",
            f"- {settings['kB of an image']:.0f} kB for an image",
        ]
    )


def scaling_check() -> str:
    """Measured and predicted steps of processes of this machine."""
    rows = []
    for record in records(SCALING, "measured"):
        predicted, ratio = (
            median(SCALING, metric, provider=record["provider"]) for metric in ("predicted", "predicted / measured")
        )
        measured = f"{record['median']:.0f} ({record['spread']:.0f})"
        rows.append([record["provider"], measured, f"{predicted:.0f}", f"{ratio:.2f}"])
    return table(["", "measured, ms", "predicted, ms", "predicted / measured"], rows)


def checkpoint_pause() -> str:
    """How long training stands still for a checkpoint."""
    name, beside = "checkpoint_resnet50", "written beside a step"
    pause, waiting = (median(name, "pause", provider=provider) for provider in (beside, "written while training waits"))
    share = _with_spread(*records(name, "pause / waiting"))
    alone, slowed = (median(name, "step", provider=provider) for provider in ("none", beside))
    return (
        f"{pause:.0f} ms for a ResNet-50 with momentum and moving average, and for {waiting:,.0f} ms where it waited "
        f"for the disk; the ratio is {share}. A step beside the write took {slowed / alone:.1f} times as long as others"
    )


def _with_spread(record: dict[str, Any]) -> str:
    return f"{record['median']:.2f}" + (f" ({record['spread']:.2f})" if record["n"] > 1 else "")


# --- training runs ---

CIFAR_RUNS = {  # title: file, label of the runs that reconstruct, label of those that store
    "ResNet-32": ("revnet_runs", None, "resnet32_cifar10_short"),
    "RevNet-38": ("revnet_runs", "revnet38_cifar10_short", "revnet38_cifar10_short, stored"),
    "RevNeXt, hybrid": ("cifar10_revnext", "RevNeXt reconstructed", "RevNeXt stored"),
    **{f"RevNeXt, flat, {layers} layers": ("cifar10_flat", f"{layers} layers reconstructed", f"{layers} layers stored")
       for layers in (3, 9, 12)},
}  # fmt: skip


def cifar10() -> str:
    headers = ["", "training images", "validation images", "standard error, points", "reconstructed", "stored"]
    rows = []
    for title, (file, *_) in CIFAR_RUNS.items():
        content, by_label = result(file), _runs_of(title)
        runs = [run for of_label in by_label for run in of_label]
        finished = [run["epochs"][-1]["val_top1"] for run in runs if run["status"] == "finished"]
        # Of each run, or, in the files that were shortened by hand, of all runs in it.
        (trained,), (scored,) = (
            {run.get(key, content.get(key)) for run in runs} for key in ("num_training_images", "num_validation_images")
        )
        share = mean(finished) / 100
        error = 100 * math.sqrt(share * (1 - share) / scored)
        rows.append([title, f"{trained:,}", f"{scored:,}", f"{error:.1f}", *map(_final, by_label)])
    return table(headers, rows)


def _runs_of(title: str) -> list[list[dict[str, Any]]]:
    """Return the runs that reconstruct and those that store."""
    file, *labels = CIFAR_RUNS[title]
    return [[run for run in result(file)["runs"] if run["label"] == label] for label in labels]


def _final(runs: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{run['epochs'][-1]['val_top1']:.2f}" if run["status"] == "finished" else "diverged" for run in runs
    )


def gradient_angle() -> str:
    """The largest angle between the gradients of a batch from stored and from reconstructed activations, in a run."""
    (run,) = [run for run in result("revnet_runs")["runs"] if run.get("angles")]
    degrees = max(angle["degrees"] for angle in run["angles"])
    return f"{degrees:.1g} degrees in a run of {run['angles'][-1]['step']} steps"


def flat_errors() -> str:
    """How often what a flat network of nine layers found again was further off than it is large."""
    (run,) = [run for run in result("cifar10_flat")["runs"] if run["label"] == "9 layers reconstructed"]
    worst = [step["worst_relative_error"] for step in run["reconstruction"]]
    above = [error for error in worst if error > 1]
    return f"{len(above)} of the {len(worst)} steps that were metered ({_listed([f'{error:.2f}' for error in above])})"


# --- experiments ---

PAPERS = {  # the first pattern that matches the name of a file
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
QUICKSTARTS = {  # experiment: file of the results of its seeds
    "quickstart_fashion_mnist": "quickstart",
    "quickstart_scenes": "quickstart_segmentation",
}
SHORT_RUNS = {  # experiment: title of its runs in `CIFAR_RUNS`
    "resnet32_cifar10_short": "ResNet-32",
    "revnet38_cifar10_short": "RevNet-38",
    "revnext_cifar10_short": "RevNeXt, hybrid",
    **{f"revnext_flat{layers}_cifar10_short": f"RevNeXt, flat, {layers} layers" for layers in (3, 9, 12)},
}


def experiments() -> str:
    rows = []
    for path in sorted(experiments_dir().glob("*.json")):
        experiment, name = load_experiment(path), path.stem
        network, optimizer = experiment.network, experiment.optimizer
        paper = next((paper for pattern, paper in PAPERS.items() if fnmatchcase(name, pattern)), "")
        rows.append([f"[`{name}`]({path.name})", f"`{network.arch}`", network.bn_mode, paper, _expected(experiment),
                     _measured(name), _cost(name), str(optimizer.batch_size),
                     str(optimizer.schedule.epochs)])  # fmt: skip
    headers = ["experiment", "network", "norm", "paper", "expected", "measured here", "cost", "batch", "epochs"]
    return table(headers, rows, text_columns=7)


def _expected(experiment: Experiment) -> str:
    """The score of the first protocol under "expected"."""
    if experiment.expected is None:
        return ""
    protocol, score = next(iter(experiment.expected.scores.items()))
    if score.miou is not None:
        return f"{score.miou:.2f} mIoU ({protocol})"
    return f"{score.top1:.2f}{'' if score.top5 is None else f' / {score.top5:.2f}'} ({protocol})"


def _measured(name: str) -> str:
    if name in QUICKSTARTS:
        score = "miou" if load_experiment(name).task == "segmentation" else "top1"
        return ", ".join(f"{run['results'][0][score]:.2f}" for run in _runs_of_quickstart(name))
    return _final(_runs_of(SHORT_RUNS[name])[0] or _runs_of(SHORT_RUNS[name])[1]) if name in SHORT_RUNS else ""


def _cost(name: str) -> str:
    if name not in QUICKSTARTS:
        return ""
    runs = _runs_of_quickstart(name)
    threads = result(QUICKSTARTS[name])["environment"]["threads"]
    return f"{_range([run['seconds'] for run in runs], '.0f')} s on {threads} CPU cores"


def _runs_of_quickstart(name: str) -> list[dict[str, Any]]:
    """Return the runs of an experiment of `QUICKSTARTS`."""
    return list(result(QUICKSTARTS[name])["runs"])


# --- settings ---


def settings() -> str:
    """All settings of experiment files, a table per section."""
    return "\n\n".join(_section(section) for section in describe_settings())


def _section(section: SectionText) -> str:
    rows = []
    for setting in section.settings:
        kind, *bounds, default = setting.facts()
        words = default.removeprefix("default ")
        rows.append([f"`{setting.key}`", ", ".join([kind, *bounds]), words if words == "required" else f"`{words}`",
                     _plain(setting.meaning)])  # fmt: skip
    title = section.path if " " in section.path else f"`{section.path}`"
    headers = ["setting", "type", "default", "meaning"]
    return f"**{title}**: {_plain(section.meaning)}\n\n{table(headers, rows, text_columns=4)}"


# --- bytes per pixel ---


def pixels() -> str:
    """Bytes per pixel of the hybrid and of the flat network."""
    return _listed([_bytes_per_pixel(name) for name in ("revnext", "revnext_flat")])


def pixels_plain() -> str:
    """The same without compiled kernels."""
    return _listed([_bytes_per_pixel(f"{name}, plain torch kernels") for name in ("revnext", "revnext_flat")])


def pixels_again() -> str:
    """Those of a hybrid that finds the inputs of its branches again."""
    return _bytes_per_pixel("revnext, branch inputs found again")


def _bytes_per_pixel(name: str) -> str:
    (section,) = [section for section in result("revnext")["sections"] if section["key"] == "pixels"]
    figures = [figure for figure in section["figures"] if figure["what"].startswith(f"{name}: bytes per pixel")]
    (found,) = figures
    return f"{found['measured']:.0f}"


# --- zoo reproduce ---


def reproduction() -> str:
    """How many of the published numbers are in each state."""
    states = result("reproduction")["states"]
    return f"{sum(states.values())} numbers: {_listed(counts_in_words(states))}"


# --- zoo reproduce inplace_abn ---

BODIES = {"resnext101": "ResNeXt-101", "wider_resnet38": "WideResNet-38"}
DATA_SETS = {"cityscapes": "Cityscapes", "coco_stuff": "COCO-Stuff"}
SEGMENTATION_STRATEGIES = ("iABN plain", "iABN", "iABN checkpointed", "iABN unwound, 3x3 redone")


def table_2() -> dict[str, Any]:
    """The section of the report with the pixels of batches."""
    (section,) = [section for section in result("inplace_abn")["sections"] if section["key"] == "table2"]
    return section


def segmentation_pixels() -> str:
    """More pixels of a batch in the memory of standard norms, published and predicted, with the crops that they are."""
    section = table_2()
    figures = {figure["what"]: figure for figure in section["figures"]}

    def gain(value: int, unit: str = "") -> str:
        return f"+{value} %" + unit.removeprefix("%").replace("^2", "²")

    rows = []
    for body, data in ((body, data) for body in BODIES for data in DATA_SETS):
        for regime in ("fixed crop", "fixed batch"):
            found = [figures[f"{data}_{body}, {regime}: {strategy}"] for strategy in SEGMENTATION_STRATEGIES]
            predicted = [gain(figure["measured"], figure["unit"]) for figure in found]
            published_gain = gain(found[1]["published"]["value"])
            rows.append([f"{BODIES[body]}, {DATA_SETS[data]}, {regime}", published_gain, *predicted])
    return table(["", "published, iABN", *SEGMENTATION_STRATEGIES], rows)


def segmentation_memory_gb() -> str:
    """The bytes of the table's first rows."""
    section = table_2()
    return _range([f["measured"] for f in section["figures"] if f["what"].endswith("predicted for one GPU")], ".1f")


def segmentation_exact() -> str:
    """The pixels of the best strategy that changes no bit over those of standard norms."""
    section = table_2()
    return _range([f["measured"] for f in section["figures"] if ": pixels of " in f["what"]], ".1f")


def segmentation_checked() -> str:
    """How far predictions are at most from real steps, in percent."""
    section = table_2()
    checked = [abs(f["measured"]) for f in section["figures"] if f["what"].endswith("prediction over a real step")]
    return f"{max(checked):.1f} % in {len(checked)} steps"


PIPELINES = {
    "train": "training, as published",
    "train_scaled": 'training, decoder "scaled"',
    "train_pil": 'training, decoder "pil"',
    "center": 'centre crop, decoder "torchvision"',
    "center_pil": "centre crop",
    "tencrop": 'ten crops, decoder "torchvision"',
    "tencrop_pil": "ten crops",
}


def input_pipeline() -> str:
    names = ("input_pipeline", "input_pipeline_large")
    files = [result(name) for name in names]
    sizes = [file["settings"]["their bytes, train/"] / 1000 for file in files]
    rows = [
        [
            "bare decoder, images/s",
            *(f"{file['images_per_s']['train']['bare decode_jpeg']:.0f}" for file in files),
        ],
        *([text, *(f"{file['ratios'][key]:.2f}" for file in files)] for key, text in PIPELINES.items()),
    ]
    return table(["", *(f"{size:.0f} KB" for size in sizes)], rows)


def _range(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


SECTIONS: dict[str, Callable[[], str]] = {
    "reproduction": reproduction,
    "headline": headline,
    "quickstart": quickstart,
    "quickstart_seeds": quickstart_seeds,
    "quickstart_segmentation": quickstart_segmentation,
    "reference_times": reference_times,
    "reference_times_half": reference_times_half,
    "networks": networks,
    "options": options,
    "published": published_scores,
    "held": held,
    "reversible": reversible,
    "cifar10": cifar10,
    "gradient_angle": gradient_angle,
    "flat9": flat_errors,
    "pixels": pixels,
    "pixels_plain": pixels_plain,
    "pixels_again": pixels_again,
    "machine": machine,
    "layers": layers,
    "minimal_traffic": minimal_traffic,
    "models": models,
    "fastest": fastest,
    "half_held": half_held,
    "revnets": revnets,
    "reconstruction_times": reconstruction_times,
    "lean_networks": lean_networks,
    "lean_sweep": lean_sweep,
    "lean_beside": lean_beside,
    "lean_overhead": lean_overhead,
    "segmentation_pixels": segmentation_pixels,
    "segmentation_memory_gb": segmentation_memory_gb,
    "segmentation_exact": segmentation_exact,
    "segmentation_checked": segmentation_checked,
    "predicted_norms": predicted_norms,
    "predicted_assumptions": predicted_assumptions,
    "scaling": scaling,
    "scaling_assumptions": scaling_assumptions,
    "scaling_check": scaling_check,
    "checkpoint_pause": checkpoint_pause,
    "input_pipeline": input_pipeline,
    "experiments": experiments,
    "settings": settings,
}


def sections_of(text: str) -> dict[str, str]:
    """Return what stands between each pair of markers, by its name."""
    return {match[2]: match[3] for match in MARKERS.finditer(text)}


def rewrite(text: str) -> str:
    """Return ``text`` with all sections as the files have them."""

    def built(match: re.Match[str]) -> str:
        is_block = match[1].endswith("\n")
        return f"{match[1]}{SECTIONS[match[2]]()}" + "\n" * is_block + match[4].removeprefix("\n" * is_block)

    return MARKERS.sub(built, text)


if __name__ == "__main__":
    for page in PAGES.values():
        page.write_text(rewrite(page.read_text()))
