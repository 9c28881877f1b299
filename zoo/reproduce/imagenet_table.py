"""The table of published and measured ImageNet scores, and its verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zoo.data.prepare.validation_set import NUM_IMAGES, ValidationSet
from zoo.reproduce.comparison import RULES, Verdict
from zoo.tables import Cell, markdown_list, markdown_page, markdown_table
from zoo.tasks.significance import standard_error

TOLERANCE = RULES["accuracy scored"].tolerance  # percentage points
METRICS = ("top1", "top5")
HEADERS = (
    *("network", "protocol", "published", "measured", "standard error", "difference", "verdict", "images", "when"),
    "weights md5",
)

Score = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """A network scored by a protocol.

    Args:
    - `network`: its published name, or the path of its checkpoint.
    - `protocol`: name of the evaluation protocol.
    - `published`: the published top1 and top5 in percent, or one of them; None if nothing was published.
    - `source`: source of the published scores.
    - `weights_md5`: md5 of the weights file.
    - `command`: the command that measures all rows of the network.
    - `measured`: top1, top5, count (number of images) and further facts of the measurement; None if not measured.
    - `reason`: reason for a missing measurement.
    - `reused`: whether an earlier run measured it.
    """

    network: str
    protocol: str
    published: Score | None
    source: str | None
    weights_md5: str
    command: str
    measured: Mapping[str, Any] | None = None
    reason: str | None = None
    reused: bool = False

    def difference(self, data: ValidationSet) -> dict[str, float] | None:
        """Return measured minus published in points, rounded to two digits; None if they cannot be compared."""
        if self.measured is None or self.published is None or not _is_comparable(self.measured, data):
            return None
        return {key: round(round(self.measured[key], 2) - self.published[key], 2) for key in self.published}

    def standard_error(self) -> dict[str, float] | None:
        """Return the standard error of each measured score, in points."""
        if self.measured is None:
            return None
        return {key: standard_error(self.measured[key], self.measured["count"]) for key in METRICS}

    def verdict(self, data: ValidationSet) -> Verdict:
        """Return the verdict on the difference, or why there is none."""
        if self.measured is None:
            return Verdict("needs data", "not run")
        if self.published is None:
            return Verdict("nothing published")
        if not _is_comparable(self.measured, data):
            if data.is_imagenet or data.is_part:
                return Verdict("underpowered", f"a subset of {self.measured['count']:,} of {NUM_IMAGES:,} images")
            return Verdict("needs data", f"scored on {self.measured['count']:,} images that are not ImageNet's")
        differences = self.difference(data) or {}
        worst = max(differences, key=lambda key: abs(differences[key]))
        if abs(differences[worst]) <= TOLERANCE:
            return Verdict("reproduced", f"within {TOLERANCE} point")
        return Verdict("off", f"{differences[worst]:+.2f} points ({worst})")

    def to_json(self, data: ValidationSet) -> dict[str, Any]:
        """Return the row for JSON; ``images`` describes the scored or required images."""
        verdict = self.verdict(data)
        return {
            **asdict(self),
            "standard_error": self.standard_error(),
            "difference": self.difference(data),
            "state": verdict.state,
            "verdict": str(verdict),
            "images": {key: getattr(data, key) for key in ("images", "classes", "per_class", "digest", "is_imagenet")},
        }


def _is_comparable(measured: Mapping[str, Any], data: ValidationSet) -> bool:
    return data.is_imagenet and measured["data"] == data.digest and measured["count"] == NUM_IMAGES


def markdown_report(
    rows: Sequence[Row],
    data: ValidationSet,
    missing: Sequence[str],
    environment: Mapping[str, Any],
    limit: int | None = None,
) -> str:
    """Return the report as a Markdown document.

    ``missing``: missing inputs, one sentence each. Reused rows list the differences of their environment from the given
    one. ``limit``: number of images to score; None for all.
    """
    sources = "; ".join(sorted({row.source for row in rows if row.source})) or "none"
    sections = [
        "# ImageNet: published and measured scores",
        _about(data, limit),
        markdown_table(HEADERS, [_cells(row, data, environment) for row in rows]),
        "Top-1 / top-5 in percent; the difference is measured minus published, in points. Source of the published "
        f"scores: {sources}. The standard error is the sampling error for this number of images; the same weights on "
        "the same images differ by less.",
    ]
    if missing:
        sections += ["## What is missing", markdown_list(missing)]
    if not_run := _not_run(rows):
        sections += ["## Not run", markdown_list(not_run)]
    machine: list[list[Cell]] = [[key, None if value is None else str(value)] for key, value in environment.items()]
    sections += ["## Environment", markdown_table(["", "this run"], machine)]
    return markdown_page(sections)


def _not_run(rows: Sequence[Row]) -> list[str]:
    """Return a list item for each network with unmeasured rows: protocols, reason and command."""
    waiting: dict[tuple[str, str, str | None], list[str]] = {}
    for row in rows:
        if row.measured is None:
            waiting.setdefault((row.network, row.command, row.reason), []).append(row.protocol)
    return [
        f"{network}, {', '.join(protocols)}: {(reason or '').removeprefix(f'{network}: ')}\n\n  `{command}`"
        for (network, command, reason), protocols in waiting.items()
    ]


def _about(data: ValidationSet, limit: int | None) -> str:
    if data.fault is not None:
        return f"Data: none. {data.fault}"
    fewest, most = data.per_class
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    what = f"Data: `{data.folder}`, {data.images:,} images in {data.classes:,} classes of {each}"
    if limit is not None:
        what += f", **of which only {limit:,} are scored**"
    what += f", sha256 of names and sizes {data.digest}"
    if data.is_imagenet:
        return f"{what}: the ImageNet validation set, recognized by names and counts."
    kind = "a part of" if data.is_part else "not"
    return (
        f"{what}. **This is {kind} the ImageNet validation set** ({data.difference}): its scores cannot be compared "
        "with published ones."
    )


def _cells(row: Row, data: ValidationSet, environment: Mapping[str, Any]) -> list[Cell]:
    count = None if row.measured is None else f"{row.measured['count']:,}"
    scores = [row.published, row.measured, row.standard_error()]
    pairs = [*map(_pair, scores), _pair(row.difference(data), sign="+")]
    when = _when(row, environment)
    return [row.network, row.protocol, *pairs, str(row.verdict(data)), count, when, row.weights_md5]


def _pair(score: Mapping[str, Any] | None, sign: str = "") -> str | None:
    return None if score is None else " / ".join(f"{score[key]:{sign}.2f}" for key in METRICS if key in score)


def _when(row: Row, environment: Mapping[str, Any]) -> str | None:
    """Return when a row was measured, and how its environment differs from that of this run."""
    if row.measured is None:
        return None
    if not row.reused:
        return "by this run"
    environment_then = row.measured["environment"]
    changed = [
        f"{key} {environment_then.get(key)}" for key in environment if environment_then.get(key) != environment[key]
    ]
    return ", ".join([f"reused, from {row.measured['finished'][:10]}", *changed])
