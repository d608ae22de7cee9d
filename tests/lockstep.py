# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Equal parameters and gradients for two implementations of one rule, compared in the precision of each dtype."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import repeat

import torch
from devices import DEVICE
from torch import Tensor, nn

LOW_PRECISION = (torch.float16, torch.bfloat16)
# Between two correct float64 computations of many steps.
FLOAT64_TOLERANCE = 1e-12


def make_params(
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = DEVICE,
) -> list[nn.Parameter]:
    """Parameters of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def set_grads(params: Iterable[Tensor], seed: int, scale: float = 1.0, without: Container[int] = ()) -> None:
    """New gradients of normal numbers times ``scale``; none for the numbers ``without``."""
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype).to(p.device)
        p.grad = None if i in without else grad


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of ``value`` (float64) in ``dtype``: one unit in the last place."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** (torch.frexp(value.abs().clamp_min(info.tiny)).exponent - 1)


def assert_equal_params(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-6, *, floor: float | Sequence[float] = 0.0
) -> None:
    """``ours`` are ``theirs`` to within ``tolerance``, relative to a tensor's largest element, or to ``floor``,
    one number or one for each tensor, where that is larger.

    In float16 and bfloat16 the two were rounded from float32 values that are so close. Where those are on both sides of
    a tie between two neighbours they part by one unit in the last place. That must be seldom: an implementation that
    rounds twice, or cuts off, is wrong in many elements.
    """
    floors = repeat(floor, len(ours)) if isinstance(floor, float) else floor
    for i, (p, q, least) in enumerate(zip(ours, theirs, floors, strict=True)):
        assert p.shape == q.shape
        assert p.dtype == q.dtype
        a, b = p.detach().cpu().double(), q.detach().cpu().double()
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), f"parameter {i}: not finite in other places"
        a, b = a[finite], b[finite]
        if not b.numel():
            continue
        difference = (a - b).abs()
        scale = max(b.abs().max().item(), least)
        allowed = torch.tensor(tolerance * scale)
        if p.dtype in LOW_PRECISION and tolerance:
            allowed = allowed + spacing(torch.maximum(a.abs(), b.abs()), p.dtype)
            # Near zero the float32 values already differ by more than the distance between neighbours.
            parted = int((difference > tolerance * scale).sum())
            assert parted <= 1 + 0.02 * b.numel(), f"parameter {i}: {parted} of {b.numel()} are rounded otherwise"
        assert (difference <= allowed).all(), f"parameter {i}: {(difference / scale).max()}"


def assert_equal_states(ours: dict, theirs: dict, tolerance: float) -> None:
    """Two ``state_dict()["state"]`` agree to within ``tolerance``, relative to the largest value of each name.

    A number that is the sum of many of both signs is only as exact as they are, hence the largest of all parameters.
    """
    scale: dict[str, float] = {}
    for entry in theirs.values():
        for name, value in entry.items():
            if value is not None and torch.as_tensor(value).numel():
                scale[name] = max(scale.get(name, 0.0), torch.as_tensor(value).abs().max().item())
    for index, entry in ours.items():
        for name, value in entry.items():
            assert value.dtype not in LOW_PRECISION
            a, b = value.cpu().double(), torch.as_tensor(theirs[index][name]).cpu().double()
            assert a.shape == b.shape
            if b.numel():
                difference = (a - b).abs().max().item()
                assert difference <= tolerance * scale[name], f"{name} of parameter {index}: {difference / scale[name]}"
