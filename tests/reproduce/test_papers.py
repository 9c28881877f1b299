"""The numbers of `zoo reproduce` PAPER are measured as they say and compared with published ones."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from tests.reproduce.runs import run_of
from zoo.benchmark.memory_use import Memory
from zoo.config import experiments_dir
from zoo.errors import ConfigError, DataError
from zoo.reproduce import error_rates
from zoo.reproduce import revnet_figure4 as figure4
from zoo.reproduce import revnet_table1 as table1
from zoo.reproduce import revnet_tables2to5 as tables2to5
from zoo.reproduce import revnext_figure12 as figure12
from zoo.reproduce import revnext_figures5and6 as laws
from zoo.reproduce import revnext_figures10and11 as chains
from zoo.reproduce import revnext_tables1and2 as memory
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


def test_verdicts_say_how_far_a_number_is_from_the_published_one() -> None:
    assert compare("a", printed(100), 101.0, "", 0.02).verdict == "within 2 %"
    assert compare("a", printed(100), 95.0, "", 0.02).verdict == "off by -5.0 %"
    assert compare_minimum("a", printed(3.6), 3.6, "").verdict == "reached"
    assert compare_minimum("a", printed(3.6), 1.8, "").verdict == "off by -50.0 %"
    assert compare_with_axis("a", printed(10), 9.0, "").verdict == "within the axis"
    assert compare_with_axis("a", printed(10), 11.0, "").verdict == "off: above the axis"
    assert not_run("a", printed(1), "", "zoo train x").verdict == "not run: `zoo train x`"


def test_a_curve_has_no_points_that_are_not_finite() -> None:
    assert chains.finite_line("a", [4.0, math.inf, math.nan]) == Line("a", [1], [4.0])


def test_a_trend_has_the_verdict_of_what_was_measured() -> None:
    rises = PublishedValue("rises", "printed", "section 1")
    assert compare_trend("a", rises, [1.0, 3.0, 2.0], "").verdict == "rises"
    assert compare_trend("a", rises, [1.0, 3.0, 0.5], "").verdict == "falls, not as published"


def test_values_that_span_decades_are_compared_by_their_factor() -> None:
    one, two = printed(1e9), printed(1e2)
    assert compare_decades("a", [one], [1.9e9]).verdict == "within a factor of 2"
    assert compare_decades("a", [one], [4e8]).verdict == "lower"
    assert compare_decades("a", [one, two], [3e9, 300.0]).verdict == "higher"
    both = compare_decades("a", [one, two], [3e9, 100.0])
    assert both.verdict == "first higher, last within a factor of 2"
    assert both.published == PublishedValue("1e+09 to 1e+02", "printed", "Table 1")


# What stands in the papers, word for word but for line breaks, formula signs (an x for times) and tildes:
# place -> sentences or rows.
REVNET_QUOTATIONS = {
    "Table 1": ("Checkpointing [22] O(log L) O(L log L)",),
    "Table 2": (
        "0.46 (0.47)", "0.46 (0.48)", "1.73 (1.73)", "1.73 (1.74)", "1.70 (1.73)", "1.75 (1.79)", "44.5", "45.2",
    ),
    "Table 3": (
        "7.14% 7.24%", "5.74% 5.76%", "5.24% 5.17%", "29.95% 28.96%", "26.44% 25.40%", "23.37% 23.69%",
    ),
    "Table 4": ("ResNet-101 RevNet-104 23.01% 23.10%",),
    "Table 5": ("~ 5250MB ~ 1440MB ~ 178MB ~ 180MB",),
    "section 5.1": ("the computational cost becomes 5N, compared with 4N for Algorithm 1, and 3N for ordinary",),
    "section 5.2": ("while the angle increased during training, it remained small in magnitude",),
}  # fmt: skip
REVNEXT_QUOTATIONS = {
    "abstract": (
        "able to efficiently train arbitrarily deep neural networks with a minimum memory cost of 352 bytes per input "
        "pixel",
        "training of our model to 93.3% accuracy on the CIFAR10 dataset within 67 minutes on a low-end Nvidia GTX750",
    ),
    "section 3.3": (
        "requires 12.5 MB of memory to store the model weights and 3.8 GB of memory to store the hidden layers "
        "activations and gradients for a total of M=3.81 GB of VRAM",
    ),
    "section 3.4": ("requires M=1.19 GB of VRAM",),
    "section 3.5": ("would require M=1.35GB of VRAM",),
    "section 4.3": ("would require M=590MB of VRAM",),
    "section 4.4": ("would require M=648MB of VRAM",),
}
WORDS = {"rises": "increased", "any depth": "arbitrarily deep", "O(log L), O(L log L)": "O(log L) O(L log L)"}


def numbers_in(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}


def is_quoted(published: PublishedValue, quotations: dict[str, tuple[str, ...]]) -> bool:
    """Whether the place has a quotation with the value in it."""
    texts = quotations.get(published.place, ())
    value = str(published.value).removesuffix(" M")
    if value in WORDS:
        return any(WORDS[value] in text for text in texts)
    return any(float(value) in numbers_in(text) for text in texts)


def published_in(content: object) -> list[PublishedValue]:
    """Return the published values in nested containers, such as the constants of a module, and in comparisons."""
    if isinstance(content, PublishedValue):
        return [content]
    if isinstance(content, Comparison):
        return published_in([content.published])
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return [published for each in inner for published in published_in(each)]


def test_every_number_that_is_called_printed_stands_in_the_paper() -> None:
    revnet = [vars(table1), vars(tables2to5), vars(figure4), tables2to5.measure_parameters().comparisons]
    revnext = [vars(memory), vars(laws), vars(chains), figure12.report_reconstruction([]).comparisons]
    papers = ((revnet, REVNET_QUOTATIONS), (revnext, REVNEXT_QUOTATIONS))
    for content, quotations in papers:
        found = published_in(content)
        printed_ones = [published for published in found if published.kind == "printed"]
        assert printed_ones
        assert [published for published in printed_ones if not is_quoted(published, quotations)] == []
        assert all(published.place for published in found)


def test_only_what_follows_from_the_totals_is_called_derived() -> None:
    derived = ["revnext_resnet18", "revnext_revnet", "irevnet_revnext", "revnext_flat"]
    assert [name for name, row in memory.MEMORY.items() if row.per_pixel.kind == "derived"] == derived
    assert memory.MEMORY["revnext"].per_pixel == PublishedValue(352, "printed", "abstract")
    for name, row in memory.MEMORY.items():
        weights = 12.5e6 if name != "irevnet_revnext" else 171e6
        total = float(row.total.value) * memory.UNITS[row.unit] - (weights if row.with_weights else 0)
        assert total / memory.PAPER_PIXELS == pytest.approx(float(row.per_pixel.value), rel=0.003)


def test_accuracies_are_those_of_the_authors_logs() -> None:
    """Notebook 4, cell 6, and notebook 5, cell 6: first all stored runs, then all reconstructing ones."""
    flat = [0.8708, 0.8997, 0.9196, 0.9254, 0.9303, 0.9339, 0.9334, 0.9363, 0.9406, 0.9379]
    flat += [0.886, 0.9105, 0.9265, 0.9302, 0.9259, 0.6229, 0.6389, 0.3636, 0.495, 0.3436]
    hybrid = [0.9219, 0.927, 0.9255, 0.9266, 0.925, 0.9265, 0.9289, 0.9246]
    hybrid += [0.9217, 0.9219, 0.9201, 0.9241, 0.9236, 0.9234, 0.9219, 0.9168]
    ours = [figure12.FLAT.values(), [accuracies for _, accuracies in figure12.HYBRID]]
    for log, pairs in zip((flat, hybrid), ours, strict=True):
        assert [pair[column] for column in (0, 1) for pair in pairs] == pytest.approx([100 * top1 for top1 in log])


def counted_up(start: list[int], times: int) -> list[list[int]]:
    """Return the levels of the authors' networks: their notebooks add a layer to each level in turn."""
    found = []
    for index in range(times):
        start[index % 3] += 1
        found.append(list(start))
    return found


