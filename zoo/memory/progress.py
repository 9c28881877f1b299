"""Displays the progress of a measurement of several steps."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DELAY_S = 1.5


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Displays ``title``, the current step and the elapsed time. Yields a function that sets the step.

    The line appears after `DELAY_S` on a terminal or in a notebook, and disappears at the end. The environment variable
    TQDM_DISABLE=1 turns it off.
    """
    is_terminal = sys.stderr.isatty()
    if not is_terminal and "ipykernel" not in sys.modules:
        yield lambda _: None
        return
    from tqdm.auto import tqdm  # imported late, because it takes a tenth of a second

    # Without a size, tqdm draws nothing on terminals that do not report theirs. A notebook has none.
    columns, lines = shutil.get_terminal_size() if is_terminal else (None, None)
    bar: tqdm[Any]
    with tqdm(
        desc=title, bar_format="{desc} ({elapsed})", delay=DELAY_S, leave=False, ncols=columns, nrows=lines
    ) as bar:
        # A step may take long, and tqdm draws only when it is called.
        timer = threading.Timer(DELAY_S, bar.refresh)
        timer.daemon = True
        if not bar.disable:
            timer.start()

        def show(what: str) -> None:
            is_drawn = not timer.is_alive()
            bar.set_description_str(f"{title}: {what}", refresh=is_drawn)

        try:
            yield show
        finally:
            timer.cancel()
            bar.clear()  # tqdm itself erases only what its method update has drawn
