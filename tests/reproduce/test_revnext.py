"""`zoo reproduce revnext` measures its numbers as described, and every published number has a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reproduce.runs import by_key, make_run, run_of
from zoo.config.parse import experiments_dir, load_experiment
from zoo.layers.invertible import InvertibleNorm
from zoo.reproduce import revnext_figure12 as figure12
from zoo.reproduce import revnext_figures5and6 as laws
from zoo.reproduce import revnext_figures10and11 as chains
from zoo.reproduce import revnext_sections3and4 as statements
from zoo.reproduce import revnext_tables1and2 as memory
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.paper_networks import build_revnext
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import published_number, published_numbers
from zoo.reproduce.training_runs import read_runs

NUMBERS = published_numbers("revnext")


def states(section: ReportSection) -> dict[str, str]:
    return {comparison.what: comparison.verdict.state for comparison in section.comparisons}


def test_hybrids_have_published_units_per_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebook 1.b, cell 9, and notebook 1, cell 9."""
    built: list[dict[str, Any]] = []

    def measure(name: str, slope: float, batch: int, as_authors: bool, **options: Any) -> list[float]:
        built.append({"name": name, "batch": batch, "as_authors": as_authors, **options})
        return [1.0, 1.0, 1.0]

    monkeypatch.setattr(chains, "measure_ratios", measure)
    chains.measure_depths()
    hybrids = [options for options in built if options["name"] == chains.HYBRID]
    over_slopes = len(chains.SEEDS) * (2 + len(chains.ALL_SLOPES))
    assert {options["units"] for options in hybrids[:-over_slopes]} == {1}
    assert {(options["units"], *options["blocks"]) for options in hybrids[-over_slopes:]} == {(2, 1, 1)}
    assert {(options["as_authors"], options["batch"]) for options in built} == {(True, 256), (False, 8)}
    assert {options["seed"] for options in built} == set(range(10))


def test_laws_of_one_inverted_layer_hold_within_two_percent() -> None:
    torch.manual_seed(0)
    assert laws.norm_law([1.0, 0.1]) == pytest.approx((2 * 0.1 / 1.01) ** 2)
    for gains in ([1.0, 0.1], [1.0, 1.0, 0.2]):
        law = laws.norm_law(gains)
        assert laws.measure_norm(gains, 1e-4) == pytest.approx(law, rel=0.02)
    for slope in (0.2, 5.0):
        assert laws.measure_slope(slope, 1e-5) == pytest.approx(laws.slope_law(slope), rel=0.02)


def test_plots_of_laws_have_their_curves_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "DIVISORS", (1, 100))
    monkeypatch.setattr(laws, "SLOPES", (1e-3, 1.0, 1e3))
    for section in (laws.measure_norm_law(), laws.measure_slope_law()):
        assert set(states(section).values()) == {"reproduced"}
        assert all(panel.lines[-1].is_theory for panel in section.panels)


def test_flat_networks_lose_far_more_of_ratio_than_hybrid_ones() -> None:
    flat = {n: min(chains.measure_ratios(chains.FLAT, 0.2, 4, layers=(n, n, n))) for n in (1, 2)}
    hybrid = {n: min(chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(n, n))) for n in (1, 2)}
    assert flat[1] / flat[2] > 1e3
    assert hybrid[1] / hybrid[2] < 1e2


def test_ratios_inside_block_are_lower_than_ratio_of_its_exact_input() -> None:
    found = chains.measure_ratios(chains.HYBRID, 0.2, 4, blocks=(1, 1))
    assert len(found) == 2 + 1 + 6 + 2 * (1 + 1 + 12), "conv, norm and activation in f and g; two of each after a pool"
    own, *inner = found[-13:]
    assert min(inner) < own / 10


