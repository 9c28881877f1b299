"""Networks of other packages train with the bits of plain training when they are lean, and hold less."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import zoo
from scripts.check_libraries import EXAMPLES, checked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_network_of_another_package_trains_with_the_same_bits_and_holds_less(name: str) -> None:
    packages, build = EXAMPLES[name]
    missing = [each for each in packages if find_spec(each) is None]
    if missing:
        pytest.skip(f"pip install {' '.join(missing)}")
    torch.manual_seed(0)
    found = checked(build(), zoo.lean)
    assert found.same is True, str(found)
    assert found.variant.held < 0.8 * found.plain.held
