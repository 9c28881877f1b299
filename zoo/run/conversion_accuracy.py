"""Measures the accuracy lost by the conversion from relu to leaky_relu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from zoo.architectures import ARCHITECTURES
from zoo.config import parse_experiment
from zoo.convert.conversion import build_with_weights, compare_outputs, state_dict_like
from zoo.convert.files import Conversion, prepare_images
from zoo.data.folder import OnBadImage
from zoo.data.loader import build_train_loader
from zoo.data.location import DataPath
from zoo.engine.reestimate import reestimate_statistics
from zoo.errors import ConfigError, DataError, escape
from zoo.run.scoring import LoadedNetwork, score


def measure_accuracy(
    conversion: Conversion,
    data: DataPath,
    *,
    reestimate: int = 0,
    scale: int | None = None,
    crop: int | None = None,
    batch_size: int = 64,
    workers: int = 0,
    on_bad_image: OnBadImage = "stop",
    log_every: int = 10,
    compare_with_source: bool = True,
) -> tuple[Conversion, dict[str, Any]]:
    """Return a conversion from relu to leaky_relu, and the accuracies before and after it on DATA/val.

    With ``reestimate`` the running statistics of the result are recomputed on that many batches of DATA/train. Raises
    ConfigError for weights without a classifier, and DataError for images that cannot be used.
    """
    source = conversion.source_spec
    path = escape(conversion.source.path)
    if ARCHITECTURES[source.arch].task == "segmentation":
        raise ConfigError(
            f"--data measures the accuracy of classification, and {source.arch} is a segmentation network",
            path,
            "leave out --data, and score both files with zoo validate --task segmentation",
        )
    if source.num_classes == 0:
        raise ConfigError("the weights have no classifier whose accuracy can be measured", path, "leave out --data")
    images = prepare_images(source, scale, crop)
    settings = {
        "network": source.for_experiment().model_dump(),
        "input": {**images.model_dump(), "crop_train": images.crop_val},
        "optimizer": {"batch_size": batch_size},
    }
    experiment = parse_experiment(settings, "the options of zoo convert")
    loading: dict[str, Any] = {"workers": workers, "on_bad_image": on_bad_image}

    def accuracy(model: nn.Module) -> dict[str, Any]:
        network = LoadedNetwork(path, model.float(), experiment, class_names=source.class_names)
        result = score(network, data, batch_size=batch_size, log_every=log_every, **loading)
        return {**result.scores(), "standard_errors": result.standard_errors(), "count": result.count}

    assert conversion.spec is not None
    before = build_with_weights(conversion.source.state_dict, source)
    after = build_with_weights(conversion.state_dict, conversion.spec)
    measured: dict[str, Any] = {"before": accuracy(before), "converted": accuracy(after)}
    if not reestimate:
        return conversion, measured
    num_batches = reestimate_statistics(after, build_train_loader(data, experiment, **loading), reestimate)
    if num_batches == 0:
        what = f"there are fewer than {batch_size} images, which make a batch"
        raise DataError(what, f"{data}/train", "give more, or a smaller --batch-size")
    measured["reestimated"] = accuracy(after)
    state_dict = state_dict_like(after.cpu(), conversion.state_dict)
    compared = compare_outputs(before.cpu().double(), after.cpu().double()) if compare_with_source else {}
    reason = f"{conversion.report.reason}; running statistics re-estimated on {num_batches} batches"
    report = replace(conversion.report, reason=reason, **compared)
    return replace(conversion, state_dict=state_dict, report=report), measured
