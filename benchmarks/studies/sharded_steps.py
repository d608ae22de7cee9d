# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of AdamW over the DTensors that fully_shard makes, and the memory of a training: ours beside torch's.

    PYTHONPATH=benchmarks torchrun --standalone --nproc-per-node 2 benchmarks/studies/sharded_steps.py
        [--units 50 250] [--rounds 20]
    PYTHONPATH=benchmarks torchrun --standalone --nproc-per-node gpu benchmarks/studies/sharded_steps.py --device cuda

--measure chooses: "bare" is a step alone, "backward" the same after a real backward, "whole" all that follows a
backward, at O2 (unscale, check, clip, step, clear), "memory", on accelerators, what the iterations of a larger model
hold. Without torchrun there is one process.

Each unit of fully_shard has 4 parameters. On the CPU one thread for each process and its CPU time, without what it
waits for others; on cuda the time of the stream of the first process. Gradients have been reduced by fully_shard once.
Before each step, while the clock is stopped, they are refilled and assigned, and 64 MiB are written, which evict from
the caches what a backward would. Variants take turns in the same processes; ratios are taken within a turn.
"backward" differs: each step follows a forward and a backward, whose reduce-scatter leaves the gradients in new memory,
and the time on the CPU is that of the clock, which also has what a process waits for the other.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import plots
import report
import torch
import torch.distributed as dist
from report import Table
from rounds import Stopwatch, commit, is_simulated, open_device, processor, steps_in_turns
from shared import rows, show, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from whole_steps import grad_scaler
from workloads import LOSS_SCALE, MAX_NORM

from apex_npu import amp, optimizers

LR = 1e-3
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
MEASURES = ("bare", "backward", "whole", "memory")
# On an accelerator, for the rounds of each comparison.
SECONDS = 2.5
# Of the model whose memory is measured: its gradients are more than a buffer that is kept (docs/memory.md).
COUNT, WIDTH = 24, 1024
# Label in the picture → variant.
DRAWN = {
    "torch": "GradScaler, clip, fused",
    "apex_npu": "apex_npu",
    "with fuse_unscale": "apex_npu, folded",
}


@functools.cache
def evicting(device: torch.device) -> torch.Tensor:
    """Larger than the caches."""
    return torch.zeros(2**24, device=device)


