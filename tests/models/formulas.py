"""Networks by the formulas of their authors, from tensors with the names in the authors' state dicts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def revvit(weights: dict[str, Tensor], x: Tensor, heads: int = 2) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and the concatenated streams as a map, by the formulas of section 3 of the paper."""
    embedding = weights["patch_embed.proj.weight"]
    number, _, patch, _ = embedding.shape
    patches = x.unfold(2, patch, patch).unfold(3, patch, patch)  # (N, 3, rows, columns, patch, patch)
    tokens = torch.einsum("nchwij,dcij->nhwd", patches, embedding) + weights["patch_embed.proj.bias"]
    first = second = tokens.reshape(len(x), -1, number) + weights["pos_embed"]

    def linear(name: str, t: Tensor) -> Tensor:
        return t @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalized(name: str, t: Tensor) -> Tensor:
        centered = t - t.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return centered * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name: str, t: Tensor) -> Tensor:
        parts = []
        q, k, v = (linear(f"{name}.{each}", t).chunk(heads, -1) for each in "qkv")
        for head in range(heads):
            similarity = torch.einsum("nic,njc->nij", q[head], k[head]) / math.sqrt(number / heads)
            shares = similarity.exp() / similarity.exp().sum(-1, keepdim=True)
            parts.append(torch.einsum("nij,njc->nic", shares, v[head]))
        return linear(f"{name}.proj", torch.cat(parts, -1))

    depth = 1 + max(int(key.split(".")[2]) for key in weights if key.startswith("rev_backbone.layers."))
    for index in range(depth):
        block = f"rev_backbone.layers.{index}"
        first = first + attention(f"{block}.F.attn", normalized(f"{block}.F.norm", second))
        hidden = linear(f"{block}.G.mlp.fc1", normalized(f"{block}.G.norm", first))
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        second = second + linear(f"{block}.G.mlp.fc2", hidden)
    streams = torch.cat((first, second), -1)
    fused = normalized("norm", streams).mean(1)
    return linear("head.projection", fused), [streams.transpose(1, 2).unflatten(2, tokens.shape[1:3])]


def revbifpn(tensors: dict[str, Tensor], x: Tensor, training: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and the four maps of the neck, by the authors' formulas."""

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


def revcol(tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and the maps of the last column, by the authors' formulas."""

    def linear(name: str, t: Tensor) -> Tensor:
        y = torch.einsum("nchw,oc->nohw", t, tensors[f"{name}.weight"])
        return y + tensors[f"{name}.bias"][None, :, None, None]

    def norm(name: str, t: Tensor) -> Tensor:
        centered = t - t.mean(1, keepdim=True)
        unit = centered / (centered.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return unit * tensors[f"{name}.weight"][None, :, None, None] + tensors[f"{name}.bias"][None, :, None, None]

    def level(name: str, finer: Tensor, coarser: Tensor | None) -> Tensor:
        if f"{name}.fusion.down.0.weight" in tensors:
            down = f"{name}.fusion.down"
            finer = F.conv2d(finer, tensors[f"{down}.0.weight"], tensors[f"{down}.0.bias"], stride=2)
            finer = norm(f"{down}.1", finer)
        if coarser is not None:
            up = f"{name}.fusion.up.channel_reschedule"
            added = norm(f"{up}.1", linear(f"{up}.0", coarser))
            finer = finer + added.repeat_interleave(2, 2).repeat_interleave(2, 3)
        number = 0
        while (block := f"{name}.blocks.{number}") + ".gamma" in tensors:
            y = F.conv2d(
                finer,
                tensors[f"{block}.dwconv.weight"],
                tensors[f"{block}.dwconv.bias"],
                padding=1,
                groups=finer.shape[1],
            )
            y = linear(f"{block}.pwconv1", norm(f"{block}.norm", y))
            y = linear(f"{block}.pwconv2", 0.5 * y * (1 + torch.erf(y / math.sqrt(2))))
            finer = finer + tensors[f"{block}.gamma"][None, :, None, None] * y
            number += 1
        return finer

    x = norm("stem.1", F.conv2d(x, tensors["stem.0.weight"], tensors["stem.0.bias"], stride=4))
    maps: list[Any] = [0, 0, 0, 0]
    column = 0
    while f"subnet{column}.alpha0" in tensors:
        for index in range(4):
            alpha = tensors[f"subnet{column}.alpha{index}"]
            finer = x if index == 0 else maps[index - 1]
            coarser = maps[index + 1] if index < 3 and column > 0 else None
            maps[index] = alpha * maps[index] + level(f"subnet{column}.level{index}", finer, coarser)
        column += 1
    features = norm("cls.classifier.0", maps[3].mean((2, 3), keepdim=True))
    return linear("cls.classifier.1", features).flatten(1), maps
