"""Scores a network on a folder of images: `score`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.config.network import ExternalSpec
from zoo.data.classes import match_classes
from zoo.data.dataset import Batch
from zoo.data.named import open_data
from zoo.data.sources.location import DataName, parse_data_path
from zoo.engine._consistency import SHOWN_DIGITS, check_same_on_all_ranks, dataset_fingerprint, environment_fingerprint
from zoo.engine._digest import digest
from zoo.engine._process import Process
from zoo.engine._stop import end_workers_on_error
from zoo.engine._task import EvalProtocol, Result
from zoo.engine._validation import validate
from zoo.errors import ConfigError, escape, join_names
from zoo.models.build import build_on_meta
from zoo.models.external import check_logits
from zoo.registry.load_network import LoadedNetwork, as_loaded
from zoo.run.console import Progress, console, environment_rank
from zoo.run.environment import describe_environment
from zoo.run.label_images import names_of
from zoo.run.results_table import class_table, results_table
from zoo.tasks import task_of
from zoo.tasks.confusion import MAX_CLASSES, ConfusionTally
from zoo.tasks.protocols import CropProtocol
from zoo.tasks.segmentation import SegmentationResult


def score(
    network: LoadedNetwork | str | os.PathLike[str],
    data: str | os.PathLike[str] | DataName,
    protocol: EvalProtocol | str | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    process: Process | None = None,
    workers: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    log_every: int | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
    split: str = "val",
    verbose: bool = True,
) -> Result:
    """Score a network on the images of ``data``/val, each image exactly once.

    The network's experiment determines the task. The ``protocol`` determines the crops for classification; segmentation
    is scored on whole images, with logits resized to the label maps.

    >>> import zoo
    >>> result = zoo.score("runs/mine/checkpoint.pth.tar", "data")
    >>> print(f"{result.protocol}: {result.count} images, top-1 between 0 and 100 %: {0 <= result.top1 <= 100}")
    center10-scale12: 7 images, top-1 between 0 and 100 %: True

    Args:
    - `network`: a name for `zoo.load_network`, or its result. The model is moved to the device of ``process``.
    - `data`: folder with val/ with a folder per class or shards, also by URL (https://host/path, s3://bucket/path); for
      segmentation a folder as ``segmentation.layout`` says; or the name of a data set, torchvision:NAME or hf:NAME.
      Classes are matched to the network's outputs by name, see `match_classes`.
    - `protocol`: evaluation protocol, or the name of a published one, such as "center224" or, for segmentation,
      "whole-flip"; default: the protocol of the network's experiment.
    - `weights`: weights file or published name; default: the weights of ``network``.
    - `process`: this process of a distributed run (all processes get the same result); default: a single process, on a
      CUDA device if available.
    - `workers`: worker processes that read images; with 0 this process reads them itself.
    - `batch_size`: images per batch and process, for classification; default: the experiment's batch size (a tenth of
      it for ten crops) divided by the number of processes. Segmentation scores one image at a time.
    - `limit`: number of images to score, spread evenly over the data; default: all.
    - `log_every`: batches between two progress lines, if no bar is drawn; default: a line every 30 seconds.
    - `record`: called with each batch of this process and its logits.
    - `split`: the folder in ``data``, for classification.
    - `verbose`: whether progress and warnings are shown.

    Raises ConfigError for an unknown protocol, a protocol of another task, crops that do not fit the network, and on
    every process if processes have different arguments. Raises DataError for unsuitable data.
    """
    with console(environment_rank() if process is None else process.rank, verbose):
        network = as_loaded(network, weights)
        process, protocol = process or single_process(), _resolve_protocol(network, protocol)
        settings = network.experiment
        task = task_of(settings)
        if isinstance(settings.network, ExternalSpec) and isinstance(protocol, CropProtocol):
            model = build_on_meta(settings.network).eval()
            check_logits(model, settings.network.arch, settings.network.num_classes, protocol.crop, "the crop")
        loader = task.build_val_loader(
            open_data(parse_data_path(data)),
            protocol,
            process.loader_options(workers),
            batch_size=batch_size,
            limit=limit,
            split=split,
        )
        match_classes(loader.dataset, settings.network.num_classes, network.class_names)
        check_same_on_all_ranks(
            process,
            lambda: {
                **environment_fingerprint(process, "validate"),
                "protocol": protocol.name,
                "training.amp": settings.training.amp,
                "weights": digest(network.model.state_dict())[:SHOWN_DIGITS],
                "val": dataset_fingerprint(loader.dataset, loader.batch_sampler.num_images),
            },
            "give every process the same command, weights and images",
        )
        num_classes = settings.network.num_classes
        has_matrix = settings.task == "classification" and num_classes <= MAX_CLASSES
        tally = ConfusionTally(num_classes) if has_matrix else None
        recorders = [each for each in (tally, record) if each is not None]

        def record_all(batch: Batch, logits: Tensor) -> None:
            for each in recorders:
                each(batch, logits)

        with (
            end_workers_on_error(loader.stop_workers),
            Progress(protocol.name, len(loader), show=process.is_main, every=log_every) as progress,
        ):
            result = validate(
                network.model.to(process.device),
                task,
                loader,
                process.device,
                process.world_size,
                protocol=protocol,
                amp=settings.training.amp,
                advance=progress.advance,
                record=record_all,
            )
        details: dict[str, Any] = {"val": dataset_fingerprint(loader.dataset, len(loader.dataset))}
        if tally is not None:
            counts = process.gather(tally.counts.cpu())
            details["confusion"] = process.broadcast(sum(counts).tolist() if counts else None)
        return replace(result, **details)  # type: ignore[type-var]


@dataclass(frozen=True)
class Scores:
    """The scores of a network: a Markdown table, the content of a result file, and the result if there is one."""

    table: str
    content: Mapping[str, Any]
    result: Result | None = None


def score_data(
    network: LoadedNetwork,
    data: str | os.PathLike[str] | DataName,
    protocol: EvalProtocol | str | None = None,
    *,
    process: Process,
    **options: Any,
) -> Scores:
    """Run `score`; return table and result file, for a segmentation with a table of the classes."""
    result = score(network, data, protocol, process=process, **options)
    table = results_table(
        network.title, task_of(network.experiment).shown_labels, [result], network.experiment.expected
    )
    content = result_json(network, result, process)
    if isinstance(result, SegmentationResult):
        names = names_of(network.experiment, network.class_names)
        table, content = f"{table}\n\n{class_table(result, names)}", {**content, "classes": names}
    return Scores(table, content, result)


def result_json(network: LoadedNetwork, result: Result, process: Process | None = None) -> dict[str, Any]:
    """Return the content of a result file: scores, digests of the weights, environment."""
    md5, sha256 = network.digests()
    environment = describe_environment((process or single_process()).device)
    return {**result.to_json(md5, environment), "weights_sha256": sha256}


def single_process() -> Process:
    """Return the process of a run that is not distributed, with a CUDA device if available."""
    return Process(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _resolve_protocol(network: LoadedNetwork, protocol: EvalProtocol | str | None) -> EvalProtocol:
    """Return the protocol for a protocol, a name or None. Raises ConfigError for a protocol of another task."""
    task = task_of(network.experiment)
    known, own = task.protocols, task.own_protocol
    if protocol is None or type(protocol) is type(own):
        return protocol or own
    if not isinstance(protocol, str):
        raise ConfigError(f"protocol {protocol.name} is not for {network.experiment.task}, the task of {network.title}")
    if protocol not in known:
        what = f"{escape(protocol)!r} is not a published protocol"
        raise ConfigError(what, remedy=f"those are {join_names(known)}")
    return known[protocol]