class Units:
    """A sharded model of ``count`` units, which has gradients.

    Attributes:
        device: Of the parameters.
        params: Its parameters.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = [nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 64)) for _ in range(count)]
        self.model = cut(nn.Sequential(*layers).to(device), "O2")
        self.model(torch.randn(1, 64, device=device)).float().square().mean().backward()
        self.params = list(self.model.parameters())
        self._grads = [p.grad for p in self.params]
        storages = {g.to_local().untyped_storage().data_ptr(): g.to_local() for g in self._grads}
        flats = [g.as_strided((g.untyped_storage().nbytes() // g.itemsize,), (1,), 0) for g in storages.values()]
        self._flats = [(flat, torch.randn_like(flat) * 1e-3) for flat in flats]

    def fill(self, factor: float = 1.0) -> None:
        """Give all parameters the same gradients as ever, as backward does: into memory that has been cleared."""
        for flat, value in self._flats:
            torch.mul(value, factor, out=flat)
        for p, grad in zip(self.params, self._grads, strict=True):
            p.grad = grad
        _evict(self.device)

    def backward(self) -> None:
        """Compute new gradients."""
        for p in self.params:
            p.grad = None
        self.model(torch.ones(1, 64, device=self.device)).float().square().mean().backward()
        _evict(self.device)

    def groups(self, *, two: bool) -> list[dict[str, object]]:
        """All parameters in one param group, or matrices in one and vectors in another."""
        if not two:
            return [{"params": self.params}]
        matrices, vectors = ([p for p in self.params if (p.dim() > 1) is held] for held in (True, False))
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _evict(device: torch.device) -> None:
    evicting(device).add_(1)
    # glibc puts off part of what has been freed until the next large allocation, which would be in a step.
    bytearray(2**16)


def cut(model: nn.Sequential, level: str) -> nn.Sequential:
    """``model``, whose layers are units, over all processes."""
    mesh = init_device_mesh(model[0][0].weight.device.type, (dist.get_world_size(),))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, mp_policy=amp.fsdp_policy(level))
    return model


class SharedStopwatch(Stopwatch):
    """All processes take the time of the first one, and repeat a step equally often: steps may communicate."""

    def time(self, step: Callable[[], object], repeats: int) -> float:
        found = torch.tensor(super().time(step, repeats), device=self.device)
        dist.broadcast(found, 0)
        return float(found)


class WallClock(SharedStopwatch):
    """On a CPU the time of the clock, from when all processes have come to ``start``."""

    def start(self) -> None:
        if self.device.type != "cpu":
            super().start()
            return
        dist.barrier()
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self.device.type != "cpu":
            super().stop()
            return
        self._total += time.perf_counter() - self._started


Make = Callable[[Units, Stopwatch], Callable[[], object]]


def _bare(
    kind: Callable[..., torch.optim.Optimizer],
    *,
    two: bool = False,
    give: Callable[[Units], None] = Units.fill,
    **options: object,
) -> Make:
    def make(units: Units, watch: Stopwatch) -> Callable[[], object]:
        optimizer = kind(units.groups(two=two), lr=LR, **options)
        return _paused(units, watch, optimizer.step, give)

    return make


def _paused(
    units: Units, watch: Stopwatch, then: Callable[[], object], give: Callable[[Units], None] = Units.fill
) -> Callable[[], object]:
    def step() -> None:
        watch.stop()
        give(units)
        watch.start()
        then()

    return step


def _one_flat_tensor(units: Units, watch: Stopwatch) -> Callable[[], object]:
    numel = sum(p.to_local().numel() for p in units.params)
    param, grad, first, second = (torch.rand(numel, device=units.device) for _ in range(4))
    count = torch.zeros((), device=units.device)

    def update() -> None:
        torch._fused_adamw_(
            [param],
            [grad],
            [first],
            [second],
            [],
            [count],
            lr=LR,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return _paused(units, watch, update)


def _whole_of_torch(units: Units, watch: Stopwatch) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(units.params, lr=LR, fused=True)
    scaler = grad_scaler(units.device)

    def step() -> None:
        watch.stop()
        units.fill(LOSS_SCALE)
        watch.start()
        scaler.unscale_(optimizer)
        clip_grad_norm_(units.params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _whole(*, by_torch: bool = False, **options: object) -> Make:
    """Under amp; clipped by the optimizer, or ``by_torch``'s function, as amp finds it in scripts."""

    def make(units: Units, watch: Stopwatch) -> Callable[[], object]:
        _, optimizer = amp.initialize(
            units.model,
            optimizers.NpuFusedAdamW(units.params, lr=LR),
            opt_level="O2",
            dynamic_init_scale=LOSS_SCALE,
            verbosity=0,
            **options,
        )
        loss = torch.ones((), device=units.device, requires_grad=True)

        def step() -> None:
            with amp.scale_loss(loss, optimizer):
                watch.stop()
                units.fill(LOSS_SCALE)
                watch.start()
            if by_torch:
                clip_grad_norm_(units.params, MAX_NORM)
            else:
                optimizer.clip_optimizer_grad_norm_fused(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


# Of the names of those that move parameters into memory of their own.
FUSED = "apex_npu"
FLAT = "torch fused op, one flat tensor"
WHOLE: dict[str, Make] = {
    "GradScaler, clip, fused": _whole_of_torch,
    "apex_npu": _whole(),
    "apex_npu, torch's clip_grad_norm_": _whole(by_torch=True),
    "apex_npu, folded": _whole(fuse_unscale=True),
}
BARE: dict[str, Make] = {
    "torch fused": _bare(torch.optim.AdamW, fused=True),
    "torch foreach": _bare(torch.optim.AdamW, foreach=True),
    "torch fused, two groups": _bare(torch.optim.AdamW, two=True, fused=True),
    FLAT: _one_flat_tensor,
    "apex_npu": _bare(optimizers.NpuFusedAdamW),
    "apex_npu, two groups": _bare(optimizers.NpuFusedAdamW, two=True),
}
AFTER_BACKWARD: dict[str, Make] = {
    "torch fused": _bare(torch.optim.AdamW, fused=True, give=Units.backward),
    FLAT: _one_flat_tensor,
    "apex_npu": _bare(optimizers.NpuFusedAdamW, give=Units.backward),
}

# torch plans operators on lists of DTensors when it first calls them. Of 1,000 that takes seconds for the fused kernel,
# and half a minute for all that foreach has: left out on accelerators, so that they are measured within a minute.
SLOW_TO_BEGIN = ("torch foreach", "torch fused, two groups")


class Training:
    """Iterations of ``COUNT`` units of ``WIDTH``: under amp with ``NpuFusedAdamW``, or by torch alone.

    Attributes:
        model: What is trained.
    """

    def __init__(self, device: torch.device, level: str, *, by_torch: bool, **options: object) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(COUNT)]
        self.model = cut(nn.Sequential(*layers).to(device), level)
        self._rows = torch.randn(256, WIDTH, device=device)
        self._scaler = grad_scaler(device) if level == "O2" and by_torch else None
        self._by_torch = by_torch
        if by_torch:
            options = {} if device.type == "npu" else {"fused": True}  # an NPU's own choice is foreach
            self._optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=LR, **options)
        else:
            self._optimizer = optimizers.NpuFusedAdamW(self.model.parameters(), lr=LR)
            amp.initialize(self.model, self._optimizer, opt_level=level, verbosity=0, **options)

    def step(self) -> None:
        """All of an iteration but to clear gradients."""
        loss = self.model(self._rows).float().square().mean()
        if not self._by_torch:
            with amp.scale_loss(loss, self._optimizer) as scaled_loss:
                scaled_loss.backward()
            self._optimizer.clip_optimizer_grad_norm_fused(MAX_NORM)
        elif self._scaler is None:
            loss.backward()
            clip_grad_norm_(self.model.parameters(), MAX_NORM)
        else:
            self._scaler.scale(loss).backward()
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            return
        self._optimizer.step()

    def clear(self) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad()


