# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that people know, with random weights, each with a batch and what it is trained for: see iterations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Networks = list[nn.Module]


class Task(NamedTuple):
    """What an iteration trains.

    Attributes:
        networks: Each has an optimizer of its own.
        losses: For each network what its optimizer minimizes, as a function of all of them.
    """

    networks: Networks
    losses: list[Callable[[Networks], Tensor]]


# -------------------------------------------------------------------------------------------------------- convolutions


def conv_norm(inputs: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class BasicBlock(nn.Module):
    """Two convolutions around a skip."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.two = conv_norm(inputs, width, 3, stride), conv_norm(width, width, 3)
        self.skip = nn.Identity() if (inputs, stride) == (width, 1) else conv_norm(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.two(F.relu(self.one(x))))


class InvertedResidual(nn.Module):
    """A depthwise convolution between one that widens and one that narrows."""

    def __init__(self, inputs: int, width: int, expand: int, stride: int, kernel: int) -> None:
        super().__init__()
        inner = inputs * expand
        widen = [*conv_norm(inputs, inner, 1), nn.ReLU6()] if expand > 1 else []
        depthwise = [*conv_norm(inner, inner, kernel, stride, groups=inner), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *depthwise, *conv_norm(inner, width, 1))
        self.has_skip = (inputs, stride) == (width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.has_skip else self.body(x)


def classifier(features: list[nn.Module], width: int, classes: int) -> nn.Module:
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def classification(model: nn.Module, x: Tensor, classes: int) -> Task:
    labels = torch.arange(len(x), device=x.device) % classes
    model.to(x.device)
    return Task([model], [lambda networks: F.cross_entropy(networks[0](x).float(), labels)])


def resnet18(device: torch.device) -> Task:
    """For images of 32 × 32, of which 4: 11.2 million parameters in 62 tensors."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [BasicBlock(*shape) for shape in [*widths, (512, 512, 1)]]
    model = classifier([*conv_norm(3, 64, 3), nn.ReLU(), *blocks], 512, 10)
    return classification(model, torch.randn(4, 3, 32, 32, device=device), 10)


def efficientnet_lite(device: torch.device) -> Task:
    """EfficientNet-Lite0 for 1,000 classes, 4 images of 64 × 64: 4.7 million parameters in 149 tensors."""
    stages = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)]
    stages += [(6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]
    features, inputs = [*conv_norm(3, 32, 3, 2), nn.ReLU6()], 32
    for expand, width, repeats, stride, kernel in stages:
        for i in range(repeats):
            features.append(InvertedResidual(inputs, width, expand, stride if i == 0 else 1, kernel))
            inputs = width
    model = classifier([*features, *conv_norm(320, 1280, 1), nn.ReLU6()], 1280, 1000)
    return classification(model, torch.randn(4, 3, 64, 64, device=device), 1000)


def gan(device: torch.device) -> Task:
    """DCGAN for 16 images of 32 × 32, two optimizers: 1.1 and 0.7 million parameters."""

    def up(inputs: int, width: int, stride: int, padding: int) -> list[nn.Module]:
        deconvolution = nn.ConvTranspose2d(inputs, width, 4, stride, padding, bias=False)
        return [deconvolution, nn.BatchNorm2d(width), nn.ReLU()]

    def down(inputs: int, width: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.2)]

    last = [nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()]
    generator = nn.Sequential(*up(100, 256, 1, 0), *up(256, 128, 2, 1), *up(128, 64, 2, 1), *last).to(device)
    judge = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), *down(64, 128), *down(128, 256), nn.Conv2d(256, 1, 4)]
    discriminator = nn.Sequential(*judge).to(device)
    real, noise = torch.randn(16, 3, 32, 32, device=device), torch.randn(16, 100, 1, 1, device=device)

    def verdict(scores: Tensor, right: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores.float(), torch.full_like(scores, right, dtype=torch.float32))

    def tell_apart(networks: Networks) -> Tensor:
        with torch.no_grad():
            made = networks[1](noise)
        return verdict(networks[0](real), 1.0) + verdict(networks[0](made), 0.0)

    return Task(
        [discriminator, generator], [tell_apart, lambda networks: verdict(networks[0](networks[1](noise)), 1.0)]
    )


# -------------------------------------------------------------------------------------------------------- transformers


class Encoder(nn.Module):
    """Embeddings, encoder layers and a head on their mean."""

    def __init__(self, words: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.layers(self.norm(self.words(text) + self.places(places))).mean(1))


class DecoderBlock(nn.Module):
    """One of nanoGPT's: causal attention and an MLP, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_one, self.norm_two = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(self.norm_one(x)).chunk(3, -1)
        queries, keys, values = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in split)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_two(x))


class GPT(nn.Module):
    """nanoGPT's: the head has the weight of the embedding."""

    def __init__(self, words: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[DecoderBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.words(text) + self.places(places))))


class LoRA(nn.Module):
    """A frozen layer, and a product of two thin matrices that is trained in its place."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2.0 * self.up(self.down(x))


def bert(device: torch.device) -> Task:
    """6 layers of width 384, as MiniLM's, 4 sequences of 64: 22.6 million parameters in 79 tensors."""
    return classification(Encoder(30522, 384, 12, 6), torch.randint(30522, (4, 64), device=device), 2)


def language_model(model: nn.Module, device: torch.device) -> Task:
    text = torch.randint(65, (4, 65), device=device)
    model.to(device)

    def loss(networks: Networks) -> Tensor:
        return F.cross_entropy(networks[0](text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())

    return Task([model], [loss])


def nanogpt(device: torch.device) -> Task:
    """For Shakespeare's characters: 6 layers of width 384, 4 sequences of 64: 10.7 million parameters in 39 tensors."""
    return language_model(GPT(65, 384, 6, 6), device)


def lora(device: torch.device) -> Task:
    """The same, frozen, with adapters of rank 8 at attention's layers: 0.2 million parameters in 24 tensors."""
    model = GPT(65, 384, 6, 6).requires_grad_(False)
    for block in model.blocks:
        block.queries_keys_values, block.out = LoRA(block.queries_keys_values), LoRA(block.out)
    return language_model(model, device)


MODELS = {
    "ResNet-18": resnet18,
    "EfficientNet-Lite0": efficientnet_lite,
    "BERT, 6 layers": bert,
    "nanoGPT": nanogpt,
    "LoRA": lora,
    "DCGAN": gan,
}
