"""Lean and in-place networks train with Accelerate and Lightning, and resume bit-identically."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zoo
from zoo.config.network import NetworkSpec
from zoo.memory.allocations import measure_memory
from zoo.models.build import build_network, initialize
from zoo.remat._lean import is_lean

pytestmark = pytest.mark.slow

CASES = [("lean", False), ("inplace", False), ("lean", True)]  # the network, and whether in bfloat16
IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(IMAGES, torch.arange(8) % 3)


def build(network: str) -> Any:
    """Return the "plain", "lean" or "inplace" network, a shallow ResNet; all begin with the same weights."""
    torch.manual_seed(0)
    norm = "inplace" if network == "inplace" else "standard"
    spec = NetworkSpec(arch="resnet32_cifar", norm=norm, num_classes=3)
    model = build_network(spec, structure=(1, 1, 1))
    model.set_drop_rate(0.2)
    initialize(model, spec)
    return zoo.lean(model) if network == "lean" else model


def have_same_bits(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def held_bytes(model: Any, parameters: Any) -> int:
    return measure_memory(lambda: model(IMAGES[:2]).square().mean(), parameters).held


@pytest.fixture
def accelerate() -> Iterator[Any]:
    module = pytest.importorskip("accelerate")
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(
    accelerate: Any, network: str, folder: Path, in_bf16: bool, save_at: int = 0, resume_at: int = 0
) -> tuple[Any, nn.Module]:
    """Train for an epoch of four batches, or a part of it; return the prepared network and the network itself."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision="bf16" if in_bf16 else "no",
        gradient_accumulation_steps=2,
        dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = build(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(DATASET, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume_at:
        accelerator.load_state(str(folder))
        loader = accelerate.skip_first_batches(loader, resume_at)
    for step, (images, targets) in enumerate(loader, start=resume_at + 1):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == save_at:
            accelerator.save_state(str(folder))
            break
    return model, accelerator.unwrap_model(model)


@pytest.mark.parametrize(("network", "in_bf16"), CASES)
def test_network_trains_and_resumes_with_accelerate(
    accelerate: Any, network: str, in_bf16: bool, tmp_path: Path
) -> None:
    prepared, whole = accelerated(accelerate, network, tmp_path, in_bf16)
    prepared_plain, plain = accelerated(accelerate, "plain", tmp_path, in_bf16)
    assert have_same_bits(whole, plain) == (network == "lean")
    accelerated(accelerate, network, tmp_path, in_bf16, save_at=2)
    _, resumed = accelerated(accelerate, network, tmp_path, in_bf16, resume_at=2)
    assert have_same_bits(resumed, whole)
    assert not have_same_bits(whole, build(network))
    held_plain = held_bytes(prepared_plain, plain.parameters())
    assert held_bytes(prepared, whole.parameters()) < 0.7 * held_plain
    assert is_lean(copy.deepcopy(prepared)) == (network == "lean")  # a moving average of the weights begins with one


def fit(network: str, folder: Path, in_bf16: bool, epochs: int, resume_at: int = 0) -> Any:
    """Train up to the end of an epoch with Lightning, and save; return the module."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = build(network)
            self.random_state: Tensor | None = None

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random_state"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.random_state = checkpoint["random_state"]

        def on_train_epoch_start(self) -> None:
            if self.random_state is not None:
                torch.set_rng_state(self.random_state)
                self.random_state = None

    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if in_bf16 else "32-true",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler = DistributedSampler(DATASET, num_replicas=1, rank=0)
    loader = DataLoader(DATASET, batch_size=2, sampler=sampler, generator=torch.Generator())
    trainer.fit(classifier, loader, ckpt_path=folder / f"{resume_at}.ckpt" if resume_at else None)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return classifier


# Lightning warns of single-process loaders and of names of torch that it uses itself.
@pytest.mark.filterwarnings("ignore", "error::zoo.remat._lean.StepsAside")
@pytest.mark.parametrize(("network", "in_bf16"), CASES)
def test_network_trains_and_resumes_with_lightning(network: str, in_bf16: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    whole = fit(network, tmp_path, in_bf16, epochs=2)
    plain = fit("plain", tmp_path, in_bf16, epochs=2)
    assert have_same_bits(whole, plain) == (network == "lean")
    fit(network, tmp_path, in_bf16, epochs=1)
    assert have_same_bits(fit(network, tmp_path, in_bf16, epochs=2, resume_at=1), whole)
    held, held_plain = (held_bytes(each.network, each.parameters()) for each in (whole, plain))
    assert held < 0.7 * held_plain