@torch.no_grad()
def test_norms_of_authors_code_have_bounded_ratio() -> None:
    """Dividing by the unbiased deviation scales the input by about 1 + 1 / (2 n) for n values per channel."""
    torch.manual_seed(0)
    model = build_revnext(chains.FLAT)
    norm = next(module for module in model.modules() if isinstance(module, InvertibleNorm))
    norm = chains.AuthorsNorm(norm.norm, norm.eps_i)
    x = torch.randn(2, 32, 8, 8, dtype=torch.float64)
    norm.double()
    y, saved = norm.record(x)
    found, _, _ = norm.undo_(y, torch.zeros_like(y), saved)
    n = 2 * 8 * 8
    assert laws.signal_to_noise(x - x.mean((0, 2, 3), keepdim=True), found - x.mean((0, 2, 3), keepdim=True)) == (
        pytest.approx((2 * n) ** 2, rel=2 / n)
    )


@pytest.mark.slow
def test_figures_10_and_11_have_point_for_each_layer_depth_and_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chains, "LEVELS_OVER_DEPTHS", {"flat": {3: {"layers": (1, 1, 1)}}, "hybrid": {3: {"blocks": (1, 1)}}}
    )
    monkeypatch.setattr(chains, "SLOPES", (0.2,))
    monkeypatch.setattr(chains, "ALL_SLOPES", (0.001, 0.2, 0.75))
    monkeypatch.setattr(chains, "BATCHES", {True: 1, False: 2})
    monkeypatch.setattr(chains, "SEEDS", (0,))
    section = chains.measure_depths()
    assert [len(line.x) for panel in section.panels for line in panel.lines] == [1, 1, 3, 3]
    section = chains.measure_ratios_over_layers()
    _, flat, _, hybrid = section.panels[0].lines
    assert len(flat.x) == 2 + 3 * 7 + 2, "the stem's norm and activation, seven units, two pools"
    assert len(hybrid.x) == 2 + 6 + 2 + 6 + 5 * 12, "one block of a unit per branch, five of two"


def test_ratios_of_random_networks_are_median_with_its_range() -> None:
    section = ReportSection("figure10", "Figure 10")
    chains._add(section, "x", "figure10/flat_first", [300.0, 100.0, 150.0])
    (found,) = section.comparisons
    assert (found.measured, found.n, found.spread, found.note) == (150.0, 3, 200.0, "1e+02 to 3e+02")


def test_memory_is_slope_without_constants_times_pixels_of_paper() -> None:
    (comparison,) = (
        each
        for each in memory.measure_pixels(["revnext_flat"], sizes=(64, 96), batch=4).comparisons
        if each.what.endswith(", allocated")
    )
    assert isinstance(comparison.measured, float)
    assert comparison.measured * 1e6 / memory.PAPER_PIXELS == pytest.approx(320, rel=0.2)


def test_rule_of_paper_gives_its_bytes_per_pixel() -> None:
    """515 values of all layers and 4 of a gradient; 128 inside a block and 32 of its gradient; 80 and 88."""
    counts = [memory.count_by_rule(name) for name in memory.NETWORKS]
    assert counts == [4 * (515 + 4), 4 * 160, 4 * 160, 4 * (32 + 32 + 16), 4 * (32 + 32 + 16 + 8)]


@pytest.mark.slow
def test_memory_of_whole_data_set_follows_its_pixels() -> None:
    by_rule, counted = (c.measured for c in memory.count_whole_data_sets().comparisons if "of 32 pixels" in c.what)
    assert isinstance(by_rule, float)
    assert isinstance(counted, float)
    assert by_rule == pytest.approx(352 * 50_000 * 32**2 / 1e9, rel=0.01)
    assert by_rule < counted < 1.2 * by_rule


def test_kernel_has_published_size() -> None:
    """Manual count: 32 channels, times 4 for each of three pools, and 9 weights per pair."""
    (kernel,) = statements.count_kernel().comparisons
    assert (kernel.measured, kernel.verdict.state) == (9 * (32 * 4**3) ** 2 / 1e6, "reproduced")


