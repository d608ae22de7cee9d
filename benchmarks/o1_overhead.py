# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What O1 costs on the host, over plain torch.autocast: a transformer so small that nothing but overhead counts.

    python benchmarks/o1_overhead.py [--device cpu|npu|cuda] [--rounds 150]

All variants run in one process, in turns; ratios are taken within a turn. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from rounds import in_turns, open_device, rows, show, time_calls, write
from torch import Tensor, nn

from apex_npu import amp
from apex_npu.autocast import autocast_ops

DTYPE = torch.float16
VARIANTS = ("plain", "autocast", "O1", "O1, no extension")


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@contextmanager
def set_up(variant: str, model: nn.Module) -> Iterator[None]:
    """What is done once before training."""
    if not variant.startswith("O1"):
        yield
        return
    extension = autocast_ops.extension
    if variant == "O1, no extension":
        autocast_ops.extension = None  # kernels in Python
    amp.initialize(model, opt_level="O1", verbosity=0)
    try:
        yield
    finally:
        amp.shutdown()
        autocast_ops.extension = extension


def workloads(device: torch.device) -> dict[str, Callable[[nn.Module, str], None]]:
    x = torch.randn(2, 8, 16, device=device)

    def region(variant: str) -> Any:
        return torch.autocast(device.type, dtype=DTYPE) if variant == "autocast" else nullcontext()

    def loss_of(model: nn.Module, variant: str) -> Tensor:
        with region(variant):
            output: Tensor = model(x)
        return output.float().square().mean()

    def forward(model: nn.Module, variant: str) -> None:
        loss_of(model, variant)

    def forward_backward(model: nn.Module, variant: str) -> None:
        loss_of(model, variant).backward()
        model.zero_grad()

    half = x.half()

    def operator(model: nn.Module, variant: str) -> None:
        # O1 widens the argument, as no autocast does; the others do it by hand.
        F.gelu(half if variant.startswith("O1") else half.float())

    return {"forward": forward, "forward + backward": forward_backward, "one operator": operator}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=10, help="calls per round and variant")
    options = parser.parse_args()
    device = open_device(options.device)
    variants = VARIANTS if autocast_ops.extension is not None else ("plain", "autocast", "O1, no extension")
    torch.manual_seed(0)
    model = transformer().to(device)
    table: list[dict[str, str]] = []
    for workload, work in workloads(device).items():
        repeats = options.repeats * (100 if workload == "one operator" else 1)

        def time_one(variant: str) -> float:
            with set_up(variant, model):
                return time_calls(lambda: work(model, variant), device, repeats)  # noqa: B023

        new = rows(device, DTYPE, workload, in_turns(variants, options.rounds, time_one), "autocast")
        show(new)
        table += new
    write("o1_overhead", device, table)


if __name__ == "__main__":
    main()
