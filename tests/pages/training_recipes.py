"""Published training recipes as their sources state them; docs/training-recipes.md shows them beside the experiments.

Every value is transcribed from the source, not from the experiment file, and computed as the source computes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from zoo.config import leaves, load_experiment

GITHUB = "https://github.com"
VISION = f"{GITHUB}/pytorch/vision/blob/main/references/classification"
TIMM = f"{GITHUB}/huggingface/pytorch-image-models/blob"
RSB = "https://arxiv.org/abs/2110.00476"
MMPRETRAIN = f"{GITHUB}/open-mmlab/mmpretrain/tree/ee7f2e88501f61aa95c742dd5f429f039935ee90/configs/resnet"
SOURCES = {
    "vision README": f"{VISION}/README.md",
    "vision train.py": f"{VISION}/train.py",
    "vision #3995": f"{GITHUB}/pytorch/vision/issues/3995#issuecomment-1013906621",
    "vision weights": f"{GITHUB}/pytorch/vision/blob/main/torchvision/models/resnet.py",
    "paper, Table 2": RSB,
    "timm 2021-10": f"{TIMM}/fbf59c04eeee5563c0f82b23c0643b511ecb2656/train.py",
    "timm 2020-01": f"{TIMM}/7622015258a16e2d9291576e98530495b0d2ade6/train.py",
    "timm docs": f"{TIMM}/main/hfdocs/source/training_script.mdx",
    "timm results": f"{TIMM}/main/results/results-imagenet.csv",
    "ML-Decoder": f"{GITHUB}/Alibaba-MIIL/ML_Decoder",
    "TRAINING.md": f"{GITHUB}/facebookresearch/ConvNeXt/blob/main/TRAINING.md",
    "ConvNeXt main.py": f"{GITHUB}/facebookresearch/ConvNeXt/blob/main/main.py",
    "ConvNeXt data": f"{GITHUB}/facebookresearch/ConvNeXt/blob/main/datasets.py",
    "README_deit": f"{GITHUB}/facebookresearch/deit/blob/main/README_deit.md",
    "deit main.py": f"{GITHUB}/facebookresearch/deit/blob/main/main.py",
    "deit data": f"{GITHUB}/facebookresearch/deit/blob/main/datasets.py",
    "Swin config.py": f"{GITHUB}/microsoft/Swin-Transformer/blob/main/config.py",
    "Swin yaml": f"{GITHUB}/microsoft/Swin-Transformer/blob/main/configs/swin/swin_tiny_patch4_window7_224.yaml",
    "Swin main.py": f"{GITHUB}/microsoft/Swin-Transformer/blob/main/main.py",
    "Swin data": f"{GITHUB}/microsoft/Swin-Transformer/blob/main/data/build.py",
    "get_started": f"{GITHUB}/microsoft/Swin-Transformer/blob/main/get_started.md",
}


class Row(NamedTuple):
    """A setting: its key in the experiment, its value and its statement according to the source, and the place."""

    key: str
    value: Any
    stated: str
    place: str


class Recipe(NamedTuple):
    """A recipe: the name of its experiment, a title, its settings, and what the experiment does differently."""

    name: str
    title: str
    rows: Sequence[Row]
    differences: Sequence[str]


ERASING = (
    "Random erasing has the limits of timm: areas up to 1/3 and aspect ratios up to 10/3, instead of 0.33 and 3.3."
)

V1 = Recipe(
    "imagenet_resnet50_torchvision_v1",
    "ResNet-50, torchvision V1",
    [
        Row("network.arch", "torchvision:resnet50", "--model resnet50", "vision README"),
        Row("optimizer.type", "SGD", "--opt sgd (default)", "vision train.py"),
        Row("optimizer.batch_size", 8 * 32, "--batch_size 32 on 8 GPUs", "vision README"),
        Row("optimizer.learning_rate", 0.1, "--lr 0.1", "vision README"),
        Row("optimizer.momentum", 0.9, "--momentum 0.9", "vision README"),
        Row("optimizer.weight_decay", 1e-4, "--wd 1e-4", "vision README"),
        Row("optimizer.clip", 0, "no --clip-grad-norm", "vision README"),
        Row("optimizer.label_smoothing", 0, "--label-smoothing 0.0 (default)", "vision train.py"),
        Row("optimizer.schedule.type", "step", "--lr-scheduler steplr (default)", "vision train.py"),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", "vision train.py"),
        Row("optimizer.schedule.epochs", 90, "--epochs 90", "vision README"),
        Row("optimizer.schedule.params.step_size", 30, "--lr-step-size 30", "vision README"),
        Row("optimizer.schedule.params.gamma", 0.1, "--lr-gamma 0.1", "vision README"),
        Row("input.crop_train", 224, "--train-crop-size 224 (default)", "vision train.py"),
        Row("input.interpolation_train", "bilinear", "--interpolation bilinear (default)", "vision train.py"),
        Row("input.scale_val", 256, "--val-resize-size 256 (default)", "vision train.py"),
        Row("input.crop_val", 224, "--val-crop-size 224 (default)", "vision train.py"),
    ],
    [],
)

EMA_ALPHA = min(1.0, (1 - 0.99998) * 8 * 128 * 32 / 600)  # train.py adjusts the decay to the batch size and the epochs
V2 = Recipe(
    "imagenet_resnet50_torchvision_v2",
    "ResNet-50, torchvision V2",
    [
        Row("network.arch", "torchvision:resnet50", "--model resnet50", "vision #3995"),
        Row("optimizer.type", "SGD", "--opt sgd (default)", "vision train.py"),
        Row("optimizer.batch_size", 8 * 128, "--batch-size 128 on 8 GPUs", "vision #3995"),
        Row("optimizer.learning_rate", 0.5, "--lr 0.5", "vision #3995"),
        Row("optimizer.momentum", 0.9, "--momentum 0.9 (default)", "vision train.py"),
        Row("optimizer.weight_decay", 0.00002, "--weight-decay 0.00002", "vision #3995"),
        Row("optimizer.decay_norms", False, "--norm-weight-decay 0.0", "vision #3995"),
        Row("optimizer.decay_biases", True, "no --bias-weight-decay", "vision #3995"),
        Row("optimizer.clip", 0, "no --clip-grad-norm", "vision #3995"),
        Row("optimizer.label_smoothing", 0.1, "--label-smoothing 0.1", "vision #3995"),
        Row("optimizer.ema_decay", 1 - EMA_ALPHA, "--model-ema; --model-ema-decay 0.99998 (default): 1 - (1 - 0.99998) "
            "* 8 GPUs * 128 images * 32 steps / 600 epochs", "vision train.py"),
        Row("optimizer.ema_every", 32, "--model-ema-steps 32 (default)", "vision train.py"),
        Row("optimizer.schedule.type", "cosine", "--lr-scheduler cosineannealinglr", "vision #3995"),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", "vision train.py"),
        Row("optimizer.schedule.epochs", 600, "--epochs 600", "vision #3995"),
        Row("optimizer.schedule.params.end_factor", 0, "--lr-min 0.0 (default)", "vision train.py"),
        Row("optimizer.schedule.warmup_epochs", 5, "--lr-warmup-epochs 5", "vision #3995"),
        Row("optimizer.schedule.warmup_start", 0.01, "--lr-warmup-method linear --lr-warmup-decay 0.01 (default)",
            "vision train.py"),
        Row("optimizer.schedule.decay_after_warmup", True, "SequentialLR of warm-up and cosine", "vision train.py"),
        Row("input.crop_train", 176, "--train-crop-size 176", "vision #3995"),
        Row("input.interpolation_train", "bilinear", "--interpolation bilinear (default)", "vision train.py"),
        Row("input.augment_train", "trivialaugment", "--auto-augment ta_wide", "vision #3995"),
        Row("input.augment_params_train.interpolation", "bilinear", "--interpolation bilinear (default)",
            "vision train.py"),
        Row("input.random_erasing_train", 0.1, "--random-erase 0.1", "vision #3995"),
        Row("input.repeats_train", 4, "--ra-sampler --ra-reps 4", "vision #3995"),
        Row("input.scale_val", 232, "--val-resize-size 232", "vision #3995"),
        Row("input.crop_val", 224, "--val-crop-size 224 (default)", "vision train.py"),
        Row("regularization.mixup", 0.2, "--mixup-alpha 0.2", "vision #3995"),
        Row("regularization.cutmix", 1.0, "--cutmix-alpha 1.0", "vision #3995"),
        Row("regularization.switch_probability", 0.5, "a random choice of mixup and CutMix", "vision train.py"),
    ],
    [
        "The source copies the weights to the moving average until the end of the warm-up, and also averages buffers.",
        ERASING,
        "The source leaves out the images of an epoch beyond the last multiple of 256.",
    ],
)  # fmt: skip


def _rsb(
    name: str, epochs: int, learning_rate: float, weight_decay: float, smoothing: float, drop_path: float, repeats: int,
    magnitude: int, mixup: float, crop: int,
) -> Recipe:  # fmt: skip
    """Return a procedure of "ResNet strikes back"; the arguments are the values of its column in Table 2."""
    table, script = "paper, Table 2", "timm 2021-10"
    rows = [
        Row("network.arch", "timm:resnet50", "ResNet-50 of timm", table),
        Row("network.options.drop_path_rate", drop_path, f"stochastic depth {drop_path}", table),
        Row("optimizer.type", "timm:lamb", "LAMB", table),
        Row("optimizer.batch_size", 2048, "batch size 2048", table),
        Row("optimizer.learning_rate", learning_rate, f"learning rate {learning_rate:g}", table),
        Row("optimizer.weight_decay", weight_decay, f"weight decay {weight_decay:g}", table),
        Row("optimizer.decay_norms", False, "none of parameters with one dimension", script),
        Row("optimizer.decay_biases", False, "none of biases", script),
        Row("optimizer.clip", 0, "no gradient clipping (LAMB of timm limits the norm of the gradient to 1)", table),
        Row("optimizer.label_smoothing", smoothing, f"label smoothing {smoothing or 'no'}", table),
        Row("optimizer.schedule.type", "cosine", "cosine", table),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", script),
        Row("optimizer.schedule.epochs", epochs, f"{epochs} epochs", table),
        Row("optimizer.schedule.params.end_factor", 1e-6 / learning_rate, "--min-lr 1e-6 (default), absolute", script),
        Row("optimizer.schedule.warmup_epochs", 5, "5 warm-up epochs", table),
        Row("optimizer.schedule.warmup_start", 1e-4 / learning_rate, "--warmup-lr 0.0001 (default), absolute", script),
        Row("optimizer.schedule.decay_after_warmup", False, "warm-up within the cosine", script),
        Row("input.crop_train", crop, f"train resolution {crop}", table),
        Row("input.interpolation_train", "random", "--train-interpolation random (default)", script),
        Row("input.augment_train", f"timm:rand-m{magnitude}-mstd0.5-inc1", f"RandAugment {magnitude} / 0.5", table),
        Row("input.color_jitter_train", False, "none with RandAugment", script),
        Row("input.random_erasing_train", 0, "no random erasing", table),
        Row("input.repeats_train", repeats, "--aug-repeats 3" if repeats > 1 else "no repeated augmentation", table),
        Row("input.scale_val", math.floor(224 / 0.95), "test crop ratio 0.95 of 224 px: floor(224 / 0.95)", table),
        Row("input.interpolation_val", "bicubic", "bicubic", "timm results"),
        Row("input.crop_val", 224, "test resolution 224", table),
        Row("regularization.mixup", mixup, f"mixup {mixup}", table),
        Row("regularization.cutmix", 1.0, "CutMix 1.0", table),
        Row("regularization.loss", "bce", "BCE loss", table),
        Row("regularization.bce_target_threshold", 0.2, "--bce-target-thresh 0.2", "ML-Decoder"),
        Row("training.amp", "fp16", "mixed precision", table),
    ]
    differences = [
        "Optimizer, learning rate, weight decay, epochs, warm-up, smoothing, stochastic depth, repeated augmentation, "
        "RandAugment, mixes and test crop of Table 2 equal those of "
        f"[mmpretrain's configurations]({MMPRETRAIN}) of A1, A2 and A3, which train A3 at 224 px.",
        "The paper states neither the interpolations nor the ends of the schedule: they are the defaults of timm at "
        "the time. The threshold of the targets is that of the command in ML-Decoder, which repeats A2 with timm.",
        "timm added 10 epochs at the lowest rate (--cooldown-epochs 10, the default); the paper does not mention them.",
    ]
    is_set = {"network.options.drop_path_rate": drop_path > 0}
    return Recipe(
        f"imagenet_resnet50_{name}",
        f"ResNet-50, ResNet strikes back {name.upper()}",
        [row for row in rows if is_set.get(row.key, True)],
        differences,
    )


def _timm_mixes(place: str, flags: bool = True) -> list[Row]:
    """Return the augmentation that DeiT introduced, and ConvNeXt and Swin took over."""
    names = ["--aa", "--reprob", "--remode", "--smoothing", "--mixup", "--cutmix", "--mixup-prob",
             "--mixup-switch-prob", "--train-interpolation"]  # fmt: skip
    keys = ["AUTO_AUGMENT", "REPROB", "REMODE", "LABEL_SMOOTHING", "MIXUP", "CUTMIX", "MIXUP_PROB", "MIXUP_SWITCH_PROB",
            "INTERPOLATION"]  # fmt: skip
    aa, reprob, remode, smoothing, mixup, cutmix, prob, switch, interpolation = names if flags else keys
    default = " (default)" * flags
    return [
        Row("optimizer.label_smoothing", 0.1, f"{smoothing} 0.1{default}", place),
        Row("input.interpolation_train", "bicubic", f"{interpolation} bicubic{default}", place),
        Row("input.augment_train", "timm:rand-m9-mstd0.5-inc1", f"{aa} rand-m9-mstd0.5-inc1{default}", place),
        Row("input.color_jitter_train", False, "none with RandAugment (create_transform of timm)", place),
        Row("input.random_erasing_train", 0.25, f"{reprob} 0.25{default}", place),
        Row("input.random_erasing_mode_train", "pixel", f"{remode} pixel{default}", place),
        Row("regularization.mixup", 0.8, f"{mixup} 0.8{default}", place),
        Row("regularization.cutmix", 1.0, f"{cutmix} 1.0{default}", place),
        Row("regularization.mix_probability", 1.0, f"{prob} 1.0{default}", place),
        Row("regularization.switch_probability", 0.5, f"{switch} 0.5{default}", place),
        Row("input.crop_train", 224, f"{'--input-size' if flags else 'IMG_SIZE'} 224{default}", place),
    ]


CONVNEXT = Recipe(
    "imagenet_convnext_tiny",
    "ConvNeXt-T",
    [
        Row("network.arch", "timm:convnext_tiny", "--model convnext_tiny", "TRAINING.md"),
        Row("network.options.drop_path_rate", 0.1, "--drop_path 0.1", "TRAINING.md"),
        Row("optimizer.type", "AdamW", "--opt adamw (default)", "ConvNeXt main.py"),
        Row("optimizer.batch_size", 4 * 8 * 128, "--batch_size 128 on 4 nodes of 8 GPUs", "TRAINING.md"),
        Row("optimizer.learning_rate", 4e-3, "--lr 4e-3", "TRAINING.md"),
        Row("optimizer.params.betas", [0.9, 0.999], "--opt_betas None (default)", "ConvNeXt main.py"),
        Row("optimizer.params.eps", 1e-8, "--opt_eps 1e-8 (default)", "ConvNeXt main.py"),
        Row("optimizer.weight_decay", 0.05, "--weight_decay 0.05 (default)", "ConvNeXt main.py"),
        Row("optimizer.decay_norms", False, "none of parameters with one dimension", "ConvNeXt main.py"),
        Row("optimizer.decay_biases", False, "none of biases and layer scales", "ConvNeXt main.py"),
        Row("optimizer.clip", 0, "--clip_grad None (default)", "ConvNeXt main.py"),
        Row("optimizer.ema_decay", 0.9999, "--model_ema true; --model_ema_decay 0.9999 (default)", "TRAINING.md"),
        Row("optimizer.schedule.type", "cosine", "utils.cosine_scheduler", "ConvNeXt main.py"),
        Row("optimizer.schedule.mode", "step", "a value per step", "ConvNeXt main.py"),
        Row("optimizer.schedule.epochs", 300, "--epochs 300 (default)", "ConvNeXt main.py"),
        Row("optimizer.schedule.params.end_factor", 1e-6 / 4e-3, "--min_lr 1e-6 (default), absolute",
            "ConvNeXt main.py"),
        Row("optimizer.schedule.warmup_epochs", 20, "--warmup_epochs 20 (default)", "ConvNeXt main.py"),
        Row("optimizer.schedule.warmup_start", 0, "warm-up from 0", "ConvNeXt main.py"),
        Row("optimizer.schedule.decay_after_warmup", True, "cosine after the warm-up", "ConvNeXt main.py"),
        *_timm_mixes("ConvNeXt main.py"),
        Row("input.repeats_train", 1, "DistributedSampler", "ConvNeXt main.py"),
        Row("input.scale_val", int(224 / (224 / 256)), "--crop_pct None (default): 224 / 256", "ConvNeXt main.py"),
        Row("input.interpolation_val", "bicubic", "InterpolationMode.BICUBIC", "ConvNeXt data"),
        Row("input.crop_val", 224, "--input_size 224 (default)", "ConvNeXt main.py"),
        Row("training.amp", "off", "--use_amp false (default)", "ConvNeXt main.py"),
    ],
    [
        "The warm-up reaches the full rate with the first step after it; the source reaches it one step earlier.",
        "Scores are those of timm with the published weights; the paper states 82.1 % top-1.",
    ],
)  # fmt: skip

DEIT = Recipe(
    "imagenet_deit_small",
    "DeiT-S",
    [
        Row("network.arch", "timm:deit_small_patch16_224", "--model deit_small_patch16_224", "README_deit"),
        Row("network.options.drop_path_rate", 0.1, "--drop-path 0.1 (default)", "deit main.py"),
        Row("optimizer.type", "AdamW", "--opt adamw (default)", "deit main.py"),
        Row("optimizer.batch_size", 4 * 256, "--batch-size 256 on 4 GPUs", "README_deit"),
        Row("optimizer.learning_rate", 5e-4 * 4 * 256 / 512, "--lr 5e-4 (default) * 4 GPUs * 256 images / 512",
            "deit main.py"),
        Row("optimizer.params.betas", [0.9, 0.999], "--opt-betas None (default)", "deit main.py"),
        Row("optimizer.params.eps", 1e-8, "--opt-eps 1e-8 (default)", "deit main.py"),
        Row("optimizer.weight_decay", 0.05, "--weight-decay 0.05 (default)", "deit main.py"),
        Row("optimizer.decay_norms", False, "none of parameters with one dimension", "deit main.py"),
        Row("optimizer.decay_biases", False, "none of biases, position embedding and class token", "deit main.py"),
        Row("optimizer.clip", 0, "--clip-grad None (default)", "deit main.py"),
        Row("optimizer.schedule.type", "cosine", "--sched cosine (default)", "deit main.py"),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", "deit main.py"),
        Row("optimizer.schedule.epochs", 300, "--epochs 300 (default)", "deit main.py"),
        Row("optimizer.schedule.params.end_factor", 1e-5 / 1e-3, "--min-lr 1e-5 (default), absolute", "deit main.py"),
        Row("optimizer.schedule.warmup_epochs", 5, "--warmup-epochs 5 (default)", "deit main.py"),
        Row("optimizer.schedule.warmup_start", 1e-6 / 1e-3, "--warmup-lr 1e-6 (default), absolute", "deit main.py"),
        Row("optimizer.schedule.decay_after_warmup", False, "warm-up within the cosine", "deit main.py"),
        *_timm_mixes("deit main.py"),
        Row("input.repeats_train", 3, "--repeated-aug (default), three times", "deit main.py"),
        Row("input.scale_val", int(224 / 0.875), "--eval-crop-ratio 0.875 (default)", "deit main.py"),
        Row("input.interpolation_val", "bicubic", "interpolation=3", "deit data"),
        Row("input.crop_val", 224, "--input-size 224 (default)", "deit main.py"),
        Row("training.amp", "fp16", "torch.cuda.amp.autocast", "deit main.py"),
    ],
    [
        "The source sets the rate of epoch n in epoch n + 1, so that its first two epochs have the first rate.",
        "The source also computes a moving average of the weights (decay 0.99996), but scores the weights themselves.",
    ],
)  # fmt: skip

EFFICIENTNET = Recipe(
    "imagenet_efficientnet_b0",
    "EfficientNet-B0",
    [
        Row("network.arch", "timm:efficientnet_b0", "--model efficientnet_b0", "timm docs"),
        Row("network.options.drop_rate", 0.2, "--drop 0.2", "timm docs"),
        Row("network.options.drop_path_rate", 0.2, "--drop-path 0.2", "timm docs"),
        Row("optimizer.type", "timm:rmsproptf", "--opt rmsproptf", "timm docs"),
        Row("optimizer.batch_size", 2 * 384, "-b 384 on 2 GPUs", "timm docs"),
        Row("optimizer.learning_rate", 0.048, "--lr .048", "timm docs"),
        Row("optimizer.momentum", 0.9, "--momentum 0.9 (default)", "timm 2020-01"),
        Row("optimizer.params.eps", 0.001, "--opt-eps .001", "timm docs"),
        Row("optimizer.weight_decay", 1e-5, "--weight-decay 1e-5", "timm docs"),
        Row("optimizer.decay_norms", False, "none of parameters with one dimension", "timm 2020-01"),
        Row("optimizer.decay_biases", False, "none of biases", "timm 2020-01"),
        Row("optimizer.clip", 0, "no clipping", "timm 2020-01"),
        Row("optimizer.label_smoothing", 0.1, "--smoothing 0.1 (default)", "timm 2020-01"),
        Row("optimizer.ema_decay", 0.9999, "--model-ema --model-ema-decay 0.9999", "timm docs"),
        Row("optimizer.schedule.type", "step", "--sched step", "timm docs"),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", "timm 2020-01"),
        Row("optimizer.schedule.epochs", 450, "--epochs 450", "timm docs"),
        Row("optimizer.schedule.params.step_size", 2.4, "--decay-epochs 2.4", "timm docs"),
        Row("optimizer.schedule.params.gamma", 0.97, "--decay-rate .97", "timm docs"),
        Row("optimizer.schedule.warmup_epochs", 3, "--warmup-epochs 3 (default)", "timm 2020-01"),
        Row("optimizer.schedule.warmup_start", 1e-6 / 0.048, "--warmup-lr 1e-6, absolute", "timm docs"),
        Row("optimizer.schedule.decay_after_warmup", False, "warm-up within the schedule", "timm 2020-01"),
        Row("input.crop_train", 224, "224 px, the size of the network", "timm 2020-01"),
        Row("input.interpolation_train", "random", "interpolation='random'", "timm 2020-01"),
        Row("input.augment_train", "timm:rand-m9-mstd0.5", "--aa rand-m9-mstd0.5", "timm docs"),
        Row("input.color_jitter_train", False, "none with RandAugment", "timm 2020-01"),
        Row("input.random_erasing_train", 0.2, "--reprob 0.2", "timm docs"),
        Row("input.random_erasing_mode_train", "pixel", "--remode pixel", "timm docs"),
        Row("input.scale_val", math.floor(224 / 0.875), "crop_pct 0.875 of 224 px", "timm results"),
        Row("input.interpolation_val", "bicubic", "bicubic", "timm results"),
        Row("input.crop_val", 224, "224 px", "timm results"),
        Row("training.amp", "fp16", "--amp", "timm docs"),
    ],
    [],
)

MOBILENET = Recipe(
    "imagenet_mobilenet_v3_large",
    "MobileNetV3-L",
    [
        Row("network.arch", "torchvision:mobilenet_v3_large", "--model mobilenet_v3_large", "vision README"),
        Row("optimizer.type", "RMSprop", "--opt rmsprop", "vision README"),
        Row("optimizer.batch_size", 8 * 128, "--batch-size 128 on 8 GPUs", "vision README"),
        Row("optimizer.learning_rate", 0.064, "--lr 0.064", "vision README"),
        Row("optimizer.momentum", 0.9, "--momentum 0.9 (default)", "vision train.py"),
        Row("optimizer.params.alpha", 0.9, "alpha=0.9", "vision train.py"),
        Row("optimizer.params.eps", 0.0316, "eps=0.0316", "vision train.py"),
        Row("optimizer.weight_decay", 0.00001, "--wd 0.00001", "vision README"),
        Row("optimizer.clip", 0, "no --clip-grad-norm", "vision README"),
        Row("optimizer.label_smoothing", 0, "--label-smoothing 0.0 (default)", "vision train.py"),
        Row("optimizer.schedule.type", "step", "--lr-scheduler steplr (default)", "vision train.py"),
        Row("optimizer.schedule.mode", "epoch", "a step of the scheduler per epoch", "vision train.py"),
        Row("optimizer.schedule.epochs", 600, "--epochs 600", "vision README"),
        Row("optimizer.schedule.params.step_size", 2, "--lr-step-size 2", "vision README"),
        Row("optimizer.schedule.params.gamma", 0.973, "--lr-gamma 0.973", "vision README"),
        Row("input.crop_train", 224, "--train-crop-size 224 (default)", "vision train.py"),
        Row("input.interpolation_train", "bilinear", "--interpolation bilinear (default)", "vision train.py"),
        Row("input.augment_train", "autoaugment", "--auto-augment imagenet", "vision README"),
        Row("input.augment_params_train.policy", "imagenet", "--auto-augment imagenet", "vision README"),
        Row("input.augment_params_train.interpolation", "bilinear", "--interpolation bilinear (default)",
            "vision train.py"),
        Row("input.random_erasing_train", 0.2, "--random-erase 0.2", "vision README"),
        Row("input.scale_val", 256, "--val-resize-size 256 (default)", "vision train.py"),
        Row("input.crop_val", 224, "--val-crop-size 224 (default)", "vision train.py"),
    ],
    ["The published weights are the mean of the last three checkpoints that improved the top-1 accuracy.", ERASING],
)  # fmt: skip

SWIN = Recipe(
    "imagenet_swin_tiny",
    "Swin-T",
    [
        Row("network.arch", "timm:swin_tiny_patch4_window7_224", "NAME: swin_tiny_patch4_window7_224", "Swin yaml"),
        Row("network.options.drop_path_rate", 0.2, "DROP_PATH_RATE: 0.2", "Swin yaml"),
        Row("optimizer.type", "AdamW", "OPTIMIZER.NAME adamw", "Swin config.py"),
        Row("optimizer.batch_size", 8 * 128, "--batch-size 128 on 8 GPUs", "get_started"),
        Row(
            "optimizer.learning_rate", 5e-4 * 8 * 128 / 512, "BASE_LR 5e-4 * 8 GPUs * 128 images / 512", "Swin main.py"
        ),
        Row("optimizer.params.betas", [0.9, 0.999], "BETAS (0.9, 0.999)", "Swin config.py"),
        Row("optimizer.params.eps", 1e-8, "EPS 1e-8", "Swin config.py"),
        Row("optimizer.weight_decay", 0.05, "WEIGHT_DECAY 0.05", "Swin config.py"),
        Row("optimizer.decay_norms", False, "none of parameters with one dimension", "Swin main.py"),
        Row("optimizer.decay_biases", False, "none of biases and relative position biases", "Swin main.py"),
        Row("optimizer.clip", 5.0, "CLIP_GRAD 5.0", "Swin config.py"),
        Row("optimizer.clip_mode", "norm", "the norm of the gradient", "Swin main.py"),
        Row("optimizer.schedule.type", "cosine", "LR_SCHEDULER.NAME cosine", "Swin config.py"),
        Row("optimizer.schedule.mode", "step", "a step of the scheduler per batch", "Swin main.py"),
        Row("optimizer.schedule.epochs", 300, "EPOCHS 300", "Swin config.py"),
        Row("optimizer.schedule.params.end_factor", 5e-6 / 5e-4, "MIN_LR 5e-6, scaled as BASE_LR", "Swin main.py"),
        Row("optimizer.schedule.warmup_epochs", 20, "WARMUP_EPOCHS 20", "Swin config.py"),
        Row("optimizer.schedule.warmup_start", 5e-7 / 5e-4, "WARMUP_LR 5e-7, scaled as BASE_LR", "Swin main.py"),
        Row("optimizer.schedule.decay_after_warmup", True, "WARMUP_PREFIX True", "Swin config.py"),
        *_timm_mixes("Swin config.py", flags=False),
        Row("input.repeats_train", 1, "DistributedSampler", "Swin data"),
        Row("input.scale_val", int(256 / 224 * 224), "TEST.CROP True: 256 / 224 of 224 px", "Swin data"),
        Row("input.interpolation_val", "bicubic", "DATA.INTERPOLATION bicubic", "Swin config.py"),
        Row("input.crop_val", 224, "IMG_SIZE 224", "Swin config.py"),
        Row("training.amp", "fp16", "AMP_ENABLE True", "Swin config.py"),
    ],
    [],
)

RECIPES = [
    V1,
    V2,
    _rsb("a1", 600, 5e-3, 0.01, 0.1, 0.05, 3, 7, 0.2, 224),
    _rsb("a2", 300, 5e-3, 0.02, 0.0, 0.05, 3, 7, 0.1, 224),
    _rsb("a3", 100, 8e-3, 0.02, 0.0, 0.0, 1, 6, 0.1, 160),
    CONVNEXT,
    DEIT,
    EFFICIENTNET,
    MOBILENET,
    SWIN,
]


class Flag(NamedTuple):
    """A flag of timm's training script with its counterpart: a setting and its value, or words of ``zoo train``."""

    flag: str
    counterpart: str
    value: Any = None
    note: str = ""


