"""Networks for benchmarks, built in training mode in a given variant, with random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.benchmark.results import Case
from zoo.config.architectures import architecture
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.config.segmentation_section import Segmentation
from zoo.engine._precision import DTYPES, at_least_float32, autocast
from zoo.errors import ConfigError, join_names
from zoo.memory.allocations import clear_gradients
from zoo.memory.block_checkpointing import checkpoint_blocks
from zoo.memory.timing import TimedStep, training_step
from zoo.models import build_network
from zoo.models.build import initialize
from zoo.models.external import build_external, image_shape, iter_tensors
from zoo.models.revnet import REVERSIBLE_TWINS
from zoo.remat._lean import lean
from zoo.tasks.segmentation import MapLogits, bootstrapped_loss
from zoo.torch_internals.compiler import recompile_limit

# Memory strategies of external networks.
EXTERNAL_STRATEGIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "checkpoint": checkpoint_blocks,
    "lean": lean,
}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Setup:
    """A network and its input images.

    Args:
    - `spec`: the network; the arguments of `build` replace its norm and memory strategy.
    - `batch`: images per step.
    - `size`: side of an image in pixels. External networks that require another size get that size.
    - `structure`: blocks per stage; None for the architecture's.
    - `dtype`: "float32", or "bfloat16" for autocast.
    - `layout`: memory layout of weights and images, one of `MEMORY_FORMATS`.
    - `device`: device of the network; on the meta device nothing is computed.
    """

    spec: Spec
    batch: int
    size: int
    structure: tuple[int, ...] | None = None
    dtype: str = "float32"
    layout: str = "contiguous"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def case(self) -> Case:
        """The name, input shape, dtype and layout of the setup in results."""
        blocks = "" if self.structure is None else f" ({'-'.join(map(str, self.structure))})"
        stem = " 3x3 stem" if self.spec.options.get("input_3x3") else ""
        return Case(self.spec.arch + blocks + stem, (self.batch, *self.image_shape), self.dtype, self.layout)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        if isinstance(self.spec, ExternalSpec):
            return image_shape(self.spec.arch, self.size)
        return 3, self.size, self.size

    def build(self, norm: str, memory: str) -> nn.Module:
        """Return the initialized network with this norm and memory strategy in training mode.

        External networks have their own norms, for which the norm is "standard". Raises ConfigError if the architecture
        does not support the norm, the strategy or the structure.
        """
        if isinstance(self.spec, ExternalSpec):
            return self.place(self._build_external(self.spec, norm, memory))
        chooses_norms = isinstance(self.spec, NetworkSpec)
        if not chooses_norms and norm != "standard":
            raise ConfigError(f"{self.spec.arch} has its own norms")
        spec = self.spec.changed(memory=memory, **({"norm": norm} if chooses_norms else {}))
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            model = build_network(spec, structure=self.structure)
        initialize(model, spec)
        return self.place(MapLogits(model) if self._is_segmentation else model)

    def _build_external(self, spec: ExternalSpec, norm: str, memory: str) -> nn.Module:
        if norm != "standard" or memory not in EXTERNAL_STRATEGIES:
            raise ConfigError(
                f"{spec.arch} has its own norms, and its memory strategies are {join_names(EXTERNAL_STRATEGIES)}"
            )
        if self.structure is not None:
            raise ConfigError(f"{spec.arch} has its own structure", remedy="leave out the option")
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            model = build_external(spec.arch, **{**spec.builder_arguments(), "memory": "plain"})
        return EXTERNAL_STRATEGIES[memory](model)

    def reversible_twin(self) -> Setup:
        """Return the setup of the RevNet that the paper compares with this network. Raises ConfigError without one."""
        arch = self.spec.arch
        ordinary = {reversible: arch for arch, reversible in REVERSIBLE_TWINS.items()}.get(arch)
        if ordinary is not None:
            raise ConfigError(f"{arch} is the reversible twin of {ordinary}", remedy=f"benchmark {ordinary}")
        if arch not in REVERSIBLE_TWINS or self.structure is not None:
            raise ConfigError(f"only {', '.join(REVERSIBLE_TWINS)} with their default structure have a reversible twin")
        return replace(self, spec=self.spec.changed(arch=REVERSIBLE_TWINS[arch]))

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the layout, in training mode."""
        layout: Any = {"memory_format": MEMORY_FORMATS[self.layout]}  # not in the type stubs of torch 2.11 and 2.13
        return model.to(self.device).to(**layout).train()

    def random_images(self) -> Tensor:
        """Return a new batch of random images."""
        images = torch.randn(self.batch, *self.image_shape, device=self.device)
        return images.contiguous(memory_format=MEMORY_FORMATS[self.layout])

    def forward_of(self, model: Callable[[Tensor], Any]) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the model for fixed random images."""
        images = self.random_images()
        targets = torch.zeros(self._target_shape, dtype=torch.long, device=self.device)

        def forward() -> Tensor:
            with autocast(self.device, DTYPES[self.dtype]):
                logits = model(images)
                if not isinstance(self.spec, ExternalSpec) and not self._is_segmentation:
                    return F.cross_entropy(logits, targets)
            if isinstance(self.spec, ExternalSpec):
                return loss_of_any(list(iter_tensors(logits)))
            logits = at_least_float32(logits)
            defaults = Segmentation()
            return bootstrapped_loss(
                logits, targets, hard_pixels=defaults.hard_pixels, ignore_label=defaults.ignore_label
            )

        return forward

    @property
    def input_bytes(self) -> int:
        """Bytes of a batch: its images and label maps."""
        channels, height, width = self.image_shape
        return self.batch * height * width * (channels * 4 + (8 if self._is_segmentation else 0))

    @property
    def _is_segmentation(self) -> bool:
        return not isinstance(self.spec, ExternalSpec) and architecture(self.spec.arch).task == "segmentation"

    @property
    def _target_shape(self) -> tuple[int, ...]:
        return (self.batch, self.size, self.size) if self._is_segmentation else (self.batch,)


def loss_of_any(outputs: Sequence[Tensor]) -> Tensor:
    """Return a scalar that depends on all elements of the outputs."""
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def graph_step(forward: Callable[[], Tensor], model: nn.Module) -> TimedStep:
    """Return a timed step that replays a CUDA graph of forward and backward.

    The gradients are None afterwards, and their memory stays allocated.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # choose algorithms and compile outside of the graph
        training_step(forward, model).run(2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward().backward()
    clear_gradients(model.parameters())

    def run(times: int) -> None:
        for _ in range(times):
            graph.replay()

    return TimedStep(run)


def allow_many_compilations() -> AbstractContextManager[Any]:
    """Raises torch's limits on the number of compiled models."""
    return recompile_limit(1000, accumulated=10_000)
