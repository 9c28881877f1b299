"""zoo push writes weights, config.json and a model card into a repository, which zoo and timm load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.cli.conftest import Cli
from tests.hub_server import Hub
from zoo.config.published import Digest, published
from zoo.weights import md5_of, read_state_dict

REPOSITORY = "me/net"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of a small network, which describe it."""
    torch.manual_seed(0)
    model = zoo.get("resnet32_cifar", norm="inplace", num_classes=3)
    described = {**model.built_as.model_dump(mode="json"), "class_names": ["a", "b", "c"]}
    torch.save({"state_dict": model.state_dict(), "network": described}, tmp_path / "w.pth")
    return tmp_path / "w.pth"


def files_of(hub: Hub) -> dict[str, bytes]:
    return hub.repositories[REPOSITORY]["main"]


def card_of(hub: Hub) -> str:
    return files_of(hub)["README.md"].decode()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_pushed_network_loads_unchanged(hub: Hub, weights: Path, cli: Cli) -> None:
    from safetensors.torch import load

    printed = cli("push", weights, weights, REPOSITORY, "--license", "mit").out
    assert re.search(rf"^{hub.url}/me/net/commit/[0-9a-f]{{40}}$", printed, re.MULTILINE)
    assert sorted(files_of(hub)) == ["README.md", "config.json", "model.safetensors"]
    assert_same(load(files_of(hub)["model.safetensors"]), read_state_dict(weights))
    model = zoo.get(f"hf-hub:{REPOSITORY}")
    assert_same(model.state_dict(), read_state_dict(weights))
    assert model.pretrained_cfg["label_names"] == ["a", "b", "c"]
    config = json.loads(files_of(hub)["config.json"])
    assert (config["architecture"], config["num_classes"], config["num_features"]) == ("zoo:resnet32_cifar", 3, 64)
    assert config["label_names"] == ["a", "b", "c"]
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert config["pretrained_cfg"]["mean"] == [0.4914, 0.4822, 0.4465]
    card = card_of(hub)
    front, _, page = card.removeprefix("---\n").partition("---\n")
    assert front.splitlines()[:3] == ["library_name: zoo", "license: mit", "pipeline_tag: image-classification"]
    assert "- Architecture: resnet32_cifar\n- License: mit\n" in page
    assert 'zoo.get("hf-hub:me/net")' in page
    assert "## Scores" not in page


def test_existing_model_card_is_kept_and_weights_are_replaced(hub: Hub, weights: Path, cli: Cli) -> None:
    hub.commit(REPOSITORY, {"README.md": b"mine", "model.safetensors": b"old"})
    cli("push", weights, weights, REPOSITORY, "--license", "mit")
    assert card_of(hub) == "mine"
    assert_same(zoo.get(f"hf-hub:{REPOSITORY}").state_dict(), read_state_dict(weights))


def test_license_is_taken_from_published_weights(
    hub: Hub, weights: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = published()["resnet34_ipabn-sync_lr_512"]
    monkeypatch.setattr(entry, "digest", Digest("md5", md5_of(weights)))
    cli("push", weights, weights, REPOSITORY)
    assert "license: other\nlicense_name: imagenet-terms-of-access\n" in card_of(hub)
    assert "- License: ImageNet terms of access" in card_of(hub)
    assert "| center224  |   73.27 |\n" in card_of(hub)
    assert f"Published by the authors: {entry.expected.source}." in card_of(hub)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        *(
            (f"WEIGHTS WEIGHTS {name} --license mit", [name, "OWNER/NAME"])
            for name in ("net", "me/net@v1", "a/b/c", "me/")
        ),
        ("WEIGHTS WEIGHTS me/net", ["WEIGHTS", "--license apache-2.0"]),
        ("resnet110_cifar WEIGHTS me/net --license mit", ["another network"]),
        ("WEIGHTS NAN me/net --license mit", ["NaN", "mod1.conv1.weight"]),
    ],
)
def test_unpublishable_weights_exit_with_2(words: str, names: list[str], hub: Hub, weights: Path, cli: Cli) -> None:
    content = torch.load(weights, weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] = float("nan")
    torch.save(content, weights.with_name("nan.pth"))
    places = {"WEIGHTS": str(weights), "NAN": str(weights.with_name("nan.pth"))}
    printed = cli("push", *(places.get(word, word) for word in words.split()), code=2).err
    assert [name for name in names if places.get(name, name) not in printed] == []
    assert not hub.requests


def test_hub_error_prints_one_message(hub: Hub, weights: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    (error,) = cli("push", weights, weights, REPOSITORY, "--license", "mit", code=2).err.splitlines()
    assert "the Hub did not accept the files" in error
    assert "log in with hf auth login, or set HF_TOKEN" in error
    assert not hub.repositories


def test_timm_loads_pushed_timm_network(hub: Hub, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    import huggingface_hub

    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    cli("push", "timm:test_resnet", tmp_path / "w.pth", REPOSITORY, "--license", "mit")
    assert "library_name: timm\n" in card_of(hub)
    # timm may have imported the package before this server's address was set.
    monkeypatch.setattr("timm.models._hub.hf_hub_download", huggingface_hub.hf_hub_download)
    loaded = timm.create_model(f"hf-hub:{REPOSITORY}", pretrained=True).eval()
    assert_same(loaded.state_dict(), model.state_dict())
    assert timm.data.resolve_model_data_config(loaded)["crop_pct"] == 160 / 168  # timm's value: floor(160 / 0.95)
    assert timm.create_model(f"hf-hub:{REPOSITORY}", pretrained=True, num_classes=7).num_classes == 7
    assert_same(zoo.get(f"hf-hub:{REPOSITORY}").state_dict(), model.state_dict())


@pytest.mark.slow
def test_timm_loads_converted_torchvision_network(
    hub: Hub, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm")
    import huggingface_hub

    torch.manual_seed(0)
    model = zoo.get("resnet18", activation="relu").eval()
    described = model.built_as.model_dump(mode="json")
    torch.save({"state_dict": model.state_dict(), "network": described}, tmp_path / "zoo.pth")
    target = tmp_path / "timm.safetensors"
    cli("convert", "to-torchvision", tmp_path / "zoo.pth", target)
    cli("push", "timm:resnet18", target, REPOSITORY, "--license", "mit")
    monkeypatch.setattr("timm.models._hub.hf_hub_download", huggingface_hub.hf_hub_download)
    loaded = timm.create_model(f"hf-hub:{REPOSITORY}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded(images), model(images))
