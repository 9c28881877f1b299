"""Verifies published weights by their md5: one file, or the whole cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zoo.errors import WeightsError
from zoo.weights.cache import SUFFIX, cached_md5, fresh_md5, weights_dir, weights_path
from zoo.weights.index import REPLACED_MD5, all_published, entry_of
from zoo.weights.read import md5_of

Status = Literal["ok", "damaged", "partial", "unknown", "missing"]


@dataclass(frozen=True)
class Finding:
    """What an audit says of one file; ``note`` says why, or what to do."""

    path: Path
    status: Status
    note: str = ""


def mismatch(name: str, found: str) -> str:
    """Return in words that weights ``name`` have the md5 ``found`` and not their own."""
    wrong = f"the md5 is {found}, not {entry_of(name)['md5']}"
    if found == REPLACED_MD5.get(name):
        return f"{wrong}: these are the weights as published before July 2018, which were replaced"
    return wrong


def check_weights(path: Path, name: str) -> None:
    """Raise WeightsError unless the file at ``path`` has the md5 of the published weights ``name``.

    The file is read only if it changed since it was read last; it stays as it is in any case.
    """
    found = cached_md5(path)
    if found != entry_of(name)["md5"]:
        raise WeightsError(f"{path}: {mismatch(name, found)}; {_advice(path, name, found)}")


def _advice(path: Path, name: str, found: str) -> str:
    advice = f"remove it and run zoo fetch {name}"
    if found == REPLACED_MD5.get(name):
        return f"{advice}, or load it as it is: zoo.get({name!r}, weights={str(path)!r})"
    return f"{advice}, or give its path as weights= if it is meant to differ"


def audit_cache(names: Sequence[str] = ()) -> list[Finding]:
    """Return what is to be said of each file in the cache, or of the published weights ``names`` alone.

    Every file is read from the disk, whatever its sidecar says. Raises ConfigError for an unknown name.
    """
    if names:
        return [_audit_named(entry_of(name)["name"]) for name in names]
    folder = weights_dir()
    return [_audit(path) for path in sorted(folder.iterdir()) if _counts(path)] if folder.is_dir() else []


def _counts(path: Path) -> bool:
    """Return whether a file is more than a sidecar, a lock or what either is made from."""
    return not path.name.endswith((f"{SUFFIX}.json", f"{SUFFIX}.lock", f"{SUFFIX}.json.tmp")) and path.name[0] != "."


def _audit_named(name: str) -> Finding:
    path = weights_path(name)
    part = path.with_name(f"{path.name}.part")
    return _audit(path) if path.exists() or not part.exists() else _audit(part)


def _audit(path: Path) -> Finding:
    name, _, rest = path.name.partition(SUFFIX)
    is_published = rest == "" and name in all_published()
    if rest.endswith(".part"):
        advice = f"zoo fetch {name} continues" if rest == ".part" else "left by a fetch that was stopped; remove it"
        return Finding(path, "partial", f"{path.stat().st_size:,} bytes; {advice}")
    if not path.exists():
        return Finding(path, "missing", f"zoo fetch {name} downloads it")
    try:
        found = fresh_md5(path) if is_published else md5_of(path)  # no sidecars for files that are not ours
    except WeightsError as error:
        return Finding(path, "damaged" if is_published else "unknown", str(error))
    if is_published:
        if found == all_published()[name]["md5"]:
            return Finding(path, "ok")
        return Finding(path, "damaged", f"{mismatch(name, found)}; {_advice(path, name, found)}")
    twin = next((known for known, entry in all_published().items() if entry["md5"] == found), None)
    return Finding(path, "unknown", f"holds {twin}; rename it to {twin}{SUFFIX}" if twin else "not published weights")
