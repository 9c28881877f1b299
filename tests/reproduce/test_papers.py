"""The numbers of `zoo reproduce` PAPER are measured as they say and compared with published ones."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.reproduce.runs import run_of
from zoo.config import experiments_dir
from zoo.errors import ConfigError, DataError
from zoo.reproduce import error_rates
from zoo.reproduce import revnet_figure4 as figure4
from zoo.reproduce import revnet_table1 as table1
from zoo.reproduce import revnet_tables2to5 as tables2to5
from zoo.reproduce.comparison import (
    Comparison,
    Line,
    Panel,
    PublishedValue,
    Section,
    compare,
    compare_decades,
    compare_minimum,
    compare_trend,
    compare_with_axis,
    not_run,
)
from zoo.reproduce.paper_networks import build_for_training
from zoo.reproduce.paper_report import PaperOptions, of_table, write_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.plot import draw, draw_report


def verdicts(section: Section) -> dict[str, str]:
    return {comparison.what: comparison.verdict for comparison in section.comparisons}


def printed(value: float) -> PublishedValue:
    return PublishedValue(value, "printed", "Table 1")


def test_chains_of_blocks_grow_with_depth_as_table_1_says() -> None:
    section = table1.measure_depth(depths=(4, 16), units=(3, 4))
    found = verdicts(section)
    for name in ("naive", "checkpoint sqrt(L)", "reversible"):
        assert found[f"{name}: forward passes of a step"] == "within 5 %"
    naive, _, _, reversible = section.panels[0].lines
    assert naive.y[1] / naive.y[0] > 3
    assert reversible.y[1] == reversible.y[0]
    label = "RevNet-38's widths, batch 8, 3-4 units per stage"
    assert found[f"{label}, reconstructed: per unit"] == "equal"
    stored = next(each for each in section.comparisons if each.what == f"{label}, stored: per unit")
    assert isinstance(stored.measured, float)
    assert stored.measured > 2


@pytest.mark.parametrize(("strategy", "calls"), [("naive", 1), ("reversible", 2)])
def test_calls_of_f_and_g_are_counted(strategy: str, calls: int) -> None:
    assert table1._measure(table1.STRATEGIES[strategy], 3).calls == calls


def test_parameters_are_those_printed_except_of_revnet_104() -> None:
    found = verdicts(tables2to5.measure_parameters())
    assert {what for what, verdict in found.items() if verdict != "equal as printed"} == {"revnet104, 1000 classes"}
    assert found["revnet104, 1000 classes"] == "off by +0.5 %"


def test_outputs_of_imagenet_networks_are_summed_as_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU())
    assert tables2to5.sum_of_outputs(model, 8) == 4 * (4 * 64 + 2 * 4 * 64 + 4 * 16)


def test_revnet_104_holds_less_than_its_twin_by_the_published_ratio() -> None:
    section = tables2to5.measure_imagenet_memory(size=64)
    assert verdicts(section)["held, ResNet / RevNet"] == "reached"
    assert verdicts(section)["revnet104: parameters"] == "within 1 %"


def test_angles_are_exact_down_to_tiny_ones() -> None:
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for degrees in (1e-6, 0.3, 90.0, 180.0):
        v = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))], dtype=torch.float64)
        assert figure4.angle(u, 3 * v) == pytest.approx(degrees, rel=1e-6)


def test_both_gradients_are_those_of_the_same_network_which_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = build_for_training("revnet38_cifar", structure=(2, 1, 1)).double()
    before = copy.deepcopy(model.state_dict())
    images, classes = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([1, 2])
    stored, reconstructed = (figure4.gradients(model, images, classes, store=store) for store in (True, False))
    assert (stored - reconstructed).abs().max() / stored.abs().max() < 1e-10
    assert not torch.equal(stored, reconstructed), "nothing was reconstructed"
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_figure_4_is_measured_on_random_images_and_on_those_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (32, 32), (80 * index, 10, 200)).save(tmp_path / "train" / name / f"{index}.png")
    for data in (None, tmp_path):
        images = None if data is None else figure4.open_images(data, batch=2)
        section = figure4.measure_angles(images, {"revnet38_cifar": 1}, batch=2)
        axis, angle_trend, *others = verdicts(section).values()
        assert (axis, others) == ("within the axis", ["nothing published", "nothing published"])
        assert angle_trend in ("rises", "falls, not as published")
        assert [line.x for line in section.panels[0].lines] == [[0, 1]] * 3
        assert ("random" in section.setting) == (data is None)


def make_folders(data: Path, count: int) -> Path:
    """Write that many classes of one image each."""
    for index in range(count):
        (data / "train" / f"{index:02}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (10, 10, 200)).save(data / "train" / f"{index:02}" / "0.png")
    return data


@pytest.mark.parametrize(("count", "batch"), [(2, 3), (11, 3)])
def test_figure_4_refuses_too_few_images_and_too_many_classes(tmp_path: Path, count: int, batch: int) -> None:
    with pytest.raises(DataError, match=f"{count} images of {count} classes.*at least 3 images of at most 10"):
        figure4.open_images(make_folders(tmp_path, count), batch)


def test_the_images_of_figure_4_are_opened_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train"):
        PAPERS["revnet"].measurements([], tmp_path)


def test_errors_are_means_of_finished_runs() -> None:
    name, published = "revnet38_cifar10", tables2to5.CIFAR_ERRORS["revnet38_cifar10"]
    done = [run_of(name, top1, seed=seed) for seed, top1 in enumerate((92.5, 93.0))]
    begun = run_of(name, 10.0, num_epochs=1, memory="plain")
    section = error_rates.report_errors("t", "T", {name: published}, [*done, begun])
    assert [(f.what, f.measured, f.verdict) for f in section.comparisons] == [
        (f"{name} (n = 2)", 7.25, "within 0.5 points; standard error 0.25 between runs"),
        (f"{name}, stored", None, f"not finished: 1 of {begun.num_epochs} epochs"),
    ]
    far = error_rates.report_errors("t", "T", {name: printed(6.0)}, done).comparisons[0]
    assert far.verdict.startswith("off by +1.25 points")


def test_errors_have_the_numbers_of_images_and_both_standard_errors() -> None:
    name, counts = tables2to5.SHORT[0], {"num_training_images": 500, "num_validation_images": 10_000}
    one, two = (run_of(name, top1, seed=seed, **counts) for seed, top1 in enumerate((49.0, 51.0)))
    (both,) = error_rates.errors_of(name, None, [one, two])
    assert both.what == f"{name} (n = 2, 500 training images, 10,000 validation images)"
    assert both.verdict == "nothing published; standard error 1.00 between runs, 0.50 by the images"
    (alone,) = error_rates.errors_of(name, None, [one])
    assert alone.verdict == "nothing published; standard error unknown between runs, 0.50 by the images"
