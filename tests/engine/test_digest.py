"""The digest of a training state depends on every bit of it, and two states are compared by name."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from zoo.engine._digest import differences, digest, state_tensors


def _content() -> dict[str, Any]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    content = {"state_dict": network.state_dict(), "optimizer": optimizer.state_dict(), "ema": None, "epoch": 1}
    return copy.deepcopy(content)


def test_weights_buffers_optimizer_and_average_have_names() -> None:
    names = list(state_tensors({**_content(), "ema": {"0.bias": torch.ones(4)}}))
    assert names == sorted(names)
    assert {"0.weight", "1.running_var", "1.num_batches_tracked", "ema.0.bias", "optimizer.3.exp_avg"} <= set(names)
    assert list(state_tensors({"state_dict": {"b": torch.ones(1), "a": torch.ones(1)}})) == ["a", "b"]


def test_digest_is_sha256_of_names_dtypes_shapes_and_values() -> None:
    tensors = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3)}
    text = b"a torch.float32 (1, 2)\n" + tensors["a"].numpy().tobytes() + b"b torch.int64 ()\n" + bytes([3] + 7 * [0])
    assert digest(tensors) == hashlib.sha256(text).hexdigest()
    layouts = [{"x": x} for x in (torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4, 3).permute(0, 3, 1, 2))]
    assert digest(layouts[0]) == digest(layouts[1])


@pytest.mark.parametrize("name", list(state_tensors(_content())))
def test_one_changed_bit_changes_digest_and_is_named(name: str) -> None:
    first, second = (state_tensors(_content()) for _ in range(2))
    assert digest(first) == digest(second)
    assert list(differences(first, second)) == []
    second[name].view(-1).view(torch.uint8)[0] ^= 1
    assert digest(first) != digest(second)
    ((differing, what),) = differences(first, second)
    assert differing == name
    assert what.startswith(f"1 of {first[name].numel()} values, by up to ")


def test_differences_are_described() -> None:
    zeros = torch.zeros(1, 1200)
    first = {"a": torch.tensor([1.0, 2.0]), "b": zeros, "c": torch.tensor(0.0), "d": zeros, "e": torch.ones(2)}
    second = {"a": torch.tensor([1.5, 4.0]), "c": torch.tensor(-0.0), "d": zeros.half(), "e": torch.ones(2), "f": zeros}
    assert list(differences(first, second)) == [
        ("a", "2 of 2 values, by up to 2"),
        ("b", "only in the first"),
        ("c", "0 of 1 values, by up to 0"),
        ("d", "torch.float32 of shape (1, 1200) and torch.float16 of shape (1, 1200)"),
        ("f", "only in the second"),
    ]
