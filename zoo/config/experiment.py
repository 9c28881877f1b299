"""Settings of an experiment: network, optimizer, input, training, and expected scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from zoo.architectures import ARCHITECTURES, LEAN, is_external
from zoo.config.optimizer import Optimizer
from zoo.config.segmentation_section import Segmentation
from zoo.errors import ConfigError
from zoo.limits import MAX_BATCH, MAX_SIDE, MAX_STEPS
from zoo.section import Section
from zoo.spec import STORED_ALONE, NetworkSpec, Preprocessing, Scale, Side

# "center" or "tencrop" and the side of the crop in px, as in center224. Segmentation: the whole image at one scale, or
# the mean of its probabilities and those of its mirror image.
ProtocolName = Annotated[str, StringConstraints(pattern=r"^((center|tencrop)[1-9][0-9]*|whole|whole-flip)$")]
Percent = Annotated[float, Field(ge=0, le=100)]
SideOrNone = Annotated[int, Field(ge=0, le=MAX_SIDE)]
Decoder = Literal["pil", "torchvision", "scaled"]
SMALL_CROP_AREA = 0.25  # of a validation image: a smaller crop is probably a mistake
# Settings that segmentation does not use -> what it uses instead.
UNUSED_IN_SEGMENTATION = {
    "input.scale_train": "training images are scaled by segmentation.scale_range",
    "input.pad_train": "training images smaller than the crop are padded to its size",
    "input.cutout_train": "labels of blanked pixels would be wrong",
    "input.shuffle_shards": "images and label maps are files in folders",
    "input.decoder": "PIL decodes images",
    "input.scale_val": "validation sees whole images, resized to segmentation.longest_side_val",
    "input.crop_val": "validation sees whole images, resized to segmentation.longest_side_val",
    "input.interpolation_val": "validation sees whole images, resized bilinearly",
    "input.crop_mode_val": "validation sees whole images, resized to segmentation.longest_side_val",
    "optimizer.classifier_lr": "all layers have optimizer.learning_rate",
}


class Input(Preprocessing):
    """Sizes of images in px, and their preprocessing."""

    shuffle_shards: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    """Number of consecutive shards whose images are shuffled together, and which are read at a time; null: all."""
    scale_train: Scale = -1
    """Shorter side that training images are resized to before the crop; -1: not resized."""
    crop_train: Side = 224
    """Side of the training crop, the network's input size."""
    pad_train: SideOrNone | None = None
    """Padding in px on each side of a training image, followed by a crop without resizing; null: random resized crops
    to crop_train."""
    pad_mode_train: Literal["zeros", "reflect"] = "zeros"
    """Padding with zeros, or with the reflected image."""
    cutout_train: SideOrNone = 0
    """Side of a square that is blanked in each training image; 0: none."""
    color_jitter_train: bool = False
    """Whether brightness, contrast and saturation of training images are jittered."""
    lighting_train: bool = False
    """Whether training images get AlexNet's PCA color noise."""
    decoder: Decoder | None = None
    """Decoder of images. pil; torchvision: faster, with the same pixels; scaled: decodes only the crop of a training
    image, at reduced size if the crop is at least twice crop_train, and validation images as torchvision does; null:
    torchvision in training, pil in validation."""

    @property
    def decoder_train(self) -> Decoder:
        """Decoder of training images."""
        return self.decoder or "torchvision"

    @property
    def decoder_val(self) -> Decoder:
        """Decoder of validation images; by default PIL, which the published scores were computed with."""
        return "torchvision" if self.decoder == "scaled" else self.decoder or "pil"

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield problems of crops, cutout squares and padding that do not fit.

        Without ``pad_train`` the training crop may be larger than ``scale_train``, because the crop is resized.
        """
        yield from super().conflicts()
        if self.pad_train is None and self.pad_mode_train != "zeros":
            yield ("pad_mode_train", "pad_train"), "has no effect without pad_train; set pad_train, or remove the key"
        if self.pad_train is not None and self.scale_train != -1:
            yield from self._pad_conflicts(self.pad_train)
        if self.cutout_train > self.crop_train:
            yield ("cutout_train", "crop_train"), f"should be at most crop_train, which is {self.crop_train}"

    def _pad_conflicts(self, pad: int) -> Iterator[tuple[tuple[str, ...], str]]:
        side = self.scale_train + 2 * pad
        if self.crop_train > side:
            yield ("crop_train", "scale_train", "pad_train"), f"should be at most {side}, the padded scale_train"
        if self.pad_mode_train == "reflect" and pad >= self.scale_train:
            yield (
                ("pad_train", "scale_train"),
                f"should be less than scale_train, which is {self.scale_train}, for reflection",
            )


class Training(Section):
    """Computation of training steps; the defaults are those of the published runs."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision: dtype of convolutions."""
    channels_last: bool = False
    """Whether images and weights use the channels_last memory format, which is faster on some machines."""
    compile: bool = False
    """Whether to compile the network with torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile. "reduce-overhead" uses CUDA graphs, for small batches that are limited by kernel launches
    (not measured); "max-autotune" tries more kernels and takes longer to compile."""
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """Activation memory budget of torch.compile. 0: recomputes the whole forward pass; 1: optimizes for speed; null:
    torch's default. Random numbers, such as dropout masks, are drawn once at any budget."""
    gradient_compression: Literal["off", "bf16"] = "off"
    """Dtype in which processes exchange gradients; off: that of the gradients. bf16 halves the bytes and keeps 8
    significant bits of each gradient."""
    reconstruction_meter: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps between two logs of the reconstruction error of reversible chains, which takes the memory that the chains
    save; 0: never."""
    gradient_angle_meter: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps between two logs of the angle between the gradients from reconstructed and from stored activations, which
    takes the memory that reversible chains save and the time of two more steps; 0: never."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield problems of compiler settings without torch.compile."""
        if self.compile_mode != "default" and not self.compile:
            yield (
                ("compile_mode", "compile"),
                "has no effect without torch.compile; set training.compile to true, or remove the key",
            )
        if self.activation_memory_budget is not None and not self.compile:
            yield (
                ("activation_memory_budget", "compile"),
                "has no effect without torch.compile; set training.compile to true, or remove the key and choose a "
                "network.memory",
            )


