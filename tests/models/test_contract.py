"""What every family of networks does: features, classifier, memory strategies, stochastic depth, a grid, tracing.

The files of the families compare them with the formulas of their authors.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.feature_extraction import create_feature_extractor

import zoo
from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from tests.nets import CLASSIFIERS, SEGMENTERS, build, differing, has_option, images, strategies, train
from tests.refusals import refused
from tests.step import step
from zoo.config.architectures import ARCHITECTURES, network_sizes
from zoo.convert._trace import Trace
from zoo.layers import ABN, ReversibleSequential
from zoo.models.sizes import measure_sizes
from zoo.ops.grid import round_to_grid
from zoo.remat import Rematerializer
from zoo.remat import _lean as lean_module
from zoo.remat._lean import is_lean

ALL = CLASSIFIERS + SEGMENTERS
ON_GRID = [arch for arch in ALL if has_option(arch, "grid_bits")]
WITH_DROP_PATH = [arch for arch in ALL if has_option(arch, "drop_path_rate")]
STRATEGIES = [(arch, memory) for arch in ALL for memory in strategies(arch)]
WITH_STEM_POOL = ["resnet18", "resnet50", "resnext50", "densenet121", "resnet101_preact", "revnet56"]
CONVERTIBLE = CLASSIFIERS[: CLASSIFIERS.index("irevnet_cifar")]  # norms that `zoo.convert` traces
ONLY_RGB = ["irevnet_cifar", "revbifpn_s0", "pyramid_revbifpn_s0"]
REMEDY = "python -m tests.golden adds new networks"


def norms_of(arch: str) -> list[str | None]:
    return [None] if ARCHITECTURES[arch].fixed_layers else ["standard", "inplace"]


@pytest.mark.parametrize("case", network_sizes())
def test_keys_shapes_and_parameter_counts_match_index(case: str) -> None:
    name, _, stem = case.partition("+")
    expected = {key: value for key, value in network_sizes()[case].items() if key != "frozen_from"}
    assert measure_sizes(name, **({stem: True} if stem else {})) == expected, REMEDY


def test_index_has_sizes_of_every_network_and_both_stems() -> None:
    assert {case.partition("+")[0] for case in network_sizes()} == set(ARCHITECTURES), REMEDY
    assert sum("+" in case for case in network_sizes()) == 7


def test_every_family_has_a_small_network() -> None:
    assert {ARCHITECTURES[arch].family for arch in ALL} == {record.family for record in ARCHITECTURES.values()}


# Features


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arch", CLASSIFIERS)
def test_features_are_outputs_of_stages(arch: str, training: bool) -> None:
    """Later in-place layers do not overwrite features."""
    model = build(arch, features_only=True, norm=norms_of(arch)[-1]).train(training)
    info, outputs = model.feature_info, {}
    for stage in info.module_name():
        hook = lambda module, args, out, stage=stage: outputs.update({stage: out.clone()})  # noqa: E731
        model.get_submodule(stage).register_forward_hook(hook)
    x = images()
    features = model(x)
    shapes = [(feature.shape[1], 32 // feature.shape[2]) for feature in features]
    assert shapes == list(zip(info.channels(), info.reduction(), strict=True))
    copies = [feature.clone() for feature in features]
    sum(feature.square().mean() for feature in features).backward()
    assert all(map(torch.equal, features, copies))
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    if not ARCHITECTURES[arch].fixed_layers:  # whose files compare the maps with formulas
        for feature, stage in zip(features, info.module_name(), strict=True):
            assert stage not in outputs or torch.equal(feature, outputs[stage])


def feature_choices(arch: str) -> list[tuple[int | str, ...]]:
    stages = 2 if arch == "irevnet_cifar" else len(network_sizes()[arch]["stages"])
    choices: list[tuple[int | str, ...]] = [(0,), (-1,)]
    choices += [(1,), (0, 2)] if stages > 2 else []
    return choices + ([("stem", 0, -1)] if arch in WITH_STEM_POOL else [])


@functools.cache
def stored_features(arch: str) -> tuple[list[Tensor], Any]:
    """Return all features of a network with stored activations, and their descriptions."""
    model = build(arch, features_only=True, norm=norms_of(arch)[-1], memory="plain")
    torch.manual_seed(1)
    return [feature.detach() for feature in model(images())], model.feature_info


@pytest.mark.parametrize(("arch", "chosen"), [(arch, each) for arch in CLASSIFIERS for each in feature_choices(arch)])
def test_chosen_features_equal_full_list_and_freeze_unused_parameters(arch: str, chosen: tuple[int | str, ...]) -> None:
    """DistributedDataParallel waits for the gradients of all parameters that are not frozen."""
    expected, infos = stored_features(arch)
    model = build(arch, out_indices=chosen, features_only=True, norm=norms_of(arch)[-1], memory="plain")
    torch.manual_seed(1)  # the same dropout
    features = model(images())
    for index, feature, info in zip(chosen, features, model.feature_info, strict=True):
        if index == "stem":
            assert feature.shape[-1] == 32 // info["reduction"] == 2 * expected[0].shape[-1]
        else:
            assert torch.equal(feature, expected[index])
            assert info == infos[index]
    copies = [feature.clone() for feature in features]
    sum(feature.square().mean() for feature in features).backward()
    assert all(map(torch.equal, features, copies))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("arch", CLASSIFIERS)
@torch.no_grad()
def test_intermediates_equal_features(arch: str) -> None:
    norm = norms_of(arch)[-1]
    model, backbone = build(arch, norm=norm).eval(), build(arch, norm=norm, features_only=True).eval()
    backbone.load_state_dict(model.state_dict(), strict=False)
    truth, x = backbone(images()), images()
    last, maps = model.forward_intermediates(x)
    assert all(map(torch.equal, maps, truth))
    assert len(maps) == len(truth)
    torch.testing.assert_close(last, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(last), model(x))
    (normed,) = model.forward_intermediates(x, 1, norm=True, intermediates_only=True)
    assert model.last_norm is None or torch.equal(normed, last)
    if len(maps) > 2:
        stopped, chosen = model.forward_intermediates(x, [-2, 0], stop_early=True)
        assert torch.equal(chosen[0], maps[0])
        assert torch.equal(chosen[1], maps[-2])
        assert stopped is chosen[1]


# Classifier


@pytest.mark.parametrize("arch", CLASSIFIERS)
@torch.no_grad()
def test_classifier_is_replaced_and_removed(arch: str) -> None:
    model, headless = build(arch).eval(), build(arch, num_classes=0).eval()
    missing, unexpected = headless.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert {key.removesuffix(".weight").removesuffix(".bias") for key in unexpected} <= {
        name for name, _ in model.named_modules() if name.startswith(model.classifier_name)
    }
    assert (model.num_classes, headless.num_classes) == (5, 0)
    assert model.get_classifier() is model.get_submodule(model.linear_name)
    assert isinstance(headless.get_classifier(), nn.Identity)
    x = images()
    features, logits = model.forward_features(x), model(x)
    assert features.dim() == 4
    torch.testing.assert_close(model.forward_head(features), logits)
    pooled = headless(x)
    assert pooled.shape[-1] == model.num_features
    torch.testing.assert_close(headless.forward_head(features), pooled)
    last = model.get_classifier()
    if type(last) is nn.Linear:
        torch.testing.assert_close(last(model.forward_head(features, pre_logits=True)), logits)

    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    assert model.state_dict().keys() == headless.state_dict().keys()
    if "" in model.poolings:
        model.reset_classifier(0, "")
        torch.testing.assert_close(model(x), features)
        torch.testing.assert_close(model.forward_head(features), features)
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), features)  # the choice of pooling is kept
        model.reset_classifier(0, global_pool=next(each for each in model.poolings if each))
        torch.testing.assert_close(model(x), pooled)
        unpooled = build(arch, num_classes=0, global_pool="").eval()
        assert unpooled(x).shape == features.shape
    for number in (1, 3):
        model.reset_classifier(num_classes=number)
        assert (model.num_classes, model(x).shape) == (number, (3, number))
    for arguments in ((2, "other"), (2, "")):
        refused(zoo.ConfigError, functools.partial(model.reset_classifier, *arguments), "global_pool")
    assert model.num_classes == 3


@pytest.mark.parametrize("arch", ALL)
def test_images_may_have_other_channels(arch: str) -> None:
    shape = (2, 4) if arch in CLASSIFIERS else (2, 4, 32, 32)
    if arch in ONLY_RGB:
        refused(zoo.ConfigError, lambda: build(arch, in_chans=4), "in_chans")
        return
    model = build(arch, in_chans=4, num_classes=4)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.eval()(images(2, channels=4)).shape == shape
    assert model.in_chans == 4


@pytest.mark.parametrize("arch", SEGMENTERS)
@torch.no_grad()
def test_classifier_of_pixels_is_replaced_and_removed(arch: str) -> None:
    model, x = build(arch).eval(), torch.randn(2, 3, 50, 67)
    assert model.get_classifier() is model.cls
    features, logits = model.forward_features(x), model.forward_logits(x)
    assert features.shape[:2] == (2, model.num_features)
    assert torch.equal(model.forward_head(features), logits)
    assert model.forward_head(features, pre_logits=True) is features
    assert model(x).shape == (2, 5, 50, 67)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7, 50, 67)
    model.reset_classifier(0)
    assert (model.num_classes, type(model.get_classifier())) == (0, nn.Identity)
    assert torch.equal(model(x), features)
    assert torch.equal(build(arch, num_classes=0).eval()(x), features)


@pytest.mark.parametrize(
    ("arch", "sides", "needed"),
    [("revvit_s", (20, 32), "32 x 32"), ("revbifpn_s0", (48, 64), "32"), ("revcol_tiny", (48, 64), "32")],
)
def test_images_with_unsupported_sides_raise(arch: str, sides: tuple[int, int], needed: str) -> None:
    model, x = build(arch), torch.randn(1, 3, *sides)
    refused(zoo.ConfigError, lambda: model(x), f"{sides[0]} x {sides[1]} pixels", needed)


# Memory


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *((arch, "modified by an inplace operation") for arch in ("revnet38_cifar", "revnet164_cifar", "revnet56")),
        ("revnext", "overwritten"),
    ],
)
def test_images_overwritten_before_backward_raise(arch: str, name: str) -> None:
    """The stem is run on them again."""
    loss = build(arch)(x := images()).sum()
    x.zero_()
    refused(RuntimeError, lambda: loss.backward(), name)


def double_step(arch: str, norm: str | None, memory: str, how: str) -> list[Tensor]:
    """Return the outputs and gradients of a step, in training of the second one, and the buffers after it."""
    arguments: dict[str, Any] = {"features_only": True} if how == "features" else {}
    if how == "training" and has_option(arch, "drop_path_rate"):
        arguments["drop_path_rate"] = 0.4
    if arch in ("revnext", "revnext_flat"):
        arguments["activation_param"] = 0.3  # at smaller slopes, rounding errors grow
    noise = 0.0 if how == "evaluation" else 0.1  # statistics of other weights may let activations explode
    model = build(arch, norm=norm, noise=noise, memory=memory, **arguments).double().train(how != "evaluation")
    for _ in range(1 + (how == "training")):
        results = step(model, images(dtype=torch.float64))
    return results


@functools.cache
def plain_step(arch: str, norm: str | None, how: str) -> list[Tensor]:
    return double_step(arch, norm, "plain", how)


@pytest.mark.parametrize(
    ("arch", "memory", "norm", "how"),
    [
        (arch, memory, norm, how)
        for arch, memory in STRATEGIES
        for norm in norms_of(arch)
        for how in ("training", *(["evaluation"] + ["features"] * (arch in CLASSIFIERS)) * (norm != "standard"))
    ],
)
def test_steps_equal_stored_activations(arch: str, memory: str, norm: str | None, how: str) -> None:
    truth, found = plain_step(arch, norm, how), double_step(arch, norm, memory, how)
    assert len(found) == len(truth)
    size = max(float(each.abs().max()) for each in truth)
    for ours, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9 * size)


@pytest.mark.parametrize(("arch", "memory"), STRATEGIES)
def test_statistics_update_once_per_step_and_keys_equal_plain_keys(arch: str, memory: str) -> None:
    model = build(arch, memory=memory)
    assert list(model.state_dict()) == list(build(arch, memory="plain").state_dict())
    step(model, images())
    counts = {int(buffer) for key, buffer in model.named_buffers() if key.endswith("num_batches_tracked")}
    assert counts <= {1}


@pytest.mark.parametrize("arch", ALL)
def test_lean_steps_have_bits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lean_module, "Rematerializer", lambda *args, **kw: Rematerializer(*args, **kw, smallest_bytes=0)
    )
    more = {"drop_path_rate": 0.4} if has_option(arch, "drop_path_rate") else {}
    norm = norms_of(arch)[0]
    lean, plain = (build(arch, norm=norm, memory=memory, **more) for memory in ("lean", ARCHITECTURES[arch].made_lean))
    assert is_lean(lean)
    assert not is_lean(plain)
    assert arch in SEGMENTERS or is_lean(build(arch, norm=norm, memory="lean", features_only=True))
    results = [[step(model, images()) for _ in range(2)] for model in (lean, plain)]
    for ours, expected in zip(*results, strict=True):
        assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    ("arch", "memory"), [(arch, memory) for arch in CONVERTIBLE for memory in (*strategies(arch), "lean")]
)
def test_every_strategy_can_be_traced(arch: str, memory: str) -> None:
    with torch.device("meta"):
        plain, other = (build(arch, memory=value) for value in ("plain", memory))
    norms = [name for name, module in plain.named_modules() if isinstance(module, ABN)]
    expected, trace = Trace(plain), Trace(other)
    assert [trace.producer_of(name) for name in norms] == [expected.producer_of(name) for name in norms]
    assert any(trace.producer_of(name) for name in norms)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_unknown_strategy_raises_with_known_ones(arch: str) -> None:
    known = [*ARCHITECTURES[arch].memory]
    with torch.device("meta"):
        refused(zoo.ConfigError, lambda: zoo.get(arch, memory="none"), 'memory = "none"', known[0], known[-1])


# Stochastic depth


@pytest.mark.parametrize("arch", WITH_DROP_PATH)
def test_branches_are_dropped_in_training_with_rates_that_rise(arch: str) -> None:
    model, plain = build(arch, drop_path_rate=0.4), build(arch)
    body = getattr(model, "body", model)
    rates = [module.drop_path for module in body.modules() if hasattr(module, "drop_path")]
    assert len(rates) > 3
    assert max(rates) == pytest.approx(0.4)
    if ARCHITECTURES[arch].fixed_layers:
        assert min(rates) == 0 or arch.endswith("revbifpn_s0")
    else:
        assert rates == pytest.approx(torch.linspace(0, 0.4, len(rates)).tolist())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model.eval()(images()), plain.eval()(images()))
    with torch.no_grad():
        assert not torch.equal(*(each.train()(images()) for each in (model, plain) if torch.manual_seed(1)))


# Grid


def side_of(arch: str) -> int:
    return 64 if "revbifpn" in arch else 32 if arch.startswith("revvit") else 16


def ways_on_grid(arch: str, norm: str | None) -> list[dict[str, Any]]:
    if arch in SEGMENTERS:
        return [{"autocast": True}]
    if norm == "inplace":
        return [{}, {"autocast": True}]
    return [{"autocast": True}, {"layout": torch.channels_last}, *[{"batches": 2}] * (not arch.startswith("revbifpn"))]


@pytest.mark.parametrize(
    ("arch", "norm", "how"),
    [(arch, norm, how) for arch in ON_GRID for norm in norms_of(arch) for how in ways_on_grid(arch, norm)],
    ids=str,
)
def test_training_on_grid_is_bit_identical_to_stored_activations(
    arch: str, norm: str | None, how: dict[str, Any]
) -> None:
    more = {"drop_path_rate": 0.5} if has_option(arch, "drop_path_rate") else {}
    models = [build(arch, norm=norm, memory=memory, grid_bits=14, **more) for memory in ("auto", "plain")]
    ours, truth = (train(model, side=side_of(arch), **how) for model in models)
    assert len(truth) > 50
    assert not differing(ours, truth)


@pytest.mark.parametrize("arch", [arch for arch in ON_GRID if arch in CLASSIFIERS])
def test_without_grid_bits_differ(arch: str) -> None:
    """Shows that the tests above can fail."""
    ours, truth = (
        train(build(arch, memory=memory, grid_bits=None), side=side_of(arch)) for memory in ("auto", "plain")
    )
    assert torch.equal(ours["losses"][0], truth["losses"][0])
    assert len(differing(ours, truth)) > 20


@pytest.mark.parametrize("arch", [arch for arch in ON_GRID if arch in CLASSIFIERS])
def test_evaluation_and_traced_network_are_on_grid(arch: str) -> None:
    on_grid, stored, without = (
        build(arch, memory=memory, grid_bits=bits).eval()
        for memory, bits in (("auto", 6), ("plain", 6), ("auto", None))
    )
    x = images()
    with torch.no_grad():
        found, expected, other = on_grid(x), stored(x), without(x)
        traced = torch.fx.symbolic_trace(on_grid)
        assert torch.equal(found, expected)
        assert not torch.equal(found, other)
        torch.testing.assert_close(found, other, rtol=0.2, atol=0.2)
        torch.testing.assert_close(traced(x), found)
    assert sum(node.target is round_to_grid for node in traced.graph.nodes) > 5


@pytest.mark.parametrize("arch", ON_GRID)
def test_option_sets_grid_of_every_chain(arch: str) -> None:
    with torch.device("meta"):
        model = build(arch, grid_bits=9)
    chains = [module for module in model.modules() if isinstance(module, ReversibleSequential)]
    assert chains
    assert all(chain.grid_bits == block.grid_bits == 9 for chain in chains for block in chain)


def _train_distributed(arch: str, memory: str) -> dict[str, Tensor]:
    more = {"drop_path_rate": 0.5} if has_option(arch, "drop_path_rate") else {"norm": "sync"}
    return train(DistributedDataParallel(build(arch, memory=memory, grid_bits=14, **more)), side=side_of(arch))


@pytest.mark.dist
@pytest.mark.parametrize("arch", ["revnet38_cifar", pytest.param("revbifpn_s0", marks=pytest.mark.slow)])
def test_training_of_two_processes_is_bit_identical_to_stored_activations(arch: str) -> None:
    results = [run_distributed(_train_distributed, 2, arch, memory) for memory in ("auto", "plain")]
    for ours, truth in zip(*results, strict=True):
        assert not differing(ours, truth)


# Tracing and layers


@pytest.mark.parametrize("arch", ALL)
@torch.no_grad()
def test_torchvision_extracts_features_and_logits(arch: str) -> None:
    model, x = build(arch, norm=norms_of(arch)[-1], noise=0.1).eval(), images()
    last = "cls" if arch in SEGMENTERS else model.classifier_name
    node = model.norm_name if model.last_norm is not None else model.feature_info.module_name()[-1]
    node = "head" if arch in SEGMENTERS else node
    outputs: list[Tensor] = []
    model.get_submodule(node).register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
    logits = model.forward_logits(x) if arch in SEGMENTERS else model(x)
    extractor = create_feature_extractor(model, {node: "features", last: "logits"}).eval()
    found = extractor(x)
    assert relative_error(found["logits"], logits) < 1e-5
    assert not outputs or relative_error(found["features"], outputs[0]) < 1e-5
