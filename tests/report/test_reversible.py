"""The numbers of `zoo reproduce revnet` and `revnext` are measured as they say and compared with published ones."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from zoo.config import experiments_dir, load_experiment
from zoo.engine import checkpoint
from zoo.errors import ConfigError, DataError
from zoo.report.measure import Memory
from zoo.report.reversible import accuracy, angles, chains, depth, laws, memory, parameters, pixel, reconstruction, runs
from zoo.report.reversible.networks import build
from zoo.report.reversible.picture import draw
from zoo.report.reversible.revnet import EXPERIMENTS, SHORT, revnet_sections
from zoo.report.reversible.revnext import TABLE1, report_time
from zoo.report.reversible.runs import Run, read_runs
from zoo.report.reversible.schema import Line, Panel, Section, at_least, at_most, compare, finite_line, not_run
from zoo.report.reversible.writing import write_report

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


def test_verdicts_say_how_far_a_number_is_from_the_published_one() -> None:
    assert compare("a", 100.0, 101.0, "", 0.02).verdict == "within 2 %"
    assert compare("a", 100.0, 95.0, "", 0.02).verdict == "off by -5.0 %"
    assert at_least("a", 3.6, 3.6, "").verdict == "reached"
    assert at_least("a", 3.6, 1.8, "").verdict == "off by -50.0 %"
    assert at_most("a", 10, 9.0, "").verdict == "within the bound"
    assert at_most("a", 10, 11.0, "").verdict == "off: above the bound"
    assert not_run("a", 1.0, "", "zoo train x").verdict == "not run: `zoo train x`"
    assert finite_line("a", [1, 2, 3], [4.0, math.inf, math.nan]) == Line("a", [1], [4.0])


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
    pictures, classes = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([1, 2])
    stored, found = (angles.gradients(model, pictures, classes, store=store) for store in (True, False))
    assert (stored - found).abs().max() / stored.abs().max() < 1e-10
    assert not torch.equal(stored, found), "nothing was reconstructed"
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_figure_4_is_measured_on_random_pictures_and_on_those_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (32, 32), (80 * index, 10, 200)).save(tmp_path / "train" / name / f"{index}.png")
    for data in (None, tmp_path):
        pictures = None if data is None else angles.open_pictures(data, batch=2)
        section = angles.measure_angles(pictures, {"revnet38_cifar": 1}, batch=2)
        assert list(verdicts(section).values()) == ["within the bound", "nothing published", "nothing published"]
        assert [line.x for line in section.panels[0].lines] == [[0, 1]] * 3
        assert ("random" in section.setting) == (data is None)


def make_folders(data: Path, count: int) -> Path:
    """Write that many classes of one picture each."""
    for index in range(count):
        (data / "train" / f"{index:02}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (10, 10, 200)).save(data / "train" / f"{index:02}" / "0.png")
    return data


@pytest.mark.parametrize(("count", "batch"), [(2, 3), (11, 3)])
def test_figure_4_refuses_too_few_pictures_and_too_many_classes(tmp_path: Path, count: int, batch: int) -> None:
    with pytest.raises(DataError, match=f"{count} pictures of {count} classes.*at least 3 pictures of at most 10"):
        angles.open_pictures(make_folders(tmp_path, count), batch)


def test_the_pictures_of_figure_4_are_opened_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train"):
        revnet_sections([], tmp_path)


def test_laws_of_one_inverted_layer_hold_within_two_percent() -> None:
    assert laws.norm_law(torch.tensor([1.0, 0.1])) == pytest.approx((2 * 0.1 / 1.01) ** 2)
    for gains in ([1.0, 0.1], [1.0, 1.0, 0.2]):
        law = laws.norm_law(torch.tensor(gains))
        assert laws.measure_norm(gains, 1e-4) == pytest.approx(law, rel=0.02)
    for slope in (0.2, 5.0):
        assert laws.measure_slope(slope, 1e-5) == pytest.approx(laws.slope_law(slope), rel=0.02)


def test_pictures_of_the_laws_have_their_curves_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "DIVISORS", (1, 100))
    monkeypatch.setattr(laws, "SLOPES", (1e-3, 1.0, 1e3))
    for section in (laws.measure_norm_law(), laws.measure_slope_law()):
        assert not any(verdict.startswith("off") for verdict in verdicts(section).values())
        assert all(panel.lines[-1].is_theory for panel in section.panels)


def test_signal_to_noise_is_not_centred() -> None:
    assert laws.signal_to_noise(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 100


def test_flat_networks_lose_far_more_of_the_ratio_than_hybrid_ones() -> None:
    flat = {n: min(chains.signal_to_noise(chains.FLAT, 0.2, 4, layers=(n, n, n))) for n in (1, 2)}
    hybrid = {n: chains._smallest(chains.HYBRID, 0.2, 4, {"blocks": (n, n)}) for n in (1, 2)}
    assert flat[1] / flat[2] > 1e3
    assert hybrid[1] / hybrid[2] < 1e2


def test_figures_10_and_11_have_a_point_for_each_layer_depth_and_slope() -> None:
    one, two = {3: {"layers": (1, 1, 1)}}, {3: {"blocks": (1, 1)}}
    section = chains.measure_depths(one, two, slopes=(0.2,), all_slopes=(0.1, 0.2), batch=4)
    assert [len(line.x) for panel in section.panels for line in panel.lines] == [1, 1, 2, 2]
    flat, hybrid = chains.measure_layers(batch=4).panels[0].lines
    assert len(flat.x) == 2 + 3 * 7 + 2, "the stem's norm and activation, seven units, two pools"
    assert len(hybrid.x) == 2 + 6 + 2


def test_memory_per_pixel_is_a_slope_without_constants() -> None:
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
    monkeypatch.setattr(pixel, "measure_memory", lambda *_, **__: next(memories))
    section = pixel.measure_pixels(["revnext_flat"], sizes=(8, 12, 16), batch=4)
    assert [figure.measured for figure in section.figures[:2]] == [last, last * pixel.PAPER_PIXELS / 1e6]
    assert len(section.notes) == len(pixel.NOTES) + notes
    if notes:
        assert section.notes[-1].endswith("from one to the next: 300, 330")


def test_memory_per_pixel_says_by_how_much_it_is_less() -> None:
    assert pixel._no_more("a", 320, 240, "B").verdict == "less by 25.0 %"
    assert pixel._no_more("a", 320, 300, "B").verdict == "within 10 %"
    assert pixel._no_more("a", 320, 480, "B").verdict == "off by +50.0 %"


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
    assert "settings of no experiment in this report" in first
    assert "settings of no experiment in this report" in third
    assert "no validation yet" in second


def test_a_folder_that_is_no_run_is_a_users_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--runs: no metrics .*metrics\.jsonl"):
        read_runs([tmp_path], EXPERIMENTS)


def test_an_epoch_that_was_run_again_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [10.0, 20.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "validation", "epoch": 1, "top1": 25.0}) + "\n")
    assert read_runs([folder], EXPERIMENTS)[0][0].top1 == (10.0, 25.0)


def test_errors_are_means_of_finished_runs() -> None:
    name = "revnet38_cifar10"
    done = [Run(name, False, seed, (50.0, top1), 2) for seed, top1 in enumerate((92.5, 93.0))]
    section = accuracy.report_errors("t", "T", {name: 7.24}, [*done, Run(name, True, 0, (10.0,), 2)])
    assert [(f.what, f.measured, f.verdict) for f in section.figures] == [
        (f"{name} (2 runs)", 7.25, "within 0.5 points"),
        (f"{name}, stored", None, "not finished: 1 of 2 epochs"),
    ]
    far = accuracy.report_errors("t", "T", {name: 6.0}, done).figures[0]
    assert far.verdict == "off by +1.25 points"


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
    lost = [f.measured for f in section.figures if f.what == f"{name}: lost by reconstruction"]
    assert lost == [1.5]
    assert len(section.panels) == 1
    assert not any("lost" in f.what for f in reconstruction.report_reconstruction(both[:1]).figures)


def test_reports_hold_all_figures_as_text_and_json_with_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    section = Section("one", "Table 1", "Measured so.", [compare("bytes", 2.0, 2.0, "B", 0.1)], ["a note"], [panel])
    plain = Section("two", "Table 2", "Not measured.", [not_run("error", 7.24, "%", "zoo train x")])
    text = write_report(tmp_path, "revnet", "Title", "zoo reproduce revnet", [section, plain], ["a remark"])
    assert text == (tmp_path / "revnet.md").read_text()
    for part in ("- a remark", "| bytes", "within 10 %", "- a note", "(revnet_one.png)", "not run: `zoo train x`"):
        assert part in text
    content = json.loads((tmp_path / "revnet.json").read_text())
    assert content["sections"][0]["panels"][0]["lines"][0]["y"] == [3.0, 4.0]
    assert (tmp_path / "revnet_one.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "revnet_two.png").exists()


def test_pictures_have_room_for_many_panels() -> None:
    pytest.importorskip("matplotlib")
    panels = [Panel(str(n), "x", "y", [Line("a", [0, 1], [1.0, 2.0])]) for n in range(4)]
    assert draw(Section("k", "A title that is long enough to be broken " * 3, "", panels=panels)).startswith(b"\x89PNG")