class CheckpointConfig(Section):
    """When checkpoints are written: after each epoch, and every ``every_steps`` steps unless that is 0."""

    every_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps between two checkpoints within an epoch; 0: only after epochs."""


class Score(Section):
    """Accuracy of a classification, or mean intersection over union of a segmentation, percent."""

    top1: Percent | None = None
    """Top-1 accuracy, percent; required in classification."""
    top5: Percent | None = None
    """Top-5 accuracy, percent; null: not published."""
    miou: Percent | None = None
    """Intersection over union, mean over the classes, percent; required in segmentation."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield problems of missing scores and of scores of both tasks."""
        if self.miou is None and self.top1 is None:
            yield ("top1", "miou"), "is missing (in segmentation miou)"
        elif self.miou is not None:
            for key in ("top1", "top5"):
                if getattr(self, key) is not None:
                    yield (key, "miou"), "is a score of classification, and miou of segmentation; remove one"


class PublishedWeights(Section):
    """Published weights file; checksums.md5 has its md5, under the name of the experiment."""

    drive_id: Annotated[str, Field(min_length=1)]
    """Google Drive ID of the file."""
    licence: Annotated[str, Field(min_length=1)]
    """License of the file."""


class Expected(Section):
    """Expected scores of a run by evaluation protocol, and their source."""

    source: Annotated[str, Field(min_length=1)]
    """Source of the scores."""
    scores: Annotated[dict[ProtocolName, Score], Field(min_length=1)]
    """Scores by evaluation protocol: "center" or "tencrop" and the side of the crop, as in center224; in segmentation
    "whole" for whole images at one scale, or "whole-flip" for whole images and their mirror images."""
    weights: PublishedWeights | None = None
    """Published weights with these scores; null: not published."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_md5(cls, content: Any) -> Any:
        """Drop ``weights_md5`` of earlier files and checkpoints; checksums.md5 has it now."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if key != "weights_md5"}

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield problems of protocols with a score of another task."""
        for protocol, score in self.scores.items():
            if (score.miou is not None) != protocol.startswith("whole"):
                needed = "miou" if protocol.startswith("whole") else "top1"
                yield ("scores",), f"{protocol} should have {needed}, the score of its task"


_DEFAULTS: dict[str, Section] = {"input": Input(), "optimizer": Optimizer()}


class Experiment(Section):
    """All settings of a run; omitted sections and keys have their defaults."""

    network: NetworkSpec = NetworkSpec()
    """The network and its initial weights."""
    optimizer: Optimizer = Optimizer()
    """Optimizer, batch size and learning rate."""
    input: Input = Input()
    """Sizes of images in px, and their preprocessing."""
    training: Training = Training()
    """Computation of training steps."""
    segmentation: Segmentation | None = None
    """Label maps and crops of a segmentation; set automatically for deeplab_* networks, null for classification."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random numbers."""
    expected: Expected | None = None
    """Expected scores; null: unknown."""

    @model_validator(mode="before")
    @classmethod
    def _complete_segmentation(cls, content: Any) -> Any:
        """Add a ``segmentation`` section if it is omitted or null and the architecture is a segmentation network."""
        if not isinstance(content, dict) or content.get("segmentation") is not None:
            return content
        network = content.get("network")
        arch = network.get("arch") if isinstance(network, dict) else getattr(network, "arch", None)
        known = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
        segments = known is not None and known.task == "segmentation"
        return {**content, "segmentation": {}} if segments else content

    @property
    def task(self) -> Literal["classification", "segmentation"]:
        """The task: segmentation if there is a ``segmentation`` section, otherwise classification."""
        return "classification" if self.segmentation is None else "segmentation"

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield settings that do not fit the task or each other, or belong only to weights files."""
        for key in STORED_ALONE:
            if key in self.network.model_fields_set and getattr(self.network, key):
                yield (f"network.{key}",), "is stored with weights and is not a setting of experiments; remove the key"
        if self.network.num_classes == 0:
            yield ("network.num_classes",), "should be greater than 0"
        if self.expected is not None:
            for protocol in self.expected.scores:
                if protocol.startswith("whole") != (self.segmentation is not None):
                    yield ("expected.scores", "network.arch"), f"{protocol} is not a protocol of {self.task}"
        if self.network.memory == LEAN and self.training.compile:
            yield (
                ("network.memory", "training.compile"),
                "has no effect in a compiled network, where torch.compile decides what is saved; remove one of the "
                "two, or set training.activation_memory_budget instead of network.memory",
            )
        of_other_package = is_external(self.network.arch)
        if of_other_package and self.optimizer.classifier_lr != -1:
            yield (
                ("optimizer.classifier_lr", "network.arch"),
                f'applies to parameters named "fc", which {self.network.arch} names differently; remove the key',
            )
        if self.segmentation is None:
            return
        if of_other_package:
            yield (
                ("segmentation", "network.arch"),
                "networks of other packages are trained as classifiers; remove the section, or use a deeplab_* network",
            )
            return
        known = ARCHITECTURES.get(self.network.arch)
        if known is not None and known.task != "segmentation":
            yield (
                ("segmentation", "network.arch"),
                f"{known.name} is a classifier; remove the section, or use a deeplab_* network",
            )
            return
        if self.segmentation.ignore_label < self.network.num_classes:
            yield (
                ("network.num_classes", "segmentation.ignore_label"),
                f"the outputs are the labels 0 to {self.network.num_classes - 1}, which include "
                f"segmentation.ignore_label = {self.segmentation.ignore_label}; set the number of classes of the data, "
                "or another ignore_label",
            )
        for setting, instead in UNUSED_IN_SEGMENTATION.items():
            section, key = setting.split(".")
            if getattr(getattr(self, section), key) != getattr(_DEFAULTS[section], key):
                yield (setting, "network.arch"), f"is not used in segmentation: {instead}; remove the key"

    def defaults(self) -> Experiment:
        """Return the default experiment, with a ``segmentation`` section if this one has it."""
        section = None if self.segmentation is None else Segmentation()
        return Experiment().model_copy(update={"segmentation": section})

    def doubts(self) -> Iterator[str]:
        """Yield warnings about settings that are valid but probably unintended; training logs them."""
        size = self.input
        if size.scale_val != -1 and size.crop_val**2 < SMALL_CROP_AREA * size.scale_val**2:
            yield (
                f"input.crop_val = {size.crop_val}: validation sees {size.crop_val**2 / size.scale_val**2:.1%} of an "
                f"image or less, because its shorter side is input.scale_val = {size.scale_val}; set scale_val to "
                f"about {round(size.crop_val * 8 / 7)}, or to -1 if images should not be resized"
            )

    def digest(self) -> str:
        """Return the sha256 of all settings, including defaults, without the ``expected`` scores."""
        settings = self.model_dump(mode="json", exclude={"expected"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_world_size(config: Experiment, world_size: int) -> None:
    """Raise ConfigError unless ``optimizer.batch_size`` is a multiple of world size times ``accumulate_steps``."""
    batch_size, accumulate_steps = config.optimizer.batch_size, config.optimizer.accumulate_steps
    num_parts = world_size * accumulate_steps
    if batch_size % num_parts:
        below = batch_size // num_parts * num_parts
        choices = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ConfigError(
            f"optimizer.batch_size = {batch_size}: is not a multiple of {num_parts}, the number of processes "
            f"({world_size}) times optimizer.accumulate_steps ({accumulate_steps}); use {choices}"
        )
