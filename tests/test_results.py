"""The committed results can be believed, and so can the figures in the pages: `zoo results check` finds no fault."""

from __future__ import annotations

from zoo.cli.check_results import RESULTS, ROOT, fault_of_command
from zoo.reproduce.page_figures import unbacked_figures
from zoo.reproduce.stored_results import check_results


def test_results_say_how_they_were_measured_and_are_what_their_texts_show() -> None:
    findings = check_results(ROOT / RESULTS, fault_of_command)
    assert findings.num_files > 10
    assert findings.faults == []


def test_figures_in_the_pages_are_made_of_files() -> None:
    assert unbacked_figures(ROOT) == []
