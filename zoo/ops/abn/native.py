"""Not here yet."""


def why_not() -> str | None:
    """Return why these kernels are off."""
    return "not built"
