# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step costs with the vendor's own torch_npu: operators launched, waits of the host and bytes, ours and others'.

    PYTHONPATH=benchmarks .venv-npu/bin/python benchmarks/studies/npu_counts.py [--write] [--only PATTERN] [--operators]

It needs the vendor's torch_npu, which ``make setup-torch-npu`` installs on x86-64 Linux, and no NPU: the package
``host_cann`` of tests/host_cann does in host memory what torch_npu asks of CANN. README.md says what is counted.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # what torch_npu links to is there when host_cann has loaded it

import report
import torch
from rounds import RESULTS, commit, write_csv
from torch import Tensor, nn
from workloads import Shapes, resnet50

from apex_npu import amp, optimizers

HOST_CANN = Path(__file__).parents[2] / "tests" / "host_cann"

# Rule: the end of the class's name, ours and the vendor's; torch.optim's; what it is made with.
RULES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "SGD": ("SGD", "SGD", {"lr": 0.1, "momentum": 0.9}),
    "Adam": ("Adam", "Adam", {"lr": 1e-3}),
    "AdamW": ("AdamW", "AdamW", {"lr": 1e-3, "weight_decay": 0.01}),
    "LAMB": ("Lamb", None, {"lr": 1e-3}),
    "RMSprop": ("RMSprop", "RMSprop", {"lr": 1e-3}),
}
KINDS = ("foreach", "fused")
COMPARISONS = ("step", "O1 iteration", "O2 iteration")
VARIANTS = ("apex_npu", "torch_npu NpuFused", *(f"torch {kind}" for kind in KINDS))
SCALE = 4.0


def small50() -> Shapes:
    """50 small tensors."""
    return [(3, 5), (7,), (4, 4), (64,), (16, 16)] * 10


def small2000() -> Shapes:
    """2,000 small tensors: of 16 to 512 elements."""
    chosen = random.Random(0)
    return [(chosen.randint(16, 512),) for _ in range(2000)]


def thin_resnet50() -> Shapes:
    """The parameters of a ResNet-50 of a quarter of the width: 161 tensors, 1.7 million elements."""
    return [tuple(n // 4 if n >= 64 else n for n in shape) for shape in resnet50()]


LISTS: dict[str, Callable[[], Shapes]] = {f.__name__: f for f in (small50, small2000, thin_resnet50)}


def open_device() -> None:
    """Have torch know the device "npu", on the vendor's torch_npu.

    Raises:
        SystemExit: It is not here; the message says how to get there.
    """
    sys.path.append(str(HOST_CANN))
    try:
        import host_cann

        host_cann.install()
        import torch_npu  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"{error}. What is counted is the vendor's torch_npu, whose wheel is for x86-64 Linux among others: "
            "`make setup-torch-npu` there, then the command of this file's docstring. What the stand-in "
            "counts is measured by python benchmarks/suite.py --device npu"
        )


class Trained:
    """Parameters and a backward that launches nothing: it hands over gradients that are there."""

    def __init__(self, shapes: Shapes) -> None:
        noise = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        self.model.params = nn.ParameterList(torch.randn(shape, generator=noise) for shape in shapes)
        self.model.npu()
        self.grads: list[Tensor] = []
        self._loss = torch.ones(())

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def prepare(self) -> None:
        """Make what the next backward hands over."""
        self.grads = [torch.full_like(p, 1e-2, requires_grad=False) for p in self.params]
        self._loss = torch.ones((), device="npu")

    def loss(self) -> Tensor:
        loss: Tensor = _Backward.apply(self, self._loss, *self.params)
        return loss


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained: Trained, loss: Tensor, *params: Tensor) -> Tensor:
        ctx.trained = trained
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, ctx.trained.grads = ctx.trained.grads, []
        return None, None, *grads


class Variant(NamedTuple):
    """One whose steps are counted.

    Attributes:
        trained: What it trains.
        backward: Comes before ``step``.
        step: The rest of an iteration.
        whole: ``backward`` is counted, too.
    """

    trained: Trained
    backward: Callable[[], None]
    step: Callable[[], None]
    whole: bool


def _plain(trained: Trained, optimizer: Any) -> Variant:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Variant(trained, lambda: trained.loss().backward(), step, whole=False)


