# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether a change of the package changes a result: what training arrives at, bit for bit, for many configurations.

    PYTHONPATH=tests python -m golden --write FILE
    PYTHONPATH=tests python -m golden --compare FILE
    PYTHONPATH=tests python -m golden --overhead

A command, not a test: FILE is written by the code before a change, and compared with the code after it, on one machine.
It has a hash of parameters, masters, optimizer state and loss scale for every rule, level, number of param groups and
way of training, and the parameters themselves, so that a difference is reported in units in the last place.
``--overhead`` counts the Python calls of a block's end and a step over many tensors. APEX_NPU_TEST_DEVICE chooses the
device.

The gradients of the model depend neither on threads nor on where tensors are in memory: each sum in its products has
one term that is not zero.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from devices import DEVICE
from optimizer_specs import SPECS
from torch import Tensor, nn
from torch.nn import functional as F

import apex_npu
from apex_npu import amp
from apex_npu.fusion import EncodedView

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WAYS = ("plain", "accumulated", "overflows", "clipped", "resumed", "fused unscale")
STEPS = 30
# torch's own optimizers, whose gradients alone are in buffers.
TORCH = {
    "torch SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "torch Adam": (torch.optim.Adam, {"lr": 1e-2, "eps": 1e-4}),
}


def rules() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Name → class, hyper-parameters."""
    return {str(spec): (spec.cls, {"lr": 1e-2, **spec.variants[-1]}) for spec in SPECS} | TORCH


class Model(nn.Module):
    """Parameters of many shapes: of one that is not always used, of one that is frozen at first, of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(8, 12, bias=False)  # a bias before a batch norm has no gradient but rounding
        self.norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.empty(()))
        self.second = nn.Linear(12, 5, bias=False)
        self.branch = nn.Parameter(torch.empty(3, 7))
        self.late = nn.Parameter(torch.empty(70), requires_grad=False)
        self.turned = nn.Parameter(torch.empty(6, 4).t())
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, step: int) -> Tensor:
        """The loss of one batch."""
        generator = torch.Generator().manual_seed(step)
        x = torch.zeros(8, 8)
        x[torch.arange(8), torch.randperm(8, generator=generator)] = torch.randn(8, generator=generator)
        h = self.norm(self.first(x.to(DEVICE, self.first.weight.dtype))).float()
        w = self.second.weight.float()
        target = torch.randn(5, 12, generator=generator).to(DEVICE)
        loss = (F.softsign(h) * self.scale.float()).square().mean() + (w * target).sigmoid().mean()
        loss = loss + (self.turned.float() * torch.randn(4, 6, generator=generator).to(DEVICE)).cos().mean()
        if step % 5 != 3 and step >= 4:
            loss = loss + (self.branch.float() - 1).square().mean()
        if step >= 10:
            loss = loss + (self.late.float() * 2).sin().mean()
        return loss


def grouped(model: nn.Module, count: int, lr: float) -> list[dict[str, Any]]:
    """The parameters in so many groups, each with its own learning rate, in turns."""
    params = list(model.parameters())
    return [{"params": params[i::count], "lr": lr * (1 + i)} for i in range(count)]


def train(cls: Callable[..., Any], options: dict[str, Any], level: str, groups: int, way: str) -> list[Tensor]:
    """All that training arrives at; first the parameters of the optimizer."""
    model, optimizer = made(cls, options, level, groups, way)
    found: list[Tensor] = []
    for step in range(STEPS):
        if step == 8:
            model.late.requires_grad_(True)
        if way == "resumed" and step == STEPS // 2:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
            amp.shutdown()
            model, optimizer = made(cls, options, level, groups, way)
            model.late.requires_grad_(True)
            for target, state in zip((model, optimizer, amp), saved, strict=True):
                target.load_state_dict(state)
        for part in range(2 if way == "accumulated" else 1):
            loss = model(step + 100 * part)
            if way == "overflows" and step % 7 == 2:
                loss = loss * torch.tensor(float("inf"))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        if way == "clipped":
            clip = getattr(optimizer, "clip_optimizer_grad_norm_fused", None)
            found.append(clip(0.1) if clip else nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 1)
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    values = [value for entry in state for _, value in sorted(entry.items()) if value is not None]
    found += [value.dequantize() if isinstance(value, EncodedView) else torch.as_tensor(value) for value in values]
    found += [p.detach() for p in model.parameters()] + list(model.buffers())
    return [*params, *found, torch.tensor([scaler["loss_scale"] for scaler in amp.state_dict().values()])]


