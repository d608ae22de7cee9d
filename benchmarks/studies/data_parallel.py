# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""combine_ddp against DistributedDataParallel with GradScaler and torch's fused Adam: a step of two processes.

    PYTHONPATH=benchmarks torchrun --standalone --nproc-per-node 2 benchmarks/studies/data_parallel.py [--rounds 20]

One thread for each process, gloo, wall clock, for what is measured waits on others. Variants take turns in the same
processes; ratios are taken within a turn. results/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rounds import in_turns
from shared import rows, show, write
from timeline import Timeline, record
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apex_npu import amp, optimizers

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


class Sum(nn.Module):
    """Parameters, and next to nothing computed with them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)
        self.listed = tuple(self.weights)  # looking them up takes longer than all else

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.listed) * x


def tensors() -> tuple[nn.Module, Tensor]:
    """Many small tensors and nearly no computation: 2,000 of 256 to 4,096 elements, 4.4 million in all."""
    torch.manual_seed(0)
    return Sum([256 + 1920 * (i % 3) for i in range(2000)]), torch.randn(1)


WORKLOADS = {"large": large, "small": small, "tensors": tensors}


@dataclass
class Engine:
    """One way to train.

    Attributes:
        step: A whole step.
        traffic: How many collectives a step has, their MiB, and which share of their time backward hides.
    """

    step: Callable[[], None]
    traffic: Callable[[], tuple[int, float, float]]


def model_alone(model: nn.Module, x: Tensor) -> Engine:
    """What no engine can save: forward and backward."""

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return Engine(step, lambda: (0, 0.0, 0.0))


class CombineDdp:
    """amp at O0, with a dynamic scale."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.x = x
        self.model, self.optimizer = amp.initialize(
            model,
            optimizers.NpuFusedAdam(model.parameters(), lr=1e-4),
            opt_level="O0",
            loss_scale="dynamic",
            combine_grad=True,
            combine_ddp=True,
            verbosity=0,
        )

    def step(self) -> None:
        with amp.scale_loss(self.model(self.x).square().mean(), self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self) -> Timeline:
        """A step, looked at."""
        (reducer,) = self.optimizer._amp_state.parallel.reducers
        block = amp.scale_loss(self.model(self.x).square().mean(), self.optimizer)
        scaled_loss = block.__enter__()
        timeline = record(reducer, scaled_loss.backward, lambda: block.__exit__(None, None, None))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return timeline

    def traffic(self) -> tuple[int, float, float]:
        steps = [self.recorded() for _ in range(9)]
        sent = steps[0].transfers
        hidden = statistics.median(step.hidden_share for step in steps)
        return len(sent), sum(t.nbytes for t in sent) / 2**20, hidden


def combine_ddp(model: nn.Module, x: Tensor) -> Engine:
    training = CombineDdp(model, x)
    return Engine(training.step, training.traffic)


def torch_ddp(model: nn.Module, x: Tensor) -> Engine:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(parallel(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def traffic() -> tuple[int, float, float]:
        """From DistributedDataParallel's own clocks."""
        seen = parallel._get_ddp_logging_data()
        sizes = [int(size) for size in (seen.get("rebuilt_bucket_sizes") or seen["bucket_sizes"]).split(", ")]
        shared = seen["avg_backward_compute_comm_overlap_time"] / max(1, seen["avg_backward_comm_time"])
        return len(sizes), sum(sizes) / 2**20, shared

    return Engine(step, traffic)


# amp last: its own forward stays with its own model.
ENGINES = {"model alone": model_alone, "torch": torch_ddp, "combine_ddp": combine_ddp}


def measure(workload: str, rounds: int, repeats: int) -> list[dict[str, str]]:
    """One row for each engine."""
    engines = {name: make(*WORKLOADS[workload]()) for name, make in ENGINES.items()}

    def time_one(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            engines[name].step()
        return (time.perf_counter() - start) * 1e3 / repeats

    times = in_turns(list(engines), rounds, time_one)
    table = rows(CPU, torch.float32, f"{workload}, 2 processes", times, "torch")
    for row, engine in zip(table, engines.values(), strict=True):
        count, mib, hidden = engine.traffic()
        row.update(all_reduces=str(count), mib_sent=f"{mib:.2f}", hidden_share=f"{hidden:.2f}")
    amp.shutdown()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=4, help="steps per round and variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = []
    for workload in WORKLOADS:
        new = measure(workload, options.rounds, options.repeats)
        table += new
        if dist.get_rank() == 0:
            show(new)
            for row in new:
                if row["all_reduces"] == "0":
                    continue
                print(
                    f"    {row['variant']}: {row['all_reduces']} all-reduces a step, {row['mib_sent']} MiB, "
                    f"{float(row['hidden_share']):.0%} of their time overlapped with backward"
                )
    if dist.get_rank() == 0:
        write("data_parallel", CPU, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
