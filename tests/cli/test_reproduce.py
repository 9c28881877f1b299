"""``zoo reproduce`` never shows a number that it did not measure, and never measures one twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.cli.conftest import Cli, Printed
from tests.data.imagenet import NUM_IMAGES, make_imagenet, shrink_imagenet
from zoo.config.parse import parse_experiment
from zoo.config.published import Digest, published
from zoo.errors import EXIT_KEYBOARD_INTERRUPT, WeightsError
from zoo.registry.load_network import LoadedNetwork
from zoo.reproduce import inplace_abn_scores
from zoo.reproduce.published_numbers import published_numbers
from zoo.run import scoring
from zoo.weights import md5_of
from zoo.weights._cache import weights_path

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


Reproduce = Callable[..., tuple[Printed, list[Any]]]


@pytest.fixture
def reproduce(cli: Cli, data: Path, tmp_path: Path) -> Reproduce:
    """Return the function that runs ``zoo reproduce imagenet``, and returns what it prints and the rows of its file."""

    def run(*options: str, models: str = NAME, code: int = 0) -> tuple[Printed, list[Any]]:
        out = tmp_path / "out"
        command = ["reproduce", "imagenet", "--data", data, "--out", out, "-j", 0, "--models", models]
        printed, file = cli(*command, *options, code=code), out / "imagenet.json"
        return printed, json.loads(file.read_text())["rows"] if file.exists() else []

    return run


CENTER = ("--protocols", "center224")


def test_all_protocols_are_measured_beside_published_scores(
    loads: Loads, reproduce: Reproduce, data: Path, tmp_path: Path
) -> None:
    printed, rows = reproduce()
    assert [(row["network"], row["protocol"]) for row in rows] == [
        (NAME, protocol) for protocol in ("center224", "tencrop224", "center320")
    ]
    for row in rows:
        assert (row["top1"], row["top5"], row["count"]) == (100.0, 100.0, NUM_IMAGES)
        assert row["weights_md5"] == published()[NAME].digest.digits
        assert row["environment"]["torch"] == torch.__version__
        assert row["command"].startswith(f"zoo reproduce imagenet --data {data} --out {tmp_path / 'out'}")
    assert printed.out.count("reproduced: +0.00 points") == 2 * 3
    assert str(tmp_path / "out" / "imagenet.json") in printed.out


def test_wrong_score_exits_with_3_unless_underpowered(loads: Loads, reproduce: Reproduce) -> None:
    loads.model.wrong = True
    printed, (row,) = reproduce(*CENTER, "--limit", "4")
    assert row["count"] == 4
    assert "underpowered: scored on 4 of 6 images" in printed.out
    printed, (row,) = reproduce(*CENTER, code=3)  # replaces the row of the limited run
    assert (row["count"], row["top1"]) == (NUM_IMAGES, 0.0)
    assert "off: -100.00 points" in printed.out


def test_interrupted_run_keeps_its_scores_and_continues(
    loads: Loads, reproduce: Reproduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, calls = scoring.score, []

    def interrupted(network: LoadedNetwork, data: Path, protocol: Any, **options: Any) -> Any:
        calls.append(protocol)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(network, data, protocol, **options)

    monkeypatch.setattr(scoring, "score", interrupted)
    assert [row["protocol"] for row in reproduce(code=EXIT_KEYBOARD_INTERRUPT)[1]] == ["center224"]
    assert len(reproduce()[1]) == 3
    assert calls == ["center224", "tencrop224", "tencrop224", "center320"]
    loads.names.clear()
    reproduce()
    assert loads.names == [], "everything is measured"


def test_networks_without_weights_are_skipped_with_reason(loads: Loads, reproduce: Reproduce) -> None:
    loads.without_weights = {NAME}
    printed, rows = reproduce(*CENTER, models="resnet*", code=2)
    assert [row["network"] for row in rows] == ["resnet50_ipabn-sync_lr_512", "resnet101_ipabn-sync_lr_512"]
    assert f"not measured: `zoo reproduce imagenet --data DIR --models {NAME}`" in printed.out
    assert f"left out: {NAME}: {NAME}: no weights" in printed.out


def test_unknown_network_raises_before_networks_are_loaded(loads: Loads, reproduce: Reproduce) -> None:
    assert "'resnet43'" in reproduce(models="resnet43", code=2)[0].err
    assert loads.names == []


@pytest.mark.parametrize("text", ["[]", '{"benchmark": "imagenet", "rows": [{}]}'])
def test_foreign_file_is_not_overwritten(loads: Loads, data: Path, tmp_path: Path, text: str, cli: Cli) -> None:
    (tmp_path / "imagenet.json").write_text(text)
    printed = cli("reproduce", "imagenet", "--data", data, "--out", tmp_path, code=2)
    assert "is not a report of zoo reproduce" in printed.err
    assert (tmp_path / "imagenet.json").read_text() == text


def test_verified_weights_from_cache_are_scored(
    reproduce: Reproduce, data: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.reproduce.imagenet.NUM_CLASSES", 2)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    (file := weights_path(NAME)).parent.mkdir(parents=True)
    torch.save(zoo.get(NAME).state_dict(), file)
    printed, rows = reproduce(*CENTER, code=2)
    assert rows == [], "a file with another md5 than the published one is not scored"
    digits = published()[NAME].digest.digits
    assert f"left out: {NAME}: {file}: the md5 is {md5_of(file)}, not {digits}" in printed.out
    monkeypatch.setattr(published()[NAME], "digest", Digest("md5", md5_of(file)))
    _, (row,) = reproduce(*CENTER)
    validation = tmp_path / "validation.json"
    cli("validate", NAME, data, "--protocol", "center224", "-j", 0, "--json", validation)
    expected = json.loads(validation.read_text())
    assert {key: row[key] for key in expected if key not in ("protocol", "environment")} == {
        key: value for key, value in expected.items() if key not in ("protocol", "environment")
    }
    assert row["weights_md5"] == md5_of(file)
