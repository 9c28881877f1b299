"""The synchronized norm on 2 and 3 uneven processes against one process that holds the whole batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zoo
from tests.dist.spawn import run_distributed
from tests.formula import activated_batch_norm, relative_error
from zoo.layers import ABN, InPlaceABNSync, active_group, freeze_norms, set_active_group

pytestmark = pytest.mark.dist

# The batch sizes of the ranks (unequal, a single value, an empty rank, an empty first rank) and the momentum.
SPLITS = [
    pytest.param((1, 5), 0.1, marks=pytest.mark.smoke),
    ((4, 0), None),
    ((0, 3, 2), 0.1),
    ((2, 1, 4), None),
    ((1, 1, 1), 0.1),
]


def _data(batch: int, spatial: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, *spatial, generator=generator, dtype=torch.float64) * 3 + 100
    dz = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weight = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    return x, dz, weight, torch.randn(3, generator=generator, dtype=torch.float64)


def _sync_step(sizes: tuple[int, ...], spatial: tuple[int, ...], momentum: float | None) -> dict[str, torch.Tensor]:
    x, dz, weight, bias = _data(sum(sizes), spatial)
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    layer = InPlaceABNSync(3, momentum=momentum).double()
    layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
    leaf = x[rows].clone().requires_grad_()
    z = layer(leaf * 1)
    z.backward(dz[rows])
    return {
        "z": z.detach(),
        "dx": leaf.grad,
        "dweight": layer.weight.grad,
        "dbias": layer.bias.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
    }


@pytest.mark.parametrize(("sizes", "momentum"), SPLITS)
def test_uneven_processes_equal_one_process(sizes, momentum):
    spatial = (1, 1) if sizes == (1, 1, 1) else (5, 2)
    results = run_distributed(_sync_step, len(sizes), sizes, spatial, momentum)
    x, dz, weight, bias = _data(sum(sizes), spatial)
    leaf, w, b = (t.clone().requires_grad_() for t in (x, weight, bias))
    truth = activated_batch_norm(leaf, w, b)
    truth.backward(dz)
    assert relative_error(torch.cat([r["z"] for r in results]), truth.detach()) < 1e-9
    assert relative_error(torch.cat([r["dx"] for r in results]), leaf.grad) < 1e-9
    # local sums, which DistributedDataParallel averages like all gradients of parameters
    assert relative_error(sum(r["dweight"] for r in results), w.grad) < 1e-9
    assert relative_error(sum(r["dbias"] for r in results), b.grad) < 1e-9
    twin = ABN(3, momentum=momentum).double()
    twin(x)
    for result in results:
        assert torch.allclose(result["running_mean"], twin.running_mean, rtol=1e-12)
        assert torch.allclose(result["running_var"], twin.running_var, rtol=1e-12)


def _sync_on_one_value(sizes: tuple[int, ...]) -> str:
    try:
        InPlaceABNSync(3)(torch.randn(sizes[dist.get_rank()], 3, 1, 1))
    except ValueError as error:
        return str(error)
    return "no error"


def test_too_few_values_over_the_whole_group_raise_on_every_rank():
    for message in run_distributed(_sync_on_one_value, 2, (1, 0)):
        assert "more than 1 value per channel, got 1" in message
    assert run_distributed(_sync_on_one_value, 2, (1, 1)) == ["no error"] * 2


def _groups() -> tuple[list[bool], list[float]]:
    """Return whether groups are as expected, and running means of a layer and its copy on the ranks 1 and 2."""
    rank = dist.get_rank()
    group = active_group(rank > 0)
    layer = nn.Sequential(InPlaceABNSync(2, activation="identity"))
    set_active_group(layer, group)
    clone, pickled = copy.deepcopy(layer)[0], pickle.loads(pickle.dumps(layer))[0]
    found = [
        active_group(rank > 0) is group,
        active_group(False) is None,
        active_group(True) is dist.group.WORLD,
        clone.group is group,
        pickled.group is None,
    ]
    if rank > 0:
        for each in (layer[0], clone):
            each(torch.full((2, 2, 1, 1), float(rank)))
    dist.barrier()
    return found, [each.running_mean[0].item() for each in (layer[0], clone)]


def test_active_processes_are_synchronized_in_deep_copies_too():
    results = run_distributed(_groups, 3)
    assert all(all(found) for found, _ in results)
    means = [[0.0] * 2, [0.15] * 2, [0.15] * 2]  # momentum 0.1 times the mean of 1 and 2
    assert [[round(mean, 6) for mean in of_rank] for _, of_rank in results] == means


def _frozen_and_features_under_ddp() -> bool:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    frozen = zoo.get("resnet18", norm="sync", num_classes=3)
    freeze_norms(frozen)
    features = zoo.get("densenet121", norm="sync", features_only=True)
    for network in (frozen, features):
        model = nn.parallel.DistributedDataParallel(network)
        for _ in range(2):  # in the second step DDP reports gradients that were missing in the first
            out = model(x)
            sum(o.square().mean() for o in (out if isinstance(out, list) else [out])).backward()
    return all(p.grad is not None for n in (frozen, features) for p in n.parameters() if p.requires_grad)


def test_frozen_norms_and_feature_networks_train_under_ddp():
    assert run_distributed(_frozen_and_features_under_ddp, 2) == [True, True]


def test_layer_is_unsynchronized_without_process_group():
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    assert (
        relative_error(InPlaceABNSync(3).double()(x.clone()), activated_batch_norm(x, torch.ones(3).double(), None))
        < 1e-12
    )
