"""The ledger as one page of HTML that loads nothing from elsewhere: ledger.html, filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from urllib.parse import urlencode

from zoo.reproduce.ledger import STATES, Row, by_item, count_sentence, count_states
from zoo.reproduce.ledger_page import KINDS, MEANINGS, TITLE, environment_text, measured_with, with_unit
from zoo.tables import number_text

TEMPLATE = Path(__file__).with_name("ledger.html")


def html_page(rows: Sequence[Row], titles: Mapping[str, str], command: str) -> str:
    """Return the page; ``titles`` are those of the papers, ``command`` that of the last run."""
    parts = {
        "title": escape(TITLE),
        "counts": escape(count_sentence(rows)),
        "command": escape(command),
        "table": _counts_table(rows),
        "meanings": _definitions({**MEANINGS, **KINDS, "measured with": "\n".join(measured_with(rows))}),
        "papers": _choices("all papers", titles),
        "states": _choices("all states", STATES),
        "kinds": _choices("all kinds", KINDS),
        "rows": "\n".join(_paper(titles[paper], list(group)) for paper, group in groupby(rows, lambda row: row.paper)),
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def _counts_table(rows: Sequence[Row]) -> str:
    """Return the counts of each paper and state; each is a link that filters by both."""
    head = "".join(f'<th scope="col">{_badge(state)}</th>' for state in STATES)
    lines = [f'<table><thead><tr><th scope="col">paper</th><th scope="col">numbers</th>{head}</tr></thead><tbody>']
    papers = {paper: list(group) for paper, group in groupby(rows, lambda row: row.paper)}
    for paper, group in [*papers.items(), ("", list(rows))]:
        cells = [_count_cell(len(group), paper=paper)]
        cells += [_count_cell(count, paper=paper, state=state) for state, count in count_states(group).items()]
        lines.append(f'<tr><th scope="row">{escape(paper or "all")}</th>{"".join(cells)}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def _count_cell(count: int, **filters: str) -> str:
    address = escape(urlencode({key: value for key, value in filters.items() if value}))
    return f'<td><a href="#{address}">{count}</a></td>' if count else '<td class="quiet">0</td>'


def _choices(everything: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    return f'<option value="">{escape(everything)}</option>{options}'


def _paper(title: str, rows: Sequence[Row]) -> str:
    items = "\n".join(
        f'<section><h3>{escape(item)}</h3>\n<div class="rows">\n{"".join(map(_row, of_item))}</div></section>'
        for item, of_item in by_item(rows).items()
    )
    return f"<section><h2>{escape(title)}</h2>\n{items}</section>"


def _row(row: Row) -> str:
    """Return a row, closed: the two numbers and the verdict; opened, what they rest on."""
    spread = f" \u00b1 {number_text(row.spread)}" if row.spread is not None else ""
    times = f"<small>n = {row.n}</small>" if row.n is not None and row.n > 1 else ""
    reason = row.verdict.removeprefix(row.state).removeprefix(": ")
    published = escape(with_unit(row.published, row.unit))
    measured = escape(with_unit(row.measured, row.measured_unit))
    cells = [
        f"<span>{escape(row.quantity)}</span>",
        f"<span><b>{published}</b><small>{escape(row.kind)}</small></span>",
        f"<span><b>{measured}</b>{escape(spread)}{times}</span>",
        f'<span class="verdict">{_badge(row.state)}{_text(reason)}</span>',
    ]
    evidence = {
        "quotation": f"\u201c{row.quotation}\u201d ({row.place})",
        "network": row.network,
        "settings": row.settings,
        "measured as": row.what,
        "command": f"`{row.command}`",
        "commit": row.commit,
        "date": row.date,
        "environment": environment_text(row),
        "weights (md5)": row.weights_md5,
        "data": row.data,
        "id": row.id,
    }
    data = f'data-paper="{escape(row.paper)}" data-state="{escape(row.state)}" data-kind="{escape(row.kind)}"'
    return (
        f'<details id="{escape(row.id)}" {data}><summary>{"".join(cells)}</summary>'
        f"<dl>{_definitions(evidence)}</dl></details>\n"
    )


def _badge(state: str) -> str:
    return f'<span class="state {state.replace(" ", "-")}">{escape(state)}</span>'


def _definitions(texts: Mapping[str, str]) -> str:
    return "".join(f"<dt>{escape(term)}</dt><dd>{_text(text)}</dd>" for term, text in texts.items() if text)


def _text(text: str) -> str:
    """Return text as HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text)).replace("\n", "<br>")
