"""Calls from Python print the output of the commands, once, in scripts and in notebooks."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import zoo
from tests.engine.tiny import make_images
from tests.run.test_public_runs import SETTINGS
from zoo.run.console import ConsoleHandler, Progress, console

logger = logging.getLogger("zoo.run.test")


@contextmanager
def unconfigured() -> Iterator[None]:
    """Context without the handlers of pytest, which come back before each test, and of earlier commands."""
    loggers = logging.getLogger(), logging.getLogger("zoo")
    former = [(each, each.handlers, each.level) for each in loggers]
    for each in loggers:
        each.handlers = []
    logging.getLogger("zoo").setLevel(logging.NOTSET)
    try:
        yield
    finally:
        for each, handlers, level in former:
            each.handlers = handlers
            each.setLevel(level)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Context in which stderr is a terminal, with the terminal's other end."""
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield reader
    os.close(reader)


def _read(reader: int) -> str:
    """Return everything that was written to a terminal."""
    parts = []
    with suppress(BlockingIOError):
        while True:
            parts.append(os.read(reader, 10_000))
    return b"".join(parts).decode()


def _work() -> None:
    logger.info("header")
    logger.warning("warning")
    with Progress("images", total=2, every=1) as progress:
        progress.advance(2)


def test_lines_are_printed_once_per_call(capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        for _ in range(2):
            with console(0, verbose=True), console(0, verbose=True):
                _work()
            assert capfd.readouterr().err.splitlines() == ["header", "warning", "images: 2/2"]
        assert logging.getLogger("zoo").handlers == []
        assert logging.getLogger("zoo").level == logging.NOTSET


def test_other_ranks_print_warnings_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        with console(3, verbose=True):
            _work()
        assert capfd.readouterr().err.splitlines() == ["rank 3: warning"]


@pytest.mark.parametrize("name", [None, "zoo"])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_custom_handler_gets_each_line_once(name: str | None, level: int, capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("own %(message)s"))
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
        for _ in range(2):
            with console(0, verbose=True):
                _work()
            assert capfd.readouterr().err.splitlines() == ["own header", "own warning", "own images: 2/2"]


def test_custom_log_file_does_not_silence_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        handler = logging.FileHandler(tmp_path / "own.log")
        logging.getLogger().addHandler(handler)
        with console(0, verbose=True):
            _work()
        handler.close()
        assert capfd.readouterr().err == (tmp_path / "own.log").read_text() == "header\nwarning\nimages: 2/2\n"


def test_call_without_verbose_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        with console(0, verbose=False):
            _work()
        logging.getLogger("zoo").addHandler(ConsoleHandler())  # left by an earlier command
        with console(0, verbose=False):
            _work()
        assert capfd.readouterr() == ("", "")


def test_terminal_has_bar_above_which_lines_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    with unconfigured(), terminal(monkeypatch) as reader:
        with console(0, verbose=True):
            _work()
            with Progress("images", total=2) as progress:
                progress.advance(1)
                logger.info("during")
        printed = _read(reader)
        assert "images 0/2 |" in printed
        assert "during\r\n" in printed
        assert "images: 2/2" not in printed


def test_custom_handler_on_terminal_gets_lines_instead_of_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with unconfigured(), terminal(monkeypatch) as reader:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
        with console(0, verbose=True):
            _work()
        assert _read(reader) == "header\r\nwarning\r\nimages: 2/2\r\n"


NOTEBOOK = """
import sys, types
ipython = types.ModuleType("IPython"); ipython.__version__ = "9.0"
ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
ipython.display = types.ModuleType("IPython.display")
shown = []
ipython.display.display = shown.append
sys.modules |= {"IPython": ipython, "IPython.display": ipython.display}
class Widget:
    def __init__(self, children=(), **traits):
        self.children, self.value, self.bar_style = children, 0, ''
        self.layout, self.style = types.SimpleNamespace(), types.SimpleNamespace()
        self.__dict__.update(traits)
    def close(self): self.closed = True
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")  # makes the process a kernel
if sys.argv[1] == "widgets":
    widgets = types.ModuleType("ipywidgets")
    widgets.HTML = widgets.FloatProgress = widgets.HBox = Widget
    sys.modules["ipywidgets"] = widgets
from zoo.run.console import Progress, console
import logging
with console(0, True), Progress("images", total=2, every=2) as progress:
    progress.advance(2)
    logging.getLogger("zoo").info("line")
print(len(shown), [child.value for each in shown for child in each.children[1:2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widgets", "out", "err"), [("widgets", "1 [2]", ["line"]), ("none", "0 []", ["images: 2/2", "line"])]
)
def test_notebook_has_bar_if_it_has_widgets(widgets: str, out: str, err: list[str]) -> None:
    program = [sys.executable, "-W", "error", "-c", NOTEBOOK, widgets]
    result = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (result.stdout.strip(), result.stderr.splitlines()) == (out, err)


def test_train_and_score_show_progress_unless_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        data = make_images(tmp_path / "data", num_train=4, num_val=2)
        (tmp_path / "tiny.json").write_text(json.dumps(SETTINGS))
        result = zoo.train(tmp_path / "tiny.json", data, log_dir=tmp_path / "run", log_every=1)
        lines = capfd.readouterr().err.splitlines()
        assert lines[0].startswith("training resnet32_cifar: ")
        assert any(line.startswith("epoch 1 [1/1] ") for line in lines)
        assert sum(line.startswith("epoch 1 validation: ") for line in lines) == 1
        assert lines[-1].startswith("best top-1 ")
        zoo.train(tmp_path / "tiny.json", data, log_dir=tmp_path / "silent", verbose=False)
        assert "epoch 1 validation: " in (tmp_path / "silent" / "training_0.log").read_text()
        zoo.score(result.checkpoint, data, log_every=1, verbose=False)
        assert capfd.readouterr() == ("", "")
        zoo.score(result.checkpoint, data, log_every=1)
        assert capfd.readouterr().err.splitlines() == ["center10-scale12: 1/1"]
