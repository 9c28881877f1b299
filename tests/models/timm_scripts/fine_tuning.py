"""Trains a classifier as timm's recipes do, and prints its accuracy; argument: a folder with a folder per class."""

import sys

import torch
from timm import create_model
from timm.data import Mixup, create_dataset, create_loader, resolve_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy, dispatch_clip_grad

torch.manual_seed(0)
model = create_model("resnet18", pretrained=False, num_classes=2, drop_rate=0.1)
model.set_grad_checkpointing()
config = resolve_data_config({"input_size": (3, 32, 32)}, model=model)

loaders = [
    create_loader(
        create_dataset("", root=sys.argv[1]),
        input_size=config["input_size"],
        batch_size=4,
        is_training=is_training,
        use_prefetcher=False,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        num_workers=0,
        persistent_workers=False,
    )
    for is_training in (True, False)
]
mixup = Mixup(mixup_alpha=0.2, num_classes=model.num_classes)
optimizer = create_optimizer_v2(model, opt="adamw", lr=4e-3, weight_decay=0.05, layer_decay=0.8)
scheduler, num_epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=1)
ema = ModelEmaV3(model, decay=0.5)
criterion = SoftTargetCrossEntropy()

step = 0
for epoch in range(num_epochs):
    model.train()
    for images, targets in loaders[0]:
        images, targets = mixup(images, targets)
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        ema.update(model, step=step)
    scheduler.step(epoch + 1)

top1 = AverageMeter()
ema.module.eval()
with torch.no_grad():
    for images, targets in loaders[1]:
        top1.update(accuracy(ema.module(images), targets)[0].item(), len(images))
print("steps", step, "groups of parameters", len(optimizer.param_groups))
print("accuracy", top1.avg)
