"""`zoo.check` finds and locates known faults of variants, and changes nothing."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from tests.memory.variants import Variant, Wrapped, around, assert_found, changing
from tests.refusals import refused
from zoo.errors import ConfigError


def blocks(*layers: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    parts = ([nn.Conv2d(8, 8, 3, padding=1), *(cls() for cls in layers)] for _ in range(3))
    return nn.Sequential(*(nn.Sequential(*each) for each in parts))


class Norm(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(8)


def images() -> Tensor:
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0))


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    for each in model.children():
        each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False, **options)
    return model


def test_lean_training_is_bit_identical_and_holds_less(capsys: pytest.CaptureFixture[str]) -> None:
    found = zoo.check(blocks(Norm, nn.ReLU, nn.Dropout), torch.randn(4, 8, 32, 32))
    assert found.same is True
    assert found.difference is None
    assert found.values > 2 * 20
    assert found.variant.held < 0.6 * found.plain.held
    assert found.time_ratio > 0
    assert capsys.readouterr().out == f"{found}\n"
    assert len(str(found).splitlines()) <= 10


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_released_gradients_have_the_same_bits_and_leave_the_peak(optimizer: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    found = zoo.check(network, torch.randn(4, 128), optimizer=optimizer, release_gradients=True)
    assert found.same is True
    assert "released gradients" in str(found)
    assert found.variant.peak < 0.7 * found.plain.peak
    assert found.scenarios == ()


def test_released_gradients_that_differ_change_the_first_step() -> None:
    change = changing(lambda model: model[1][0].weight.register_hook(lambda gradient: 2 * gradient))
    found = zoo.check(blocks(Norm, nn.ReLU), images(), variant=change, release_gradients=True)
    assert_found(found, "step 1, parameter 1.0.weight:")


def test_state_of_the_optimizer_is_compared() -> None:
    plain = zoo.check(blocks(Norm), images(), steps=1)
    with_states = zoo.check(blocks(Norm), images(), steps=1, optimizer=torch.optim.AdamW)
    assert with_states.same is True
    assert with_states.values > plain.values


def test_checkpointed_norms_count_twice() -> None:
    found = zoo.check(blocks(Norm, nn.ReLU), images(), variant=checkpointed)
    assert_found(found, "step 1, buffer 0.1.running_mean:")
    assert found.difference.place == "0.1 (Norm)"


def test_checkpoint_without_random_state_is_found() -> None:
    variant = functools.partial(checkpointed, preserve_rng_state=False)
    found = zoo.check(blocks(nn.ReLU, nn.Dropout), images(), variant=variant)
    assert_found(found, "step 1, gradient of 2.0.bias:")
    assert found.difference.place == "2.2 (Dropout), in backward: MulBackward0"
    assert 0 < found.difference.differing <= found.difference.size == 8
    assert found.difference.largest > 0


@pytest.mark.slow
def test_torch_compile_budget_with_other_masks_is_found() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        found = zoo.check(blocks(nn.ReLU, nn.Dropout), images(), variant=torch.compile)
    assert found.same is False


class Unused(nn.Module):
    """A network that draws a mask and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        F.dropout(x)
        return self.second(x)


@pytest.mark.slow
def test_removed_dropout_is_found() -> None:
    found = zoo.check(Unused(), images(), variant=functools.partial(torch.compile, backend="aot_eager"))
    assert_found(found, "step 1, state of the random numbers of the CPU:")


class Exposing(Unused):
    """A network that returns an activation, too."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.second(F.gelu(x)), x


def test_write_through_data_is_found() -> None:
    def loss(outputs: Any) -> Tensor:
        outputs[1].data.mul_(2)
        return outputs[0].square().mean()

    found = zoo.check(Exposing(), torch.randn(8, 8, 32, 32), loss=loss)
    assert_found(found, "step 1, gradient of second.weight:")
    assert found.difference.place == "second (Conv2d), in backward: ConvolutionBackward0"


class Noisy(nn.Linear):
    """A layer whose output is never the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + random.SystemRandom().random()


def test_nondeterministic_operation_is_not_attributed_to_variant() -> None:
    found = zoo.check(nn.Sequential(nn.Linear(8, 8), Noisy(8, 8)), torch.randn(3, 8))
    assert found.same is None
    assert found.difference.place == "1 (Noisy), in forward: Add"
    assert "not deterministic" in str(found)
    assert len(str(found).splitlines()) <= 10


