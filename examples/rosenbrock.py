# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws the way of every optimizer through Rosenbrock's valley into one picture.

    python examples/rosenbrock.py [docs/rosenbrock.png]
    python examples/rosenbrock.py --each FOLDER          # a picture for each, in files of their names

f(x, y) = (1 - x)² + 100 (y - x²)²; the minimum, 0, is at (1, 1). The learning rates were chosen so that each gets
somewhere within the steps shown: the picture is about the shape of the paths, not a race.
"""

import sys
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

from apex_npu import optimizers

matplotlib.use("Agg")
from matplotlib import pyplot as plt

START = (-1.5, 2.0)
STEPS = 800
RUNS = {
    "NpuFusedSGD": {"lr": 2e-4, "momentum": 0.9},
    "NpuFusedAdam": {"lr": 2e-2},
    "NpuFusedAdamW": {"lr": 2e-2},
    "NpuFusedAdamP": {"lr": 2e-2},
    "NpuFusedBertAdam": {"lr": 2e-2, "weight_decay": 0.0, "b2": 0.999},
    "NpuFusedAdadelta": {"lr": 5.0},
    "NpuFusedLamb": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
    "NpuFusedRMSprop": {"lr": 5e-3},
    "NpuFusedRMSpropTF": {"lr": 1e-2},
    "FusedNovoGrad": {"lr": 1.0, "betas": (0.9, 0.98)},
    "FusedAdagrad": {"lr": 0.3},
    "NpuFusedMuon": {"lr": 5e-3, "weight_decay": 0.0},
}


def rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    """Its value."""
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def path(name: str) -> Tensor:
    """The points, (steps + 1, 2), that optimizer ``name`` visits."""
    # Muon steps matrices alone: one of two numbers moves by the same length in each step.
    point = nn.Parameter(torch.tensor(START).view(1, 2) if name == "NpuFusedMuon" else torch.tensor(START))
    optimizer = getattr(optimizers, name)([point], **RUNS[name])
    points = [point.detach().flatten().clone()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        rosenbrock(*point.flatten()).backward()
        optimizer.step()
        points.append(point.detach().flatten().clone())
    return torch.stack(points)


def draw(panel: plt.Axes, name: str) -> None:
    """The path of optimizer ``name``, over the logarithm of the function."""
    x, y = torch.meshgrid(torch.linspace(-2, 2, 200), torch.linspace(-0.8, 3, 200), indexing="xy")
    points = path(name)
    panel.contourf(x, y, rosenbrock(x, y).log1p(), 18, cmap="Greys", alpha=0.7)
    panel.plot(*points.T, color="#d55e00", linewidth=1.6)
    panel.plot(*points[-1], "o", color="#0072b2", markersize=5)
    panel.plot(1, 1, "*", color="#009e73", markersize=12)
    final = rosenbrock(*points[-1]).item()
    panel.set_title(f"{name}\n{', '.join(f'{k}={v}' for k, v in RUNS[name].items())}: f = {final:.2g}", fontsize=9)
    panel.set_xlim(-2, 2)
    panel.set_ylim(-0.8, 3)


def draw_all(target: str) -> None:
    """One picture of all."""
    figure, axes = plt.subplots(3, 5, figsize=(17, 9), sharex=True, sharey=True, constrained_layout=True)
    for panel, name in zip(axes.flat, RUNS, strict=False):
        draw(panel, name)
    for panel in axes.flat[len(RUNS) :]:
        panel.set_axis_off()
    figure.suptitle(f"{STEPS} steps on Rosenbrock's function from {START}; star: minimum, dot: where it ended")
    figure.savefig(target, dpi=90)
    print(f"wrote {target}")


def draw_each(folder: Path) -> None:
    """A picture for each optimizer."""
    for name in RUNS:
        figure, panel = plt.subplots(figsize=(5, 4), constrained_layout=True)
        draw(panel, name)
        figure.savefig(folder / f"{name}.png", dpi=90)
        plt.close(figure)
    print(f"wrote {len(RUNS)} pictures to {folder}")


def main() -> None:
    """Draw."""
    if sys.argv[1:2] == ["--each"]:
        draw_each(Path(sys.argv[2]))
    else:
        draw_all(sys.argv[1] if len(sys.argv) > 1 else "docs/rosenbrock.png")


if __name__ == "__main__":
    main()
