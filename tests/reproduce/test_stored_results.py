"""A result file without its origin is refused, and one whose code has changed is called out of date."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.benchmark.results import Case, Results
from zoo.cli.check_results import fault_of_command
from zoo.reproduce import stored_results
from zoo.reproduce.ledger import Ledger
from zoo.reproduce.ledger_files import write_ledger
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.stored_results import Findings, check_results

Git = Callable[..., str]
COMMAND = "zoo quickstart --seeds 1 --json quickstart.json"


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """A checkout with one commit and a folder for results; called with its arguments, it runs git there."""

    def run(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("zoo/engine/loop.py", "zoo/cli/train.py", "zoo/engine/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    (tmp_path / "results").mkdir()
    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "-m", "first")
    return run


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    stored_results._changes.cache_clear()


def content_of(git: Git, **changes: Any) -> dict[str, Any]:
    environment = {"commit": git("rev-parse", "HEAD"), "date": "2026-01-02T03:04:05+00:00", "torch": "2.11"}
    return {"benchmark": "quickstart", "command": COMMAND, "environment": environment | changes}


def check(folder: Path, **files: Any) -> Findings:
    """Write the ``files``, by their stems, and check them."""
    for stem, content in files.items():
        (folder / "results" / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return check_results(folder / "results", fault_of_command)


def test_a_file_with_its_origin_is_believed(git: Git, tmp_path: Path) -> None:
    assert check(tmp_path, a=content_of(git)) == Findings(1, [], [])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"commit": "0" * 40 + "-dirty"}, "a.json: the commit 0{40}-dirty cannot be checked out"),
        ({"commit": "main"}, "a.json: main is no commit"),
        ({"commit": "0" * 40 + ", main"}, "a.json: main is no commit"),
        ({"commit": None}, "a.json: it names no commit"),
        ({"date": ""}, "a.json: it has no date"),
    ],
)
def test_a_file_without_its_origin_is_refused(git: Git, tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    (found,) = check(tmp_path, a=content_of(git, **changes)).faults
    assert stored_results.re.match(fault, found)


def test_a_commit_with_changes_is_found_at_any_depth(git: Git, tmp_path: Path) -> None:
    dirty = {"runs": [{"environment": {"commit": "abc-dirty"}}]}
    assert "abc-dirty cannot be checked out" in check(tmp_path, a=content_of(git) | dirty).faults[0]


def test_commands_have_to_be_understood_also_those_that_verdicts_quote(git: Git, tmp_path: Path) -> None:
    rows = [{"command": "zoo reproduce revnet --table 1"}, {"verdict": "needs training: `zoo trian A DATA`, 3 hours"}]
    faults = check(tmp_path, a=content_of(git) | {"sections": rows}, b=content_of(git) | {"command": None}).faults
    assert "`zoo reproduce revnet --table 1`: there is no option --table" in faults[0]
    assert "`zoo trian A DATA`" in faults[1]
    assert "b.json: it names no command" in faults[2]


def test_what_is_no_result_at_all_is_a_fault_and_ends_no_check(git: Git, tmp_path: Path) -> None:
    rows = {"rows": [1], "command": "zoo list", "environment": {"commit": "1"}}
    faults = check(tmp_path, a="[1]", b='{"records": 1', c={"records": []}, d={"benchmark": "revnet"}, e=rows).faults
    assert {fault.split(":")[0] for fault in faults} == {"a.json", "b.json", "c.json", "d.json", "e.json"}
    assert any("a.json: it cannot be read (ValueError: it holds no object)" in fault for fault in faults)


def test_a_machine_or_an_environment_has_to_be_named(git: Git, tmp_path: Path) -> None:
    content = content_of(git)
    del content["environment"]
    content |= {"commit": git("rev-parse", "HEAD"), "date": "2026-01-02"}
    assert "on what machine" in check(tmp_path, a=content).faults[0]
    machine = {"machine": {"cpu": "a"}, "versions": {"torch": "2.11"}}
    assert check(tmp_path, a=content | machine).faults == []


def test_a_file_from_before_dates_has_that_of_its_commit(git: Git, tmp_path: Path) -> None:
    old = content_of(git)
    del old["environment"]["date"]
    assert check(tmp_path, a=old).faults == ["a.json: it has no date"]
    git("add", ".")
    git("commit", "--quiet", "-m", "results")
    findings = check(tmp_path)
    assert findings.faults == []
    assert findings.remarks[0].startswith("a.json: it has no date; it was committed on 20")


def test_a_text_that_is_not_made_of_its_numbers_is_a_fault(git: Git, tmp_path: Path) -> None:
    results = Results("layer", "zoo benchmark layer", torch.device("cpu"), {})
    results.add(Case("norm", (2, 3), "float32", "contiguous"), "native", "time", "ms", [1.0, 2.0])
    results.write(tmp_path / "results" / "a")
    text = (tmp_path / "results" / "a.md").read_text()
    (tmp_path / "results" / "a.md").write_text(text.replace("1.500", "1.400"))
    assert "a.json: a.md is not what is made of it" in check(tmp_path).faults
    (tmp_path / "results" / "a.md").unlink()
    assert "a.json: a.md is missing, which is made of it" in check(tmp_path).faults
    (tmp_path / "results" / "a.md").write_text(text)
    assert not any("a.md" in fault for fault in check(tmp_path).faults)


def test_the_forms_of_the_ledger_are_made_of_its_rows_and_a_measured_row_has_an_origin(
    git: Git, tmp_path: Path
) -> None:
    rows = list(Ledger(PAPERS, {}).rows.values())
    environment = content_of(git)["environment"]
    write_ledger(tmp_path / "results", rows, "zoo reproduce all", environment)
    assert check(tmp_path).faults == []
    rows[0] = rows[0].model_copy(update={"measured": 1.0})
    write_ledger(tmp_path / "results", rows, "zoo reproduce all", environment)
    (tmp_path / "results" / "reproduction.csv").write_text("")
    faults = check(tmp_path).faults
    assert f"reproduction.json: 1 rows were measured, but have no commit or no date: {rows[0].id}" in faults
    assert "reproduction.json: reproduction.csv is not what is made of it" in faults


def test_a_result_is_out_of_date_when_code_that_it_depends_on_has_changed(git: Git, tmp_path: Path) -> None:
    content, commit = content_of(git), git("rev-parse", "HEAD")
    (tmp_path / "zoo" / "cli" / "train.py").write_text("a quickstart does not depend on it")
    (tmp_path / "zoo" / "engine" / "README.md").write_text("nor on a text")
    assert check(tmp_path, a=content).remarks == []
    stored_results._changes.cache_clear()
    (tmp_path / "zoo" / "engine" / "loop.py").write_text("after")
    changed = f"out of date: 1 files that it depends on have changed since {commit[:10]}: zoo/engine/loop.py"
    findings = check(tmp_path)
    assert (findings.faults, findings.remarks) == ([], [f"a.json: {changed}"])
    git("commit", "--quiet", "--all", "-m", "second")
    stored_results._changes.cache_clear()
    assert check(tmp_path).remarks == [f"a.json: {changed}"]


def test_a_commit_that_is_not_known_here_is_a_remark(git: Git, tmp_path: Path) -> None:
    findings = check(tmp_path, a=content_of(git, commit="1" * 40))
    assert findings.faults == []
    assert "commit 1111111111 is not known here" in findings.remarks[0]


def test_every_kind_of_result_depends_on_files_that_there_are() -> None:
    root = Path(__file__).parents[2]
    sources = {source for of_kind in stored_results.SOURCES.values() for source in of_kind}
    assert [source for source in sources if not list(root.glob(source))] == []
