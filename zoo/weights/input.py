"""Makes the first convolution of a weights file, trained on red, green and blue, fit for images of other channels."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from zoo.models import Network


def fit_input(state_dict: Mapping[str, Tensor], model: nn.Module) -> tuple[Mapping[str, Tensor], int]:
    """Return the state dict with first filters for the channels that the network reads, and their number.

    Filters of three channels are summed for one channel, so that grey images give what their copies in red, green and
    blue would; for other numbers they are repeated and scaled by 3 / channels, so that the sum over equal channels
    stays. A state dict that has the network's number of channels already is returned as it is, with 3.
    """
    in_chans = model.in_chans if isinstance(model, Network) else 3
    key = model.input_weight() if isinstance(model, Network) and in_chans != 3 else ""
    weight = state_dict.get(key)
    if weight is None or weight.ndim != 4 or weight.shape[1] != 3:
        return state_dict, 3
    if in_chans == 1:
        fitted = weight.sum(1, keepdim=True)
    else:
        fitted = weight.repeat(1, -(-in_chans // 3), 1, 1)[:, :in_chans] * (3 / in_chans)
    return {**state_dict, key: fitted.to(weight.dtype)}, in_chans
