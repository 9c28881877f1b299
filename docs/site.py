"""Hooks of the documentation site.

They add pages of the repository that lie outside of docs/, the notebook, and the results to the menu, and read
docstrings as Markdown.
"""

from __future__ import annotations

import json
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
NOTEBOOKS = {
    f"docs/{path.relative_to(REPOSITORY / 'docs')}": f"tutorials/{path.stem}.md"
    for path in (REPOSITORY / "docs" / "tutorials").glob("*.ipynb")
}
PAGES |= NOTEBOOKS
REPOSITORY_PATHS = {page: path for path, page in PAGES.items()}
UNSEARCHED = ("results/", "tests/")  # their words would hide the pages that explain them
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add all text forms of results to the menu."""
    found = sorted(path.name for path in (REPOSITORY / "docs" / "results").glob("*.md") if path.name != "README.md")
    (results,) = (part["Results"] for part in config.nav if "Results" in part)
    results.append({"Measurements": [f"results/{name}" for name in found]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `PAGES`."""
    for path, page in PAGES.items():
        if path in NOTEBOOKS:
            files.append(File.generated(config, page, content=notebook_page(REPOSITORY / path)))
        else:
            files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / path)))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown, with the printed lines and the pictures below each block of code."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f'<img alt="figure" src="data:image/png;base64,{output["data"]["image/png"]}">')
    return "\n\n".join(parts) + "\n"


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
    """Return the name of a page in its title and in links: its heading, with the name of a result file."""
    path = REPOSITORY / REPOSITORY_PATHS.get(page, f"docs/{page}")
    text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    heading: str = re.search("^# (.+)$", text, re.MULTILINE)[1]  # type: ignore[index]
    is_result = page.startswith("results/") and page != "results/README.md"
    return f"{heading} ({path.stem})" if is_result else heading


class ListsAfterText(griffe.Extension):
    """Inserts the empty line that Markdown needs before a list, which our docstrings leave out."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(?!- |  )(.*\S.*)\n(?=- )", r"\1\n\n", obj.docstring.value, flags=re.MULTILINE
            )
