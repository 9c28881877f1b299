"""The accuracies of the scoreboard in the format of model-index files, which Papers with Code and MMPretrain read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Row

ACCURACIES = ("accuracy scored", "accuracy trained")
TASKS = {"miou": "Semantic Segmentation"}
URLS = {
    "inplace_abn": "https://arxiv.org/abs/1712.02616",
    "revnet": "https://arxiv.org/abs/1707.04585",
    "revnext": "https://doi.org/10.1186/s13640-022-00601-w",
}


def model_index(rows: Sequence[Row]) -> str:
    """Return a model-index file: the collections are the papers, the models their networks with published accuracies.

    Metrics are the published ones; a metric that was measured here has a second entry named "(measured here)". JSON is
    YAML, so that the file needs no YAML package.
    """
    models, collections = [], []
    for paper, of_paper in groupby(rows, key=lambda row: row.number.paper):
        collections.append({"Name": paper, "Paper": {"Title": PAPERS[paper].title, "URL": URLS[paper]}})
        by_network: dict[str, list[Row]] = {}
        for row in of_paper:
            is_value = not isinstance(row.number.value, str)
            if row.number.evidence in ACCURACIES and row.number.network and is_value:
                by_network.setdefault(row.number.network, []).append(row)
        models += [_model(paper, network, of_network) for network, of_network in by_network.items()]
    return json.dumps({"Collections": collections, "Models": models}, indent=1, ensure_ascii=False) + "\n"


def _model(paper: str, network: str, rows: Sequence[Row]) -> dict[str, Any]:
    operations = next((row.paper.operations for row in rows if row.paper.operations), None)
    return {
        "Name": network,
        "In Collection": paper,
        "Config": f"experiments/{network}.json",
        "Metadata": {"Training Operations": operations},
        "Results": [_result(row) for row in rows],
    }


def _result(row: Row) -> dict[str, Any]:
    number = row.number
    metrics: dict[str, Any] = {number.quantity: number.number}
    if row.is_measured:
        metrics[f"{number.quantity} (measured here)"] = row.paper.measured
    return {
        "Task": TASKS.get(number.id.rpartition("/")[2], "Image Classification"),
        "Dataset": number.settings or "ImageNet",
        "Metrics": metrics,
        "State": row.state,
    }
