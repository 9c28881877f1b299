"""Networks on a grid: training that reconstructs activations has the bits of training that stores them."""

from __future__ import annotations

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.dist.spawn import run_distributed
from tests.layers.test_reversible import branch
from zoo.config.architectures import ARCHITECTURES
from zoo.config.parse import parse_experiment
from zoo.engine.reconstruction import reconstruction_errors
from zoo.layers import ABN, InPlaceABN, ReversibleBlock, ReversibleSequential, init_weights
from zoo.layers.norm import norm_act
from zoo.layers.reversible import PairPool
from zoo.models.build import build_on_meta
from zoo.models.revnet import RevNet
from zoo.ops.grid import round_to_grid

pytestmark = pytest.mark.usefixtures("small_baselines")

NORMS = {"standard": "relu", "inplace": "leaky_relu"}
ACTIVATIONS = {**NORMS, "sync": "leaky_relu"}
SMALL = {"structure": (3, 3, 2), "widths": (8, 8, 12, 24), "bottleneck": False}
IREVNET = {"blocks": [2, 2], "width": 4, "dropout": 0.2}


def build(name: str, memory: str, norm: str = "standard", grid_bits: int | None = 14) -> nn.Module:
    """Return a small network with the same weights in each call."""
    torch.manual_seed(0)
    if name == "revnet":
        model: nn.Module = RevNet(norm_act(norm, ACTIVATIONS[norm]), 5, **SMALL, memory=memory, grid_bits=grid_bits)
    else:
        options = IREVNET if name == "irevnet_cifar" else {}
        return zoo.get(name, num_classes=5, memory=memory, norm=norm, grid_bits=grid_bits, **options)
    init_weights(model, "truncated_normal")
    return model


def train(
    model: nn.Module,
    steps: int = 2,
    autocast: bool = False,
    batches: int = 1,
    layout: torch.memory_format = torch.contiguous_format,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Return the losses, the last gradients, the weights and the buffers of a few steps of SGD."""
    torch.manual_seed(seed)
    model = model.to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(batches):
            images = torch.randn(4, 3, 16, 16).to(memory_format=layout)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(images).float(), torch.arange(4))
            (loss / batches).backward()
            losses.append(loss.detach())
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **gradients, **model.state_dict()}


def differing(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose bits differ."""
    assert ours.keys() == truth.keys()
    return [name for name in truth if ours[name].numpy().tobytes() != truth[name].numpy().tobytes()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["revnet", "irevnet_cifar"])
def test_training_has_bits_of_stored_activations(name, norm, autocast):
    ours, truth = (train(build(name, memory, norm), autocast=autocast) for memory in ("auto", "plain"))
    assert len(truth) > 50
    assert not differing(ours, truth)


def test_first_block_of_irevnet_gets_noise_without_grid():
    """Its branch reads channels of zeros, whose reconstruction error the norms of the branch divide by sqrt(eps)."""
    of_first_block = {}
    for memory, bits in (("plain", None), ("auto", None), ("auto", 14)):
        torch.manual_seed(0)
        model = zoo.get("irevnet_cifar", memory=memory, grid_bits=bits, blocks=[6])
        gradients = train(model, steps=1)
        of_first_block[memory, bits] = gradients["gradient of level0.0.branch.conv1.weight"].norm()
    assert of_first_block["plain", None] == of_first_block["auto", 14] == 0
    assert of_first_block["auto", None] > 0.01


def _train_distributed(memory: str) -> dict[str, Tensor]:
    model = build("revnet", memory, "sync")
    return train(DistributedDataParallel(model), seed=1 + torch.distributed.get_rank())


@pytest.mark.dist
def test_statistics_and_gradients_over_processes_have_bits_too():
    for ours, truth in zip(
        *(run_distributed(_train_distributed, 2, memory) for memory in ("auto", "plain")), strict=True
    ):
        assert not differing(ours, truth)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("irevnet_revnext", {}),
        ("revnext_revnet", {}),
        *((name, {"batches": 3}) for name in ("revnet", "irevnet_cifar", "irevnet_revnext")),
        *((name, {"layout": torch.channels_last}) for name in ("revnet", "irevnet_cifar", "irevnet_revnext")),
    ],
    ids=str,
)
def test_baselines_accumulation_and_channels_last_have_bits_too(name, how):
    ours, truth = (train(build(name, memory), **how) for memory in ("auto", "plain"))
    assert not differing(ours, truth)


