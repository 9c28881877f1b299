"""RevBiFPN: the authors' formulas and state dict, and the bits of stored activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.feature_extraction import create_feature_extractor

import zoo
from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from tests.models.test_grid_bits import differing
from tests.step import step
from zoo.memory.allocations import measure_memory
from zoo.models.revbifpn import RevBiFPN

TINY: dict[str, Any] = {"channels": (48, 16, 16, 16), "head_channels": (16, 16, 16, 16), "features": 24}
TINY |= {"extra_stages": 1, "norm_momentum": 0.1}
PARAMETERS = {  # of the authors' networks, with the number of tensors in their state dicts
    "revbifpn_s0": (3_419_196, 1_874),
    "revbifpn_s1": (5_112_300, 1_874),
    "revbifpn_s2": (10_576_528, 1_874),
    "revbifpn_s3": (19_574_184, 2_366),
    "revbifpn_s4": (48_687_336, 2_858),
    "revbifpn_s5": (81_998_976, 2_858),
    "revbifpn_s6": (142_307_972, 3_350),
}
SHAPES = {  # of the authors' S0
    "rev_stack.1.rev_transform_0.f.xform_0_1.dw_conv.conv.weight": (24, 1, 3, 3),
    "rev_stack.1.rev_transform_0.f.xform_0_1.se.se.1.weight": (6, 24, 1, 1),
    "rev_stack.1.rev_transform_0.g.xform_0_1.project_conv.conv.weight": (24, 24, 1, 1),
    "rev_stack.3.f.xform_0_1.dw_conv.conv.weight": (48, 1, 3, 3),
    "rev_stack.3.f.xform_0_1.project_conv.conv.weight": (64, 48, 1, 1),
    "rev_stack.3.g.xform_0_1.0.dw_conv.conv.weight": (64, 1, 3, 3),
    "rev_stack.3.g.xform_0_1.0.se.se.1.weight": (16, 64, 1, 1),
    "rev_stack.3.g.xform_0_1.0.project_conv.conv.weight": (48, 64, 1, 1),
    "rev_stack.6.f.xform_0_2.dw_conv.conv.weight": (48, 1, 7, 7),
    "rev_stack.6.g.xform_0_1.0.project_conv.conv.weight": (64, 80, 1, 1),
    "rev_stack.6.g.xform_0_2.0.project_conv.conv.weight": (48, 80, 1, 1),
    "rev_stack.6.g.xform_1_2.0.project_conv.conv.weight": (48, 64, 1, 1),
    "rev_stack.recomp_op.recomp_transform_1.exp_conv.conv.weight": (128, 64, 1, 1),
    "rev_stack.recomp_op.recomp_transform_1.dw_conv.conv.weight": (128, 1, 5, 5),
    "rev_stack.recomp_op.recomp_transform_1.se.se.1.weight": (16, 128, 1, 1),
    "head.pyramid_heads.2.exp_conv.conv.weight": (256, 128, 1, 1),
    "head.pyramid_heads.2.se.se.1.weight": (16, 256, 1, 1),
    "head.final_conv.conv.weight": (1280, 320, 1, 1),
    "head.fc.weight": (1000, 1280),
}


def build(memory: str = "auto", grid_bits: int | None = None, rate: float = 0.0, **options: Any) -> RevBiFPN:
    """Return a small network of four stages, with the same random weights in each call."""
    torch.manual_seed(0)
    options = {"num_classes": 5} | TINY | options
    model = RevBiFPN(None, options.pop("num_classes"), **options, memory=memory, grid_bits=grid_bits)
    model.initialize()
    model.set_drop_path_rate(rate)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def images(dtype: torch.dtype = torch.float64, side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(2))


def reference(tensors: dict[str, Tensor], x: Tensor, training: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and the four maps of the neck, from tensors with the authors' names, by their formulas."""

    def norm(name: str, t: Tensor) -> Tensor:
        if training:
            mean, var = t.mean((0, 2, 3)), t.var((0, 2, 3), correction=0)
        else:
            mean, var = tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]
        scale = tensors[f"{name}.weight"] / (var + 1e-3).sqrt()
        shift = tensors[f"{name}.bias"] - mean * scale
        return t * scale[None, :, None, None] + shift[None, :, None, None]

    def hardswish(t: Tensor) -> Tensor:
        return t * (t + 3).clamp(0, 6) / 6

    def conv_norm(name: str, t: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = tensors[f"{name}.conv.weight"]
        y = F.conv2d(t, weight, stride=stride, padding=(weight.shape[2] - 1) // 2, groups=groups)
        return norm(f"{name}.norm", y)

    def block(name: str, t: Tensor, stride: int = 1) -> Tensor:
        if f"{name}.exp_conv.conv.weight" in tensors:
            t = hardswish(conv_norm(f"{name}.exp_conv", t))
        t = hardswish(conv_norm(f"{name}.dw_conv", t, stride, groups=t.shape[1]))
        if f"{name}.se.se.1.weight" in tensors:
            squeeze, expand = (f"{name}.se.se.{number}" for number in (1, 3))
            means = t.mean((2, 3), keepdim=True)
            inner = hardswish(F.conv2d(means, tensors[f"{squeeze}.weight"], tensors[f"{squeeze}.bias"]))
            gate = F.conv2d(inner, tensors[f"{expand}.weight"], tensors[f"{expand}.bias"])
            t = t * (gate + 3).clamp(0, 6) / 6
        return conv_norm(f"{name}.project_conv", t)

    def up(t: Tensor, factor: int) -> Tensor:
        return F.interpolate(t, scale_factor=factor, mode="bilinear", align_corners=False)

    width = 2 * tensors["rev_stack.1.rev_transform_0.f.xform_0_1.project_conv.conv.weight"].shape[0]
    repeated = width // 16
    planes = [x[:, index % 3] for index in range(repeated)]
    streams = [torch.stack([plane[:, dy::4, dx::4] for dy in range(4) for dx in range(4) for plane in planes], 1)]
    layers = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("rev_stack.") and key[10].isdigit())
    for number in range(1, layers):
        if number % 3:
            for index, stream in enumerate(streams):
                a, b = stream.chunk(2, 1)
                name = f"rev_stack.{number}.rev_transform_{index}"
                b = b + block(f"{name}.f.xform_0_1", a)
                a = a + block(f"{name}.g.xform_0_1", b)
                streams[index] = torch.cat((a, b), 1)
            continue
        count, old = min(len(streams) + 1, 4), list(streams)
        for i in range(len(old)):
            for j in range(i + 1, count):
                added = block(f"rev_stack.{number}.f.xform_{i}_{j}", old[i], stride=2 ** (j - i))
                if j == len(streams):
                    streams.append(added)
                else:
                    streams[j] = streams[j] + added
        old = list(streams)
        for i in reversed(range(count)):
            for j in reversed(range(i)):
                name = f"rev_stack.{number}.g.xform_{count - 1 - i}_{count - 1 - j}.0"
                streams[j] = streams[j] + up(block(name, old[i]), 2 ** (i - j))
    maps = [block(f"rev_stack.recomp_op.recomp_transform_{i}", stream) for i, stream in enumerate(streams)]
    if "head.fc.weight" not in tensors:
        return maps[-1], maps
    fused = maps[0]
    for i in range(3):
        fused = maps[i + 1] + block(f"head.pyramid_heads.{i}", fused, stride=2)
    features = hardswish(conv_norm("head.final_conv", fused)).mean((2, 3))
    return features @ tensors["head.fc.weight"].T + tensors["head.fc.bias"], maps


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_state_dict_are_authors(name):
    with torch.device("meta"):
        model = zoo.get(name)
    state = model.state_dict()
    assert (sum(p.numel() for p in model.parameters()), len(state)) == PARAMETERS[name]
    assert SHAPES.keys() <= state.keys()
    if name == "revbifpn_s0":
        assert {key: tuple(state[key].shape) for key in SHAPES} == SHAPES


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("memory", ["auto", "plain", "lean"])
def test_outputs_and_gradients_follow_authors_formulas(memory, layout):
    model = build("plain" if memory == "plain" else "auto").double()
    zoo.lean(model, enabled=memory == "lean")
    x = images().requires_grad_()
    expected, _ = reference(dict(model.named_parameters()), x)
    actual = model(x.contiguous(memory_format=layout))
    assert relative_error(actual, expected) < 1e-12
    inputs = [x, *model.parameters()]
    found, truth = (torch.autograd.grad(y.cos().sum(), inputs) for y in (actual, expected))
    for ours, theirs in zip(found, truth, strict=True):
        # torch's gradient of Hardsigmoid has 1/6 in single precision
        assert float((ours - theirs).norm()) < 1e-7 * float(theirs.norm()) + 1e-9


@pytest.mark.slow
def test_s0_follows_authors_formulas_in_evaluation():
    torch.manual_seed(0)
    model = zoo.get("revbifpn_s0").double().eval()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
        expected, maps = reference(model.state_dict(), images(), training=False)
        assert relative_error(model(images()), expected) < 1e-12
        assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(images()), maps, strict=True))


