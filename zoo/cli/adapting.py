"""The data part of ``zoo convert relu-to-leaky-relu``: accuracy before and after, and new running statistics."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.cli.convert import slope
from zoo.config import Experiment, parse_experiment
from zoo.convert import ConversionReport
from zoo.convert.networks import compare, load_network, state_dict_like
from zoo.data.classes import match_classes
from zoo.data.loader import build_train_loader, build_val_loader
from zoo.engine.protocols import Protocol
from zoo.engine.validation import validate
from zoo.errors import ConfigError, DataError, printable
from zoo.layers.norm import ABN
from zoo.weights import NetworkRecord

StateDict = dict[str, Tensor]


def adapt(
    args: argparse.Namespace,
    record: NetworkRecord,
    source_dict: StateDict,
    target_dict: StateDict,
    report: ConversionReport,
) -> tuple[StateDict, ConversionReport, dict[str, Any]]:
    """Return the weights with statistics estimated again if asked for, their report, and both accuracies in percent.

    ``record`` is that of the source, whose class names the class folders are matched by.
    Raises ConfigError for weights without a classifier and DataError for data that cannot be used.
    """
    if "classifier.fc.weight" not in source_dict:
        raise ConfigError(
            f"{printable(args.source)}: has no classifier, so there is no accuracy to measure; leave out --data"
        )
    source = load_network(source_dict, record.arch, activation="relu", **record.options)
    target = load_network(target_dict, record.arch, activation_param=slope(args), **record.options)
    experiment = _experiment(args, record)
    accuracy: dict[str, Any] = {"before": _accuracy(source, args, experiment, record.class_names)}
    accuracy["converted"] = _accuracy(target, args, experiment, record.class_names)
    if args.reestimate:
        num_batches = _reestimate(target, args, experiment)
        target_dict = state_dict_like(target, target_dict)
        accuracy["reestimated"] = _accuracy(target, args, experiment, record.class_names)
        measured: dict[str, Any] = {} if args.no_compare else compare(source.cpu().double(), target.cpu().double())
        reason = f"{report.reason}; running statistics estimated again on {num_batches} batches"
        report = dataclasses.replace(report, reason=reason, **measured)
    return target_dict, report, accuracy


def _experiment(args: argparse.Namespace, record: NetworkRecord) -> Experiment:
    content: dict[str, Any] = {
        "input": {},
        **record.experiment_settings(),
        "optimizer": {"batch_size": args.batch_size},
    }
    content["input"] |= {"crop_train": args.crop, "scale_val": args.scale, "crop_val": args.crop}
    return parse_experiment(content, "the options of zoo convert")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _accuracy(
    model: nn.Module, args: argparse.Namespace, experiment: Experiment, class_names: Sequence[str] | None
) -> dict[str, float]:
    """Return top1, top5 and count of a network on DIR/val."""
    settings = experiment.input
    loader = build_val_loader(
        args.data, scale=args.scale, crop=args.crop, mean=settings.mean, std=settings.std,
        batch_size=args.batch_size, workers=args.workers, on_bad_image=args.on_bad_image,
    )  # fmt: skip
    match_classes(loader.dataset, experiment.network.classes, class_names)
    result = validate(
        model.float().to(_device()), loader, _device(), num_images=loader.batch_sampler.num_images,
        protocol=Protocol(args.scale, args.crop, ten_crops=False),
    )  # fmt: skip
    return {"top1": result.top1, "top5": result.top5, "count": result.count}


@torch.no_grad()
def _reestimate(model: nn.Module, args: argparse.Namespace, experiment: Experiment) -> int:
    """Set the running statistics to the plain average over batches of DIR/train; return how many there were."""
    loader = build_train_loader(args.data, experiment, workers=args.workers, on_bad_image=args.on_bad_image)
    norms = [part for part in model.modules() if isinstance(part, ABN)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:  # dropout stays in evaluation mode
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    num_batches = 0
    for batch in loader:
        if len(batch.images) > 1:
            model(batch.images.to(_device()))
            num_batches += 1
        if num_batches == args.reestimate:
            break
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    if num_batches == 0:
        raise DataError(
            f"{args.data}/train: gives no batch of {args.batch_size} images; give more, or a smaller --batch-size"
        )
    return num_batches
