"""The validation images of ImageNet are unpacked to the folders of their classes, byte for byte."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import imagenet

from tests.data.distributed import write_tar
from zoo.cli import main
from zoo.data.imagenet import imagenet_wnids
from zoo.data.prepare.imagenet_validation import unpack_imagenet_val
from zoo.errors import DataError

WNIDS = imagenet_wnids()[:3]
IMAGES = {f"ILSVRC2012_val_{number:08d}.JPEG": f"image {number}".encode() for number in range(1, 7)}


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both archives, with six images of three classes; the devkit also has a node with children."""
    scipy = pytest.importorskip("scipy.io")
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "i4")]
    rows = [*((number, wnid, f"name {number}", "", 0) for number, wnid in enumerate(WNIDS, 1)), (4, "n0", "", "", 2)]
    file = io.BytesIO()
    scipy.savemat(file, {"synsets": np.array(rows, dtype=kinds)})
    numbers = "".join(f"{1 + index % 3}\n" for index in range(len(IMAGES))).encode()
    devkit = {"meta.mat": file.getvalue(), "ILSVRC2012_validation_ground_truth.txt": numbers}
    folder = tmp_path / "in"
    folder.mkdir()
    names = {"val": "ILSVRC2012_img_val.tar", "devkit": "ILSVRC2012_devkit_t12.tar.gz"}
    kit = {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in devkit.items()}
    md5s = {"val": write_tar(folder / names["val"], IMAGES, "w"), "devkit": write_tar(folder / names["devkit"], kit)}
    monkeypatch.setattr(imagenet, "ARCHIVE_META", {kind: (names[kind], md5s[kind]) for kind in names})
    return folder


@pytest.mark.parametrize("source", ["", "ILSVRC2012_img_val.tar"])
def test_every_file_is_unchanged_in_the_folder_of_its_class(archives: Path, source: str, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    assert main(["data", "imagenet-val", str(archives / source), str(tmp_path / "out")]) == 0
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in tmp_path.rglob("out/*/*/*")}
    assert found == {f"val/{WNIDS[index % 3]}/{name}": IMAGES[name] for index, name in enumerate(IMAGES)}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]


def test_missing_and_damaged_archives_are_errors_and_leave_nothing(archives: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (archives / "ILSVRC2012_img_val.tar").write_bytes(b"damaged")
    with pytest.raises(DataError, match="download it again"):
        unpack_imagenet_val(archives, out)
    (archives / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(DataError, match=r"there is no ILSVRC2012_devkit_t12\.tar\.gz"):
        unpack_imagenet_val(archives, out)
    assert not any(out.iterdir())
    (out / "val").mkdir()
    (out / "val" / "x").touch()
    with pytest.raises(DataError, match="OUT exists and is not overwritten"):
        unpack_imagenet_val(archives, out)
