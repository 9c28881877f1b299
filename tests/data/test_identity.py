"""Data set objects are identified by indices, labels, file names and arrays, and by nothing that may vary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import DatasetFolder, ImageFolder

from tests.engine.tiny import make_images
from zoo.data import identity
from zoo.data.identity import object_digests


class Plain(Dataset[Any]):
    """Eight items with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no item may be read")


LABELS = [0, 1, 0, 1, 0, 1, 1, 0]
SWAPPED = [1, 0, *LABELS[2:]]
OF_LABELS: dict[str, Callable[[list[int]], Any]] = {
    "targets": lambda labels: Plain(targets=labels),
    "labels of numpy": lambda labels: Plain(labels=np.array(labels)),
    "tensor": lambda labels: Plain(_labels=torch.tensor(labels, dtype=torch.int32)),
    "numpy numbers": lambda labels: Plain(targets=list(np.array(labels))),
    "objects": lambda labels: Plain(targets=np.array(labels, dtype=object)),
    "samples": lambda labels: Plain(samples=[(f"{index}.png", label) for index, label in enumerate(labels)]),
    "names of labels": lambda labels: Plain(labels=["cat" if label else "dog" for label in labels]),
    "bfloat16 images": lambda labels: Plain(data=torch.tensor(labels).bfloat16()[:, None]),
    "tensors": lambda labels: TensorDataset(torch.zeros(8, 3), torch.tensor(labels)),
    "subset": lambda labels: Subset(Plain(targets=labels), range(4)),
    "concatenation": lambda labels: ConcatDataset([Plain(), Subset(Plain(targets=labels), [1])]),
    "own wrapper": lambda labels: Plain(inner=Subset(Plain(targets=labels), [1]), transform=str),
    "order of parts": lambda labels: ConcatDataset([Plain(targets=[label]) for label in labels]),
    "indices": lambda labels: Subset(Plain(), labels),
    "indices of inner subset": lambda labels: Subset(Subset(Plain(), labels), [0]),
    "indices as tensor": lambda labels: Subset(Plain(), torch.tensor(labels)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("build", OF_LABELS.values(), ids=OF_LABELS.keys())
def test_other_labels_or_indices_have_other_digest(build: Callable[[list[int]], Any]) -> None:
    first, again, other = (object_digests(build(labels)) for labels in (LABELS, list(LABELS), SWAPPED))
    assert first == again
    assert first.keys() == other.keys()
    assert first != other


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"transform": object()},
        {"data": object()},
        {"data": "a path"},
        {"samples": [object() for _ in range(8)]},
        {"targets": {"a": object()}},
    ],
)
def test_objects_are_not_part_of_digest(attributes: dict[str, Any]) -> None:
    again = {key: type(value)() if type(value) is object else value for key, value in attributes.items()}
    assert object_digests(Plain(**attributes)) == object_digests(Plain(**again))


def test_data_set_containing_itself_terminates() -> None:
    plain = Plain(targets=LABELS)
    wrapper = Plain(inner=plain)
    vars(plain)["wrapper"] = wrapper
    assert object_digests(wrapper).keys() == {"targets"}


def test_two_unseeded_splits_differ_in_indices() -> None:
    data = Plain(targets=LABELS * 8)
    first, second = (object_digests(random_split(data, [4, 4])[0]) for _ in range(2))
    assert [key for key in first if first[key] != second[key]] == ["indices"]


def test_rows_of_large_array_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((64, 4), dtype=np.uint8)
    first = object_digests(Plain(data=images))
    monkeypatch.setattr(identity, "MAX_HASHED_BYTES", 64)
    few = object_digests(Plain(data=images))
    assert few != first
    images[60] = 1
    assert object_digests(Plain(data=images)) != few
    images[:] = 0
    images[61] = 1
    assert object_digests(Plain(data=images)) == few


@pytest.mark.parametrize("as_path", [False, True])
def test_folder_of_files_does_not_count(tmp_path: Path, as_path: bool) -> None:
    data = make_images(tmp_path / "data", num_train=6)
    other = Path(shutil.copytree(data, tmp_path / "other/machine"))

    def digests(folder: Path) -> dict[str, str]:
        if as_path:
            return object_digests(Plain(_image_files=sorted((folder / "train").glob("*/*"))))
        return object_digests(ImageFolder(folder / "train"))

    first = digests(data)
    assert "sizes" in first
    assert first == digests(other)
    image = other / "train/class0/0.png"
    image.write_bytes(image.read_bytes() + b"x")
    changed = digests(other)
    assert [key for key in first if first[key] != changed[key]] == ["sizes"]
    image.rename(image.with_name("1000.png"))
    assert digests(other).items() - first.items()


def test_shared_list_counts_once(tmp_path: Path) -> None:
    folder = ImageFolder(make_images(tmp_path) / "train")
    assert isinstance(folder, DatasetFolder)
    assert folder.imgs is folder.samples
    assert object_digests(folder).keys() == {"targets", "samples", "sizes"}
