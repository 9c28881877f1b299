"""Small networks of every family, built by `zoo.get` from the blocks of the large networks, and training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo.config.architectures import ARCHITECTURES
from zoo.models import wider_resnet

#: What replaces the fixed arguments of an architecture: both kinds of blocks, stages that keep and change the shape.
STRUCTURES: dict[str, dict[str, Any]] = {
    "resnet18": {"structure": (2, 1, 1, 1)},
    "resnet50": {"structure": (2, 1, 1, 1)},
    "resnext50": {"structure": (2, 2, 1, 1)},
    "wider_resnet16": {"structure": (2, 1, 2, 1, 1, 1)},
    "wider_resnet16_a2": {"structure": (2, 1, 2, 1, 1, 1)},
    "densenet121": {"structure": (2, 2, 3, 1)},
    "resnet32_cifar": {"structure": (2, 3, 1), "widths": (8, 8, 12, 24)},
    "resnet164_cifar": {"structure": (2, 1, 2), "widths": (8, 8, 8, 16)},
    "resnet101_preact": {"structure": (2, 2, 1, 2), "widths": (8, 8, 8, 16, 8)},
    "revnet38_cifar": {"structure": (2, 3, 1), "widths": (8, 8, 12, 24)},
    "revnet164_cifar": {"structure": (2, 1, 2), "widths": (8, 8, 8, 16)},
    "revnet56": {"structure": (2, 2, 1, 2), "widths": (8, 8, 8, 16, 8)},
    "irevnet_cifar": {},
    "irevnet_revnext": {"blocks": (2, 1), "channels": 8},
    "revnext": {},
    "revnext_flat": {},
    "revnext_resnet18": {"channels": 8},
    "revnext_revnet": {"channels": 8},
    "revvit_s": {"structure": (3,), "width": 16, "heads": 2, "patch": 4, "image_size": 32},
    "revbifpn_s0": {"channels": (48, 16, 16, 16), "head_channels": (16,) * 4, "features": 24, "extra_stages": 0},
    "revcol_tiny": {"structure": (1, 2, 1, 1), "channels": (8, 16, 24, 32), "columns": 5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "irevnet_cifar": {"blocks": [2, 2], "width": 4, "dropout": 0.1},
    "revnext": {"channels": 8},
    "revnext_flat": {"channels": 8, "layers": [2, 1, 2]},
}
CLASSIFIERS = list(STRUCTURES)
SEGMENTERS = ["deeplab_densenet121", "pyramid_revbifpn_s0"]
#: The channels of a small WiderResNet.
THIN = ((4, 4), (4, 8), (8, 12), (8, 16), (4, 8, 20), (4, 8, 24))


def has_option(arch: str, option: str) -> bool:
    return option in ARCHITECTURES[arch].options.model_fields


def strategies(arch: str) -> list[str]:
    """Return the memory strategies of a network but "plain" and "lean"."""
    return [memory for memory in ARCHITECTURES[arch].memory if memory not in ("plain", "lean")]


@contextmanager
def small_architectures(**changes: Mapping[str, Any]) -> Iterator[None]:
    """Let `zoo.get` build small networks; ``changes`` replace fixed arguments of an architecture."""
    with pytest.MonkeyPatch.context() as patch:
        for arch, small in STRUCTURES.items():
            record = ARCHITECTURES[arch]
            structure = {**record.structure, **small, **changes.get(arch, {})}
            patch.setitem(ARCHITECTURES, arch, replace(record, structure=structure))
        patch.setattr(wider_resnet, "CHANNELS", THIN)
        yield


def build(arch: str, *, noise: float = 0.0, structure: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Return a small network with the same random weights in each call.

    All parameters, also of norms and biases, are moved by ``noise``; ``structure`` replaces fixed arguments.
    """
    torch.manual_seed(0)
    with small_architectures(**{arch: structure or {}}):
        classes = {} if arguments.get("features_only") else {"num_classes": 5}
        model = zoo.get(arch, **{**classes, **OPTIONS.get(arch, {}), **arguments})
    if noise:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def images(number: int = 3, side: int = 32, dtype: torch.dtype = torch.float32, channels: int = 3) -> Tensor:
    return torch.randn(number, channels, side, side, dtype=dtype, generator=torch.Generator().manual_seed(2))


def train(
    model: nn.Module,
    steps: int = 2,
    *,
    autocast: bool = False,
    batches: int = 1,
    layout: torch.memory_format = torch.contiguous_format,
    side: int = 16,
) -> dict[str, Tensor]:
    """Return the losses, the last gradients, the weights and the buffers of a few steps of SGD, by their names."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(batches):
            x = torch.randn(4, 3, side, side).to(memory_format=layout)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(x).float()
            loss = F.cross_entropy(logits, torch.arange(4)) if logits.dim() == 2 else logits.square().mean()
            (loss / batches).backward()
            losses.append(loss.detach())
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), **gradients, **model.state_dict()}


def differing(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose bits differ."""
    assert ours.keys() == truth.keys()
    return [name for name in truth if ours[name].numpy().tobytes() != truth[name].numpy().tobytes()]
