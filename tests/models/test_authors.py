"""Networks of published papers have the sizes, formulas and files of their authors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.formula import relative_error
from tests.held import held_bytes
from tests.models import formulas
from tests.nets import build, differing, images, small_architectures, strategies
from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES, network_sizes

# Table 2 of Gomez et al. 2017 has the RevNets, rounded; 45.2 M for RevNet-104, whose public code has 45.43 M.
PARAMETERS = {
    "resnet32_cifar": 464_154,
    "revnet38_cifar": 464_890,
    "resnet110_cifar": 1_727_962,
    "revnet110_cifar": 1_729_194,
    "resnet164_cifar": 1_703_258,
    "revnet164_cifar": 1_748_778,
    "resnet101_preact": 44_541_480,
    "revnet104": 45_428_072,
    "revnet56": 27_553_128,
    "revvit_s": 22_434_664,
    "revvit_b": 87_335_656,
    "revbifpn_s0": 3_419_196,
    "revbifpn_s1": 5_112_300,
    "revbifpn_s2": 10_576_528,
    "revbifpn_s3": 19_574_184,
    "revbifpn_s4": 48_687_336,
    "revbifpn_s5": 81_998_976,
    "revbifpn_s6": 142_307_972,
    "revcol_tiny": 30_456_168,
    "revcol_small": 60_568_424,
    "revcol_base": 138_616_408,
    "revcol_large": 273_095_400,
}
#: Tensors in the authors' state dicts.
ENTRIES = {"revvit_s": 199, "revvit_b": 199, **{f"revbifpn_s{size}": 1_874 for size in range(3)}}
ENTRIES |= {"revbifpn_s3": 2_366, "revbifpn_s4": 2_858, "revbifpn_s5": 2_858, "revbifpn_s6": 3_350}
ENTRIES |= {"revcol_tiny": 468, "revcol_small": 940, "revcol_base": 1_452, "revcol_large": 1_012}
#: Parameters of networks with other than the default arguments.
CHANGED: list[tuple[str, dict[str, Any], int]] = [
    ("resnet32_cifar", {"num_classes": 100}, 470_004),
    ("revnet38_cifar", {"num_classes": 100}, 475_060),
    ("resnet110_cifar", {"num_classes": 100}, 1_733_812),
    ("revnet110_cifar", {"num_classes": 100}, 1_740_804),
    ("resnet164_cifar", {"num_classes": 100}, 1_726_388),
    ("revnet164_cifar", {"num_classes": 100}, 1_794_948),
    ("revnext_flat", {"layers": [1, 1, 1]}, 1_260_704),
    ("revnext_flat", {"layers": [2, 3, 3]}, 3_774_688),
    ("revnext_flat", {"layers": [3, 3, 3]}, 3_779_360),
    ("revnext_flat", {"layers": [4, 4, 4]}, 5_038_688),
    ("revnext", {"pools": ["channel", "channel"], "blocks": [1, 1]}, 1_264_352),
    ("revnext", {"pools": ["channel", "channel"], "blocks": [1, 2]}, 2_446_048),
    ("revnext", {"pools": ["channel", "channel"], "blocks": [2, 3]}, 3_701_984),
    ("revnext", {"pools": ["channel", "batch", "channel"], "blocks": [1, 1, 1]}, 1_338_592),
    ("revnext", {"pools": ["channel", "batch", "channel"], "blocks": [2, 2, 2]}, 2_668_768),
    ("revnext", {"pools": ["channel", "channel", "batch"], "blocks": [1, 1, 1]}, 2_446_048),
    ("revnext", {"pools": ["channel", "channel", "batch"], "blocks": [1, 1, 2]}, 3_627_744),
]
#: Shapes in the authors' state dicts.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "revvit_s": {
        "pos_embed": (1, 196, 384),
        "patch_embed.proj.weight": (384, 3, 16, 16),
        "patch_embed.proj.bias": (384,),
        **{f"rev_backbone.layers.11.{each}.norm.weight": (384,) for each in "FG"},
        **{f"rev_backbone.layers.11.F.attn.{each}.weight": (384, 384) for each in ("q", "k", "v", "proj")},
        **{f"rev_backbone.layers.11.F.attn.{each}.bias": (384,) for each in ("q", "k", "v", "proj")},
        "rev_backbone.layers.11.G.mlp.fc1.weight": (1536, 384),
        "rev_backbone.layers.11.G.mlp.fc1.bias": (1536,),
        "rev_backbone.layers.11.G.mlp.fc2.weight": (384, 1536),
        "norm.weight": (768,),
        "head.projection.weight": (1000, 768),
        "head.projection.bias": (1000,),
    },
    "revbifpn_s0": {
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
    },
    "revcol_tiny": {
        "stem.0.weight": (64, 3, 4, 4),
        "subnet0.alpha3": (1, 512, 1, 1),
        "subnet1.level2.fusion.down.0.weight": (256, 128, 2, 2),
        "subnet1.level2.fusion.up.channel_reschedule.0.weight": (256, 512),
        "subnet3.level1.blocks.1.gamma": (128,),
        "subnet3.level1.blocks.1.dwconv.weight": (128, 1, 3, 3),
        "subnet3.level1.blocks.1.pwconv1.weight": (512, 128),
        "cls.classifier.0.weight": (512,),
        "cls.classifier.1.weight": (1000, 512),
    },
}


def on_meta(name: str, **arguments: Any) -> Any:
    with torch.device("meta"):
        return zoo.get(name, **arguments)


def test_sizes_equal_authors() -> None:
    sizes = network_sizes()
    assert {name: sizes[name]["parameters"] for name in PARAMETERS} == PARAMETERS
    assert {name: sizes[name]["entries"] for name in ENTRIES} == ENTRIES
    families = ("preact", "revnet", "revvit", "revbifpn", "revcol")
    assert {name for name, record in ARCHITECTURES.items() if record.family in families} == PARAMETERS.keys()


@pytest.mark.parametrize(("name", "arguments", "parameters"), CHANGED, ids=str)
def test_sizes_of_other_arguments_equal_authors(name: str, arguments: dict[str, Any], parameters: int) -> None:
    model = on_meta(name, **{"num_classes": 10, **arguments})
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_state_dict_has_shapes_of_authors(name: str) -> None:
    state = on_meta(name).state_dict()
    assert {key: tuple(state[key].shape) for key in SHAPES[name]} == SHAPES[name]


# The formula, arguments of the network, the side of images, and the tolerance of gradients relative to their norm.
# torch's gradient of Hardsigmoid has 1/6 in single precision.
FORMULAS: dict[str, tuple[Callable[..., tuple[Tensor, list[Tensor]]], dict[str, Any], int, float]] = {
    "revvit_s": (formulas.revvit, {"noise": 0.3}, 32, 1e-10),
    "revbifpn_s0": (formulas.revbifpn, {"noise": 0.1, "structure": {"extra_stages": 1}}, 64, 1e-7),
    "revcol_tiny": (formulas.revcol, {"noise": 0.1}, 64, 1e-7),
}


@pytest.mark.parametrize(
    ("arch", "memory", "layout"),
    [
        (arch, memory, layout)
        for arch in FORMULAS
        for memory in (*strategies(arch), "plain", "lean")
        for layout in (torch.contiguous_format, *[torch.channels_last] * (memory != "lean"))
    ],
    ids=str,
)
def test_outputs_and_gradients_follow_formulas_of_authors(arch: str, memory: str, layout: torch.memory_format) -> None:
    formula, arguments, side, tolerance = FORMULAS[arch]
    model = build(arch, memory=memory, **arguments).double()
    x = images(2, side, torch.float64).requires_grad_()
    expected, maps = formula(dict(model.named_parameters()), x)
    actual = model(x.contiguous(memory_format=layout))
    assert relative_error(actual, expected) < 1e-12
    assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(x), maps, strict=True))
    inputs = [x, *model.parameters()]
    found = torch.autograd.grad(actual.cos().sum(), inputs)
    truth = torch.autograd.grad(expected.cos().sum(), inputs, materialize_grads=True)
    for ours, theirs in zip(found, truth, strict=True):  # absolute for biases whose gradients are 0
        assert float((ours - theirs).norm()) < tolerance * float(theirs.norm()) + 1e-2 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("revvit_s", partial(formulas.revvit, heads=6)),
        ("revbifpn_s0", partial(formulas.revbifpn, training=False)),
        ("revcol_tiny", formulas.revcol),
    ],
)
@torch.no_grad()
def test_whole_networks_follow_formulas_of_authors_in_evaluation(name: str, formula: Any) -> None:
    torch.manual_seed(0)
    model = zoo.get(name).double().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor), alpha=0.05)
    x = images(1, 224 if name == "revvit_s" else 32, torch.float64)
    expected, maps = formula(model.state_dict(), x)
    assert relative_error(model(x), expected) < 1e-12
    assert all(relative_error(*pair) < 1e-12 for pair in zip(model.forward_stages(x), maps, strict=True))


FILES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "revvit_s": lambda state: {"epoch": 299, "model_state": state, "optimizer_state": {}, "cfg": "TRAIN: {}"},
    "revbifpn_s0": lambda state: state,
}


@pytest.mark.parametrize("arch", FILES)
@small_architectures()
def test_file_of_authors_is_loaded_strictly(arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, path = zoo.get(arch), tmp_path / "w.pth"
    state = source.state_dict()
    torch.save(FILES[arch](state), path)
    assert not differing(zoo.get(arch, weights=path).state_dict(), state)
    assert "assuming" not in caplog.text
    for arguments, what in (
        ({"num_classes": 7}, "kept"),
        ({"num_classes": 0}, "dropped"),
        ({"features_only": True}, "dropped"),
    ):
        assert zoo.load_weights(zoo.get(arch, **arguments), path).classifier == what
    key = list(state)[8]
    state[f"{key}.other"] = state.pop(key)
    torch.save(FILES[arch](state), path)
    refused(zoo.WeightsError, lambda: zoo.get(arch, weights=path), "missing in the file (1)", key)


#: The option that makes the small network of a family deeper, for two depths, and the share of all activations.
DEPTHS: dict[str, tuple[list[dict[str, Any]], int, float]] = {
    "revvit_s": ([{"structure": (2,)}, {"structure": (12,)}], 32, 0.06),
    "revbifpn_s0": ([{"extra_stages": 1}, {"extra_stages": 2}], 64, 0.3),
}


@pytest.mark.parametrize("arch", DEPTHS)
def test_held_bytes_do_not_grow_with_depth(arch: str) -> None:
    (shallow, deep), side, share = DEPTHS[arch]

    def held(structure: dict[str, Any], **options: Any) -> int:
        model, x = build(arch, structure=structure, **options), images(1, side)
        return held_bytes(lambda: model(x).mean())

    assert held(shallow) == held(deep) < share * held(deep, memory="plain")
    if arch == "revvit_s":
        assert held(deep, grid_bits=14) < 1.2 * held(deep) + 12 * 100  # digests


#: Rates of branches with a rate of 0.4 in the last.
RATES = {
    "revvit_s": {"layers.0.F": 0, "layers.0.G": 0, "layers.1.F": 0.2, "layers.1.G": 0.2, "layers.2.G": 0.4},
    "revbifpn_s0": {
        "4.rev_transform_1.f.xform_0_1": 0.2,
        "3.f.xform_0_1": 0,  # a new stream is never dropped
        "3.g.xform_0_1.0": 0.1,
        "12.f.xform_2_3": 0.4,
        "recomp_op.recomp_transform_0": 0,
    },
}


@pytest.mark.parametrize("arch", RATES)
def test_drop_rates_rise_to_the_last_block(arch: str) -> None:
    structure = {"extra_stages": 1} if arch == "revbifpn_s0" else {}
    model = build(arch, drop_path_rate=0.4, structure=structure)
    body = model.rev_backbone if arch == "revvit_s" else model.rev_stack
    assert {name: body.get_submodule(name).drop_path for name in RATES[arch]} == pytest.approx(RATES[arch])