def test_network_and_generators_are_unchanged() -> None:
    model = blocks(Norm, nn.Dropout)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    x = images().requires_grad_()
    zoo.check(model, x, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert x.grad is None
    assert all(each.grad is None for each in model.parameters())


def test_check_accepts_keywords_and_custom_loss() -> None:
    class WithLoss(nn.Linear):
        def forward(self, *, features: Tensor, labels: Tensor) -> Any:
            logits = super().forward(features)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    found = zoo.check(WithLoss(8, 4), features=torch.randn(3, 8), labels=torch.tensor([0, 1, 3]), steps=3)
    assert found.same is True
    assert found.fixed == ()
    # outputs with strides, loss, gradients of parameters and inputs, inputs, random numbers and mode; parameters
    assert found.values > 4 * (5 + 1 + 4 + 3 + 4) + (1 + 5) + 3 * 2 + (5 + 3 + 4)


@dataclasses.dataclass
class Boxes:
    scores: Tensor
    labels: Tensor
    count: int


class Detector(nn.Module):
    """A network whose outputs are of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.norm(self.layer(x))
        sizes = types.SimpleNamespace(smallest=np.float32(8))
        sizes.itself = sizes  # a cycle
        return {
            "anchors": np.array([1.0, float("nan")]),
            "boxes": [Boxes(scores, scores.argmax(1), 3)],
            "kinds": {"cat", "dog"},
            "sizes": sizes,
            "mask": scores > 0,
            "spectrum": torch.fft.rfft(scores),
            "features": scores + 1,
            "scale": 0.5,
            "name": "detector",
            "nested": {"a": 1, "b": 2},
            "ordered": collections.OrderedDict(a=1, b=2),
        }


def loss_of_scores(outputs: Any) -> Tensor:
    return outputs["boxes"][0].scores.square().mean()


def change(key: str, value: Callable[[Any], Any]) -> Variant:
    """Return a variant with another value of one output."""

    def run(wrapped: Wrapped, x: Tensor) -> Any:
        outputs = wrapped.module(x)
        return {**outputs, key: value(outputs[key])}

    return around(run)


def change_boxes(**values: Callable[[Boxes], Any]) -> Variant:
    """Return a variant with other values of a field of the boxes."""
    ((field, value),) = values.items()
    return change("boxes", lambda boxes: [dataclasses.replace(boxes[0], **{field: value(boxes[0])})])


def reorder(keys: Callable[[Any], Any]) -> Variant:
    """Return a variant with other keys of the outputs."""
    return around(lambda wrapped, x: keys(wrapped.module(x)))


def shrink(sizes: Any) -> Any:
    sizes.smallest = sizes.smallest / 2
    return sizes


#: Change of the outputs of `Detector` -> the name of the output, and a part of its difference.
OUTPUTS: list[tuple[Variant, str, str]] = [
    (change_boxes(labels=lambda b: b.labels + 1), "['boxes'][0].labels", "at most by 1"),
    (change_boxes(labels=lambda b: b.labels.int()), "['boxes'][0].labels", "int32 tensor"),
    (change_boxes(count=lambda b: 4), "['boxes'][0].count", "4 instead of 3"),
    (
        change("boxes", lambda boxes: [dict(vars(boxes[0]))]),
        "['boxes'][0]", "dict of ['scores'], ['labels'], ['count'] instead",
    ),
    (change("boxes", tuple), "['boxes']", "tuple of [0] instead of list of [0]"),
    (change("mask", torch.logical_not), "['mask']", "16 of 16 elements differ, at most by 1"),
    (change("spectrum", lambda s: s + 1j), "['spectrum']", "12 of 12 elements differ, at most by 1"),
    (change("features", Tensor.detach), "['features']", "float32 tensor of shape (4, 4) instead of float32 tensor"),
    (change("features", lambda f: f[:3]), "['features']", "float32 tensor of shape (3, 4) that requires gradients"),
    (change("features", lambda f: -f), "['features']", "16 of 16 elements"),
    (change("scale", lambda _: 0.25), "['scale']", "0.25 instead of 0.5"),
    (change("scale", lambda _: None), "['scale']", "None instead of 0.5"),
    (change("name", lambda _: True), "['name']", "True instead of 'detector'"),
    (change("anchors", lambda a: a + 1), "['anchors']", "1 of 2 elements differ, at most by 1"),
    (change("kinds", lambda _: {"cat", "cow"}), "['kinds']", "set of {'cat'}, {'cow'} instead of set of {'cat'}, {'d"),
    (change("sizes", shrink), "['sizes'].smallest", "np.float32(4.0) instead of np.float32(8.0)"),
    (reorder(lambda o: {**o, "more": 1}), "", "['nested'], ['ordered'], ['more'] instead of dict of ['anchors']"),
    (reorder(lambda o: dict(reversed(o.items()))), "", "output: dict of ['ordered'], ['nested'], ['name'], "),
    (
        change("nested", lambda nested: dict(reversed(nested.items()))),
        "['nested']", "dict of ['b'], ['a'] instead of dict of ['a'], ['b']",
    ),
    (
        change("ordered", lambda ordered: collections.OrderedDict(reversed(ordered.items()))),
        "['ordered']", "OrderedDict of ['b'], ['a'] instead of OrderedDict of ['a'], ['b']",
    ),
    (
        reorder(lambda o: {**o, "mask": o["spectrum"], "spectrum": o["mask"]}),
        "['mask']", "complex64 tensor of shape (4, 3) that requires gradients instead of bool tensor",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "value", "text"), OUTPUTS)
def test_each_output_is_compared_by_name_and_kind(variant: Variant, value: str, text: str) -> None:
    found = zoo.check(
        Detector(), torch.randn(4, 8), loss=lambda o: o["boxes"][0].scores.square().mean(), variant=variant, steps=1
    )
    assert_found(found, f"step 1, output{value}: ")
    assert text in str(found.difference)


def test_labels_and_masks_remain_valid_in_other_batches() -> None:
    class WithLoss(nn.Embedding):
        def forward(self, tokens: Tensor, target: Tensor, weights: Tensor) -> Tensor:
            rows = F.binary_cross_entropy(super().forward(tokens).sigmoid().mean((1, 2)), target, reduction="none")
            return (rows * weights.log1p()).sum()

    batch = torch.tensor([[0, 9], [3, 4], [9, 9]]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1e9])
    found = zoo.check(WithLoss(10, 4), *batch, steps=5)
    assert (found.same, found.fixed) == (True, ())


def test_inputs_of_fixed_form_are_not_varied() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training or len(x) != 4 or not torch.equal(x, torch.ones(4, 8)):
                raise NotImplementedError
            return super().forward(x)

    found = zoo.check(Fixed(8, 4), torch.ones(4, 8))
    assert (found.same, found.fixed) == (True, ("batch", "batch size", "evaluation mode"))
    assert "\nnot varied: batch, batch size, evaluation mode\n" in str(found)


def test_loss_with_own_labels_fixes_batch_size() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    found = zoo.check(nn.Linear(8, 3), torch.randn(4, 8), loss=lambda output: F.cross_entropy(output, labels))
    assert (found.same, found.fixed) == (True, ("batch size",))


def with_nan() -> nn.Module:
    model = nn.Linear(8, 2)
    model.weight.data[0, 0] = float("nan")
    return model


class Constant(nn.Linear):
    """Returns NaN, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.full((2,), float("nan"))


@pytest.mark.parametrize(
    ("model", "change", "text"),
    [
        (with_nan(), lambda output: output, None),
        (with_nan(), lambda output: -output, "step 1, output: 4 of 8 elements differ, at most by "),
        (Constant(8, 2), lambda outputs: (outputs[0], -outputs[1]), None),  # the sign of NaN
        (nn.Sequential(nn.Linear(8, 2), nn.Threshold(100, 0)), lambda output: -output,
         "step 1, output: 8 of 8 elements differ, at most by 0"),
    ],
)  # fmt: skip
def test_nan_equals_nan_and_zero_has_a_sign(model: nn.Module, change: Callable[[Any], Any], text: str | None) -> None:
    found = zoo.check(model, torch.randn(4, 8), variant=around(lambda wrapped, x: change(wrapped.module(x))))
    if text is None:
        assert found.same is True
    else:
        assert_found(found, text)


@dataclasses.dataclass
class Batch:
    images: Tensor


@pytest.mark.parametrize("kind", [Batch, lambda images: collections.UserDict(images=images), types.SimpleNamespace])
def test_overwritten_inputs_in_objects_are_copied_for_each_run(kind: Callable[..., Any]) -> None:
    class Overwriting(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            images = batch["images"] if isinstance(batch, collections.UserDict) else batch.images
            return super().forward(images.mul_(2))

    x = torch.ones(4, 8)
    batch = kind(images=x)
    assert zoo.check(Overwriting(8, 2), batch).same is True
    assert torch.equal(x, torch.ones(4, 8))


def test_outputs_in_objects_need_no_custom_loss() -> None:
    class Boxed(nn.Linear):
        def forward(self, x: Tensor) -> Boxes:
            return Boxes(scores := super().forward(x), scores.argmax(1), len(x))

    assert zoo.check(Boxed(8, 2), torch.randn(4, 8)).same is True


@pytest.mark.parametrize(
    "variant",
    [
        around(lambda wrapped, x: wrapped.module(x)),
        nn.DataParallel,
        lambda model: nn.Sequential(nn.Identity(), *model),
        lambda model: nn.Sequential(
            Wrapped(model[0], lambda wrapped, x: checkpoint(wrapped.module, x, use_reentrant=False)), *model[1:]
        ),
    ],
)
def test_wrappers_may_rename_parameters(variant: Variant) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout())
    assert zoo.check(model, torch.randn(4, 8), variant=variant).same is True


class Small(nn.Module):
    """A network with typical difficulties: norms, dropout, a tied weight, a frozen layer, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.second.running_var.fill_(2)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.encode = nn.Linear(8, 8, bias=False)
        self.decode = nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight
        self.unused = nn.Linear(8, 8)
        self.first.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, images: Tensor) -> Any:
        x = self.middle(self.first(self.stem(images)).relu())
        maps = self.second(x).relu()
        return self.decode(self.encode(self.drop(maps.mean((2, 3))))), maps, images * 1


def before(change: Callable[[Small], object], call: int | None = None) -> Variant:
    """Return a variant that changes the network before one call, or before each."""

    def run(wrapped: Wrapped, x: Tensor) -> Any:
        if call in (None, wrapped.calls):
            change(wrapped.module)
        return wrapped.module(x)

    return around(run)


def after(change: Callable[[Wrapped, Any, Tensor], object]) -> Variant:
    """Return a variant that changes something after each call."""

    def run(wrapped: Wrapped, x: Tensor) -> Any:
        outputs = wrapped.module(x)
        change(wrapped, outputs, x)
        return outputs

    return around(run)


def returning(change: Callable[[Any, Tensor], Any]) -> Variant:
    """Return a variant with other outputs."""
    return around(lambda wrapped, x: change(wrapped.module(x), x))


def scaling(condition: Callable[[Wrapped, Tensor], bool]) -> Variant:
    """Return a variant with other outputs if a condition holds."""

    def run(wrapped: Wrapped, x: Tensor) -> Any:
        logits, *others = wrapped.module(x)
        return logits * (2 if condition(wrapped, x) else 1), *others

    return around(run)


def swap_statistics(model: Small) -> None:
    model.first.running_var, model.second.running_var = model.second.running_var, model.first.running_var


def cast_middle(model: Small) -> None:
    layer = model.middle
    layer.forward = lambda x: F.conv2d(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16(), padding=1).float()


def evaluate_norm(model: Small) -> None:
    model.second.train = lambda mode=True: model.second  # type: ignore[method-assign]
    model.second.training = False


def replace_parameter(model: Small) -> None:
    model.middle.weight = nn.Parameter(model.middle.weight.detach().clone())


def keep_first_batch(wrapped: Wrapped, x: Tensor) -> Any:
    wrapped.kept = x if wrapped.kept is None else wrapped.kept
    return wrapped.module(wrapped.kept)


def reuse_memory(wrapped: Wrapped, outputs: Any, x: Tensor) -> None:
    """Return an output in memory that the next call overwrites."""
    wrapped.kept = outputs[1].detach().clone() if wrapped.kept is None else wrapped.kept
    if wrapped.kept.shape == outputs[1].shape:
        wrapped.kept.copy_(outputs[1].detach())
        outputs[1].data = wrapped.kept


def clip_gradient(wrapped: Wrapped, outputs: Any, x: Tensor) -> None:
    if wrapped.training:
        outputs[0].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def in_evaluation(change: Callable[[Small], object]) -> Variant:
    return after(lambda wrapped, outputs, x: None if wrapped.training else change(wrapped.module))


#: Fault of a variant of `Small` -> the variant, and the start of the difference that a check must find.
FAULTS: dict[str, tuple[Variant, str]] = {
    "seed of dropout in step 2": (before(lambda _: torch.manual_seed(5), call=2), "step 2, output[0]:"),
    "running variances swapped": (changing(swap_statistics), "step 1, buffer first.running_var:"),
    "running variances swapped before the evaluation": (before(swap_statistics, call=5), "evaluation, output[0]:"),
    "gradient of one bias doubled": (
        changing(lambda model: model.middle.bias.register_hook(lambda gradient: gradient * 2)),
        "step 1, gradient of middle.bias:",
    ),
    "one layer in bfloat16": (changing(cast_middle), "step 1, output[0]:"),
    "frozen parameter changed by one bit in the last step": (
        before(lambda model: model.stem.weight.data[0, 0, 0, 0].add_(2**-20), call=4), "step 3, output[0]:"
    ),
    "hook lost": (changing(lambda model: model.first._forward_hooks.clear()), "step 1, output[0]:"),
    "eps changed": (changing(lambda model: setattr(model.second, "eps", 2e-5)), "step 1, output[0]:"),
    "momentum of the running mean changed": (
        changing(lambda model: setattr(model.second, "momentum", 0.11)), "step 1, buffer second.running_mean:"
    ),
    "norm in evaluation mode while training": (changing(evaluate_norm), "step 1, output[0]:"),
    "norm in training mode while evaluating": (
        changing(lambda model: setattr(model.second, "track_running_stats", 0)), "step 1, buffer second.running_mean:"
    ),
    "mode changed by a call": (after(lambda wrapped, *_: wrapped.eval()), "step 1, training mode:"),
    "batches not counted": (
        after(lambda wrapped, *_: wrapped.module.first.num_batches_tracked.sub_(1)),
        "step 1, buffer first.num_batches_tracked:",
    ),
    "small batches counted twice": (
        after(lambda wrapped, _, x: wrapped.module.first.num_batches_tracked.add_(len(x) < 4)),
        "step 3, buffer first.num_batches_tracked:",
    ),
    "tuple becomes a list": (returning(lambda outputs, x: list(outputs)), "step 1, output:"),
    "memory format of an output": (
        returning(lambda outputs, x: (outputs[0], outputs[1].to(memory_format=torch.channels_last), outputs[2])),
        "step 1, layout of output[1]:",
    ),
    "frozen parameter trained": (
        changing(lambda model: model.stem.requires_grad_(True)), "step 1, gradient of stem.bias:"
    ),
    "parameter frozen": (
        changing(lambda model: model.second.bias.requires_grad_(False)), "step 1, gradient of second.bias:"
    ),
    "unused parameter frozen": (
        changing(lambda model: model.unused.requires_grad_(False)), "step 1, parameter unused.weight:"
    ),
    "gradient of zeros instead of none": (
        before(lambda model: setattr(model.unused.weight, "grad", torch.zeros(8, 8)), call=1),
        "step 1, gradient of unused.weight:",
    ),
    "random number drawn in evaluation": (
        in_evaluation(lambda _: torch.rand(1)), "evaluation, state of the random numbers of the CPU:"
    ),
    "random number of numpy drawn": (
        before(lambda _: np.random.rand()), "step 1, state of the random numbers of numpy:"
    ),
    "random number of Python drawn": (
        before(lambda _: random.gauss()), "step 1, state of the random numbers of Python:"
    ),
    "statistics updated in evaluation": (
        in_evaluation(lambda model: model.second.running_mean.mul_(0.5)), "evaluation, buffer second.running_mean:"
    ),
    "parameter replaced, which the optimizer does not see": (
        before(replace_parameter, call=2), "step 2, parameter middle.weight:"
    ),
    "first batch kept": (around(keep_first_batch), "step 2, output[0]:"),
    "output in memory that the next call overwrites": (
        after(reuse_memory), "step 2, output of the first batch, after the second[0][1]:"
    ),
    "output without its history, but with requires_grad": (
        returning(lambda outputs, x: (outputs[0], outputs[1].detach().requires_grad_(), outputs[2])),
        "step 1, gradient of middle.bias:",
    ),
    "gradient clipped": (after(clip_gradient), "step 1, gradient of encode.weight:"),
    "input gets a gradient": (after(lambda _, outputs, x: x.requires_grad_()), "step 1, input[0]:"),
    "input overwritten": (after(lambda _, outputs, x: x.add_(1)), "step 1, input[0]:"),
    "input cut in place": (after(lambda _, outputs, x: setattr(x, "data", x.data[:1])), "step 1, input[0]:"),
    "dropout left out after the third batch": (
        before(lambda model: setattr(model.drop, "p", 0.0), call=4), "step 3, output[0]:"
    ),
    "gradient of a layer lost between two batches": (
        before(lambda model: setattr(model.middle.weight, "grad", None), call=3), "step 2, gradient of middle.weight:"
    ),
    "gradients lost between two batches": (
        before(lambda model: model.zero_grad()), "step 2, gradient of encode.weight:"
    ),
    "half of an output": (
        returning(lambda outputs, x: (outputs[0], outputs[1].half().float(), outputs[2])), "step 1, output[1]:"
    ),
    "output in the memory of the input": (
        returning(lambda outputs, x: (*outputs[:2], x)), "step 1, layout of output[2]:"
    ),
    "other output in evaluation": (scaling(lambda wrapped, x: not wrapped.training), "evaluation, output[0]:"),
    "other output of small batches": (scaling(lambda wrapped, x: len(x) != 4), "step 3, output[0]:"),
    "other output after the third batch": (
        scaling(lambda wrapped, x: wrapped.training and wrapped.calls > 3), "step 3, output[0]:"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_variant_is_found_and_named(fault: str) -> None:
    variant, text = FAULTS[fault]
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert_found(zoo.check(Small(), x, variant=variant), text)


def test_untied_weight_is_named() -> None:
    untie = changing(lambda model: setattr(model.decode, "weight", nn.Parameter(model.decode.weight.detach().clone())))
    check = functools.partial(zoo.check, Small(), torch.randn(4, 3, 6, 6), variant=untie)
    refused(ConfigError, check, "12 instead of 11", "decode.weight")


def convolutions() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return blocks(Norm, nn.ReLU, nn.Dropout), (images().requires_grad_(),), {}


class LanguageModel(nn.Module):
    """A transformer with a dict of outputs, its own loss, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.layer(self.embed(input_ids))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits, "hidden": (hidden,)}


