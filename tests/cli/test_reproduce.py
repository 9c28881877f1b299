"""``zoo reproduce`` never shows a number that it did not measure, and never measures one twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.cli.conftest import NUM_VAL, Run
from tests.data.imagenet import NUM_IMAGES, make_imagenet, shrink_imagenet
from tests.weights.server import names_are_unknown
from zoo.cli import main
from zoo.config import parse_experiment
from zoo.config.published import Published, published
from zoo.errors import EXIT_KEYBOARD_INTERRUPT, WeightsError
from zoo.run import scoring
from zoo.run.scoring import LoadedNetwork
from zoo.tasks.protocols import PROTOCOLS
from zoo.weights import md5_of
from zoo.weights.cache import weights_path

pytestmark = pytest.mark.slow  # scores networks

NAME = "resnet34_ipabn-sync_lr_512"
SCRIPTS = Path(__file__).parents[2] / "scripts"


class Brightness(nn.Module):
    """Knows a bright image from a dark one, and says the opposite if ``wrong``."""

    wrong = False

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.mean(dim=(1, 2, 3))
        return torch.stack([-brightness, brightness], dim=1) * (-1 if self.wrong else 1)


class Loads:
    """Stands in for loading networks: counts, and fails for names without weights."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.without_weights: set[str] = set()
        self.model = Brightness()

    def __call__(self, name: str, weights: Path | None = None) -> LoadedNetwork:
        self.names.append(name)
        if name in self.without_weights:
            raise WeightsError(f"{name}: no\nweights")
        return LoadedNetwork(name, self.model, parse_experiment({"network": {"classes": 2}}, "test"), name)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loads:
    """Let six images count as ImageNet, and a network of two classes as each published one; scores are 100 %."""
    shrink_imagenet(monkeypatch)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    loads = Loads()
    monkeypatch.setattr(scoring, "load_network", loads)
    perfect = {protocol: {"top1": 100.0, "top5": 100.0} for protocol in PROTOCOLS}
    monkeypatch.setattr(Published, "scores", property(lambda self: perfect))
    return loads


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_imagenet(tmp_path / "data")


def _reproduce(data: Path, out: Path, *options: str, models: tuple[str, ...] = (NAME,)) -> tuple[int, dict[str, Any]]:
    command = ["reproduce", "imagenet", "--data", str(data), "--out", str(out), "-j", "0"]
    code = main([*command, "--models", *models, *options])
    return code, json.loads((out / "imagenet.json").read_text())


def test_all_protocols_are_measured_and_compared(loads: Loads, data: Path, tmp_path: Path) -> None:
    code, content = _reproduce(data, tmp_path / "out")
    assert code == 0
    assert [row["protocol"] for row in content["rows"]] == ["center224", "tencrop224", "center320"]
    for row in content["rows"]:
        assert (row["state"], row["difference"]) == ("reproduced", {"top1": 0.0, "top5": 0.0})
        assert row["verdict"] == "reproduced: within 0.1 point"
        assert row["standard_error"] == row["measured"]["standard_errors"] == {"top1": 0.0, "top5": 0.0}
        assert (row["images"]["images"], row["images"]["per_class"]) == (NUM_IMAGES, [3, 3])
        assert row["images"]["digest"] == row["measured"]["data"]
        assert row["measured"]["count"] == NUM_IMAGES
        assert row["measured"]["weights_md5"] == row["weights_md5"] == published()[NAME].md5
        assert row["measured"]["environment"]["torch"] == torch.__version__
    assert content["data"]["is_imagenet"]
    assert content["missing"] == []
    assert "within 0.1 point" in (tmp_path / "out" / "imagenet.md").read_text()


def test_a_score_that_is_off_ends_with_exit_code_3(loads: Loads, data: Path, tmp_path: Path) -> None:
    loads.model.wrong = True
    code, content = _reproduce(data, tmp_path, "--protocols", "center224")
    assert code == 3
    assert content["rows"][0]["verdict"] == "off: -100.00 points (top1)"


def test_rows_measured_before_are_reused_and_marked(loads: Loads, data: Path, tmp_path: Path) -> None:
    _, before = _reproduce(data, tmp_path, "--protocols", "center224")
    loads.names.clear()
    code, after = _reproduce(data, tmp_path, "--protocols", "center224")
    assert (code, loads.names) == (0, [])
    assert [row["reused"] for row in before["rows"] + after["rows"]] == [False, True]
    assert after["rows"][0]["measured"] == before["rows"][0]["measured"]


def test_other_data_another_limit_and_other_weights_are_measured_anew(
    loads: Loads, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*options: str) -> list[dict[str, Any]]:
        return _reproduce(data, tmp_path, "--protocols", "center224", *options)[1]["rows"]

    rows()
    assert not rows("--limit", "4")[0]["reused"]
    assert rows("--limit", "100")[0]["reused"], "a limit above the number of images is none"
    with (data / "val/n01443537/ILSVRC2012_val_00000001.JPEG").open("ab") as file:
        file.write(b"more")
    assert not rows()[0]["reused"]
    monkeypatch.setattr(published()[NAME], "md5", "0" * 32)
    assert not rows()[0]["reused"]
    content = json.loads((tmp_path / "imagenet.json").read_text())
    assert len(content["measurements"]) == 4, "nothing that was measured is lost"


def test_a_limited_run_gets_no_verdict(loads: Loads, data: Path, tmp_path: Path) -> None:
    loads.model.wrong = True
    code, content = _reproduce(data, tmp_path, "--protocols", "center224", "--limit", "4")
    assert code == 0
    assert content["rows"][0]["verdict"] == f"underpowered: a subset of 4 of {NUM_IMAGES} images"
    assert content["rows"][0]["difference"] is None
    assert content["limit"] == 4
    assert "of which only 4 are scored" in (tmp_path / "imagenet.md").read_text()


