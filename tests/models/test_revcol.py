"""RevCol: the effect of reconstruction, and files with intermediate supervision; test_authors.py has the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.dist.spawn import run_distributed
from tests.nets import STRUCTURES, build, differing, images, small_architectures
from tests.step import step
from zoo.convert._files import convert_file
from zoo.engine._reconstruction import reconstruction_errors
from zoo.memory.allocations import measure_memory
from zoo.models import revcol


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
