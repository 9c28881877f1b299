"""Files and answers from anyone: whatever is in them, there is success or one message, in bounded memory and time.

Each test goes through ten thousand cases in `make faults`, and through two hundred in the default suite.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from tests.cli.conftest import SETTINGS
from tests.faults.fuzz import EXAMPLES, JSON, damaged_tree, fuzz, mutated
from zoo.config import load_experiment, parse_experiment
from zoo.config.parse import experiments_dir
from zoo.data.reading import decode_as, load_rgb
from zoo.weights.download import number, read_form, retry_after_s, without_password
from zoo.weights.published import read_checksums
from zoo.weights.read import extract_state_dict, read_checkpoint
from zoo.weights.stored_spec import parse_stored_spec


@EXAMPLES
def test_any_settings_are_an_experiment_or_a_message(count: int, tmp_path: Path) -> None:
    full = load_experiment("cityscapes_wider_resnet38_ipabn-sync_872_class_uniform").model_dump(mode="json")
    cases = damaged_tree(SETTINGS) | damaged_tree(full) | JSON
    fuzz(lambda content: parse_experiment(content, "test"), count, cases, tmp_path)


@EXAMPLES
def test_any_bytes_of_an_experiment_file_are_an_experiment_or_a_message(count: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    originals = [file.read_bytes() for file in sorted(experiments_dir().glob("res*.json"))[:5]]

    def load(content: bytes) -> None:
        path.write_bytes(content)
        load_experiment(path)

    fuzz(load, count, mutated(originals) | st.binary(max_size=200), tmp_path)


@EXAMPLES
def test_any_checksums_are_a_list_or_a_message(count: int, tmp_path: Path) -> None:
    path = tmp_path / "checksums.md5"
    original = (experiments_dir().parent / "checksums.md5").read_bytes()

    def load(content: bytes) -> None:
        path.write_bytes(content)
        for name, md5 in read_checksums(path).items():
            assert len(md5) == 32
            assert "/" not in name

    fuzz(load, count, mutated([original, original[:60]]) | st.binary(max_size=200), tmp_path)


def _weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 3, generator=generator)
    return {
        "state_dict": {"a.weight": shared, "b.weight": shared[:2].t(), "count": torch.tensor(3)},
        "epoch": 3,
        "best_prec1": np.float64(75.0),
        "arch": "resnet18",
    }


def _file(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(_weights(), file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _with_pickle(pickled: bytes) -> bytes:
    """Return the file with another pickle in it and right checksums, so that the pickle is read."""
    with zipfile.ZipFile(io.BytesIO(_file(zipped=True))) as archive, zipfile.ZipFile(out := io.BytesIO(), "w") as new:
        for name in archive.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else archive.read(name))
    return out.getvalue()


def _pickle() -> bytes:
    with zipfile.ZipFile(io.BytesIO(_file(zipped=True))) as archive:
        return archive.read("archive/data.pkl")


WEIGHTS = {
    "zip": lambda: mutated([_file(zipped=True)]),
    "pickle in a sound zip": lambda: mutated([_pickle(), pickle.dumps({"a": 1})]).map(_with_pickle),
    "before zip": lambda: mutated([_file(zipped=False)]),
    "anything": lambda: st.binary(max_size=300),
}


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # torch warns of formats that a damaged file seems to have
@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_bytes_of_a_weights_file_are_tensors_or_a_message(kind: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"

    def load(content: bytes) -> None:
        path.write_bytes(content)
        extract_state_dict(read_checkpoint(path), path)

    fuzz(load, count, WEIGHTS[kind](), tmp_path)


@EXAMPLES
def test_any_record_in_a_weights_file_is_a_record_or_a_message(count: int, tmp_path: Path) -> None:
    config = parse_experiment(SETTINGS, "test")
    record = config.network.described(config.input, ("a", "b")).model_dump(mode="json")
    cases = damaged_tree({"network": record, "state_dict": {}}) | st.dictionaries(
        st.sampled_from(("network", "config", "class_names", "state_dict")), JSON
    )
    fuzz(lambda content: parse_stored_spec(content, "weights.pth"), count, cases, tmp_path)


def _images() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    encoded = []
    for name in ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP"):
        for mode in ("RGB", "L", "1", "P", "I;16"):
            image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 200) if mode == "I;16" else image
            try:
                image.save(file := io.BytesIO(), name)
            except (OSError, KeyError):
                continue  # the format does not have the mode
            encoded.append(file.getvalue())
    return encoded


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # PIL warns of metadata that it cannot read
def test_any_bytes_of_an_image_are_pixels_or_a_message(count: int, tmp_path: Path) -> None:
    fuzz(lambda encoded: decode_as(encoded, "a.jpg", load_rgb, "an image"), count, mutated(_images()), tmp_path)


PAGE = (
    b'<html><title>Drive &amp; more</title><form id="download-form" action="/x?a=1" method="get">'
    b'<input type="hidden" name="confirm" value="t"><input type="hidden" name="id" value="7"></form></html>'
)


@EXAMPLES
def test_any_page_of_a_server_has_a_form_to_send_or_none(count: int, tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        try:
            page = read_form(content.decode("utf-8", errors="replace"), "https://example.org/x")
        except ValueError:
            return  # as documented: it becomes a DownloadError where answers are received
        assert page.link is None or page.link.startswith(("http://", "https://"))

    fuzz(read, count, mutated([PAGE]), tmp_path)


@EXAMPLES
def test_any_header_is_a_number_a_pause_or_none(count: int, tmp_path: Path) -> None:
    def read(text: str) -> None:
        assert (number(text) or 0) >= 0
        assert (retry_after_s(text) or 0) >= 0
        assert "@" not in without_password(
            f"https://name:{text.replace('/', '')}@host/".replace("?", "").replace("#", "")
        )

    dates = mutated([b"Wed, 21 Oct 2026 07:28:00 GMT", b"120"]).map(lambda content: content.decode("latin-1"))
    fuzz(read, count, dates | st.text(), tmp_path)
