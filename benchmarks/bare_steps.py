# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``optimizer.step()`` alone, on gradients that are there: each rule as it is here and as others have it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from ceiling import ceiling, compiler
from torch import nn
from workloads import Bench, Shapes, numel

from apex_npu import optimizers

Step = Callable[[], object]
# Of more tensors the compilation of a step takes longer than a minute.
MOST_COMPILED = 200
Make = Callable[[Bench], Step]


@dataclass(frozen=True)
class Rule:
    """One rule, and who else has it.

    Attributes:
        ours: The fused class.
        kernel: Of the ceiling: what it reads and writes.
        options: Hyper-parameters of ours and, where their names agree, of all others.
        torch: The name in torch.optim.
        torch_fused: torch has a fused kernel for it.
        others: Package → module, name there, and options of its own.
    """

    ours: type[torch.optim.Optimizer]
    kernel: str
    options: dict[str, Any] = field(default_factory=dict)
    torch: str | None = None
    torch_fused: bool = False
    others: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)


RULES: dict[str, Rule] = {
    "SGD": Rule(optimizers.NpuFusedSGD, "one_pass_2", {"lr": 1e-3, "momentum": 0.9}, "SGD", True),
    "Adam": Rule(
        optimizers.NpuFusedAdam,
        "one_pass_3",
        torch="Adam",
        torch_fused=True,
        others={
            "DeepSpeed": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
            "bitsandbytes": ("bitsandbytes.optim", "Adam32bit", {}),
        },
    ),
    "AdamW": Rule(optimizers.NpuFusedAdamW, "one_pass_3", torch="AdamW", torch_fused=True),
    "RMSprop": Rule(optimizers.NpuFusedRMSprop, "one_pass_2", torch="RMSprop"),
    "RMSpropTF": Rule(
        optimizers.NpuFusedRMSpropTF, "one_pass_2", others={"timm": ("timm.optim.rmsprop_tf", "RMSpropTF", {})}
    ),
    "Adadelta": Rule(optimizers.NpuFusedAdadelta, "one_pass_3", torch="Adadelta"),
    "BertAdam": Rule(optimizers.NpuFusedBertAdam, "one_pass_3", {"lr": 1e-3}),
    "LAMB": Rule(
        optimizers.NpuFusedLamb,
        "two_passes",
        # Without decay timm leaves the norms out; the norm of all gradients is a pass that the rule does not ask for.
        {"weight_decay": 0.01},
        others={
            "timm": ("timm.optim.lamb", "Lamb", {"max_grad_norm": None}),
            "pytorch_optimizer": ("pytorch_optimizer", "Lamb", {"max_grad_norm": 0.0}),
        },
    ),
    "AdamP": Rule(
        optimizers.NpuFusedAdamP,
        "two_passes",
        others={
            "timm": ("timm.optim.adamp", "AdamP", {}),
            "pytorch_optimizer": ("pytorch_optimizer", "AdamP", {}),
        },
    ),
}


@cache
def imported(module: str, name: str) -> Any:
    """An optimizer of another package, or None where it is not installed, or cannot be built here, said once."""
    package = module.partition(".")[0]
    if package == "timm" and package not in sys.modules:
        # Without its package's __init__, which needs torchvision.
        found = importlib.util.find_spec(package)
        for root in (found and found.submodule_search_locations) or ():
            for part, path in (("timm", root), ("timm.optim", f"{root}/optim")):
                spec = importlib.machinery.ModuleSpec(part, None, is_package=True)
                spec.submodule_search_locations = [path]
                sys.modules[part] = importlib.util.module_from_spec(spec)
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a package raises that finds no compiler, no CUDA, or another torch
        print(f"left out: {module}.{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        return None


def compiles(device: torch.device) -> bool:
    """Whether torch.compile has what it needs."""
    return device.type == "cuda" or (device.type == "cpu" and compiler() is not None)


def stepping(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], bench: Bench, shapes: Shapes | None = None
) -> Step:
    """``step`` of an optimizer over new parameters that have gradients for good."""
    params = bench.params(shapes)
    bench.gradients(params, fixed=True)
    return make(params).step


def muon(bench: Bench) -> dict[str, Callable[[], Step]]:
    """Of Muon, on the matrices of the workload; see ``variants``."""
    bench = Bench(bench.device, [shape for shape in bench.shapes if len(shape) == 2])
    found: dict[str, Callable[[], Step]] = {
        "apex_npu": lambda: stepping(optimizers.NpuFusedMuon, bench),
        "torch": lambda: stepping(torch.optim.Muon, bench),
    }
    if compiles(bench.device):
        found["torch compiled"] = lambda: torch.compile(stepping(torch.optim.Muon, bench))
    return found


def variants(name: str, bench: Bench) -> dict[str, Callable[[], Step]]:
    """Everyone who has the rule ``name``; each makes its own parameters when it is called."""
    rule, device = RULES[name], bench.device.type

    def of(
        make: Callable[..., torch.optim.Optimizer], shapes: Shapes | None = None, **options: Any
    ) -> Callable[[], Step]:
        return lambda: stepping(partial(make, **{**rule.options, **options}), bench, shapes)

    found: dict[str, Callable[[], Step]] = {
        "apex_npu": of(rule.ours),
        "apex_npu, one tensor": of(rule.ours, [(numel(bench.shapes),)]),
    }
    if rule.torch is not None:
        theirs = getattr(torch.optim, rule.torch)
        found["torch for-loop"] = of(theirs, foreach=False)
        found["torch foreach"] = of(theirs, foreach=True)
        if rule.torch_fused and device != "npu":
            found["torch fused"] = of(theirs, fused=True)
        if rule.torch_fused and compiles(bench.device):
            flat = [(numel(bench.shapes),)]
            found["torch compiled, one tensor"] = lambda: torch.compile(of(theirs, flat, foreach=True)())
            if len(bench.shapes) <= MOST_COMPILED:
                found["torch compiled"] = lambda: torch.compile(of(theirs, foreach=True)())
    for package, (module, attribute, options) in rule.others.items():
        if package == "DeepSpeed" and device != "cpu":
            continue
        other = imported(module, attribute)
        if other is not None:
            found[package] = of(other, **options)

    if compiles(bench.device):
        found["ceiling"] = lambda: ceiling(bench, rule.kernel)
    return found
