"""Networks of the Hugging Face Hub: loaded strictly and safely, from the cache without a network, with clear errors."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.data.sample_images import make_folder, random_image
from tests.hub_server import Hub
from tests.nets import differing
from tests.refusals import refused
from zoo.cli import main
from zoo.config.record import NetworkRecord
from zoo.errors import ConfigError, WeightsError
from zoo.registry.open import open_network
from zoo.weights import read_weights
from zoo.weights._safetensors_files import safetensors_bytes

pytestmark = pytest.mark.usefixtures("small_networks")

NAME = "hf-hub:me/net"


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return zoo.get("resnet32_cifar", norm="inplace", num_classes=3)


def files_of(model: Any, **config: Any) -> dict[str, bytes]:
    """Return the files of a repository with a network of zoo; ``config`` replaces keys of config.json."""
    described = {"network": model.built_as.model_dump(mode="json"), **config}
    weights = safetensors_bytes(model.state_dict(), NetworkRecord(spec=model.built_as))
    return {"config.json": json.dumps(described).encode(), "model.safetensors": weights}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert differing(one.state_dict(), other.state_dict()) == []


def check_refusal(name: str, *names: str, error: type[Exception] = WeightsError) -> None:
    assert refused(error, lambda: zoo.get(name), name, *names).replace("\n", "").isprintable()


def test_network_is_built_and_loaded_at_any_revision(hub: Hub) -> None:
    first = hub.commit("me/net", files_of(network(0)))
    hub.commit("me/net", files_of(network(1)))
    model = zoo.get(NAME)
    assert_same(model, network(1))
    assert model.built_as.norm == "inplace"
    assert_same(zoo.get(f"{NAME}@{first}"), network(0))
    assert_same(zoo.get("resnet32_cifar", norm="inplace", num_classes=3, weights=f"{NAME}@{first}"), network(0))
    assert zoo.get(NAME, num_classes=5).num_classes == 5
    assert_same(zoo.create_model(NAME, pretrained=True), network(1))  # as in timm's documentation
    assert zoo.get(NAME, norm="standard").built_as.norm == "standard"
    assert zoo.transforms(NAME)(torch.zeros(3, 32, 32)).shape == (3, 32, 32)
    assert sorted({request.split("/")[-1] for request in hub.requests}) == ["config.json", "model.safetensors"]


def test_commands_read_repository(hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.commit("me/net", files_of(network()))
    assert main(["show", NAME]) == 0
    shown = capsys.readouterr().out
    assert re.search("arch +resnet32_cifar\n", shown)
    assert main(["convert", "inplace-to-standard", NAME, str(tmp_path / "standard.safetensors")]) == 0
    assert zoo.get(tmp_path / "standard.safetensors").built_as.norm == "standard"
    data = make_folder(tmp_path / "data" / "val", {"a": 1, "b": 1, "c": 1}, width=32, height=32).parent
    assert main(["validate", NAME, str(data), "-j", "0"]) == 0
    assert "| hf-hub:me/net |" in capsys.readouterr().out
    loaded = zoo.load_network(NAME)
    assert_same(loaded.model, network())
    assert loaded.experiment.input.crop_val == 32
    assert loaded.digests() == zoo.load_network("resnet32_cifar", NAME).digests()


def test_cache_is_read_without_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_refusal(NAME, "config.json of me/net cannot be fetched: Cannot find the requested files in the disk")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    commit = hub.commit("me/net", files_of(network()))
    zoo.get(NAME)
    num_requests = len(hub.requests)
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setenv("ZOO_OFFLINE", "0" if offline else "1")
        assert_same(zoo.get(NAME), network())
        assert_same(zoo.get(f"{NAME}@{commit}"), network())
        check_refusal("hf-hub:me/other", "config.json of me/other cannot be fetched: ")
    assert len(hub.requests) == num_requests


def test_hub_out_of_reach_raises_unless_cache_has_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    hub.commit("me/net", files_of(network()))
    zoo.get(NAME)
    closed = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", closed + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", 0.1, raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between its tries
    assert_same(zoo.get(NAME), network())
    check_refusal("hf-hub:me/other", "config.json of me/other cannot be fetched: ")


def test_missing_repositories_revisions_and_files_are_named(hub: Hub) -> None:
    check_refusal(NAME, "config.json of me/net cannot be fetched: 401 Client Error")
    files = files_of(network())
    hub.commit("me/net", files)
    check_refusal(f"{NAME}@v2", "Revision Not Found")
    hub.commit("me/pickle", {"config.json": files["config.json"], "pytorch_model.bin": b"x"})
    check_refusal("hf-hub:me/pickle", "model.safetensors of me/pickle cannot be fetched: 404")
    for name in ("hf-hub:", "hf-hub:net", "hf-hub:a/b/c", "hf-hub:me/net@", "hf-hub:../x", "hf-hub:me/n\x1b[31m"):
        refused(ConfigError, partial(zoo.get, name), "hf-hub:OWNER/NAME")


def test_missing_package_raises_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check_refusal(NAME, "pip install huggingface_hub safetensors", error=ConfigError)


DESCRIBED = open_network("resnet32_cifar", {"norm": "inplace", "num_classes": 3}).spec.model_dump(mode="json")
TIMM = {"architecture": "resnet18", "num_classes": 3}
CONFIGS = {
    "not JSON": (b"{", "config.json is not JSON"),
    "not text": (b"\xff", "config.json is not JSON"),
    "deep": (b"[" * 100_000, "config.json is not JSON"),
    "large": (b" " * (2**24 + 1), "it has more than"),
    "a list": (b"[]", "config.json holds a list"),
    "empty": (b"{}", "architecture = None is not the name of a network of timm"),
    "of transformers": ({"architectures": ["ResNetForImageClassification"]}, "only networks of zoo and timm"),
    "another repository": ({**TIMM, "architecture": "hf-hub:evil/net"}, "is not the name of a network of timm"),
    "a folder": ({**TIMM, "architecture": "local-dir:/etc"}, "is not the name of a network of timm"),
    "a path of arguments": ({**TIMM, "model_args": {"checkpoint_path": "/etc/passwd"}}, "checkpoint_path"),
    "downloads by arguments": ({**TIMM, "model_args": {"pretrained": True}}, "pretrained asks for other weights"),
    "arguments are a list": ({**TIMM, "model_args": [1]}, "are not both objects"),
    "many classes": ({**TIMM, "num_classes": 10**9}, "num_classes = 1000000000"),
    "classes are text": ({**TIMM, "num_classes": "3"}, "num_classes"),
    "too many names": ({**TIMM, "label_names": ["a", "b", "c", "d"]}, "has 4 names for 3 classes"),
    "means are a number": ({**TIMM, "pretrained_cfg": {"input_size": [3, 8, 8], "mean": 5}}, "mean"),
    "odd means": ({**TIMM, "pretrained_cfg": {"input_size": [3, 8, 8], "mean": "x"}}, "mean"),
    "an unknown network": ({"network": {**DESCRIBED, "arch": "resnet0"}}, "this version has no such network"),
    "another network": ({"network": {**DESCRIBED, "norm": "sync"}}, "describe different networks"),
    "a large network": ({"network": {**DESCRIBED, "num_classes": 90_000}}, "describe different networks"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_that_describes_no_network_raises(kind: str, hub: Hub) -> None:
    if "means" in kind:
        pytest.importorskip("timm")
    config, said = CONFIGS[kind]
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    hub.commit("me/net", {**files_of(network()), "config.json": content})
    check_refusal(NAME, said)


def test_mismatched_weights_raise(hub: Hub) -> None:
    files = files_of(network())
    plain = safetensors_bytes(network().state_dict())
    hub.commit("me/net", {**files, "model.safetensors": plain})
    assert_same(zoo.get(NAME), network())  # a file that another program has written
    other = json.dumps({"network": {**DESCRIBED, "num_classes": 90_000}}).encode()
    hub.commit("me/net", {"config.json": other})
    refused(WeightsError, lambda: zoo.get(NAME), "classifier", "3")
    hub.commit("me/net", {**files, "model.safetensors": plain[:-1]})
    refused(WeightsError, lambda: zoo.get(NAME), "damaged")


def test_timm_repository_is_built_by_timm_with_identical_outputs(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3, avg_down=True).eval()
    model.pretrained_cfg |= {"crop_mode": "squash", "mean": (0.2, 0.5, 0.7)}
    config = {"label_names": ["a", "b", "c"]}
    timm.models.save_for_hf(model, tmp_path / "files", config, {"avg_down": True}, safe_serialization=True)
    hub.commit("me/net", {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()})
    loaded = zoo.get(NAME).eval()
    assert_same(loaded, model)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(images), model(images))
    record = read_weights(NAME).record
    assert (record.spec.arch, record.spec.num_classes) == ("timm:test_resnet", 3)
    assert record.class_names == ["a", "b", "c"]
    reference = timm.data.create_transform(**timm.data.resolve_model_data_config(model, use_test_size=True))
    image = random_image(0, 301, 250)
    assert torch.equal(zoo.transforms(NAME)(image), reference(image))
    assert "preprocessing" not in caplog.text
    assert zoo.get(NAME, memory="lean")(images).shape == (2, 3)
    wide = json.loads((tmp_path / "files" / "config.json").read_bytes()) | {
        "pretrained_cfg": {"input_size": [3, 64, 32]}
    }
    hub.commit("me/net", {"config.json": json.dumps(wide).encode()})
    assert read_weights(NAME).record.preprocessing is None
    assert "the preprocessing of timm:test_resnet is not supported" in caplog.text
