"""The numbers of `zoo reproduce revnet` and `revnext` are measured as they say and compared with published ones."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from torch import nn

from zoo.benchmark.memory_use import Memory
from zoo.config import experiments_dir, load_experiment
from zoo.engine import checkpoint
from zoo.errors import ConfigError, DataError
from zoo.reproduce import accuracy, angles, chains, depth, laws, memory, parameters, pixel, reconstruction, runs
from zoo.reproduce.networks import build
from zoo.reproduce.plot import draw, draw_report
from zoo.reproduce.revnet import EXPERIMENTS, SHORT, revnet_sections
from zoo.reproduce.revnext import GTX750, TABLE1, report_time
from zoo.reproduce.runs import Run, read_runs
from zoo.reproduce.schema import (
    Kind,
    Line,
    Panel,
    Published,
    Section,
    at_least,
    compare,
    compare_decades,
    finite_line,
    not_run,
    trend,
    within_axis,
)
from zoo.reproduce.writing import write_report

EXPERIMENT = "revnet38_cifar10_short"


def make_run(folder: Path, top1: list[float], name: str = EXPERIMENT, **changes: Any) -> Path:
    """Write what a training run of an experiment leaves behind, with other settings of the network and a seed."""
    config = load_experiment(experiments_dir() / f"{name}.json").model_dump(mode="json")
    seed = changes.pop("seed", config["seed"])
    config = {**config, "seed": seed, "network": {**config["network"], **changes}}
    folder.mkdir()
    checkpoint.write({"config": config, "position": 0, "format_version": checkpoint.FORMAT_VERSION}, folder, False)
    records = [{"event": "start"}, *({"event": "validation", "epoch": e, "top1": t} for e, t in enumerate(top1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def verdicts(section: Section) -> dict[str, str]:
    return {figure.what: figure.verdict for figure in section.figures}


def printed(value: float) -> Published:
    return Published(value, "printed", "Table 1")


def test_verdicts_say_how_far_a_number_is_from_the_published_one() -> None:
    assert compare("a", printed(100), 101.0, "", 0.02).verdict == "within 2 %"
    assert compare("a", printed(100), 95.0, "", 0.02).verdict == "off by -5.0 %"
    assert at_least("a", printed(3.6), 3.6, "").verdict == "reached"
    assert at_least("a", printed(3.6), 1.8, "").verdict == "off by -50.0 %"
    assert within_axis("a", printed(10), 9.0, "").verdict == "within the axis"
    assert within_axis("a", printed(10), 11.0, "").verdict == "off: above the axis"
    assert not_run("a", printed(1), "", "zoo train x").verdict == "not run: `zoo train x`"
    assert finite_line("a", [1, 2, 3], [4.0, math.inf, math.nan]) == Line("a", [1], [4.0])


def test_a_trend_has_the_verdict_of_what_was_measured() -> None:
    rises = Published("rises", "printed", "section 1")
    assert trend("a", rises, [1.0, 3.0, 2.0], "").verdict == "rises"
    assert trend("a", rises, [1.0, 3.0, 0.5], "").verdict == "falls, not as published"


def test_values_that_span_decades_are_compared_by_their_factor() -> None:
    one, two = printed(1e9), printed(1e2)
    assert compare_decades("a", [one], [1.9e9]).verdict == "within a factor of 2"
    assert compare_decades("a", [one], [4e8]).verdict == "lower"
    assert compare_decades("a", [one, two], [3e9, 300.0]).verdict == "higher"
    both = compare_decades("a", [one, two], [3e9, 100.0])
    assert both.verdict == "first higher, last within a factor of 2"
    assert both.published == Published("1e+09 to 1e+02", "printed", "Table 1")


# What stands in the papers, word for word but for line breaks, formula signs and tildes: place -> sentences or rows.
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


def is_quoted(published: Published, quotations: dict[str, tuple[str, ...]]) -> bool:
    """Whether the place has a quotation with the value in it."""
    texts = quotations.get(published.place, ())
    value = str(published.value).removesuffix(" M")
    if value in WORDS:
        return any(WORDS[value] in text for text in texts)
    return any(float(value) in numbers_in(text) for text in texts)


def revnet_published() -> list[Published]:
    """Return all that the report of RevNets has as published."""
    sections = [parameters.measure_parameters(), accuracy.report_errors("t", "T", accuracy.CIFAR, [])]
    found = [figure.published for section in sections for figure in section.figures if figure.published]
    found += [*accuracy.IMAGENET.values(), *memory.PARAMETERS_MB.values(), *memory.ACTIVATIONS_MB.values()]
    found += [memory.RATIO, *depth.EXPONENTS.values(), *depth.PASSES.values(), depth.RECURSIVE, depth.NO_GROWTH]
    return [*found, angles.AXIS, angles.TREND]


def revnext_published() -> list[Published]:
    """Return all that the report of RevNeXts has as published."""
    found = [published for row in pixel.PUBLISHED.values() for published in (row.per_pixel, row.total)]
    found += [*pixel.WEIGHTS.values(), pixel.ANY_DEPTH, *(error for error in TABLE1.values() if error), GTX750]
    found += [end for ends in (*chains.FLAT_BY_DEPTH.values(), *chains.HYBRID_BY_DEPTH.values()) for end in ends]
    found += [*chains.FLAT_BY_SLOPE, *chains.HYBRID_BY_SLOPE, chains.FLAT_FIRST, chains.FLAT_LAST]
    found += [figure.published for figure in reconstruction.report_reconstruction([]).figures if figure.published]
    return [*found, chains.HYBRID_SMALLEST, laws.NORM_END, laws.SLOPE_END, laws.BELOW_LAW, laws.LEAST_GAIN_EFFECT]


def test_every_number_that_is_called_printed_stands_in_the_paper() -> None:
    for found, quotations in ((revnet_published(), REVNET_QUOTATIONS), (revnext_published(), REVNEXT_QUOTATIONS)):
        kinds = {kind: [p for p in found if p.kind == kind] for kind in get_args(Kind)}
        assert kinds["printed"]
        assert [published for published in kinds["printed"] if not is_quoted(published, quotations)] == []
        assert all(published.place for published in found)


def test_only_what_follows_from_the_totals_is_called_derived() -> None:
    assert {name: row.per_pixel.kind for name, row in pixel.PUBLISHED.items() if name != "revnext"} == dict.fromkeys(
        ["revnext_resnet18", "revnext_revnet", "irevnet_revnext", "revnext_flat"], "derived"
    )
    assert pixel.PUBLISHED["revnext"].per_pixel == Published(352, "printed", "abstract")
    for name, row in pixel.PUBLISHED.items():
        weights = 12.5e6 if name != "irevnet_revnext" else 171e6
        total = float(row.total.value) * pixel.UNITS[row.unit] - (weights if row.with_weights else 0)
        assert total / pixel.PAPER_PIXELS == pytest.approx(float(row.per_pixel.value), rel=0.003)


def test_accuracies_are_those_of_the_authors_logs() -> None:
    """Notebook 4, cell 6, and notebook 5, cell 6: first all stored runs, then all reconstructing ones."""
    flat = [0.8708, 0.8997, 0.9196, 0.9254, 0.9303, 0.9339, 0.9334, 0.9363, 0.9406, 0.9379]
    flat += [0.886, 0.9105, 0.9265, 0.9302, 0.9259, 0.6229, 0.6389, 0.3636, 0.495, 0.3436]
    hybrid = [0.9219, 0.927, 0.9255, 0.9266, 0.925, 0.9265, 0.9289, 0.9246]
    hybrid += [0.9217, 0.9219, 0.9201, 0.9241, 0.9236, 0.9234, 0.9219, 0.9168]
    ours = [reconstruction.FLAT.values(), [accuracies for _, accuracies in reconstruction.HYBRID]]
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
    assert [list(layers) for layers in reconstruction.FLAT] == counted_up([0, 1, 1], 10)
    assert [list(blocks) for blocks, _ in reconstruction.HYBRID] == [run[:2] for run in counted_up([0, 1, 1], 8)]
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

    def measure(name: str, slope: float, batch: int, **options: Any) -> chains.Found:
        built.append({"name": name, **options})
        return chains.Found([1.0, 1.0, 1.0], [[], [], []])

    monkeypatch.setattr(chains, "measure_ratios", measure)
    chains.measure_depths()
    hybrids = [options for options in built if options["name"] == chains.HYBRID]
    over_slopes = 2 * len(chains.ALL_SLOPES)
    assert {options["units"] for options in hybrids[:-over_slopes]} == {1}
    assert {(options["units"], *options["blocks"]) for options in hybrids[-over_slopes:]} == {(2, 1, 1)}


def test_chains_of_blocks_grow_with_depth_as_table_1_says() -> None:
    section = depth.measure_depth(depths=(4, 16), units=(3, 4))
    found = verdicts(section)
    for name in ("naive", "checkpoint sqrt(L)", "reversible"):
        assert found[f"{name}: forward passes of a step"] == "within 5 %"
    naive, _, _, reversible = section.panels[0].lines
    assert naive.y[1] / naive.y[0] > 3
    assert reversible.y[1] == reversible.y[0]
    label = "RevNet-38's widths, batch 8, 3-4 units per stage"
    assert found[f"{label}, reconstructed: per unit"] == "equal"
    stored = next(figure for figure in section.figures if figure.what == f"{label}, stored: per unit")
    assert isinstance(stored.measured, float)
    assert stored.measured > 2


@pytest.mark.parametrize(("strategy", "calls"), [("naive", 1), ("reversible", 2)])
def test_calls_of_f_and_g_are_counted(strategy: str, calls: int) -> None:
    assert depth._measure(depth.STRATEGIES[strategy], 3).calls == calls


def test_parameters_are_those_printed_except_of_revnet_104() -> None:
    found = verdicts(parameters.measure_parameters())
    assert {what for what, verdict in found.items() if verdict != "equal as printed"} == {"revnet104, 1000 classes"}
    assert found["revnet104, 1000 classes"] == "off by +0.5 %"


def test_outputs_of_imagenet_networks_are_summed_as_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU())
    assert memory.sum_of_outputs(model, 8) == 4 * (4 * 64 + 2 * 4 * 64 + 4 * 16)


def test_revnet_104_holds_less_than_its_twin_by_the_published_ratio() -> None:
    section = memory.measure_imagenet(size=64)
    assert verdicts(section)["held, ResNet / RevNet"] == "reached"
    assert verdicts(section)["revnet104: parameters"] == "within 1 %"


def test_angles_are_exact_down_to_tiny_ones() -> None:
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for degrees in (1e-6, 0.3, 90.0, 180.0):
        v = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))], dtype=torch.float64)
        assert angles.angle(u, 3 * v) == pytest.approx(degrees, rel=1e-6)


def test_both_gradients_are_those_of_the_same_network_which_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = build("revnet38_cifar", structure=(2, 1, 1)).double()
    before = copy.deepcopy(model.state_dict())
    images, classes = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([1, 2])
    stored, found = (angles.gradients(model, images, classes, store=store) for store in (True, False))
    assert (stored - found).abs().max() / stored.abs().max() < 1e-10
    assert not torch.equal(stored, found), "nothing was reconstructed"
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_figure_4_is_measured_on_random_images_and_on_those_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (32, 32), (80 * index, 10, 200)).save(tmp_path / "train" / name / f"{index}.png")
    for data in (None, tmp_path):
        images = None if data is None else angles.open_images(data, batch=2)
        section = angles.measure_angles(images, {"revnet38_cifar": 1}, batch=2)
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
        angles.open_images(make_folders(tmp_path, count), batch)


def test_the_images_of_figure_4_are_opened_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train"):
        revnet_sections([], tmp_path)


def test_laws_of_one_inverted_layer_hold_within_two_percent() -> None:
    assert laws.norm_law(torch.tensor([1.0, 0.1])) == pytest.approx((2 * 0.1 / 1.01) ** 2)
    for gains in ([1.0, 0.1], [1.0, 1.0, 0.2]):
        law = laws.norm_law(torch.tensor(gains))
        assert laws.measure_norm(gains, 1e-4) == pytest.approx(law, rel=0.02)
    for slope in (0.2, 5.0):
        assert laws.measure_slope(slope, 1e-5) == pytest.approx(laws.slope_law(slope), rel=0.02)


def test_images_of_the_laws_have_their_curves_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
    again = chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(1, 1), **chains.FOUND_AGAIN)
    assert again.smallest_of_blocks() < found.smallest_of_blocks() / 2


def test_figures_10_and_11_have_a_point_for_each_layer_depth_and_slope() -> None:
    one, two = {3: {"layers": (1, 1, 1)}}, {3: {"blocks": (1, 1)}}
    section = chains.measure_depths(one, two, slopes=(0.2,), all_slopes=(0.1, 0.2), batch=4)
    assert [len(line.x) for panel in section.panels for line in panel.lines] == [1, 1, 1, 2, 2, 2]
    flat, hybrid, _ = chains.measure_layers(batch=4).panels[0].lines
    assert len(flat.x) == 2 + 3 * 7 + 2, "the stem's norm and activation, seven units, two pools"
    assert len(hybrid.x) == 2 + 6 + 2 + 6 + 5 * 12, "one block of a unit per branch, five of two"


def test_memory_per_pixel_is_a_slope_without_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel, "DEEPER", {})
    section = pixel.measure_pixels(["revnext_flat"], sizes=(64, 96), batch=4)
    (line,) = section.panels[0].lines
    figure = section.figures[0]
    assert isinstance(figure.measured, float)
    assert figure.measured == pytest.approx(1e3 * (line.y[1] - line.y[0]) / (line.x[1] - line.x[0]))
    assert figure.measured < 1.1 * 320


@pytest.mark.parametrize(("last", "notes"), [(300, 0), (330, 1)])
def test_memory_that_is_no_line_over_the_pixels_is_noted(
    monkeypatch: pytest.MonkeyPatch, last: int, notes: int
) -> None:
    pixels = [4 * side**2 for side in (8, 12, 16)]
    peaks = [300 * pixels[0], 300 * pixels[1], 300 * pixels[1] + last * (pixels[2] - pixels[1])]
    memories = iter(Memory(held=0, peak=peak, peak_without_gradients=peak, gradients=0) for peak in peaks)
    monkeypatch.setattr(pixel, "DEEPER", {})
    monkeypatch.setattr(pixel, "measure_memory", lambda *_, **__: next(memories))
    section = pixel.measure_pixels(["revnext_flat"], sizes=(8, 12, 16), batch=4)
    assert [figure.measured for figure in section.figures[:2]] == [last, last * pixel.PAPER_PIXELS / 1e6]
    assert len(section.notes) == len(pixel.NOTES) + notes
    if notes:
        assert section.notes[-1].endswith("from one to the next: 300, 330")


def test_memory_per_pixel_says_by_how_much_it_is_less() -> None:
    assert pixel._no_more("a", printed(320), 240, "B").verdict == "less by 25.0 %"
    assert pixel._no_more("a", printed(320), 300, "B").verdict == "within 10 %"
    assert pixel._no_more("a", printed(320), 480, "B").verdict == "off by +50.0 %"


def test_memory_per_pixel_is_measured_deeper_without_branch_inputs_and_with_plain_kernels() -> None:
    section = pixel.measure_pixels(["revnext"], sizes=(32, 48), batch=4)
    found = {figure.what.partition(": bytes per pixel")[0]: figure.measured for figure in section.figures}
    assert verdicts(section)["revnext, blocks 3-3: bytes per pixel, 32 to 48 pixels"] == "the same"
    kept, again = found["revnext"], found["revnext, branch inputs found again"]
    assert isinstance(kept, float)
    assert isinstance(again, float)
    assert kept - again == pytest.approx(64, rel=0.1)  # at small sizes, scratch memory counts too
    plain = {what for what in found if "plain torch kernels" in what}
    assert len(plain) == (2 if pixel._kernels() != "reference" else 0)


def test_runs_are_told_by_their_settings_whatever_seed_and_memory(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [10.0, 20.0])
    second = make_run(tmp_path / "b", [30.0], memory="plain", seed=7)
    found, remarks = read_runs([first, second, first], EXPERIMENTS)
    assert remarks == []
    epochs = load_experiment(experiments_dir() / f"{EXPERIMENT}.json").optimizer.schedule.epochs
    assert found == [
        Run(EXPERIMENT, False, 1, (10.0, 20.0), epochs),
        Run(EXPERIMENT, True, 7, (30.0,), epochs),
    ]


def test_runs_with_unknown_settings_or_without_scores_are_remarked_on(tmp_path: Path) -> None:
    unknown = make_run(tmp_path / "a", [10.0], activation_param=0.5)
    empty = make_run(tmp_path / "b", [])
    foreign = make_run(tmp_path / "c", [10.0], reconstruction.SHORT[0])
    found, (first, second, third) = read_runs([unknown, empty, foreign], EXPERIMENTS)
    assert found == []
    assert first.startswith(f"left out: {unknown} was")
    assert "settings of no experiment in this report" in first
    assert "settings of no experiment in this report" in third
    assert "no validation yet" in second


def test_paths_of_runs_are_named_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is read elsewhere: the folders above the run are nobody's business there."""
    make_run(tmp_path / "a", [])
    monkeypatch.chdir(tmp_path)
    _, (remark,) = read_runs([Path("a")], EXPERIMENTS)
    assert remark == "left out: a has no validation yet"