# Level, name, and arguments of ``Training``.
TRAININGS: list[tuple[str, str, dict[str, Any]]] = [
    ("O0", "torch", {"by_torch": True}),
    ("O0", "apex_npu", {"by_torch": False}),
    ("O2", "GradScaler, torch", {"by_torch": True}),
    ("O2", "apex_npu", {"by_torch": False, "dynamic_init_scale": LOSS_SCALE}),
    ("O2", "apex_npu, folded", {"by_torch": False, "dynamic_init_scale": LOSS_SCALE, "fuse_unscale": True}),
    ("O5", "torch", {"by_torch": True}),
    ("O5", "apex_npu", {"by_torch": False}),
]


def memory(device: torch.device) -> Table:
    """MB of each training: the peak of an iteration, what is held after its step, and once gradients are cleared.

    Without what was there before, which is a row's ``before_mb``: the same for all, if nothing of one is left to the
    next.
    """
    allocator: Any = getattr(torch, device.type)
    same = {"commit": commit(), "device": device.type, "processor": processor(device), "torch": torch.__version__}
    table = []
    for name in dict.fromkeys(level for level, _, _ in TRAININGS):
        _held(allocator, Training(device, name, by_torch=True))  # libraries allocate what they keep
    for level, variant, options in TRAININGS:
        before = _in_use(allocator)
        held = _held(allocator, Training(device, level, **options))
        numbers = {**{name: nbytes - before for name, nbytes in held.items()}, "before_mb": before}
        cells = {name: f"{nbytes / 1e6:.1f}" for name, nbytes in numbers.items()}
        workload = f"{COUNT} units of width {WIDTH}, {_processes()}"
        table.append({**same, "workload": workload, "level": level, "variant": variant, **cells})
    return table


def _held(allocator: Any, training: Training) -> dict[str, int]:
    for _ in range(3):
        training.step()
        training.clear()
    gc.collect()
    allocator.synchronize()
    allocator.reset_peak_memory_stats()
    training.step()
    held = {"peak_mb": allocator.max_memory_allocated(), "stepped_mb": allocator.memory_allocated()}
    training.clear()
    held["cleared_mb"] = allocator.memory_allocated()
    return held


def _in_use(allocator: Any) -> int:
    """Bytes, when what was is gone."""
    amp.shutdown()
    for _ in range(3):  # what autograd's thread of the device has held is found in the second round
        gc.collect()
        allocator.synchronize()
    allocator.empty_cache()
    return int(allocator.memory_allocated())


def _processes() -> str:
    count = dist.get_world_size()
    return f"{count} process{'' if count == 1 else 'es'}"


def join(name: str) -> torch.device:
    """Join the processes of torchrun, if there are any; this one's device."""
    device = open_device(name)
    if name != "cpu":
        getattr(torch, name).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched():
        dist.init_process_group(BACKENDS[name])
    else:
        dist.init_process_group(BACKENDS[name], store=dist.HashStore(), rank=0, world_size=1)
    return device


