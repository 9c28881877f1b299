"""Published tables and figures of the papers, next to measurements of this package.

- ``published/PAPER.json`` holds the published numbers of a paper; ``published_numbers`` reads them.
- The tables, figures and sections of a paper are measured in files named after them (PAPER_tableN, PAPER_figureN, ...),
  by functions that ``measurements`` registers. ``papers`` lists the papers. ``comparison`` defines sections,
  comparisons and verdicts; ``training_runs`` and ``error_rates`` supply the accuracies of trained networks.
- ``paper_run`` implements `zoo reproduce PAPER` and `zoo reproduce all`. ``paper_report`` stores the measurements of a
  paper. ``scoreboard`` computes one row per published number from the reports; ``scoreboard_files`` writes them as CSV
  and as a Markdown page.
- ``imagenet`` implements `zoo reproduce imagenet`.
"""

from pathlib import Path

DEFAULT_REPORT_DIR = Path("runs/reproduce")  # default output folder
