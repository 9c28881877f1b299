"""Exported networks with standard norms contain only operators of torch; other packages can fold and translate them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.convert.networks import scramble
from tests.nets import build
from zoo.convert import convert_norm
from zoo.layers import ABN
from zoo.remat._lean import StepsAside

BATCH_NORM, CONVOLUTION = torch.ops.aten.batch_norm.default, torch.ops.aten.conv2d.default


def resnet(**options: Any) -> Any:
    return build("resnet18", **options)


def frozen() -> nn.Module:
    model = resnet()
    zoo.layers.freeze_norms(model)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": resnet,
    "relu": lambda: resnet(activation="relu"),
    "frozen": frozen,
    "converted": lambda: convert_norm(resnet(norm="inplace"), "standard"),
    "densenet": lambda: build("densenet121"),
    "wider_resnet": lambda: build("wider_resnet16"),
    "wider_resnet, pre-activation": lambda: build("wider_resnet16_a2"),
    "revnet": lambda: build("revnet38_cifar"),
    "deeplab": lambda: build("deeplab_densenet121"),
    "revnext": lambda: build("revnext", norm="standard"),
    "revnext, in-place": lambda: convert_norm(build("revnext", norm="inplace"), "standard"),
    "revnext_flat": lambda: build("revnext_flat", norm="sync"),
}
QUICK = ("leaky_relu", "frozen", "revnext_flat")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NETWORKS]


def network_and_images(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return scramble(NETWORKS[name](), positive=True).eval(), torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_exported_norms_read_their_buffers(name, gradients):
    model, x = network_and_images(name)
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(model, (x,))
    norms = [node for node in program.graph.nodes if node.target is BATCH_NORM]
    assert len(norms) == sum(isinstance(module, ABN) for module in model.modules())
    for node in norms:
        assert [argument.op for argument in node.args[3:5]] == ["placeholder"] * 2, "running mean and variance"
    assert not [node for node in program.graph.nodes if "zoo" in str(node.target)]
    with torch.no_grad():
        assert torch.allclose(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_batch_norms_fold_into_convolutions(name):
    utils = pytest.importorskip("torchao.quantization.pt2e.utils")
    model, x = network_and_images(name)
    module = torch.export.export(model, (x,)).module()
    utils._fuse_conv_bn_(module)
    left = [node for node in module.graph.nodes if node.target is BATCH_NORM]
    assert not any(node.args[0].target is CONVOLUTION and len(node.args[0].users) == 1 for node in left)
    assert len(left) < sum(isinstance(part, ABN) for part in model.modules()) or "revnext" in name  # norms of sums
    with torch.no_grad():
        assert torch.allclose(module(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["converted", "revnext", "revnext, in-place", "revnext_flat"])
@pytest.mark.filterwarnings("ignore")  # onnxscript and torch.onnx warn
def test_onnx_program_equals_network(name):
    pytest.importorskip("onnxscript")
    model, x = network_and_images(name)
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert {node.domain for node in program.model.graph} <= {""}
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), model(x), rtol=1e-3, atol=1e-4)


def test_lean_network_is_exported_unchanged():
    x, graphs = torch.empty(2, 3, 64, 64, device="meta"), []
    for memory in ("auto", "lean"):
        with torch.device("meta"):
            network = zoo.get("resnet18", norm="inplace", memory=memory).eval()
        with warnings.catch_warnings(action="ignore", category=StepsAside):
            graphs.append(torch.export.export(network, (x,)).graph)
    assert [node.target for node in graphs[0].nodes] == [node.target for node in graphs[1].nodes]
