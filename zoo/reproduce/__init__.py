"""The tables and figures of the papers, beside what this package measures.

- ``imagenet_table`` and ``imagenet_scores``: the published ImageNet scores, `zoo reproduce imagenet`.
- ``papers`` lists the papers and, in the order of each, its tables and figures; ``paper_report`` measures them one
  after another and writes the report.
- PAPER_tableN and PAPER_figureN measure a table or figure and hold its published numbers. A new paper is such files and
  an entry in ``papers``.
- ``comparison``: what all of them consist of, and the verdicts on their numbers. ``training_runs`` and ``error_rates``:
  the accuracies of trained networks.
- ``stored_results`` and ``page_figures`` look for results that nobody can measure again, and for figures in the pages
  that no result backs: `zoo results check`.
"""

from pathlib import Path

OUT = Path("runs/reproduce")  # where reports are written unless another folder is given
