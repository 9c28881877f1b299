"""Costs of reconstruction besides memory (Hascoet et al. 2023, sections 3.4 to 4.4): forward passes and weights."""

from __future__ import annotations

from typing import Any

from zoo.layers.invertible import InvertibleConv, LayerwiseBlock
from zoo.reproduce.comparison import Comparison, Section, Verdict, not_measured
from zoo.reproduce.operations import CIFAR_SIZE, COUNTED_BATCH, count_operations
from zoo.reproduce.paper_networks import build_revnext
from zoo.reproduce.published_numbers import published

PASSES = {"revnext_revnet": "section3.4/passes", "revnext_flat": "section4.3/passes", "revnext": "section4.4/passes"}


def measure_passes() -> Section:
    """Return the forward passes that backward reruns, and the layers of a reversible block."""
    section = Section(
        "passes", "Sections 3.4, 4.3 and 4.4: additional forward passes in backward",
        "Operations of convolutions that a backward pass reruns, relative to those of the forward pass, for "
        f"{COUNTED_BATCH} images of {CIFAR_SIZE} pixels. The stems of revnext and revnext_flat are not rerun. Without "
        "the additional passes, a step takes three forward passes.",
    )  # fmt: skip
    for name, key in PASSES.items():
        section.add(name, additional_passes(name), published("revnext", key))
    section.comparisons.append(_compare_layers_of_a_block())
    return section


def additional_passes(name: str) -> float:
    """Return the operations that backward reruns, relative to those of forward."""
    auto, plain = (build_revnext(name, device="meta", memory=memory) for memory in ("auto", "plain"))
    (forward, backward), (_, stored_backward) = count_operations(auto), count_operations(plain)
    return (backward - stored_backward) / forward


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
    section.add("channels of the last level", channels, published("revnext", "section3.5/channels"))
    kernel = published("revnext", "section3.5/kernel")
    section.add("weights of a 3x3 convolution of all of them", channels**2 * 9 / 1e6, kernel)
    section.notes.append(
        "the convolutions of a branch have half of the channels and therefore a quarter of these weights"
    )
    return section
