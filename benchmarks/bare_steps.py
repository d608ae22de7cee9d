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
from apex_npu.doctor import bench as doctor

Step = Callable[[], object]
# Of more tensors the compilation of a step takes longer than a minute.
MOST_COMPILED = 200
Make = Callable[[Bench], Step]


@dataclass(frozen=True)
class Rule(doctor.Rule):
    """One rule, and who else has it; ``options`` are also those of all others, where their names agree.

    Attributes:
        kernel: Of the ceiling: what it reads and writes.
        others: Package → module, name there, and options of its own.
    """

    kernel: str = ""
    others: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)


def _rule_of_torch(name: str, kernel: str, **others: tuple[str, str, dict[str, Any]]) -> Rule:
    """A rule that torch has as well."""
    return Rule(**vars(doctor.RULES[name]), kernel=kernel, others=others)


RULES: dict[str, Rule] = {
    "SGD": _rule_of_torch("SGD", "one_pass_2"),
    "Adam": _rule_of_torch(
        "Adam",
        "one_pass_3",
        DeepSpeed=("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
        bitsandbytes=("bitsandbytes.optim", "Adam32bit", {}),
    ),
    "AdamW": _rule_of_torch("AdamW", "one_pass_3"),
    "RMSprop": _rule_of_torch("RMSprop", "one_pass_2"),
    "RMSpropTF": Rule(
        optimizers.NpuFusedRMSpropTF, kernel="one_pass_2", others={"timm": ("timm.optim.rmsprop_tf", "RMSpropTF", {})}
    ),
    "Adadelta": _rule_of_torch("Adadelta", "one_pass_3"),
    "BertAdam": Rule(optimizers.NpuFusedBertAdam, options={"lr": 1e-3}, kernel="one_pass_3"),
    "LAMB": Rule(
        optimizers.NpuFusedLamb,
        # Without decay timm leaves the norms out; the norm of all gradients is a pass that the rule does not ask for.
        options={"weight_decay": 0.01},
        kernel="two_passes",
        others={
            "timm": ("timm.optim.lamb", "Lamb", {"max_grad_norm": None}),
            "pytorch_optimizer": ("pytorch_optimizer", "Lamb", {"max_grad_norm": 0.0}),
        },
    ),
    "AdamP": Rule(
        optimizers.NpuFusedAdamP,
        kernel="two_passes",
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
    for variant, make in rule.variants().items():
        if variant != doctor.OURS and not (variant == "torch fused" and device == "npu"):
            found[variant] = partial(stepping, make, bench)
    if rule.theirs is not None and rule.fused and compiles(bench.device):
        flat, theirs = [(numel(bench.shapes),)], rule.theirs
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
