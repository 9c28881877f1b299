"""A whole experiment: network, optimiser, images, how to run it, and the score that is expected of it."""

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

# "center" or "tencrop" and the side of the crop in pixels, as in center224. Segmentation: the whole image at one scale,
# or the mean of its probabilities and those of its mirror image.
Protocol = Annotated[str, StringConstraints(pattern=r"^((center|tencrop)[1-9][0-9]*|whole|whole-flip)$")]
Percent = Annotated[float, Field(ge=0, le=100)]
SideOrNone = Annotated[int, Field(ge=0, le=MAX_SIDE)]
Decoder = Literal["pil", "torchvision", "scaled"]
SMALL_PART = 0.25  # of a validation image's area: a crop of less is probably not meant
# Settings that segmentation does not use -> what it does instead.
UNUSED_IN_SEGMENTATION = {
    "input.scale_train": "training images are scaled by segmentation.scale_range",
    "input.pad_train": "training images that are smaller than the crop are padded to it",
    "input.cutout_train": "its labels would ask for what was blanked",
    "input.shuffle_shards": "images and label maps are files in folders",
    "input.decoder": "images are decoded by PIL",
    "input.scale_val": "validation sees whole images, resized to segmentation.longest_side_val",
    "input.crop_val": "validation sees whole images, resized to segmentation.longest_side_val",
    "optimizer.classifier_lr": "all layers have optimizer.learning_rate",
}


class Input(Preprocessing):
    """Sizes of images in pixels, and what is done to them."""

    shuffle_shards: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    """Number of consecutive shards whose images are shuffled together, and which are needed at a time; null: all."""
    scale_train: Scale = -1
    """Shorter side that training images are resized to before the crop; -1: not resized."""
    crop_train: Side = 224
    """Side of the training crop, the size that the network sees."""
    pad_train: SideOrNone | None = None
    """Pixels added on each side of a training image, which is then cropped without resizing; null: crops of random
    size and shape, resized to crop_train."""
    pad_mode_train: Literal["zeros", "reflect"] = "zeros"
    """What the added pixels are: zeros, or the image reflected."""
    cutout_train: SideOrNone = 0
    """Side of a square that is blanked in each training image; 0: none."""
    color_jitter_train: bool = False
    """Whether brightness, contrast and saturation of training images vary."""
    lighting_train: bool = False
    """Whether training images get AlexNet's noise along the principal components of colour."""
    decoder: Decoder | None = None
    """What decodes images: pil; torchvision, which is faster and gives the same pixels; scaled, which decodes of a
    training image the crop alone, and smaller if the crop is at least twice crop_train, and validation images as
    torchvision does; null: torchvision in training, pil in validation."""

    @property
    def decoder_train(self) -> Decoder:
        """What decodes training images."""
        return self.decoder or "torchvision"

    @property
    def decoder_val(self) -> Decoder:
        """What decodes validation images; PIL, by which the published scores were made, unless a decoder is set."""
        return "torchvision" if self.decoder == "scaled" else self.decoder or "pil"

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield complaints about crops and squares that do not fit, and about a padding of nothing.

        Without ``pad_train`` the training crop may be larger than ``scale_train``: it is resized itself.
        """
        yield from super().conflicts()
        if self.pad_train is None and self.pad_mode_train != "zeros":
            yield ("pad_mode_train", "pad_train"), "says how to pad; set pad_train too, or remove the key"
        if self.pad_train is not None and self.scale_train != -1:
            yield from self._pad_conflicts(self.pad_train)
        if self.cutout_train > self.crop_train:
            yield ("cutout_train", "crop_train"), f"should be at most crop_train, which is {self.crop_train}"

    def _pad_conflicts(self, pad: int) -> Iterator[tuple[tuple[str, ...], str]]:
        side = self.scale_train + 2 * pad
        if self.crop_train > side:
            yield ("crop_train", "scale_train", "pad_train"), f"should be at most {side}, the padded scale_train"
        if self.pad_mode_train == "reflect" and pad >= self.scale_train:
            yield ("pad_train", "scale_train"), f"should be less than scale_train, {self.scale_train}, to be reflected"


class Training(Section):
    """How the steps are computed; the defaults are those of the published runs."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision: the number format of convolutions."""
    channels_last: bool = False
    """Whether images and weights are laid out with the channels last, which is faster on some machines."""
    compile: bool = False
    """Whether torch.compile compiles the network."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """The mode of torch.compile. "reduce-overhead" records CUDA graphs, for small batches, where starting kernels takes
    longer than running them (not measured); "max-autotune" tries more kernels, and takes longer to compile."""
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """How much torch.compile keeps for backward: 0: as little as by repeating the whole forward pass; 1: torch's own
    choice, for speed; null: left to torch. Random numbers, such as dropout masks, are drawn once at any budget."""
    gradient_compression: Literal["off", "bf16"] = "off"
    """The number format in which several processes exchange gradients; off: that of the gradients. bf16 halves the
    bytes and keeps 8 significant bits of each gradient."""
    reconstruction_meter: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Log every so many steps how exactly reversible chains reconstruct their activations, which takes the memory that
    these chains save; 0: never."""
    gradient_angle_meter: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Log every so many steps the angle between the gradient with reconstructed activations and that with stored ones,
    which takes the memory that reversible chains save, and the time of two more steps; 0: never."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield complaints about a budget and a mode without a compiler to keep them."""
        if self.compile_mode != "default" and not self.compile:
            yield (
                ("compile_mode", "compile"),
                "is for torch.compile alone; set training.compile to true, or remove the key",
            )
        if self.activation_memory_budget is not None and not self.compile:
            yield (
                ("activation_memory_budget", "compile"),
                "is kept by torch.compile alone; set training.compile to true, or remove the key and choose a "
                "network.memory",
            )


