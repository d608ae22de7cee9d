# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of Muon over matrices whose rows are divided between processes: ours beside gathering every matrix.

    export PYTHONPATH=benchmarks
    torchrun --standalone --nproc-per-node 4 benchmarks/studies/sharded_muon.py [--workloads "gpt 6 x 384"]
    torchrun --standalone --nproc-per-node gpu benchmarks/studies/sharded_muon.py --device cuda

"gathered" calls ``full_tensor`` on each gradient, and torch.optim.Muon on whole parameters that each process keeps, and
takes its rows back. The time is that of the clock, from a barrier to a barrier, since a step waits for other processes.
Variants take turns in the same processes; ratios are taken within a turn. Bytes are those that a process sends in a
step, without what it sends to itself; ``full_tensor`` sends a part to each of the other processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from report import Table
from rounds import Stopwatch, is_simulated, steps_in_turns, synchronize
from sharded_steps import BACKENDS, join
from shared import rows, show, write
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from workloads import WORKLOADS, Shapes

from apex_npu import optimizers

LR = 1e-3


class SharedClock(Stopwatch):
    """The time of the clock from a barrier to a barrier, as the first process has it."""

    def time(self, step: Callable[[], object], repeats: int) -> float:
        synchronize(self.device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize(self.device)
        dist.barrier()
        found = torch.tensor((time.perf_counter() - start) * 1e3 / repeats, device=self.device)
        dist.broadcast(found, 0)
        return float(found)


def matrices(shapes: Shapes, mesh: DeviceMesh, device: torch.device) -> list[nn.Parameter]:
    """DTensors whose rows are divided, with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for shape in shapes:
        p = nn.Parameter(distribute_tensor(torch.randn(shape, generator=generator, device=device), mesh, [Shard(0)]))
        p.grad = distribute_tensor(torch.randn(shape, generator=generator, device=device), mesh, [Shard(0)])
        found.append(p)
    return found


def exchanged(params: list[nn.Parameter]) -> Callable[[], object]:
    """Ours."""
    return optimizers.NpuFusedMuon(params, lr=LR).step


def gathered(params: list[nn.Parameter]) -> Callable[[], object]:
    """torch's, on whole parameters."""
    wholes = [nn.Parameter(_whole(p.detach()).clone()) for p in params]
    optimizer = torch.optim.Muon(wholes, lr=LR)
    rank, world = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def step() -> None:
        for p, q in zip(params, wholes, strict=True):
            assert p.grad is not None
            q.grad = _whole(p.grad)
        optimizer.step()
        for p, q in zip(params, wholes, strict=True):
            assert isinstance(p, DTensor)
            p.to_local().copy_(q.chunk(world)[rank])

    return step


def _whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


VARIANTS = {"gathered": gathered, "apex_npu": exchanged}


def sent(name: str, shapes: Shapes) -> int:
    """The bytes that a process sends in a step: bfloat16 there and back, or float32 to each other process."""
    world, numel = dist.get_world_size(), sum(rows * columns for rows, columns in shapes)
    return 4 * numel * (world - 1) // (world if name == "gathered" else world**2)


def steps(name: str, device: torch.device, rounds: int) -> Table:
    """The rows of one workload."""
    shapes = [shape for shape in WORKLOADS[name]() if len(shape) == 2]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    made = {variant: make(matrices(shapes, mesh, device)) for variant, make in VARIANTS.items()}
    times = steps_in_turns(made, SharedClock(device), rounds, float("inf"))
    workload = f"{name}, {dist.get_world_size()} processes"
    table = rows(device, torch.float32, workload, times, "gathered")
    for row in table:
        row["sent_mb"] = f"{sent(row['variant'], shapes) / 1e6:.2f}"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=["gpt 24 x 64", "gpt 6 x 384"])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = join(options.device)
    table = [row for name in options.workloads for row in steps(name, device, options.rounds)]
    if dist.get_rank() == 0:
        show(table)
        if not is_simulated(device):
            write("sharded_muon", device, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
