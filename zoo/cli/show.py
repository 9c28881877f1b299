"""``zoo show``: print the facts of a network, an experiment, a checkpoint or a weights file."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.architectures import EXTERNAL_MEMORY, is_external
from zoo.cli.list_networks import describe
from zoo.cli.options import Command, argument
from zoo.cli.settings import print_schema, print_settings
from zoo.errors import ConfigError, escape, join_names, shorten_repr, truncate

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.engine.checkpoint import CheckpointProgress
    from zoo.spec import NetworkSpec
    from zoo.weights.published import Published

WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Print the facts of a network or weights file, or the settings of an experiment."""

    name: str | None = argument("NAME", default=None)
    """Architecture, published network, PACKAGE:NAME of another package, bundled experiment (with .json if a network
    has the same name), experiment file, checkpoint, weights file, or hf-hub:OWNER/NAME."""
    schema: bool = False
    """Print all keys of experiment files: type, default, bounds and meaning."""
    json: bool = False
    """Print JSON; with --schema, a JSON schema."""

    def run(self) -> int:
        """Print the facts of NAME, or with ``--schema`` all keys of experiment files."""
        if self.schema:
            if self.name is not None:
                what = "--schema describes all experiment files"
                raise ConfigError(what, "command line", f"remove {escape(self.name)!r}")
            if self.json:
                print_schema()
            else:
                print_settings()
        elif self.name is None:
            remedy = "give the name of a network or an experiment, or --schema"
            raise ConfigError("nothing to show", "command line", remedy)
        elif self.name.endswith(".json") or _is_bundled_only(self.name):
            _show_experiment(self.name, self.json)
        elif _is_stored(self.name):
            _show_file(self.name, self.json)
        elif is_external(self.name):
            _show_external(self.name, self.json)
        else:
            _show_network(self.name, self.json)
        return 0


def _is_bundled_only(name: str) -> bool:
    """Return whether a bundled experiment has this name, and no network or file has it."""
    from zoo.config import experiment_names
    from zoo.registry import list_models

    return name in experiment_names() and name not in list_models() and not os.path.exists(name)


def _is_stored(name: str) -> bool:
    """Return whether ``name`` is a file or a repository, or another path that is not the name of a network."""
    from zoo.registry import list_models
    from zoo.weights.stored import is_stored

    return is_stored(name) or (os.path.lexists(name) and name not in list_models())


def _show_experiment(name: str, as_json: bool) -> None:
    """Print all settings as an experiment file, followed by those that differ from the defaults."""
    from zoo.config import differences, load_experiment

    experiment = load_experiment(name)
    print(json.dumps(experiment.model_dump(mode="json"), indent=2))
    if not as_json:
        print("\ndifferent from the defaults:")
        for path, value in differences(experiment).items():
            print(f"  {path:<34}{json.dumps(value)}")
        for doubt in experiment.doubts():
            print(f"\nwarning: {doubt}")
        _warn_of_unknown_network(experiment)


