"""Data sets by name are trained on, scored and sharded like the same images in class folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

import zoo
from tests.data.sample_images import random_image
from tests.nets import differing
from tests.refusals import refused
from zoo.cli import main
from zoo.data.dataset import open_source
from zoo.data.imagenet import imagenet_names, imagenet_wnids
from zoo.data.map_dataset import Datasets
from zoo.data.named import _as_wnids, open_data
from zoo.data.sources.location import DataName, RemoteFolder, parse_data_path
from zoo.errors import DataError

pytestmark = pytest.mark.usefixtures("small_networks")

SETTINGS = {
    "optimizer": {"batch_size": 8, "learning_rate": 0.05, "schedule": {"type": "cosine", "mode": "step", "epochs": 1}},
    "input": {"crop_train": 8, "scale_val": 8, "crop_val": 8},
}
FASHION = "torchvision:FashionMNIST"
COUNTS = {"train": 24, "t10k": 11}


def _train(data: Any, log_dir: Path, **options: Any) -> Any:
    return zoo.train("resnet18", data, experiment=SETTINGS, log_dir=log_dir, **options)


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torchvision's FashionMNIST in the cache, with few images."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "cache/torchvision/FashionMNIST/raw"
    raw.mkdir(parents=True)
    for seed, (split, count) in enumerate(COUNTS.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        shape = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + pixels.tobytes())
        labels = bytes(index % 10 for index in range(count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + shape[:4] + labels)
    return raw


def test_names_addresses_and_paths_are_distinguished() -> None:
    assert parse_data_path("torchvision:CIFAR10") == DataName("torchvision", "CIFAR10")
    assert parse_data_path("hf:owner/name") == DataName("hf", "owner/name")
    assert parse_data_path("https://host/hf:a") == RemoteFolder("https://host/hf:a")
    assert [parse_data_path(each) for each in ("data", "c:data", "hf:")] == [Path("data"), Path("c:data"), Path("hf:")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fashion")
def test_torchvision_data_set_is_trained_and_scored_by_name(tmp_path: Path) -> None:
    result, checkpoint = _train(FASHION, tmp_path / "run"), tmp_path / "run/checkpoint.pth.tar"
    network = zoo.load_network(checkpoint)
    assert network.experiment.network.num_classes == 10
    assert network.class_names[:2] == ["T-shirt/top", "Trouser"]
    assert main(["validate", str(checkpoint), FASHION, "-j", "0", "--predictions", str(tmp_path / "p.csv")]) == 0
    assert "item 10 of FashionMNIST" in (tmp_path / "p.csv").read_text()
    scored = zoo.score(network, FASHION)
    assert scored.count == COUNTS["t10k"]
    assert scored.top1 == result.scores["top1"]
    # Labels are matched to outputs by the names of the classes.
    network.class_names.reverse()
    with torch.no_grad():
        for tensor in (network.model.classifier.fc.weight, network.model.classifier.fc.bias):
            tensor.copy_(tensor.flip(0))
    assert zoo.score(network, FASHION).top1 == result.scores["top1"]


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01\0\0\0\x18ab", b"no idx file"])
def test_damaged_torchvision_files_end_in_one_line(fashion: Path, content: bytes) -> None:
    (fashion / "train-labels-idx1-ubyte").write_bytes(content)
    refused(DataError, lambda: open_data(parse_data_path(FASHION)), FASHION, str(fashion.parents[1]))


@pytest.fixture
def hub(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Parquet files, as the Hub has them, of the images of originals/folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    label = datasets.ClassLabel(names=["ant", "bee", "cat"])
    features = datasets.Features({"img": datasets.Image(), "label": label, "id": datasets.Value("int64")})
    (tmp_path / "hub/data").mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        source = open_source(originals / "folder" / split)
        images = [{"bytes": source.read(index), "path": None} for index in range(len(source.names))]
        rows = {"img": images, "label": source.targets.tolist(), "id": list(range(len(images)))}
        datasets.Dataset.from_dict(rows, features).to_parquet(_parquet(tmp_path / "hub", name))
    return tmp_path / "hub"


def _parquet(hub: Path, split: str) -> str:
    return str(hub / "data" / f"{split}-00000-of-00001.parquet")


def test_data_set_of_hub_trains_to_bits_of_class_folders(hub: Path, originals: Path, tmp_path: Path) -> None:
    expected = _train(str(originals / "folder"), tmp_path / "folder", workers=0)
    result = _train(f"hf:{hub}", tmp_path / "hub run", workers=2)
    assert result.scores == expected.scores
    assert differing(result.model.state_dict(), expected.model.state_dict()) == []
    # Shards hold the images in another order, and number the classes of the network in the same way.
    network = zoo.load_network(tmp_path / "folder/checkpoint.pth.tar")
    scores = [zoo.score(network, originals / kind) for kind in ("folder", "shards")]
    assert (scores[0].top1, scores[0].count) == (scores[1].top1, scores[1].count) == (expected.scores["top1"], 21)


def test_names_of_imagenet_become_wnids() -> None:
    names = [f"{name}, another name" for name in imagenet_names()]
    assert _as_wnids(["crane2", *names[1:]]) == list(imagenet_wnids())
    assert _as_wnids(names[::-1]) == names[::-1]
    assert _as_wnids(["ant", "bee"]) == ["ant", "bee"]


@pytest.mark.slow
def test_every_torchvision_name_opens_or_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the cache, and nothing is downloaded."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    for name in torchvision.datasets.__all__:
        message = refused(DataError, lambda: open_data(DataName("torchvision", name)))  # noqa: B023
        assert message.startswith(f"torchvision:{name}: ")
        assert "\n" not in message


def test_oxford_pets_train_on_trainval_and_validate_on_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    root = tmp_path / "torchvision/oxford-iiit-pet"
    (root / "images").mkdir(parents=True)
    (root / "annotations").mkdir()
    for split, numbers in (("trainval", range(8)), ("test", range(8, 13))):
        names = {number: f"{('Abyssinian', 'beagle')[number % 2]}_{number}" for number in numbers}
        for number, name in names.items():
            random_image(number).save(root / "images" / f"{name}.jpg")
        lines = "".join(f"{name} {number % 2 + 1} 1 1\n" for number, name in names.items())
        (root / "annotations" / f"{split}.txt").write_text(lines)
    data = open_data(parse_data_path("torchvision:OxfordIIITPet"))
    assert isinstance(data, Datasets)
    assert (len(data.train), len(data.val)) == (8, 5)
    assert _train("torchvision:OxfordIIITPet", tmp_path / "run").scores


@pytest.mark.parametrize(("split", "label"), [("validation", -1), ("train", -1), ("validation", None)])
def test_labels_of_hub_that_are_no_class_are_found_at_once(hub: Path, split: str, label: int | None) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_parquet(_parquet(hub, split))
    labels = [label, *rows["label"][1:]]
    rows = rows.remove_columns("label").add_column("label", labels, feature=rows.features["label"])
    rows.to_parquet(_parquet(hub, split))
    refused(DataError, lambda: open_data(DataName("hf", str(hub))), f"split {split} ", f": {label};")


def test_files_missing_from_hub_raise(hub: Path) -> None:
    datasets, missing, name = pytest.importorskip("datasets"), f"{hub}/nothing", DataName("hf", str(hub))
    refused(DataError, lambda: open_data(DataName("hf", missing)), f"hf:{missing}", "datasets")
    Path(_parquet(hub, "validation")).unlink()
    refused(DataError, lambda: open_data(name), "splits are train,", "val, validation, test")
    for split in ("train", "validation"):
        datasets.Dataset.from_dict({"a": [1], "b": [2]}).to_parquet(_parquet(hub, split))
    refused(DataError, lambda: open_data(name), "column image of type Image", "a: Value, b: Value")


def test_rows_with_image_and_label_are_accepted(tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset):
        classes = ("ant", "bee")

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, object]:
            return {"image": random_image(index), "label": index % 2, "id": index}

    assert zoo.train("resnet18", Rows(), Rows(), experiment=SETTINGS, log_dir=tmp_path / "run").scores
