"""`zoo reproduce imagenet`: compares the published ImageNet scores with scores that `zoo.score` measures."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.config.published import published
from zoo.data.imagenet import NUM_CLASSES, NUM_VAL_IMAGES
from zoo.engine._process import Process
from zoo.errors import ConfigError, DataError, ZooError
from zoo.files import write_json
from zoo.registry.load_network import LoadedNetwork, load_network
from zoo.reproduce.comparison import Comparison
from zoo.reproduce.inplace_abn_scores import compare_imagenet_scores
from zoo.run import scoring
from zoo.run.environment import utc_now
from zoo.tables import markdown_table, number_text

logger = logging.getLogger(__name__)

SCORES_FILE = "imagenet.json"
ScoreRow = dict[str, Any]  # network, protocol, command, date, and the fields that `zoo validate --json` writes


def reproduce_imagenet(
    data: Path | None,
    models: Sequence[str],
    protocols: Sequence[str],
    process: Process,
    *,
    out: Path,
    command_line: str,
    limit: int | None = None,
    **options: Any,
) -> tuple[list[Comparison], dict[str, str]]:
    """Score the chosen networks; return the comparisons with their published scores on every rank.

    The second result maps each network that could not be loaded to the reason: weights that are not available, or a
    damaged file in the cache. Adds each score to imagenet.json in ``out``, and does not repeat scores of all images
    that are already there.

    Args:
    - `data`: ImageNet's validation set.
    - `models`: names of published networks, or shell-style patterns.
    - `protocols`: names of evaluation protocols.
    - `limit`, `options`: see `zoo.score`.

    Raises ConfigError for an unknown network, and for an imagenet.json in the folder that is not such a report. Raises
    DataError for a data set that is not ImageNet.
    """
    data = check_imagenet(data)
    names = choose_networks(models)
    rows: list[ScoreRow] = process.on_main(lambda: read_scores(out))
    left_out: dict[str, str] = {}
    for name in names:
        known = {row["protocol"] for row in rows if row["network"] == name and row["count"] == NUM_VAL_IMAGES}
        missing = [protocol for protocol in protocols if protocol not in known]
        if not missing:
            continue
        network, fault = _load(name, process)
        if network is None:
            left_out[name] = fault
            continue
        for protocol in missing:
            logger.info("%s, %s", name, protocol)
            result = scoring.score(network, data, protocol, process=process, limit=limit, **options)
            rows = [each for each in rows if (each["network"], each["protocol"]) != (name, protocol)]
            rows.append(
                {
                    "network": name,
                    **scoring.result_json(network, result, process),
                    "protocol": protocol,
                    "date": utc_now(),
                    "command": command_line,
                }
            )
            if process.is_main:
                write_json(out / SCORES_FILE, {"benchmark": "imagenet", "rows": rows})
    keys = {(name, protocol) for name in names for protocol in protocols}
    return [comparison for key, comparison in compare_imagenet_scores(rows) if key in keys], left_out


def choose_networks(patterns: Sequence[str]) -> list[str]:
    """Return the paper's networks that match shell-style patterns. Raises ConfigError for a pattern without match."""
    of_paper = {name for (name, _), _ in compare_imagenet_scores([])}
    known = [name for name in published() if name in of_paper]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            what = f"no published network is called {pattern!r}"
            raise ConfigError(what, "--models", f"the published networks are {', '.join(known)}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _load(name: str, process: Process) -> tuple[LoadedNetwork | None, str]:
    """Load the network. If one rank cannot load it, returns None and the reason on all ranks."""
    network, fault = None, None
    try:
        network = load_network(name)
    except ZooError as error:
        fault = " ".join(str(error).split())
    faults = [each for each in process.broadcast(process.gather(fault)) if each is not None]
    return (None, faults[0]) if faults else (network, "")


def scores_table(comparisons: Sequence[Comparison]) -> str:
    """Return a Markdown table of published and measured scores."""
    rows = [[each.what, each.published.text, number_text(each.measured), str(each.verdict)] for each in comparisons]
    return markdown_table(["score, %", "published", "measured", "verdict"], rows)


def read_scores(folder: Path) -> list[ScoreRow]:
    """Read the rows of imagenet.json in ``folder``; empty without file. Raises ConfigError for a foreign file."""
    path = folder / SCORES_FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["benchmark"] != "imagenet":
            raise ValueError
        rows: list[ScoreRow] = content["rows"]
        for row in rows:
            for key in ("network", "protocol", "top1", "top5", "count", "standard_errors", "environment", "command"):
                row[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the file is not a report of zoo reproduce imagenet", path, "remove it, or give another --out"
        ) from error
    return rows


def check_imagenet(data: Path | None) -> Path:
    """Return the folder. Raises ConfigError for None, DataError without the class folders of ImageNet in val/."""
    remedy = (
        f"give the ImageNet validation set, {NUM_VAL_IMAGES:,} images in {NUM_CLASSES:,} class folders, as "
        "DIR/val/n01440764/ILSVRC2012_val_00000293.JPEG and so on; torchvision.datasets.ImageNet(DIR, 'val') creates "
        "the folders from the archives of https://image-net.org, which need an account"
    )
    if data is None:
        raise ConfigError("no images are given", "--data", remedy)
    try:
        count = sum(path.is_dir() for path in (data / "val").iterdir())
    except OSError:
        count = 0
    if count != NUM_CLASSES:
        raise DataError(f"this folder has {count:,} folders in val/", f"--data {data}", remedy)
    return data
