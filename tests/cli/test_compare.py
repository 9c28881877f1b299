"""``zoo compare`` tests two files that ``zoo validate --predictions`` has written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import NUM_VAL, Run
from zoo.cli import build_parser, main
from zoo.weights import read_checkpoint


@pytest.fixture(scope="module")
def files(finished: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Predictions of the trained network and of one that calls everything class1, for the same images."""
    folder = tmp_path_factory.mktemp("predictions")
    content = read_checkpoint(finished.checkpoint)
    content["state_dict"]["classifier.fc.weight"].zero_()
    content["state_dict"]["classifier.fc.bias"].copy_(torch.tensor([0.0, 9.0]))
    torch.save(content, folder / "constant.pth")
    paths = [folder / "trained.csv", folder / "constant.csv"]
    for weights, path in zip((finished.checkpoint, folder / "constant.pth"), paths, strict=True):
        assert main(["validate", str(weights), str(finished.data), "-j", "0", "--predictions", str(path)]) == 0
    return paths


def test_two_runs_are_compared_by_their_predictions(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", *map(str, files), "--json", str(tmp_path / "compared.json")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"| A: {files[0]}" in printed
    assert "top-1: no difference is shown" in printed  # seven images cannot show one
    content = json.loads((tmp_path / "compared.json").read_text())
    assert (content["count"], content["scores"][1]["top1"]) == (NUM_VAL, pytest.approx(100 * 3 / 7))
    assert content["environment"]["torch"] == torch.__version__
    build_parser().parse_args(shlex.split(content["command"])[1:])
    assert main(["compare", str(files[0])]) == 0
    assert "B:" not in capsys.readouterr().out


def test_images_that_real_does_not_have_are_refused(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.json").write_text(json.dumps([[0]] * 50_000))
    assert main(["compare", str(files[0]), "--real", str(tmp_path / "real.json")]) == 2
    assert "class0/0.png is not an image of ImageNet's validation set" in capsys.readouterr().err


def test_what_is_read_is_not_overwritten(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before, same = files[1].read_bytes(), files[1].parent / ".." / files[1].parent.name / files[1].name
    assert main(["compare", *map(str, files), "--json", str(same)]) == 2
    assert "--json would overwrite an input" in capsys.readouterr().err
    assert files[1].read_bytes() == before
