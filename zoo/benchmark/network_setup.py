"""The networks of a benchmark: built in training mode in a given variant, and fed with random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.architectures import REVERSIBLE_TWINS, architecture
from zoo.benchmark.block_checkpointing import checkpoint_blocks
from zoo.benchmark.results import Case
from zoo.benchmark.timing import Step
from zoo.config import Segmentation
from zoo.engine.precision import DTYPES, at_least_float32, autocast
from zoo.errors import ConfigError, listed
from zoo.layers.init import init_weights
from zoo.models import build_network
from zoo.models.external import build_external, image_shape, iter_tensors, split_name
from zoo.remat.lean import lean
from zoo.remat.memory_use import clear_gradients
from zoo.spec import parse_spec
from zoo.tasks.segmentation import MapLogits, bootstrapped_loss
from zoo.torch_internals import recompile_limit

# What the values of "memory" do to networks of other packages.
FOREIGN_MEMORY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "checkpoint": checkpoint_blocks,
    "lean": lean,
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Setup:
    """A network and the images that it is fed with.

    Args:
    - `arch`: name of the architecture, such as "resnet50", or of another package's network, "PACKAGE:NAME".
    - `batch`: images per step.
    - `size`: side of an image, in pixels; a network of another package that takes no such images gets its own.
    - `structure`: blocks per stage; None for those of the architecture.
    - `input_3x3`: whether the stem is of three 3x3 convolutions.
    - `dtype`: "float32", or "bfloat16" for autocast.
    - `layout`: layout of weights and images, one of `LAYOUTS`.
    - `device`: device of the network; on the meta device nothing is computed.
    - `classes`: outputs of the network; None for 1000, or in segmentation for those of the architecture.
    """

    arch: str
    batch: int
    size: int
    structure: tuple[int, ...] | None = None
    input_3x3: bool = False
    dtype: str = "float32"
    layout: str = "contiguous"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    classes: int | None = None

    @property
    def case(self) -> Case:
        """The name, input shape, dtype and layout that it has in the results."""
        blocks = "" if self.structure is None else f" ({'-'.join(map(str, self.structure))})"
        stem = " 3x3 stem" if self.input_3x3 else ""
        return Case(self.arch + blocks + stem, (self.batch, *self.image_shape), self.dtype, self.layout)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return image_shape(self.arch, self.size) if self._is_foreign else (3, self.size, self.size)

    def build(self, norm: str, memory: str) -> nn.Module:
        """Return the initialised network in training mode, as a step of training calls it.

        A network of another package has its own norms, which are called "standard" here. Raises ConfigError if the
        architecture does not have an option.
        """
        if self._is_foreign:
            return self._build_foreign(norm, memory)
        options = {"input_3x3": True} if self.input_3x3 else {}
        num_classes = 1000 if self.classes is None and not self._is_segmentation else self.classes
        chosen = {} if num_classes is None else {"num_classes": num_classes}
        spec = parse_spec({"arch": self.arch, "norm": norm, "memory": memory, "options": options, **chosen}, self.arch)
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            model = build_network(spec, structure=self.structure)
        init_weights(model)
        return self.place(MapLogits(model) if self._is_segmentation else model)

    def _build_foreign(self, norm: str, memory: str) -> nn.Module:
        if norm != "standard" or memory not in FOREIGN_MEMORY:
            raise ConfigError(f"{self.arch} has norms of its own, and is {listed(FOREIGN_MEMORY)}")
        if self.structure is not None or self.input_3x3:
            raise ConfigError(f"{self.arch} has a structure and a stem of its own; leave yours out")
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            model = build_external(self.arch, num_classes=self.classes)
        return self.place(FOREIGN_MEMORY[memory](model))

    def reversible_twin(self) -> Setup:
        """Return the setup of the RevNet that the paper compares with this network; ConfigError where there is none."""
        ordinary = {reversible: arch for arch, reversible in REVERSIBLE_TWINS.items()}.get(self.arch)
        if ordinary is not None:
            raise ConfigError(f"benchmark {ordinary}, whose reversible twin it is")
        if self.arch not in REVERSIBLE_TWINS or self.structure is not None:
            raise ConfigError(f"only {', '.join(REVERSIBLE_TWINS)} in their own structure have a reversible twin")
        return replace(self, arch=REVERSIBLE_TWINS[self.arch])

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the layout, in training mode."""
        layout: Any = {"memory_format": LAYOUTS[self.layout]}  # not in the type stubs of torch 2.11 and 2.13
        return model.to(self.device).to(**layout).train()

    def random_images(self) -> Tensor:
        """Return a batch of new random images."""
        images = torch.randn(self.batch, *self.image_shape, device=self.device)
        return images.contiguous(memory_format=LAYOUTS[self.layout])

    def forward_of(self, model: Callable[[Tensor], Any]) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the model for random images, which are made now."""
        images = self.random_images()
        targets = torch.zeros(self._target_shape, dtype=torch.long, device=self.device)

        def forward() -> Tensor:
            with autocast(self.device, DTYPES[self.dtype]):
                logits = model(images)
                if not self._is_foreign and not self._is_segmentation:
                    return F.cross_entropy(logits, targets)
            if self._is_foreign:
                return loss_of_any(list(iter_tensors(logits)))
            logits = at_least_float32(logits)
            defaults = Segmentation()
            return bootstrapped_loss(
                logits, targets, hard_pixels=defaults.hard_pixels, ignore_label=defaults.ignore_label
            )

        return forward

    @property
    def input_bytes(self) -> int:
        """The bytes of a batch: of its images, and of label maps."""
        channels, height, width = self.image_shape
        return self.batch * height * width * (channels * 4 + (8 if self._is_segmentation else 0))

    @property
    def _is_foreign(self) -> bool:
        return split_name(self.arch) is not None

    @property
    def _is_segmentation(self) -> bool:
        return not self._is_foreign and architecture(self.arch).task == "segmentation"

    @property
    def _target_shape(self) -> tuple[int, ...]:
        return (self.batch, self.size, self.size) if self._is_segmentation else (self.batch,)


def loss_of_any(outputs: Sequence[Tensor]) -> Tensor:
    """Return a loss of outputs of any meaning, which all of them and all gradients depend on."""
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def training_step(forward: Callable[[], Tensor], model: nn.Module) -> Step:
    """Return the step to time: forward and backward pass, after which the gradients are dropped.

    The optimizer's step is left out, as it is the same for all.
    """

    def run(times: int) -> None:
        for _ in range(times):
            forward().backward()
            clear_gradients(model.parameters())

    return Step(run)


def room_for_compilations() -> AbstractContextManager[Any]:
    """Return a context in which any number of compiled models may be run; outside of it torch gives up after a few."""
    return recompile_limit(1000, accumulated=10_000)
