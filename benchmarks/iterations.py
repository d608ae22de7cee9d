# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole training iterations, forward and backward included: what a bare step hides is in here, and counts.

    python benchmarks/iterations.py [--device cpu|cuda] [--models PATTERN] [--precisions float32] [--threads 1 0]
        [--seconds 20] [--write]

measures the models of ``models.py`` at each level beside torch's own recipe at the same precision. 0 threads are all
cores, and wall-clock time then. On cuda whole iterations are timed, with one wait at the end: a wait after each phase
would add up what runs at the same time, the host's work and the device's.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from statistics import median

import models
import torch
from models import BasicBlock, Task
from rounds import (
    RESULTS,
    Spread,
    Stopwatch,
    clock,
    commit,
    in_turns,
    open_device,
    processor,
    steps_in_turns,
    synchronize,
    write_csv,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from whole_steps import clip, grad_scaler, torch_adam
from workloads import LOSS_SCALE, MAX_NORM

from apex_npu import amp, optimizers

Step = Callable[[], object]
# Told which phase of an iteration has ended.
Lap = Callable[[str], None]
PHASES = ("forward", "block", "backward", "clip", "step")


def resnet(device: torch.device) -> tuple[nn.Module, Tensor]:
    """ResNet-like: 40 convolutions of 64 channels, 1.5 million parameters in 122 tensors, 4 images of 8 × 8."""
    torch.manual_seed(0)
    blocks = [BasicBlock(64, 64) for _ in range(20)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model.to(device), torch.randn(4, 3, 8, 8, device=device)


def transformer(device: torch.device) -> tuple[nn.Module, Tensor]:
    """12 layers of width 128: 2.4 million parameters in 144 tensors, 2 sequences of 16."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return model.to(device), torch.randn(2, 16, 128, device=device)


TORCH_FP32, TORCH_BF16 = "GradScaler, clip, fused", "autocast, GradScaler, clip, fused"
# Of goals.py and watching.py: small ones, so that what surrounds the arithmetic is a large share.
MODELS = {"ResNet-like": resnet, "transformer": transformer}
# Precision → the dtype of torch's autocast, and our levels.
PRECISIONS: dict[str, tuple[torch.dtype | None, tuple[str, ...]]] = {
    "float32": (None, ("O0",)),
    "bfloat16": (torch.bfloat16, ("O4", "O5")),
    "float16": (torch.float16, ("O1", "O2")),
}


def task_of(name: str, device: torch.device) -> Task:
    """The task ``name``, with the same values every time."""
    if name in models.MODELS:
        torch.manual_seed(0)
        return models.MODELS[name](device)
    model, x = MODELS[name](device)
    return Task([model], [lambda networks: networks[0](x).float().square().mean()])


def _no_lap(phase: str) -> None:
    pass


def theirs(name: str, device: torch.device, dtype: torch.dtype | None, lap: Lap = _no_lap) -> Step:
    """GradScaler, clip_grad_norm_ and torch's fused Adam, under torch.autocast where ``dtype`` is given."""
    networks, losses = task_of(name, device)
    trained = [[p for p in network.parameters() if p.requires_grad] for network in networks]
    parts = [(loss, params, torch_adam(params)) for loss, params in zip(losses, trained, strict=True)]
    scaler = grad_scaler(device)

    def step() -> None:
        for loss_of, params, optimizer in parts:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = loss_of(networks)
            lap("forward")
            scaled_loss = scaler.scale(loss)
            lap("block")
            scaled_loss.backward()
            lap("backward")
            scaler.unscale_(optimizer)
            lap("block")
            clip_grad_norm_(params, MAX_NORM)
            lap("clip")
            scaler.step(optimizer)
            scaler.update()
            for _, _, each in parts:
                each.zero_grad()
            lap("step")

    return step


def ours(
    name: str,
    device: torch.device,
    level: str,
    lap: Lap = _no_lap,
    *,
    fold: bool = False,
    set_to_none: bool = True,
) -> Step:
    """The same with amp and NpuFusedAdam; without ``set_to_none`` backward adds to gradients that stay."""
    networks, losses = task_of(name, device)
    trained = [[p for p in network.parameters() if p.requires_grad] for network in networks]
    adams = [optimizers.NpuFusedAdam(params, lr=1e-4) for params in trained]
    networks, adams = amp.initialize(
        networks,
        adams,
        opt_level=level,
        loss_scale="dynamic",
        dynamic_init_scale=LOSS_SCALE,
        fuse_unscale=fold,
        verbosity=0,
    )

    def step() -> None:
        for loss_of, optimizer in zip(losses, adams, strict=True):
            loss = loss_of(networks)
            lap("forward")
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                lap("block")
                scaled_loss.backward()
                lap("backward")
            lap("block")
            clip(optimizer, fold)
            lap("clip")
            optimizer.step()
            for each in adams:
                each.zero_grad(set_to_none)
            lap("step")

    return step


def variants(name: str, device: torch.device) -> dict[str, Callable[[], Step]]:
    """Iterations of the model ``name``. O1 is left out: its casts would be on for the others."""
    return {
        TORCH_FP32: lambda: theirs(name, device, None),
        "apex_npu O0, as written": lambda: ours(name, device, "O0"),
        "apex_npu O0, as written, in place": lambda: ours(name, device, "O0", set_to_none=False),
        "apex_npu O0, folded": lambda: ours(name, device, "O0", fold=True),
        TORCH_BF16: lambda: theirs(name, device, torch.bfloat16),
        "apex_npu O5, as written": lambda: ours(name, device, "O5"),
        "apex_npu O5, folded": lambda: ours(name, device, "O5", fold=True),
    }


# --------------------------------------------------------------------------------------------------- models people know


class Laps:
    """How long each phase of an iteration takes."""

    def __init__(self, device: torch.device, *, wall: bool) -> None:
        self._device, self._wall = device, wall
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._since = 0.0

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter() if self._wall else clock(self._device)

    def __call__(self, phase: str) -> None:
        """What has passed since the last call belongs to ``phase``."""
        now = self._now()
        self._spent[phase] += now - self._since
        self._since = now

    def of(self, step: Step) -> dict[str, float]:
        """The milliseconds of each phase of ``step``."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._since = self._now()
        step()
        return {phase: spent * 1e3 for phase, spent in self._spent.items()}


def _recipes(name: str, device: torch.device, precision: str, lap: Lap) -> dict[str, Step]:
    dtype, levels = PRECISIONS[precision]
    torchs = theirs(name, device, dtype, lap)

    def without_casts() -> None:  # those of O1 are on outside of models, too
        with amp.disable_casts():
            torchs()

    found: dict[str, Step] = {"torch": without_casts}
    for level in levels:
        for how in ("as written", "folded"):
            found[f"{level}, {how}"] = ours(name, device, level, lap, fold=how == "folded")
    return found


def measure(name: str, precision: str, device: torch.device, threads: int, seconds: float) -> list[dict[str, str]]:
    """A row for torch's recipe and for each of ours: times, phases, and torch's time over it."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    phases: dict[str, list[dict[str, float]]] = {}
    if device.type == "cpu":
        laps = Laps(device, wall=threads != 1)
        steps = _recipes(name, device, precision, laps)
        phases = {variant: [] for variant in steps}

        def time_one(variant: str) -> float:
            phases[variant].append(laps.of(steps[variant]))
            return sum(phases[variant][-1].values())

        times = in_turns(list(steps), 50, time_one, warm_up=1, budget_s=seconds)
    else:
        steps = _recipes(name, device, precision, _no_lap)
        times = steps_in_turns(steps, Stopwatch(device), 50, seconds)
    steps = {}
    amp.shutdown()
    gc.collect()
    same = {"commit": commit(), "device": device.type, "processor": processor(device), "torch": torch.__version__}
    same |= {"threads": str(torch.get_num_threads()), "model": name, "precision": precision}
    table = []
    for variant, values in times.items():
        speed = Spread.of([a / b for a, b in zip(times["torch"], values, strict=True)])
        numbers = {"median_ms": median(values), "speed": speed.middle, "low": speed.low, "high": speed.high}
        if phases:
            counted = phases[variant][-len(values) :]
            numbers |= {phase: median(row[phase] for row in counted) for phase in PHASES}
        table.append({**same, "variant": variant, **{key: f"{number:.4f}" for key, number in numbers.items()}})
    return table


def show(row: dict[str, str]) -> None:
    """Print what one wants to see of a row."""
    phases = " ".join(f"{phase} {float(row[phase]):.1f}" for phase in PHASES if phase in row)
    speed = f"{float(row['speed']):.2f} ({float(row['low']):.2f} .. {float(row['high']):.2f})"
    print(f"{row['model']:20}{row['variant']:16}{float(row['median_ms']):9.1f} ms  {speed:22} {phases}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default="*", help="pattern of their names, as in a shell")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 0], help="0: all cores")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the rounds of one model in one precision")
    parser.add_argument("--write", action="store_true", help="write results/iterations_<device>.csv")
    options = parser.parse_args()
    device = open_device(options.device)
    table = []
    for threads in options.threads:
        for precision in options.precisions:
            for name in [name for name in models.MODELS if fnmatchcase(name, options.models)]:
                rows = measure(name, precision, device, threads, options.seconds)
                for row in rows:
                    show(row)
                table += rows
    if options.write:
        write_csv(RESULTS / f"iterations_{device.type}.csv", table)


if __name__ == "__main__":
    main()
