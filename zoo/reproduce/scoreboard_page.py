"""The scoreboard as an HTML page: a table of all rows with filters, in one file without external parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from zoo.reproduce.comparison import RULES, Comparison
from zoo.reproduce.model_index import URLS
from zoo.reproduce.paper_report import plot_name, spread_text
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import EVIDENCE, RATES, STATES, Row, by_item, counts_by_evidence, repeats_text
from zoo.reproduce.scoreboard_summary import CSV, INDEX, PAGE, SCOPE, STATE_MEANINGS, TITLE, anchor, measured_with
from zoo.tables import number_text

COLORS = {
    "reproduced": "green",
    "better": "blue",
    "agrees": "green",
    "off": "red",
    "underpowered": "orange",
}
BAR_FACTOR = 4.0  # measured over published at the ends of a deviation bar
HEADERS = ("quantity", "published", "by the paper's rule", "as shipped here", "evidence, n", "where and how")
STYLE = """
:root{color-scheme:light dark;--green:#2a8a4a;--blue:#2a6fb0;--red:#c0392b;--orange:#c77d0a;--grey:#8886}
body{font:15px/1.45 system-ui,sans-serif;margin:auto;max-width:90rem;padding:1rem}
table{border-collapse:collapse;width:100%;table-layout:fixed}
td,th{padding:.3rem .5rem;text-align:left;vertical-align:top}
tr{border-bottom:1px solid var(--grey)}thead th{position:sticky;top:0;background:Canvas}
.counts{width:auto;table-layout:auto;display:block;overflow-x:auto}.counts td{overflow-wrap:normal}
th:nth-child(2){width:26%}td{overflow-wrap:anywhere}.counts th:nth-child(2){width:auto}
.counts td+td{text-align:right}
form{display:flex;flex-wrap:wrap;gap:.5rem;margin:1rem 0}input{flex:1;min-width:12rem}
.state{border-left:.4rem solid var(--grey);padding-left:.4rem}.note{opacity:.75;font-size:.85em}
.bar{display:inline-block;width:6rem;height:.5rem;background:var(--grey);position:relative}
.bar i{position:absolute;top:-.2rem;height:.9rem;width:.25rem}.bar::before{
content:"";position:absolute;left:50%;height:100%;border-left:1px solid CanvasText}
.finding{border-left:.3rem solid var(--orange);padding-left:.5rem;margin:.3rem 0}
img{max-width:100%;background:#fff}button{font-size:.8em}h3{margin:1.5rem 0 .3rem}
@media(max-width:50rem){section thead{display:none}section td{display:block}
section td::before{content:attr(data-head) ": ";font-size:.8em;opacity:.7}}
"""
SCRIPT = """
const form=document.querySelector('form'),rows=[...document.querySelectorAll('tr[data-state]')];
function filter(){const f=Object.fromEntries(new FormData(form)),words=f.text.toLowerCase().split(/\\s+/);let n=0;
for(const r of rows){const on=['paper','evidence','state'].every(k=>!f[k]||r.dataset[k]==f[k])&&
words.every(w=>r.textContent.toLowerCase().includes(w));r.hidden=!on;n+=on}
for(const s of document.querySelectorAll('section'))s.hidden=!s.querySelector('tr[data-state]:not([hidden])');
document.querySelector('output').value=n+' rows'}
form.addEventListener('input',filter);form.addEventListener('submit',e=>e.preventDefault());
document.addEventListener('click',e=>{const c=e.target.dataset.copy,f=e.target.dataset.filter;
if(c){navigator.clipboard.writeText(c);e.target.textContent='copied'}
if(f){form.reset();form.elements.evidence.value=f;filter()}});filter();
"""


def scoreboard_page(rows: Sequence[Row]) -> str:
    """Return the HTML page."""
    headers, *lines = counts_by_evidence(rows)
    counts = "".join(
        f"<tr><td>{_filter_link(str(kind))}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for kind, *cells in lines
    )
    meanings = "".join(f"<li><b>{state}</b>: {escape(meaning)}</li>" for state, meaning in STATE_MEANINGS.items())
    rules = "".join(f"<li><b>{kind}</b>: {escape(rule.reason)}</li>" for kind, rule in RULES.items())
    files = ", ".join(f'<a href="{name}">{name}</a>' for name in (PAGE, CSV, INDEX))
    papers = "".join(
        _paper(paper, list(of_paper)) for paper, of_paper in groupby(rows, key=lambda row: row.number.paper)
    )
    about = "".join(f"<li>{_code(escape(line))}</li>" for line in measured_with(rows))
    rates = ", ".join(
        f"{part or 'others'}: {rate:.1e} operations per second on one {machine} ({file}.json)"
        for part, of_machines in RATES.items()
        for machine, (rate, file) in of_machines.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{TITLE}</title><style>{STYLE}</style></head><body>
<h1>{TITLE}</h1><p>{escape(SCOPE)} Other forms of this page: {files}.</p>
<table class="counts"><thead><tr>{"".join(f"<th>{header}</th>" for header in headers)}</tr></thead>{counts}</table>
<p>Two counts: by the paper's rule / as shipped here. A row has the worse of both states.</p>
<details><summary>States, tolerances, machines</summary><ul>{meanings}</ul><ul>{rules}</ul><ul>{about}</ul>
<p>Hours follow from the counted operations of a training and the measured rate of a step, by the name of the network:
{rates}.</p>
</details>
<form>{_select("paper", PAPERS)}{_select("evidence", EVIDENCE)}{_select("state", STATES)}
<input name="text" type="search" placeholder="words" aria-label="words"><output></output></form>
{papers}<script>{SCRIPT}</script></body></html>
"""


def _paper(paper: str, rows: Sequence[Row]) -> str:
    title = (
        f'<h2>{escape(PAPERS[paper].title)}</h2><p><a href="{URLS[paper]}">{URLS[paper]}</a>, <a href="{paper}.json">'
    )
    return f"{title}{paper}.json</a></p>" + "".join(_item(item, of_item) for item, of_item in by_item(rows).items())


def _item(item: str, rows: Sequence[Row]) -> str:
    """Return the heading, the findings, the plots and the table of an item."""
    findings = dict.fromkeys(row.number.finding for row in rows if row.number.finding)
    sections = {row.section.key: row.section for row in rows if row.section is not None and row.section.panels}
    plots = "".join(
        f'<details><summary>plot: {escape(section.title)}</summary><img loading="lazy" alt="{escape(section.title)}" '
        f'src="{plot_name(rows[0].number.paper, key)}"></details>'
        for key, section in sections.items()
    )
    head = "".join(f"<th>{header}</th>" for header in HEADERS)
    return (
        f"<section><h3>{escape(item)}</h3>"
        + "".join(f'<p class="finding">{escape(finding)}</p>' for finding in findings)
        + f"{plots}<table><thead><tr>{head}</tr></thead>{''.join(map(_row, rows))}</table></section>\n"
    )


def _row(row: Row) -> str:
    number = row.number
    unit = f" {number.unit}" if any(map(str.isdigit, number.text)) else ""  # statements such as "similar" have none
    source = escape(f"{number.kind}, {number.place}: “{number.quotation}”")
    about = escape(", ".join(filter(None, (number.settings, number.network))))
    shipped = "the same" if row.is_one and row.is_measured else "" if row.is_one else _side(row, row.shipped)
    cells = [
        f'<a href="#{anchor(row)}">{escape(number.quantity)}</a>{_note(about)}',
        f"{escape(number.text)}{unit}{_note(source)}",
        _side(row, row.paper),
        shipped,
        f"{number.evidence}{_note(repeats_text(row))}",
        _origin(row),
    ]
    body = "".join(f'<td data-head="{header}">{cell}</td>' for header, cell in zip(HEADERS, cells, strict=True))
    return (
        f'<tr id="{anchor(row)}" data-paper="{number.paper}" data-evidence="{number.evidence}" '
        f'data-state="{row.state}">{body}</tr>\n'
    )


def _side(row: Row, comparison: Comparison) -> str:
    """Return a measurement with its spread, its verdict and its bar."""
    verdict, number = comparison.verdict, row.number
    color = COLORS.get(verdict.state, "grey")
    measured = "" if comparison.measured is None else f"{number_text(comparison.measured)} {comparison.unit} "
    spread = spread_text(number, comparison.spread) if measured else ""
    reason = _code(escape(f"{verdict.state}{': ' * bool(verdict.reason)}{verdict.reason}"))
    bar = _bar(row, comparison, color)
    return (
        f'<div class="state" style="border-color:var(--{color})">{escape(measured)}{spread} {bar}'
        f"{_note(reason)}{_note(escape(comparison.what) if measured else '')}{_note(escape(comparison.note))}</div>"
    )


def _bar(row: Row, comparison: Comparison, color: str) -> str:
    """Return a bar with measured over published on a logarithmic scale, if both are positive numbers."""
    number, measured = row.number, comparison.measured
    if isinstance(number.value, str) or number.is_bounded or not isinstance(measured, (int, float)):
        return ""
    if measured <= 0 or number.number <= 0:
        return ""
    place = 50 + 50 * max(-1.0, min(1.0, math.log(measured / number.number) / math.log(BAR_FACTOR)))
    title = f"measured over published: {measured / number.number:.3g}"
    return f'<span class="bar" title="{title}"><i style="left:{place:.0f}%;background:var(--{color})"></i></span>'


def _origin(row: Row) -> str:
    """Return the command with a copy button, commit, date, links to the experiment, and the cost of a training."""
    command, experiment = escape(row.command), row.number.network
    parts = [f'<code>{command}</code> <button data-copy="{command}">copy</button>']
    if row.commit:
        parts.append(f'<div class="note"><code>{row.commit[:10]}</code>, {row.date}</div>')
    if row.paper.operations is not None:
        parts.append(f'<a href="../../experiments/{experiment}.json">{experiment}.json</a>')
    return "".join(parts) + _note(row.cost)


def _note(text: str) -> str:
    return f'<div class="note">{text}</div>' if text else ""


def _code(text: str) -> str:
    """Return text with its parts between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)


def _filter_link(kind: str) -> str:
    return f'<button data-filter="{kind}">{kind}</button>' if kind in EVIDENCE else kind


def _select(name: str, options: Iterable[str]) -> str:
    choices = "".join(f"<option>{option}</option>" for option in options)
    return f'<select name="{name}" aria-label="{name}"><option value="">every {name}</option>{choices}</select>'
