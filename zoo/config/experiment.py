"""Settings of an experiment: network, optimizer, input, training, and expected scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from zoo.config.architectures import ARCHITECTURES
from zoo.config.limits import MAX_BATCH, MAX_REPLICAS, MAX_SIDE, MAX_STEPS
from zoo.config.network import ExternalSpec, NetworkSpec, Spec, validate_spec
from zoo.config.optimizer import Optimizer
from zoo.config.record import NetworkRecord, Preprocessing, Scale, Side, escape_names
from zoo.config.regularization import ClassWeights, Regularization
from zoo.config.section import Section
from zoo.config.segmentation_section import Segmentation
from zoo.errors import ConfigError

# "center" or "tencrop" and the side of the crop in px, as in center224. Segmentation: the whole image at one scale, or
# the mean of the probabilities of the image and of its mirror image.
ProtocolName = Annotated[str, StringConstraints(pattern=r"^((center|tencrop)[1-9][0-9]*|whole|whole-flip)$")]
Percent = Annotated[float, Field(ge=0, le=100)]
SideOrNone = Annotated[int, Field(ge=0, le=MAX_SIDE)]
PAIR = Field(min_length=2, max_length=2)
AUGMENTATIONS = ("randaugment", "trivialaugment", "autoaugment", "augmix")  # names in torchvision.transforms.v2
TIMM_POLICY = "timm:"  # prefix of timm's policies


def _check_jitter(value: Any) -> Any:
    if not (isinstance(value, bool) or (isinstance(value, (int, float)) and 0 <= value <= 1)):
        raise ValueError("should be true, false, or a number from 0 to 1")
    return value


ColorJitter = Annotated[bool | Annotated[float, Field(ge=0, le=1)], BeforeValidator(_check_jitter)]


class Input(Preprocessing):
    """Sizes of images in px, and their preprocessing."""

    classification_only = (
        *("scale_train", "pad_train", "crop_scale_train", "crop_ratio_train", "interpolation_train", "augment_train"),
        *("random_erasing_train", "repeats_train", "cutout_train", "shuffle_shards", "sampling_train"),
        *("scale_val", "crop_val", "interpolation_val", "crop_mode_val"),
    )

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
    crop_scale_train: Annotated[list[Annotated[float, Field(gt=0, le=1)]], PAIR] = Field(default=[0.08, 1.0])
    """Smallest and largest area of a random resized crop, as a fraction of the image."""
    crop_ratio_train: Annotated[list[Annotated[float, Field(gt=0, le=100)]], PAIR] = Field(default=[3 / 4, 4 / 3])
    """Smallest and largest aspect ratio of a random resized crop, width / height."""
    interpolation_train: Literal["bilinear", "bicubic", "random"] = "bilinear"
    """Interpolation of training images; random: bilinear or bicubic for each image, as in timm."""
    repeats_train: Annotated[int, Field(ge=1, le=1000)] = 1
    """Repeated augmentation (Hoffer et al. 2020): each image that an epoch draws is drawn this many times in succession
    with different augmentations, and an epoch has as many images as without; 1: none."""
    sampling_train: ClassWeights | None = None
    """Weighted sampling: an epoch draws as many images as there are, with replacement. Relative frequency of an image
    of each class; "balanced": each class is drawn equally often; null: each image once per epoch."""
    augment_train: str | None = None
    """Automatic augmentation after crop and flip: randaugment, trivialaugment, autoaugment or augmix of torchvision, or
    a policy of timm, if that is installed, such as timm:rand-m9-mstd0.5-inc1; null: none."""
    augment_params_train: dict[str, Any] = Field(default={})
    """Arguments of the augmentation's class in torchvision.transforms.v2, such as magnitude and interpolation; a policy
    of timm contains its own."""
    random_erasing_train: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a rectangle of 2 % to a third of a normalized training image is erased; 0: none."""
    random_erasing_mode_train: Literal["const", "rand", "pixel"] = "const"
    """Values of erased pixels, as in timm: 0 (const), one normally distributed color (rand), or one for each pixel
    (pixel)."""
    cutout_train: SideOrNone = 0
    """Side of a square that is blanked in each training image; 0: none."""
    color_jitter_train: ColorJitter = False
    """Whether brightness, contrast and saturation of training images are jittered by up to 0.4, without clamping, as
    for the published networks; a number: strength of torchvision's ColorJitter on 8-bit images, after augment_train, as
    in timm and torchvision."""
    lighting_train: bool = False
    """Whether training images get AlexNet's PCA color noise."""

    @field_validator("augment_train")
    @classmethod
    def _must_be_known(cls, value: str | None) -> str | None:
        is_policy = value is not None and value.startswith(TIMM_POLICY) and value != TIMM_POLICY
        if value is not None and value not in AUGMENTATIONS and not is_policy:
            raise ValueError(f"should be one of {', '.join(AUGMENTATIONS)}, or {TIMM_POLICY}POLICY")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of crops, cutout squares and padding that do not fit.

        Without ``pad_train`` the training crop may be larger than ``scale_train``, because the crop is resized.
        """
        yield from super().conflicts()
        if self.pad_train is None and self.pad_mode_train != "zeros":
            yield "pad_mode_train", "has no effect without pad_train; set pad_train, or remove the key"
        if self.pad_train is not None and self.scale_train != -1:
            yield from self._pad_conflicts(self.pad_train)
        if self.cutout_train > self.crop_train:
            yield "cutout_train", f"should be at most crop_train, which is {self.crop_train}"
        for key in ("crop_scale_train", "crop_ratio_train"):
            if getattr(self, key)[0] > getattr(self, key)[1]:
                yield key, "should be the smallest value, then the largest"
        if self.pad_train is not None:
            for key in ("crop_scale_train", "crop_ratio_train"):
                if getattr(self, key) != Input.model_fields[key].default:
                    yield key, "has no effect with pad_train, which crops without resizing; remove one"
        if self.sampling_train is not None:
            if self.shuffle_shards is not None:
                yield "sampling_train", "draws from all shards, and shuffle_shards reads some at a time; remove one"
            if isinstance(self.sampling_train, list) and not any(self.sampling_train):
                yield "sampling_train", "should have a weight above 0"
        yield from self._augmentation_conflicts()

    def _augmentation_conflicts(self) -> Iterator[tuple[str, str]]:
        if self.augment_params_train and self.augment_train not in AUGMENTATIONS:
            what = "needs augment_train" if self.augment_train is None else "a policy of timm has no params"
            yield "augment_params_train", f"{what}; remove the key"
        if self.random_erasing_mode_train != "const" and not self.random_erasing_train:
            yield "random_erasing_mode_train", "has no effect without random_erasing_train"

    def _pad_conflicts(self, pad: int) -> Iterator[tuple[str, str]]:
        side = self.scale_train + 2 * pad
        if self.crop_train > side:
            yield "crop_train", f"should be at most {side}, the padded scale_train"
        if self.pad_mode_train == "reflect" and pad >= self.scale_train:
            yield "pad_train", f"should be less than scale_train, which is {self.scale_train}, for reflection"


class Training(Section):
    """Computation of training steps; the published runs have the defaults."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision: dtype of convolutions."""
    channels_last: bool = False
    """Whether images and weights use the channels_last memory format, which is faster on some machines."""
    compile: bool = False
    """Whether to compile the network with torch.compile. With network.memory "lean", its graphs save what lean training
    saves, see `zoo.remat.inductor_options`."""
    gradient_angle_meter: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps between two logs of the angle between the gradients from reconstructed and from stored activations, which
    takes the memory that reversible chains save and the time of two more steps; 0: never."""


class CheckpointConfig(Section):
    """When checkpoints are written: after each epoch, and every ``every_steps`` steps unless that is 0."""

    every_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps between two checkpoints within an epoch; 0: only after epochs."""
    keep_best: Annotated[int, Field(gt=0, le=1000)] = 1
    """Number of epochs with the best validation scores whose weights are kept. With more than 1, they are files such as
    best_093.270_epoch0012.pth.tar beside model_best.pth.tar, in the order of the scores."""


