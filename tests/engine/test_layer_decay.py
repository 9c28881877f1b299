"""Layers equal timm's for networks with its matcher; for other networks they are the blocks in order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.engine.test_optim import built, on_meta
from zoo.engine._layer_decay import layers_of

OWN = ("resnet18", "densenet264", "revnet38_cifar", "irevnet_cifar", "resnext50", "revvit_s", "revbifpn_s0")
TIMM = ("vit_tiny_patch16_224", "convnext_atto", "resnet18", "efficientnet_b0", "swin_tiny_patch4_window7_224")
TORCHVISION = ("resnet18", "mobilenet_v3_small", "vit_b_16", "vgg11_bn", "densenet121", "swin_t", "shufflenet_v2_x0_5")


@pytest.mark.parametrize("name", [*OWN, *(f"timm:{name}" for name in TIMM)])
def test_rates_equal_timm(name: str) -> None:
    groups = pytest.importorskip("timm.optim").param_groups_layer_decay
    model = on_meta(name)
    never = getattr(model, "no_weight_decay", tuple)()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {
        names[id(parameter)]: (float(f"{0.2 * group['lr_scale']:.9g}"), group["weight_decay"])
        for group in groups(model, 0.05, no_weight_decay_list=never, layer_decay=0.7)
        for parameter in group["params"]
    }
    settings = {"learning_rate": 0.2, "weight_decay": 0.05, "decay_norms": False, "decay_biases": False}
    assert built(model, layer_decay=0.7, **settings) == expected


@pytest.mark.parametrize("name", TORCHVISION)
def test_layers_of_torchvision_go_from_stem_to_head(name: str) -> None:
    model = on_meta(f"torchvision:{name}")
    layers = layers_of(model)
    assert set(layers) == {name for name, _ in model.named_parameters()}
    numbers = [layers[name] for name, _ in model.named_parameters()]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1))
    assert numbers[-1] >= 5


def test_layers_of_torchvisions_resnet_are_its_blocks() -> None:
    layers = layers_of(on_meta("torchvision:resnet18"))
    assert {layers["conv1.weight"], layers["bn1.bias"]} == {0}
    blocks = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    for number, block in enumerate(blocks, start=1):
        assert {layer for name, layer in layers.items() if name.startswith(f"{block}.")} == {number}
    assert (layers["fc.weight"], layers["fc.bias"]) == (9, 9)


def test_stem_and_last_norm_of_torchvisions_transformer_join_their_neighbors() -> None:
    layers = layers_of(on_meta("torchvision:vit_b_16"))
    assert layers["class_token"] == layers["conv_proj.weight"] == layers["encoder.pos_embedding"] == 0
    assert layers["encoder.layers.encoder_layer_0.ln_1.weight"] == 1
    assert layers["encoder.ln.weight"] == layers["encoder.layers.encoder_layer_11.mlp.0.weight"] == 12
    assert layers["heads.head.bias"] == 13


def test_matcher_may_be_function() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def group_matcher(self, coarse: bool = False) -> Any:
            return lambda name: {"a.weight": 1, "b.weight": 0}.get(name, float("inf"))

    assert layers_of(Net()) == {"b.weight": 0, "a.weight": 1, "c.weight": 2}
    assert built(Net(), learning_rate=1.0, layer_decay=0.5, classifier_lr=-1) == {
        "b.weight": (0.25, 1e-4),
        "a.weight": (0.5, 1e-4),
        "c.weight": (1.0, 1e-4),
    }


def test_classifier_rate_is_not_decayed() -> None:
    rates = built(on_meta("torchvision:resnet18"), learning_rate=1.0, layer_decay=0.5, classifier_lr=3.0)
    assert rates["fc.weight"][0] == 3.0
    assert rates["layer4.1.bn2.weight"][0] == 0.5
    assert rates["conv1.weight"][0] == 0.5**9
