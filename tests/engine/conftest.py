"""Images of the tests' runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import make_images


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images: an epoch has 5 steps of 8 images. 6 images to validate with. Tests do not change the folder."""
    return make_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def uneven_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """44 images: batches of 8 and of 16 leave a smaller one. 11 images to validate with."""
    return make_images(tmp_path_factory.mktemp("uneven"), 44, num_val=11)
