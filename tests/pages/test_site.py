"""The documentation site builds strictly, and its reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tables import ROOT

REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
#: Pages -> words that readers search for, as the index splits them.
SEARCHED = {
    "troubleshooting.html": ("DataParallel", "ONNX"),
    "scoring-and-weights.html": ("ten", "crops", "ONNX"),
    "training.html": ("resume",),
}
DOCUMENTED = re.findall(r"^::: (zoo[\w.]*)$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("module", ["zoo", "zoo.convert", "zoo.layers", "zoo.models", "zoo.remat", "zoo.weights"])
def test_every_public_name_is_documented(module: str) -> None:
    public = importlib.import_module(module)
    found = {name.rpartition(".")[2] for name in DOCUMENTED}
    missing = [name for name in public.__all__ if name not in found and not inspect.ismodule(getattr(public, name))]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_names_exist_and_have_docstrings(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    documented = getattr(importlib.import_module(module), attribute) if module else importlib.import_module(name)
    assert inspect.getdoc(documented)


def test_site_builds_without_warning(tmp_path: Path) -> None:
    """A broken link or a name that cannot be documented is an error."""
    pytest.importorskip("mkdocs")
    (arguments,) = re.findall(r"-m (mkdocs build.*)", (ROOT / "Makefile").read_text())
    assert "--strict" in arguments
    assert "--quiet" not in arguments  # --strict counts only warnings that are printed
    command = [sys.executable, "-m", *arguments.split(), "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'href="reproduction.csv"' in (tmp_path / "results" / "index.html").read_text()
    assert (tmp_path / "results" / "reproduction.csv").is_file()
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    for page, words in SEARCHED.items():
        text = " ".join(
            each["title"] + " " + each["text"] for each in index["docs"] if each["location"].startswith(page)
        )
        text = re.sub("<[^>]+>", " ", text)  # the search leaves tags out
        tokens = {word.lower() for word in re.split(index["config"]["separator"], text) if word}
        assert {word.lower() for word in words} <= tokens, page
    found = {each["location"] for each in index["docs"]}
    assert "lean.html" in found
    assert not [each for each in found if each.startswith(("results/", "tests/"))]
    home = (tmp_path / "index.html").read_text()
    assert 'href="lean.html#zoocheck"' in home
    assert not re.search(r'href="[^"]*\.md[#"]', home)
    assert "<li><code>budget</code>: " in (tmp_path / "reference" / "lean.html").read_text()
    layers = re.sub("<[^>]+>", "", (tmp_path / "reference" / "layers.html").read_text())
    assert re.search(r"InPlaceABN\(\s*num_features: int,\s*eps: float = 1e-05", layers)
    assert "data:image/png" in (tmp_path / "tutorials" / "resnet50.html").read_text()
    check_names_of_pages(tmp_path)
    check_site_needs_no_server(tmp_path)


def check_names_of_pages(site: Path) -> None:
    """The menu has the headings of the pages, and no link has the name of a file."""
    menu = re.findall(r'<a href="([^"#]+\.html)" class="md-nav__link">\s*<span class="md-ellipsis">\s*([^<]*?)\s*<',
                      (site / "index.html").read_text())  # fmt: skip
    assert len(menu) > 30
    headings = {page: re.search(r"<h1[^>]*>(.*?)<a class", (site / page).read_text()) for page, _ in menu}
    assert {page: found and found[1] for page, found in headings.items()} == dict(menu)
    assert re.search(
        r"<h1[^>]*>Norms with their activations \(layer_cpu\)<", (site / "results" / "layer_cpu.html").read_text()
    )
    for path in site.rglob("*.html"):
        names = re.findall(r'<a href="[^":]*">(?:<code>)?([^<]*\.md)<', path.read_text())
        assert not names, path


def check_site_needs_no_server(site: Path) -> None:
    """Opened from a folder, links need files instead of folders, and the search needs a script."""
    assert (site / "search" / "search_index.js").is_file()
    assert (site / "iframe-worker.js").is_file()
    for path in set(site.rglob("*.html")) - {site / "404.html"}:
        text = path.read_text()
        assert re.search(r'<script src="(\.\./)*iframe-worker\.js"', text), path
        links = re.findall(r'<(?:a|link|script|img)[^>]* (?:href|src)="([^":#]+)[#"]', text)
        assert not [link for link in links if not (path.parent / link).is_file()], path
