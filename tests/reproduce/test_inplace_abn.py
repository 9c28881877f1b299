"""The numbers of `zoo reproduce inplace_abn` follow from what is measured, and each published one has its row."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zoo.benchmark.largest_batch import MemoryPrediction, TrainingBytes
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.config import experiments_dir, load_experiment
from zoo.reproduce import inplace_abn_scores as scores
from zoo.reproduce import inplace_abn_table2 as table2
from zoo.reproduce.comparison import Comparison, Line, Section
from zoo.reproduce.published_numbers import published, published_numbers


def by_id(section: Section) -> dict[str, Comparison]:
    """Return the first comparison with each published number, by the key of the number."""
    found: dict[str, Comparison] = {}
    for comparison in section.comparisons:
        if comparison.published is not None:
            found.setdefault(comparison.published.id.removeprefix("inplace_abn/"), comparison)
    return found


def test_published_gains_are_pixels_of_the_experiments_over_those_of_the_first_row() -> None:
    gains = [number for key, number in published_numbers("inplace_abn").items() if key.endswith("/pixels")]
    assert len(gains) == 12
    assert {number.id for number in gains} == {
        number.id for name in table2.COLUMNS for regime in table2.REGIMES for number in table2.gains_of(name, regime)
    }
    for number in gains:
        row = load_experiment(experiments_dir() / f"{number.network}.json")
        first = table2.first_row(number.network.partition("_ipabn")[0])
        batch, side = row.optimizer.batch_size, row.input.crop_train
        ratio = batch * side**2 / (table2.GPUS * first.batch * first.size**2)
        assert round(100 * (ratio - 1)) == number.value
        assert f" {batch} x {side}^2 [+{number.value}%]" in number.quotation
        assert batch % table2.GPUS == side % table2.STRIDE == 0


class PredictionByHand(MemoryPrediction):
    """Takes 100 bytes, and for each pixel 10, or fewer with some strategies."""

    def __init__(self, setup: Setup, strategy: Strategy, *, scratch: bool) -> None:
        assert not scratch
        self._setup = setup
        self._bytes = {"iABN": 6, "iABN checkpointed": 3, "iABN unwound": 2}.get(strategy.name, 10)

    def bytes_for(self, batch: int, size: int | None = None) -> TrainingBytes:
        return TrainingBytes(100, self._bytes * batch * (size or self._setup.size) ** 2)


def test_in_place_norms_train_with_as_many_more_pixels_as_follow_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "MemoryPrediction", PredictionByHand)
    monkeypatch.setattr(table2, "predict_and_measure", lambda setup, _: (104 if setup.batch == 2 else 0, 100))
    setup = Setup("deeplab_resnext50", batch=5, size=64)
    section = table2.measure_memory_gains({"coco_stuff_resnext101": setup}, checked=(2, 32))
    found = {c.what.removeprefix("coco_stuff_resnext101, "): (c.measured, c.unit, str(c.verdict))
             for c in section.comparisons}  # fmt: skip
    reached = "reproduced: at least as large"
    assert found["fixed crop: iABN"] == (60, "%: 32 x 64^2", reached), "8 of 5 * 10 / 6"
    assert found["fixed batch: iABN"] == (56, "%: 20 x 80^2", reached), "64 times the root of 10 / 6, in steps of 8"
    assert found["fixed crop: iABN plain"] == (0, "%: 20 x 64^2", "off by -100.0 %")
    assert found["fixed batch: iABN unwound"] == (352, "%: 20 x 136^2", "nothing published")
    exact = "pixels of iABN checkpointed over those of std-BN"
    rounded = "the sums of unwound blocks are rounded"
    assert found[f"fixed crop: {exact}"] == (3.2, "", "nothing published: at least 2.5"), rounded
    checked = found["deeplab_resnext50, 2 x 32^2, iABN plain: prediction over a real step"]
    assert checked[0] == pytest.approx(4)
    assert by_id(section)["table2/coco_stuff_resnext101_ipabn-sync_fixed_batch/pixels"].measured == 0
    assert by_id(section)["section1/throughput"].verdict.state == "off"
    (panel,) = section.panels
    assert panel.lines[3] == Line("iABN", [2, 5, 8], [(100 + 6 * n * 64**2) / 1e9 for n in (2, 5, 8)])


def test_a_gain_below_the_published_one_and_below_our_goal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "MemoryPrediction", PredictionByHand)
    monkeypatch.setattr(table2, "predict_and_measure", lambda *_: (110, 100))
    monkeypatch.setattr(table2, "GOAL", 4)
    setup = Setup("deeplab_resnext50", batch=4, size=64)
    section = table2.measure_memory_gains({"cityscapes_resnext101": setup})
    found = {comparison.what: str(comparison.verdict) for comparison in section.comparisons}
    assert found["cityscapes_resnext101, fixed crop: iABN"] == "off by -33.3 %", "50 % of 75 %"
    less = "nothing published: less than 4"
    assert [verdict for what, verdict in found.items() if "pixels of" in what] == [less] * 2
    checked = "deeplab_resnext50, 4 x 128^2, iABN plain: prediction over a real step"
    assert found[checked] == "nothing published: off by +10.0 %"


def row_of(network: str, protocol: str, scored: tuple[float, float], **differences: float) -> dict[str, Any]:
    """Return a row of the report of `zoo reproduce imagenet`; without differences it cannot be compared."""
    measured = {"top1": scored[0], "top5": scored[1], "count": 50_000 if differences else 1000, "data": "f00d",
                "environment": {"torch": "9"}}  # fmt: skip
    return {"network": network, "protocol": protocol, "weights_md5": "abc", "measured": measured,
            "difference": differences or None}  # fmt: skip


def test_scores_on_imagenet_have_their_verdict_their_standard_error_and_where_they_come_from() -> None:
    network = "resnext101_stdbn_lr_256"
    rows = [
        row_of(network, "center224", (77.1, 94.0), top1=0.06, top5=0.5),
        row_of(network, "tencrop224", (80.0, 95.0)),
        {"network": network, "protocol": "center320", "measured": None, "difference": None, "weights_md5": "abc"},
    ]
    found = by_id(scores.report_imagenet_scores(rows))
    top1, top5 = (found[f"table1/{network}/center224/{metric}"] for metric in ("top1", "top5"))
    assert (top1.measured, str(top1.verdict)) == (77.1, "reproduced: +0.06 points")
    assert (top5.measured, str(top5.verdict)) == (94.0, "off: +0.50 points")
    assert (top1.weights_md5, top1.data, top1.environment) == ("abc", "f00d", {"torch": "9"})
    assert top1.spread == pytest.approx(0.188, abs=1e-3), "the root of 0.771 * 0.229 / 50,000"
    part = found[f"table1/{network}/tencrop224/top1"]
    assert part.verdict.state == "underpowered"
    assert "1,000 images" in part.verdict.reason
    waiting = found[f"table1/{network}/center320/top5"]
    assert waiting.measured is None
    command = f"`zoo reproduce imagenet --data DIR --models {network}`"
    assert str(waiting.verdict) == f"needs data: {command}"


def test_every_published_score_has_a_row_and_those_on_test_images_cannot_be_measured() -> None:
    sections = [scores.report_imagenet_scores([]), scores.report_segmentation_scores(), scores.report_readme_scores([])]
    assert [len(by_id(section)) for section in sections] == [36, 21, 19]
    found = {key: comparison.verdict.state for section in sections for key, comparison in by_id(section).items()}
    assert {key for key, state in found.items() if state == "not built"} == {
        "table2/cityscapes_test/miou",
        "table2/vistas_test/miou",
        "readme/wider_resnet38_deeplab_vistas/whole-flip/miou",
    }
    training = by_id(sections[1])["table2/cityscapes_resnext101_stdbn/miou"].verdict
    assert re.match("needs training: `zoo train cityscapes_resnext101_stdbn DATA`", str(training))
    assert published("inplace_abn", "table2/vistas_test/miou").network == ""
