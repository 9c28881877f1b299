"""The documentation is up to date: tables are regenerated, examples run, and everything it names exists."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image

from docs import tables
from tests.data.sample_images import make_folder
from tests.pages import notebook
from tests.test_architecture import ROOMS
from zoo.cli import build_parser, main
from zoo.cli.lean import split_arguments
from zoo.config.describe import leaves
from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.config.published import published
from zoo.ops import native

ROOT = tables.ROOT
TEXTS = {name: path.read_text() for name, path in tables.PAGES.items()}
FOLDERS = ("zoo", "docs", "experiments", "tests", "scripts", "csrc")


def each(pattern: str) -> list[tuple[str, str]]:
    """Return the matches of a pattern's only group, with their pages; ``^`` matches at each line."""
    texts = TEXTS
    return [(page, found) for page, text in texts.items() for found in re.findall(pattern, text, re.MULTILINE)]


def test_all_pages_are_known() -> None:
    assert {"README.md", "docs/architecture.md", "experiments/README.md", "tests/README.md"} <= TEXTS.keys()


@pytest.mark.parametrize("page", TEXTS)
def test_generated_tables_are_up_to_date(page: str) -> None:
    """After a new measurement or golden file: python -m tests.golden"""
    assert tables.rewrite(TEXTS[page]) == TEXTS[page]


def test_no_table_depends_on_git_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editing or committing code changes no page."""
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a table asks git"))
    for text in TEXTS.values():
        tables.rewrite(text)


def test_every_generated_table_is_on_one_page() -> None:
    markers = [name for text in TEXTS.values() for name in re.findall(r"<!-- /?(\w+) -->", text)]
    found = [name for text in TEXTS.values() for name in tables.sections_of(text)]
    assert sorted(found) == sorted(tables.SECTIONS)
    assert len(markers) == 2 * len(found)


def test_quickstart_of_segmentation_expects_mean_of_its_seeds() -> None:
    expected = load_experiment(experiments_dir() / "quickstart_scenes.json").expected
    runs = tables.result("quickstart_segmentation")["runs"]
    assert expected is not None
    assert expected.scores["whole"].miou == round(sum(run["results"][0]["miou"] for run in runs) / len(runs), 1)
    assert [run["seed"] for run in runs] == [1, 2, 3]


def test_quickstart_expects_mean_of_its_seeds() -> None:
    expected = load_experiment(experiments_dir() / "quickstart_fashion_mnist.json").expected
    assert expected is not None
    scores = {crop: score.model_dump(exclude_none=True) for crop, score in expected.scores.items()}
    assert scores == tables.quickstart_means()
    assert expected.source == "mean of seeds 1 to 3"
    assert [run["seed"] for run in tables.result("quickstart")["runs"]] == [1, 2, 3]


EXAMPLE = r"```python\n([^`]*```(?:\n\n```text\n[^`]*)?)"
OPTIONAL = "timm|accelerate|lightning|monai|peft|transformers"
FINE_TUNING = "docs/tutorials/fine-tuning.md"  # its examples need the runs of its commands
TUTORIALS = [page for page in TEXTS if page.startswith("docs/tutorials/") and page != FINE_TUNING]


def run_example(page: str, example: str, namespace: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    """Run an example. The text block after it has the first lines of its output, or their beginning before " ...".

    Lines after a line "..." are the last ones.
    """
    code, _, printed = example.partition("```")
    for package in re.findall(rf"^(?:import|from) ({OPTIONAL})\b", code, re.MULTILINE):
        pytest.importorskip(package)
        warnings.simplefilter("ignore")  # until the end of the test; Lightning warns of its own code
    exec(compile(code, page, "exec"), namespace)
    lines, found_lines = printed.rpartition("```text\n")[2].splitlines(), capsys.readouterr().out.splitlines()
    cut = lines.index("...") if "..." in lines else len(lines)
    shown = [*zip(lines[:cut], found_lines, strict=False)]
    shown += zip(reversed(lines[cut + 1 :]), reversed(found_lines), strict=False)
    for line, found in shown:
        assert found == line or (line.endswith(" ...") and found.startswith(line.removesuffix("...")))


def test_notebook_runs() -> None:
    """After a change: python -m tests.pages.notebook. Numbers of bytes and times may differ between machines."""
    pytest.importorskip("matplotlib")
    namespace: dict[str, Any] = {}
    kinds = []
    for cell in json.loads(notebook.PATH.read_text())["cells"]:
        if cell["cell_type"] == "code":
            outputs = notebook.run_cell("".join(cell["source"]), namespace)
            kinds += [each["output_type"] for each in outputs]
            assert [_without_numbers(each) for each in outputs] == [_without_numbers(each) for each in cell["outputs"]]
    assert kinds.count("display_data") == 1
    assert kinds.count("stream") > 3


def _without_numbers(output: dict[str, Any]) -> str:
    return re.sub(r"[\d.,]+", "0", "".join(output.get("text", "")))


@pytest.mark.parametrize(
    ("page", "example"), [found for found in each(EXAMPLE) if found[0] not in (*TUTORIALS, FINE_TUNING)]
)
def test_python_examples_run(page: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(page, example, {}, capsys)


@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorials_run_from_top_to_bottom(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    if page == "docs/tutorials/in-place-norms.md" and native.unavailable_reason() is not None:
        pytest.skip(
            f"torch's pooling holds more than the page prints, and the kernels are {native.unavailable_reason()}"
        )
    namespace: dict[str, object] = {}
    for example in re.findall(EXAMPLE, TEXTS[page]):
        run_example(page, example, namespace, capsys)


def test_commands_of_tutorial_on_in_place_norms_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights of a ResNet for two classes in place of the reader's, and two small folders of images."""
    monkeypatch.chdir(tmp_path)
    torch.save(torchvision.models.resnet18(num_classes=2).state_dict(), "resnet18.pth")
    for split in ("train", "val"):
        make_folder(Path("DATA", split), {"a": 2, "b": 2})
    blocks = re.findall(r"```sh\n([^`]*)```", TEXTS["docs/tutorials/in-place-norms.md"])
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) == 6
    for program, *arguments in commands:
        if program == "zoo":
            assert main(arguments) == 0
        else:
            assert program == "python"
            exec(arguments[1], {})