def write_logs(path: Path, **changes: Any) -> Path:
    """Write shortened logs of one run, as docs/results has them."""
    config = load_experiment(experiments_dir() / f"{EXPERIMENT}.json").model_dump(mode="json")
    epochs = [{"epoch": 1, "val_top1": 50.0}, {"epoch": 2, "val_top1": 60.0}]
    run = {"label": "one", "seed": 1, "settings": config, "epochs": epochs, "note": "by hand"}
    content = {"num_training_images": 100, "num_validation_images": 400, "runs": [run], **changes}
    path.write_text(json.dumps(content))
    return path


def test_shortened_logs_are_runs_with_their_numbers_of_images_and_notes(tmp_path: Path) -> None:
    path = write_logs(tmp_path / "logs.json")
    (run,), remarks = read_runs([path], EXPERIMENTS)
    assert (run.experiment, run.top1) == (EXPERIMENT, (50.0, 60.0))
    assert (run.num_training_images, run.num_validation_images) == (100, 400)
    assert remarks == [f"{path}: one, seed 1: by hand"]


@pytest.mark.parametrize("changes", [{"runs": [{}]}, {"runs": None}, {"num_training_images": "many"}])
def test_a_file_that_is_no_shortened_log_is_a_users_fault(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--runs: no shortened logs .*logs\.json"):
        read_runs([write_logs(tmp_path / "logs.json", **changes)], EXPERIMENTS)


def test_all_recorded_runs_are_of_experiments_in_the_reports() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    paths = sorted(results.glob("cifar10_*.json"))
    found, remarks = read_runs(paths, [*EXPERIMENTS, *reconstruction.SHORT])
    assert len(found) == 14
    assert [remark for remark in remarks if "left out" in remark] == []
    assert {(run.num_training_images, run.num_validation_images) for run in found} == {(10_000, 10_000), (5_000, 2_000)}


def test_a_folder_that_is_no_run_is_a_users_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--runs: no metrics .*metrics\.jsonl"):
        read_runs([tmp_path], EXPERIMENTS)


def test_an_epoch_that_was_run_again_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [10.0, 20.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "validation", "epoch": 1, "top1": 25.0}) + "\n")
    assert read_runs([folder], EXPERIMENTS)[0][0].top1 == (10.0, 25.0)


