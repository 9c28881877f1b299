"""The base class of all networks: stages, a classifier, and feature lists for other heads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from zoo.config.network import NetworkSpec, Spec
from zoo.config.section import parse_section
from zoo.errors import ConfigError, join_names
from zoo.layers.checkpointing import checkpoint
from zoo.layers.conv import GlobalAvgPool2d, build_classifier
from zoo.layers.init import init_weights
from zoo.layers.norm import NormFactory
from zoo.ops.context import is_fx_proxy
from zoo.remat._lean import lean

Entry = TypeVar("Entry")
BEFORE_POOL = "stem"  # selects the input of the stem's pool in out_indices
WITH_PREVIOUS = (99999,)  # timm's suffix for parameters that join the previous group
# Patterns of parameter names after the name of the stage, and the suffixes of their groups.
STAGE_PARTS = (
    (r"(\d+)\.norm\.", WITH_PREVIOUS),  # an invertible norm joins the previous convolution
    (r"(\d+)\.(\d+)\.[a-z]", None),  # a layer of a level, which is a link of a chain
    (r"(?:block|chain\.|convs[13]\.)?(\d+)\.[a-z]\w*\.", None),  # a block, dense layer, link or invertible layer
)


def dilation_per_module(dilation: int | Sequence[Entry]) -> Sequence[int | Entry]:
    """Return the dilations of mod2 to mod5. ``dilation`` is this list, or one number for all modules."""
    return [dilation] * 4 if isinstance(dilation, int) else dilation


def check_sides(x: Tensor, multiple: int) -> None:
    """Raise ConfigError unless height and width of the images x are multiples of ``multiple``."""
    if not is_fx_proxy(x) and (x.shape[2] % multiple or x.shape[3] % multiple):
        raise ConfigError(
            f"images of {x.shape[2]} x {x.shape[3]} pixels: this network needs multiples of {multiple}",
            remedy="resize, crop or pad images (input.crop_train, input.crop_val)",
        )


class FeatureInfo(list[dict[str, Any]]):
    """Channels, reduction and module name of each stage's output, finest first (timm's interface)."""

    def channels(self) -> list[int]:
        """Return the number of channels of each stage."""
        return [stage["num_chs"] for stage in self]

    def reduction(self) -> list[int]:
        """Return the stride of each stage's output relative to the image."""
        return [stage["reduction"] for stage in self]

    def module_name(self) -> list[str]:
        """Return the name of the module that computes each stage's output."""
        return [stage["module"] for stage in self]

    def get_dicts(self) -> list[dict[str, Any]]:
        """Return copies of the entries, one dict (num_chs, reduction, module) per stage."""
        return [dict(stage) for stage in self]


