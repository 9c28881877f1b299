"""The scores of Rota Bulo et al. 2018: Table 1 (left), Table 2, and the further networks of the authors' README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.data.imagenet import NUM_VAL_IMAGES
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.error_rates import needs_training
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers

ImageNetRows = Sequence[Mapping[str, Any]]  # rows of imagenet.json, written by `zoo reproduce imagenet`
NO_LABELS = "the labels of the test images are not public; the owners' server scores them"


@measures("inplace_abn", "Table 1", given="scores")
def report_imagenet_scores(rows: ImageNetRows) -> ReportSection:
    """Return the left half of Table 1."""
    return ReportSection("table1_scores", "Table 1, left: scores on ImageNet", _imagenet("table1/", rows))


@measures("inplace_abn", "README", given="scores")
def report_readme_scores(rows: ImageNetRows) -> ReportSection:
    """Return the scores of the networks that are in the README of the authors' code, but not in the paper."""
    comparisons = [*_imagenet("readme/", rows), *_segmentation("readme/")]
    return ReportSection("readme", "README of the authors' code: further networks", comparisons)


@measures("inplace_abn", "Table 2")
def report_segmentation_scores() -> ReportSection:
    """Return the scores of Table 2, each with the command that measures it."""
    return ReportSection("table2_scores", "Table 2: mean intersection over union", [*_segmentation("table2/")])


def compare_imagenet_scores(rows: ImageNetRows, prefix: str = "") -> Iterator[tuple[tuple[str, str], Comparison]]:
    """Yield (network, protocol) and the comparison of each published score whose key begins with ``prefix``.

    A key is PLACE/NETWORK/PROTOCOL/METRIC.
    """
    measured = {(row["network"], row["protocol"]): row for row in rows}
    for key, number in published_numbers("inplace_abn").items():
        if key.startswith(prefix) and key.endswith(("/top1", "/top5")):
            _, network, protocol, metric = key.split("/")
            row = measured.get((network, protocol))
            yield (network, protocol), _not_scored(number) if row is None else _scored(number, metric, row)


def _imagenet(prefix: str, rows: ImageNetRows) -> list[Comparison]:
    return [comparison for _, comparison in compare_imagenet_scores(rows, prefix)]


def _not_scored(number: PublishedNumber) -> Comparison:
    command = f"zoo reproduce imagenet --data DIR --models {number.network}"
    return Comparison(number.quantity, None, number, pending=f"`{command}`")


def _scored(number: PublishedNumber, metric: str, row: Mapping[str, Any]) -> Comparison:
    """Return the comparison of one score of a row."""
    is_whole = row["count"] == NUM_VAL_IMAGES
    return Comparison(
        number.quantity, row[metric], number, spread=row["standard_errors"][metric],
        weakness="" if is_whole else f"scored on {row['count']:,} of {NUM_VAL_IMAGES:,} images",
        environment=row["environment"], date=row["date"], command=row["command"],
    )  # fmt: skip


def _segmentation(prefix: str) -> Iterator[Comparison]:
    """Yield the comparison of each published mIoU whose key has the prefix. None of them is measured."""
    for key, number in published_numbers("inplace_abn").items():
        if key.startswith(prefix) and key.endswith("/miou"):
            if number.settings.startswith("test"):
                yield Comparison(number.quantity, None, number, pending=NO_LABELS)
            else:
                yield needs_training(number.quantity, number, number.network)