def _show_network(name: str, as_json: bool) -> None:
    """Print the structure of a network, its training settings and scores, and the source of its weights."""
    import torch

    from zoo.architectures import ARCHITECTURES, OPTIONS
    from zoo.registry import get, published
    from zoo.tables import markdown_table

    with torch.device("meta"):
        model = get(name)
    entry, about = describe(name, model), published().get(name)
    arch = ARCHITECTURES[entry["arch"]]
    options = {option: OPTIONS[option].meaning for option in arch.options}
    options["memory"] += f": {', '.join(arch.memory)}"
    stages = model.feature_info.get_dicts()
    if as_json:
        publication = {} if about is None else {"published": _publication_json(about)}
        print(json.dumps({**entry, "options": options, "stages": stages, **publication}, indent=2))
        return
    facts = {
        "architecture": entry["arch"],
        "parameters": f"{entry['parameters']:,}",
        "without classifier": f"{entry['parameters_headless']:,}",
        "norm layers": entry["norms"],
        "state dict": f"{len(model.state_dict())} entries",
    }
    _print_facts(facts if about is None else {**facts, **_publication(about)})
    print("\noptions of zoo.get:")
    for option, meaning in options.items():
        print(textwrap.fill(meaning, WIDTH, initial_indent=f"  {option:<18}", subsequent_indent=" " * 20))
    rows = [[stage["module"], stage["num_chs"], stage["reduction"]] for stage in stages]
    print(f"\n{markdown_table(['stage', 'channels', 'reduction'], rows)}")
    if entry["scores"]:
        titles = {"top1": "top-1 %", "top5": "top-5 %", "miou": "mIoU %"}
        measures = list(next(iter(entry["scores"].values())))
        scores = [[name, *(score[measure] for measure in measures)] for name, score in entry["scores"].items()]
        print(f"\n{markdown_table(['protocol', *(titles[measure] for measure in measures)], scores)}")


def _show_external(name: str, as_json: bool) -> None:
    """Print the size and options of a network of another package, which is built on the meta device."""
    from zoo.models.build import build_on_meta
    from zoo.spec import NetworkSpec

    model = build_on_meta(NetworkSpec(arch=name))
    parameters, entries = sum(parameter.numel() for parameter in model.parameters()), len(model.state_dict())
    if as_json:
        print(json.dumps({"arch": name, "parameters": parameters, "memory": EXTERNAL_MEMORY}, indent=2))
        return
    facts = {
        "architecture": name,
        "parameters": f"{parameters:,}",
        "state dict": f"{entries} entries",
        "network.memory": join_names(EXTERNAL_MEMORY),
        "network.options": f"arguments of {name.partition(':')[0]}; pretrained loads its weights",
    }
    _print_facts(facts)


def _warn_of_unknown_network(experiment: Experiment) -> None:
    """Print a warning if the package of an external network is not installed or does not have the network."""
    from zoo.models.external import list_networks

    if is_external(experiment.network.arch):
        try:
            list_networks(experiment.network.arch)
        except ConfigError as error:
            print(f"\nwarning: {escape(error)}")


def _publication(published: Published) -> dict[str, Any]:
    """Return the settings and the source of published weights."""
    spec = published.experiment.network
    options = {"options": shorten_repr(spec.options)} if spec.options else {}
    return {
        "norm": spec.norm,
        "activation": f"{spec.activation} ({spec.activation_param})",
        **options,
        "trained with": f"batches of {published.experiment.optimizer.batch_size}",
        "weights md5": published.md5,
        "weights at": published.page,
        "license of weights": published.weights.licence,
        "source": published.source,
    }


def _publication_json(published: Published) -> dict[str, Any]:
    """Return all facts of published weights as JSON values."""
    return {
        "name": published.name,
        "network": published.experiment.network.model_dump(mode="json"),
        "batch": published.experiment.optimizer.batch_size,
        "md5": published.md5,
        **published.weights.model_dump(),
        "source": published.source,
        "scores": published.scores,
    }


