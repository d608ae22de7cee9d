# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each tensor costs when an optimizer is set up, stepped, saved and extended, by the number of tensors and groups.

    PYTHONPATH=benchmarks python benchmarks/studies/growth.py [--write]
        [--tensors 10 100 1000 10000 100000] [--groups 1 64] [--numel 16]

Microseconds of CPU time for each tensor, one thread, the median of three. A phase that grows linearly has the same
number in each line. A step includes the block before it at O2; 10 % of new parameters are added.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch
from rounds import RESULTS, commit, open_device, processor, write_csv
from torch import nn
from whole_steps import Params

from apex_npu import amp, optimizers

PHASES = (
    "set up",
    "first step",
    "second step",
    "later step",
    "state_dict",
    "load_state_dict",
    "step after loading",
    "add_param_group",
    "step after adding",
)
Make = Callable[[list[nn.Parameter], int], torch.optim.Optimizer]


def _groups(params: list[nn.Parameter], groups: int) -> list[dict[str, object]]:
    return [{"params": params[i::groups], "lr": 1e-4 * (i + 1)} for i in range(groups)]


def _at_o2(params: list[nn.Parameter], groups: int) -> torch.optim.Optimizer:
    optimizer = optimizers.NpuFusedAdam(_groups(params, groups))
    _, optimizer = amp.initialize(Params(params), optimizer, opt_level="O2", loss_scale=1.0, verbosity=0)
    return optimizer


VARIANTS: dict[str, Make] = {
    "apex_npu": lambda params, groups: optimizers.NpuFusedAdam(_groups(params, groups)),
    "apex_npu O2": _at_o2,
    "torch fused": lambda params, groups: torch.optim.Adam(_groups(params, groups), fused=True),
}


def _params(count: int, numel: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for _ in range(count)]


def spent(make: Make, count: int, groups: int, numel: int) -> dict[str, float]:
    """The seconds of each phase."""
    found = {}

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        gc.collect()
        begin = time.thread_time()
        yield
        found[phase] = time.thread_time() - begin

    params, more = _params(count, numel), _params(max(1, count // 10), numel)
    with timed("set up"):
        optimizer = make(params, groups)
    given, loss, at_o2 = params, torch.ones((), requires_grad=True), make is _at_o2

    def step(phase: str) -> None:
        optimizer.zero_grad()
        grads = [torch.ones_like(p) for p in given]
        block = amp.scale_loss(loss, optimizer) if at_o2 else nullcontext()
        with timed(phase):
            with block:
                for p, grad in zip(given, grads, strict=True):
                    p.grad = grad
            optimizer.step()

    for phase in PHASES[1:4]:
        step(phase)
    with timed("state_dict"):
        state = optimizer.state_dict()
    with timed("load_state_dict"):
        optimizer.load_state_dict(state)
    step("step after loading")
    with timed("add_param_group"):
        optimizer.add_param_group({"params": more})
    given = [*params, *more]
    step("step after adding")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--numel", type=int, default=16, help="elements of each tensor")
    parser.add_argument("--write", action="store_true", help="write results/growth_cpu.csv")
    options = parser.parse_args()
    device = open_device("cpu")
    table = []
    for count in options.tensors:
        for groups in [groups for groups in options.groups if groups <= count]:
            for variant, make in VARIANTS.items():
                runs = [spent(make, count, groups, options.numel) for _ in range(3)]
                amp.shutdown()
                each = {phase: f"{median(run[phase] for run in runs) * 1e6 / count:.2f}" for phase in PHASES}
                print(f"{count:7} {groups:3} {variant:12}", *(f"{phase} {x}" for phase, x in each.items()), flush=True)
                same = {"commit": commit(), "device": "cpu", "processor": processor(device), "torch": torch.__version__}
                shape = {"tensors": str(count), "groups": str(groups), "numel": str(options.numel)}
                table.append({**same, **shape, "variant": variant, **each})
    if options.write:
        write_csv(RESULTS / "growth_cpu.csv", table)


if __name__ == "__main__":
    main()