class CheckpointConfig(Section):
    """When checkpoints are written: each epoch, and every ``every_steps`` steps unless that is 0."""

    every_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps from one checkpoint to the next within an epoch; 0: none within epochs."""


class Score(Section):
    """Accuracies of a classification, or the mean intersection over union of a segmentation, in percent."""

    top1: Percent | None = None
    """Images whose class is the most likely one, in percent; required in classification."""
    top5: Percent | None = None
    """Images whose class is among the five most likely ones, in percent; null: not published."""
    miou: Percent | None = None
    """Intersection over union of labels and predictions, the mean over all classes, in percent; required in
    segmentation."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a complaint about a score of no task, or of both."""
        if self.miou is None and self.top1 is None:
            yield ("top1", "miou"), "is missing (in segmentation miou)"
        elif self.miou is not None:
            for key in ("top1", "top5"):
                if getattr(self, key) is not None:
                    yield (key, "miou"), "is a score of classification and miou one of segmentation; remove one"


class PublishedWeights(Section):
    """A published weights file; checksums.md5 holds its md5, under the name of the experiment."""

    drive_id: Annotated[str, Field(min_length=1)]
    """Identifier of the file on Google Drive."""
    licence: Annotated[str, Field(min_length=1)]
    """Licence that the file is published under."""