def test_an_interrupted_run_keeps_its_rows_and_continues(
    loads: Loads, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, calls = scoring.score, []

    def interrupted(network: LoadedNetwork, data: Path, protocol: Any, **options: Any) -> Any:
        calls.append(protocol.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(network, data, protocol, **options)

    monkeypatch.setattr(scoring, "score", interrupted)
    code, _ = _reproduce(data, tmp_path)
    assert code == EXIT_KEYBOARD_INTERRUPT
    verdicts = [row["verdict"] for row in json.loads((tmp_path / "imagenet.json").read_text())["rows"]]
    assert verdicts == ["reproduced: within 0.1 point", "needs data: not run", "needs data: not run"]
    code, content = _reproduce(data, tmp_path)
    assert code == 0
    assert [row["reused"] for row in content["rows"]] == [True, False, False]
    assert calls == ["center224", "tencrop224", "tencrop224", "center320"]


def test_missing_weights_leave_their_rows_open_and_say_where_they_belong(
    loads: Loads, data: Path, tmp_path: Path
) -> None:
    loads.without_weights = {NAME}
    code, content = _reproduce(data, tmp_path, models=("resnet*",))
    assert code == 2
    for row in content["rows"]:
        missing = row["network"] == NAME
        assert (row["measured"] is None, row["verdict"] == "needs data: not run") == (missing, missing)
        assert row["reason"] == (f"{NAME}: no weights" if missing else None)
    assert content["rows"][3]["command"] == f"zoo reproduce imagenet --data {data} --models {NAME} --out {tmp_path}"
    (line,) = content["missing"]
    assert f"{tmp_path / 'cache' / 'weights' / NAME}.pth.tar (md5 {published()[NAME].md5})" in line
    assert f"`zoo fetch {NAME}`" in line


def test_without_a_network_the_server_is_asked_for_once_and_the_reason_told_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = names_are_unknown(monkeypatch)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZOO_WEIGHTS_URL", "https://mirror.example/weights")
    monkeypatch.delenv("ZOO_OFFLINE")
    code, content = _reproduce(data, tmp_path, models=("*",))
    assert code == 2
    assert asked == ["mirror.example"]
    reasons = list(dict.fromkeys(row["reason"] for row in content["rows"]))
    assert len(content["rows"]) == 3 * 9
    assert "the host name cannot be resolved" in reasons[0]
    assert reasons[1:] == [f"no weights: see {next(iter(published()))}"]


def test_without_data_nothing_is_loaded_and_everything_missing_is_listed(
    loads: Loads, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "imagenet", "--data", str(tmp_path / "none"), "--out", str(tmp_path)]
    assert main(command) == 2
    content = json.loads((tmp_path / "imagenet.json").read_text())
    assert loads.names == []
    assert len(content["rows"]) == 3 * 9
    assert {row["verdict"] for row in content["rows"]} == {"needs data: not run"}
    assert {row["reason"] for row in content["rows"]} == {"no data"}
    assert len(content["missing"]) == 1 + 9
    assert str(tmp_path / "none/val/n01440764/ILSVRC2012_val_00000293.JPEG") in content["missing"][0]
    assert content["missing"][0] in capsys.readouterr().out


def test_a_checkpoint_is_scored_with_its_own_crop_beside_the_published(finished: Run, tmp_path: Path) -> None:
    code, content = _reproduce(finished.data, tmp_path, models=(str(finished.checkpoint),))
    assert code == 0
    assert [row["protocol"] for row in content["rows"]] == ["center10-scale12", "tencrop10-scale12"]
    assert {row["verdict"] for row in content["rows"]} == {"nothing published"}
    assert {row["measured"]["count"] for row in content["rows"]} == {NUM_VAL}
    assert {row["weights_md5"] for row in content["rows"]} == {md5_of(finished.checkpoint)}
    assert "not the ImageNet validation set" in (tmp_path / "imagenet.md").read_text()


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", '{"benchmark": "other"}', '{"benchmark": "imagenet", "measurements": [{}]}']
)
def test_a_foreign_file_is_not_overwritten(
    loads: Loads, data: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "imagenet.json").write_text(text)
    assert main(["reproduce", "imagenet", "--data", str(data), "--out", str(tmp_path)]) == 2
    assert "is not a report of zoo reproduce" in capsys.readouterr().err
    assert (tmp_path / "imagenet.json").read_text() == text


def test_verified_weights_from_the_cache_are_what_gets_scored(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    (file := weights_path(NAME)).parent.mkdir(parents=True)
    torch.save(zoo.get(NAME).state_dict(), file)
    code, content = _reproduce(data, tmp_path, "--protocols", "center224")
    assert code == 2, "a file with another md5 than the published one is not scored"
    assert content["rows"][0]["measured"] is None
    monkeypatch.setattr(published()[NAME], "md5", md5_of(file))
    code, content = _reproduce(data, tmp_path, "--protocols", "center224")
    validation = tmp_path / "validation.json"
    assert main(["validate", NAME, str(data), "--protocol", "center224", "-j", "0", "--json", str(validation)]) == 0
    expected = json.loads(validation.read_text())
    assert code == 0
    assert {key: content["rows"][0]["measured"][key] for key in expected} == expected
    assert expected["weights_md5"] == md5_of(file)
    assert content["rows"][0]["verdict"] == f"underpowered: a subset of {NUM_IMAGES} of 50,000 images"
