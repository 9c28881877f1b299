"""RevCol: the authors' formulas and state dict, and the effect of reconstruction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from tests.nets import STRUCTURES, build, differing, images, small_architectures
from tests.refusals import refused
from tests.step import step
from zoo.convert.files import convert_file
from zoo.engine.reconstruction import reconstruction_errors
from zoo.memory.allocations import measure_memory
from zoo.models import revcol

PARAMETERS = {  # parameters of the authors' networks, and numbers of tensors in their state dicts
    "revcol_tiny": (30_456_168, 468),
    "revcol_small": (60_568_424, 940),
    "revcol_base": (138_616_408, 1_452),
    "revcol_large": (273_095_400, 1_012),
}


def reference(tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and the maps of the last column, from tensors with the authors' names, by their formulas."""

    def linear(name: str, t: Tensor) -> Tensor:
        y = torch.einsum("nchw,oc->nohw", t, tensors[f"{name}.weight"])
        return y + tensors[f"{name}.bias"][None, :, None, None]

    def norm(name: str, t: Tensor) -> Tensor:
        centered = t - t.mean(1, keepdim=True)
        unit = centered / (centered.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return unit * tensors[f"{name}.weight"][None, :, None, None] + tensors[f"{name}.bias"][None, :, None, None]

    def level(name: str, finer: Tensor, coarser: Tensor | None) -> Tensor:
        if f"{name}.fusion.down.0.weight" in tensors:
            down = f"{name}.fusion.down"
            finer = F.conv2d(finer, tensors[f"{down}.0.weight"], tensors[f"{down}.0.bias"], stride=2)
            finer = norm(f"{down}.1", finer)
        if coarser is not None:
            up = f"{name}.fusion.up.channel_reschedule"
            added = norm(f"{up}.1", linear(f"{up}.0", coarser))
            finer = finer + added.repeat_interleave(2, 2).repeat_interleave(2, 3)
        number = 0
        while (block := f"{name}.blocks.{number}") + ".gamma" in tensors:
            y = F.conv2d(
                finer,
                tensors[f"{block}.dwconv.weight"],
                tensors[f"{block}.dwconv.bias"],
                padding=1,
                groups=finer.shape[1],
            )
            y = linear(f"{block}.pwconv1", norm(f"{block}.norm", y))
            y = linear(f"{block}.pwconv2", 0.5 * y * (1 + torch.erf(y / math.sqrt(2))))
            finer = finer + tensors[f"{block}.gamma"][None, :, None, None] * y
            number += 1
        return finer

    x = norm("stem.1", F.conv2d(x, tensors["stem.0.weight"], tensors["stem.0.bias"], stride=4))
    maps: list[Any] = [0, 0, 0, 0]
    column = 0
    while f"subnet{column}.alpha0" in tensors:
        for index in range(4):
            alpha = tensors[f"subnet{column}.alpha{index}"]
            finer = x if index == 0 else maps[index - 1]
            coarser = maps[index + 1] if index < 3 and column > 0 else None
            maps[index] = alpha * maps[index] + level(f"subnet{column}.level{index}", finer, coarser)
        column += 1
    features = norm("cls.classifier.0", maps[3].mean((2, 3), keepdim=True))
    return linear("cls.classifier.1", features).flatten(1), maps


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_state_dict_equal_authors(name):
    with torch.device("meta"):
        model = zoo.get(name)
    state = model.state_dict()
    assert (sum(p.numel() for p in model.parameters()), len(state)) == PARAMETERS[name]
    if name == "revcol_tiny":
        expected = {
            "stem.0.weight": (64, 3, 4, 4),
            "subnet0.alpha3": (1, 512, 1, 1),
            "subnet1.level2.fusion.down.0.weight": (256, 128, 2, 2),
            "subnet1.level2.fusion.up.channel_reschedule.0.weight": (256, 512),
            "subnet3.level1.blocks.1.gamma": (128,),
            "subnet3.level1.blocks.1.dwconv.weight": (128, 1, 3, 3),
            "subnet3.level1.blocks.1.pwconv1.weight": (512, 128),
            "cls.classifier.0.weight": (512,),
            "cls.classifier.1.weight": (1000, 512),
        }
        assert {key: tuple(state[key].shape) for key in expected} == expected


@pytest.mark.parametrize("memory", ["auto", "plain", "checkpoint", "lean"])
def test_outputs_and_gradients_follow_authors_formulas(memory):
    model = build("revcol_tiny", noise=0.1, memory="plain" if memory == "lean" else memory).double()  # two chains
    zoo.lean(model, enabled=memory == "lean")
    x = images(2, 64, torch.float64).requires_grad_()
    expected, maps = reference(dict(model.named_parameters()), x)
    actual = model(x)
    assert relative_error(actual, expected) < 1e-12
    assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(x), maps, strict=True))
    inputs = [x, *model.parameters()]
    actual_gradients = torch.autograd.grad(actual.cos().sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.cos().sum(), inputs, materialize_grads=True)
    for ours, theirs in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_revcol_tiny_follows_authors_formulas():
    torch.manual_seed(0)
    model = zoo.get("revcol_tiny").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        x = images(dtype=torch.float64)
        expected, maps = reference(model.state_dict(), x)
        assert relative_error(model(x), expected) < 1e-12
        assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(x), maps, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", ["lean", "checkpoint"])
def test_lean_and_checkpointed_training_are_bit_identical_to_stored_activations(memory, autocast):
    models = [build("revcol_tiny", noise=0.1, memory=each, drop_path_rate=0.5) for each in (memory, "plain")]
    results = [step(model, images(2, 64), autocast) for model in models]
    assert all(map(torch.equal, *results))


