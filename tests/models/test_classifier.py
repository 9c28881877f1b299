"""The classifier of a network: the last layer of conventional submodules; tests/engine/test_optim.py has its uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.models.classifier import classifier_parameters


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("name", ["fc", "classifier", "heads", "head"])
def test_head_without_linear_layer_is_classifier_itself(name: str) -> None:
    model = nn.Sequential()
    model.add_module(name, _Scale())
    (found,) = classifier_parameters(model)
    assert found is model.get_submodule(name).scale


def test_get_classifier_without_layer_means_no_classifier() -> None:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 2))
    for answer in (None, nn.Identity(), ()):
        model.get_classifier = lambda answer=answer: answer  # type: ignore[assignment]
        assert classifier_parameters(model) == []
