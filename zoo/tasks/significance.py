"""Standard errors of scores."""

from __future__ import annotations

import math


def standard_error(percent: float, count: int) -> float:
    """Return the binomial standard error, in percentage points, of ``percent`` of ``count`` independent images.

    It is 0, and meaningless, at 0 and 100 percent.
    """
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / count)
