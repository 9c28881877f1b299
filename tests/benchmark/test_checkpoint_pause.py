"""The pause of training for a checkpoint is made of what stands still, and nothing is left on the disk."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.engine import checkpoint, snapshot

SLEEP_S = 0.2


def test_a_slow_disk_is_waited_for_only_by_a_save_that_waits_and_a_slow_copy_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fill = checkpoint.write, snapshot._fill
    monkeypatch.setattr(checkpoint, "write", lambda *args: (time.sleep(SLEEP_S), write(*args)))
    stem = tmp_path / "new" / "checkpoint"
    command = ["benchmark", "checkpoint", "resnet18", "--structure", "1x1x1x1", "--batch", "2", "--size", "32"]
    command += ["--rounds", "2", "--out", str(stem)]

    def measured() -> dict[str, float]:
        assert main(command) == 0
        content = json.loads(stem.with_suffix(".json").read_text())
        assert content["settings"]["bytes of the checkpoint"] > 10_000_000
        assert {path.name for path in stem.parent.iterdir()} == {"checkpoint.json", "checkpoint.md"}
        return {f"{each['provider']}: {each['metric']}": each["median"] for each in content["records"]}

    found = measured()
    assert found["written while training waits: pause"] >= 1000 * SLEEP_S
    parts = ("check of the weights", "save", "wait for the copy")
    pauses = [found[f"written beside a step: of it: {part}"] for part in parts]
    assert max(pauses) <= found["written beside a step: pause"] < 1000 * SLEEP_S

    monkeypatch.setattr(snapshot, "_fill", lambda pairs: (time.sleep(SLEEP_S), fill(pairs)))
    assert measured()["written beside a step: pause"] >= 1000 * SLEEP_S