def train(
    model: Any, steps: int = 3, autocast: bool = False, layout: Any = torch.contiguous_format
) -> dict[str, Tensor]:
    """Return the losses, the last gradients, the weights and the buffers of a few steps of SGD."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.to(memory_format=layout).parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(torch.randn(4, 3, 64, 64).to(memory_format=layout)).float(), torch.arange(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **gradients, **model.state_dict()}


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("how", [{}, {"autocast": True}, {"layout": torch.channels_last}], ids=str)
def test_training_on_grid_has_bits_of_stored_activations(how, rate):
    results = []
    for memory in ("auto", "plain"):
        model = build(memory, 14, rate)
        model.set_drop_rate(rate)
        results.append(train(model, **how))
    assert len(results[1]) > 1000
    assert not differing(*results)


def test_without_grid_bits_differ():
    ours, truth = (train(build(memory), steps=1) for memory in ("auto", "plain"))
    assert torch.equal(ours["losses"], truth["losses"])
    assert len(differing(ours, truth)) > 100


def _train_distributed(memory: str) -> dict[str, Tensor]:
    return train(DistributedDataParallel(build(memory, 14, 0.5)))


@pytest.mark.dist
@pytest.mark.slow
def test_training_of_two_processes_has_bits_too():
    results = [run_distributed(_train_distributed, 2, memory) for memory in ("auto", "plain")]
    for ours, truth in zip(*results, strict=True):
        assert not differing(ours, truth)


@pytest.mark.slow
def test_thousand_steps_of_s0_have_bits_of_stored_activations():
    results = []
    for memory in ("auto", "plain"):
        torch.manual_seed(0)
        model = zoo.get("revbifpn_s0", num_classes=10, memory=memory, grid_bits=14, drop_rate=0.25, drop_path_rate=0.1)
        results.append(train_on_small_images(model, 1000))
    assert not differing(*results)


def train_on_small_images(model: torch.nn.Module, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(10, (4,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


@pytest.mark.parametrize("features_only", [False, True])
def test_gradients_with_drop_path_equal_stored_activations(features_only):
    results = []
    for memory in ("auto", "plain"):
        model = build(memory, rate=0.5, features_only=features_only, num_classes=0 if features_only else 5).double()
        torch.manual_seed(3)
        results.append(step(model, images()))
    assert len(results[0]) == len(results[1]) > 500
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_statistics_move_once_per_step_and_twice_as_authors_with_their_momentum():
    model, other = build(), build(norm_momentum=0.19)
    for each in (model, other):
        step(each, images(torch.float32))
    name = "rev_stack.1.rev_transform_0.f.xform_0_1.dw_conv.norm"
    assert all(int(count) == 1 for key, count in model.state_dict().items() if key.endswith("num_batches_tracked"))
    once, twice = (each.state_dict()[f"{name}.running_mean"] for each in (model, other))
    torch.testing.assert_close(twice, 1.9 * once)


def test_features_are_maps_of_the_neck():
    model = build(features_only=True, num_classes=0).eval()
    whole = build().eval()
    missing = whole.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert missing
    assert all(key.startswith("head.") for key in missing)
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    x = images(torch.float32)
    maps = model(x)
    assert [tuple(each.shape) for each in maps] == [(2, 16, 64 // r, 64 // r) for r in (4, 8, 16, 32)]
    assert all(map(torch.equal, maps, whole.forward_stages(x)))
    last, outputs = whole.forward_intermediates(x, 2)
    assert all(map(torch.equal, outputs, maps[2:]))
    assert last.shape == (2, whole.num_features, 2, 2)
    assert torch.equal(whole.forward_head(last), whole(x))
    whole.reset_classifier(0, "")
    assert torch.equal(whole(x), last)
    whole.reset_classifier(3)
    assert whole(x).shape == (2, 3)
    with pytest.raises(zoo.ConfigError, match="images of 48 x 64 pixels: this network needs multiples of 32"):
        model(x[:, :, :48])


def test_first_two_features_alone_are_equal():
    model = build(features_only=True, num_classes=0).eval()
    x = images(torch.float32)
    expected = model(x)
    model.select_features([0, 1])
    assert all(map(torch.equal, model(x), expected[:2]))


def test_torchvision_extracts_a_map():
    model, x = build().eval(), images(torch.float32)
    found = create_feature_extractor(model, {"rev_stack.recomp_op.recomp_transform_1": "map"}).eval()(x)
    torch.testing.assert_close(found["map"], model.forward_stages(x)[1])


def test_drop_rates_rise_with_the_stages_and_spare_new_streams():
    model = build(rate=0.4)
    block, silo, last = model.rev_stack[3], model.rev_stack[2], model.rev_stack[11]
    assert block.rev_transform_1.f["xform_0_1"].drop_path == pytest.approx(0.2)
    assert silo.f["xform_0_1"].drop_path == 0
    assert silo.g["xform_0_1"][0].drop_path == pytest.approx(0.1)
    assert last.f["xform_2_3"].drop_path == pytest.approx(0.4)
    assert model.rev_stack.recomp_op["recomp_transform_0"].drop_path == 0


def test_held_bytes_do_not_grow_with_stages():
    def held(**options: Any) -> int:
        model, x = build(**options), images(torch.float32)
        return measure_memory(lambda: model(x).mean(), model.parameters()).held

    assert held(extra_stages=1) == held(extra_stages=4) < 0.2 * held(extra_stages=4, memory="plain")


@pytest.mark.slow
def test_file_of_authors_is_loaded(tmp_path):
    source, path = zoo.get("revbifpn_s0"), tmp_path / "revbifpn_s0.pth.tar"
    torch.save(source.state_dict(), path)
    assert not differing(zoo.get("revbifpn_s0", weights=path).state_dict(), source.state_dict())
    assert zoo.load_weights(zoo.get("revbifpn_s0", num_classes=7), path).classifier == "kept"
    assert zoo.load_weights(zoo.get("revbifpn_s0", num_classes=0), path).classifier == "dropped"
    assert zoo.load_weights(zoo.get("revbifpn_s0", features_only=True), path).classifier == "dropped"
