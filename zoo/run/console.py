"""Console output of the commands: log lines and a progress bar that do not overwrite each other."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import TqdmWarning
from tqdm.notebook import tqdm_notebook
from tqdm.std import tqdm

from zoo.errors import escape

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # a notebook without ipywidgets gets lines instead
    from tqdm.auto import tqdm as auto_tqdm

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
INDENT = "    "
BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}|"


class PlainFormatter(logging.Formatter):
    """Formats records safely: they can neither color a terminal nor imitate another record.

    Escapes control characters. Preserves line breaks, and indents all lines after the first.
    """

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([escape(first), *(f"{INDENT}{escape(line)}" for line in others)])


class ConsoleHandler(logging.Handler):
    """Prints log records on stderr, above a progress bar if one is open."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless a bar shows it or it is for log files only."""
        if getattr(record, "only_in_files", False) or (getattr(record, "shown_by_bar", False) and draws_bars()):
            return
        try:
            # One write including the line break, so that no other process can write in between.
            tqdm.write(f"{self.format(record)}\n", file=sys.stderr, end="")
        except Exception:
            self.handleError(record)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can show widgets."""
    return issubclass(auto_tqdm, tqdm_notebook)


def draws_bars() -> bool:
    """Return whether progress is shown as bars: on a terminal or in a notebook, if a `ConsoleHandler` prints the lines.

    A user's own handler would write into the bars, and gets lines instead.
    """
    prints = any(isinstance(handler, ConsoleHandler) for handler in logging.getLogger("zoo").handlers)
    return prints and (sys.stderr.isatty() or is_notebook())


def environment_rank() -> int:
    """Return the rank of this process for its log; 0 if RANK is not a number (distributed commands report that)."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def set_up_console(rank: int) -> None:
    """Send zoo's log records to stderr: all records of rank 0, and warnings of other ranks with their rank.

    Also makes stdout and stderr escape characters that their encoding does not support, instead of raising an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests and notebooks replace them with other objects
            stream.reconfigure(errors="backslashreplace")
    zoo_logger = logging.getLogger("zoo")
    zoo_logger.setLevel(logging.INFO)
    zoo_logger.handlers = [_console_handler(rank)]


@contextmanager
def console(rank: int, verbose: bool) -> Iterator[None]:
    """Makes a call from Python print the output of the command, or nothing unless ``verbose``.

    If the user has configured logging, other than to files, zoo's records go only there.
    """
    zoo_logger = logging.getLogger("zoo")
    handlers, level = list(zoo_logger.handlers), zoo_logger.level
    if not verbose:
        kept = [handler for handler in handlers if not isinstance(handler, ConsoleHandler)]
        # Without any handler, Python would print warnings.
        zoo_logger.handlers = [*kept, logging.NullHandler()]
    elif not _is_printed(zoo_logger):
        zoo_logger.addHandler(_console_handler(rank))
    if zoo_logger.getEffectiveLevel() > logging.INFO:
        zoo_logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        zoo_logger.handlers = handlers
        zoo_logger.setLevel(level)


def _console_handler(rank: int) -> ConsoleHandler:
    handler = ConsoleHandler()
    handler.setFormatter(PlainFormatter())
    if rank != 0:
        handler.setLevel(logging.WARNING)
        handler.setFormatter(PlainFormatter(f"rank {rank}: %(message)s"))
    return handler


def _is_printed(source: logging.Logger | None) -> bool:
    """Return whether a logger or one of its parents has a handler that does not write to a file."""
    while source is not None:
        if any(not isinstance(handler, logging.FileHandler | logging.NullHandler) for handler in source.handlers):
            return True
        source = source.parent if source.propagate else None
    return False


class Progress:
    """Progress of a loop: a bar where `draws_bars` says so, lines otherwise. A context manager.

    Args:
    - `title`: text in front of the bar or the count.
    - `total`: number of batches.
    - `done`: number of batches that are already done.
    - `show`: whether to show anything.
    - `every`: batches between two lines; default: a line every 30 seconds.
    - `lines`: whether to log lines where there is no bar; False if the caller logs its own.
    """

    def __init__(
        self, title: str, total: int, done: int = 0, *, show: bool = True, every: int | None = None, lines: bool = True
    ) -> None:
        self._title, self._total, self._done = title, total, done
        is_drawn = draws_bars()
        self._lines = show and lines and not is_drawn
        self._every = every
        self._last_line_s = time.monotonic()
        size = shutil.get_terminal_size()  # without a size, tqdm draws nothing on terminals that do not report theirs
        self._bar: tqdm[Any] = auto_tqdm(
            desc=title,
            total=total,
            initial=done,
            bar_format=f"{BAR_FORMAT} {{elapsed}}<{{remaining}}",
            ncols=None if is_notebook() else size.columns,
            nrows=size.lines,
            leave=False,
            disable=not (show and is_drawn),
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, count: int) -> None:
        """Add ``count`` batches to those done."""
        self._bar.update(count)
        self._done += count
        is_late = time.monotonic() - self._last_line_s > HEARTBEAT_S
        if self._lines and (is_late if self._every is None else self._done % self._every == 0):
            logger.info("%s: %d/%d", self._title, self._done, self._total)
            self._last_line_s = time.monotonic()

    def set_status(self, text: str) -> None:
        """Show ``text`` behind the bar. Without a bar nothing is printed: the caller logs its own line."""
        self._bar.bar_format = f"{BAR_FORMAT} {text}"
