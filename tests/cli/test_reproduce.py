"""``zoo reproduce`` never shows a number that it did not measure, and never measures one twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.data.imagenet import NUM_IMAGES, make_imagenet, shrink_imagenet
from zoo.cli import main
from zoo.config.parse import parse_experiment
from zoo.config.published import Digest, published
from zoo.errors import EXIT_KEYBOARD_INTERRUPT, WeightsError
from zoo.registry.load_network import LoadedNetwork
from zoo.reproduce import inplace_abn_scores
from zoo.reproduce.published_numbers import published_numbers
from zoo.run import scoring
from zoo.weights import md5_of
from zoo.weights.cache import weights_path

pytestmark = pytest.mark.slow  # scores networks

NAME = "resnet34_ipabn-sync_lr_512"


class Brightness(nn.Module):
    """Classifies images as bright or dark; inverts the answer if ``wrong``."""

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
    """Replace ImageNet by six images, and every published network by one that is always right."""
    shrink_imagenet(monkeypatch)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    loads = Loads()
    monkeypatch.setattr("zoo.reproduce.imagenet.load_network", loads)
    numbers = {key: each.model_copy(update={"value": 100}) for key, each in published_numbers("inplace_abn").items()}
    monkeypatch.setattr(inplace_abn_scores, "published_numbers", lambda _: numbers)
    return loads


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_imagenet(tmp_path / "data")


def _reproduce(data: Path, out: Path, *options: str, models: tuple[str, ...] = (NAME,)) -> tuple[int, list[Any]]:
    command = ["reproduce", "imagenet", "--data", str(data), "--out", str(out), "-j", "0"]
    code = main([*command, "--models", *models, *options])
    file = out / "imagenet.json"
    return code, json.loads(file.read_text())["rows"] if file.exists() else []


def test_all_protocols_are_measured_beside_published_scores(
    loads: Loads, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = _reproduce(data, tmp_path / "out")
    assert code == 0
    assert [(row["network"], row["protocol"]) for row in rows] == [
        (NAME, protocol) for protocol in ("center224", "tencrop224", "center320")
    ]
    for row in rows:
        assert (row["top1"], row["top5"], row["count"]) == (100.0, 100.0, NUM_IMAGES)
        assert row["weights_md5"] == published()[NAME].digest.digits
        assert row["environment"]["torch"] == torch.__version__
        assert row["command"].startswith(f"zoo reproduce imagenet --data {data} --out {tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert printed.count("reproduced: +0.00 points") == 2 * 3
    assert str(tmp_path / "out" / "imagenet.json") in printed


def test_wrong_score_exits_with_3(loads: Loads, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads.model.wrong = True
    code, _ = _reproduce(data, tmp_path, "--protocols", "center224")
    assert code == 3
    assert "off: -100.00 points" in capsys.readouterr().out


def test_limited_run_is_underpowered_and_replaced_by_whole_one(
    loads: Loads, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads.model.wrong = True
    code, (row,) = _reproduce(data, tmp_path, "--protocols", "center224", "--limit", "4")
    assert (code, row["count"]) == (0, 4)
    assert "underpowered: scored on 4 of 6 images" in capsys.readouterr().out
    loads.model.wrong = False
    code, (row,) = _reproduce(data, tmp_path, "--protocols", "center224")
    assert (code, row["count"], row["top1"]) == (0, NUM_IMAGES, 100.0)


def test_interrupted_run_keeps_its_scores_and_continues(
    loads: Loads, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, calls = scoring.score, []

    def interrupted(network: LoadedNetwork, data: Path, protocol: Any, **options: Any) -> Any:
        calls.append(protocol)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(network, data, protocol, **options)

    monkeypatch.setattr(scoring, "score", interrupted)
    code, rows = _reproduce(data, tmp_path)
    assert (code, [row["protocol"] for row in rows]) == (EXIT_KEYBOARD_INTERRUPT, ["center224"])
    code, rows = _reproduce(data, tmp_path)
    assert (code, len(rows)) == (0, 3)
    assert calls == ["center224", "tencrop224", "tencrop224", "center320"]
    loads.names.clear()
    assert (_reproduce(data, tmp_path)[0], loads.names) == (0, []), "everything is measured"


def test_networks_without_weights_are_skipped_with_reason(
    loads: Loads, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads.without_weights = {NAME}
    code, rows = _reproduce(data, tmp_path, "--protocols", "center224", models=("resnet*",))
    assert code == 2
    assert [row["network"] for row in rows] == ["resnet50_ipabn-sync_lr_512", "resnet101_ipabn-sync_lr_512"]
    printed = capsys.readouterr().out
    assert f"not measured: `zoo reproduce imagenet --data DIR --models {NAME}`" in printed
    assert f"left out: {NAME}: {NAME}: no weights" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data: no images are given; give the ImageNet validation set"),
        (["--data", "none"], "none: this folder has 0 folders in val/; give the ImageNet validation set"),
        (["--data", "DATA", "--models", "resnet43"], "no published network is called 'resnet43'"),
    ],
)
def test_unusable_data_raises_before_networks_are_loaded(
    loads: Loads, data: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(data) if word == "DATA" else word for word in options]
    assert main(["reproduce", "imagenet", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert loads.names == []


@pytest.mark.parametrize("text", ["[]", '{"benchmark": "imagenet", "rows": [{}]}'])
def test_foreign_file_is_not_overwritten(
    loads: Loads, data: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "imagenet.json").write_text(text)
    assert main(["reproduce", "imagenet", "--data", str(data), "--out", str(tmp_path)]) == 2
    assert "is not a report of zoo reproduce" in capsys.readouterr().err
    assert (tmp_path / "imagenet.json").read_text() == text


def test_verified_weights_from_cache_are_scored(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.reproduce.imagenet.NUM_CLASSES", 2)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    (file := weights_path(NAME)).parent.mkdir(parents=True)
    torch.save(zoo.get(NAME).state_dict(), file)
    code, rows = _reproduce(data, tmp_path, "--protocols", "center224")
    assert (code, rows) == (2, []), "a file with another md5 than the published one is not scored"
    assert (
        f"left out: {NAME}: {file}: the md5 is {md5_of(file)}, not {published()[NAME].digest.digits}"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(published()[NAME], "digest", Digest("md5", md5_of(file)))
    code, (row,) = _reproduce(data, tmp_path, "--protocols", "center224")
    validation = tmp_path / "validation.json"
    assert main(["validate", NAME, str(data), "--protocol", "center224", "-j", "0", "--json", str(validation)]) == 0
    expected = json.loads(validation.read_text())
    del expected["protocol"]
    assert code == 0
    assert {key: row[key] for key in expected if key != "environment"} | {
        "environment": expected["environment"]
    } == expected
    assert row["weights_md5"] == md5_of(file)
