"""What ``zoo show`` prints of a weights file: all that it says of itself, without building a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.config import Experiment, leaves, parse_experiment
from zoo.config.options import is_number
from zoo.errors import listed, printable
from zoo.weights import NetworkRecord, StoredWeights, md5_of, read_weights
from zoo.weights.record import WITH_PARAMETER, shown

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
MAX_VERSION_LENGTH, MAX_COUNT = 40, 2**63


def show_file(path: Path) -> int:
    """Print what a checkpoint or weights file holds and says; returns 0. WeightsError if it cannot be read."""
    stored = read_weights(path)
    facts = {
        "file": f"{printable(path)}, {path.stat().st_size:,} bytes",
        "md5": md5_of(path),
        **_of_network(stored.record),
        "parameters": f"{sum(t.numel() for key, t in stored.state_dict.items() if not key.endswith(BUFFERS)):,}",
        **_of_training(stored),
    }
    for name, fact in facts.items():
        print(f"{name:<20}{fact}")
    return 0


def _of_network(record: NetworkRecord | None) -> dict[str, str]:
    if record is None:
        return {"network": "the file does not say which network it belongs to"}
    has_parameter = record.activation in WITH_PARAMETER
    facts = {
        "architecture": record.arch,
        "norm": record.norm + (", folded into the convolutions" if record.folded else ""),
        "activation": f"{record.activation} ({record.activation_param:g})" if has_parameter else record.activation,
        "options": ", ".join(f"{key}={shown(value)}" for key, value in record.options.items()) or "none",
        "classes": f"{record.classes}: {listed(record.class_names)}" if record.class_names else f"{record.classes}",
    }
    if record.preprocessing is not None:
        scale, crop = record.preprocessing.scale, record.preprocessing.crop
        facts["images"] = f"{'not resized' if scale == -1 else f'shorter side {scale} px'}, crop {crop} px"
    return facts


def _of_training(stored: StoredWeights) -> dict[str, str]:
    """Return what a checkpoint says of its run; entries of another kind than the trainer writes are left out."""
    content = stored.content
    position = content.get("position")
    steps = position.get("step") if isinstance(position, dict) else None
    best, version, settings = content.get("best_prec1"), content.get("torch_version"), content.get("config")
    facts = {}
    if _is_number(content.get("epoch")):
        facts["epochs done"] = f"{content['epoch']:,}"
    if _is_number(steps):
        facts["steps done"] = f"{steps:,}"
    if _is_number(best):
        facts["best top-1"] = f"{best:.2f} %"
    if isinstance(content.get("ema"), dict):
        facts["moving average"] = "of the weights, which is what is loaded"
    if isinstance(version, str):
        facts["torch"] = printable(version[:MAX_VERSION_LENGTH])
    if stored.record is not None and isinstance(settings, dict):
        facts["settings"] = _settings(parse_experiment(settings, printable(stored.path)))
    return facts


def _is_number(value: Any) -> bool:
    return is_number(value, -MAX_COUNT, MAX_COUNT)


def _settings(experiment: Experiment) -> str:
    """Return the settings that are not at their defaults, a line for each."""
    defaults = dict(leaves(Experiment().model_dump(mode="json")))
    own = leaves(experiment.model_dump(mode="json", exclude={"expected"}))
    changed = [f"{key} = {shown(value)}" for key, value in own if value != defaults.get(key)]
    return f"\n{'':<20}".join(changed) or "all at their defaults"
