"""Text and progress bars share the terminal, once, in scripts, commands and notebooks; other handlers get lines."""

from __future__ import annotations

import io
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
from zoo.config.parse import parse_experiment
from zoo.run import console as module
from zoo.run.console import ConsoleHandler, Progress, console, set_up_console

logger = logging.getLogger("zoo.run.test")
LINES = ["header", "warning", "images: 2/2"]


@contextmanager
def unconfigured() -> Iterator[None]:
    """Removes the handlers of pytest, which come back before each test, and of earlier commands."""
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
    """Makes stderr a terminal, and yields the terminal's other end."""
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


@pytest.mark.parametrize(
    ("rank", "verbose", "lines"), [(0, True, LINES), (3, True, ["rank 3: warning"]), (0, False, [])]
)
def test_lines_are_printed_once_per_call(
    rank: int, verbose: bool, lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with unconfigured():
        for _ in range(2):
            with console(rank, verbose), console(rank, verbose):
                _work()
            assert capfd.readouterr().err.splitlines() == lines
        assert logging.getLogger("zoo").handlers == []
        assert logging.getLogger("zoo").level == logging.NOTSET
        if not verbose:
            logging.getLogger("zoo").addHandler(ConsoleHandler())  # left by an earlier command
            with console(rank, verbose):
                _work()
            assert capfd.readouterr() == ("", "")


def test_commands_print_notices_of_rank_0_and_warnings_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        set_up_console(rank)
        logger.info("notice")
        logger.warning("warning")
    assert capsys.readouterr().err.splitlines() == ["notice", "warning", "rank 1: warning"]


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
            assert capfd.readouterr().err.splitlines() == [f"own {line}" for line in LINES]


def test_custom_log_file_does_not_silence_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        handler = logging.FileHandler(tmp_path / "own.log")
        logging.getLogger().addHandler(handler)
        with console(0, verbose=True):
            _work()
        handler.close()
        assert capfd.readouterr().err == (tmp_path / "own.log").read_text() == "header\nwarning\nimages: 2/2\n"


def test_record_and_line_break_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of several processes that share a terminal do not run together."""
    written: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    ConsoleHandler().emit(logging.makeLogRecord({"msg": "3 class folders"}))
    assert [text for text in written if text] == ["3 class folders\n"]


@pytest.mark.parametrize(
    ("title", "every", "times_s", "lines"),
    [
        ("center224", 2, [0.0] * 12, ["center224: 2/5", "center224: 4/5"]),
        # A line after 30 s: at 20 s, 31 s (a line), 40 s, 65 s (a line), and 66 s.
        ("validation", None, [0, 20, 31, 31, 40, 65, 65, 66], ["validation: 2/5", "validation: 4/5"]),
    ],
)
def test_without_terminal_progress_is_lines(
    title: str, every: int | None, times_s: list[float], lines: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    set_up_console(0)
    times = iter(times_s)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    with Progress(title, total=5, every=every) as progress:
        for _ in range(5):
            progress.advance(1)
    assert capsys.readouterr().err.splitlines() == lines


def test_loop_that_logs_its_own_lines_prints_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_console(0)
    monkeypatch.setattr(module, "HEARTBEAT_S", -1.0)
    with Progress("epoch 1/4", total=2, lines=False) as progress:
        progress.advance(1)
        progress.set_status("a line of its own")
    assert capsys.readouterr().err == ""


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
        assert _read(reader).splitlines() == LINES


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


@pytest.mark.usefixtures("small_networks")
def test_train_and_score_show_progress_unless_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, experiment = make_images(tmp_path / "data", num_train=4, num_val=2), parse_experiment(SETTINGS, "test")
    with unconfigured():
        result = zoo.train(experiment, data, log_dir=tmp_path / "run", log_every=1)
        lines = capfd.readouterr().err.splitlines()
        assert lines[0].startswith("training resnet32_cifar: ")
        assert any(line.startswith("epoch 1 [1/1] ") for line in lines)
        assert sum(line.startswith("epoch 1 validation: ") for line in lines) == 1
        assert lines[-1].startswith("best top-1 ")
        zoo.train(experiment, data, log_dir=tmp_path / "silent", verbose=False)
        assert "epoch 1 validation: " in (tmp_path / "silent" / "training_0.log").read_text()
        zoo.score(result.checkpoint, data, log_every=1, verbose=False)
        assert capfd.readouterr() == ("", "")
        zoo.score(result.checkpoint, data, log_every=1)
        assert capfd.readouterr().err.splitlines() == ["center10-scale12: 1/1"]
