"""A run ends on a signal, even if its workers hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import SETTINGS
from tests.engine.tiny import make_images

END_S = 12.0  # REPEAT_S is shortened to a second; the rest is time on a machine with other work


# A run of many epochs. The second image of a worker stops the worker, as dead network storage does.
TRAIN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what they start in the background ignore it

from zoo.cli import main
from zoo.data.sources import folder
from zoo.engine import stop
stop.REPEAT_S = 1.0

def hang(name):
    if len(seen) == 1:
        os.write(1, b"%d\\n" % os.getpid())  # two workers write to one pipe
        os.kill(os.getpid(), signal.SIGSTOP)
    seen.append(name)
    return read_bytes(name)

seen, read_bytes = [], folder.read_bytes
folder.read_bytes = hang
raise SystemExit(main(["train", *sys.argv[1:]]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    settings = json.loads(json.dumps(SETTINGS))
    settings["optimizer"]["schedule"]["epochs"] = 1000
    (tmp_path / "tiny.json").write_text(json.dumps(settings))
    make_images(tmp_path / "data", num_train=40, num_val=4)
    return [str(tmp_path / "tiny.json"), str(tmp_path / "data"), "--log-dir", str(tmp_path / "log")]


@pytest.fixture
def hanging(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run whose two workers have stopped."""
    program = [sys.executable, "-c", TRAIN, *command, "-j", "2"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    yield process
    process.kill()
    process.communicate()
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_second_signal_ends_run_with_hanging_workers(hanging: subprocess.Popen[str]) -> None:
    number = signal.SIGTERM
    hanging.send_signal(number)
    time.sleep(1.5)
    assert hanging.poll() is None
    for _ in range(
        3
    ):  # a signal within REPEAT_S of the one before is not counted; a busy machine handles the first late
        hanging.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert hanging.wait(END_S) == 128 + number
            return
    raise AssertionError("the run does not end")