def _show_file(name: str, as_json: bool) -> None:
    """Print the content and metadata of a checkpoint, a weights file or a repository, without building a network.

    Raises WeightsError if it cannot be read, and ConfigError for a folder.
    """
    from zoo.config import Experiment
    from zoo.engine.checkpoint import BEST, CHECKPOINT, parse_progress
    from zoo.tasks import task_of
    from zoo.weights import digests_of, read_weights
    from zoo.weights.stored_spec import parse_stored_experiment

    if (path := Path(name)).is_dir():
        files = [path / name for name in (BEST, CHECKPOINT) if (path / name).is_file()]
        remedy = f"show a file in it: {', '.join(f'zoo show {escape(file)}' for file in files)}" if files else ""
        raise ConfigError("this is a folder", path, remedy or "give a weights file")
    stored = read_weights(name)
    path = stored.path
    progress = parse_progress(stored.content)
    experiment = None if stored.spec is None else parse_stored_experiment(stored.content, escape(path))
    # Published ImageNet weights store no experiment; the default one has their labels.
    name, label = next(iter(task_of(experiment or Experiment()).labels.items()))
    if as_json:
        content = {
            "file": escape(path),
            "bytes": path.stat().st_size,
            **digests_of(path),
            "source_md5": stored.source_md5,
            "network": None if stored.spec is None else stored.spec.model_dump(mode="json"),
            "parameters": stored.num_parameters,
            **{f"best_{name}" if key == "best_score" else key: value for key, value in asdict(progress).items()},
            "settings": None if experiment is None else experiment.model_dump(mode="json"),
        }
        print(json.dumps(content, indent=2))
        return
    facts = {
        "file": f"{escape(path)}, {path.stat().st_size:,} bytes",
        **digests_of(path),
        **({} if stored.source_md5 is None else {"md5 of source": truncate(stored.source_md5)}),
        **_facts_of_network(stored.spec),
        "parameters": f"{stored.num_parameters:,}",
        **_facts_of_progress(progress, label),
    }
    _print_facts(facts if experiment is None else {**facts, "settings": _changed_settings(experiment)})
    if experiment is not None:
        _warn_of_unknown_network(experiment)


def _facts_of_network(spec: NetworkSpec | None) -> dict[str, str]:
    from zoo.architectures import ARCHITECTURES
    from zoo.spec import WITH_PARAMETER

    if spec is None:
        return {"network": "not described in the file"}
    facts = {"architecture": spec.arch}
    if not spec.is_external:
        has_parameter = spec.activation in WITH_PARAMETER
        facts |= {
            "norm": spec.norm + (", folded into the convolutions" if spec.folded else ""),
            "activation": f"{spec.activation} ({spec.activation_param:g})" if has_parameter else spec.activation,
        }
    facts |= {
        "memory": spec.memory,
        "options": ", ".join(f"{key}={shorten_repr(value)}" for key, value in spec.options.items()) or "none",
        "classes": _classes(spec),
    }
    known = ARCHITECTURES.get(spec.arch)
    if known is not None and known.task == "segmentation":
        facts["images"] = "whole, a class for each pixel"
    elif spec.preprocessing is not None:
        scale, crop = spec.preprocessing.scale_val, spec.preprocessing.crop_val
        facts["images"] = f"{'not resized' if scale == -1 else f'shorter side {scale} px'}, crop {crop} px"
    return facts


def _classes(spec: NetworkSpec) -> str:
    if not spec.class_names:
        return f"{spec.num_classes}"
    names = join_names(spec.class_names)
    if (num_named := len(spec.class_names)) < spec.num_classes:
        return f"{spec.num_classes} outputs, {num_named} of them named: {names}"
    return f"{spec.num_classes}: {names}"


def _facts_of_progress(progress: CheckpointProgress, label: str) -> dict[str, str]:
    """Return the training progress in a checkpoint; empty for a weights file."""
    facts = {
        "epochs done": None if progress.epochs_done is None else f"{progress.epochs_done:,}",
        "steps done": None if progress.steps_done is None else f"{progress.steps_done:,}",
        f"best {label}": None if progress.best_score is None else f"{progress.best_score:.2f} %",
        "moving average": "of the weights; it is loaded" if progress.moving_average else None,
        "torch": progress.torch,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _changed_settings(experiment: Experiment) -> str:
    """Return the settings that are not at their defaults, a line for each."""
    from zoo.config import differences

    settings = differences(experiment.model_copy(update={"expected": None}))
    return f"\n{'':<20}".join(f"{key} = {shorten_repr(value)}" for key, value in settings.items())


def _print_facts(facts: Mapping[str, Any]) -> None:
    for name, fact in facts.items():
        print(f"{name:<20}{fact}")
