"""Console output of the commands: log lines and a progress bar that do not overwrite each other."""

from __future__ import annotations

import io
import logging
import shutil
import sys
import time
from typing import Any

from tqdm import tqdm

from zoo.errors import escape

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
INDENT = "    "
BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}|"


class PlainFormatter(logging.Formatter):
    """Formats records safely: they can neither color a terminal nor imitate another record.

    Control characters are escaped. Line breaks are kept, and all lines but the first are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([escape(first), *(f"{INDENT}{escape(line)}" for line in others)])


class ConsoleHandler(logging.Handler):
    """Prints log records on stderr, above a progress bar if one is open."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless a bar shows it or it is for log files only."""
        if getattr(record, "only_in_files", False) or (getattr(record, "shown_by_bar", False) and is_terminal()):
            return
        try:
            # One write with its line break, between which no other process can write a line of its own.
            tqdm.write(f"{self.format(record)}\n", file=sys.stderr, end="")
        except Exception:
            self.handleError(record)


def is_terminal() -> bool:
    """Return whether stderr is a terminal. Bars are drawn only there; otherwise lines are printed."""
    return sys.stderr.isatty()


def set_up_console(rank: int) -> None:
    """Send zoo's log records to stderr: all records of rank 0, and warnings of other ranks with their rank.

    Also makes stdout and stderr escape characters that their encoding lacks instead of raising an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests and notebooks replace them with other objects
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
    """Progress of a loop: a bar on a terminal, lines otherwise. A context manager.

    Args:
    - `title`: text in front of the bar or the count.
    - `total`: number of batches.
    - `done`: number of batches that are already done.
    - `show`: whether to show anything.
    - `every`: batches between two lines; default: a line every 30 seconds.
    - `lines`: whether to log lines where there is no terminal; False if the caller logs its own.
    """

    def __init__(
        self, title: str, total: int, done: int = 0, *, show: bool = True, every: int | None = None, lines: bool = True
    ) -> None:
        self._title, self._total, self._done = title, total, done
        is_drawn = is_terminal()
        self._lines = show and lines and not is_drawn
        self._every = every
        self._last_line_s = time.monotonic()
        size = shutil.get_terminal_size()  # without a size, tqdm draws nothing on terminals that do not report theirs
        self._bar: tqdm[Any] = tqdm(
            desc=title,
            total=total,
            initial=done,
            bar_format=f"{BAR_FORMAT} {{elapsed}}<{{remaining}}",
            ncols=size.columns,
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
