"""Most networks of timm and torchvision can be converted, and train as before."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.benchmark.network_setup import loss_of_any
from zoo.convert._norm_conversion import apply_plans, plan_norms
from zoo.errors import ConversionError
from zoo.models.external import build_external, image_shape, iter_tensors, list_networks, smallest_of_each_family

MAX_PARAMETERS = 10e6  # largest network that is trained here
SIZE, SEED = 64, 0


def step_of(model, images):
    """Return outputs, gradients and buffers of a step that draws the same random numbers in each call."""
    torch.manual_seed(SEED)
    images = images.clone().requires_grad_()
    outputs = list(iter_tensors(model(images)))
    loss_of_any(outputs).backward()
    gradients = [each.grad for each in (images, *model.parameters()) if each.grad is not None]
    return [*(output.detach() for output in outputs), *gradients, *model.buffers()]


def difference(model, twin, images):
    """Return the largest difference of outputs, gradients and buffers after a step, relative to the norm of each.

    Only magnitudes are compared, as filters before norms with negative scales are negated.
    """
    found = ([each.double().abs() for each in step_of(network, images)] for network in (model, twin))
    pairs = list(zip(*found, strict=True))
    largest = max(a.norm() for a, _ in pairs)
    return max(((a - b).norm() / (a.norm() + 1e-6 * largest)).item() for a, b in pairs)


def twin_of(model, kind, relu=None):
    """Return a copy of a network with the norms that can be converted to a kind."""
    twin = copy.deepcopy(model)
    plans, _ = plan_norms(twin, kind, partial=True, relu=relu)
    apply_plans(twin, plans, kind)
    return twin


def check_training(name, model: nn.Module, images) -> None:
    """Compare a step of the network with a step of its converted twins."""
    leaky = twin_of(model, "inplace", relu="leaky_relu")
    pairs = [(twin_of(leaky, "standard"), leaky)]
    with suppress(ConversionError):  # without other activations than ReLU
        pairs.append((model, twin_of(model, "inplace")))
    assert max(difference(*pair, images) for pair in pairs) < 1e-5, name


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # other packages warn
def test_nine_tenths_of_families_are_accepted_and_train_as_before():
    """Takes many minutes."""
    pytest.importorskip("timm")
    accepted, refused = [], []
    names = smallest_of_each_family(list_networks("timm:*")) + smallest_of_each_family(list_networks("torchvision:*"))
    for name in names:
        torch.manual_seed(SEED)
        model, images = build_external(name).train(), torch.randn(2, *image_shape(name, SIZE))
        if not any(isinstance(part, _BatchNorm) for part in model.modules()):
            continue
        try:
            plan_norms(model, "inplace", partial=True, relu="leaky_relu")
        except ConversionError:
            refused.append(name)
            continue
        accepted.append(name)
        if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
            continue
        model, images = model.double(), images.double()
        try:
            step_of(copy.deepcopy(model), images)
        except Exception:  # any error of another package whose inputs are not a plain batch of this size
            continue
        check_training(name, model, images)
    assert len(accepted) >= 0.9 * (len(accepted) + len(refused)), refused
