"""Scores of prediction files, and a paired test of two of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo.data.prepare.real_labels import read_real_labels, real_labels_of
from zoo.errors import DataError, escape, truncate
from zoo.run.predictions import read_predictions
from zoo.tables import Cell, markdown_table
from zoo.tasks.classification import LABELS, TOPS
from zoo.tasks.prediction import Prediction
from zoo.tasks.significance import PairedTest, paired_test, standard_error

FILE_LABELS = ("A", "B")  # of two files in the table


@dataclass(frozen=True)
class Scored:
    """Scores of one or two prediction files for the same images.

    Args:
    - `files`: the files.
    - `count`: number of images that were scored.
    - `without_label`: number of images without a label.
    - `hits`: by score ("top1", and "top5" with more than five classes) and file, whether each image is correct.
    """

    files: Sequence[Path]
    count: int
    without_label: int
    hits: Mapping[str, Sequence[Sequence[bool]]]

    def scores(self, file: int) -> dict[str, float]:
        """Return the scores of a file in percent."""
        return {name: 100 * sum(hits[file]) / self.count for name, hits in self.hits.items()}

    def standard_errors(self, file: int) -> dict[str, float]:
        """Return the standard errors of the scores of a file, in percentage points."""
        return {name: standard_error(score, self.count) for name, score in self.scores(file).items()}

    @property
    def tests(self) -> dict[str, PairedTest]:
        """The paired test of the two files for each score; none for one file."""
        return {name: paired_test(*hits) for name, hits in self.hits.items()} if len(self.files) == 2 else {}

    def to_json(self) -> dict[str, Any]:
        """Return the content of a result file."""
        tests = {
            name: {
                **asdict(test),
                **{key: getattr(test, key) for key in ("difference", "standard_error", "p_value", "detectable")},
                "verdict": test.verdict(*FILE_LABELS),
            }
            for name, test in self.tests.items()
        }
        scores = [
            {"file": str(file), **self.scores(index), "standard_errors": self.standard_errors(index)}
            for index, file in enumerate(self.files)
        ]
        return {"count": self.count, "without_label": self.without_label, "scores": scores, "tests": tests}

    def table(self, labels: str) -> str:
        """Return scores and tests as Markdown; ``labels`` names the labels that predictions are compared with."""
        rows: list[list[Cell]] = []
        for index, file in enumerate(self.files):
            numbers = [*self.scores(index).values(), *self.standard_errors(index).values()]
            rows.append([f"{FILE_LABELS[index]}: {escape(file)}", labels, *numbers, self.count])
        labels_shown = [LABELS[name] for name in self.hits]
        headers = [*(f"{label} %" for label in labels_shown), *(f"± {label}" for label in labels_shown)]
        parts = [markdown_table(["predictions", "labels", *headers, "images"], rows)]
        if self.without_label:
            parts.append(f"{self.without_label:,} more images have no label and are excluded.")
        if self.tests:
            paired: list[list[Cell]] = [
                [LABELS[name], test.difference, test.standard_error, test.only_first, test.only_second]
                for name, test in self.tests.items()
            ]
            parts.append(markdown_table(["B minus A", "points", "±", "only A is right", "only B is right"], paired))
            parts.append(
                "\n".join(f"{LABELS[name]}: {test.verdict(*FILE_LABELS)}" for name, test in self.tests.items())
            )
        return "\n\n".join(parts)


def score_files(files: Sequence[Path], real: Path | None = None) -> Scored:
    """Return the scores of one or two prediction files, see `read_predictions`.

    The true class is the image's folder. With ``real``, the label file of ImageNet-ReaL, a prediction is correct if it
    is any of the image's labels, and images without a label are excluded. Raises DataError, naming the first image, if
    two files differ in images or true classes, and for images that ImageNet-ReaL does not contain.
    """
    contents = [read_predictions(file) for file in files]
    if len(contents) == 2:
        _check_same_images(files, contents)
    return score_predictions(files, contents, None if real is None else read_real_labels(real))


def score_predictions(
    files: Sequence[Path], contents: Sequence[Mapping[str, Prediction]], real: Sequence[frozenset[int]] | None
) -> Scored:
    """Return the scores of one or two sets of predictions of the same images, by path; ``files`` name them.

    ``real`` are the labels of `zoo.data.prepare.real_labels.read_real_labels`. Otherwise see `score_files`.
    """
    paths = sorted(contents[0])
    truths: Mapping[str, Collection[int | None]] = {path: [contents[0][path].target] for path in paths}
    if real is not None:
        truths = real_labels_of({path: contents[0][path].target for path in paths}, real)
    # Classes are numbered from 0. With five classes or fewer, top-5 accuracy is always 100 %.
    num_seen = 1 + max(number for content in contents for line in content.values() for number in line.classes)
    labeled = [path for path in paths if truths[path]]
    if not labeled:
        raise DataError(
            f"no image of {escape(files[0])} has a label", "ImageNet-ReaL", "give predictions for more images"
        )
    hits = {
        name: [[_is_hit(content[path], truths[path], top) for path in labeled] for content in contents]
        for name, top in TOPS.items()
        if top < num_seen
    }
    return Scored(files, len(labeled), len(paths) - len(labeled), hits)


def _is_hit(prediction: Prediction, truth: Collection[int | None], top: int) -> bool:
    return any(number in truth for number in prediction.classes[:top])


def _check_same_images(files: Sequence[Path], contents: Sequence[Mapping[str, Prediction]]) -> None:
    """Raise DataError unless both files have the same images, true classes and number of predictions per image."""
    first, second = contents
    for index, other in ((0, second), (1, first)):
        if more := sorted(contents[index].keys() - other.keys()):
            raise DataError(
                f"the files have different images: {len(more):,} of {escape(files[index])} are missing in "
                f"{escape(files[1 - index])}, the first is {truncate(more[0])}",
                "predictions",
                "score both networks on the same folder",
            )
    for path in sorted(first):
        one, two = first[path], second[path]
        if one.target != two.target:
            raise DataError(
                f"the files have different true classes: {truncate(path)} has class {one.target} in "
                f"{escape(files[0])} and class {two.target} in {escape(files[1])}",
                "predictions",
                "the networks number their classes differently and cannot be compared",
            )
        if len(one.classes) != len(two.classes):
            raise DataError(
                f"{escape(files[0])} has {len(one.classes)} classes per image, and {escape(files[1])} has "
                f"{len(two.classes)}",
                "predictions",
                "write both files with zoo validate",
            )