class Score(Section):
    """Accuracy of a classification, or mean intersection over union of a segmentation, percent."""

    top1: Percent | None = None
    """Top-1 accuracy, percent; null in segmentation."""
    top5: Percent | None = None
    """Top-5 accuracy, percent; null: not published."""
    miou: Percent | None = None
    """Intersection over union, mean over the classes, percent; null in classification."""


class PublishedWeights(Section):
    """Published weights file, on Google Drive or at a url. checksums.md5 has the md5 of each file on Google Drive."""

    drive_id: Annotated[str, Field(min_length=1)] | None = None
    """Google Drive ID of the file."""
    url: Annotated[str, Field(pattern="^https://")] | None = None
    """Address of the file."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the file at this url, hexadecimal."""
    license: Annotated[str, Field(min_length=1)]
    """License of the file."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the problems of two addresses or none, and of a url without its digest or a digest without its url."""
        if (self.drive_id is None) == (self.url is None):
            yield "drive_id", "should be given, or url instead of it"
        if (self.url is None) != (self.sha256 is None):
            yield "sha256", "should be given with url, and only with it"


class Expected(Section):
    """Expected scores of a run by evaluation protocol, and their source."""

    source: Annotated[str, Field(min_length=1)]
    """Source of the scores."""
    gpus: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] | None = None
    """Number of GPUs that the authors trained on: optimizer.replicas of this number has their batch statistics; null:
    unknown."""
    scores: Annotated[dict[ProtocolName, Score], Field(min_length=1)]
    """Scores by evaluation protocol: "center" or "tencrop" and the side of the crop, as in center224; in segmentation
    "whole" for whole images at one scale, or "whole-flip" for whole images and their mirror images."""
    weights: PublishedWeights | None = None
    """Published weights with these scores; null: not published."""