def made(
    cls: Callable[..., Any], options: dict[str, Any], level: str, groups: int, way: str
) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer under amp."""
    model = Model().to(DEVICE)
    optimizer = cls(grouped(model, groups, options["lr"]), **options)
    settings = {} if way == "plain" else {"loss_scale": "dynamic", "dynamic_init_scale": 1024.0}
    return amp.initialize(
        model,
        optimizer,
        opt_level=level,
        verbosity=0,
        combine_grad=level != "O3",
        fuse_unscale=way == "fused unscale",
        **settings,
    )


def cases(*, quick: bool) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Name → what trains."""
    for name, (cls, options) in rules().items():
        for level in LEVELS if not quick else ("O0", "O2", "O5"):
            for groups in (1, 3):
                for way in WAYS if not quick else ("overflows", "clipped"):

                    def run(args: Any = (cls, options, level, groups, way)) -> list[Tensor]:
                        return train(*args)

                    yield f"{name}, {level}, {groups} group(s), {way}", run


def results(*, quick: bool) -> dict[str, tuple[str, list[Tensor]]]:
    """Name → hash, tensors; for a case that is refused, the error."""
    found = {}
    for name, run in cases(quick=quick):
        try:
            tensors = [t.cpu() for t in run()]
            found[name] = (hash_of(tensors), [t.clone() for t in tensors if t.is_floating_point()])
        except (RuntimeError, ValueError, TypeError) as error:
            found[name] = (f"{type(error).__name__}: {error}", [])
        finally:
            amp.shutdown()
    return found


def hash_of(tensors: list[Tensor]) -> str:
    """Of dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{t.dtype} {tuple(t.shape)} ".encode())
        digest.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def difference(before: list[Tensor], after: list[Tensor]) -> str:
    """The largest difference, in units in the last place of the largest element of its tensor."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return "other tensors"
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        unit = torch.finfo(a.dtype).eps * a.abs().max().double().item()
        apart = (a.double() - b.double()).abs().max().item()
        worst = max(worst, apart / unit if unit else apart)
    return f"{worst:.2g} ulp of the largest element"


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs, and how many do."""
    apart = [name for name in after if name not in before or before[name][0] != after[name][0]]
    for name in apart:
        known = before.get(name)
        errors = known is None or not known[1] or not after[name][1]
        text = f"{known and known[0]} → {after[name][0]}" if errors else difference(known[1], after[name][1])
        print(f"{name}: {text}")
    print(
        f"{len(after) - len(apart)} of {len(after)} equal, {sum(not tensors for _, tensors in after.values())} refused"
    )
    return len(apart)


def overhead(groups: int, numel: int, tensors: int = 240) -> tuple[int, float]:
    """Python calls in the end of a block and a step at O2, and their CPU time in ms."""
    params = [nn.Parameter(torch.full((numel,), 1.0, device=DEVICE)) for _ in range(tensors)]
    model = nn.Module()
    model.weights = nn.ParameterList(params)
    model.forward = lambda: sum(p.float().sum() for p in model.weights)
    size = tensors // groups
    lists = [{"params": params[i * size : (i + 1) * size], "lr": 1e-3 / (i + 1)} for i in range(groups)]
    optimizer = apex_npu.optimizers.NpuFusedAdam(lists)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    grads = [torch.full_like(p, 1e-3) for p in model.weights]
    loss = torch.ones((), device=DEVICE, requires_grad=True)
    calls: list[int] = []
    times: list[float] = []

    def iterate(*, counts: bool) -> None:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        block = amp.scale_loss(loss, optimizer)
        block.__enter__()
        for p, g in zip(model.weights, grads, strict=True):
            p.grad = g.clone()
        sys.setprofile(note if counts else None)
        begin = time.thread_time()
        block.__exit__(None, None, None)
        optimizer.step()
        times.append(time.thread_time() - begin)
        sys.setprofile(None)
        calls.append(count)
        optimizer.zero_grad()

    for _ in range(5):
        iterate(counts=False)
    iterate(counts=True)
    times.clear()
    for _ in range(200):
        iterate(counts=False)
    amp.shutdown()
    return calls[5], statistics.median(times) * 1e3


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write what this code gives")
    action.add_argument("--compare", type=Path, metavar="FILE", help="compare it with what another has written")
    action.add_argument("--overhead", action="store_true", help="count calls, and measure their time")
    parser.add_argument("--quick", action="store_true", help="half of the levels, and a third of the ways")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of overflows
    if args.overhead:
        for numel in (16, 1024):
            rounds = [[overhead(groups, numel) for groups in (1, 8, 32)] for _ in range(3)]
            for groups, found in zip((1, 8, 32), zip(*rounds, strict=True), strict=True):
                best = min(ms for _, ms in found)
                print(f"{numel:5} elements, {groups:3} group(s): {found[0][0]:5} calls, {best:.3f} ms")
        return 0
    found = results(quick=args.quick)
    if args.write:
        torch.save(found, args.write)
        print(f"{len(found)} written, {sum(not tensors for _, tensors in found.values())} refused")
        return 0
    return 1 if compare(torch.load(args.compare), found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
