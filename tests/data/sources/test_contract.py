"""Every source of images gives the same batches to any number of readers, and names what is at fault."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder as TorchvisionFolder

from tests.data.sample_images import small_experiment
from tests.data.sample_labels import experiment, label_map
from tests.refusals import refused
from zoo.data import reading
from zoo.data.loader import Loader, LoaderOptions, build_train_loader, build_val_loader
from zoo.data.map_dataset import Datasets
from zoo.data.reading import Unreachable
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.segmentation.loader import build_segmentation_train_loader, build_segmentation_val_loader
from zoo.data.sources.location import parse_data_path
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError
from zoo.files import open_regular

# torch warns about more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

CPU = torch.device("cpu")
LOCAL = ["folder", "shards", "items", "labeled"]
SHARDED = ["shards", "http", "memory"]
Batches = list[tuple[Tensor, Tensor, list[str]]]


def _open(path: str) -> Image.Image:
    with reading.open_regular(path) as file:
        return Image.open(file).convert("RGB")


def _place(kind: str, root: Path, request: pytest.FixtureRequest) -> Any:
    """Return the data of a kind, in ``root`` or on a server."""
    if kind == "items":
        return Datasets(*(TorchvisionFolder(str(root / "folder" / split), loader=_open) for split in ("train", "val")))
    if kind == "http":
        return parse_data_path(request.getfixturevalue("server").url)
    if kind == "memory":
        return parse_data_path(request.getfixturevalue("memory"))
    return root / kind.removesuffix(", class-uniform")


def _train(kind: str, place: Any, **options: Any) -> Loader[TrainBatches]:
    if "labeled" in kind:
        config = experiment(class_uniform="class-uniform" in kind)
        return build_segmentation_train_loader(place, config, LoaderOptions(**options))
    config = small_experiment(shuffle_shards=2 if kind in SHARDED else None, color_jitter_train=True)
    return build_train_loader(place, config, LoaderOptions(**options))


def _val(kind: str, place: Any, **options: Any) -> Loader[ValBatches]:
    if kind == "labeled":
        return build_segmentation_val_loader(place, experiment(), LoaderOptions(**options))
    return build_val_loader(place, ValTransform(-1, 8, [0.5] * 3, [0.5] * 3), 2, LoaderOptions(**options))


def _read(loader: Any, epoch: int | None = None, first_batch: int = 0) -> Batches:
    if epoch is not None:
        loader.batch_sampler.set_epoch(epoch)
        loader.batch_sampler.skip_to(first_batch)
    return [(batch.on(CPU), batch.targets, list(batch.paths)) for batch in loader]


def _equal(first: Batches, second: Batches) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(first, second, strict=True)
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [*LOCAL, "labeled, class-uniform", "http", "memory"])
def test_batches_do_not_depend_on_readers_or_resume(kind: str, originals: Path, request: pytest.FixtureRequest) -> None:
    place = _place(kind, originals, request)
    loader = _train(kind, place)
    first, second = _read(loader, 0), _read(loader, 1)
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    loader = _train(kind, place, workers=2)
    assert _equal(_read(loader, 0), first)
    assert _equal(_read(loader, 1, first_batch=2), second[2:])
    for rank in range(2):
        expected = [(images[rank::2], targets[rank::2], paths[rank::2]) for images, targets, paths in second[2:]]
        assert _equal(_read(_train(kind, place, rank=rank, world_size=2), 1, first_batch=2), expected)


@pytest.mark.parametrize(
    ("kind", "same"), [("items", "folder"), ("http", "shards"), ("memory", "shards")], ids=lambda kind: kind
)
def test_same_images_give_same_batches(kind: str, same: str, originals: Path, request: pytest.FixtureRequest) -> None:
    place, local = _place(kind, originals, request), originals / same
    for load, workers in ((_train, 2), (_val, 0)):
        ours, theirs = load(kind, place, workers=workers), load(same, local)
        for batch, expected in zip(_read(ours), _read(theirs), strict=True):
            assert torch.equal(batch[0], expected[0])
            assert torch.equal(batch[1], expected[1])
            if kind != "items":
                assert batch[2] == [path.replace(str(local), str(place)) for path in expected[2]]
        assert kind == "items" or ours.dataset.names_digest() == theirs.dataset.names_digest()


def _damage(kind: str, root: Path) -> tuple[str, str]:
    """Make an item of the third batch of val/ unreadable. Returns its name and the reason in the error."""
    if kind == "labeled":
        label_map([[7] * 12] * 10).save(path := root / "labeled/val/labels/sub/001.png")
        return str(path), "7 (120 px)"
    if kind == "shards":
        path = root / "shards/val/000001.tar"
        content = bytearray(path.read_bytes())
        content[content.index(b"IDAT") + 9] ^= 1
        path.write_bytes(content)
        return f"{path}/000000004: ", "the shard is damaged"
    path = root / "folder/val/ant/004.png"
    path.write_bytes(b"")
    return (
        ("item 4 of ImageFolder: ", "cannot be read") if kind == "items" else (f"{path}: ", "an image cannot be read")
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOCAL)
def test_unreadable_item_is_named_in_one_line(
    kind: str, workers: int, folder: Path, shards: Path, labeled: Path, request: pytest.FixtureRequest
) -> None:
    names = _damage(kind, folder.parent)
    batches = iter(_val(kind, _place(kind, folder.parent, request), workers=workers))
    for _ in range(2):
        next(batches)
    assert "\n" not in refused(DataError, lambda: next(batches), *names)


class _Flaky:
    """Opens files, except in the first ``times`` calls, which fail with errno ``number``."""

    def __init__(self, number: int, times: float) -> None:
        self._number, self._times = number, times

    def __call__(self, path: Any) -> Any:
        self._times -= 1
        if self._times >= 0:
            raise OSError(self._number, os.strerror(self._number), os.fspath(path))
        return open_regular(path)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the delays instead of waiting."""
    seconds: list[float] = []
    monkeypatch.setattr("zoo.files.sleep", seconds.append)
    return seconds


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """A function that lets the next openings of files fail."""

    def fail(number: int, times: float) -> None:
        for module in ("reading", "sources.shards"):
            monkeypatch.setattr(f"zoo.data.{module}.open_regular", _Flaky(number, times))

    return fail


FAULTS = [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE, errno.ENFILE]


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("kind", LOCAL)
def test_file_system_error_is_retried_and_blames_no_file(
    kind: str, number: int, originals: Path, request: pytest.FixtureRequest, waits: list[float], fail: Any
) -> None:
    dataset = _val(kind, _place(kind, originals, request)).dataset
    expected = dataset[0, 2].drawn.pixels
    fail(number, 2)
    assert torch.equal(dataset[0, 2].drawn.pixels, expected)
    assert waits == [0.5, 1.0]
    fail(number, float("inf"))
    advice = "ulimit -n" if number in (errno.EMFILE, errno.ENFILE) else "network drive"
    assert "replace" not in refused(Unreachable, lambda: dataset[0, 2], os.strerror(number), advice)
    assert waits[2:6] == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ELOOP])
@pytest.mark.parametrize("kind", ["folder", "shards", "labeled"])
def test_fault_of_one_file_is_not_retried(
    kind: str, number: int, originals: Path, request: pytest.FixtureRequest, waits: list[float], fail: Any
) -> None:
    dataset = _val(kind, _place(kind, originals, request)).dataset
    fail(number, float("inf"))
    refused(DataError, lambda: dataset[0, 2], f"{os.strerror(number)}; replace")
    assert waits == []
