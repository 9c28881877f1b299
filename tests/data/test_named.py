"""Data sets by name are trained on, scored and sharded like the same images in class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

import zoo
from tests.data.sample_images import make_splits, random_image
from tests.refusals import refused
from zoo.cli import main
from zoo.data.dataset import open_source
from zoo.data.imagenet import imagenet_names, imagenet_wnids
from zoo.data.map_dataset import Datasets
from zoo.data.named import _as_wnids, open_data
from zoo.data.sources.location import DataName, RemoteFolder, parse_data_path
from zoo.errors import DataError

SETTINGS = {
    "optimizer": {"batch_size": 8, "learning_rate": 0.05, "schedule": {"type": "cosine", "mode": "step", "epochs": 1}},
    "input": {"crop_train": 8, "scale_val": 8, "crop_val": 8},
}
COUNTS = {"train": 24, "t10k": 11}


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Files of torchvision's FashionMNIST in the cache, with few images."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "cache" / "torchvision" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = {}
    for seed, (split, count) in enumerate(COUNTS.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        shape = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + pixels.tobytes())
        labels = bytes(index % 10 for index in range(count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + shape[:4] + labels)
        images[split] = pixels
    return images


def test_names_addresses_and_paths_are_distinguished() -> None:
    assert parse_data_path("torchvision:CIFAR10") == DataName("torchvision", "CIFAR10")
    assert parse_data_path("hf:owner/name") == DataName("hf", "owner/name")
    assert parse_data_path("https://host/hf:a") == RemoteFolder("https://host/hf:a")
    assert [parse_data_path(each) for each in ("data", "c:data", "hf:")] == [Path("data"), Path("c:data"), Path("hf:")]


@pytest.mark.filterwarnings("ignore")
def test_torchvision_data_set_is_trained_and_scored_by_name(fashion: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = "torchvision:FashionMNIST"
    result = zoo.train("resnet18", name, experiment=SETTINGS, log_dir=tmp_path / "run")
    network = zoo.load_network(tmp_path / "run" / "checkpoint.pth.tar")
    assert network.experiment.network.num_classes == 10
    assert network.class_names is not None
    assert network.class_names[:2] == ["T-shirt/top", "Trouser"]
    command = ["validate", str(tmp_path / "run" / "checkpoint.pth.tar"), name, "-j", "0"]
    assert main([*command, "--predictions", str(tmp_path / "p.csv")]) == 0
    assert "item 10 of FashionMNIST" in (tmp_path / "p.csv").read_text()
    scored = zoo.score(network, name)
    assert scored.count == COUNTS["t10k"]
    assert scored.top1 == result.scores["top1"]


def test_labels_are_matched_to_outputs_by_names_of_classes(fashion: dict[str, np.ndarray], tmp_path: Path) -> None:
    """A network with its outputs and their names in reverse order has the same score."""
    result = zoo.train("resnet18", "torchvision:FashionMNIST", experiment=SETTINGS, log_dir=tmp_path / "run")
    network = zoo.load_network(tmp_path / "run" / "checkpoint.pth.tar")
    reverse = zoo.load_network(tmp_path / "run" / "checkpoint.pth.tar")
    assert network.class_names is not None
    reverse.class_names.reverse()  # type: ignore[attr-defined, union-attr]
    with torch.no_grad():
        for tensor in (reverse.model.classifier.fc.weight, reverse.model.classifier.fc.bias):  # type: ignore[union-attr]
            tensor.copy_(tensor.flip(0))
    assert zoo.score(reverse, "torchvision:FashionMNIST").top1 == result.scores["top1"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Parquet files, as the Hub has them, of the same images as class folders beside it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folders = make_splits(tmp_path / "folders")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
            "id": datasets.Value("int64"),
        }
    )
    for split, name in (("train", "train"), ("val", "validation")):
        source = open_source(folders / split)
        images = [{"bytes": source.read(index), "path": None} for index in range(len(source.names))]
        rows = {"img": images, "label": source.targets.tolist(), "id": list(range(len(images)))}
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        file = tmp_path / "hub" / "data" / f"{name}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(rows, features).to_parquet(file)
    return tmp_path / "hub"


def test_data_set_of_hub_trains_to_bits_of_class_folders(hub: Path, tmp_path: Path) -> None:
    results = [
        zoo.train("resnet18", data, experiment=SETTINGS, log_dir=tmp_path / name, workers=workers)
        for name, data, workers in (("a", str(hub.parent / "folders"), 0), ("b", f"hf:{hub}", 0), ("c", f"hf:{hub}", 2))
    ]
    expected = results[0].model.state_dict()
    for result in results[1:]:
        assert result.scores == results[0].scores
        assert all(torch.equal(value, expected[key]) for key, value in result.model.state_dict().items())


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
        with pytest.raises(DataError) as caught:
            open_data(DataName("torchvision", name))
        assert str(caught.value).startswith(f"torchvision:{name}: ")
        assert "\n" not in str(caught.value)


def test_oxford_pets_train_on_trainval_and_validate_on_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    root = tmp_path / "torchvision" / "oxford-iiit-pet"
    (root / "images").mkdir(parents=True)
    (root / "annotations").mkdir()
    for split, numbers in (("trainval", range(8)), ("test", range(8, 13))):
        lines = []
        for number in numbers:
            breed = ("Abyssinian", "beagle")[number % 2]
            random_image(number).save(root / "images" / f"{breed}_{number}.jpg")
            lines.append(f"{breed}_{number} {number % 2 + 1} 1 1\n")
        (root / "annotations" / f"{split}.txt").write_text("".join(lines))
    data = open_data(parse_data_path("torchvision:OxfordIIITPet"))
    assert isinstance(data, Datasets)
    assert (len(data.train), len(data.val)) == (8, 5)  # type: ignore[arg-type]
    assert zoo.train("resnet18", "torchvision:OxfordIIITPet", experiment=SETTINGS, log_dir=tmp_path / "run").scores


def test_damaged_torchvision_files_end_in_one_line(fashion: dict[str, np.ndarray], tmp_path: Path) -> None:
    for content in (b"", b"\0\0\x08\x01\0\0\0\x18ab", b"no idx file"):
        (tmp_path / "cache" / "torchvision" / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(content)
        name = parse_data_path("torchvision:FashionMNIST")
        refused(DataError, lambda: open_data(name), "torchvision:FashionMNIST", str(tmp_path / "cache"))  # noqa: B023


@pytest.mark.parametrize(("split", "label"), [("validation", -1), ("train", -1), ("validation", None)])
def test_labels_of_hub_that_are_no_class_are_found_at_once(hub: Path, split: str, label: int | None) -> None:
    datasets = pytest.importorskip("datasets")
    file = hub / "data" / f"{split}-00000-of-00001.parquet"
    rows = datasets.Dataset.from_parquet(str(file))
    labels = [label, *rows["label"][1:]]
    rows.remove_columns("label").add_column("label", labels, feature=rows.features["label"]).to_parquet(str(file))
    refused(DataError, lambda: open_data(DataName("hf", str(hub))), f"split {split} ", f": {label};")


def test_files_missing_from_hub_raise(hub: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    refused(
        DataError, lambda: open_data(DataName("hf", str(tmp_path / "nothing"))), f"hf:{tmp_path}/nothing", "datasets"
    )
    (hub / "data" / "validation-00000-of-00001.parquet").unlink()
    refused(DataError, lambda: open_data(DataName("hf", str(hub))), "splits are train,", "val, validation, test")
    rows = datasets.Dataset.from_dict({"a": [1], "b": [2]})
    for split in ("train", "val"):
        rows.to_parquet(tmp_path / "other" / f"{split}-00000-of-00001.parquet")
    other = DataName("hf", str(tmp_path / "other"))
    refused(DataError, lambda: open_data(other), "column image of type Image", "a: Value, b: Value")


def test_rows_with_image_and_label_are_accepted(tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset):
        classes = ("ant", "bee")

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, object]:
            return {"image": random_image(index), "label": index % 2, "id": index}

    assert zoo.train("resnet18", Rows(), Rows(), experiment=SETTINGS, log_dir=tmp_path / "run").scores
