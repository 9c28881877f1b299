"""Lean networks in trainers of other packages are bit-identical to plain training and hold less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from tests.libraries import EXAMPLES, PROJECTIONS, checked, llama, with_lora

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # other packages warn

TOKENS = torch.randint(1000, (8, 32), generator=torch.Generator().manual_seed(0))
SETTINGS = {
    "max_steps": 3, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_strategy": "no",
    "logging_strategy": "no", "seed": 1,
}  # fmt: skip


def need(*packages: str) -> None:
    missing = [each for each in packages if find_spec(each) is None]
    if missing:
        pytest.skip(f"pip install {' '.join(missing)}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_external_lean_network_is_bit_identical_and_holds_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.memory.check.ROUNDS", 1)  # the time is not compared
    packages, build = EXAMPLES[name]
    need(*packages)
    torch.manual_seed(0)
    found = checked(build(), zoo.lean)
    assert found.same is True, str(found)
    assert found.variant.held < 0.8 * found.plain.held


def adapted() -> Any:
    torch.manual_seed(0)
    return with_lora(llama(2), PROJECTIONS)


def train_with_transformers(model: Any, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    Trainer(model=model, args=TrainingArguments(str(folder), **SETTINGS), train_dataset=data).train()


def train_with_trl(model: Any, folder: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    config = SFTConfig(
        str(folder), bf16=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, **SETTINGS
    )
    data = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train()


@pytest.mark.parametrize(
    ("train", "packages"),
    [
        (train_with_transformers, ("transformers", "peft", "accelerate")),
        (train_with_trl, ("trl", "transformers", "peft", "datasets")),
    ],
)
def test_adapters_train_with_the_same_bits(
    train: Callable[[Any, Path], None], packages: tuple[str, ...], tmp_path: Path
) -> None:
    need(*packages)
    start = adapted()
    models = [copy.deepcopy(start), zoo.lean(copy.deepcopy(start))]
    for model in models:
        train(model, tmp_path)
    plain, lean = (dict(model.state_dict()) for model in models)
    assert any(not torch.equal(value, start.state_dict()[name]) for name, value in plain.items())
    assert all(torch.equal(value, lean[name]) for name, value in plain.items())


def test_adapters_of_lean_network_are_saved_and_loaded(tmp_path: Path) -> None:
    need("peft", "transformers")
    from peft import PeftModel

    model = zoo.lean(adapted())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(2), tmp_path)
    saved, read = ({k: v for k, v in each.state_dict().items() if "lora" in k} for each in (model, loaded))
    assert saved.keys() == read.keys()
    assert all(torch.equal(value, read[name]) for name, value in saved.items())


def write_boxes(folder: Path) -> Path:
    """Write four random images with a box each, as Ultralytics reads them."""
    generator = np.random.default_rng(0)
    for index in range(4):
        pixels = generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        for kind in ("images", "labels"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
        (folder / "labels" / f"{index}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    path = folder / "data.yaml"
    path.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: thing}}\n")
    return path


def test_trainer_of_ultralytics_has_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("ultralytics")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    from ultralytics import YOLO

    data = write_boxes(tmp_path / "boxes")

    def weights(callback: Callable[[Any], object] | None) -> dict[str, Tensor]:
        model = YOLO("yolov8n.yaml")
        if callback is not None:
            model.add_callback("on_pretrain_routine_end", callback)
        model.train(
            data=str(data), epochs=2, imgsz=64, batch=2, device="cpu", workers=0, amp=False, plots=False, val=False,
            project=str(tmp_path / "runs"), seed=1,
        )  # fmt: skip
        saved: nn.Module = torch.load(model.trainer.last, weights_only=False)["model"]
        return saved.state_dict()

    plain, lean = weights(None), weights(lambda trainer: zoo.lean(trainer.model))
    assert all(torch.equal(value, lean[name]) for name, value in plain.items())
