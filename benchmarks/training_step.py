# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A training step without its model: gradients handed over by autograd, unscaled, checked, clipped, stepped, cleared.

    python benchmarks/training_step.py [--device cpu|npu|cuda] [--rounds 30]

All variants run in one process, in turns; ratios are taken within a turn. README.md explains the columns. On the
simulated NPU launches are counted, too.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from rounds import in_turns, open_device, rows, show, time_calls, write
from torch import Tensor, nn

from apex_npu import amp, optimizers

Shapes = list[tuple[int, ...]]


def small2000() -> Shapes:
    """Many small tensors: 2,000 of 256 to 4,096 elements."""
    chosen = random.Random(0)
    return [(chosen.randint(256, 4096),) for _ in range(2000)]


def resnet50() -> Shapes:
    """The parameters of a ResNet-50: 161 tensors, 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions: Shapes = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, inputs, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


WORKLOADS = {"small2000": small2000, "resnet50": resnet50}


class Backward(torch.autograd.Function):
    """Gives every parameter a new gradient, as a model's backward does."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.ones((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *[g.clone() for g in ctx.grads]


class Params(nn.Module):
    """Parameters and the gradients that backward gives them."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        self.params = nn.ParameterList([nn.Parameter(v * 0.02) for v in values])
        self.grads = [v * 1e-3 for v in values]

    def forward(self) -> Tensor:
        params = list(self.params)
        if params[0].dtype != self.grads[0].dtype:
            self.grads = [g.to(p.dtype) for g, p in zip(self.grads, params, strict=True)]
        loss: Tensor = Backward.apply(self.grads, *params)
        return loss


def torch_step(model: Params, clip: bool) -> Callable[[], None]:
    """GradScaler, clip_grad_norm_ and torch's fused Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=model.params[0].device.type != "npu")
    scaler = torch.amp.GradScaler(model.params[0].device.type, init_scale=256.0)

    def step() -> None:
        scaler.scale(model()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def our_step(
    model: Params, level: str, clip: bool, *, resident: bool = False, fuse: bool = False
) -> Callable[[], None]:
    """scale_loss, clip_optimizer_grad_norm_fused and NpuFusedAdam."""
    model, optimizer = amp.initialize(
        model,
        optimizers.NpuFusedAdam(model.parameters(), lr=1e-4),
        opt_level=level,
        loss_scale="dynamic",
        dynamic_init_scale=256.0,
        fuse_unscale=fuse,
        verbosity=0,
    )

    def step() -> None:
        with amp.scale_loss(model(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip:
            optimizer.clip_optimizer_grad_norm_fused(1.0)
        optimizer.step()
        # Resident gradients stay, as zeros, for the next backward to add to.
        optimizer.zero_grad(set_to_none=not resident)

    return step


def foreach_masters_step(model: Params, clip: bool) -> Callable[[], None]:
    """O2 by hand: half parameters, float32 masters, torch's foreach copies and fused Adam."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    model.half()
    optimizer = torch.optim.Adam(masters, lr=1e-4, fused=masters[0].device.type != "npu")
    scaler = torch.amp.GradScaler(masters[0].device.type, init_scale=256.0)

    def step() -> None:
        scaler.scale(model()).backward()
        for master in masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in model.parameters()])
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        model.zero_grad()

    return step


VARIANTS: dict[str, dict[str, Callable[[Params, bool], Callable[[], None]]]] = {
    "fp32": {
        "torch": torch_step,
        "O0, gathered": lambda model, clip: our_step(model, "O0", clip),
        "O0, accumulated": lambda model, clip: our_step(model, "O0", clip, resident=True),
        "O0, fuse_unscale": lambda model, clip: our_step(model, "O0", clip, fuse=True),
    },
    "fp16": {
        "torch": foreach_masters_step,
        "O2, gathered": lambda model, clip: our_step(model, "O2", clip),
        "O2, fuse_unscale": lambda model, clip: our_step(model, "O2", clip, fuse=True),
    },
}


def count_launches(step: Callable[[], None]) -> int:
    import npu_simulator

    step()
    with npu_simulator.count() as counted:
        step()
    launches: int = counted.launches
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    device = open_device(options.device)
    table = []
    for name in options.workloads:
        shapes = WORKLOADS[name]()
        for precision, variants in VARIANTS.items():
            steps = {}
            launches = {}
            for variant, make in variants.items():
                steps[variant] = make(Params(shapes, device), not options.no_clip)
                launches[variant] = count_launches(steps[variant]) if device.type == "npu" else None
            dtype = torch.float32 if precision == "fp32" else torch.float16
            times = in_turns(list(steps), options.rounds, lambda variant: time_calls(steps[variant], device, 2))  # noqa: B023
            new = rows(device, dtype, f"{name}, {precision}", times, "torch")
            show(new)
            if device.type == "npu":
                for row in new:
                    row["launches"] = str(launches[row["variant"]])
                    print(f"{row['workload']:24} {row['variant']:34} {row['launches']:>9} launches")
            table += new
    write("training_step", device, table)


if __name__ == "__main__":
    main()