class Experiment(Section):
    """All settings of a run; omitted sections and keys have their defaults."""

    network: Annotated[NetworkSpec | Spec | ExternalSpec, BeforeValidator(validate_spec)] = NetworkSpec()
    """The network and its initial weights."""
    optimizer: Optimizer = Optimizer()
    """Optimizer, batch size and learning rate."""
    input: Input = Input()
    """Sizes of images in px, and their preprocessing."""
    regularization: Regularization = Regularization()
    """Mixed images, and the loss."""
    training: Training = Training()
    """Computation of training steps."""
    segmentation: Segmentation | None = None
    """Label maps and crops of a segmentation; set automatically for segmentation networks, null for classification."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and which of them are kept."""
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

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not fit the task or each other, or belong only to weights files."""
        if self.network.num_classes == 0:
            yield "network.num_classes", "should be greater than 0"
        if self.regularization.mixes and self.optimizer.batch_size % 2:
            yield "optimizer.batch_size", "should be even with mixup or cutmix, which mix the images of its halves"
        weights = {"regularization.class_weights": self.regularization.class_weights}
        weights["input.sampling_train"] = self.input.sampling_train
        for key, value in weights.items():
            if isinstance(value, list) and len(value) != self.network.num_classes:
                yield key, f"should have a weight for each of the {self.network.num_classes} classes, not {len(value)}"
        if self.optimizer.release_gradients and self.training.amp == "fp16":
            yield "training.amp", 'should be "bf16" or "off" with optimizer.release_gradients: fp16 scales gradients'
        if self.segmentation is not None:
            yield from self._segmentation_conflicts(self.segmentation)

    def _segmentation_conflicts(self, segmentation: Segmentation) -> Iterator[tuple[str, str]]:
        """Yield the problem of a network that does not segment, or settings that do not fit segmentation."""
        arch, num_classes = self.network.arch, self.network.num_classes
        if isinstance(self.network, ExternalSpec):
            yield (
                "segmentation",
                "networks of other packages are trained as classifiers; remove it, or use deeplab_* or pyramid_*",
            )
            return
        if arch in ARCHITECTURES and ARCHITECTURES[arch].task != "segmentation":
            yield "segmentation", f"{arch} is a classifier; remove the section, or use deeplab_* or pyramid_*"
            return
        if segmentation.ignore_label < num_classes:
            yield (
                "network.num_classes",
                f"the outputs are the labels 0 to {num_classes - 1}, which include segmentation.ignore_label = "
                f"{segmentation.ignore_label}; set the number of classes of the data, or another ignore_label",
            )
        if not isinstance(self.input.color_jitter_train, bool):
            yield "input.color_jitter_train", "should be true or false in segmentation"
        for name in ("input", "regularization"):
            section: Section = getattr(self, name)
            for key in section.classification_only:
                if getattr(section, key) != type(section).model_fields[key].default:
                    yield f"{name}.{key}", "is not used in segmentation; remove the key"

    @property
    def has_recipe(self) -> bool:
        """Whether this says how to train the network; published weights may come without their optimizer settings."""
        is_published = self.expected is not None and self.expected.weights is not None
        return not is_published or "optimizer" in self.model_fields_set

    def record(self, class_names: Iterable[str] | None = None) -> NetworkRecord:
        """Return the description of the network for its weights files, with the names of its outputs if known.

        Raises DataError as `escape_names` does.
        """
        names = None if class_names is None else escape_names(class_names)
        return NetworkRecord(
            spec=self.network.without_pretrained(), preprocessing=self.input.preprocessing(), class_names=names
        )

    def defaults(self) -> Experiment:
        """Return the default experiment, with a ``segmentation`` section if this one has it."""
        section = None if self.segmentation is None else Segmentation()
        return Experiment().model_copy(update={"segmentation": section})

    def digest(self) -> str:
        """Return the sha256 of all settings, including defaults, without the ``expected`` scores."""
        settings = self.model_dump(mode="json", exclude={"expected"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_world_size(config: Experiment, world_size: int) -> None:
    """Raise ConfigError unless ``optimizer.batch_size`` is a multiple of the replicas times ``accumulate_steps``.

    A process is a replica unless ``optimizer.replicas`` is set, which then must be at least ``world_size``. With mixed
    images the batch size also has to be a multiple of twice the replicas, see `zoo.data.transforms.mixing`.
    """
    batch_size, accumulate_steps = config.optimizer.batch_size, config.optimizer.accumulate_steps
    replicas = config.optimizer.replicas or world_size
    what = "the number of processes" if config.optimizer.replicas is None else "optimizer.replicas"
    if replicas < world_size:
        raise ConfigError(
            f"optimizer.replicas = {replicas}, which {world_size} processes cannot divide; start at most {replicas}"
        )
    if config.regularization.mixes and batch_size % (2 * replicas):
        raise ConfigError(
            f"optimizer.batch_size = {batch_size}: is not a multiple of twice {what} ({replicas}), "
            "which regularization.mixup and cutmix need, because an image is mixed with one of the same replica; use "
            f"{max(1, batch_size // (2 * replicas)) * 2 * replicas}"
        )
    num_parts = replicas * accumulate_steps
    if batch_size % num_parts:
        below = batch_size // num_parts * num_parts
        choices = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ConfigError(
            f"optimizer.batch_size = {batch_size}: is not a multiple of {num_parts}, {what} "
            f"({replicas}) times optimizer.accumulate_steps ({accumulate_steps}); use {choices}"
        )