@pytest.mark.slow
def test_tutorial_on_fine_tuning_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, with one epoch per run in place of several."""
    pytest.importorskip("timm")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    text = re.sub(r"--epochs \d+", "--epochs 1", TEXTS[FINE_TUNING].replace("\\\n", " "))
    text = text.replace(", 150)", ", 4)").replace('"bag": 100', '"bag": 4')
    num_commands = 0
    for example, commands in re.findall(rf"{EXAMPLE}|```sh\n([^`]*)```", text):
        if example:
            capsys.readouterr()
            run_example(FINE_TUNING, example, namespace, capsys)
        for line in commands.splitlines():
            num_commands += 1
            assert main(shlex.split(line)[1:]) == 0, line
    assert num_commands == 11
    assert {path.name for path in tmp_path.iterdir()} >= {"curves.png", "confusion.png", "confusion.json"}
    assert (tmp_path / "runs" / "tuned" / "model_best.pth.tar").exists()


@pytest.mark.parametrize(("page", "example"), each(r"```json\n([^`]*)```"))
def test_json_examples_are_experiments(page: str, example: str) -> None:
    parse_experiment(json.loads(example), page)


def test_settings_beside_timms_flags_match_experiment() -> None:
    settings = dict(leaves(load_experiment("imagenet_convnext_tiny").model_dump(mode="json")))
    text = TEXTS["docs/integrations.md"].partition("## From a command of timm")[2].partition("\n##")[0]
    shown = re.findall(r"\| `([a-z_.]+) = ([^`]*)` \|", text)
    assert len(shown) > 20
    assert {key: json.loads(value) for key, value in shown} == {key: settings[key] for key, _ in shown}


def test_commands_in_blocks_are_understood() -> None:
    lines = [line for _, block in each(r"```sh\n([^`]*)```") for line in block.replace("\\\n", " ").splitlines()]
    commands = [re.sub(r"^(zoo|.* -m zoo) ", "", line) for line in lines if re.match(r"(zoo|.* -m zoo) ", line)]
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command, comments=True)
        build_parser().parse_args(split_arguments(words)[0] if words[0] == "lean" else words)


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands by name, none if it has no subcommands."""
    return next((each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})


