"""Figures 1 and 2, abstract and section 4.1 of Rota Bulo et al. 2018: memory saved for backward, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.benchmark.memory_prediction import MemoryPrediction
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import BASELINE, EAGER
from zoo.benchmark.variants import SLOPE, STRATEGIES, Block
from zoo.config.network import NetworkSpec
from zoo.layers.norm import norm_act
from zoo.layers.residual import IdentityResidualBlock
from zoo.memory.allocations import count_memory
from zoo.models.resnext import GROUPS
from zoo.remat._step_log import StorageLog
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.inplace_abn_table2 import GPUS, INPLACE_STRATEGIES, PLAIN_IABN
from zoo.reproduce.measurements import measures
from zoo.reproduce.published_numbers import published_number

WIDTH, SIDE = 128, 56  # bottlenecks in the first module of ResNeXt-101, for images of 224 pixels
BATCH = 2
# The networks that the paper trained with in-place norms, and whether their stem is three 3x3 convolutions.
NETWORKS = {"resnext101": True, "resnext152": True, "wider_resnet38": False, "densenet264": True}
IMAGE_SIZE = 224  # side of the images of ImageNet, in pixels
GPU_BYTES = 12 * 10**9  # memory of each of the authors' GPUs (section 4)
# (network, strategy) -> keys of published batches: the largest that fits, one that fits, and those that do not fit.
BATCH_KEYS = {
    ("resnext101", BASELINE): "resnext101_stdbn_lr_256/batch",
    ("resnext101", PLAIN_IABN): "resnext101_ipabn_lr_512/batch",
    ("resnext152", BASELINE): "resnext152_ipabn_lr_256/batch_stdbn",
    ("wider_resnet38", BASELINE): "wider_resnet38_ipabn_lr_256/batch_stdbn",
    ("densenet264", BASELINE): "densenet264_ipabn_lr_256/batch_stdbn",
}


@measures("inplace_abn", "Figure 1")
def count_block_buffers() -> ReportSection:
    """Return the number of buffers that a residual block stores with standard and with in-place norms: Figure 1.

    The block is a pre-activation bottleneck of ResNeXt-101 without projection.
    """
    section = ReportSection("figure1", "Figure 1: buffers stored for backward by a residual block")
    for norm, name in (("standard", "std-BN"), ("inplace", "InPlace-ABN")):
        block = IdentityResidualBlock(2 * WIDTH, (WIDTH, WIDTH, 2 * WIDTH), norm_act(norm), groups=GROUPS).train()
        sizes = stored_sizes(block, BATCH)
        number = published_number("inplace_abn", f"figure1/buffers_{norm}")
        section.add(f"{name}: buffers", len(sizes), number)
    return section


def stored_sizes(block: Callable[[Tensor], Tensor], batch: int) -> list[int]:
    """Return the bytes of each feature map that is saved for backward, including the block's input."""
    forward = forward_of_block(block, torch.randn(batch, 2 * WIDTH, SIDE, SIDE))
    with StorageLog() as log:
        loss = forward()
        alive = dict(log.changes)  # the last change of each address: its bytes, or 0 where it was freed
    del loss
    return [size for size in alive.values() if size >= 4 * batch * WIDTH * SIDE**2]


@measures("inplace_abn", "Figure 2")
def count_stored_tensors() -> ReportSection:
    """Return the tensors that five strategies store for backward, and the memory that in-place norms save (Figure 2).

    The memory of section 5 is measured on the same block. It counts all tensors held between forward and backward.
    """
    section = ReportSection("figure2", "Figure 2: tensors stored for backward by norm, activation and convolution")
    x = torch.randn(BATCH, WIDTH, SIDE, SIDE)
    held = {}
    for strategy, what in STRATEGIES.items():
        block = Block(WIDTH, GROUPS, strategy)
        number, names = published_number("inplace_abn", f"figure2/{strategy}"), stored_names(block, x)
        is_same = set(names) == set(str(number.value).removeprefix("only ").split(" and "))
        text = str(number.value) if is_same else " and ".join(names)
        section.add(what, text, number)
        held[strategy] = count_memory(forward_of_block(block, x), block.parameters()).held / x.nbytes
    saved = 100 * (1 - held["inplace_1"] / held["standard"])
    section.add("memory saved by InPlace-ABN I", saved, published_number("inplace_abn", "section5/memory"))
    return section


def stored_names(block: Block, x: Tensor) -> list[str]:
    """Return which feature maps a block saves for backward: x, x_hat, z or "something else"."""
    x_hat = F.batch_norm(x, None, None, training=True)
    known = {"x": x, "x_hat": x_hat, "z": F.leaky_relu(x_hat, SLOPE)}  # scale 1, shift 0
    output = block(x)  # torch 2.11 returns no saved tensors once the output is freed
    saved = output.grad_fn.saved_tensors
    maps = [tensor for tensor in saved if tensor is not None and tensor.shape == x.shape]
    return [next((name for name, value in known.items() if torch.allclose(each, value, atol=1e-5)), "something else")
            for each in maps]  # fmt: skip


def forward_of_block(block: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Return a forward pass with operations before and after the block; the last does not save its output."""
    token, weights = torch.ones((), requires_grad=True), torch.randn_like(x)
    return lambda: (block(x * token) * weights).sum()


def paper_spec(arch: str, input_3x3: bool) -> NetworkSpec:
    """Return the spec of one of `NETWORKS`."""
    return NetworkSpec(arch=arch, options={"input_3x3": True} if input_3x3 else {})


@measures("inplace_abn", "Abstract")
def count_network_memory(networks: Mapping[str, bool] = NETWORKS, batch: int = 64) -> ReportSection:
    """Return the memory that in-place norms save in whole networks: the abstract.

    Bytes held between forward and backward are counted on the meta device.

    Args:
    - `networks`: architectures, and whether their stem is three 3x3 convolutions.
    - `batch`: images of a step.
    """
    section = ReportSection("abstract", "Abstract: memory saved in whole networks")
    saved: dict[str, dict[str, float]] = {name: {} for name in INPLACE_STRATEGIES}
    for arch, input_3x3 in networks.items():
        setup = Setup(paper_spec(arch, input_3x3), batch, IMAGE_SIZE, device=torch.device("meta"))
        held = {}
        for strategy in EAGER:
            if strategy.name in (BASELINE, *INPLACE_STRATEGIES):
                model = strategy.build(setup)
                held[strategy.name] = count_memory(setup.forward_of(model), model.parameters()).held
        for name, of_networks in saved.items():
            of_networks[arch] = 100 * (1 - held[name] / held[BASELINE])
    for name in INPLACE_STRATEGIES:
        arch = max(saved[name], key=saved[name].__getitem__)
        number = published_number("inplace_abn", "abstract/memory")
        section.add(f"largest of all networks: {arch}, {name}", saved[name][arch], number)
    return section


@measures("inplace_abn", "Section 4.1")
def measure_batches() -> ReportSection:
    """Return the largest ImageNet batches with standard and with in-place norms: section 4.1.

    The memory of the framework itself is not counted (see `MemoryPrediction`).
    """
    section = ReportSection("section4.1", "Section 4.1: batches that fit")
    for (arch, name), key in BATCH_KEYS.items():
        setup = Setup(paper_spec(arch, NETWORKS[arch]), batch=2, size=IMAGE_SIZE)
        (strategy,) = (strategy for strategy in EAGER if strategy.name == name)
        images = GPUS * MemoryPrediction(setup, strategy).largest_batch(GPU_BYTES)
        section.add(f"{arch}, {name}: largest batch", images, published_number("inplace_abn", f"section4.1/{key}"))
    return section
