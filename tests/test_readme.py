"""The README says what the package does: its tables are the golden files, its code runs, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from zoo.cli import build_parser
from zoo.models.revnet import REVERSIBLE_TWINS
from zoo.registry import options_of, published

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GOLDEN = json.loads((ROOT / "tests" / "golden" / "networks.json").read_text())


def networks_table() -> str:
    rows = ["| network | parameters | with `input_3x3` | other options |", "| --- | ---: | ---: | --- |"]
    for name in (case for case in GOLDEN if "+" not in case):
        stem = GOLDEN.get(f"{name}+input_3x3")
        other = ", ".join(f"`{option}`" for option in options_of(name) if option != "input_3x3")
        columns = [f"`{name}`", f"{GOLDEN[name]['parameters']:,}", f"{stem['parameters']:,}" if stem else "", other]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def published_table() -> str:
    rows = ["| name | batch | 224 | 224, ten crops | 320 | weights |", "| --- | ---: | --- | --- | --- | --- |"]
    for name, entry in published().items():
        scores = [entry["scores"][key] for key in ("center224", "tencrop224", "center320")]
        columns = " | ".join(f"{score['top1']:.2f} / {score['top5']:.2f}" for score in scores)
        link = f"[file](https://drive.google.com/file/d/{entry['drive_id']}/view)"
        rows.append(f"| `{name}` | {entry['batch']} | {columns} | {link} |")
    return "\n".join(rows)


def held_table() -> str:
    held = json.loads((ROOT / "tests" / "golden" / "held_bytes.json").read_text())
    strategies = list(dict.fromkeys(key for row in held.values() for key in row))
    heads = ["std-BN, MB", *(f"`{memory}`" for memory in strategies[1:])]
    rows = [f"| network | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for name, row in held.items():
        columns = [f"{row[key]:.{1 if key == 'standard_mb' else 3}f}" if key in row else "" for key in strategies]
        rows.append(f"| `{name}` | {' | '.join(columns)} |")
    return "\n".join(rows)


def reversible_table() -> str:
    held = json.loads((ROOT / "tests" / "golden" / "reversible_bytes.json").read_text())
    strategies = list(held["resnet101_preact"])
    rows = [f"| network | {' | '.join(['std-BN, MB', *strategies[1:]])} |", f"| --- |{' ---: |' * len(strategies)}"]
    for name, row in held.items():
        columns = [f"{row[key]:.{1 if key == 'standard_mb' else 3}f}" for key in strategies]
        rows.append(f"| `{name}`, `{REVERSIBLE_TWINS[name]}` | {' | '.join(columns)} |")
    return "\n".join(rows)


TABLES = [
    ("networks", networks_table),
    ("published", published_table),
    ("held", held_table),
    ("reversible", reversible_table),
]


@pytest.mark.parametrize(("section", "table"), TABLES)
def test_the_tables_are_those_of_the_golden_files(section, table):
    text = README.partition(f"<!-- {section} -->\n")[2].partition(f"\n<!-- /{section} -->")[0]
    assert text == table()


def test_python_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_commands_are_understood():
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("zoo ")]
    assert len(commands) > 10
    for arguments in commands:
        build_parser().parse_args(arguments)


def test_links_to_files_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_checksums_name_the_published_files():
    lines = [line.split("  ") for line in (ROOT / "checksums.md5").read_text().splitlines()]
    entries = json.loads((ROOT / "zoo" / "published.json").read_text())
    assert lines == [[entry["md5"], f"{entry['name']}.pth.tar"] for entry in entries]
