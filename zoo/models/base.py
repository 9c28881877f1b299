"""What all networks have in common: stages, a classifier, and the list of features for other heads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.checkpointing import checkpoint
from zoo.layers.ends import GlobalAvgPool2d, build_classifier
from zoo.layers.init import init_weights
from zoo.limits import MAX_CLASSES, is_whole
from zoo.ops.context import is_fx_proxy
from zoo.remat.lean import lean

BlockDilation = int | Sequence[int]
BEFORE_POOL = "stem"  # the name, in out_indices, of the map that the stem's pool reads


def check_classes(classes: Any) -> None:
    """Raise ConfigError unless ``classes`` is a whole number from 0 to `MAX_CLASSES`."""
    if not is_whole(classes, 0, MAX_CLASSES):
        raise ConfigError(f"num_classes must be an integer from 0 to {MAX_CLASSES:,}, got {classes!r}")


def dilation_per_block(dilation: int | Sequence[BlockDilation], structure: Sequence[int]) -> Sequence[BlockDilation]:
    """Return one entry per module (1, or numbers for its blocks); raise ConfigError for another shape."""
    entries = [1] * 4 if type(dilation) is int and dilation == 1 else dilation
    if (
        isinstance(entries, Sequence)
        and len(entries) == 4
        and all(_fits(entry, blocks) for entry, blocks in zip(entries, structure, strict=True))
    ):
        return entries
    raise ConfigError(
        "dilation must be 1 or four entries (mod2 to mod5), each a positive integer or one per block "
        f"({', '.join(map(str, structure))} blocks), got {dilation!r}"
    )


def _fits(entry: BlockDilation, blocks: int) -> bool:
    per_block = [entry] * blocks if type(entry) is int else entry
    return (
        isinstance(per_block, Sequence)
        and len(per_block) == blocks
        and all(type(dilation) is int and dilation > 0 for dilation in per_block)
    )


class FeatureInfo:
    """Channels, reduction and module name of each stage output, finest first (the interface of timm)."""

    def __init__(self, stages: Sequence[dict[str, Any]]) -> None:
        self.stages = list(stages)

    def channels(self) -> list[int]:
        """Return the number of channels of each stage."""
        return [stage["num_chs"] for stage in self.stages]

    def reduction(self) -> list[int]:
        """Return, for each stage, the factor by which the image's sides are larger than the map's."""
        return [stage["reduction"] for stage in self.stages]

    def module_name(self) -> list[str]:
        """Return, for each stage, the name of the module whose output it is."""
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
    Convolutions and the classifier have no values at first: `zoo.layers.init_weights` sets them (`zoo.get` calls it).
    All subclasses have these arguments, beside their own:

    Args:
    - `norm`: function channels -> norm with its activation.
    - `classes`: outputs of the classifier; with 0 forward returns what its linear layer would read, (N, num_features).
    - `features_only`: leave the classifier out; forward returns the list of the stages' outputs.
    """

    pretrained_cfg: dict[str, Any]
    built_as: Any = None  # the `zoo.spec.NetworkSpec` that it was built from, None if that is unknown
    classifier_name = "classifier"  # the module that makes logits of features
    recomputed: tuple[str, ...] = ()  # modules of the stages of which backward keeps the input, and runs them again
    bn_out: nn.Module
    classifier: nn.Sequential
    global_pool: nn.Module  # of a network without classifier

    def __init__(self, features_only: bool = False) -> None:
        super().__init__()
        self.features_only = features_only
        self.in_chans = 3
        self.drop_rate = 0.0
        self._selected: list[int] | None = None  # positions in the list of all features, BEFORE_POOL at -1
        self._stages: list[tuple[str, ...]] = []
        self._feature_info: list[dict[str, Any]] = []

    def _add_stage(self, *modules: str, channels: int, reduction: int) -> None:
        """Run the named modules as the next stage; the output of the last of them has ``channels`` channels."""
        self._stages.append(modules)
        self._feature_info.append({"num_chs": channels, "reduction": reduction, "module": modules[-1]})

    def _add_classifier(self, classes: int) -> None:
        """Add ``classifier``, or ``global_pool`` for 0 classes; nothing with ``features_only``."""
        if self.features_only:
            return
        if classes > 0:
            self.classifier = build_classifier(self.num_features, classes, self.drop_rate)
        else:
            self.global_pool = GlobalAvgPool2d()

    @property
    def feature_info(self) -> FeatureInfo:
        """Channels, reduction and module of each stage, or of those that ``select_features`` chose."""
        if self._selected is None:
            return FeatureInfo(self._feature_info)
        return FeatureInfo([self._feature_info[i] if i >= 0 else self._before_pool_info() for i in self._selected])

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
        """Return the raw output of every stage (before any later norm); none is overwritten afterwards.

        After `select_features` only the selected outputs are returned, and no stage behind the last of them is run.
        """
        selected = range(len(self._stages)) if self._selected is None else self._selected
        outputs = []
        for index, stage in enumerate(self._stages[: selected[-1] + 1]):
            if index == 0 and -1 in selected:
                *layers, pool = self.get_submodule(stage[0]).children()
                for layer in layers:
                    x = layer(x)
                outputs.append(x)
                x = pool(x)
            else:
                x = self._run_stage(stage, x)
            if index in selected:
                outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits (N, classes); without a classifier the pooled features (N, num_features).

        With ``features_only`` it returns the list of the stages' outputs.
        """
        if self.features_only:
            return self.forward_stages(x)
        x = self.forward_features(x)
        return self.classifier(x) if hasattr(self, "classifier") else self.global_pool(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return what `forward` makes of the map of `forward_features`.

        With ``pre_logits`` it returns the input of the classifier's linear layer, (N, num_features).
        """
        if not hasattr(self, "classifier"):
            return self.global_pool(x)
        for layer in list(self.classifier)[: -1 if pre_logits else None]:
            x = layer(x)
        return x

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without a classifier."""
        return len(self.get_classifier().weight) if hasattr(self, self.classifier_name) else 0

    @property
    def default_cfg(self) -> dict[str, Any]:
        """The ``pretrained_cfg``, under its older name in timm."""
        return self.pretrained_cfg

    def get_classifier(self) -> Any:
        """Return the linear layer ``classifier.fc``; `nn.Identity` without a classifier."""
        return self.classifier[-1] if hasattr(self, "classifier") else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Let training hold about half the memory, as `zoo.lean` does; ``enable=False`` undoes it."""
        lean(self, enabled=enable)

    def set_input_channels(self, in_chans: int) -> None:
        """Give the first convolution an uninitialized weight for ``in_chans`` channels of the image."""
        _, conv = self._first_conv()
        conv.in_channels = self.in_chans = in_chans
        conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, in_chans, *conv.kernel_size))

    def input_weight(self) -> str:
        """Return the key of the weight whose second dimension is the number of the image's channels."""
        return f"{self._first_conv()[0]}.weight"

    def _first_conv(self) -> tuple[str, nn.Conv2d]:
        """Return the convolution that reads the image, and its name."""
        name, conv = next((name, layer) for name, layer in self.named_modules() if isinstance(layer, nn.Conv2d))
        if conv.in_channels != self.in_chans:
            raise ConfigError(f"in_chans: {type(self).__name__} reads red, green and blue alone; leave it out")
        return name, conv

    def set_drop_rate(self, drop_rate: float) -> None:
        """Make the classifier drop this share of its linear layer's inputs in training."""
        if not hasattr(self, "classifier") or not isinstance(self.classifier[0], GlobalAvgPool2d):
            what = "a classifier" if not hasattr(self, "classifier") else "a classifier of mean values"
            raise ConfigError(
                f"drop_rate: {type(self).__name__} has not {what} to drop values in front of; leave it out"
            )
        self.drop_rate = drop_rate
        self.classifier = nn.Sequential(
            OrderedDict(avg_pool=self.classifier[0], drop=nn.Dropout(drop_rate), fc=self.get_classifier())
        )

    def select_features(self, out_indices: Sequence[int | str]) -> None:
        """Make forward return only the stages at these positions; -1 is the last, "stem" the map that its pool reads.

        Stages behind the last of them are not run, and their parameters not trained. Raises ConfigError for a position
        that does not exist, and for positions that are not in the order of the stages.
        """
        count = len(self._stages)
        known = f"0 to {count - 1}, -{count} to -1{' and ' + repr(BEFORE_POOL) if self._has_stem_pool() else ''}"
        selected = []
        for index in out_indices:
            if index == BEFORE_POOL and self._has_stem_pool():
                selected.append(-1)
            elif type(index) is int and -count <= index < count:
                selected.append(index % count)
            else:
                raise ConfigError(f"out_indices: {type(self).__name__} has no feature {index!r}; it has {known}")
        if not selected or selected != sorted(set(selected)):
            raise ConfigError(f"out_indices must be one or more different features, finest first; got {out_indices!r}")
        self._selected = selected
        for stage in self._stages[selected[-1] + 1 :]:
            for module in stage:
                self.get_submodule(module).requires_grad_(False)  # DDP waits for the gradients of what is trained

    def _has_stem_pool(self) -> bool:
        stem = list(self.get_submodule(self._stages[0][0]).children())
        return len(self._stages[0]) == 1 and bool(stem) and isinstance(stem[-1], nn.MaxPool2d)

    def _before_pool_info(self) -> dict[str, Any]:
        info, stage = self._feature_info[0], self._stages[0][0]
        module = [name for name, _ in self.get_submodule(stage).named_children()][-2]
        return {**info, "reduction": info["reduction"] // 2, "module": f"{stage}.{module}"}

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a newly initialised one for ``num_classes`` classes; 0 removes it.

        Without a classifier `forward` returns pooled features (N, num_features).
        """
        if self.features_only:
            raise ConfigError("a network built with features_only has no classifier to reset")
        check_classes(num_classes)
        for name in (self.classifier_name, "global_pool"):
            if hasattr(self, name):
                delattr(self, name)
        like = next(self.parameters())
        self._add_classifier(num_classes)
        if num_classes > 0:
            init_weights(getattr(self, self.classifier_name).to(like.device, like.dtype))

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        for name in stage:
            module = getattr(self, name)
            x = checkpoint(module, x) if name in self.recomputed and not is_fx_proxy(x) else module(x)
        return x


def count_network(model: Network) -> dict[str, int]:
    """Return how large a network is. It may be on the meta device.

    ``parameters`` counts the values that training changes, ``parameters_headless`` those outside the classifier, and
    ``norms`` the norm layers with running statistics.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    in_classifier = sum(parameter.numel() for parameter in model.get_classifier().parameters())
    norms = sum(name.endswith("running_mean") for name, _ in model.named_buffers())
    return {"parameters": parameters, "parameters_headless": parameters - in_classifier, "norms": norms}