def test_lean_network_stores_maps():
    with torch.device("meta"):
        assert zoo.get("revcol_tiny", memory="lean").store
        assert not zoo.get("revcol_tiny").store


def gradient_errors(columns: int) -> list[float]:
    """Return the relative errors of gradients from reconstructed activations, without zeros."""
    results = []
    for memory in ("auto", "plain"):
        model = build("revcol_tiny", noise=0.1, memory=memory, structure={"columns": columns})
        model(images(2, 64)).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True) if b.any()]
    assert all(not a.any() for a, b in zip(*results, strict=True) if not b.any())  # factors of the first column
    return sorted(errors)


def test_gradients_of_reconstruction_have_rounding_errors():
    errors = gradient_errors(4)
    assert 1e-8 < errors[len(errors) // 2] < 1e-5
    assert errors[-1] < 1e-3


def test_maps_of_every_fourth_column_bound_errors(monkeypatch):
    errors = gradient_errors(12)
    monkeypatch.setattr(revcol, "CHAIN_COLUMNS", 12)
    of_one_chain = gradient_errors(12)
    assert errors[len(errors) // 2] < 0.1 * of_one_chain[len(errors) // 2]
    assert errors[-1] < 0.1 * of_one_chain[-1]


def test_meter_finds_errors_of_columns():
    model = build("revcol_tiny", noise=0.1)
    with reconstruction_errors(model) as errors:
        model(images(2, 64)).sum().backward()
    assert errors.keys() == {"0", "1", "2", "3", "4"}
    assert all(0 <= error < 1e-4 for error in errors.values())
    assert any(errors.values())


@pytest.mark.parametrize("memory", ["auto", "plain"])
@pytest.mark.parametrize("training", [True, False])
def test_small_factors_are_bounded_without_change_of_parameters(memory, training):
    model, bounded = (build("revcol_tiny", noise=0.1, memory=memory).double().train(training) for _ in range(2))
    with torch.no_grad():
        model.subnet1.alpha2[:, :4] = torch.tensor([1e-5, -1e-5, 0.0, 2.0]).view(1, 4, 1, 1)
        bounded.subnet1.alpha2[:, :4] = torch.tensor([1e-3, -1e-3, 1e-3, 2.0]).view(1, 4, 1, 1)
    before = model.subnet1.alpha2.detach().clone()
    results = [step(each, images(2, 64, torch.float64)) for each in (model, bounded)]
    assert torch.equal(model.subnet1.alpha2, before)
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-9)


@small_architectures()
def test_file_with_intermediate_supervision_gives_its_last_classifier(tmp_path):
    torch.manual_seed(0)
    source, path = zoo.get("revcol_tiny", num_classes=5), tmp_path / "revcol_tiny_1k.pth"
    state = source.state_dict()
    of_classifier = {key: state.pop(key) for key in list(state) if key.startswith("cls.")}
    for number in range(4):
        for key, tensor in of_classifier.items():
            state[key.replace("cls.", f"cls_blocks.{number}.")] = tensor + (3 - number)
    state["decoder_blocks.0.projback.0.weight"] = torch.randn(48, 64, 1, 1)
    torch.save({"model": state, "epoch": 299}, path)
    assert not differing(zoo.get("revcol_tiny", num_classes=5, weights=path).state_dict(), source.state_dict())
    assert zoo.load_network("revcol_tiny", path).model.num_classes == 5
    target = tmp_path / "exported.pth"
    convert_file("export", path, target, {"arch": "revcol_tiny"})
    assert not differing(zoo.weights.read_state_dict(target), source.state_dict())
    assert zoo.load_weights(zoo.get("revcol_tiny", num_classes=7), path).classifier == "kept"
    assert zoo.load_weights(zoo.get("revcol_tiny", features_only=True), path).classifier == "dropped"


def test_features_are_named_by_last_column():
    assert build("revcol_tiny").feature_info.get_dicts()[1] == {
        "num_chs": 16,
        "reduction": 8,
        "module": "subnet4.level1",
    }


def test_images_with_indivisible_sides_raise():
    refused(zoo.ConfigError, lambda: build("revcol_tiny")(torch.randn(1, 3, 48, 64)), "48 x 64 pixels", "32")


def test_held_bytes_grow_by_four_maps_every_four_columns():
    def held(columns: int, memory: str = "auto") -> int:
        model = build("revcol_tiny", memory=memory, structure={"columns": columns})
        x = images(2, 64)
        return measure_memory(lambda: model(x).mean(), model.parameters()).held

    of_maps = 4 * sum(
        2 * width * (16 // 2**index) ** 2 for index, width in enumerate(STRUCTURES["revcol_tiny"]["channels"])
    )
    assert held(2) == held(4) == held(8) - of_maps == held(12) - 2 * of_maps
    assert held(12) < 0.1 * held(12, "plain")
    assert held(8, "checkpoint") < 0.3 * held(8, "plain")


def _train_distributed(memory: str) -> list[Tensor]:
    torch.manual_seed(1 + torch.distributed.get_rank())
    model = DistributedDataParallel(build("revcol_tiny", noise=0.1, memory=memory).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(2, 3, 64, 64, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.dist
@pytest.mark.slow
def test_training_of_two_processes_equals_stored_activations():
    results = [run_distributed(_train_distributed, 2, memory) for memory in ("auto", "plain")]
    for ours, truth in zip(*results, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(ours, truth, strict=True))
