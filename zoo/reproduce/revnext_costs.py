"""Costs of reconstruction besides memory (Hascoet et al. 2023, sections 3.4 to 4.4): forward passes and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.layers.invertible import InvertibleConv, LayerwiseBlock
from zoo.reproduce.comparison import Comparison, Section, Verdict, not_measured
from zoo.reproduce.paper_networks import build_revnext, forward_of
from zoo.reproduce.published_numbers import published
from zoo.torch_internals import TorchDispatchMode

BATCH, SIZE = 8, 32
PASSES = {"revnext_revnet": "section3.4/passes", "revnext_flat": "section4.3/passes", "revnext": "section4.4/passes"}


def measure_passes() -> Section:
    """Return the forward passes that backward reruns, and the layers of a reversible block."""
    section = Section(
        "passes", "Sections 3.4, 4.3 and 4.4: additional forward passes in backward",
        "Multiplications of all convolutions that a backward pass reruns, relative to those of the forward pass, for "
        f"{BATCH} images of {SIZE} pixels. The stems of revnext and revnext_flat are not rerun. Without the additional "
        "passes, a step takes three forward passes.",
    )  # fmt: skip
    section.comparisons += [
        *(_compare_passes(name) for name in PASSES),
        _compare_layers_of_a_block(),
    ]
    return section


def _compare_passes(name: str) -> Comparison:
    return Comparison(what=name, published=published("revnext", PASSES[name]), measured=additional_passes(name))


class _Multiplications(TorchDispatchMode):
    """Counts the multiplications of convolutions in ``count``, without those of their gradients."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.convolution.default:
            self.count += result.numel() * args[1][0].numel()
        return result


def additional_passes(name: str, **options: Any) -> float:
    """Return the ratio of the multiplications of forward convolutions in backward and in forward."""
    model = build_revnext(name, device="meta", **options)
    forward = forward_of(model, BATCH, SIZE)
    with _Multiplications() as multiplications:
        loss = forward()
        in_forward = multiplications.count
        loss.backward()
    return (multiplications.count - in_forward) / in_forward


def _compare_layers_of_a_block() -> Comparison:
    """Return the mean number of convolutions in both branches of a reversible block."""
    blocks = [module for module in build_revnext("revnext").modules() if isinstance(module, LayerwiseBlock)]
    layers = [layer for block in blocks for layer in block.modules() if isinstance(layer, InvertibleConv)]
    count = len(layers) / len(blocks)
    number = published("revnext", "section4.4/layers_per_block")
    text = f"it depends on the depths in Table 1, which no text available to us has; ours has {count:g} convolutions"
    return not_measured(number.quantity, number, "", Verdict("not available", text))


def measure_widths() -> Section:
    """Return the channels after the pools of the i-RevNet, and the weights of a convolution of all of them."""
    section = Section("widths", "Section 3.5: channels of the i-RevNet", "Read from the network irevnet_revnext.")
    model: Any = build_revnext("irevnet_revnext", device="meta")
    channels = model.num_features
    found = {"channels": ("channels of the last level", channels, ""),
             "kernel": ("weights of a 3x3 convolution of all of them", channels**2 * 9 / 1e6, "million")}  # fmt: skip
    section.comparisons = [
        Comparison(what=what, published=published("revnext", f"section3.5/{key}"), measured=value, unit=unit)
        for key, (what, value, unit) in found.items()
    ]
    section.notes.append(
        "the convolutions of a branch have half of the channels and therefore a quarter of these weights"
    )
    return section
