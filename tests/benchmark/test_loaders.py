"""zoo's loader and loaders of other packages are measured in separate processes on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.data.sample_images import random_image
from zoo.benchmark.loaders import PIPELINES, Files, num_images_of
from zoo.cli import main
from zoo.cli.benchmark import LoaderName

OPTIONS = ["--images", "9", "--batch", "4", "--workers", "1", "--rounds", "2"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for index in range(9):
        path = tmp_path / "data" / "train" / "ab"[index % 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        random_image(index, width=60, height=50).save(path)
    return tmp_path / "data"


def test_options_name_all_loaders() -> None:
    assert list(get_args(LoaderName)) == list(PIPELINES)


@pytest.mark.slow  # starts processes, which import torch
@pytest.mark.parametrize(
    "others", [(), pytest.param(("torchvision-tensors", "zoo-shards", "webdataset"), marks=pytest.mark.exhaustive)]
)
def test_loaders_alternate(others: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    command = ["benchmark", "loaders", str(data), *OPTIONS, "--out", str(tmp_path / "out")]
    assert main([*command, "--loaders", "zoo", *others]) == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["settings"]["images"] == 8  # whole batches
    measured = content["loaders"]["1"]
    missing = {"webdataset"} - measured.keys() if others else set()
    assert content["notes"] == [f"not measured: {name}: pip install {name}" for name in missing]
    assert measured.keys() == {"zoo", *others} - missing
    for name, metrics in measured.items():
        for metric in ("per core", "wall clock"):
            least, most = metrics[metric]["range"]
            assert metrics[metric]["images_per_s"] > 0
            assert 0 < least <= metrics[metric]["ratio"] <= most
            assert (metrics[metric]["ratio"] == 1) is (name == "zoo")
        # An epoch takes at least the CPU time of its work.
        assert metrics["per core"]["images_per_s"] < 20_000
    assert {record["n"] for record in content["records"]} == {2}
    assert {PIPELINES[name].package for name in measured} <= content["settings"].keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchvision's decoder warns
@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "zoo"])
def test_every_installed_loader_gives_each_image_once(name: str, data: Path, tmp_path: Path) -> None:
    pipeline = PIPELINES[name]
    pytest.importorskip(pipeline.package, exc_type=ImportError)
    assert main(["data", "shard", str(data), str(tmp_path / "shards")]) == 0
    try:
        start = pipeline.build(Files(data, tmp_path / "shards", 9, 3), 1)
    except RuntimeError as error:  # a library of the package is missing
        pytest.skip(str(error))
    for _ in range(2):
        num_images, targets = 0, []
        for batch in start():  # DALI overwrites the targets of the previous batch
            num_images += num_images_of(batch, pipeline)
            targets += _targets_of(batch)
        assert num_images == 9
        assert sorted(targets) == [0] * 5 + [1] * 4


def _targets_of(batch: Any) -> list[int]:
    targets = batch[1].as_array() if hasattr(batch[1], "as_array") else batch[1]
    return torch.as_tensor(targets).flatten().tolist()
