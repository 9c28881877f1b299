"""A script for timm runs on a network of this package after changing one line, with the same output."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("timm")
pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "timm_scripts"
TIMMS, OURS = "from timm import create_model\n", "from zoo import create_model\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two classes, dark and bright noise, with four images each."""
    generator = torch.Generator().manual_seed(0)
    for name, low in (("bright", 128), ("dark", 0)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(low, low + 128, (48, 40, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a script with the original or the changed line and returns its output."""

    def run(script: str, argument: Path, line: str) -> list[str]:
        text = (SCRIPTS / script).read_text()
        assert text.count(TIMMS) == 1
        (tmp_path / script).write_text(text.replace(TIMMS, line))
        monkeypatch.setattr(sys, "argv", [script, str(argument)])
        runpy.run_path(str(tmp_path / script))
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_network_is_fine_tuned_like_timm_network(folder: Path, printed) -> None:
    ours = printed("fine_tuning.py", folder, OURS)
    assert ours[0] == "steps 6 groups of parameters 20"
    assert ours[0] == printed("fine_tuning.py", folder, TIMMS)[0]
    assert ours[1] == "accuracy 100.0"