@pytest.mark.slow
def test_additional_passes_are_published_ones() -> None:
    passes = by_key(statements.count_additional_passes())
    assert {key: round(float(each.measured or 0)) for key, each in passes.items()} == {
        "section3.4/additional_passes": 1, "section4.3/additional_passes": 1, "section4.4/additional_passes": 2,
    }  # fmt: skip
    assert {each.verdict.state for each in passes.values()} == {"reproduced"}


@pytest.mark.slow
def test_training_of_table_2_fits_into_gpu() -> None:
    rows = by_key(memory.report_gpu())
    small, whole = rows["section5.2/available_memory"].measured, rows["abstract/gpu_memory"].measured
    assert isinstance(small, float)
    assert isinstance(whole, float)
    assert small == pytest.approx(1e3 * whole)
    batch = load_experiment(experiments_dir() / "revnext_cifar10.json").optimizer.batch_size
    assert batch * 32**2 * 352 / 1e6 < small < 400
    assert rows["abstract/minutes"].verdict.state == "not measured"


def test_untrained_row_gives_its_training_command() -> None:
    for section in (memory.report_cifar10_errors([]), figure12.report_accuracies([])):
        missing = [comparison for comparison in section.comparisons if comparison.measured is None]
        assert missing
        for comparison in missing:
            assert comparison.verdict.state == "not measured"
            assert comparison.verdict.reason.startswith("`zoo train ")


def test_figure_12_run_is_compared_with_published_accuracy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [90.0] * 50, "revnext_cifar10", memory="plain", options={"blocks": [1, 2]})
    runs = read_runs([run], PAPERS["revnext"].experiments)
    section = figure12.report_accuracies(runs)
    rows = by_key(section)
    for key in ("figure12/hybrid_run2_1-2/stored", "figure12/hybrid_run3_1-2/stored"):
        assert rows[key].measured == 90.0
        assert rows[key].verdict.state == "underpowered", "of 500 images"
    assert rows["figure12/hybrid_run2_1-2/reconstructed"].measured is None
    panel = next(panel for panel in section.panels if panel.title == "hybrid networks, the authors' log")
    curves = {line.label: dict(zip(line.x, line.y, strict=True)) for line in panel.lines}
    assert curves["here, stored"] == {3: 90.0}
    assert curves["authors, stored"] == {2: 92.19, 3: 92.55, 4: 92.66, 5: 92.65, 6: 92.89, 7: 92.46}
    assert [len(line.x) for panel in section.panels for line in panel.lines] == [10, 10, 10, 9, 6, 1, 6, 6, 1, 6]


def test_one_run_fills_all_rows_of_its_network(tmp_path: Path) -> None:
    """The default depth may be omitted, and settings that change neither the network nor the images do not count."""
    for number, options in enumerate(({}, {"blocks": [1, 2], "units": 2})):
        folder = make_run(tmp_path / str(number), [90.0] * 7, "revnext_cifar10", options=options)
        saved = json.loads((folder / "experiment.json").read_text())
        saved["checkpoint"]["every_steps"] = 7
        saved["training"]["channels_last"] = True
        (folder / "experiment.json").write_text(json.dumps(saved))
        (run,) = read_runs([folder], PAPERS["revnext"].experiments)
        assert run.experiment == "revnext_cifar10"
    rows = by_key(figure12.report_accuracies([run]))
    keys = [key for key, row in rows.items() if "a run has 7 of 50 epochs" in row.verdict.reason]
    assert keys == [f"figure12/hybrid_{run}_1-2/reconstructed" for run in ("run2", "run3", "drawn_run2", "drawn_run3")]


def test_accuracy_of_abstract_is_judged_as_accuracy() -> None:
    run = run_of("revnext_cifar10", 93.2, num_training_images=50_000, num_validation_images=10_000)
    row = by_key(memory.report_cifar10_errors([run]))["abstract/top1"]
    assert row.measured == pytest.approx(93.2)
    assert row.published == published_number("revnext", "abstract/top1")
