"""Sections 3.4 to 4.4 of Hascoet et al. 2023: additional forward passes of a step, and the size of a kernel."""

from __future__ import annotations

from typing import Any

import torch

from zoo.layers.conv import conv2d
from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.measurements import measures
from zoo.reproduce.paper_networks import build_revnext, count_parameters
from zoo.reproduce.published_numbers import published_number
from zoo.reproduce.revnet_table1 import count_operations

# Networks of Table 1 that recompute in backward, and the sections that state how much.
RECOMPUTING = {"revnext_revnet": "section3.4", "revnext_flat": "section4.3", "revnext": "section4.4"}


@measures("revnext", "Section 3.5")
def count_kernel() -> ReportSection:
    """Return the parameters of a 3x3 kernel of all channels of the i-RevNet's last level (section 3.5)."""
    section = ReportSection("section3.5", "Section 3.5: parameters of a kernel after three channel pools")
    network: Any = build_revnext("irevnet_revnext", device="meta")
    channels = network.num_features
    with torch.device("meta"):
        kernel = conv2d(channels, channels, 3)
    number = published_number("revnext", "section3.5/kernel")
    section.add(f"3x3 kernel of {channels} channels", count_parameters(kernel) / 1e6, number)
    return section


@measures("revnext", "Section 4.4")
def count_additional_passes() -> ReportSection:
    """Return the operations that backward recomputes (sections 3.4, 4.3 and 4.4), in forward passes of the network.

    Computed as the operations of the backward pass minus the operations of the same network with stored activations.
    """
    section = ReportSection("section4.4", "Sections 3.4, 4.3 and 4.4: additional forward passes of a step")
    for name, place in RECOMPUTING.items():
        forward, backward = count_operations(build_revnext(name, device="meta"))
        _, stored = count_operations(build_revnext(name, device="meta", memory="plain"))
        number = published_number("revnext", f"{place}/additional_passes")
        section.add(f"{name}: additional forward passes", (backward - stored) / forward, number)
    return section