def test_errors_are_means_of_finished_runs() -> None:
    name, published = "revnet38_cifar10", accuracy.CIFAR["revnet38_cifar10"]
    done = [Run(name, False, seed, (50.0, top1), 2) for seed, top1 in enumerate((92.5, 93.0))]
    section = accuracy.report_errors("t", "T", {name: published}, [*done, Run(name, True, 0, (10.0,), 2)])
    assert [(f.what, f.measured, f.verdict) for f in section.figures] == [
        (f"{name} (n = 2)", 7.25, "within 0.5 points; standard error 0.25 between runs"),
        (f"{name}, stored", None, "not finished: 1 of 2 epochs"),
    ]
    far = accuracy.report_errors("t", "T", {name: printed(6.0)}, done).figures[0]
    assert far.verdict.startswith("off by +1.25 points")


def test_errors_have_the_numbers_of_images_and_both_standard_errors() -> None:
    name = SHORT[0]
    one, two = (Run(name, False, seed, (top1,), 1, 500, 10_000) for seed, top1 in enumerate((49.0, 51.0)))
    (both,) = accuracy.errors_of(name, None, [one, two])
    assert both.what == f"{name} (n = 2, 500 training images, 10,000 validation images)"
    assert both.verdict == "nothing published; standard error 1.00 between runs, 0.50 by the images"
    (alone,) = accuracy.errors_of(name, None, [one])
    assert alone.verdict == "nothing published; standard error unknown between runs, 0.50 by the images"


