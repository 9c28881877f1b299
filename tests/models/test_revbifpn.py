"""RevBiFPN follows the authors' formulas and state dict, and is bit-identical to stored activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.formula import relative_error
from tests.nets import build, differing, images, small_architectures
from tests.refusals import refused
from tests.step import step
from zoo.memory.allocations import measure_memory

PARAMETERS = {  # parameters of the authors' networks, and numbers of tensors in their state dicts
    "revbifpn_s0": (3_419_196, 1_874),
    "revbifpn_s1": (5_112_300, 1_874),
    "revbifpn_s2": (10_576_528, 1_874),
    "revbifpn_s3": (19_574_184, 2_366),
    "revbifpn_s4": (48_687_336, 2_858),
    "revbifpn_s5": (81_998_976, 2_858),
    "revbifpn_s6": (142_307_972, 3_350),
}
SHAPES = {  # shapes in the authors' S0
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
def test_parameters_and_state_dict_equal_authors(name):
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
    strategy = "plain" if memory == "plain" else "auto"
    model = build("revbifpn_s0", noise=0.1, memory=strategy, structure={"extra_stages": 1}).double()
    zoo.lean(model, enabled=memory == "lean")
    x = images(side=64, dtype=torch.float64).requires_grad_()
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
        x = images(dtype=torch.float64)
        expected, maps = reference(model.state_dict(), x, training=False)
        assert relative_error(model(x), expected) < 1e-12
        assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(x), maps, strict=True))


@pytest.mark.slow
def test_thousand_steps_of_s0_are_bit_identical_to_stored_activations():
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


def test_statistics_update_once_per_step_and_match_authors_with_norm_momentum():
    model, other = (build("revbifpn_s0", noise=0.1, norm_momentum=momentum) for momentum in (0.1, 0.19))
    for each in (model, other):
        step(each, images())
    name = "rev_stack.1.rev_transform_0.f.xform_0_1.dw_conv.norm"
    assert all(int(count) == 1 for key, count in model.state_dict().items() if key.endswith("num_batches_tracked"))
    once, twice = (each.state_dict()[f"{name}.running_mean"] for each in (model, other))
    torch.testing.assert_close(twice, 1.9 * once)


def test_images_with_indivisible_sides_raise():
    refused(zoo.ConfigError, lambda: build("revbifpn_s0")(torch.randn(1, 3, 48, 64)), "48 x 64 pixels", "32")


def test_drop_rates_rise_with_the_stages_and_spare_new_streams():
    model = build("revbifpn_s0", drop_path_rate=0.4, structure={"extra_stages": 1})
    block, silo, last = model.rev_stack[3], model.rev_stack[2], model.rev_stack[11]
    assert block.rev_transform_1.f["xform_0_1"].drop_path == pytest.approx(0.2)
    assert silo.f["xform_0_1"].drop_path == 0
    assert silo.g["xform_0_1"][0].drop_path == pytest.approx(0.1)
    assert last.f["xform_2_3"].drop_path == pytest.approx(0.4)
    assert model.rev_stack.recomp_op["recomp_transform_0"].drop_path == 0


def test_held_bytes_do_not_grow_with_stages():
    def held(extra_stages: int, memory: str = "auto") -> int:
        model = build("revbifpn_s0", memory=memory, structure={"extra_stages": extra_stages})
        x = images(2, 64)
        return measure_memory(lambda: model(x).mean(), model.parameters()).held

    assert held(1) == held(4) < 0.2 * held(4, "plain")


@small_architectures()
def test_file_of_authors_is_loaded(tmp_path):
    source, path = zoo.get("revbifpn_s0"), tmp_path / "revbifpn_s0.pth.tar"
    torch.save(source.state_dict(), path)
    assert not differing(zoo.get("revbifpn_s0", weights=path).state_dict(), source.state_dict())
    assert zoo.load_weights(zoo.get("revbifpn_s0", num_classes=7), path).classifier == "kept"
    assert zoo.load_weights(zoo.get("revbifpn_s0", num_classes=0), path).classifier == "dropped"
    assert zoo.load_weights(zoo.get("revbifpn_s0", features_only=True), path).classifier == "dropped"
