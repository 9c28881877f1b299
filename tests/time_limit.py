"""`pytest --time-limit S`: a test of the default run that takes more than S seconds fails, unless `ALLOWED` names it.

The limit applies to the processor time of the test and of the child processes that it waits for. Wall time would depend
on what else the machine does. Processor time grows with the load as well, because hyperthreads share a core and
programs evict each other from the cache. The limit is therefore multiplied by the load average per core if that is
more than 1. A test that waits, or whose processes are started by a fork server, takes no processor time of its own: its
wall time may not exceed `WALL_FACTOR` times the limit.

Only the test function is measured. Fixtures and imports are not: they would count for whichever test comes first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from os import cpu_count, getloadavg, times
from time import monotonic  # by name: tests replace `time.monotonic`

import pytest

WALL_FACTOR = 10
NOT_DEFAULT = ("slow", "dist", "pages", "exhaustive", "gpu", "network")  # see pyproject.toml
IMPORTED_ONCE = ("torch._dynamo", "torch.export", "torch.utils.tensorboard", "torchvision")  # seconds each
# Tests of the default run that may take longer, by file and function, with the reason.
ALLOWED = {
    "tests/engine/test_exact_resume.py::test_killed_processes_end_as_the_straight_ones": "one run of two processes",
    "tests/engine/test_step.py::test_channels_last_and_torch_compile_make_the_same_step": "one compiled training step",
    "tests/layers/test_norm_compiled.py::test_functionalised_graphs_equal_eager": "one compiled network",
    "tests/models/test_networks.py::test_in_place_and_standard_norms_compute_the_same_network": "both kinds of block",
    "tests/test_experiments.py::test_the_network_of_each_experiment_can_be_built": "builds 40 networks once",
    "tests/test_time_limit.py::test_a_test_of_the_default_run_that_computes_too_long_fails": "is slow on purpose",
    "tests/test_torch_internals.py::test_no_other_file_uses_a_private_name_of_torch": "parses all files",
    "tests/test_torch_internals.py::test_every_exception_is_used": "parses all files",
    "tests/remat/test_hunt.py::test_random_programs_train_rightly": "finds more faults of zoo.lean than any other test",
    "tests/cli/test_train_segmentation.py::test_the_checkpoint_has_the_score_of_its_validation": "one segmentation run",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-limit", type=float, metavar="S", help="fail tests of the default run that take longer")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what takes seconds once per process, so that no test is charged for it."""
    is_controller = session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput")
    if session.config.getoption("time_limit") is not None and "torch" in sys.modules and not is_controller:
        for name in IMPORTED_ONCE:
            importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail the test if it passes but takes too long."""
    limit_s = item.config.getoption("time_limit")
    cpu_s, wall_s = _cpu_seconds(), monotonic()
    yield
    if limit_s is not None and is_limited(item):
        load = getloadavg()[0] / (cpu_count() or 1)
        excess = describe_excess(_cpu_seconds() - cpu_s, monotonic() - wall_s, limit_s, load)
        if excess is not None:
            pytest.fail(f"{excess}: make it smaller, mark it slow, or name it in ALLOWED of tests/time_limit.py", False)


def is_limited(item: pytest.Item) -> bool:
    """Return whether a test belongs to the default run and is not in `ALLOWED`."""
    is_default = item.get_closest_marker("smoke") or not any(map(item.get_closest_marker, NOT_DEFAULT))
    return bool(is_default) and item.nodeid.partition("[")[0] not in ALLOWED


def describe_excess(cpu_s: float, wall_s: float, limit_s: float, load: float) -> str | None:
    """Return what a test took too much of, or None; ``load`` is the machine's load average per core."""
    limit_s *= max(1.0, load)
    if cpu_s > limit_s:
        return f"the test took {cpu_s:.1f} s of processor time, and may take {limit_s:.1f} s"
    if wall_s > WALL_FACTOR * limit_s:
        return f"the test took {wall_s:.1f} s, mostly waiting, and may take {WALL_FACTOR * limit_s:.1f} s"
    return None


def _cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(times()[:4])
