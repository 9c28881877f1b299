"""The index of published weights: name, settings, scores, md5, Drive id and licence of each file."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from zoo.errors import ConfigError, nearest

# md5 of the files before 18 July 2018, when six were published again without the ".bn" level of their norms' keys.
REPLACED_MD5 = {
    "resnext101_stdbn_lr_256": "b959d9362a236212e935501a5a1d1963",
    "resnext101_ipabn_lr_512": "28d42cd3f1ab50c86a10809bdb48aa22",
    "resnext152_ipabn_lr_256": "adf521103388f044130835f64d91266a",
    "wider_resnet38_ipabn_lr_256": "0f9746bedb62d9f94c4437cfb8e6f2d8",
    "resnext101_ipabn-sync_lr_256": "74e9405a36691fd6503159faa8cc2e9b",
    "densenet264_ipabn_lr_256": "c69075248477ce4d1a24b56401f5baec",
}


@cache
def all_published() -> dict[str, dict[str, Any]]:
    """Return all published files by name, those included whose network this package does not have (arch is None)."""
    entries = json.loads(files("zoo").joinpath("published.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry for entry in entries}


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the published classification networks by name: settings, scores, md5, Drive id and licence."""
    return {name: entry for name, entry in all_published().items() if entry["arch"] is not None}


def entry_of(name: str) -> dict[str, Any]:
    """Return the entry of the published weights ``name``.

    Raises ConfigError for another name, with the names that come nearest, or all of an architecture.
    """
    if name in all_published():
        return all_published()[name]
    of_arch = [variant for variant, entry in published().items() if entry["arch"] == name]
    if of_arch:
        raise ConfigError(f"{name} is an architecture; name its published weights: {', '.join(of_arch)}")
    near = ", ".join(nearest(name, all_published()))
    raise ConfigError(f"no published weights are called {name!r}; the nearest are {near} (zoo fetch lists all)")


def drive_page(name: str) -> str:
    """Return the address at which a person finds the published weights ``name`` in a browser."""
    return f"https://drive.google.com/file/d/{entry_of(name)['drive_id']}/view"
