"""Regenerates the tables of the pages and the text forms of the results, then reports what only a person can fix."""

from __future__ import annotations

import sys

from tests.pages.numbers import unbacked_figures
from tests.pages.provenance import find_faults, generated_from, generated_from_reports
from tests.pages.tables import PAGES, RESULTS, ROOT, rewrite

for path in RESULTS.glob("*.json"):
    for name, text in generated_from(path).items():
        path.with_name(name).write_text(text)
for name, text in generated_from_reports(RESULTS).items():
    (RESULTS / name).write_text(text)
for page in PAGES.values():
    page.write_text(rewrite(page.read_text()))
faults = [*find_faults(RESULTS), *unbacked_figures(ROOT)]
sys.exit("\n".join(faults) if faults else 0)
