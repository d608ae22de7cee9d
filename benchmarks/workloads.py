# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is stepped: parameters of well-known shapes, and gradients for them as a backward would leave them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rounds import Counter, Stopwatch, is_simulated
from torch import Tensor, nn

from apex_npu.doctor.bench import Shapes, resnet50, small2000

# Of the loss. Gradients come multiplied with it.
LOSS_SCALE = 256.0
MAX_NORM = 1.0


def bert() -> Shapes:
    """The parameters of BERT-base: 199 tensors, 109.5 million elements."""
    width, inner = 768, 3072
    attention: Shapes = [(width, width), (width,)] * 4
    layer: Shapes = [
        *attention,
        (width,),
        (width,),
        (inner, width),
        (inner,),
        (width, inner),
        (width,),
        (width,),
        (width,),
    ]
    embeddings: Shapes = [(30522, width), (512, width), (2, width), (width,), (width,)]
    return [*embeddings, *layer * 12, (width, width), (width,)]


def tiny() -> Shapes:
    """A model on which nothing but overhead counts: two layers of 4 × 4."""
    return [(4, 4), (4,), (4, 4), (4,)]


def gpt(layers: int, width: int) -> Shapes:
    """The matrices of nanoGPT's blocks: queries, keys and values in one, attention's output, and two of the MLP."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


def bert_matrices() -> Shapes:
    """Those of BERT-base's encoder: what Muon steps of it."""
    return [shape for shape in bert()[5:] if len(shape) == 2]


def even(total: int, tensors: int) -> Shapes:
    """``total`` elements in ``tensors`` vectors of one size."""
    return [(total // tensors,)] * tensors


WORKLOADS: dict[str, Callable[[], Shapes]] = {f.__name__: f for f in (small2000, resnet50, bert, tiny)}
# nanoGPT's for Shakespeare's characters and its GPT-2, and one of many small matrices.
WORKLOADS |= {"gpt 6 x 384": partial(gpt, 6, 384), "gpt 12 x 768": partial(gpt, 12, 768)}
WORKLOADS |= {
    "gpt 24 x 64": partial(gpt, 24, 64),
    "gpt 12 x 128": partial(gpt, 12, 128),
    "bert matrices": bert_matrices,
}
# How cost grows with the number of tensors at a fixed size, and with the size at a fixed number.
COUNTS = {f"4e6 in {count}": count for count in (1, 10, 100, 1000, 10_000)}
SIZES = {f"1e{k} in 100": 10**k for k in range(4, 10)}
WORKLOADS |= {name: partial(even, 4_000_000, count) for name, count in COUNTS.items()}
WORKLOADS |= {name: partial(even, size, 100) for name, size in SIZES.items()}


def numel(shapes: Shapes) -> int:
    """Elements of all."""
    return sum(math.prod(shape) for shape in shapes)


@dataclass
class Bench:
    """Gives every variant parameters and gradients of its own, with the same values."""

    device: torch.device
    shapes: Shapes
    watch: Stopwatch = field(init=False)
    _noise: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = Counter(self.device) if is_simulated(self.device) else Stopwatch(self.device)

    def _scaled_grads(self, shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
        if dtype not in self._noise:
            # A host takes seconds for as many as a GPU holds.
            where = self.device if self.device.type == "cuda" else torch.device("cpu")
            chosen = torch.Generator(where).manual_seed(0)
            noise = torch.randn(numel(self.shapes), generator=chosen, device=where)
            self._noise[dtype] = noise.mul_(1e-3 * LOSS_SCALE).to(self.device, dtype)
        pieces = self._noise[dtype].split([math.prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def params(self, shapes: Shapes | None = None) -> list[nn.Parameter]:
        """New float32 parameters of ``shapes``, by default the workload's."""
        return [nn.Parameter(g * 0.1) for g in self._scaled_grads(shapes or self.shapes, torch.float32)]

    def gradients(self, params: Sequence[Tensor], *, fixed: bool = False) -> Gradients:
        """Gradients for ``params``: scaled ones to be handed over in every step, or ``fixed``, there for good."""
        shapes = [tuple(p.shape) for p in params]
        gradients = Gradients(params, self._scaled_grads(shapes, params[0].dtype), self.watch)
        if fixed:
            for p, g in zip(params, gradients.values, strict=True):
                p.grad = g / LOSS_SCALE
        return gradients


class Gradients:
    """What a backward leaves in ``param.grad``: tensors of their own, with the same values in every step."""

    def __init__(self, params: Sequence[Tensor], values: list[Tensor], watch: Stopwatch) -> None:
        self.params, self.values = params, values
        self._watch = watch
        self._handed: list[Tensor] = []

    def hand_over(self) -> None:
        """Give every parameter its gradient, off the clock."""
        self._watch.stop()
        if not self._handed:
            self._handed = [torch.empty_like(v) for v in self.values]
        torch._foreach_copy_(self._handed, self.values)
        for param, grad in zip(self.params, self._handed, strict=True):
            param.grad = grad
        self._watch.start()

    def add_up(self) -> None:
        """Write them where earlier ones, now zeros, have stayed: as a backward does, off the clock."""
        if any(p.grad is None for p in self.params):
            self.hand_over()
            return
        self._watch.stop()
        torch._foreach_copy_([p.grad for p in self.params], self.values)
        self._watch.start()
