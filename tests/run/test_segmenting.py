"""Every image of a folder gets its files once, whole, and from the classes that the network's views give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import ToTensor

from scripts.test_vistas import original_files
from tests.data.sample_images import random_image
from tests.dist.spawn import run_distributed
from tests.engine.tiny import this_process
from zoo.config import parse_experiment
from zoo.errors import ConfigError, DataError
from zoo.run.label_images import palette_for
from zoo.run.scoring import LoadedNetwork
from zoo.run.segmenting import Outputs, output_folders, segment_images
from zoo.tasks.tta import TestTimeAugmentation as Augmentation
from zoo.tasks.tta import segment

CLASSES = 4


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


def _network(arch: str = "deeplab_resnet18", **sections: dict[str, Any]) -> LoadedNetwork:
    network = {"arch": arch, "activation": "leaky_relu", "classes": CLASSES}
    return LoadedNetwork("tiny", Tiny(), parse_experiment({"network": network, **sections}, "test"))


def _images(folder: Path) -> Path:
    """Write five images in two folders, in different formats and sizes, and return the folder."""
    names = ["a.png", "b.JPG", "sub/a.bmp", "sub/deep/c.Jpeg", "sub/z.webp"]
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        random_image(seed, 20 + seed, 30 - seed).save(folder / name)
    return folder


def _folders(out: Path, kinds: tuple[str, ...] = ("ids",)) -> Outputs:
    return output_folders(out, kinds, palette_for(CLASSES))


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_all_kinds_are_those_of_the_views_at_the_images_own_size(tmp_path: Path) -> None:
    images, network, views = _images(tmp_path / "in"), _network(), Augmentation((0.5, 1.0), True)
    summary = segment_images(network, images, _folders(tmp_path / "out", KINDS), views, longest_side=64)
    assert (summary.written, summary.skipped, summary.faults) == (5, 0, [])
    names = {"a", "b", "sub/a", "sub/deep/c", "sub/z"}
    endings = {"palette": ".png", "ids": ".png", "prob": ".npz", "overlay": ".png"}
    assert set(_files(tmp_path / "out")) == {f"{kind}/{name}{endings[kind]}" for kind in KINDS for name in names}
    image = Image.open(images / "sub" / "a.bmp")
    settings = network.experiment.input
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (settings.mean, settings.std))
    scaled = image.resize((int(image.width * (64 / image.height)), 64), Image.Resampling.BILINEAR)
    expected = segment(network.model, (ToTensor()(scaled) - mean) / std, views, (image.height, image.width))
    for kind in ("palette", "ids"):
        with Image.open(tmp_path / "out" / kind / "sub" / "a.png") as written:
            assert np.array_equal(np.asarray(written), expected.classes)
    with np.load(tmp_path / "out" / "prob" / "sub" / "a.npz") as content:
        np.testing.assert_allclose(content["probability"], expected.probabilities, atol=1e-3)


def test_what_is_there_is_skipped_and_replaced_on_request(tmp_path: Path) -> None:
    images, network, out = _images(tmp_path / "in"), _network(), _folders(tmp_path / "out", ("ids", "prob"))
    segment_images(network, images, out)
    before = _files(tmp_path / "out")
    (tmp_path / "out" / "prob" / "a.npz").unlink()
    kept = tmp_path / "out" / "ids" / "b.png"
    with Image.open(kept) as written:
        Image.new("L", written.size, 3).save(kept)
    changed = kept.read_bytes()
    network.model.num_images = 0
    summary = segment_images(network, images, out)
    assert (summary.written, summary.skipped, network.model.num_images) == (1, 4, 1)
    assert _files(tmp_path / "out") == {**before, "ids/b.png": changed}
    assert segment_images(network, images, out, overwrite=True).written == 5
    assert _files(tmp_path / "out") == before


def test_an_image_that_a_scale_makes_too_large_is_left_out(tmp_path: Path) -> None:
    images = _images(tmp_path / "in")
    Image.new("1", (30_000, 40)).save(images / "wide.png")
    summary = segment_images(_network(), images, _folders(tmp_path / "out"), Augmentation((10.0,)))
    assert summary.written == 5
    assert len(summary.faults) == 1
    assert "30000 x 40 px at scale 10 has 300000 x 400 px" in summary.faults[0]


def test_an_image_that_cannot_be_read_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    images = _images(tmp_path / "in")
    (images / "broken.png").write_bytes(b"no image")
    random_image(0, 200, 1).save(images / "thin.png")
    summary = segment_images(_network(), images, _folders(tmp_path / "out"), longest_side=40)
    assert summary.written == 5
    assert len(summary.faults) == 2
    assert "broken.png" in summary.faults[0]
    assert "200 x 1 px would be resized to 40 x 0 px" in summary.faults[1]
    assert "thin.png" in summary.faults[1]


def test_full_memory_is_a_fault_of_the_image_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, network = _images(tmp_path / "in"), _network()
    plain = Tiny.forward

    def forward(model: Tiny, x: Tensor) -> Tensor:
        if x.shape[-1] == 22:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, x)

    monkeypatch.setattr(Tiny, "forward", forward)
    summary = segment_images(network, images, _folders(tmp_path / "out"))
    assert summary.written == 4
    assert len(summary.faults) == 1
    assert "the memory of cpu is full; give a smaller --longest-side" in summary.faults[0]
    assert "a.bmp" in summary.faults[0]


def test_a_place_without_images_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "there is no image in the folder"), ("no", "there is no image or folder .*no;")):
        with pytest.raises(DataError, match=message):
            segment_images(_network(), tmp_path / name, _folders(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("extra", "out", "mode", "message"),
    [
        ("b.tif", "out", None, "b.JPG and of .*b.tif would have the same name"),
        ("a_prob.jpg", "out", "prob", "a.png and of .*a_prob.jpg would have the same name"),
        (None, "in/out", None, "would lie among the images"),
        (None, "in", "raw", "a.png is one of the images and would be overwritten"),
    ],
)
def test_clashing_names_are_refused_before_anything_is_computed(
    tmp_path: Path, extra: str | None, out: str, mode: str | None, message: str
) -> None:
    images, network = _images(tmp_path / "in"), _network()
    if extra is not None:
        random_image(9).save(images / extra)
    output = _folders(tmp_path / out) if mode is None else original_files(tmp_path / out, mode, palette_for(CLASSES))
    before = _files(tmp_path)
    with pytest.raises(DataError, match=message):
        segment_images(network, images, output)
    assert network.model.num_images == 0
    assert _files(tmp_path) == before


def test_a_network_of_another_task_and_too_many_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny classifies whole images"):
        segment_images(_network("resnet18"), tmp_path, _folders(tmp_path))
    with pytest.raises(ConfigError, match="300 classes"):
        output_folders(tmp_path, ("palette",), palette_for(300))


@pytest.mark.parametrize("mode", ["palette", "raw", "prob"])
def test_the_originals_files_are_classes_of_the_networks_size_resized_by_nearest(tmp_path: Path, mode: str) -> None:
    image = random_image(0, 24, 36)
    (tmp_path / "in").mkdir()
    image.save(tmp_path / "in" / "a.png")
    network, palette = _network(), palette_for(CLASSES)
    segment_images(
        network, tmp_path / "in", original_files(tmp_path / "out", mode, palette), longest_side=18, at_image_size=False
    )
    settings = network.experiment.input
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (settings.mean, settings.std))
    small = image.resize((12, 18), Image.Resampling.BILINEAR)
    expected = segment(network.model, (ToTensor()(small) - mean) / std)
    with Image.open(tmp_path / "out" / "a.png") as written:
        assert written.mode == ("P" if mode == "palette" else "L")
        assert np.array_equal(np.asarray(written), expected.classes.numpy().repeat(2, 0).repeat(2, 1))
        if mode == "palette":
            assert written.getpalette("RGB")[: 3 * CLASSES] == palette.colors.ravel().tolist()
    assert (tmp_path / "out" / "a_prob.png").exists() == (mode == "prob")
    if mode == "prob":
        with Image.open(tmp_path / "out" / "a_prob.png") as written:
            truncated = (expected.probabilities.double() * 255).int().numpy()
            assert np.array_equal(np.asarray(written)[::2, ::2], truncated)


def _segment_as_rank(images: Path, out: Path) -> tuple[int, int, int]:
    network = _network()
    summary = segment_images(network, images, _folders(out), process=this_process())
    return network.model.num_images, summary.written, len(summary.faults)


@pytest.mark.dist
def test_processes_share_the_images_and_make_the_files_of_one(tmp_path: Path) -> None:
    images = _images(tmp_path / "in")
    (images / "broken.png").write_bytes(b"no image")
    _segment_as_rank(images, tmp_path / "one")
    shares = run_distributed(_segment_as_rank, 2, images, tmp_path / "two")
    assert sorted(share[0] for share in shares) == [2, 3]
    assert {share[1:] for share in shares} == {(5, 1)}
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
