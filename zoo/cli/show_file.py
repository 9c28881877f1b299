"""What ``zoo show`` prints of a weights file: all that it says of itself, without building a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.config import Experiment, leaves
from zoo.engine.checkpoint import BEST, CHECKPOINT
from zoo.errors import ConfigError, listed, printable
from zoo.limits import is_number
from zoo.weights import NetworkRecord, StoredWeights, md5_of, read_weights
from zoo.weights.record import WITH_PARAMETER, experiment_in, shown

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
MAX_VERSION_LENGTH, MAX_COUNT = 40, 2**63


def show_file(path: Path, as_json: bool = False) -> int:
    """Print what a checkpoint or weights file holds and says; returns 0.

    Raises WeightsError if it cannot be read, ConfigError for a folder, with the files in it that can be shown.
    """
    if path.is_dir():
        files = [path / name for name in (BEST, CHECKPOINT) if (path / name).is_file()]
        advice = f"show a file in it: {', '.join(f'zoo show {printable(file)}' for file in files)}" if files else ""
        raise ConfigError(f"{printable(path)}: is a folder; {advice or 'give a weights file'}")
    stored = read_weights(path)
    progress, experiment = _progress(stored), None
    if stored.record is not None:
        experiment = experiment_in(stored.content, printable(path))
    parameters = sum(t.numel() for key, t in stored.state_dict.items() if not key.endswith(BUFFERS))
    if as_json:
        content = {
            "file": printable(path),
            "bytes": path.stat().st_size,
            "md5": md5_of(path),
            "network": None if stored.record is None else stored.record.to_json(),
            "parameters": parameters,
            **progress,
            "settings": None if experiment is None else experiment.model_dump(mode="json"),
        }
        print(json.dumps(content, indent=2))
        return 0
    facts = {
        "file": f"{printable(path)}, {path.stat().st_size:,} bytes",
        "md5": md5_of(path),
        **_of_network(stored.record),
        "parameters": f"{parameters:,}",
        **_of_training(progress),
    }
    if experiment is not None:
        facts["settings"] = _settings(experiment)
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
        "classes": _classes(record),
    }
    if record.preprocessing is not None:
        scale, crop = record.preprocessing.scale, record.preprocessing.crop
        facts["images"] = f"{'not resized' if scale == -1 else f'shorter side {scale} px'}, crop {crop} px"
    return facts


def _classes(record: NetworkRecord) -> str:
    if not record.class_names:
        return f"{record.classes}"
    names = listed(record.class_names)
    if (num_named := len(record.class_names)) < record.classes:
        return f"{record.classes} outputs, {num_named} of them named: {names}"
    return f"{record.classes}: {names}"


def _progress(stored: StoredWeights) -> dict[str, Any]:
    """Return what a checkpoint says of its run; entries of another kind than the trainer writes are None."""
    content = stored.content
    position, version = content.get("position"), content.get("torch_version")
    numbers = {
        "epochs_done": content.get("epoch"),
        "steps_done": position.get("step") if isinstance(position, dict) else None,
        "best_top1": content.get("best_prec1"),
    }
    return {
        **{key: value if _is_number(value) else None for key, value in numbers.items()},
        "moving_average": isinstance(content.get("ema"), dict),
        "torch": printable(version[:MAX_VERSION_LENGTH]) if isinstance(version, str) else None,
    }


def _of_training(progress: dict[str, Any]) -> dict[str, str]:
    epochs, steps, best, torch = (progress[key] for key in ("epochs_done", "steps_done", "best_top1", "torch"))
    facts = {
        "epochs done": None if epochs is None else f"{epochs:,}",
        "steps done": None if steps is None else f"{steps:,}",
        "best top-1": None if best is None else f"{best:.2f} %",
        "moving average": "of the weights, which is what is loaded" if progress["moving_average"] else None,
        "torch": torch,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _is_number(value: Any) -> bool:
    return is_number(value, -MAX_COUNT, MAX_COUNT)


def _settings(experiment: Experiment) -> str:
    """Return the settings that are not at their defaults, a line for each."""
    defaults = dict(leaves(Experiment().model_dump(mode="json")))
    own = leaves(experiment.model_dump(mode="json", exclude={"expected"}))
    changed = [f"{key} = {shown(value)}" for key, value in own if value != defaults.get(key)]
    return f"\n{'':<20}".join(changed) or "all at their defaults"