def steps(device: torch.device, variants: dict[str, Make], count: int, rounds: int) -> Table:
    """The rows of ``variants`` over ``count`` units."""
    watch = (WallClock if variants is AFTER_BACKWARD else SharedStopwatch)(device)
    common = Units(count, device)  # of all that leave parameters in their memory, as it takes long to make
    made = {}
    for name, make in variants.items():
        if device.type != "cpu" and name in SLOW_TO_BEGIN:
            continue
        made[name] = make(Units(count, device) if name.startswith(FUSED) else common, watch)
    # Several processes would not run out of time in the same round.
    limited = device.type != "cpu" and dist.get_world_size() == 1
    times = steps_in_turns(made, watch, rounds, SECONDS if limited else float("inf"))
    workload = f"{4 * count} DTensors, {_processes()}"
    new = rows(device, torch.float32, workload, times, next(iter(variants)))
    if FLAT in times:
        for row, beside in zip(new, rows(device, torch.float32, workload, times, FLAT), strict=True):
            row["ratio_to_one_flat_tensor"] = beside[f"ratio_to_{FLAT}"]
            row.update(flat_low=beside["ratio_low"], flat_high=beside["ratio_high"])
    amp.shutdown()
    return new


def speeds(table: Table) -> dict[str, dict[str, plots.Speed]]:
    """How many DTensors → what is drawn → speed over torch's, of all that follows a backward."""
    rows = {(row["workload"], row["variant"]): row for row in table}
    prefix = f"ratio_to_{DRAWN['torch']}"
    return {
        workload.partition(",")[0]: {
            label: plots.speed(rows[workload, variant], prefix, "ratio_low", "ratio_high")
            for label, variant in DRAWN.items()
        }
        for workload in dict.fromkeys(row["workload"] for row in table)
    }


def draw(theme: str, table: Table) -> Any:
    """docs/sharded_steps_light.svg or _dark.svg."""
    import matplotlib.pyplot as plt

    found_of = speeds(table)
    figure, axes = plt.subplots(figsize=(plots.WIDTH, 3.7))
    for place, label in enumerate(DRAWN):
        for row, found in enumerate(found_of.values()):
            value, low, high = found[label]
            height = row + 0.27 * (place - 1)
            shown = label if row == 0 else None
            axes.barh(height, value, 0.25, color=plots.COLOURS[label][theme], label=shown)
            axes.plot([low, high], [height, height], color=plots.INK[theme], linewidth=1)
            axes.text(high, height, f" {plots.multiple(value)}", va="center")
    axes.set_yticks(range(len(found_of)), [name.replace(" ", "\n") for name in found_of])
    figure.suptitle(f"{table[0]['device'].upper()}, 2 processes, torch {table[0]['torch']}", fontweight="bold")
    axes.set_title("A whole O2 step of AdamW, sharded")
    axes.set_xlabel("speed: GradScaler, clip_grad_norm_ and\ntorch.optim.AdamW(fused=True) = 1")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure


def publish(name: str, device: torch.device, table: Table, show: Callable[[Table], object]) -> None:
    """By the first process: show ``table``, and write it, unless its times are those of a simulation."""
    if dist.get_rank() == 0:
        show(table)
        if not is_simulated(device):
            write(name, device, table)
            if (name, device.type) == ("sharded_whole_steps", "cpu"):
                plots.save(plots.DOCS / "sharded_steps", draw, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--units", type=int, nargs="+", default=[50, 250])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--measure", choices=MEASURES, nargs="+", help="by default all that the device has")
    options = parser.parse_args()
    chosen = options.measure or (MEASURES[:3] if options.device == "cpu" else MEASURES)
    if options.device == "cpu" and "memory" in chosen:
        parser.error("memory is measured on accelerators, whose allocators count it: --device cuda")
    device = join(options.device)
    for measured, name, variants in (
        ("bare", "sharded_steps", BARE),
        ("backward", "sharded_backward_steps", AFTER_BACKWARD),
        ("whole", "sharded_whole_steps", WHOLE),
    ):
        if measured in chosen:
            table = [row for count in options.units for row in steps(device, variants, count, options.rounds)]
            publish(name, device, table, show)
    if "memory" in chosen:
        publish("sharded_memory", device, memory(device), lambda table: print(report.sharded_memory(table)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
