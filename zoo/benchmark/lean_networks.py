"""What `zoo.lean` does to networks, of this package and of others: the same bits, the bytes, and the time of a step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.benchmark.memory_use import clear_gradients, measure_memory
from zoo.benchmark.model import add_times
from zoo.benchmark.results import Case, Results
from zoo.errors import MAX_SHOWN_CHARS
from zoo.layers.init import init_weights
from zoo.layers.lean import lean
from zoo.layers.norm import norm_act
from zoo.models import build_network
from zoo.models.elsewhere import build_from_elsewhere, split_name, tensors_in

PLAIN, LEAN = "plain", "lean"
SEED = 0


def measure_lean_networks(
    results: Results, names: Sequence[str], *, batch: int, size: int, rounds: int, budget: Any = None
) -> None:
    """Add what each network holds and takes at its peak, and how long a step takes, lean beside plain.

    Args:
    - `names`: of networks of this package, with standard batch norm, or "timm:NAME" and "torchvision:NAME".
    - `batch`, `size`: images and their side in pixels; a network with images of a size of its own gets these.
    - `rounds`: steps of each whose times are taken; 0: none.
    - `budget`: that of `zoo.lean`.

    A network that cannot be built or trained in plain training is noted and left out. One whose gradients, outputs or
    buffers are not the same bits gets "same bits" 0, and a note that says whether plain training repeats its own.
    """
    for name in names:
        print(name, file=sys.stderr, flush=True)
        try:
            plain, images = build(name, batch, size, results.device)
            first = step_of(plain, images)
        except Exception as error:  # whatever another package raises
            results.note(f"not measured: {name} ({_told(error)})")
            continue
        case = Case(name, tuple(images.shape), "float32", "contiguous")
        plain, _ = build(name, batch, size, results.device)
        model = lean(copy.deepcopy(plain), budget)
        try:
            found = step_of(model, images)
        except Exception as error:
            results.add(case, LEAN, "trains", "1", [0.0])
            results.note(f"{name} fails: {_told(error)}")
            continue
        results.add(case, LEAN, "trains", "1", [1.0])
        is_same = _are_equal(first, found)
        results.add(case, LEAN, "same bits", "1", [float(is_same)])
        if not is_same:
            repeats = _are_equal(first, step_of(copy.deepcopy(plain), images))
            results.note(f"{name}: other bits; plain training {'repeats' if repeats else 'does not repeat'} its own")
        _add_costs(results, case, {PLAIN: plain, LEAN: model}, images, rounds)


def _add_costs(results: Results, case: Case, models: dict[str, nn.Module], images: Tensor, rounds: int) -> None:
    forwards = {name: _forward(model, images) for name, model in models.items()}
    memory = {name: measure_memory(forwards[name], model.parameters()) for name, model in models.items()}
    for name, measured in memory.items():
        for metric, value, reference in (
            ("held", measured.held, memory[PLAIN].held),
            ("peak without gradients", measured.peak_without_gradients, memory[PLAIN].peak_without_gradients),
        ):
            results.add(case, name, metric, "MB", [value / 1e6])
            results.add(case, name, f"{metric} ratio", "1", [value / reference])
    if rounds > 0:
        add_times(results, case, forwards, models, PLAIN, rounds)


def build(name: str, batch: int, size: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a network in training mode and random images, the same at each call.

    The images have the ``size``, or that of the network's own where it takes no other.
    """
    torch.manual_seed(SEED)
    if split_name(name) is None:
        model: nn.Module = build_network(name, norm_act("standard"))
        init_weights(model)
    else:
        model = build_from_elsewhere(name)
    settings: Any = getattr(model, "default_cfg", None) or {}
    if settings.get("fixed_input_size"):
        size = int(settings["input_size"][-1])
    channels = int(settings.get("input_size", (3,))[0])
    return model.to(device).train(), torch.randn(batch, channels, size, size, device=device)


def step_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return outputs, gradients and buffers of a step, whose random numbers are the same at each call."""
    torch.manual_seed(SEED)
    images = images.clone().requires_grad_()
    outputs = list(tensors_in(model(images)))
    values = [output.detach().clone() for output in outputs]
    _loss(outputs).backward()
    gradients = [each.grad.clone() for each in (images, *model.parameters()) if each.grad is not None]
    clear_gradients(list(model.parameters()))
    return [*values, *gradients, *(buffer.clone() for buffer in model.buffers())]


def _told(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, which may have none."""
    first_line = str(error).partition("\n")[0][:MAX_SHOWN_CHARS]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    """Return a loss that every output and every gradient depends on."""
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    same_length = len(first) == len(second)
    return same_length and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def _forward(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    return lambda: _loss(list(tensors_in(model(images))))
