"""The report of a network's memory adds up to what its modules hold, and changes nothing."""

from __future__ import annotations

import torch
from torch import nn

import zoo
from tests.layers.test_lean import held_bytes
from tests.ops.lean.test_recording import images, network
from zoo.layers.lean import lean


def test_the_sums_are_the_bytes_that_autograd_holds() -> None:
    model = network(channels=16)
    report = zoo.memory_report(model, images(64))
    assert report.plain == held_bytes(model) - images(64).nbytes
    assert 0 < report.lean < 0.7 * report.plain
    by_name = {module.name: module for module in report.modules}
    reason = "not an operation that is repeated"
    assert by_name["1.norms.0"].kept == {
        ("aten.convolution", reason): 4 * 2 * 16 * 64**2,
        ("aten.native_batch_norm", reason): 4 * 2 * 16,  # mean and inverse deviation
    }
    assert by_name["1.relu"].lean == 0
    assert set(by_name["1.relu"].repeated) == {"aten.relu_"}
    assert str(report).splitlines()[-1].split("|")[1].strip() == "all"


def test_nothing_is_changed() -> None:
    model = lean(nn.Sequential(network(), nn.Dropout(0.5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    example = images()
    state = torch.get_rng_state()
    zoo.memory_report(model, (example,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
