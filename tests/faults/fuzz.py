"""Helpers for tests of hostile input: damaged bytes, a memory limit, and a monitor of programs and writes."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo.errors import ZooError

SHORT = 25  # examples in the default run; `make faults` takes 10,000
EXAMPLES = pytest.mark.parametrize("examples", [SHORT, pytest.param(10_000, marks=pytest.mark.exhaustive)])
MEMORY_BYTES = 2**30  # additional memory that a case may allocate
MESSAGE_LENGTH = 5_000  # longest readable message, in characters
RUNS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "pty.spawn",
    "ctypes.dlopen",
}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def fuzz(check: Callable[[Any], object], examples: int, cases: st.SearchStrategy[Any], allowed: Path) -> None:
    """Call ``check`` with ``examples`` draws of ``cases``: it succeeds, or raises a ZooError with a printable message.

    The message is short and may have a line per problem. No other program is run, no connection is opened, and
    nothing is written outside of the folder ``allowed``.
    """

    def case_ends_well(case: Any) -> None:
        try:
            with _watched(allowed) as deeds:
                check(case)
        except ZooError as error:
            text = str(error)
            assert len(text) < MESSAGE_LENGTH
            assert text.replace("\n", "").isprintable()
        assert deeds == [], deeds

    health = settings(
        max_examples=examples,
        deadline=10_000,
        database=None,
        derandomize=examples <= SHORT,  # only `make faults` looks for new cases
        suppress_health_check=list(HealthCheck),
    )
    with _bounded_memory():
        health(given(cases)(case_ends_well))()


def mutated(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return one of the byte strings with up to five random changes, deletions, insertions or truncations."""
    change = st.tuples(
        st.sampled_from(("change", "change", "insert", "delete", "repeat", "cut")),
        st.integers(0, 2**20),
        st.binary(min_size=1, max_size=8),
    )
    return st.builds(_changed, st.sampled_from(originals), st.lists(change, min_size=1, max_size=5))


def _changed(original: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    content = bytearray(original)
    for kind, place, piece in changes:
        start = place % (len(content) + 1)
        end = start + len(piece)
        if kind == "change":
            content[start:end] = piece
        elif kind == "insert":
            content[start:start] = piece
        elif kind == "delete":
            del content[start:end]
        elif kind == "repeat":
            content[start:start] = content[start:end] * len(piece)
        elif place % 5 == 0:  # not often, as little is left
            del content[start:]
    return bytes(content)


def damaged_tree(tree: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return ``tree`` with one to three of its values, at any depth, replaced, removed, or with other keys beside."""
    paths = list(_paths(tree))
    change = st.tuples(st.sampled_from(paths), st.sampled_from(("set", "set", "remove", "add")), JSON)
    return st.builds(_with_changes, st.just(tree), st.lists(change, min_size=1, max_size=3))


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from _paths(tree[key], (*path, key))


def _with_changes(tree: Any, changes: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
    copied = _copied(tree)
    for path, kind, value in changes:
        parent = copied
        try:
            for key in path[:-1]:
                parent = parent[key]
            if kind == "set":
                parent[path[-1]] = value
            elif kind == "remove":
                del parent[path[-1]]
            else:
                parent[str(value)[:20]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed the place
    return copied


def _copied(tree: Any) -> Any:
    """Return a copy of the containers, not of their items."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


@contextmanager
def limit_resource(kind: int, value: int) -> Iterator[None]:
    """Lowers a limit of this process, such as `resource.RLIMIT_FSIZE`: the system then fails as a full disk would."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _bounded_memory() -> AbstractContextManager[None]:
    """Limits the process to `MEMORY_BYTES` more memory than now. Beyond it, allocations raise MemoryError."""
    if sys.platform != "linux":
        return nullcontext()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit_resource(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


_watch: list[tuple[str, list[str]]] = []
_hooked: list[bool] = []


@contextmanager
def _watched(allowed: Path) -> Iterator[list[str]]:
    """Yields a list of the programs that are run, the connections, and the writes outside of the test folder."""
    if not _hooked:
        sys.addaudithook(_note)  # there is no way to remove it
        _hooked.append(True)
    _watch.append((os.path.realpath(allowed), deeds := []))
    try:
        yield deeds
    finally:
        _watch.clear()


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _watch:
        return
    allowed, deeds = _watch[0]
    if event in RUNS or event == "socket.connect":
        deeds.append(f"{event} {args[:2]}")
    elif event == "open" and isinstance(args[0], (str, bytes)):
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(args[2], int) else False
        if writes and args[0] != os.devnull and not _is_in(args[0], allowed):
            deeds.append(f"open {args}")
    elif event in CHANGES and not _is_in(args[0], allowed):
        deeds.append(f"{event} {args}")


def _is_in(path: Any, folder: str) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(os.fsdecode(path)).startswith(folder)