def test_networks_of_the_figures_are_those_that_the_authors_notebooks_count_up_to() -> None:
    assert [list(layers) for layers in figure12.FLAT] == counted_up([0, 1, 1], 10)
    assert [list(blocks) for blocks, _ in figure12.HYBRID] == [run[:2] for run in counted_up([0, 1, 1], 8)]
    assert [options["layers"] for options in chains.FLAT_DEPTHS.values()] == counted_up([1, 1, 1], 10)
    assert [sum(options["layers"]) for options in chains.FLAT_DEPTHS.values()] == list(chains.FLAT_DEPTHS)
    hybrids = [run[:2] for run in counted_up([0, 1, 1], 10)]
    blocks = [options["blocks"] for options in chains.HYBRID_DEPTHS.values()]
    assert (blocks[0], blocks[-1]) == (hybrids[0], hybrids[-1])
    assert all(network in hybrids for network in blocks)
    assert [1 + sum(network) for network in blocks] == list(chains.HYBRID_DEPTHS)


def test_hybrids_over_depth_have_one_unit_per_branch_and_over_slopes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebook 1.b, cell 9, and notebook 1, cell 9."""
    built: list[dict[str, Any]] = []

    def measure(name: str, slope: float, batch: int, **options: Any) -> chains.LayerRatios:
        built.append({"name": name, **options})
        return chains.LayerRatios([1.0, 1.0, 1.0], [[], [], []])

    monkeypatch.setattr(chains, "measure_ratios", measure)
    chains.measure_depths()
    hybrids = [options for options in built if options["name"] == chains.HYBRID]
    over_slopes = 2 * len(chains.ALL_SLOPES)
    assert {options["units"] for options in hybrids[:-over_slopes]} == {1}
    assert {(options["units"], *options["blocks"]) for options in hybrids[-over_slopes:]} == {(2, 1, 1)}


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


def test_laws_of_one_inverted_layer_hold_within_two_percent() -> None:
    assert laws.norm_law([1.0, 0.1]) == pytest.approx((2 * 0.1 / 1.01) ** 2)
    for gains in ([1.0, 0.1], [1.0, 1.0, 0.2]):
        law = laws.norm_law(gains)
        assert laws.measure_norm(gains, 1e-4) == pytest.approx(law, rel=0.02)
    for slope in (0.2, 5.0):
        assert laws.measure_slope(slope, 1e-5) == pytest.approx(laws.slope_law(slope), rel=0.02)


def test_plots_of_the_laws_have_their_curves_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "DIVISORS", (1, 100))
    monkeypatch.setattr(laws, "SLOPES", (1e-3, 1.0, 1e3))
    for section in (laws.measure_norm_law(), laws.measure_slope_law()):
        assert not any(verdict.startswith("off") for verdict in verdicts(section).values())
        assert all(panel.lines[-1].is_theory for panel in section.panels)


def test_signal_to_noise_is_not_centred() -> None:
    assert laws.signal_to_noise(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 100


def test_flat_networks_lose_far_more_of_the_ratio_than_hybrid_ones() -> None:
    flat = {n: min(chains.measure_ratios(chains.FLAT, 0.2, 4, layers=(n, n, n)).in_order()) for n in (1, 2)}
    hybrid = {n: min(chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(n, n)).in_order()) for n in (1, 2)}
    assert flat[1] / flat[2] > 1e3
    assert hybrid[1] / hybrid[2] < 1e2


def test_ratios_inside_a_block_are_lower_than_that_of_its_input_which_is_kept_exact() -> None:
    found = chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(1, 1))
    blocks = [(own, inner) for own, inner in zip(found.layers, found.inside, strict=True) if inner]
    assert [len(inner) for _, inner in blocks] == [6, 12, 12], "conv, norm and activation in f and in g; two of each"
    own, inner = blocks[-1]
    assert min(inner) < own / 10
    again = chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(1, 1), keep_branch_input=False)
    assert again.smallest_of_blocks() < found.smallest_of_blocks() / 2


def test_figures_10_and_11_have_a_point_for_each_layer_depth_and_slope() -> None:
    one, two = {3: {"layers": (1, 1, 1)}}, {3: {"blocks": (1, 1)}}
    section = chains.measure_depths(one, two, slopes=(0.2,), all_slopes=(0.1, 0.2), batch=4)
    assert [len(line.x) for panel in section.panels for line in panel.lines] == [1, 1, 1, 2, 2, 2]
    flat, hybrid, _ = chains.measure_layers(batch=4).panels[0].lines
    assert len(flat.x) == 2 + 3 * 7 + 2, "the stem's norm and activation, seven units, two pools"
    assert len(hybrid.x) == 2 + 6 + 2 + 6 + 5 * 12, "one block of a unit per branch, five of two"


def test_memory_per_pixel_is_a_slope_without_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DEEPER", {})
    section = memory.measure_pixels(["revnext_flat"], sizes=(64, 96), batch=4)
    (line,) = section.panels[0].lines
    comparison = section.comparisons[0]
    assert isinstance(comparison.measured, float)
    assert comparison.measured == pytest.approx(1e3 * (line.y[1] - line.y[0]) / (line.x[1] - line.x[0]))
    assert comparison.measured < 1.1 * 320


@pytest.mark.parametrize(("last", "notes"), [(300, 0), (330, 1)])
def test_memory_that_is_no_line_over_the_pixels_is_noted(
    monkeypatch: pytest.MonkeyPatch, last: int, notes: int
) -> None:
    pixels = [4 * side**2 for side in (8, 12, 16)]
    peaks = [300 * pixels[0], 300 * pixels[1], 300 * pixels[1] + last * (pixels[2] - pixels[1])]
    memories = iter(Memory(held=0, peak=peak, peak_without_gradients=peak, gradients=0) for peak in peaks)
    monkeypatch.setattr(memory, "DEEPER", {})
    monkeypatch.setattr(memory, "measure_memory", lambda *_, **__: next(memories))
    section = memory.measure_pixels(["revnext_flat"], sizes=(8, 12, 16), batch=4)
    measured = [comparison.measured for comparison in section.comparisons[:2]]
    assert measured == [last, last * memory.PAPER_PIXELS / 1e6]
    assert len(section.notes) == len(memory.NOTES) + notes
    if notes:
        assert section.notes[-1].endswith("from one size to the next: 300, 330")


def test_memory_per_pixel_says_by_how_much_it_is_less() -> None:
    assert memory.compare_maximum("a", printed(320), 240, "B").verdict == "less by 25.0 %"
    assert memory.compare_maximum("a", printed(320), 300, "B").verdict == "within 10 %"
    assert memory.compare_maximum("a", printed(320), 480, "B").verdict == "off by +50.0 %"


def test_memory_per_pixel_of_the_flat_network_is_measured_deeper_and_with_plain_kernels() -> None:
    section = memory.measure_pixels(["revnext_flat"], sizes=(16, 24), batch=2)
    found = verdicts(section)
    assert found["revnext_flat, layers 3-3-3: bytes per pixel, 16 to 24 pixels"] == "the same"
    measured = {comparison.what: comparison.measured for comparison in section.comparisons}
    assert measured["revnext_flat: held after forward, bytes per pixel"] == 128, "one map of 32 float32 values"
    plain = {what for what in found if "plain torch kernels" in what}
    assert len(plain) == (1 if memory.kernels_in_use() != "reference" else 0)


@pytest.mark.slow
def test_memory_per_pixel_is_measured_deeper_without_branch_inputs_and_with_plain_kernels() -> None:
    section = memory.measure_pixels(["revnext"], sizes=(32, 48), batch=4)
    found = {
        comparison.what.partition(": bytes per pixel")[0]: comparison.measured for comparison in section.comparisons
    }
    assert verdicts(section)["revnext, blocks 3-3: bytes per pixel, 32 to 48 pixels"] == "the same"
    kept, again = found["revnext"], found["revnext, branch inputs found again"]
    assert isinstance(kept, float)
    assert isinstance(again, float)
    assert kept - again == pytest.approx(64, rel=0.1)  # at small sizes, scratch memory counts too
    plain = {what for what in found if "plain torch kernels" in what}
    assert len(plain) == (2 if memory.kernels_in_use() != "reference" else 0)


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


def test_what_was_not_trained_has_the_command_for_it() -> None:
    errors = [tables2to5.report_cifar_errors([]), memory.report_cifar10_errors([])]
    for section in [*errors, memory.report_time()]:
        for comparison in section.comparisons:
            assert comparison.measured is None
            assert comparison.verdict.startswith("not run: `zoo train ")


@pytest.mark.parametrize(("paper", "counts"), [("inplace_abn", {2: 1}), ("revnext", {1: 2, 2: 1}), ("revnet", {3: 1})])
def test_one_table_of_a_paper_can_be_chosen(paper: str, counts: dict[int, int]) -> None:
    measurements = PAPERS[paper].measurements([], None)
    assert {number: len(of_table(number, measurements)) for number in counts} == counts
    with pytest.raises(ConfigError, match=r"--table 9: .* but of Table \d"):
        of_table(9, measurements)


def test_all_experiments_of_the_tables_exist() -> None:
    names = [name for paper in PAPERS.values() for name in paper.experiments]
    assert [name for name in names if not (experiments_dir() / f"{name}.json").exists()] == []
    assert error_rates.command_of(names[0]).startswith(f"zoo train {names[0]} ")


def test_loss_by_reconstruction_is_the_difference_of_runs_of_both_kinds() -> None:
    name = figure12.SHORT[0]
    both = [run_of(name, 60.0, memory="plain"), run_of(name, 58.5)]
    section = figure12.report_reconstruction(both)
    what = f"{name}: lost by reconstruction (n = 1 against 1)"
    assert [f.measured for f in section.comparisons if f.what == what] == [1.5]
    assert "standard error unknown between runs" in verdicts(section)[what]
    assert len(section.panels) == 1
    assert not any("lost" in f.what for f in figure12.report_reconstruction(both[:1]).comparisons)


def test_reports_hold_all_comparisons_as_text_and_json_with_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    section = Section(
        "one", "Table 1", "Measured so.", [compare("bytes", printed(2), 2.0, "B", 0.1)], ["a note"], [panel]
    )
    missing = not_run("error", PublishedValue(7.24, "printed", "Table 3"), "%", "zoo train x")
    plain = Section("two", "Table 2", "Not measured.", [missing])
    text = write_report(PaperOptions("revnet", out=tmp_path), "Title", [section, plain], ["a remark"])
    assert text == (tmp_path / "revnet.md").read_text()
    for part in ("- a remark", "| bytes", "within 10 %", "- a note", "(revnet_one.png)", "printed, Table 3"):
        assert part in text
    assert "not run: `zoo train x`" in text
    content = json.loads((tmp_path / "revnet.json").read_text())
    assert content["sections"][0]["panels"][0]["lines"][0]["y"] == [3.0, 4.0]
    assert (tmp_path / "revnet_one.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "revnet_two.png").exists()
    drawn = (tmp_path / "revnet_one.png").read_bytes()
    (tmp_path / "revnet_one.png").unlink()
    draw_report(tmp_path / "revnet.json")
    assert (tmp_path / "revnet_one.png").read_bytes() == drawn


def test_plots_have_room_for_many_panels() -> None:
    pytest.importorskip("matplotlib")
    panels = [Panel(str(n), "x", "y", [Line("a", [0, 1], [1.0, 2.0])]) for n in range(4)]
    assert draw(Section("k", "A title that is long enough to be broken " * 3, "", panels=panels)).startswith(b"\x89PNG")