def test_without_grid_bits_differ():
    """The tests above can fail."""
    ours, truth = (train(build("revnet", memory, grid_bits=None)) for memory in ("auto", "plain"))
    assert torch.equal(ours["losses"][0], truth["losses"][0])
    assert len(differing(ours, truth)) > 20


@pytest.mark.parametrize("norm", [ABN, InPlaceABN])
def test_dropout_in_branches_of_chain_has_bits_too(norm):
    results = []
    for store in (False, True):
        torch.manual_seed(0)
        blocks = [ReversibleBlock(branch(4, norm, dropout=0.3), branch(4, norm, dropout=0.3)) for _ in range(3)]
        chain = ReversibleSequential([*blocks, PairPool(), ReversibleBlock(branch(16, norm), branch(16, norm))])
        chain = ReversibleSequential(chain, store=store, grid_bits=12)
        init_weights(chain)
        head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), chain, nn.Conv2d(32, 5, 8), nn.Flatten())
        results.append(train(head))
    assert not differing(*results)


@pytest.mark.parametrize("name", ["revnet", "irevnet_cifar"])
def test_evaluation_is_on_grid_too(name):
    images = torch.randn(4, 3, 16, 16)
    on_grid, stored, without = (
        build(name, memory, grid_bits=bits).eval() for memory, bits in (("auto", 6), ("plain", 6), ("auto", None))
    )
    seen = []
    for chain in [module for module in on_grid.modules() if isinstance(module, ReversibleSequential)]:
        chain.register_forward_hook(lambda module, args, y: seen.append(y * 2**6))
    with torch.no_grad():
        found, expected, other = on_grid(images), stored(images), without(images)
    assert torch.equal(found, expected)
    assert 0 < (found - other).abs().max() < 0.1
    assert len(seen) >= 2
    assert all(torch.equal(y, y.round()) for y in seen)


@pytest.mark.parametrize("name", ["revnet", "irevnet_cifar"])
def test_meter_of_reconstruction_finds_no_error(name):
    for bits, has_error in ((14, False), (None, True)):
        model = build(name, "auto", grid_bits=bits)
        with reconstruction_errors(model) as errors:
            train(model, steps=1)
        assert len(errors) == {"revnet": 6, "irevnet_cifar": 4}[name]
        assert any(errors.values()) == has_error


@pytest.mark.parametrize("name", ["revnet", "irevnet_cifar"])
def test_traced_network_is_on_grid_too(name):
    model = build(name, "auto", grid_bits=6).eval()
    traced, images = torch.fx.symbolic_trace(model), torch.randn(2, 3, 16, 16)
    assert torch.equal(traced(images), model(images))
    assert sum(node.target is round_to_grid for node in traced.graph.nodes) > 5


def test_inverse_returns_bits_of_input_on_grid():
    chain = build("revnet", "auto").mod2.chain
    x = torch.randint(-9999, 9999, (4, 8, 6, 6)) / 2**14
    assert torch.equal(chain.inverse(chain(x)), x)


def test_gradients_treat_derivative_of_rounding_as_one():
    """The straight-through gradient, written with a detached difference, of autograd in float64."""
    torch.manual_seed(0)
    chain = ReversibleSequential(
        (ReversibleBlock(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in "fg")) for _ in range(3)), grid_bits=5
    ).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)

    def on_grid(t: Tensor) -> Tensor:
        return t + ((t * 32).round() / 32 - t).detach()

    x1, x2 = map(on_grid, x.chunk(2, 1))
    for block in chain:
        x1 = x1 + on_grid(block.f(x2))
        x2 = x2 + on_grid(block.g(x1))
    expected = torch.autograd.grad(torch.cat((x1, x2), 1).cos().sum(), [x, *chain.parameters()])
    for store in (False, True):
        chain.store = store
        found = torch.autograd.grad(chain(x).cos().sum(), [x, *chain.parameters()])
        for ours, truth in zip(found, expected, strict=True):
            assert torch.allclose(ours, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "name", [name for name, arch in ARCHITECTURES.items() if "grid_bits" in arch.options.model_fields]
)
def test_each_reversible_network_has_option(name):
    spec = parse_experiment({"network": {"arch": name, "options": {"grid_bits": 9}}}, "x.json").network
    model = build_on_meta(spec)
    chains = [module for module in model.modules() if isinstance(module, ReversibleSequential)]
    assert chains
    assert all(chain.grid_bits == block.grid_bits == 9 for chain in chains for block in chain)
