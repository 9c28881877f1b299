"""Running statistics that are estimated again are the plain average over batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.data.folder import Batch
from zoo.engine.reestimate import reestimate_statistics
from zoo.layers import ABN, InPlaceABN
from zoo.layers.norm import freeze_norms


def _batches(*sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(size, 3, 4, 4, generator=generator) * 2 + 1 for size in sizes]
    return [Batch(batch, torch.zeros(len(batch), dtype=torch.int64), []) for batch in images]


@pytest.mark.parametrize("layer", [ABN, InPlaceABN, nn.BatchNorm2d])
def test_statistics_are_the_average_over_the_batches_of_two_or_more_images(layer: type[nn.Module]) -> None:
    norm = layer(3, momentum=0.25)
    norm.running_mean.fill_(7.0)
    model = nn.Sequential(nn.Dropout(0.9), nn.Conv2d(3, 3, 1, bias=False), norm)
    nn.init.dirac_(model[1].weight)
    batches = _batches(4, 1, 2, 8)
    assert reestimate_statistics(model, batches, 2) == 2
    used = [batches[0].images, batches[2].images]
    mean = torch.stack([images.mean(dim=(0, 2, 3)) for images in used]).mean(dim=0)
    var = torch.stack([images.transpose(0, 1).flatten(1).var(dim=1) for images in used]).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)
    assert (norm.num_batches_tracked, norm.momentum, model.training) == (2, 0.25, False)
    assert not any(part.training for part in model.modules())


def test_fewer_batches_are_counted_and_frozen_norms_keep_their_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), ABN(3), ABN(3))
    model[2].running_mean.fill_(7.0)
    freeze_norms(model[2])
    assert reestimate_statistics(model, _batches(2, 2), 5) == 2
    assert model[1].num_batches_tracked == 2
    assert model[2].running_mean.tolist() == [7.0] * 3
    assert reestimate_statistics(model, _batches(1), 5) == 0