CONVNEXT_COMMAND = [
    Flag("./distributed_train.sh 8", "torchrun --nproc_per_node 8 -m zoo train imagenet_convnext_tiny"),
    Flag("--data-dir DATA", "DATA", note="with `train` and `val`"),
    Flag("--workers 8", "--workers 8"),
    Flag("--output runs", "--log-dir runs/convnext"),
    Flag("--model convnext_tiny", "network.arch", "timm:convnext_tiny"),
    Flag("--drop-path 0.1", "network.options.drop_path_rate", 0.1),
    Flag("--batch-size 512", "optimizer.batch_size", 8 * 512, "over all processes"),
    Flag("--opt adamw", "optimizer.type", "AdamW"),
    Flag("--lr 4e-3", "optimizer.learning_rate", 4e-3),
    Flag("--weight-decay 0.05", "optimizer.weight_decay", 0.05),
    Flag("", "optimizer.decay_norms", False, "always in timm: no decay of vectors"),
    Flag("", "optimizer.decay_biases", False),
    Flag("", "optimizer.clip", 0, "off in timm without `--clip-grad`"),
    Flag("--sched cosine", "optimizer.schedule.type", "cosine"),
    Flag("--sched-on-updates", "optimizer.schedule.mode", "step"),
    Flag("--epochs 280", "optimizer.schedule.epochs", 280 + 20, "with the warm-up"),
    Flag("--warmup-epochs 20", "optimizer.schedule.warmup_epochs", 20),
    Flag("--warmup-prefix", "optimizer.schedule.decay_after_warmup", True),
    Flag("--warmup-lr 0", "optimizer.schedule.warmup_start", 0 / 4e-3, "relative to the learning rate"),
    Flag("--min-lr 1e-6", "optimizer.schedule.params.end_factor", 1e-6 / 4e-3, "relative to the learning rate"),
    Flag("--model-ema --model-ema-decay 0.9999", "optimizer.ema_decay", 0.9999, "validated instead of the network"),
    Flag("--smoothing 0.1", "optimizer.label_smoothing", 0.1),
    Flag("--mixup 0.8", "regularization.mixup", 0.8),
    Flag("--cutmix 1.0", "regularization.cutmix", 1.0),
    Flag("--aa rand-m9-mstd0.5-inc1", "input.augment_train", "timm:rand-m9-mstd0.5-inc1"),
    Flag("--reprob 0.25", "input.random_erasing_train", 0.25),
    Flag("--remode pixel", "input.random_erasing_mode_train", "pixel"),
    Flag("--train-interpolation bicubic", "input.interpolation_train", "bicubic"),
    Flag("--interpolation bicubic", "input.interpolation_val", "bicubic"),
    Flag("--crop-pct 0.875", "input.scale_val", int(224 / 0.875), "224 / 0.875"),
]