def _with_scaler(trained: Trained, optimizer: Any, scaler: Any) -> Variant:
    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Variant(trained, lambda: scaler.scale(trained.loss()).backward(), step, whole=True)


def _with_amp(trained: Trained, optimizer: Any, level: str, **options: Any) -> Variant:
    amp.shutdown()  # of another variant
    options = {"loss_scale": "dynamic", "dynamic_init_scale": SCALE, "verbosity": 0, **options}
    amp.initialize(trained.model, optimizer, opt_level=level, **options)

    def backward() -> None:
        with amp.scale_loss(trained.loss(), optimizer) as scaled_loss:
            scaled_loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Variant(trained, backward, step, whole=True)


def variant_names(rule: str) -> Sequence[str]:
    """Those of ``VARIANTS`` that the rule has."""
    torchs = [f"torch {kind}" for kind in KINDS if RULES[rule][1] and (rule, kind) != ("RMSprop", "fused")]
    return [*VARIANTS[:2], *torchs]


def make(rule: str, shapes: Shapes, comparison: str, name: str, **options: Any) -> Variant:
    """A variant; ``options`` are those of ``amp.initialize``, for ours."""
    import torch_npu

    ours, torchs, settings = RULES[rule]
    trained = Trained(shapes)
    if name == "apex_npu":
        optimizer = getattr(optimizers, f"NpuFused{ours}")(trained.params, **settings)
        if comparison == "step":
            return _plain(trained, optimizer)
        return _with_amp(trained, optimizer, comparison.partition(" ")[0], **options)
    if name == "torch_npu NpuFused":
        optimizer = getattr(torch_npu.optim, f"NpuFused{ours}")(trained.params, **settings)
        scaler: Any = torch_npu.npu.amp.GradScaler(init_scale=SCALE)
    else:
        kind = {name.removeprefix("torch "): True}
        optimizer = getattr(torch.optim, torchs or "")(trained.params, **settings, **kind)
        scaler = torch.amp.GradScaler("npu", init_scale=SCALE)
    return _plain(trained, optimizer) if comparison == "step" else _with_scaler(trained, optimizer, scaler)


def count(variant: Variant) -> Any:
    """What ``host_cann`` counts of an iteration, or of its step.

    It is the fifth: two set up, and the first four look for what a script has written, as few later ones do.
    """
    import host_cann

    def iteration() -> None:
        variant.backward()
        variant.step()

    for _ in range(5):
        variant.trained.prepare()
        if not variant.whole:
            variant.backward()
        with host_cann.count() as counted:
            (iteration if variant.whole else variant.step)()
    return counted


def rows(only: str) -> Iterator[tuple[dict[str, str], Any]]:
    """What is stored of each variant, and all that was counted."""
    import torch_npu

    same = {"commit": commit(), "device": f"npu, torch_npu {torch_npu.__version__}", "torch": torch.__version__}
    for rule in RULES:
        for workload, shapes in LISTS.items():
            for comparison in COMPARISONS:
                for name in variant_names(rule):
                    if not fnmatchcase(f"{rule}, {workload}, {comparison}, {name}", only):
                        continue
                    n = count(make(rule, shapes(), comparison, name))
                    counts = {"launches": str(n.launches), "bytes": str(n.bytes), "syncs": str(n.syncs)}
                    row = {"rule": rule, "workload": workload, "comparison": comparison, "variant": name}
                    yield {**same, **row, **counts}, n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="results/npu_counts.csv, and the table of README.md")
    parser.add_argument("--only", default="*", help="a pattern, as 'SGD, small50, step, apex_npu'; nothing is written")
    parser.add_argument("--operators", action="store_true", help="print which, too")
    asked = parser.parse_args()
    open_device()
    table = []
    for row, counted in rows(asked.only):
        table.append(row)
        columns = (f"{row['rule']:8}", f"{row['workload']:14}", f"{row['comparison']:13}", f"{row['variant']:19}")
        print(*columns, f"{counted.launches:>7,} {counted.syncs:>6,} {counted.bytes / 1e6:>7,.2f} MB", flush=True)
        if asked.operators:
            print("   ", dict(counted.by_op), dict(counted.copies), dict(counted.waits))
    if asked.write and asked.only == "*":
        write_csv(RESULTS / "npu_counts.csv", table)
        report.write()


if __name__ == "__main__":
    main()
