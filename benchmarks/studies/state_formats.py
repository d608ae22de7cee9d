# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The formats of ``docs/memory.md``: bytes of state, and time of a step; ``state_training.py`` has losses.

    PYTHONPATH=benchmarks python benchmarks/studies/state_formats.py [--device cuda] [--numel 16000000] [--rounds 9]

Times are the CPU time of one thread, or on another device the time from one synchronization to the next, of formats in
turns: the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from rounds import clock, synchronize
from torch import nn

from apex_npu.fusion import EncodedView
from apex_npu.optimizers import FusedAdam, FusedNovoGrad, NpuFusedAdamP, NpuFusedLamb, NpuFusedMuon

BF16 = torch.bfloat16
# Name, dtype of the parameters, options.
STEPS = [
    ("float32 parameters, float32 state", torch.float32, {}),
    ("float32 parameters, bfloat16 state", torch.float32, {"state_dtype": BF16}),
    ("float32 parameters, int8 state", torch.float32, {"state_dtype": "int8"}),
    ("remainders, float32 state", BF16, {"store_param_remainders": True}),
    ("remainders, bfloat16 state", BF16, {"store_param_remainders": True, "state_dtype": BF16}),
    ("remainders, int8 state", BF16, {"store_param_remainders": True, "state_dtype": "int8"}),
    ("8-bit remainders, float32 state", BF16, {"store_param_remainders": "int8"}),
    ("8-bit remainders, bfloat16 state", BF16, {"store_param_remainders": "int8", "state_dtype": BF16}),
    ("8-bit remainders, int8 state", BF16, {"store_param_remainders": "int8", "state_dtype": "int8"}),
    ("stochastic rounding, bfloat16 state", BF16, {"stochastic_rounding": True, "state_dtype": BF16}),
]


def state_bytes(optimizer: FusedAdam, param: nn.Parameter) -> float:
    """Per parameter, of what has one number for each element."""
    kept = [value for value in optimizer.state[param].values() if isinstance(value, EncodedView) or value.dim()]
    return sum(value.nbytes for value in kept) / param.numel()


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """What ``step`` takes."""
    synchronize(device)
    begin = clock(device)
    step()
    synchronize(device)
    return clock(device) - begin


def time_steps(numel: int, rounds: int, device: torch.device) -> None:
    """Print a row for each of ``STEPS``."""
    torch.set_num_threads(1)
    held = []
    for name, dtype, options in STEPS:
        param = nn.Parameter(torch.randn(numel, device=device).mul_(0.02).to(dtype))
        param.grad = torch.randn(numel, device=device).mul_(1e-3).to(dtype)
        held.append((name, FusedAdam([param], lr=1e-3, weight_decay=0.01, **options), param))
    times: dict[str, list[float]] = {name: [] for name, _, _ in STEPS}
    for _ in range(rounds + 2):
        for name, optimizer, _ in held:
            times[name].append(seconds(optimizer.step, device))
    base = times[STEPS[0][0]]
    print(f"{numel / 1e6:.0f} million elements, {device_name(device)}")
    print("| | bytes of state | ms | times as fast |\n|---|---|---|---|")
    for name, optimizer, param in held:
        ratio = statistics.median(b / t for b, t in zip(base[2:], times[name][2:], strict=True))
        print(f"| {name} | {state_bytes(optimizer, param):.2f} | {min(times[name][2:]) * 1e3:.2f} | {ratio:.2f} |")


def device_name(device: torch.device) -> str:
    """What times are of."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}, one thread"


def time_rules(numel: int, rounds: int, device: torch.device) -> None:
    """Print how many times as fast rules that read parameters as a whole are with each format, as with float32."""
    torch.set_num_threads(1)
    print("| rule | bfloat16 | int8 |\n|---|---|---|")
    rows = 1 << 8
    for rule in (NpuFusedLamb, NpuFusedAdamP, FusedNovoGrad, NpuFusedMuon):
        held = []
        few = numel if rule in (NpuFusedLamb, NpuFusedAdamP) else 1 << 18
        for state_dtype in (None, BF16, "int8"):
            param = nn.Parameter(torch.randn(rows, few // rows, device=device).mul_(0.02))
            param.grad = torch.randn_like(param).mul_(1e-3)
            held.append((rule([param], lr=1e-3, state_dtype=state_dtype), []))
        for _ in range(rounds + 2):
            for optimizer, taken in held:
                taken.append(seconds(optimizer.step, device))
        base = held[0][1][2:]
        ratios = [statistics.median(b / t for b, t in zip(base, taken[2:], strict=True)) for _, taken in held[1:]]
        print(f"| {rule.__name__} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--numel", type=int, default=16_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    time_steps(arguments.numel, arguments.rounds, arguments.device)
    time_rules(arguments.numel // 8, arguments.rounds, arguments.device)