def settings_of(name: str) -> dict[str, Any]:
    """Return all settings of an experiment by their dotted keys."""
    return dict(leaves(load_experiment(name).model_dump(mode="json", exclude={"expected"})))


def section(recipe: Recipe) -> str:
    """Return the heading, the score and the sources of a recipe, and what differs from them."""
    experiment = load_experiment(recipe.name)
    expected, schedule = experiment.expected, experiment.optimizer.schedule
    assert expected is not None
    score = expected.scores["center224"]
    places = ", ".join(f"[{place}]({SOURCES[place]})" for place in dict.fromkeys(row.place for row in recipe.rows))
    lines = [
        f"### {recipe.title}",
        "",
        f"[`{recipe.name}`](../experiments/{recipe.name}.json): {score.top1} % top-1, {score.top5} % top-5 "
        f"({expected.source}), {schedule.epochs} epochs of batches of {experiment.optimizer.batch_size:,} images. "
        f"Settings from {places}.",
    ]
    if recipe.differences:
        lines += ["", "What differs:", "", *(f"- {difference}" for difference in recipe.differences)]
    return "\n".join(lines)


def training_recipes() -> str:
    """Return the sections of all recipes."""
    return "\n\n".join(map(section, RECIPES))


def convnext_command() -> str:
    """Return timm's command for ConvNeXt-T, that of zoo, and a table with the counterpart of each flag."""
    flags = [each.flag for each in CONVNEXT_COMMAND if each.flag]
    settings = settings_of(CONVNEXT.name)
    options = [each.counterpart for each in CONVNEXT_COMMAND if each.counterpart not in settings]
    rows = []
    for each in CONVNEXT_COMMAND:
        value = f" = {json.dumps(settings[each.counterpart])}" if each.counterpart in settings else ""
        rows.append(f"| {f'`{each.flag}`' if each.flag else ''} | `{each.counterpart}{value}` | {each.note} |")
    lines = [" ".join(flags[start : start + 5]) for start in range(0, len(flags), 5)]
    command = " \\\n    ".join(lines)
    table = "\n".join(["| timm | zoo | |", "| --- | --- | --- |", *rows])
    return f"```sh\n{command}\n```\n\n{table}\n\n```sh\n{' '.join(options)}\n```"
