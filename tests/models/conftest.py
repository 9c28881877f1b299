"""Small forms of networks whose sizes are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo.config.architectures import ARCHITECTURES

SMALL_BASELINES = {
    "irevnet_revnext": {"blocks": (2, 1), "channels": 8},
    "revnext_resnet18": {"channels": 8},
    "revnext_revnet": {"channels": 8},
}


@pytest.fixture
def small_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the baselines of the RevNeXt paper be small enough for float64."""
    for name, sizes in SMALL_BASELINES.items():
        record = ARCHITECTURES[name]
        monkeypatch.setitem(ARCHITECTURES, name, replace(record, structure={**record.structure, **sizes}))
