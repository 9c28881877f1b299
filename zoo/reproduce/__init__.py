"""The tables and figures of the papers, beside what this package measures.

- ``published/PAPER.json`` holds what a paper publishes, once; ``published_numbers`` reads it.
- ``papers`` lists the papers and, in the order of each, its tables, figures and sections, which files called
  PAPER_tableN, PAPER_figureN and so on measure. ``comparison``: what all of them consist of, and the verdicts on their
  numbers. ``training_runs`` and ``error_rates``: the accuracies of trained networks.
- ``paper_run`` measures one item after another, `zoo reproduce PAPER` and `all`. ``paper_report`` writes the report of
  a paper, ``ledger_files`` the pages with a row for each published number. ``ledger`` says which rows are kept,
  ``ledger_page`` and ``ledger_html`` what the pages look like.
- ``imagenet_table`` and ``imagenet_scores``: the published ImageNet scores, `zoo reproduce imagenet`.
- ``stored_results`` and ``page_figures`` look for results that nobody can measure again, and for figures in the pages
  that no result backs: `zoo results check`.
"""

from pathlib import Path

OUT = Path("runs/reproduce")  # where reports are written unless another folder is given
