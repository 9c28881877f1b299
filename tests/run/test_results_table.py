"""The table of classes in the report of a segmentation."""

from __future__ import annotations

from zoo.run.results_table import class_table
from zoo.tasks.segmentation import SegmentationResult


def test_class_without_pixels_has_empty_cells() -> None:
    scores = dict.fromkeys(("miou", "pixel_accuracy", "mean_class_accuracy", "frequency_weighted_iou", "loss"), 0.0)
    confusion = [[6, 2, 0], [0, 2, 0], [0, 0, 0]]
    result = SegmentationResult(**scores, iou=[75.0, 50.0, None], count=1, protocol="whole", confusion=confusion)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in class_table(result, ["a", "b", "c"]).splitlines()
    ]
    assert rows[2:] == [["a", "75.00", "75.00", "80.00"], ["b", "50.00", "100.00", "20.00"], ["c", "", "", "0.00"]]
