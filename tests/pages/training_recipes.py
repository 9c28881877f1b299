"""The table of training recipes on docs/training-recipes.md, and timm's command for one of them beside zoo's."""

from __future__ import annotations

import json
from typing import NamedTuple

from zoo.config import experiment_names, leaves, load_experiment

RECIPES = [name for name in experiment_names() if name.startswith("imagenet_")]


class Flag(NamedTuple):
    """A flag of timm's training script with its counterpart: a setting, or words of ``zoo train``."""

    flag: str
    counterpart: str
    note: str = ""


CONVNEXT_COMMAND = [
    Flag("./distributed_train.sh 8", "torchrun --nproc_per_node 8 -m zoo train imagenet_convnext_tiny"),
    Flag("--data-dir DATA", "DATA", "with `train` and `val`"),
    Flag("--workers 8", "--workers 8"),
    Flag("--output runs", "--log-dir runs/convnext"),
    Flag("--model convnext_tiny", "network.arch"),
    Flag("--drop-path 0.1", "network.options.drop_path_rate"),
    Flag("--batch-size 512", "optimizer.batch_size", "over all processes"),
    Flag("--opt adamw", "optimizer.type"),
    Flag("--lr 4e-3", "optimizer.learning_rate"),
    Flag("--weight-decay 0.05", "optimizer.weight_decay"),
    Flag("", "optimizer.decay_norms", "always in timm: no decay of vectors"),
    Flag("", "optimizer.decay_biases"),
    Flag("", "optimizer.clip", "off in timm without `--clip-grad`"),
    Flag("--sched cosine", "optimizer.schedule.type"),
    Flag("--sched-on-updates", "optimizer.schedule.mode"),
    Flag("--epochs 280", "optimizer.schedule.epochs", "with the warm-up"),
    Flag("--warmup-epochs 20", "optimizer.schedule.warmup_epochs"),
    Flag("--warmup-prefix", "optimizer.schedule.decay_after_warmup"),
    Flag("--warmup-lr 0", "optimizer.schedule.warmup_start", "relative to the learning rate"),
    Flag("--min-lr 1e-6", "optimizer.schedule.params.end_factor", "relative to the learning rate"),
    Flag("--model-ema --model-ema-decay 0.9999", "optimizer.ema_decay", "validated instead of the network"),
    Flag("--smoothing 0.1", "optimizer.label_smoothing"),
    Flag("--mixup 0.8", "regularization.mixup"),
    Flag("--cutmix 1.0", "regularization.cutmix"),
    Flag("--aa rand-m9-mstd0.5-inc1", "input.augment_train"),
    Flag("--reprob 0.25", "input.random_erasing_train"),
    Flag("--remode pixel", "input.random_erasing_mode_train"),
    Flag("--train-interpolation bicubic", "input.interpolation_train"),
    Flag("--interpolation bicubic", "input.interpolation_val"),
    Flag("--crop-pct 0.875", "input.scale_val", "224 / 0.875"),
]


def training_recipes() -> str:
    """Return a table of the recipes with the scores of their sources."""
    rows = []
    for name in RECIPES:
        experiment = load_experiment(name)
        expected, optimizer = experiment.expected, experiment.optimizer
        assert expected is not None
        score = expected.scores["center224"]
        rows.append(
            f"| [`{name}`](../experiments/{name}.json) | {optimizer.schedule.epochs} | {optimizer.batch_size:,} "
            f"| {score.top1} | {score.top5} | {expected.source} |"
        )
    head = "| experiment | epochs | batch size | top-1, % | top-5, % | source of the scores |"
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | --- |", *rows])


def convnext_command() -> str:
    """Return timm's command for ConvNeXt-T, that of zoo, and a table with the counterpart of each flag."""
    flags = [each.flag for each in CONVNEXT_COMMAND if each.flag]
    experiment = load_experiment("imagenet_convnext_tiny")
    settings = dict(leaves(experiment.model_dump(mode="json", exclude={"expected"})))
    options = [each.counterpart for each in CONVNEXT_COMMAND if each.counterpart not in settings]
    rows = []
    for each in CONVNEXT_COMMAND:
        value = f" = {json.dumps(settings[each.counterpart])}" if each.counterpart in settings else ""
        rows.append(f"| {f'`{each.flag}`' if each.flag else ''} | `{each.counterpart}{value}` | {each.note} |")
    lines = [" ".join(flags[start : start + 5]) for start in range(0, len(flags), 5)]
    command = " \\\n    ".join(lines)
    table = "\n".join(["| timm | zoo | |", "| --- | --- | --- |", *rows])
    return f"```sh\n{command}\n```\n\n{table}\n\n```sh\n{' '.join(options)}\n```"
