"""Regenerates the tables of the pages and the text forms of the results, then reports what only a person can fix."""

from __future__ import annotations

import sys

from tests.generated import print_changes, write_changed
from tests.pages.numbers import unbacked_figures
from tests.pages.provenance import find_faults, generated_from, generated_from_reports
from tests.pages.tables import PAGES, RESULTS, ROOT, rewrite

changed = []
for path in RESULTS.glob("*.json"):
    for name, text in generated_from(path).items():
        changed += write_changed(path.with_name(name), text)
for name, text in generated_from_reports(RESULTS).items():
    changed += write_changed(RESULTS / name, text)
for page in PAGES.values():
    changed += write_changed(page, rewrite(page.read_text()))
print_changes(changed)
faults = [*find_faults(RESULTS), *unbacked_figures(ROOT)]
sys.exit("\n".join(faults) if faults else 0)
