"""Suggestions for unknown options and arguments, such as ``--lr``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from zoo.config.parse import settings_named

# Name in other trainers -> settings.
COMMON_NAMES = {
    **dict.fromkeys(("lr", "learning_rate"), ("optimizer.learning_rate",)),
    **dict.fromkeys(("wd", "weight_decay"), ("optimizer.weight_decay",)),
    **dict.fromkeys(("opt", "optim", "optimizer"), ("optimizer.type",)),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler"), ("optimizer.schedule.type",)),
    **dict.fromkeys(("warmup", "warmup_epochs", "lr_warmup_epochs"), ("optimizer.schedule.warmup_epochs",)),
    **dict.fromkeys(("crop", "size", "img_size", "image_size", "input_size"), ("input.crop_train", "input.crop_val")),
    **dict.fromkeys(("amp", "precision", "mixed_precision", "fp16", "bf16"), ("training.amp",)),
    **dict.fromkeys(("aa", "augment", "auto_augment"), ("input.augment_train",)),
    **dict.fromkeys(("reprob", "random_erase", "random_erasing"), ("input.random_erasing_train",)),
    **dict.fromkeys(("smoothing", "label_smoothing"), ("optimizer.label_smoothing",)),
    **dict.fromkeys(("class_weight", "weight"), ("regularization.class_weights",)),
    **dict.fromkeys(("early_stopping", "early_stop"), ("optimizer.schedule.patience",)),
    **dict.fromkeys(("keep", "save_top_k", "checkpoint_hist"), ("checkpoint.keep_best",)),
    **dict.fromkeys(("sampler", "weighted_sampling"), ("input.sampling_train",)),
    **dict.fromkeys(("classes", "num_classes"), ("network.num_classes",)),
}
OF_DEVICE = "the environment variable CUDA_VISIBLE_DEVICES chooses the GPUs, and none if it is empty"


def hint_for(name: str, options: Iterable[str], write_option: str, write_setting: Callable[[str], str]) -> str:
    """Suggest a replacement for an unknown option ``name``, such as "lr"; "" if nothing is similar.

    Args:
    - `options`: the names of the known options.
    - `write_option`: prefix of an option, such as "--".
    - `write_setting`: returns the text that sets a setting.
    """
    name = name.replace("-", "_").lower()
    if name in ("device", "gpu", "gpus", "cuda", "cpu"):
        return OF_DEVICE
    known = {each.replace("-", "_"): each for each in options}
    if (settings := COMMON_NAMES.get(name) or settings_named(name)) and name not in known:
        return f"to set {' and '.join(settings)}, write {' '.join(map(write_setting, settings))}"
    if near := difflib.get_close_matches(name, known, 1):
        return f"the nearest is {write_option}{known[near[0]]}"
    return ""