def language_model() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(0))
    return LanguageModel(), (), {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


class Recurrent(nn.Module):
    """A recurrent network with random numbers of numpy and Python, and packed inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
        x = x * random.random() + np.random.rand()
        packed, last = self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(last[0]).tanh(), packed


def recurrent() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Recurrent(), (torch.randn(4, 5, 8), torch.tensor([5, 4, 2, 1])), {}


def small() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Small(), (torch.randn(4, 3, 6, 6),), {}


def on_cpu(wrapped: Wrapped, *args: Any, **keywords: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return wrapped.module(*args, **keywords)


def checkpoint_each_layer(model: nn.Module) -> nn.Module:
    """Return the network with checkpoints of layers that have no buffers and do not overwrite their input."""
    for each in model.modules():
        if isinstance(each, nn.Conv2d | nn.Linear | nn.Dropout | nn.TransformerEncoderLayer):
            each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize(
    "build",
    [convolutions, language_model, recurrent, small],
)
@pytest.mark.parametrize(
    "variant",
    [
        zoo.lean,
        functools.partial(zoo.lean, budget=0.4),
        functools.partial(zoo.lean, budget="1GB"),
        checkpoint_each_layer,
        around(on_cpu),
    ],
    ids=["lean", "a fraction", "a limit", "checkpoints", "save_on_cpu"],
)
def test_correct_variants_are_bit_identical(
    build: Callable[[], Any], variant: Callable[[nn.Module], nn.Module]
) -> None:
    model, inputs, keywords = build()
    found = zoo.check(model, *inputs, variant=variant, **keywords)
    assert found.difference is None
    assert found.same is True
    assert found.fixed == ()


@pytest.mark.slow
def test_compiled_network_without_other_kernels_is_bit_identical() -> None:
    variant = functools.partial(torch.compile, backend="aot_eager")
    found = zoo.check(blocks(nn.ReLU), images(), variant=variant)
    assert (found.same, found.difference) == (True, None)


@pytest.mark.slow
@pytest.mark.parametrize("build", [small, language_model])
def test_compiled_network_has_gradients_of_zeros_from_unused_outputs(build: Callable[[], Any]) -> None:
    model, inputs, keywords = build()
    variant = functools.partial(torch.compile, backend="aot_eager")
    found = zoo.check(model, *inputs, variant=variant, **keywords)
    assert found.same is False
    assert found.difference.scenario == "gradients of inputs"
    assert found.difference.kinds.endswith(" instead of None")
