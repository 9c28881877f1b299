"""What all networks have in common: stages, a classifier, and the list of features for other heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.head import build_classifier
from zoo.layers.init import init_weights


def check_classes(classes: Any) -> None:
    """Raise ConfigError unless ``classes`` is a whole number >= 0."""
    if type(classes) is not int or classes < 0:
        raise ConfigError(f"classes must be an integer >= 0, got {classes!r}")


def dilation_per_module(dilation: Any, any_number: bool) -> list[int]:
    """Return four dilations, of mod2 to mod5: ``dilation`` itself, or four times the number that it is.

    ``any_number``: numbers other than 1 may stand for all modules.  Raises ConfigError for anything else.
    """

    def is_dilation(value: Any) -> bool:
        return type(value) is int and value > 0

    if is_dilation(dilation) and (any_number or dilation == 1):
        return [dilation] * 4
    if isinstance(dilation, Sequence) and len(dilation) == 4 and all(map(is_dilation, dilation)):
        return list(dilation)
    number = "a positive integer" if any_number else "1"
    raise ConfigError(f"dilation must be {number} or four positive integers (mod2 to mod5), got {dilation!r}")


class FeatureInfo:
    """Channels, reduction and module name of each stage output, finest first (the interface of timm)."""

    def __init__(self, stages: Sequence[dict[str, Any]]) -> None:
        self.stages = list(stages)

    def channels(self) -> list[int]:
        """Return the number of channels of each stage."""
        return [stage["num_chs"] for stage in self.stages]

    def reduction(self) -> list[int]:
        """Return, for each stage, the factor by which the picture's sides are larger than the map's."""
        return [stage["reduction"] for stage in self.stages]

    def module_name(self) -> list[str]:
        """Return the name of the module that puts out each stage."""
        return [stage["module"] for stage in self.stages]

    def get_dicts(self) -> list[dict[str, Any]]:
        """Return a copy of the entries, one dict (num_chs, reduction, module) per stage."""
        return [dict(stage) for stage in self.stages]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.stages[index]

    def __len__(self) -> int:
        return len(self.stages)


class Network(nn.Module):
    """Base of all networks: stages in order, an optional last norm ``bn_out``, and ``classifier``.

    A subclass registers its modules in the order of the published state dict and calls `_add_stage` for each stage.
    Convolutions and the classifier are born uninitialised: call `zoo.layers.init_weights` (`zoo.get` does).
    """

    pretrained_cfg: dict[str, Any]
    built_as: Any = None  # the `zoo.weights.NetworkRecord` that it was built from, None where that is not known
    bn_out: nn.Module
    classifier: nn.Sequential

    def __init__(self, features_only: bool = False) -> None:
        super().__init__()
        self.features_only = features_only
        self._stages: list[tuple[str, ...]] = []
        self._feature_info: list[dict[str, Any]] = []

    def _add_stage(self, *modules: str, channels: int, reduction: int) -> None:
        """Run the named modules as the next stage; the last of them puts out ``channels`` maps."""
        self._stages.append(modules)
        self._feature_info.append({"num_chs": channels, "reduction": reduction, "module": modules[-1]})

    def _add_classifier(self, classes: int) -> None:
        if classes > 0 and not self.features_only:
            self.classifier = build_classifier(self.num_features, classes)

    @property
    def feature_info(self) -> FeatureInfo:
        """Channels, reduction and module of each stage."""
        return FeatureInfo(self._feature_info)

    @property
    def num_features(self) -> int:
        """Number of channels that the classifier reads."""
        return self._feature_info[-1]["num_chs"]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map (N, num_features, H, W), normalised and activated."""
        for stage in self._stages:
            x = self._run_stage(stage, x)
        return self.bn_out(x) if hasattr(self, "bn_out") else x

    def forward_stages(self, x: Tensor) -> list[Tensor]:
        """Return the raw output of every stage (before any later norm); none is overwritten afterwards."""
        outputs = []
        for stage in self._stages:
            x = self._run_stage(stage, x)
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits (N, classes); the last map without a classifier; the stages with ``features_only``."""
        if self.features_only:
            return self.forward_stages(x)
        x = self.forward_features(x)
        return self.classifier(x) if hasattr(self, "classifier") else x

    def reset_classifier(self, classes: int) -> None:
        """Replace the classifier by a newly initialised one for ``classes`` classes; 0 removes it."""
        if self.features_only:
            raise ConfigError("a network built with features_only has no classifier to reset")
        check_classes(classes)
        if hasattr(self, "classifier"):
            del self.classifier
        if classes > 0:
            like = next(self.parameters())
            self._add_classifier(classes)
            init_weights(self.classifier.to(like.device, like.dtype))

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        for name in stage:
            x = getattr(self, name)(x)
        return x
