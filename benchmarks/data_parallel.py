# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""combine_ddp against DistributedDataParallel with GradScaler and torch's fused Adam: a step of two processes.

    torchrun --standalone --nproc-per-node 2 benchmarks/data_parallel.py [--rounds 20]

One thread for each process, gloo, wall clock, for what is measured waits on others. Variants take turns in the same
processes; ratios are taken within a turn. README.md explains the columns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rounds import in_turns, rows, show, write
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apex_npu import amp, optimizers

Step = Callable[[], None]
CPU = torch.device("cpu")


class Residual(nn.Module):
    """A block of a small residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x + self.layers(x))
        return result


def large() -> tuple[nn.Module, Tensor]:
    """Few large tensors: 12 convolutions of 256 channels, 7 million parameters, on images of 4 × 4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), *[Residual(256) for _ in range(6)], nn.Flatten())
    return nn.Sequential(model, nn.Linear(256 * 16, 10)), torch.randn(2, 3, 4, 4)


def small() -> tuple[nn.Module, Tensor]:
    """Many small tensors: 500 layers of width 24, 1,000 tensors."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(500)]
    return nn.Sequential(*layers), torch.randn(8, 24)


WORKLOADS = {"large": large, "small": small}


def combine_ddp(model: nn.Module, x: Tensor) -> Step:
    model, optimizer = amp.initialize(
        model,
        optimizers.NpuFusedAdam(model.parameters(), lr=1e-4),
        opt_level="O0",
        loss_scale="dynamic",
        combine_grad=True,
        combine_ddp=True,
        verbosity=0,
    )

    def step() -> None:
        with amp.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_ddp(model: nn.Module, x: Tensor) -> Step:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(parallel(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@contextmanager
def counted(calls: list[int]) -> Iterator[None]:
    """Note the bytes of every all-reduce that Python starts."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=4, help="steps per round and variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = []
    for workload, make in WORKLOADS.items():
        # amp last: its own forward stays with its own model.
        steps = {"torch": torch_ddp(*make()), "combine_ddp": combine_ddp(*make())}

        def time_one(variant: str) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.repeats):
                steps[variant]()  # noqa: B023
            return (time.perf_counter() - start) * 1e3 / options.repeats

        times = in_turns(list(steps), options.rounds, time_one)
        calls: list[int] = []
        with counted(calls):
            steps["combine_ddp"]()
        new = rows(CPU, torch.float32, f"{workload}, 2 processes", times, "torch")
        table += new
        if dist.get_rank() == 0:
            show(new)
            print(f"combine_ddp: {len(calls)} all-reduces a step, {sum(calls) / 2**20:.2f} MiB")
        amp.shutdown()
    if dist.get_rank() == 0:
        write("data_parallel", CPU, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
