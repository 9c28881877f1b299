"""Hooks of the documentation site: pages of the repository that lie outside of docs/, and docstrings as Markdown."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
# The page of the site for each file of the repository outside of docs/.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "csrc/README.md": "csrc/README.md",
    "csrc/training_block.svg": "csrc/training_block.svg",
    "experiments/README.md": "experiments/README.md",
    "tests/README.md": "tests/README.md",
    **{f"experiments/{path.name}": f"experiments/{path.name}" for path in REPOSITORY.glob("experiments/*.json")},
}
REPOSITORY_PATHS = {page: path for path, page in PAGES.items()}
UNSEARCHED = ("results/", "tests/")  # their words would hide the pages that explain them
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `PAGES`."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Let relative links of the repository lead to pages of the site, under the names of the pages.

    Links to other files become their texts.
    """
    source = page.file.src_uri
    if source.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    page.meta["title"] = title_of(source)
    markdown = re.sub(r"\A# .*", f"# {title_of(source)}", markdown)  # text forms of one kind have the same heading
    folder = posixpath.dirname(REPOSITORY_PATHS.get(source, f"docs/{source}"))

    def replace(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        found = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not found:
            assert (REPOSITORY / path).exists(), f"{source} links to {path}, which is not there"
            return text
        if text.strip("`").endswith(".md"):
            text = title_of(found)
        relative = posixpath.relpath(found, posixpath.dirname(source) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def title_of(page: str) -> str:
    """Return the name of a page in its title and in links: its heading, or the name of its result file."""
    if page.startswith("results/") and page != "results/README.md":
        return posixpath.basename(page).removesuffix(".md")
    text = (REPOSITORY / REPOSITORY_PATHS.get(page, f"docs/{page}")).read_text(encoding="utf-8")
    return re.search("^# (.+)$", text, re.MULTILINE)[1]  # type: ignore[index]


class ListsAfterText(griffe.Extension):
    """Inserts the empty line that Markdown needs before a list, which our docstrings leave out."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(?!- |  )(.*\S.*)\n(?=- )", r"\1\n\n", obj.docstring.value, flags=re.MULTILINE
            )
