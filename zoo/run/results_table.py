"""The tables of validation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zoo.tables import Cell, markdown_table

if TYPE_CHECKING:  # printing a table must not import torch
    from zoo.config.experiment import Expected
    from zoo.engine._task import Result
    from zoo.tasks.segmentation import SegmentationResult


def results_table(title: str, labels: Mapping[str, str], results: Sequence[Result], expected: Expected | None) -> str:
    """Return a Markdown table: a row per result, and below it a row with the expected score, if there is one.

    Standard errors, in percentage points, follow the scores. ``labels`` are the scores to show, see
    `Task.shown_labels`.
    """
    with_error = [name for name in results[0].standard_errors() if name in labels]
    rows: list[list[Cell]] = []
    for result in results:
        scores, errors = result.scores(), result.standard_errors()
        measured = [*(scores[name] for name in labels), *(errors[name] for name in with_error)]
        rows.append([title, result.protocol, *measured, result.loss, result.count])
        score = expected.scores.get(result.expected_as) if expected else None
        if expected and score:
            published = [getattr(score, name, None) for name in labels] + [None] * len(with_error)
            rows.append([f"expected: {expected.source}", result.protocol, *published, None, None])
    headers = [*(f"{label} %" for label in labels.values()), *(f"± {labels[name]}" for name in with_error)]
    return markdown_table(["network", "protocol", *headers, "loss", "images"], rows)


def class_table(result: SegmentationResult, names: Sequence[str]) -> str:
    """Return a Markdown table with a row per class: intersection over union, accuracy, and share of the pixels.

    A class without labeled pixels has no accuracy. If it has no predicted pixels either, it has no intersection over
    union.
    """
    import torch

    from zoo.tasks.confusion import ConfusionMatrix

    confusion = ConfusionMatrix(torch.tensor(result.confusion))
    shares = (100 * confusion.counts.sum(1) / confusion.pixels).tolist()
    columns = zip(names, result.iou, confusion.class_accuracy, shares, strict=True)
    rows: list[list[Cell]] = [list(row) for row in columns]
    return markdown_table(["class", "IoU %", "accuracy %", "% of the pixels"], rows)
