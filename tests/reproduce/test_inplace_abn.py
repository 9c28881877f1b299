"""The numbers of `zoo reproduce inplace_abn` follow from the measurements, and each published number has its row."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.reproduce.runs import by_key
from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.plot_style import Line
from zoo.benchmark.strategies import Strategy
from zoo.config.network import NetworkSpec
from zoo.config.parse import experiments_dir, load_experiment
from zoo.layers.norm import norm_act
from zoo.layers.residual import IdentityResidualBlock
from zoo.models import build_network
from zoo.reproduce import inplace_abn_figures1and2 as figures
from zoo.reproduce import inplace_abn_scores as scores
from zoo.reproduce import inplace_abn_table2 as table2
from zoo.reproduce import inplace_abn_timing as timing
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.published_numbers import published_number, published_numbers


def test_published_gains_are_ratios_of_pixels_to_the_first_row() -> None:
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
        assert round(100 * (ratio - 1)) == number.number
        assert f" {batch} x {side}^2 [+{number.value}%]" in number.quotation
        assert batch % table2.GPUS == side % table2.STRIDE == 0


def test_blog_trains_with_eight_times_the_pixels() -> None:
    (pixels,) = table2.count_pixels().comparisons
    assert pixels.measured == pytest.approx(7.841, abs=1e-3)
    assert pixels.verdict.state == "reproduced"


class PredictionByHand(MemoryPrediction):
    """Takes 100 bytes, and 10 per pixel, or fewer with some strategies."""

    def __init__(self, setup: Setup, strategy: Strategy) -> None:
        self._setup = setup
        self._bytes = {"iABN": 6, "iABN checkpointed": 3}.get(strategy.name, 10)

    def bytes_for(self, batch: int, size: int | None = None) -> int:
        return 100 + self._bytes * batch * (size or self._setup.size) ** 2


def test_pixel_gain_of_in_place_norms_equals_manual_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "MemoryPrediction", PredictionByHand)
    setup = Setup(NetworkSpec(arch="deeplab_resnext50"), batch=5, size=64)
    section = table2.measure_memory_gains({"coco_stuff_resnext101": setup})
    found = {c.what.removeprefix("coco_stuff_resnext101, "): (c.measured, c.note, str(c.verdict))
             for c in section.comparisons}  # fmt: skip
    assert found["fixed crop: iABN"] == (60, "32 x 64^2", "reproduced: +10.00 points"), "8 of 5 * 10 / 6"
    near = "reproduced: +0.00 points"
    assert found["fixed batch: iABN"] == (56, "20 x 80^2", near), "64 times the root of 10 / 6, in steps of 8"
    assert found["fixed crop: iABN plain"] == (0, "20 x 64^2", "off: -50.00 points")
    assert by_key(section)["table2/coco_stuff_resnext101_ipabn-sync_fixed_batch/pixels"].measured == 0
    largest = [c.measured for c in section.comparisons if c.what.startswith("largest published gain")]
    assert largest == [0, 60], "the networks of 2018, and the defaults of this package"
    (panel,) = section.panels
    lines = {line.label: line for line in panel.lines}
    assert [*lines][:2] == ["std-BN", "iABN, paper"]
    assert lines["iABN, paper"].x == [8], "50 % more than 5, rounded"
    assert lines["iABN"] == Line("iABN", [2, 5, 8], [(100 + 6 * n * 64**2) / 1e9 for n in (2, 5, 8)])


def rows_of(protocol: str, top1: float, top5: float, count: int = 50_000) -> list[dict[str, Any]]:
    """Return the rows of a report of `zoo reproduce imagenet`."""
    known = {"environment": {"torch": "9"}, "date": "2026-01-02T03:04:05", "command": "zoo reproduce imagenet"}
    scores = {"top1": top1, "top5": top5, "standard_errors": {"top1": 0.2, "top5": 0.1}, "count": count}
    return [{"network": "resnext101_stdbn_lr_256", "protocol": protocol, **scores, **known}]


def test_imagenet_scores_have_verdict_error_and_origin() -> None:
    found = by_key(scores.report_imagenet_scores(rows_of("center224", 77.1, 94.0)))
    top1, top5 = (found[f"table1/resnext101_stdbn_lr_256/center224/{metric}"] for metric in ("top1", "top5"))
    assert (top1.measured, str(top1.verdict)) == (77.1, "reproduced: +0.06 points")
    assert (top5.measured, str(top5.verdict)) == (94.0, "off: +0.50 points")
    assert (top1.spread, top1.environment) == (0.2, {"torch": "9"})
    assert (top1.date, top1.command) == ("2026-01-02T03:04:05", "zoo reproduce imagenet")
    waiting = found["table1/resnext101_stdbn_lr_256/center320/top5"]
    assert waiting.measured is None
    command = "`zoo reproduce imagenet --data DIR --models resnext101_stdbn_lr_256`"
    assert str(waiting.verdict) == f"not measured: {command}"


def test_subset_of_imagenet_is_underpowered() -> None:
    part = rows_of("tencrop224", 80.0, 95.0, count=1000)
    top1 = by_key(scores.report_imagenet_scores(part))["table1/resnext101_stdbn_lr_256/tencrop224/top1"]
    assert (top1.measured, top1.verdict.state) == (80.0, "underpowered")
    assert "scored on 1,000 of 50,000 images" in top1.verdict.reason


def test_every_published_score_has_row() -> None:
    sections = [scores.report_imagenet_scores([]), scores.report_segmentation_scores(), scores.report_readme_scores([])]
    assert [len(by_key(section)) for section in sections] == [36, 21, 19]
    found = {key: comparison.pending for section in sections for key, comparison in by_key(section).items()}
    assert {key for key, pending in found.items() if pending == scores.NO_LABELS} == {
        "table2/cityscapes_test/miou",
        "table2/vistas_test/miou",
        "readme/wider_resnet38_deeplab_vistas/whole-flip/miou",
    }
    training = by_key(sections[1])["table2/cityscapes_resnext101_stdbn/miou"].verdict
    assert re.match("not measured: `zoo train cityscapes_resnext101_stdbn DATA`", str(training))
    assert published_number("inplace_abn", "table2/vistas_test/miou").network == ""


@pytest.fixture(scope="module")
def figures_1_and_2() -> list[ReportSection]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "SIDE", 8)
        return [figures.count_block_buffers(), figures.count_stored_tensors()]


@pytest.mark.parametrize(("norm", "maps"), [("standard", 6), ("inplace", 3)])
def test_block_stores_maps_of_figure_1(norm: str, maps: int) -> None:
    width, side = figures.WIDTH, figures.SIDE
    block = IdentityResidualBlock(2 * width, (width, width, 2 * width), norm_act(norm), groups=64)
    one = 4 * 2 * width * side**2
    assert sorted(figures.stored_sizes(block, batch=2)) == sorted([one] * (maps * 2 // 3) + [2 * one] * (maps // 3))
    number = published_number("inplace_abn", f"figure1/buffers_{norm}")
    assert number.value == maps


def test_figures_1_and_2_and_saved_half_are_counted_as_published(figures_1_and_2: list[ReportSection]) -> None:
    found = {key: comparison for section in figures_1_and_2 for key, comparison in by_key(section).items()}
    assert len(found) == 2 + 5 + 1
    assert {comparison.verdict.state for comparison in found.values()} == {"reproduced"}
    assert found["figure2/standard"].measured == "x and z"
    assert found["figure2/checkpoint"].measured == "only x"
    assert found["section5/memory"].measured == pytest.approx(50, abs=0.5)


@pytest.fixture(scope="module")
def network_memory() -> ReportSection:
    return figures.count_network_memory({"resnext50": True}, batch=2)


def test_in_place_norms_almost_halve_held_bytes(network_memory: ReportSection) -> None:
    most = by_key(network_memory)["abstract/memory"]
    assert most.what == "largest of all networks: resnext50, iABN plain"
    assert isinstance(most.measured, float)
    assert 45 < most.measured < 50
    assert most.verdict.state == "reproduced"
    (shipped,) = network_memory.comparisons[1:]
    assert shipped.published == most.published


class BatchByHand:
    """Takes 0.15 GB per image with std-BN and 0.08 GB with in-place norms, and less in ResNeXt-152."""

    def __init__(self, setup: Setup, strategy: Strategy) -> None:
        self._image_bytes = (0.15e9 if strategy.norm == "standard" else 0.08e9) / (3 if "152" in setup.spec.arch else 1)

    def largest_batch(self, memory_bytes: int) -> int:
        return int(memory_bytes // self._image_bytes)


def test_batches_of_section_4_1_are_batches_of_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MemoryPrediction", BatchByHand)
    section = figures.measure_batches()
    found = {key: (comparison.measured, str(comparison.verdict)) for key, comparison in by_key(section).items()}
    assert found == {
        "section4.1/resnext101_stdbn_lr_256/batch": (320, "reproduced: at least 256 and at most 511"),
        "section4.1/resnext101_ipabn_lr_512/batch": (600, "reproduced: at least 512"),
        "section4.1/resnext152_ipabn_lr_256/batch_stdbn": (960, "better: at most 255"),
        "section4.1/wider_resnet38_ipabn_lr_256/batch_stdbn": (320, "better: at most 255"),
        "section4.1/densenet264_ipabn_lr_256/batch_stdbn": (320, "better: at most 255"),
    }
    number = published_number("inplace_abn", "section4.1/resnext101_stdbn_lr_256/batch")
    judged = [Comparison("a", images, number).verdict.state for images in (255, 256, 511, 512)]
    assert judged == ["off", "reproduced", "reproduced", "better"]


def test_timed_blocks_have_shapes_of_network() -> None:
    model, shapes = build_network(NetworkSpec(arch="resnext101", options={"input_3x3": True})).eval().to("meta"), []
    for module in range(2, 6):
        convolution = model.get_submodule(f"mod{module}.block2.convs.conv2")
        convolution.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[1:])))
        assert convolution.weight.shape[1] * timing.GROUPS == convolution.weight.shape[0]
    model(torch.empty(1, 3, 224, 224, device="meta"))
    assert shapes == [(channels, side, side) for channels, side in timing.MODULES.values()]


def times(percent: float, noise: float = 0.0) -> dict[str, list[float]]:
    """Return four rounds: a standard block takes 1 to 4 seconds, an in-place block ``percent`` more, with noise."""
    standard = [1.0, 2.0, 3.0, 4.0]
    signs = (1, -1, 1, -1)
    longer = [time * (1 + (percent + noise * sign) / 100) for time, sign in zip(standard, signs, strict=True)]
    return {"standard": standard, "inplace_1": longer}


def claims(**modules: dict[str, list[float]]) -> dict[str, tuple[Any, str]]:
    comparisons = timing.compare_claims(modules)
    return {
        comparison.published.id.removeprefix("inplace_abn/"): (comparison.measured, str(comparison.verdict))
        for comparison in comparisons
    }


def test_overheads_are_compared_with_the_range_of_paper() -> None:
    found = claims(CONV1=times(1), CONV2=times(2.6))
    assert found["section4.3/overhead_inplace_least"] == (pytest.approx(1), "reproduced: +0.20 points")
    assert found["section4.3/overhead_inplace_most"] == (pytest.approx(2.6), "reproduced: +0.60 points")
    found = claims(CONV1=times(4), CONV2=times(5))
    assert found["section4.3/overhead_inplace_most"][1] == "off: +3.00 points"
    without = claims(CONV1=times(-1))
    assert without["section4.3/overhead_inplace_least"][1] == "better: -1.80 points"


def test_noisy_rounds_are_underpowered() -> None:
    found = claims(CONV1=times(1, noise=3))
    assert {verdict.partition(":")[0] for _, verdict in found.values()} == {"underpowered"}


def test_both_blocks_are_timed_in_every_module() -> None:
    section = timing.measure_overheads({"CONV1": (64, 4), "CONV2": (128, 2)}, batch=2, rounds=3, sample_s=1e-6)
    assert len(by_key(section)) == 2
    assert {comparison.n for comparison in section.comparisons} == {3}
