"""Lean training of networks of other packages: bits, memory and time, beside the gradient checkpointing of the package.

Each network is built with random weights as its package documents, trained for two steps plainly, twice, and lean, and
compared bit for bit (`zoo.check`). Networks of packages that are not installed are left out, with a note.

    pip install peft transformers diffusers monai segmentation-models-pytorch timm ultralytics bitsandbytes
    python -m tests.libraries --out docs/results/libraries
    python -m tests.libraries --steps --out docs/results/step_libraries

``--steps`` measures whole steps with AdamW instead: plain, lean, and with released gradients.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zoo
from zoo.benchmark.results import Case, Results, describe_error
from zoo.benchmark.whole_step import measure_step
from zoo.memory.timing import keep_heap
from zoo.memory.trial import copy_tensors, default_loss

IMAGES_PX = 64
ROUNDS = 7  # timed steps


class Example(NamedTuple):
    """A network of another package and how it is trained.

    Args:
    - `model`: in training mode.
    - `inputs`: its arguments by name, or a tuple.
    - `loss`: of its output; None for the loss that the network returns, or the mean square of its output.
    - `checkpointed`: turns on the gradient checkpointing of the package, if it has one.
    """

    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None = None
    checkpointed: Callable[[Any], object] | None = None


def images(count: int = 4, channels: int = 3, size: int = IMAGES_PX) -> Tensor:
    """Return random images."""
    return torch.randn(count, channels, size, size)


def tokens(count: int = 2, length: int = 128, vocabulary: int = 1000) -> dict[str, Tensor]:
    """Return random texts, with themselves as labels."""
    ids = torch.randint(vocabulary, (count, length))
    return {"input_ids": ids, "labels": ids}


def llama(layers: int = 4, **options: Any) -> nn.Module:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_lora(model: nn.Module, targets: list[str], **options: Any) -> Any:
    """Return the network with adapters of rank 8 and dropout, as PEFT adds them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=targets, **options)
    return get_peft_model(model, config)


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def checkpointing_of_transformers(model: Any) -> None:
    """Turn on gradient checkpointing as transformers documents for frozen networks with adapters."""
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable()


def lora_resnet50() -> Example:
    """PEFT's LoRA on all convolutions of torchvision's ResNet-50."""
    import torchvision

    model = with_lora(torchvision.models.resnet50(), ["conv1", "conv2", "conv3"])
    return Example(model, (images(),))


def lora_llama() -> Example:
    """PEFT's LoRA on all projections of a Llama of transformers."""
    return Example(with_lora(llama(), PROJECTIONS), tokens(), checkpointed=checkpointing_of_transformers)


def dora_llama() -> Example:
    """PEFT's DoRA on a Llama."""
    model = with_lora(llama(), ["q_proj", "v_proj"], use_dora=True)
    return Example(model, tokens(), checkpointed=checkpointing_of_transformers)


def lora_4bit_llama() -> Example:
    """LoRA on a Llama with a base in 4 bits of bitsandbytes (QLoRA)."""
    import bitsandbytes as bnb

    model = llama()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            owner, _, child = name.rpartition(".")
            quantized = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            quantized.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.get_submodule(owner), child, quantized.to("cpu"))
    return Example(with_lora(model, PROJECTIONS), tokens(), checkpointed=checkpointing_of_transformers)


def gpt2() -> Example:
    """GPT-2 of transformers, with four layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    return Example(model, tokens(), checkpointed=lambda each: each.gradient_checkpointing_enable())


def of_diffusers(model: Any, inputs: dict[str, Any] | tuple[Any, ...]) -> Example:
    """Return a network of diffusers, whose loss is the mean square of its sample."""

    def loss(output: Any) -> Tensor:
        return output.sample.square().mean()

    return Example(model.train(), inputs, loss, lambda each: each.enable_gradient_checkpointing())


def unet_with_lora() -> Example:
    """LoRA on the attention of a conditional UNet of diffusers, as in its training scripts."""
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig

    model: Any = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=64, attention_head_dim=8,
        norm_num_groups=8,
    )  # fmt: skip
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    inputs = (images(2, 4, 32), torch.tensor([10, 500]), torch.randn(2, 16, 64))
    return of_diffusers(model, inputs)


def dit() -> Example:
    """A diffusion transformer (DiT) of diffusers."""
    from diffusers import DiTTransformer2DModel

    model: Any = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=32, num_layers=4, sample_size=16)
    inputs = {
        "hidden_states": images(4, 4, 16),
        "timestep": torch.tensor([1, 10, 100, 500]),
        "class_labels": torch.tensor([1, 2, 3, 4]),
    }
    return of_diffusers(model, inputs)


def yolo() -> Example:
    """YOLOv8n of Ultralytics, with its own loss."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model: Any = DetectionModel("yolov8n.yaml", verbose=False)
    model.args = get_cfg()
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.4, 0.2, 0.2]])
    batch = {"img": images(2).sigmoid(), "cls": torch.tensor([[0.0], [3.0]]), "bboxes": boxes}
    batch["batch_idx"] = torch.tensor([0.0, 1.0])
    return Example(model.train(), (batch,), lambda out: out[0].sum())


def dynunet() -> Example:
    """MONAI's DynUNet on volumes."""
    from monai.networks.nets import DynUNet

    model = DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32])
    return Example(model.train(), (torch.randn(1, 1, 32, 32, 32),))


