"""Scores on variants of ImageNet: the classes, images and measures of each.

- ImageNet-A and -R (Hendrycks et al. 2021): 200 classes of ImageNet in folders named by wnid. As in the authors' code,
  the network chooses only among these classes.
- ImageNet-Sketch (Wang et al. 2019): folders named by wnid.
- ImageNet-V2 (Recht et al. 2019): folders named by the number of the class.
- ImageNet-ReaL (Beyer et al. 2020): the validation set with several labels per image, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.data.dataset import open_source
from zoo.data.imagenet import NUM_CLASSES, imagenet_wnids
from zoo.engine._process import Process
from zoo.engine._task import EvalProtocol, Result
from zoo.errors import ConfigError, DataError, escape
from zoo.registry.load_network import LoadedNetwork
from zoo.run.real_labels import read_real_labels, real_labels_of
from zoo.run.results_table import results_table
from zoo.run.scoring import Scores, result_json, score, single_process
from zoo.tables import Cell, counted, markdown_table
from zoo.tasks import task_of
from zoo.tasks.classification import LABELS, TOP_K, standard_error
from zoo.tasks.prediction import PredictionCollector

logger = logging.getLogger(__name__)

REAL_LABELS = "real.json"


RESTRICTED = ("imagenet-a", "imagenet-r")  # the network chooses only among the classes of the folders
NUM_RESTRICTED = 200  # class folders in each of these sets


def score_set(
    network: LoadedNetwork,
    folder: Path,
    name: str,
    protocol: EvalProtocol | str | None = None,
    *,
    process: Process | None = None,
    record: PredictionCollector | None = None,
    **options: Any,
) -> Scores:
    """Score a network with ImageNet's classes on the robustness set ``name`` in ``folder``.

    Args:
    - `folder`: the unpacked set: class folders, or shards of them; for "imagenet-real" a folder with val/, the class
      folders of ImageNet's validation set, and real.json.
    - `name`: "imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-sketch" or "imagenet-real".
    - `protocol`, `process`, `record`, `options`: as for `zoo.score`. The default is the protocol of the network.

    Raises ConfigError for a network with other classes, DataError for a folder with other contents, and the errors of
    `zoo.score`.
    """
    process = process or single_process()
    if network.experiment.network.num_classes != NUM_CLASSES or tuple(network.class_names or imagenet_wnids()) != (
        imagenet_wnids()
    ):
        what = f"{network.title} does not have the {NUM_CLASSES:,} classes of ImageNet in their order"
        raise ConfigError(what, f"--set {name}", "give a network that was trained on ImageNet")
    network = replace(network, class_names=imagenet_wnids())
    settings = {"process": process, "record": record, **options}
    if name == "imagenet-real":
        return _score_real(network, folder, protocol, settings)
    result = _score_variant(network, folder, name, protocol, settings)
    table = results_table(f"{network.title}, {name}", task_of(network.experiment).shown_labels, [result], None)
    return Scores(table, {"set": name, **result_json(network, result, process)})


def _score_variant(
    network: LoadedNetwork, folder: Path, name: str, protocol: EvalProtocol | str | None, settings: Mapping[str, Any]
) -> Result:
    if name == "imagenet-v2":
        network = replace(network, class_names=[str(number) for number in range(NUM_CLASSES)])
    if name in RESTRICTED:
        classes = open_source(folder, allow_empty_classes=True).classes
        if len(classes) != NUM_RESTRICTED:
            logger.warning(
                "%s has %d classes, but the folder has %s; %s",
                name, NUM_RESTRICTED, counted(len(classes), "class folder"), escape(folder),
            )  # fmt: skip
        outputs = [number for number, wnid in enumerate(imagenet_wnids()) if wnid in set(classes)]
        network = replace(network, model=Restricted(network.model, outputs))
    folder = folder.absolute()  # "." has no name
    return score(network, folder.parent, protocol, split=folder.name, **settings)


class Restricted(nn.Module):
    """A classifier that chooses among some of its classes. The logits of all other classes are minus infinity.

    Args:
    - `model`: images -> logits (N, classes).
    - `outputs`: the numbers of the remaining classes.
    """

    def __init__(self, model: nn.Module, outputs: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self._outputs = list(outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, classes)."""
        logits = self.model(images)
        restricted = torch.full_like(logits, -torch.inf)
        restricted[:, self._outputs] = logits[:, self._outputs]
        return restricted


def _score_real(
    network: LoadedNetwork, folder: Path, protocol: EvalProtocol | str | None, settings: Mapping[str, Any]
) -> Scores:
    labels = read_real_labels(folder / REAL_LABELS)
    process: Process = settings["process"]
    collector = settings["record"] or PredictionCollector(folder)
    result = score(network, folder, protocol, **{**settings, "record": collector})
    shares = process.gather(collector.predictions)
    if not process.is_main:
        return Scores("", {})
    predictions = [each for share in shares for each in share]
    truths = real_labels_of({each.path: each.target for each in predictions}, labels)
    labeled = [each for each in predictions if truths[each.path]]
    if not labeled:
        raise DataError("no image has a label of ImageNet-ReaL", folder, "score more images")
    scores = {
        name: 100 * sum(not truths[each.path].isdisjoint(each.classes[:top]) for each in labeled) / len(labeled)
        for name, top in TOP_K.items()
    }
    errors = {name: standard_error(score, len(labeled)) for name, score in scores.items()}
    headers = [
        "network",
        "labels",
        *(f"{LABELS[name]} %" for name in scores),
        *(f"± {LABELS[name]}" for name in scores),
    ]
    row: list[Cell] = [network.title, "ImageNet-ReaL", *scores.values(), *errors.values(), len(labeled)]
    num_without = len(predictions) - len(labeled)
    table = markdown_table([*headers, "images"], [row])
    if num_without:
        table += f"\n\n{num_without:,} more images have no label and are excluded."
    content = result_json(network, result, process)
    del content["loss"]  # it refers to one label per image
    of_real = {**scores, "standard_errors": errors, "count": len(labeled), "without_label": num_without}
    return Scores(table, {"set": "imagenet-real", **content, **of_real})
