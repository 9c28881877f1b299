"""Writes all golden files and generated pages; prints the changed files and the faults to fix by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.tables import PAGES, RESULTS, rewrite
from tests import stubs
from tests.cli import test_options
from tests.config import test_parse
from tests.generated import print_changes, write_changed
from tests.models import test_held_bytes, test_index
from tests.pages.provenance import find_faults, generated_from, generated_from_reports


def results() -> dict[Path, str]:
    """Return the text forms of the result files."""
    texts = {RESULTS / name: text for name, text in generated_from_reports(RESULTS).items()}
    for path in RESULTS.glob("*.json"):
        texts |= {path.with_name(name): text for name, text in generated_from(path).items()}
    return texts


def pages() -> dict[Path, str]:
    """Return the pages of the documentation with their generated tables, which show the golden files."""
    return {path: rewrite(path.read_text()) for path in PAGES.values()}


changed: list[Path] = []
for module in (test_index, stubs, test_options, test_parse, test_held_bytes):
    changed += write_changed(module.generated())
for texts in (results, pages):
    changed += write_changed(texts())
print_changes(changed)
faults = find_faults(RESULTS)
sys.exit("\n".join(faults) if faults else 0)
