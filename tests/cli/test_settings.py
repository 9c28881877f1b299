"""``zoo settings`` prints the schema of experiment files."""

from __future__ import annotations

import json

import pytest

from zoo.cli import main


def test_all_settings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    assert capsys.readouterr().out.startswith("the top level: ")
    assert main(["settings", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["NetworkSpec"]["properties"]["norm"]["default"] == "standard"


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("input.*_val", ["scale_val", "crop_val", "interpolation_val", "crop_mode_val"]),
        ("label_smoothing", ["label_smoothing"]),
        ("warmup", ["warmup_epochs", "warmup_start", "decay_after_warmup"]),
        ("seed", ["seed"]),
        ("gamma", ["gamma", "gamma"]),
    ],
)
def test_pattern_selects_settings_by_their_dotted_name(
    pattern: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", pattern]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")] == keys
