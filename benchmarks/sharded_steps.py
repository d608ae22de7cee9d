# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of AdamW over the DTensors that fully_shard makes: ours beside torch's, in two processes.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded_steps.py [--units 50 250] [--rounds 20] [--whole]

With --whole all that follows a backward, at O2: unscale, check, clip, step, clear; else the step alone.

Each unit of fully_shard has 4 parameters. One thread for each process and its CPU time, without what it waits for the
other. Gradients have been reduced by fully_shard once. Before each step, while the clock is stopped, they are refilled
and assigned, and 64 MiB are written, which evict from the caches what a backward would. Variants take turns in the same
processes; ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from rounds import Stopwatch, rows, show, steps_in_turns, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from workloads import LOSS_SCALE, MAX_NORM

from apex_npu import amp, optimizers

CPU = torch.device("cpu")
LR = 1e-3
# Larger than the caches.
EVICTING = torch.zeros(2**24)


class Units:
    """A sharded model of ``count`` units, which has gradients.

    Attributes:
        params: Its parameters.
        is_flat: Whether the gradients of a unit share one storage.
    """

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 64)) for _ in range(count)])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, mp_policy=amp.fsdp_policy("O2"))
        model(torch.randn(1, 64)).float().square().mean().backward()
        self.model = model
        self.params = list(model.parameters())
        self._grads = [p.grad for p in self.params]
        storages = {g.to_local().untyped_storage().data_ptr(): g.to_local() for g in self._grads}
        self.is_flat = len(storages) == count
        flats = [g.as_strided((g.untyped_storage().nbytes() // g.itemsize,), (1,), 0) for g in storages.values()]
        self._flats = [(flat, torch.randn_like(flat) * 1e-3) for flat in flats]

    def fill(self, factor: float = 1.0) -> None:
        """Give all parameters the same gradients as ever, as backward does: into memory that has been cleared."""
        for flat, value in self._flats:
            torch.mul(value, factor, out=flat)
        for p, grad in zip(self.params, self._grads, strict=True):
            p.grad = grad
        EVICTING.add_(1)
        # glibc puts off part of what this has freed until the next large allocation, which would be in a step.
        bytearray(2**16)

    def groups(self, *, two: bool) -> list[dict[str, object]]:
        """All parameters in one param group, or matrices in one and vectors in another."""
        if not two:
            return [{"params": self.params}]
        matrices, vectors = ([p for p in self.params if (p.dim() > 1) is held] for held in (True, False))
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


Make = Callable[[Units, Stopwatch], Callable[[], object]]


def _bare(kind: Callable[..., torch.optim.Optimizer], *, two: bool = False, **options: object) -> Make:
    def make(units: Units, watch: Stopwatch) -> Callable[[], object]:
        optimizer = kind(units.groups(two=two), lr=LR, **options)
        return _paused(units, watch, optimizer.step)

    return make


def _paused(units: Units, watch: Stopwatch, then: Callable[[], object]) -> Callable[[], object]:
    def step() -> None:
        watch.stop()
        units.fill()
        watch.start()
        then()

    return step


def _one_flat_tensor(units: Units, watch: Stopwatch) -> Callable[[], object]:
    numel = sum(p.to_local().numel() for p in units.params)
    param, grad, first, second = (torch.rand(numel) for _ in range(4))
    count = torch.zeros(())

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
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
    scaler.scale(torch.ones(()))  # it makes its tensors when it first scales

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
        loss = torch.ones((), requires_grad=True)

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


WHOLE: dict[str, Make] = {
    "GradScaler, clip, fused": _whole_of_torch,
    "apex_npu": _whole(),
    "apex_npu, torch's clip_grad_norm_": _whole(by_torch=True),
    "apex_npu, folded": _whole(fuse_unscale=True),
}
FLAT = "torch fused op, one flat tensor"
BARE: dict[str, Make] = {
    "torch fused": _bare(torch.optim.AdamW, fused=True),
    "torch foreach": _bare(torch.optim.AdamW, foreach=True),
    "torch fused, two groups": _bare(torch.optim.AdamW, two=True, fused=True),
    FLAT: _one_flat_tensor,
    "apex_npu": _bare(optimizers.NpuFusedAdamW),
    "apex_npu, two groups": _bare(optimizers.NpuFusedAdamW, two=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, nargs="+", default=[50, 250])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = []
    variants = WHOLE if options.whole else BARE
    for count in options.units:
        watch = Stopwatch(CPU)
        steps = {name: make(Units(count), watch) for name, make in variants.items()}
        times = steps_in_turns(steps, watch, options.rounds, float("inf"))
        workload = f"{4 * count} DTensors, 2 processes"
        new = rows(CPU, torch.float32, workload, times, next(iter(variants)))
        if FLAT in times:
            for row, beside in zip(new, rows(CPU, torch.float32, workload, times, FLAT), strict=True):
                row["ratio_to_one_flat_tensor"] = beside[f"ratio_to_{FLAT}"]
                row.update(flat_low=beside["ratio_low"], flat_high=beside["ratio_high"])
        table += new
        if dist.get_rank() == 0:
            show(new)
    if dist.get_rank() == 0:
        write("sharded_whole_steps" if options.whole else "sharded_steps", CPU, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