def test_what_was_not_trained_has_the_command_for_it() -> None:
    sections = [accuracy.report_errors("t", "T", published, []) for published in (accuracy.CIFAR, TABLE1)]
    for figure in [*sections[0].figures, *sections[1].figures, *report_time().figures]:
        assert figure.measured is None
        assert figure.verdict.startswith("not run: `zoo train ")


def test_all_experiments_of_the_tables_exist() -> None:
    names = [*accuracy.CIFAR, *accuracy.IMAGENET, *TABLE1, *SHORT, *reconstruction.SHORT]
    assert [name for name in names if not (experiments_dir() / f"{name}.json").exists()] == []
    assert runs.command_of(names[0]).startswith(f"zoo train {names[0]} ")


def test_loss_by_reconstruction_is_the_difference_of_runs_of_both_kinds() -> None:
    name = reconstruction.SHORT[0]
    both = [Run(name, True, 1, (60.0,), 1), Run(name, False, 1, (58.5,), 1)]
    section = reconstruction.report_reconstruction(both)
    what = f"{name}: lost by reconstruction (n = 1 against 1)"
    assert [f.measured for f in section.figures if f.what == what] == [1.5]
    assert "standard error unknown between runs" in verdicts(section)[what]
    assert len(section.panels) == 1
    assert not any("lost" in f.what for f in reconstruction.report_reconstruction(both[:1]).figures)


def test_reports_hold_all_figures_as_text_and_json_with_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    section = Section(
        "one", "Table 1", "Measured so.", [compare("bytes", printed(2), 2.0, "B", 0.1)], ["a note"], [panel]
    )
    plain = Section(
        "two", "Table 2", "Not measured.", [not_run("error", accuracy.CIFAR["revnet38_cifar10"], "%", "zoo train x")]
    )
    text = write_report(tmp_path, "revnet", "Title", "zoo reproduce revnet", [section, plain], ["a remark"])
    assert text == (tmp_path / "revnet.md").read_text()
    for part in (
        "- a remark",
        "| bytes",
        "within 10 %",
        "- a note",
        "(revnet_one.png)",
        "printed, Table 3",
        "not run: `zoo train x`",
    ):
        assert part in text
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
