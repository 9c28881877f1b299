"""Every image of a folder gets complete files exactly once, with the classes from the network's views."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import ToTensor

from tests.data.sample_images import random_image
from tests.dist.spawn import run_distributed
from tests.engine.tiny import this_process
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.errors import ConfigError, DataError
from zoo.registry.load_network import LoadedNetwork
from zoo.run.label_images import ORIGINAL_KINDS
from zoo.run.segmenting import segment as segment_images
from zoo.tasks.tta import segment_image

CLASSES = 4
SEGMENTER = "deeplab_resnet18"
KINDS = ("palette", "ids", "prob", "overlay")


class Tiny(nn.Module):
    """A segmentation network of one layer, which counts its images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, CLASSES, 5, stride=4, padding=2)
        self.num_images = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_images += len(x)
        logits: Tensor = self.conv(x)
        return logits


def _network(arch: str = SEGMENTER, **sections: dict[str, Any]) -> LoadedNetwork:
    network = {"arch": arch, "activation": "leaky_relu", "classes": CLASSES}
    return LoadedNetwork("tiny", Tiny(), parse_experiment({"network": network, **sections}, "test"))


def _images(folder: Path) -> Path:
    """Write five images in two folders, in different formats and sizes, and return the folder."""
    names = ["a.png", "b.JPG", "sub/a.bmp", "sub/deep/c.Jpeg", "sub/z.webp"]
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        random_image(seed, 20 + seed, 30 - seed).save(folder / name)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_all_output_kinds_have_original_size_of_image(tmp_path: Path) -> None:
    images, network = _images(tmp_path / "in"), _network()
    summary = segment_images(
        network, images, tmp_path / "out", output=KINDS, scales=(0.5, 1.0), flip=True, longest_side=64
    )
    assert (summary.written, summary.skipped, summary.faults) == (5, 0, [])
    names = {"a", "b", "sub/a", "sub/deep/c", "sub/z"}
    endings = {"palette": ".png", "ids": ".png", "prob": ".npz", "overlay": ".png"}
    assert set(_files(tmp_path / "out")) == {f"{kind}/{name}{endings[kind]}" for kind in KINDS for name in names}
    image = Image.open(images / "sub" / "a.bmp")
    settings = network.experiment.input
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (settings.mean, settings.std))
    scaled = image.resize((int(image.width * (64 / image.height)), 64), Image.Resampling.BILINEAR)
    expected = segment_image(
        network.model, (ToTensor()(scaled) - mean) / std, (0.5, 1.0), True, (image.height, image.width)
    )
    for kind in ("palette", "ids"):
        with Image.open(tmp_path / "out" / kind / "sub" / "a.png") as written:
            assert np.array_equal(np.asarray(written), expected.classes)
    with np.load(tmp_path / "out" / "prob" / "sub" / "a.npz") as content:
        np.testing.assert_allclose(content["probability"], expected.probabilities, atol=1e-3)


@pytest.mark.parametrize("mode", ["palette", "raw", "prob"])
def test_original_projects_files_are_in_folder_itself(tmp_path: Path, mode: str) -> None:
    images, network, out = _images(tmp_path / "in"), _network(), tmp_path / "in" / "sub"
    kinds = ORIGINAL_KINDS[mode]
    before = set(_files(out))
    segment_images(network, images, out, output=kinds, fusion="voting", flip=True, recursive=False)
    endings = {".png", "_prob.png"} if mode == "prob" else {".png"}
    assert set(_files(out)) - before == {f"{name}{ending}" for name in ("a", "b") for ending in endings}
    segment_images(network, images, tmp_path, output=("ids", "prob"), fusion="voting", flip=True, recursive=False)
    with Image.open(out / "a.png") as written, Image.open(tmp_path / "ids" / "a.png") as ids:
        assert written.mode == ("P" if mode == "palette" else "L")
        assert np.array_equal(np.asarray(written), np.asarray(ids))
        assert np.asarray(ids).max() < CLASSES  # classes, not numbers of votes
    if mode == "prob":
        with np.load(tmp_path / "prob" / "a.npz") as content, Image.open(out / "a_prob.png") as written:
            assert written.mode == "L"
            np.testing.assert_allclose(np.asarray(written), content["probability"] * 255, atol=1.2)


