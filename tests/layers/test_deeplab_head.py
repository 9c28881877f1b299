"""The head of DeepLabV3: published keys and initialization, and agreement with the head as the paper draws it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dist.spawn import run_distributed
from tests.formula import activated_batch_norm, relative_error
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.layers import DeeplabV3, freeze_norms, norm_act

NORMS = ["standard", "inplace"]


def build_head(norm: str = "standard", pooling_size=None, seed: int = 0) -> DeeplabV3:
    """Return a small float64 head whose norms have random scales, shifts and running statistics."""
    torch.manual_seed(seed)
    head = DeeplabV3(6, 5, 4, (2, 3, 4), norm_act(norm), pooling_size).double()
    for name, tensor in head.state_dict().items():
        if "_bn." in name and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return head


def paper_head(x: Tensor, head: DeeplabV3, norm: str, training: bool, dilations=(2, 3, 4)) -> Tensor:
    """Return the head as the paper draws it: five branches, concatenated, and one convolution that reduces them.

    The mean is taken over the whole map, and in evaluation over a window of ``pooling_size`` at each position.
    """
    parameters = dict((*head.named_parameters(), *head.named_buffers()))

    def normed(x: Tensor, name: str, channels: slice = slice(None)) -> Tensor:
        running = [parameters[f"{name}.{key}"][channels] for key in ("running_mean", "running_var")]
        weight, bias = (parameters[f"{name}.{key}"][channels] for key in ("weight", "bias"))
        statistics = None if training else tuple(running)
        return activated_batch_norm(x, weight, bias, statistics=statistics, signed=norm == "standard")

    branches = []
    for index, dilation in enumerate((1, *dilations)):
        padding = 0 if index == 0 else dilation
        y = F.conv2d(x, parameters[f"map_convs.{index}.weight"], padding=padding, dilation=dilation)
        hidden = y.shape[1]
        branches.append(normed(y, "map_bn", slice(hidden * index, hidden * (index + 1))))
    means = F.conv2d(windows(x, None if training else head.pooling_size), parameters["global_pooling_conv.weight"])
    branches.append(normed(means, "global_pooling_bn").expand(-1, -1, *x.shape[2:]))
    weight = torch.cat([parameters["red_conv.weight"], parameters["pool_red_conv.weight"]], dim=1)
    return normed(F.conv2d(torch.cat(branches, dim=1), weight), "red_bn")


def windows(x: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Return the mean of the window at each place: the padded ``avg_pool2d`` of the published description."""
    if size is None:
        return x.mean((2, 3), keepdim=True)
    rows, columns = min(size[0], x.shape[2]), min(size[1], x.shape[3])
    before = ((rows - 1) // 2, (columns - 1) // 2)
    after = tuple(k if size % 2 else k + 1 for k, size in zip(before, (rows, columns), strict=True))
    return F.pad(F.avg_pool2d(x, (rows, columns), stride=1), (before[1], after[1], before[0], after[0]), "replicate")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("training", "pooling_size"), [(True, None), (True, (4, 5)), (False, None), (False, (4, 5)), (False, (5, 4))]
)
def test_head_and_its_gradients_follow_figure_of_paper(norm, training, pooling_size) -> None:
    head = build_head(norm, pooling_size).train(training)
    before = [buffer.clone() for buffer in head.buffers()]
    x = torch.randn(3, 6, 7, 9, dtype=torch.float64, requires_grad=True)
    truth = paper_head(x, head, norm, training)
    dz = torch.randn_like(truth)
    leaves = [x, *head.parameters()]
    expected = torch.autograd.grad(truth, leaves, dz)
    actual = head(x * 1)
    assert relative_error(actual, truth) < 1e-12
    for ours, theirs in zip(torch.autograd.grad(actual, leaves, dz), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-10
    assert training != all(map(torch.equal, head.buffers(), before))


@pytest.mark.parametrize("pooling_size", [5, [5, 5], (6, 3), (7, 9), (84, 84), (84, 2)])
def test_evaluation_pools_over_padded_window_even_on_smaller_maps(pooling_size) -> None:
    head = build_head(pooling_size=pooling_size).eval()
    x = torch.randn(2, 6, 7, 9, dtype=torch.float64)
    both = (pooling_size, pooling_size) if isinstance(pooling_size, int) else tuple(pooling_size)
    truth = head.global_pooling_bn(head.global_pooling_conv(windows(x, both)))
    with torch.no_grad():
        maps = head.red_conv(head.map_bn(torch.cat([conv(x) for conv in head.map_convs], dim=1)))
        assert relative_error(head(x), head.red_bn(maps + head.pool_red_conv(truth))) < 1e-13
        covered = head(x[:, :, : both[0], : both[1]])
        head.pooling_size = None
        assert relative_error(covered, head(x[:, :, : both[0], : both[1]])) < 1e-13


def test_keys_and_parameters_equal_published_ones() -> None:
    with torch.device("meta"):
        head = DeeplabV3(4096, 256, pooling_size=(84, 84))
        assert sum(p.numel() for p in DeeplabV3(2048, 256).parameters()) == 15_535_104
    assert sum(p.numel() for p in head.parameters()) == 30_739_456
    assert len(head.state_dict()) == 22
    assert {key: tuple(tensor.shape) for key, tensor in head.named_parameters() if tensor.dim() > 1} == {
        "map_convs.0.weight": (256, 4096, 1, 1),
        **{f"map_convs.{index}.weight": (256, 4096, 3, 3) for index in (1, 2, 3)},
        "red_conv.weight": (256, 1024, 1, 1),
        "global_pooling_conv.weight": (256, 4096, 1, 1),
        "pool_red_conv.weight": (256, 256, 1, 1),
    }
    norms = {key.partition(".")[0]: len(tensor) for key, tensor in head.named_buffers() if key.endswith("running_var")}
    assert norms == {"map_bn": 1024, "global_pooling_bn": 256, "red_bn": 256}
    assert [conv.dilation[0] for conv in head.map_convs] == [1, 12, 24, 36]


@pytest.mark.parametrize("norm", [*NORMS, "sync"])
def test_single_crop_raises_unless_norms_are_frozen(norm) -> None:
    head, x = build_head(norm), torch.randn(1, 6, 7, 9, dtype=torch.float64)
    before = [buffer.clone() for buffer in head.buffers()]
    refused(ConfigError, lambda: head(x), 'norm="sync"', "freeze_norms")
    assert all(map(torch.equal, head.buffers(), before))
    freeze_norms(head)
    head.train()(x).sum().backward()
    assert head.pool_red_conv.weight.grad.abs().sum() > 0


def _train_with_one_crop() -> dict[str, Tensor]:
    head, (x, dz) = build_head("sync"), _crops()
    rank = slice(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
    leaf = x[rank].clone().requires_grad_()
    z = head(leaf * 1)
    z.backward(dz[rank])
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    return {"z": z.detach(), "dx": leaf.grad, **gradients, **dict(head.named_buffers())}


def _crops() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 6, 7, 9, dtype=torch.float64), torch.randn(2, 5, 7, 9, dtype=torch.float64)


def test_synchronized_norms_allow_one_crop_per_process() -> None:
    first, second = run_distributed(_train_with_one_crop, 2)
    head, (x, dz) = build_head("inplace"), _crops()
    x.requires_grad_()
    z = head(x * 1)
    z.backward(dz)
    assert relative_error(torch.cat([first["z"], second["z"]]), z.detach()) < 1e-12
    assert relative_error(torch.cat([first["dx"], second["dx"]]), x.grad) < 1e-10
    for name, parameter in head.named_parameters():
        assert relative_error(first[name] + second[name], parameter.grad) < 1e-10
    for name, buffer in head.named_buffers():
        assert relative_error(first[name], buffer) < 1e-12
        assert torch.equal(first[name], second[name])
