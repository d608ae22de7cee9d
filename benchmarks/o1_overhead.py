# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What O1 costs on the host, over plain torch.autocast: a transformer so small that nothing but overhead counts.

    python benchmarks/o1_overhead.py [--device cpu|npu|cuda] [--rounds 150]

All variants run in one process, in turns; ratios are taken within a turn. README.md explains the columns.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex_npu import amp
from apex_npu.amp import overlay

DTYPE = torch.float16
VARIANTS = ("plain", "autocast", "O1", "O1, no extension")
COLUMNS = (
    "commit", "device", "torch", "dtype", "workload", "variant",
    "median_ms", "p90_ms", "ratio_to_autocast", "ratio_low", "ratio_high",
)  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@contextmanager
def set_up(variant: str, model: nn.Module) -> Iterator[None]:
    """What is done once before training."""
    if not variant.startswith("O1"):
        yield
        return
    extension = overlay.extension
    if variant == "O1, no extension":
        overlay.extension = None  # kernels in Python
    amp.initialize(model, opt_level="O1", verbosity=0)
    try:
        yield
    finally:
        amp.shutdown()
        overlay.extension = extension


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


def measure(
    work: Callable[[nn.Module, str], None], variants: tuple[str, ...], device: torch.device, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of a call in each round, per variant."""
    torch.manual_seed(0)
    model = transformer().to(device)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds + 2):
        # Rotated, so that no variant always follows the same one.
        for i in range(len(variants)):
            variant = variants[(turn + i) % len(variants)]
            with set_up(variant, model):
                work(model, variant)
                synchronize(device)
                # On the host, CPU time: other processes do not count, the engine's threads do.
                clock = time.perf_counter if device.type == "cuda" else time.process_time
                start = clock()
                for _ in range(repeats):
                    work(model, variant)
                synchronize(device)
                if turn >= 2:  # the first two warm up
                    times[variant].append((clock() - start) * 1e3 / repeats)
    return times


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def rows(workload: str, times: dict[str, list[float]], device: torch.device) -> list[dict[str, str]]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    same = {"commit": commit.stdout.strip(), "device": device.type, "torch": torch.__version__, "dtype": str(DTYPE)}
    table = []
    for variant, values in times.items():
        ratios = [a / b for a, b in zip(values, times["autocast"], strict=True)]
        twentieths = quantiles(ratios, n=40)
        numbers = {
            "median_ms": median(values),
            "p90_ms": quantiles(values, n=10)[-1],
            "ratio_to_autocast": median(ratios),
            "ratio_low": twentieths[0],
            "ratio_high": twentieths[-1],
        }
        table.append(
            {**same, "workload": workload, "variant": variant, **{name: f"{x:.4f}" for name, x in numbers.items()}}
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=10, help="calls per round and variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "npu":
        import npu_simulator

        npu_simulator.install()
    device = torch.device(options.device)
    variants = VARIANTS if overlay.extension is not None else ("plain", "autocast", "O1, no extension")
    table: list[dict[str, str]] = []
    for workload, work in workloads(device).items():
        repeats = options.repeats * (100 if workload == "one operator" else 1)
        table += rows(workload, measure(work, variants, device, options.rounds, repeats), device)
    for row in table:
        print(
            f"{row['workload']:20} {row['variant']:17} {row['median_ms']:>8} ms   "
            f"{row['ratio_to_autocast']} x autocast ({row['ratio_low']} .. {row['ratio_high']})"
        )
    path = Path(__file__).parent / "results" / f"o1_overhead_{device.type}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
