"""Networks on the Hugging Face Hub, by timm's names ``hf-hub:OWNER/NAME`` and ``hf-hub:OWNER/NAME@REVISION``.

A repository has weights in model.safetensors, and a network in config.json: ours in "network", timm's in "architecture"
and "model_args". No other file is read, and nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.config.architectures import HUB_PREFIX
from zoo.config.record import NetworkRecord
from zoo.config.section import check_extent
from zoo.errors import ConfigError, WeightsError, escape, shorten_repr, truncate
from zoo.files import is_offline
from zoo.models.external import read_timm_preprocessing
from zoo.weights._description import parse_network

logger = logging.getLogger("zoo")

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_CONFIG_BYTES = 2**24
PART = r"\w(?:[\w.-]*\w)?"
NAME = re.compile(rf"{HUB_PREFIX}(?P<repository>{PART}/{PART})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
TIMM_NAME = re.compile(r"[\w.]+", re.ASCII)  # no prefix such as hf-hub:, or timm would read another repository


def is_repository(name: str) -> bool:
    """Return whether ``name`` has the form OWNER/NAME."""
    match = NAME.fullmatch(f"{HUB_PREFIX}{name}")
    return match is not None and match["revision"] is None


def check_hub_installed(where: object) -> None:
    """Raise ConfigError if the package huggingface_hub is not installed. ``where`` names what needs it."""
    if find_spec("huggingface_hub") is None:
        what = "the Hugging Face Hub needs the package huggingface_hub, which is not installed"
        raise ConfigError(what, where, "pip install huggingface_hub safetensors")


def fetch_from_hub(name: str) -> tuple[Path, NetworkRecord]:
    """Download a repository from the Hub; return its weights file and the record of its network.

    Both files come from the same commit and go into the cache of huggingface_hub. Uses the cached files if the Hub
    cannot be reached, or if $HF_HUB_OFFLINE or $ZOO_OFFLINE is 1.

    Raises ConfigError for a malformed name, and WeightsError for files that are unavailable or do not describe a
    network.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{escape(name)!r} is not {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME@REVISION")
    check_hub_installed(name)
    config = _download(name, match["repository"], CONFIG, match["revision"])
    record = parse_config(_read_json(config, name), f"{name}: {CONFIG}")
    commit = config.parent.name  # the cache has a folder per commit
    return _download(name, match["repository"], WEIGHTS, commit), record


def _download(name: str, repository: str, file: str, revision: str | None) -> Path:
    """Download a file of a repository; return its path in the cache. Raises WeightsError if it is unavailable."""
    from huggingface_hub import constants, hf_hub_download

    offline = is_offline() or constants.HF_HUB_OFFLINE
    try:
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=offline, library_name="zoo"))
    except Exception as error:  # the package and its HTTP client raise various errors
        what = f"{file} of {repository} cannot be fetched: {reason_of(error)}"
        remedy = "check the name and the revision; log in with hf auth login if the repository is private or gated"
        raise WeightsError(what, name, remedy) from error


def reason_of(error: Exception) -> str:
    """Return the message of an error of huggingface_hub as one line."""
    return truncate(" ".join(str(error).split()) or type(error).__name__)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in a file from the Hub."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path.name} is not JSON ({truncate(error)})", name, "ask its owner") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path.name} holds a {type(content).__name__}, not an object", name, "ask its owner")
    return content


def parse_config(config: Mapping[str, Any], source: str) -> NetworkRecord:
    """Parse a config.json, ours or timm's, into the record of its network.

    Raises WeightsError, naming ``source`` and the key, for anything else.
    """
    network = config.get("network")
    if isinstance(network, dict):
        return parse_network(network, source)
    name = config.get("architecture")
    if not isinstance(name, str) or not TIMM_NAME.fullmatch(name):
        what = f"architecture = {shorten_repr(name)} is not the name of a network of timm"
        raise WeightsError(what, source, "only networks of zoo and timm are read from the Hub")
    cfg, options = config.get("pretrained_cfg", config), config.get("model_args", {})  # in early files, one dict
    if not isinstance(cfg, dict) or not isinstance(options, dict):
        raise WeightsError("pretrained_cfg and model_args are not both objects", source, "ask its owner")
    check_extent(options, source, WeightsError)
    content = {
        "arch": f"timm:{name}",
        "options": {key: value for key, value in options.items() if key != "num_classes"},  # timm repeats it here
        "num_classes": config.get("num_classes", cfg.get("num_classes", 1000)),
        "class_names": _class_names(config.get("label_names", cfg.get("label_names"))),
    }
    parse_network(content, source)  # before timm reads the file
    images = read_timm_preprocessing(cfg)
    if images is None:
        logger.warning(
            "%s: the preprocessing of timm:%s is not supported (only square color images are); set your own",
            escape(source), name,
        )  # fmt: skip
    return parse_network({**content, "preprocessing": images}, source)


def _class_names(names: Any) -> list[str] | None:
    """Return the escaped names of the outputs; None if they are not given as a list."""
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return [escape(name) for name in names] if is_list else None