class Expected(Section):
    """The scores that a run should reach, one per validation protocol, and where they were published."""

    source: Annotated[str, Field(min_length=1)]
    """Where the scores were published."""
    scores: Annotated[dict[Protocol, Score], Field(min_length=1)]
    """Scores by validation protocol: "center" or "tencrop" and the side of the crop, as in center224; in segmentation
    "whole" for whole images at one scale, and "whole-flip" for them and their mirror images together."""
    weights: PublishedWeights | None = None
    """Where the weights that reached them are published; null: they are not."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_md5(cls, content: Any) -> Any:
        """Leave out ``weights_md5``, which files and checkpoints of earlier versions have; checksums.md5 holds it."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if key != "weights_md5"}

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a complaint about a protocol with the score of another task."""
        for protocol, score in self.scores.items():
            if (score.miou is not None) != protocol.startswith("whole"):
                needed = "miou" if protocol.startswith("whole") else "top1"
                yield ("scores",), f"{protocol} should have {needed}, which is what it measures"


_DEFAULTS: dict[str, Section] = {"input": Input(), "optimizer": Optimizer()}


class Experiment(Section):
    """All settings of one run; sections and keys that a file leaves out have the defaults given here."""

    network: NetworkSpec = NetworkSpec()
    """The network and its initial weights."""
    optimizer: Optimizer = Optimizer()
    """Optimiser, batch and learning rate."""
    input: Input = Input()
    """Sizes of images in pixels, and what is done to them."""
    training: Training = Training()
    """How the steps are computed."""
    segmentation: Segmentation | None = None
    """Labels for each pixel; completed for deeplab_* networks, null for those that classify whole images."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Where all random numbers begin."""
    expected: Expected | None = None
    """The scores that a run should reach; null: none are known."""

    @model_validator(mode="before")
    @classmethod
    def _complete_segmentation(cls, content: Any) -> Any:
        """Set the section that is left out, or null, where the network is known to segment."""
        if not isinstance(content, dict) or content.get("segmentation") is not None:
            return content
        network = content.get("network")
        arch = network.get("arch") if isinstance(network, dict) else getattr(network, "arch", None)
        record = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
        segments = record is not None and record.task == "segmentation"
        return {**content, "segmentation": {}} if segments else content

    @property
    def task(self) -> Literal["classification", "segmentation"]:
        """What the outputs are: one class per image, or one per pixel.

        It is known from the network. A network of the user's own is one that segments if ``segmentation`` is set.
        """
        return "classification" if self.segmentation is None else "segmentation"

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield what does not fit the task, or belongs to weights files alone."""
        for key in STORED_ALONE:
            if key in self.network.model_fields_set and getattr(self.network, key):
                yield (f"network.{key}",), "is stored with weights, and no setting of an experiment; remove the key"
        if self.network.num_classes == 0:
            yield ("network.num_classes",), "should be greater than 0"
        if self.expected is not None:
            for protocol in self.expected.scores:
                if protocol.startswith("whole") != (self.segmentation is not None):
                    yield ("expected.scores", "network.arch"), f"{protocol} is not a protocol of {self.task}"
        if self.network.memory == LEAN and self.training.compile:
            yield (
                ("network.memory", "training.compile"),
                "does nothing in a compiled network, where torch.compile decides what is kept; remove one of the two, "
                "or set training.activation_memory_budget instead of network.memory",
            )
        of_other_package = is_external(self.network.arch)
        if of_other_package and self.optimizer.classifier_lr != -1:
            yield (
                ("optimizer.classifier_lr", "network.arch"),
                f'is for parameters called "fc", which are others in {self.network.arch}; remove the key',
            )
        if self.segmentation is None:
            return
        if of_other_package:
            yield (
                ("segmentation", "network.arch"),
                "networks of other packages are trained to classify whole images here; remove the section, or use a "
                "deeplab_* network",
            )
            return
        record = ARCHITECTURES.get(self.network.arch)
        if record is not None and record.task != "segmentation":
            yield (
                ("segmentation", "network.arch"),
                f"{record.name} classifies whole images; remove the section, or use a deeplab_* network",
            )
            return
        if self.segmentation.ignore_label < self.network.num_classes:
            yield (
                ("network.num_classes", "segmentation.ignore_label"),
                f"the outputs stand for the labels 0 to {self.network.num_classes - 1}, and one of these is "
                f"segmentation.ignore_label = {self.segmentation.ignore_label}; set the number of classes of the data, "
                "or another label to ignore",
            )
        for setting, instead in UNUSED_IN_SEGMENTATION.items():
            section, key = setting.split(".")
            if getattr(getattr(self, section), key) != getattr(_DEFAULTS[section], key):
                yield (setting, "network.arch"), f"is not used in segmentation: {instead}; remove the key"

    def defaults(self) -> Experiment:
        """Return an experiment of all defaults, with a ``segmentation`` section if this one has it."""
        section = None if self.segmentation is None else Segmentation()
        return Experiment().model_copy(update={"segmentation": section})

    def doubts(self) -> Iterator[str]:
        """Yield sentences about settings that are possible, but that few people mean; training logs them."""
        size = self.input
        if size.scale_val != -1 and size.crop_val**2 < SMALL_PART * size.scale_val**2:
            yield (
                f"input.crop_val = {size.crop_val}: validation sees {size.crop_val**2 / size.scale_val**2:.1%} of an "
                f"image whose shorter side is input.scale_val = {size.scale_val}, or less; set scale_val to some "
                f"{round(size.crop_val * 8 / 7)}, or to -1 for images that are not to be resized"
            )

    def digest(self) -> str:
        """Return the sha256 of all settings, defaults included, without the ``expected`` scores."""
        settings = self.model_dump(mode="json", exclude={"expected"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_world_size(config: Experiment, world_size: int) -> None:
    """Check that each of ``world_size`` processes gets an equal part of a batch.

    Raises ConfigError unless ``optimizer.batch_size`` is a multiple of world size times ``accumulate_steps``.
    """
    batch_size, accumulate_steps = config.optimizer.batch_size, config.optimizer.accumulate_steps
    num_parts = world_size * accumulate_steps
    if batch_size % num_parts:
        below = batch_size // num_parts * num_parts
        choices = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ConfigError(
            f"optimizer.batch_size = {batch_size}: is not a multiple of {num_parts}, the number of processes "
            f"({world_size}) times optimizer.accumulate_steps ({accumulate_steps}); use {choices}"
        )
