"""Three machines on which tests run what launchers start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.hosts import Host, hosts, why_not


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Yield three machines; skip the test where none can be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made
