"""The back end that computes the kernels: chosen once, at import."""

from __future__ import annotations

from zoo.ops.abn import reference as kernels

__all__ = ["describe", "kernels"]


def describe() -> dict[str, str]:
    """Return, per back end, whether it is active and, where it is not, why."""
    return {
        "reference": "active on every device: plain torch operations",
        "native": "off: this version has no compiled CPU kernels",
        "triton": "off: this version has no Triton kernels",
    }