def smp_unet() -> Example:
    """A Unet of segmentation_models_pytorch on a ResNet-34."""
    import segmentation_models_pytorch as smp

    return Example(smp.Unet("resnet34", encoder_weights=None).train(), (images(),))


def faster_rcnn() -> Example:
    """Faster R-CNN of torchvision, with its own losses."""
    import torchvision

    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(
        weights=None, weights_backbone=None, min_size=128, max_size=128
    )
    targets = [{"boxes": torch.tensor([[10.0, 10, 60, 60]]), "labels": torch.tensor([1])} for _ in range(2)]
    return Example(model.train(), (list(images(2, size=128).sigmoid()), targets))


def timm_network(name: str) -> Callable[[], Example]:
    """Return the builder of a network of timm."""

    def build() -> Example:
        import timm

        size = timm.get_pretrained_cfg(name).input_size[-1]
        return Example(
            timm.create_model(name).train(), (images(2, size=size),), None, lambda each: each.set_grad_checkpointing()
        )

    return build


#: Name -> the packages that it needs beside torch, and its builder.
EXAMPLES: dict[str, tuple[tuple[str, ...], Callable[[], Example]]] = {
    "PEFT: LoRA on ResNet-50": (("peft",), lora_resnet50),
    "PEFT: LoRA on Llama, 4 layers": (("peft", "transformers"), lora_llama),
    "PEFT: LoRA on Llama in 4 bits": (("peft", "transformers", "bitsandbytes"), lora_4bit_llama),
    "PEFT: DoRA on Llama": (("peft", "transformers"), dora_llama),
    "transformers: GPT-2": (("transformers",), gpt2),
    "diffusers: UNet with LoRA": (("diffusers", "peft"), unet_with_lora),
    "diffusers: DiT": (("diffusers",), dit),
    "Ultralytics: YOLOv8n": (("ultralytics",), yolo),
    "MONAI: DynUNet": (("monai",), dynunet),
    "segmentation_models_pytorch: Unet": (("segmentation_models_pytorch",), smp_unet),
    "torchvision: Faster R-CNN": ((), faster_rcnn),
    "timm: ViT-S/16": (("timm",), timm_network("vit_small_patch16_224")),
    "timm: ConvNeXt-T": (("timm",), timm_network("convnext_tiny")),
}


def checked(example: Example, variant: Callable[[nn.Module], nn.Module]) -> Any:
    """Return the result of `zoo.check` for an example."""
    args, kwargs = ((), example.inputs) if isinstance(example.inputs, dict) else (example.inputs, {})
    return zoo.check(example.model, *args, variant=variant, loss=example.loss, **kwargs)


def forward_of(example: Example, model: nn.Module) -> Callable[[], Tensor]:
    """Return a function that computes the loss of a copy of the network of an example."""
    args, kwargs = ((), example.inputs) if isinstance(example.inputs, dict) else (example.inputs, {})
    loss = example.loss or default_loss
    return lambda: loss(model(*copy_tensors(args), **copy_tensors(kwargs)))


def in_place(change: Callable[[Any], object]) -> Callable[[nn.Module], nn.Module]:
    """Return a variant that changes a network in place."""

    def apply(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return apply


def main(argv: list[str] | None = None) -> int:
    """Check the networks and write OUT.json and OUT.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(EXAMPLES), metavar="NAME", help="networks, all by default")
    parser.add_argument("--out", type=Path, default=Path("libraries"), help="path of the result files, without ending")
    parser.add_argument("--steps", action="store_true", help="measure whole steps with AdamW")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_heap()
    command = shlex.join(["python", "-m", "tests.libraries", *(sys.argv[1:] if argv is None else argv)])
    results = Results(
        "libraries", command, torch.device("cpu"), {"threads": 1, "timing": "median of 5 interleaved steps"}
    )
    for name in args.only:
        packages, build = EXAMPLES[name]
        missing = [each for each in packages if find_spec(each) is None]
        if missing:
            results.note(f"not measured: {name} (pip install {' '.join(missing)})")
            continue
        print(name, flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            example = build()
            if args.steps:
                measure_step(results, Case(name, (), "float32", "contiguous"), example.model,
                             partial(forward_of, example), optimizer="AdamW", rounds=ROUNDS)  # fmt: skip
                continue
            variants: dict[str, Callable[[nn.Module], nn.Module]] = {"zoo.lean": zoo.lean}
            if example.checkpointed is not None:
                variants["its own checkpointing"] = in_place(example.checkpointed)
            case = Case(name, (), "float32", "contiguous")
            for provider, variant in variants.items():
                try:
                    found = checked(example, variant)
                except Exception as error:
                    results.note(f"{name}, {provider}: fails ({describe_error(error)})")
                    continue
                results.add(case, provider, "same bits", "1", [float(found.same is True)])
                results.add(case, provider, "held, plain", "MB", [found.plain.held / 1e6])
                results.add(case, provider, "held", "MB", [found.variant.held / 1e6])
                results.add(case, provider, "held ratio", "1", [found.variant.held / found.plain.held])
                results.add(case, provider, "peak ratio", "1", [found.variant.peak / found.plain.peak])
                results.add(case, provider, "time ratio", "1", [found.time_ratio])
                if found.difference is not None:
                    results.note(f"{name}, {provider}: {found.difference}")
    results.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
