"""What torch raises when another process of the run, or one that reads images, has ended: one line instead of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from zoo.errors import ZooError, brief

# torch raises these from a signal handler, so out of whatever line the main process was in.
DEAD_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by|exited unexpectedly)|Pin memory thread exited")
# Of Gloo, whose errors have no class of their own.
LOST_PEER = re.compile(
    r"gloo.*(?:[Cc]onnection|[Ss]ocket|[Tt]imed out|[Tt]imeout|peer)|[Cc]onnection (?:closed|reset) by peer", re.S
)
SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")  # what Gloo writes before its text


@contextmanager
def one_line_breakdowns() -> Iterator[None]:
    """Raise ZooError in place of the RuntimeError with which torch reports a dead worker or a lost process."""
    try:
        yield
    except RuntimeError as error:
        explanation = _explanation(error)
        if explanation is None:
            raise
        raise ZooError(explanation) from error


def is_dead_worker(error: BaseException) -> bool:
    """Whether ``error`` is torch's report that a process which reads images was killed or ended by itself."""
    return isinstance(error, RuntimeError) and DEAD_WORKER.search(str(error)) is not None


def _explanation(error: RuntimeError) -> str | None:
    if is_dead_worker(error):
        return (
            f"a process that reads images has ended ({_short(error)}); --workers: was the memory full? give fewer "
            "workers, then continue with --resume auto"
        )
    if isinstance(error, dist.DistError) or LOST_PEER.search(str(error)):
        return f"another process of the run ended or cannot be reached; see its message ({_short(error)})"
    return None


def _short(error: RuntimeError) -> str:
    """Return the first sentence of torch's text, without the place in torch's sources before it."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return brief(SOURCE_PLACE.sub("", line).split(". ")[0].strip())