def test_existing_files_are_skipped_unless_replace(tmp_path: Path) -> None:
    images, network, out = _images(tmp_path / "in"), _network(), tmp_path / "out"
    segment_images(network, images, out, output=("ids", "prob"))
    before = _files(tmp_path / "out")
    (tmp_path / "out" / "prob" / "a.npz").unlink()
    kept = tmp_path / "out" / "ids" / "b.png"
    with Image.open(kept) as written:
        Image.new("L", written.size, 3).save(kept)
    changed = kept.read_bytes()
    network.model.num_images = 0
    summary = segment_images(network, images, out, output=("ids", "prob"))
    assert (summary.written, summary.skipped, network.model.num_images) == (1, 4, 1)
    assert _files(tmp_path / "out") == {**before, "ids/b.png": changed}
    assert segment_images(network, images, out, output=("ids", "prob"), overwrite=True).written == 5
    assert _files(tmp_path / "out") == before


def test_unreadable_image_is_named_and_the_others_are_processed(tmp_path: Path) -> None:
    images = _images(tmp_path / "in")
    (images / "broken.png").write_bytes(b"no image")
    random_image(0, 200, 1).save(images / "thin.png")
    summary = segment_images(_network(), images, tmp_path / "out", longest_side=40)
    assert summary.written == 5
    assert len(summary.faults) == 2
    assert "broken.png" in summary.faults[0]
    assert "200 x 1 px would be resized to 40 x 0 px" in summary.faults[1]
    assert "thin.png" in summary.faults[1]


#: Architecture, images, further arguments of `segment`, and names in the error. IN and OUT are folders.
REFUSALS: dict[str, tuple[str, list[str], dict[str, Any], list[str]]] = {
    "classifier": ("resnet18", [], {}, ["tiny: "]),
    "kind of file": (SEGMENTER, [], {"output": ["raw"]}, ["output = 'raw'", "palette, ids, prob, overlay"]),
    "size of classes": (SEGMENTER, [], {"classes_at": "logits"}, ["classes_at = 'logits'", "image or input"]),
    "empty folder": (SEGMENTER, [], {}, ["IN"]),
    "missing folder": (SEGMENTER, [], {"source": "IN/no"}, ["IN/no"]),
    "equal names": (SEGMENTER, ["b.JPG", "b.tif"], {}, ["b.JPG and of ", "b.tif"]),
    "equal names of original": (
        SEGMENTER, ["a.png", "a_prob.png"], {"output": ORIGINAL_KINDS["prob"]},
        ["a.png and of ", "a_prob.png", "OUT/a_prob.png"],
    ),
    "files among images": (SEGMENTER, ["a.png"], {"out": "IN/out"}, ["OUT: ", "IN"]),
    "files beside images": (
        SEGMENTER, ["a.png"], {"out": "IN", "output": ORIGINAL_KINDS["raw"], "recursive": False}, ["OUT: ", "IN"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "images", "arguments", "names"), REFUSALS.values(), ids=REFUSALS)
def test_impossible_calls_raise_and_write_nothing(
    arch: str, images: list[str], arguments: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name in images:
        random_image(9).save(tmp_path / "in" / name)
    network, before = _network(arch), _files(tmp_path)

    def filled(text: str) -> str:
        return re.sub("^(IN|OUT)(?!:)", lambda found: str(tmp_path / found[0].lower()), text)

    places = {key: filled(arguments.get(key, place)) for key, place in (("source", "IN"), ("out", "OUT"))}
    call: Any = partial(segment_images, network, **{**arguments, **places})
    refused((ConfigError, DataError), call, *map(filled, names))
    assert network.model.num_images == 0
    assert _files(tmp_path) == before


def _segment_as_rank(images: Path, out: Path) -> tuple[int, int, int]:
    network = _network()
    summary = segment_images(network, images, out, process=this_process())
    return network.model.num_images, summary.written, len(summary.faults)


@pytest.mark.dist
def test_processes_share_images_and_write_files_of_one_process(tmp_path: Path) -> None:
    images = _images(tmp_path / "in")
    (images / "broken.png").write_bytes(b"no image")
    _segment_as_rank(images, tmp_path / "one")
    shares = run_distributed(_segment_as_rank, 2, images, tmp_path / "two")
    assert sorted(share[0] for share in shares) == [2, 3]
    assert {share[1:] for share in shares} == {(5, 1)}
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
