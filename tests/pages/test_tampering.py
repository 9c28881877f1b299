"""Whatever is tampered with in the results, the pages or the published numbers is found, as far as a program can."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pages import provenance
from tests.pages.numbers import unbacked_figures
from tests.pages.tables import RESULTS, ROOT, rewrite
from zoo.reproduce.published_numbers import published, published_numbers
from zoo.run.environment import git

needs_history = pytest.mark.skipif(not provenance.commit_dates(), reason="needs the history of the checkout")


def change(path: Path, old: str, new: str) -> None:
    """Replace the first ``old`` in a file."""
    text = path.read_text(encoding="utf-8")
    assert re.search(old, text), old
    path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies result files, by patterns of their names, into a folder."""

    def copy(*patterns: str) -> Path:
        for path in (path for pattern in (*patterns, "known_faults.json") for path in RESULTS.glob(pattern)):
            shutil.copy(path, tmp_path)
        return tmp_path

    return copy


def faults(folder: Path) -> list[str]:
    """Return the faults of a copied folder, without those of files that were not copied."""
    return [fault for fault in provenance.find_faults(folder) if not fault.startswith("known_faults.json: there is no")]


def edit(path: Path, tamper: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    tamper(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def figures(content: Any) -> list[Any]:
    """Return the figures of a report."""
    return [figure for section in content["sections"] for figure in section["figures"]]


def of_number(content: Any, id: str) -> Any:
    """Return the first figure of a published number."""
    return next(figure for figure in figures(content) if figure.get("published") == id)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("about half the activation", "about a twentieth of the activation"),
        ("5,000 bundled images", "9,000 bundled images"),
        ("Python 3.10", "Python 3.14"),
        ("on one H100", "on 8 H100"),
    ],
)
def test_a_number_in_prose_is_backed(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "docs").mkdir()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "given_figures.json"]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    assert unbacked_figures(tmp_path) == []
    change(tmp_path / "README.md", old, new)
    assert unbacked_figures(tmp_path) != []


def test_a_number_between_markers_is_that_of_the_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    changed = re.sub(r"(<!-- reproduction -->.*?Of )\d+( published)", r"\g<1>999\2", text, count=1, flags=re.DOTALL)
    assert changed != text
    assert rewrite(changed) == rewrite(text) != changed


def test_the_numbers_of_a_result_are_those_of_its_text(results: Callable[..., Path]) -> None:
    folder = results("layer_cpu.*")
    assert faults(folder) == []
    edit(folder / "layer_cpu.json", lambda content: content["records"][0].update(median=0.5))
    assert faults(folder) == ["layer_cpu.json: layer_cpu.md is not up to date"]


@needs_history
@pytest.mark.parametrize(("commit", "fault"), [("deadbeef" * 5, "is not a commit"), ("HEAD", "before its commit")])
def test_the_commit_of_a_result_is_one_that_it_can_have_been_measured_on(
    results: Callable[..., Path], commit: str, fault: str
) -> None:
    folder = results("layer_cpu.*")
    commit = (git("rev-parse", "HEAD") or "").strip() if commit == "HEAD" else commit
    edit(folder / "layer_cpu.json", lambda content: content.update(commit=commit))
    assert any(fault in found for found in faults(folder))


@pytest.mark.parametrize("key", ["command", "cost", "commit", "date"])
def test_a_result_names_its_origin(results: Callable[..., Path], key: str) -> None:
    folder = results("layer_cpu.*")
    edit(folder / "layer_cpu.json", lambda content: content.update({key: None}))
    assert any(f"names no {key}" in found for found in faults(folder))


FORMS = ("REPRODUCTION.md", "reproduction.html", "reproduction.csv")
REPORTS = ("inplace_abn.*", "revnet.*", "revnext.*", "*_runs.json", *FORMS)


def test_the_committed_reports_are_without_fault(results: Callable[..., Path]) -> None:
    assert faults(results(*REPORTS)) == []


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_the_scoreboard_is_that_of_its_reports(results: Callable[..., Path], name: str) -> None:
    folder = results(*REPORTS)
    old, new = ("off", "reproduced") if name == "REPRODUCTION.md" else (r"93\.5", "93.6")
    change(folder / name, old, new)
    assert provenance.generated_from_reports(folder)[name] != (folder / name).read_text(encoding="utf-8")


def _invent(content: Any) -> None:
    del of_number(content, "revnet/table3/resnet32_cifar10")["pending"]
    of_number(content, "revnet/table3/resnet32_cifar10").update(measured=7.1, n=3, spread=0.05)


def _copy_parameters(content: Any) -> None:
    of_number(content, "revnet/table2/revnet104/parameters_1000").update(measured=45.2)


def _publish(content: Any) -> None:
    of_number(content, "revnet/table5/ratio").update(value="8.20")


@pytest.mark.parametrize("tamper", [_invent, _copy_parameters, _publish])
def test_a_measurement_of_a_report_is_one_that_can_be_found_again(
    results: Callable[..., Path], tamper: Callable[[Any], None]
) -> None:
    """Invented accuracies are in no run, and what takes no time is measured again."""
    folder = results("revnet.json", "*_runs.json")
    content = json.loads((folder / "revnet.json").read_text(encoding="utf-8"))
    assert list(provenance._report_faults(folder / "revnet.json", content)) == []
    tamper(content)
    assert list(provenance._report_faults(folder / "revnet.json", content)) != []


def test_a_verdict_is_stored_nowhere() -> None:
    """So that none can be changed: it follows from the published and the measured number."""
    for paper in ("inplace_abn", "revnet", "revnext"):
        content = json.loads((RESULTS / f"{paper}.json").read_text(encoding="utf-8"))
        measured = [figure for figure in figures(content) if figure.get("measured") is not None]
        assert measured
        assert [figure for figure in measured if {"state", "verdict", "pending"} & figure.keys()] == []


def test_a_changed_published_number_is_not_what_was_measured_against(
    results: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its quotation is changed with it."""
    folder = results("revnet.json", "*_runs.json")
    content = json.loads((folder / "revnet.json").read_text(encoding="utf-8"))
    number = published("revnet", "table3/resnet32_cifar10")
    tampered = number.model_copy(update={"value": 741, "quotation": "7.41 %"})
    changed = {**published_numbers("revnet"), "table3/resnet32_cifar10": tampered}
    monkeypatch.setattr(provenance, "published_numbers", lambda _: changed)
    assert any(number.id in fault for fault in provenance._report_faults(folder / "revnet.json", content))
