"""Experiment files, records and images with any content are read, or refused with one message.

Each test runs 10,000 examples in `make faults`, and `SHORT` in the default suite.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from tests.cli.conftest import SETTINGS
from tests.faults.fuzz import EXAMPLES, JSON, damaged_tree, fuzz, mutated
from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.data.reading import decode_as, load_rgb
from zoo.weights.description import parse_description


@EXAMPLES
def test_any_settings_give_experiment_or_error(count: int, tmp_path: Path) -> None:
    full = load_experiment("cityscapes_wider_resnet38_ipabn-sync_872_class_uniform").model_dump(mode="json")
    cases = damaged_tree(SETTINGS) | damaged_tree(full) | JSON
    fuzz(lambda content: parse_experiment(content, "test"), count, cases, tmp_path)


@EXAMPLES
def test_any_bytes_of_experiment_file_give_experiment_or_error(count: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    originals = [file.read_bytes() for file in sorted(experiments_dir().glob("res*.json"))[:5]]

    def load(content: bytes) -> None:
        path.write_bytes(content)
        load_experiment(path)

    fuzz(load, count, mutated(originals) | st.binary(max_size=200), tmp_path)


@EXAMPLES
def test_any_record_in_weights_file_gives_record_or_error(count: int, tmp_path: Path) -> None:
    config = parse_experiment(SETTINGS, "test")
    record = config.record(("a", "b")).content()
    cases = damaged_tree({"network": record, "state_dict": {}}) | st.dictionaries(
        st.sampled_from(("network", "config", "class_names", "state_dict")), JSON
    )
    fuzz(lambda content: parse_description(content, "weights.pth"), count, cases, tmp_path)


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
def test_any_bytes_of_image_give_pixels_or_error(count: int, tmp_path: Path) -> None:
    fuzz(lambda encoded: decode_as(encoded, "a.jpg", load_rgb, "an image"), count, mutated(_images()), tmp_path)