def test_commands_in_sentences_exist() -> None:
    """A sentence may leave the arguments out, but names no command and no option that there is not."""
    commands = [found.split() for _, found in each(r"`zoo ([a-z][^`\n]*)`")]
    assert len(commands) > 20
    for name, *words in commands:
        parser = subparsers_of(build_parser())[name]
        if words and words[0] in (kinds := subparsers_of(parser)):
            parser = kinds[words[0]]
        known = parser.format_help()
        assert [word for word in words if word.startswith("--") and word not in known] == []


def test_make_targets_exist() -> None:
    targets = {found for _, found in each(r"`make ([\w-]+)[ `]")} | {found for _, found in each(r"^make ([\w-]+)")}
    assert len(targets) > 5
    assert [target for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()] == []


def test_modules_in_commands_exist() -> None:
    modules = [found for _, found in each(r"python -m ((?:tests|zoo)\.[\w.]+)")]
    assert len(modules) > 3
    assert [name for name in modules if find_spec(name) is None] == []


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = tables.PAGES[page].parent / path if path else tables.PAGES[page]
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target.read_text()), link


def test_paths_and_names_in_them_exist() -> None:
    """Text in backticks: a path, possibly with stars, optionally a name in the file: `zoo/registry/get.py: get`."""
    paths = [found for _, found in each(rf"`((?:{'|'.join(FOLDERS)})/[^`\n]*)`")]
    assert len(paths) > 20
    for found in paths:
        path, _, name = found.partition(": ")
        matching = list(ROOT.glob(path))
        assert matching, found
        for part in name.split(".") if name else ():
            assert re.search(rf"(def|class) {part}\b|^{part}\b.*=", matching[0].read_text(), re.MULTILINE), found


def test_walks_count_their_files() -> None:
    """A heading of docs/architecture.md that ends in "(5 files)" is followed by a walk that names five files."""
    parts = re.split(r"^(#+ .*)$", TEXTS["docs/architecture.md"], flags=re.MULTILINE)
    walks = [(heading, text) for heading, text in zip(parts[1::2], parts[2::2], strict=True) if " files)" in heading]
    assert len(walks) >= 4
    for heading, text in walks:
        files = {found.partition(": ")[0] for found in re.findall(r"`((?:zoo|scripts)/[^`\n]*\.py[^`\n]*)`", text)}
        assert f"({len(files)} files)" in heading, sorted(files)


def test_pictures_can_be_shown_on_white_and_on_dark_pages() -> None:
    plots = [*(ROOT / "docs").rglob("*.png")]
    assert plots
    for path in plots:
        with Image.open(path) as image:
            assert image.convert("RGBA").getpixel((0, 0))[3] == 0, path  # type: ignore[index]
    drawings = [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "csrc").glob("*.svg")]
    assert len(drawings) >= 4
    for path in drawings:
        assert not re.findall(r'<(?:rect|g)[^>]* fill="#f{3,6}" stroke|<rect[^>]* fill="#f{3,6}"', path.read_text()), (
            path
        )


def test_code_fits_page_width() -> None:
    """The site shows 120 characters without a scroll bar (docs/site.css)."""
    for page, text in TEXTS.items():
        blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert not [line for block in blocks for line in block.splitlines() if len(line) > 120], page


def test_rooms_are_described_in_import_order() -> None:
    drawn = re.findall(r"<text[^>]*>(\w+)</text>", (ROOT / "docs" / "rooms.svg").read_text())
    assert [word for word in drawn if word in ROOMS] == ROOMS
    first_columns = re.findall(r"^\| `zoo/[^|]*", TEXTS["docs/architecture.md"], re.MULTILINE)
    described = re.findall(r"`zoo/(\w+)[./]", "".join(first_columns))
    assert described == ROOMS


def test_checksums_name_published_files() -> None:
    """In the form that md5sum reads, with two spaces between the columns."""
    lines = [line.split("  ") for line in (ROOT / "checksums.md5").read_text().splitlines()]
    originals = [entry for entry in published().values() if entry.digest.kind == "md5"]
    assert lines == [[entry.digest.digits, f"{entry.name}.pth.tar"] for entry in originals]
    experiments = {path.stem: load_experiment(path).expected for path in experiments_dir().glob("*.json")}
    assert {name for name, expected in experiments.items() if expected and expected.weights} == set(published())