class Network(nn.Module):
    """Base class of all networks: stages in order, an optional last norm ``bn_out``, and ``classifier``.

    A subclass registers its modules in the order of the published state dict and calls `_add_stage` for each stage. It
    may rename ``bn_out``, ``classifier`` and the linear layer ``fc`` to the names in that state dict. Convolutions and
    the classifier are uninitialized until `zoo.layers.init_weights` is called; `zoo.get` calls it. All subclasses have
    these arguments in addition to their own:

    Args:
    - `norm`: function channels -> norm with its activation.
    - `num_classes`: number of outputs of the classifier; with 0 forward returns pooled features (N, num_features).
    - `features_only`: omit the classifier; forward returns the list of the stages' outputs.
    """

    pretrained_cfg: dict[str, Any]
    built_as: Any = None  # the network's `zoo.config.network.Spec`; None if unknown
    classifier_name = "classifier"  # the module that computes logits from features; its keys in weights files
    linear_name = "classifier.fc"  # its layer whose outputs are the logits
    norm_name = "bn_out"  # the norm after the last stage, if there is one
    poolings: tuple[str, ...] = ("avg", "")  # poolings that the classifier supports, by timm's names; "" for none
    recomputed: tuple[str, ...] = ()  # checkpointed modules of stages: only their inputs are saved
    bn_out: nn.Module
    classifier: nn.Sequential
    global_pool: nn.Module  # exists only without classifier

    def __init__(self, features_only: bool = False) -> None:
        super().__init__()
        self.features_only = features_only
        self.in_chans = 3
        self.drop_rate = 0.0
        self._selected: list[int] | None = None  # indices into the list of all features; BEFORE_POOL is -1
        self._stages: list[tuple[str, ...]] = []
        self._feature_info: list[dict[str, Any]] = []

    def _add_stage(self, *modules: str, channels: int, reduction: int) -> None:
        """Add modules as the next stage. Its output has ``channels`` channels and stride ``reduction``."""
        self._stages.append(modules)
        self._feature_info.append({"num_chs": channels, "reduction": reduction, "module": modules[-1]})

    def _add_classifier(self, num_classes: int) -> None:
        """Add ``classifier``, or ``global_pool`` for 0 classes; nothing with ``features_only``."""
        if self.features_only:
            return
        if num_classes > 0:
            classifier = build_classifier(self.num_features, num_classes, self.drop_rate, self._linear_part())
            setattr(self, self.classifier_name, classifier)
        else:
            self.global_pool = GlobalAvgPool2d()

    def _linear_part(self) -> str:
        """Return the name of the linear layer within the classifier."""
        return self.linear_name.rpartition(".")[2]

    @property
    def last_norm(self) -> nn.Module | None:
        """The norm after the last stage; None if there is none."""
        return getattr(self, self.norm_name, None)

    @property
    def feature_info(self) -> FeatureInfo:
        """Channels, reduction and module of each stage, or of those selected by `select_features`."""
        if self._selected is None:
            return FeatureInfo(self._feature_info)
        return FeatureInfo([self._feature_info[i] if i >= 0 else self._before_pool_info() for i in self._selected])

    @property
    def num_features(self) -> int:
        """Number of input channels of the classifier."""
        return self._feature_info[-1]["num_chs"]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map (N, num_features, H, W), normalized and activated."""
        for stage in self._stages:
            x = self._run_stage(stage, x)
        return x if self.last_norm is None else self.last_norm(x)

    def forward_stages(self, x: Tensor) -> list[Tensor]:
        """Return the raw output of each stage, before any later norm. Later layers do not overwrite them.

        After `select_features` only the selected outputs are returned.
        """
        selected = range(len(self._stages)) if self._selected is None else self._selected
        return self._run_stages(x, selected, max(selected[-1], 0))[1]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int | str] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the last feature map (`forward_features`) and a list of the stages' outputs, as in timm.

        Args:
        - `indices`: the stages: all (None), the last n (an int), or those at these indices, as in `select_features`.
          They are returned in the order of the network.
        - `norm`: also apply the last norm to the output of the last stage in the list.
        - `stop_early`: do not run stages after the last selected stage. The feature map is then its output.
        - `output_fmt`: only "NCHW".
        - `intermediates_only`: return only the list.

        Raises ConfigError for an index out of range and for another format.
        """
        if output_fmt != "NCHW":
            raise ConfigError(f"output_fmt: {type(self).__name__} has feature maps 'NCHW', not {output_fmt!r}")
        count = len(self._stages)
        if indices is None or isinstance(indices, int):
            number = count if indices is None else indices
            if not 0 < number <= count:
                raise ConfigError(f"indices = {number}: {type(self).__name__} has {count} stages")
            indices = range(count - number, count)
        selected = sorted({self._stage_index(index, "indices") for index in indices})
        if not selected:
            raise ConfigError("indices: none selected; give None for all stages")
        last = max(selected[-1], 0) if stop_early else count - 1
        x, outputs = self._run_stages(x, selected, last)
        if last == count - 1 and self.last_norm is not None:
            x = self.last_norm(x)
            if norm and last in selected:
                outputs[-1] = x
        return outputs if intermediates_only else (x, outputs)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits (N, classes), or without classifier the pooled features (N, num_features).

        With ``features_only``, return the list of the stages' outputs.
        """
        if self.features_only:
            return self.forward_stages(x)
        return self.forward_head(self.forward_features(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits for the output of `forward_features`.

        With ``pre_logits``, return the input of the classifier's linear layer, (N, num_features).
        """
        if not hasattr(self, self.classifier_name):
            return self.global_pool(x)
        classifier = getattr(self, self.classifier_name)
        for layer in list(classifier)[:-1] if pre_logits else (classifier,):
            x = layer(x)
        return x

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without classifier."""
        return len(getattr(self.get_classifier(), "weight", ()))

    def get_classifier(self) -> Any:
        """Return the layer ``linear_name``, or `nn.Identity` without classifier."""
        try:
            return self.get_submodule(self.linear_name)
        except AttributeError:
            return nn.Identity()

    @classmethod
    def build(cls, norm: NormFactory | None, num_classes: int, **arguments: Any) -> Network:
        """Build a network of this family. ``arguments`` are structure and options of an architecture."""
        family: Any = cls  # untyped, since each family has its own arguments
        network: Network = family(norm, num_classes, **arguments)
        return network

    @classmethod
    def rename_keys(cls, state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rename the keys of a state dict from any file of the family's authors to the keys of this class."""
        return state_dict

    def initialize(self, spec: Spec) -> None:
        """Initialize all parameters as ``spec`` specifies, or as the authors do if the family fixes its layers."""
        assert isinstance(spec, NetworkSpec), "a family with fixed layers initializes them itself"
        gain, slope = spec.weight_gain_multiplier, spec.activation_param
        init_weights(self, spec.weight_init, gain, spec.activation, slope)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Apply `zoo.lean`, which about halves the activation memory of the network; ``enable=False`` removes it."""
        lean(self, enabled=enable)

    def set_input_channels(self, in_chans: int) -> None:
        """Replace the first convolution's weight by an uninitialized one for ``in_chans`` image channels."""
        key = self.input_weight()
        if key is None:
            raise ConfigError(f"in_chans: {type(self).__name__} supports only RGB images; omit the argument")
        conv: Any = self.get_submodule(key.removesuffix(".weight"))
        conv.in_channels = self.in_chans = in_chans
        conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, in_chans, *conv.kernel_size))

    def input_weight(self) -> str | None:
        """Return the state-dict key of the first convolution's weight; None if it does not read the image."""
        name, conv = next((name, layer) for name, layer in self.named_modules() if isinstance(layer, nn.Conv2d))
        return f"{name}.weight" if conv.in_channels == self.in_chans else None

    def set_drop_rate(self, drop_rate: float) -> None:
        """Add dropout with this rate before the classifier's linear layer."""
        head = getattr(self, self.classifier_name, None)
        if head is None or not isinstance(head[0], GlobalAvgPool2d):
            missing = "classifier" if head is None else "average pooling before its classifier"
            raise ConfigError(f"drop_rate: {type(self).__name__} has no {missing}; omit the argument")
        self.drop_rate = drop_rate
        layers = {"avg_pool": head[0], "drop": nn.Dropout(drop_rate), self._linear_part(): self.get_classifier()}
        setattr(self, self.classifier_name, nn.Sequential(OrderedDict(layers)))

    def set_drop_path_rate(self, drop_path_rate: float) -> None:
        """Set the stochastic depth of the residual blocks: from 0 in the first to ``drop_path_rate`` in the last."""
        blocks: list[Any] = [module for module in self.modules() if hasattr(module, "drop_path")]
        for index, block in enumerate(blocks):
            block.drop_path = drop_path_rate * index / max(1, len(blocks) - 1)

    def select_features(self, out_indices: Sequence[int | str]) -> None:
        """Make forward return only the stages at these indices; -1 is the last, "stem" the input of the stem's pool.

        Parameters on which no selected output depends are frozen. Raises ConfigError for an index out of range, and for
        indices that are not increasing.
        """
        selected = [self._stage_index(index, "out_indices") for index in out_indices]
        if not selected or selected != sorted(set(selected)):
            raise ConfigError(f"out_indices must be one or more different features, finest first; got {out_indices!r}")
        self._selected = selected
        for unused in self._unused_for(selected):
            unused.requires_grad_(False)  # otherwise DDP would wait for their gradients

    def _unused_for(self, selected: Sequence[int]) -> Iterable[nn.Module | nn.Parameter]:
        """Return the modules and parameters that no selected output depends on."""
        later = self._stages[max(selected[-1], 0) + 1 :]
        return [self.get_submodule(module) for stage in later for module in stage]

    def _stage_index(self, index: int | str, argument: str) -> int:
        """Convert the index of a stage to a non-negative one, or "stem" to -1. Raises ConfigError if out of range."""
        count = len(self._stages)
        if index == BEFORE_POOL and self._has_stem_pool():
            return -1
        if type(index) is int and -count <= index < count:
            return index % count
        known = f"0 to {count - 1}, -{count} to -1{' and ' + repr(BEFORE_POOL) if self._has_stem_pool() else ''}"
        raise ConfigError(f"{argument}: {type(self).__name__} has no feature {index!r}; it has {known}")

    def _has_stem_pool(self) -> bool:
        stem = list(self.get_submodule(self._stages[0][0]).children())
        return len(self._stages[0]) == 1 and bool(stem) and isinstance(stem[-1], nn.MaxPool2d)

    def _before_pool_info(self) -> dict[str, Any]:
        info, stage = self._feature_info[0], self._stages[0][0]
        module = [name for name, _ in self.get_submodule(stage).named_children()][-2]
        return {**info, "reduction": info["reduction"] // 2, "module": f"{stage}.{module}"}

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a newly initialized one for ``num_classes`` classes; 0 removes it.

        Without classifier, `forward` returns pooled features (N, num_features). With ``global_pool`` "" it returns the
        last feature map, like `forward_features`, also after further calls without ``global_pool``. Raises ConfigError
        for a pooling that the network does not have, and for a classifier of unpooled features.
        """
        if self.features_only:
            raise ConfigError("a network built with features_only has no classifier to reset")
        parse_section(NetworkSpec, {"num_classes": num_classes}, "reset_classifier")
        if global_pool not in (None, *self.poolings) or (global_pool == "" and num_classes > 0):
            known = join_names(map(repr, self.poolings)) if self.poolings else "no choice of pooling"
            raise ConfigError(
                f"global_pool = {global_pool!r} with {num_classes} classes: {type(self).__name__} has {known}; "
                "'' needs 0 classes"
            )
        is_unpooled = isinstance(getattr(self, "global_pool", None), nn.Identity)
        for name in (self.classifier_name, "global_pool"):
            if hasattr(self, name):
                delattr(self, name)
        like = next(self.parameters())
        self._add_classifier(num_classes)
        if num_classes == 0 and (global_pool == "" or (global_pool is None and is_unpooled)):
            self.global_pool = nn.Identity()
        if num_classes > 0:
            classifier = getattr(self, self.classifier_name, None) or self.get_classifier()
            init_weights(classifier.to(like.device, like.dtype))

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int] | None]]]:
        """Return patterns for the parameter names of each layer, from stem to head, in timm's format.

        A layer is a stage with ``coarse``, otherwise a block. ``bn_out`` belongs to the last layer. The classifier
        matches no pattern and forms the last group.
        """
        groups = {}
        for stage in self._stages:
            parts = [] if coarse else [(rf"^{name}\.{part}", suffix) for name in stage for part, suffix in STAGE_PARTS]
            groups[stage[-1]] = [*parts, (rf"^(?:{'|'.join(stage)})\.", None)]
        groups[self._stages[-1][-1]].append((r"^bn_out\.", WITH_PREVIOUS))
        return groups

    def _run_stages(self, x: Tensor, selected: Sequence[int], last: int) -> tuple[Tensor, list[Tensor]]:
        """Return the output of the stage ``last`` and the ``selected`` outputs; -1 is the input of the stem's pool."""
        outputs = []
        for index, stage in enumerate(self._stages[: last + 1]):
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
        return x, outputs

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        for name in stage:
            module = getattr(self, name)
            x = checkpoint(module, x) if name in self.recomputed and not is_fx_proxy(x) else module(x)
        return x
