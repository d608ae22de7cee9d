# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m npu_simulator.benchmark``: a row of what the simulated device costs over the plain CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npu_simulator

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


def resnet_step(device: str, width: int, batch: int) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), Block(width, width, 1),
        Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4 * width, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32).to(device), torch.randint(0, 10, (batch,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def add_step(device: str) -> Step:
    x = torch.ones(4).to(device)

    def step() -> None:
        for _ in range(1000):
            x.add_(1)

    return step


def milliseconds(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Alternating, so that what else the machine does meets both."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    npu_simulator.install()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread; median (p90) in ms\n")
    print("| step | cpu | npu, simulated | ratio |\n|---|---|---|---|")
    cases: dict[str, Callable[[str], Step]] = {
        "ResNet-like, width 8, batch 4": lambda device: resnet_step(device, 8, 4),
        "ResNet-like, width 32, batch 8": lambda device: resnet_step(device, 32, 8),
        "1000 × add_ of 4 numbers": add_step,
    }
    for name, make in cases.items():
        times = milliseconds({device: make(device) for device in ("cpu", "npu")}, 30)
        medians = {device: statistics.median(t) for device, t in times.items()}
        cells = [f"{medians[d]:.2f} ({statistics.quantiles(t, n=10)[-1]:.2f})" for d, t in times.items()]
        print(f"| {name} | {cells[0]} | {cells[1]} | {medians['npu'] / medians['cpu']:.2f} |")


if __name__ == "__main__":
    main()
