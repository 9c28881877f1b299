"""What a person sees while a command runs: a progress bar, and lines of text that do not break it."""

from __future__ import annotations

import io
import logging
import shutil
import sys
import time
from typing import Any

from tqdm import tqdm

from zoo.errors import printable

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
INDENT = "    "
BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}|"


class PlainFormatter(logging.Formatter):
    """Formats a record so that it can neither colour a terminal nor pretend to be another record.

    Control characters become escapes. Line breaks stay, and all lines but the first are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        first, *others = super().format(record).split("\n")
        return "\n".join([printable(first), *(f"{INDENT}{printable(line)}" for line in others)])


class ConsoleHandler(logging.Handler):
    """Prints log records on stderr, above a progress bar if one is open."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message, unless a bar shows it or it is for log files only."""
        if getattr(record, "only_in_files", False) or (getattr(record, "shown_by_bar", False) and is_terminal()):
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def is_terminal() -> bool:
    """Whether stderr is a terminal, where bars are drawn; elsewhere plain lines are printed."""
    return sys.stderr.isatty()


def set_up_console(rank: int) -> None:
    """Send zoo's log records to stderr: all records of rank 0, and the warnings of other ranks with their rank.

    From now on a character that the encoding of stdout or stderr does not have is printed as an escape and raises no
    error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests and notebooks put other objects there
            stream.reconfigure(errors="backslashreplace")
    handler = ConsoleHandler()
    handler.setFormatter(PlainFormatter())
    if rank != 0:
        handler.setLevel(logging.WARNING)
        handler.setFormatter(PlainFormatter(f"rank {rank}: %(message)s"))
    logger = logging.getLogger("zoo")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]


class Progress:
    """Shows how far a loop is, as a bar on a terminal and in plain lines elsewhere. A context manager.

    Args:
    - `title`: what the loop does.
    - `total`: number of batches.
    - `done`: how many of them are done already.
    - `show`: False for showing nothing at all.
    - `every`: number of batches between two plain lines; without it a line comes after 30 seconds without one.
    - `unit`: what is counted in plain lines.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        *,
        show: bool = True,
        every: int | None = None,
        unit: str = "batches",
    ) -> None:
        self._title, self._total, self._done = title, total, done
        self._lines = show and not is_terminal()
        self._every, self._unit = every, unit
        self._last_line_s = time.monotonic()
        size = shutil.get_terminal_size()  # tqdm alone draws nothing on terminals that do not tell their size
        self._bar: tqdm[Any] = tqdm(
            desc=title,
            total=total,
            initial=done,
            bar_format=f"{BAR_FORMAT} {{elapsed}}<{{remaining}}",
            ncols=size.columns,
            nrows=size.lines,
            leave=False,
            disable=self._lines or not show,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, count: int) -> None:
        """Count ``count`` more batches as done."""
        self._bar.update(count)
        self._done += count
        is_late = time.monotonic() - self._last_line_s > HEARTBEAT_S
        if self._lines and (is_late if self._every is None else self._done % self._every == 0):
            logger.info("%s: %d/%d %s", self._title, self._done, self._total, self._unit)
            self._last_line_s = time.monotonic()

    def tell(self, text: str) -> None:
        """Show ``text`` behind the bar. Where there is no bar, the caller has printed a line of its own."""
        self._bar.bar_format = f"{BAR_FORMAT} {text}"
        self._last_line_s = time.monotonic()


def format_duration(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
