# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compiles Triton's kernels for GPUs without having one, and prints the result of each launch as a line of JSON.

A process of its own: one that interprets kernels cannot compile them. Triton's compiler and ptxas need no GPU, only the
driver does, so a stand-in tells for which one to compile, and takes what is launched.

    python triton_compile_worker.py ARCH [ARCH ...] [--all]     80 is an A100, 90 an H100 or H200
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[1]))
from triton_cases import (
    ALIGNED_SEGMENTS,
    CHANGES,
    DTYPES,
    NUMEL,
    OPTIONS,
    SEGMENTED_CHANGES,
    on_device,
    operands,
    segments,
)

from apex_npu import ops
from apex_npu._extension import extension
from apex_npu.ops.grad_lists import ListedSlots
from apex_npu.ops.state_codec import Segment
from apex_npu.ops.triton_kernels import launches, plans
from apex_npu.ops.triton_kernels.launches import Plan

CPU = torch.device("cpu")


class NoGpu:
    """The driver interface that Triton uses; launches are only recorded. Each binary is a function of its own."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: list[tuple[Any, ...]] = []
        self.stream = 0
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, *_: (0, (name, binary), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 64 * 1024},  # what the smallest of them has
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # so that nothing compiled for one is found for another

    def get_current_stream(self, _: int) -> int:
        return self.stream

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *args: self.launched.append(args)


def same(ours: Any, own: Any) -> bool:
    """Whether two things that a launcher was given are the same: tensors by identity, records for hooks by contents."""
    if hasattr(ours, "get"):
        ours, own = ours.get(), own.get()
    return ours is own or bool(ours == own)


def all_plans(everything: bool) -> Iterator[tuple[str, Plan]]:
    """Each op, aligned and not; for ``everything`` in each dtype, and with each of its options."""
    for dtypes in DTYPES if everything else DTYPES[:1]:
        for op, change, without in CHANGES:
            if change and not everything:
                continue
            yield op, getattr(plans, op)(*operands(op, 1504, *dtypes, without), **{**OPTIONS[op], **change})
        a, b = operands("sgd_", NUMEL, *dtypes)[:2]
        yield "norm", plans.norm(a)
        yield "norm_to_clip", plans.norm_to_clip(a, 1.0)
        if a.dtype != torch.float64:
            yield "norm checked", plans.norm(a, torch.zeros(1))
        for aligned in (True, False):
            for op, change in SEGMENTED_CHANGES:
                if change and not everything:
                    continue
                args = [*operands(op, NUMEL, *dtypes), *segments(dtypes[0], aligned)]
                yield op, getattr(plans, op)(*args, **{**OPTIONS[op], **change})
            starts, lengths = segments(aligned=aligned)[1:3]
            yield "segment_dot", plans.segment_dot(a, a, starts, lengths, None)
            yield "segment_add_", plans.segment_add_(a, b, a[:4], starts, lengths, None)
    for op in ("sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_"):
        args = operands(op, 1000, torch.float32, torch.bfloat16)
        scale = torch.ones(1)
        yield op, getattr(plans, op)(*args, **OPTIONS[op], grad_scale=scale)
        yield op, getattr(plans, op)(*(a[1:] for a in args), **OPTIONS[op], grad_scale=scale.double())
    for op in OPTIONS:
        of_segments = op == "lamb_"
        args = operands(op, NUMEL if of_segments else 1504)
        more = segments(aligned=True) if of_segments else ()
        yield f"{op} on device", getattr(plans, op)(*args, *more, **on_device(OPTIONS[op], torch.zeros(1)))


def encoded_plans(everything: bool) -> Iterator[tuple[str, Plan]]:
    """Rules with operands in fewer bytes: states of bfloat16, of 8 bits, and remainders beside float32 states.

    Their steps are counted by the host, and on the device as in a graph.
    """
    for op in OPTIONS if everything else ("adam_", "lamb_"):
        more = segments(aligned=True) if op == "lamb_" else ()
        for name, dtypes, kept in (
            ("bfloat16", [torch.bfloat16], None),
            ("int8", [torch.int8, torch.uint8], None),
            ("remainder", [], torch.int16),
            ("int8 remainder", [], torch.int8),
        ):
            param, grad, *states = operands(op, NUMEL, torch.bfloat16)
            if dtypes:
                states = [state.to(dtypes[i % len(dtypes)]) for i, state in enumerate(states)]
            names = getattr(ops, op).states
            scales = {n: torch.zeros(400) for n, s in zip(names, states, strict=False) if s.dtype.itemsize == 1}
            places = ops.Places([Segment(begin, n, i, 100 * i) for i, (begin, n) in enumerate(ALIGNED_SEGMENTS)])
            for counts in ("", " on device") if everything or op == "adam_" else ("",):
                remainder = None if kept is None else torch.zeros(NUMEL, dtype=kept)
                count = torch.ones(1) if counts else 3
                encoding = ops.RunEncoding(places, scales, count, remainder, everything and bool(dtypes))
                options = on_device(OPTIONS[op], torch.zeros(1)) if counts else OPTIONS[op]
                plan = getattr(plans, op)(param, grad, *states, *more, **options, encoding=encoding)
                yield f"{op} {name}{counts}", plan


def gather_plans(everything: bool) -> Iterator[tuple[str, Plan]]:
    """Gradients on their way into slots: scaled and checked, and as they are, which keeps their bits."""
    chunks, addresses = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for dtype, source in DTYPES if everything else [(torch.float32, torch.float32), (torch.float32, torch.float16)]:
        flat = torch.zeros(NUMEL, dtype=dtype)
        for name, inv_scale, found_inf in (("scaled", 0.5, torch.zeros(1)), ("checked", 1.0, torch.zeros(1)),
                                           ("multiplied", 0.5, None), ("copied", 1.0, None)):  # fmt: skip
            for aligned in (True, False) if everything else (True,):
                plan = plans.take_addressed(flat, chunks, addresses, source, inv_scale, found_inf, 2048, aligned)
                yield f"{source} {name}", plan


def listed_plans(everything: bool) -> Iterator[tuple[str, Plan]]:
    """Gradients where autograd left them: of the dtype of their slots, and some of another."""
    if extension is None:
        return
    offsets, lengths = ([place[i] for place in ALIGNED_SEGMENTS] for i in (0, 1))
    for wide, narrow in DTYPES if everything else [(torch.float32, torch.float32), (torch.float32, torch.float16)]:
        params = [torch.zeros(length, dtype=wide) for length in lengths]
        grads = [torch.ones(length, dtype=narrow if i % 2 else wide) for i, length in enumerate(lengths)]
        extension.set_grads(params, grads)
        slots = extension.GradSlots([p.to("meta") for p in params], offsets, CPU)
        grad = slots.grad_list(params, 0, NUMEL, wide == narrow)
        ListedSlots(offsets, lengths).add_addresses(grad)
        for op in OPTIONS:
            param, _, *states = operands(op, NUMEL, wide)
            more = segments(aligned=True) if op == "lamb_" else ()
            yield f"{op} listed {narrow}", getattr(plans, op)(param, grad, *states, *more, **OPTIONS[op])
        yield f"norm listed {narrow}", plans.norm(grad)
        for name, factor, found_inf in (("checked", 1.0, torch.zeros(1)), ("scaled", 0.5, torch.zeros(1)),
                                        ("multiplied", torch.ones((), dtype=wide), None)):  # fmt: skip
            plan = plans.scale_listed(grad, factor, found_inf)
            assert (plan is not None) == (wide == narrow or name == "checked")
            if plan is not None:
                yield f"{narrow} {name} where they are", plan


def facts(compiled: Any) -> dict[str, Any]:
    """What can be seen in a compiled kernel."""
    ptx, ttir = compiled.asm["ptx"], compiled.asm["ttir"]
    moved = [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in _MOVES.findall(ptx)]
    return {
        "cubin": len(compiled.asm["cubin"]),
        "loads": [size for kind, size in moved if kind == "ld"],
        "stores": [size for kind, size in moved if kind == "st"],
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "products": len(re.findall(r"\bmul\.hi\.u32", ptx)),
        "flushes": len(re.findall(r"\b(?:div|sqrt|mul|fma|add)\S*\.ftz", ptx)),
        "contracts": len(re.findall(r"\b(?:fma\S*|(?:mul|add|sub))\.f32", ptx)),  # without .rn ptxas may do so
        "approximates": len(re.findall(r"\b(?:div\.full|div\.approx|sqrt\.approx|rsqrt)", ptx)),
        "narrow_offsets": len(re.findall(r"tt\.addptr .*: tensor<.*x!tt\.ptr<\w+>>, tensor<\w+xi32>", ttir)),
        "float_arguments": sorted(set(re.findall(r"%\w+: (f\d+)", ttir.partition("tt.func public")[2].split("\n")[0]))),
    }


_MOVES = re.compile(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int, nargs="+")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        driver = NoGpu(arch)
        triton.runtime.driver.set_active(driver)
        launches._compiled.clear()  # for a device, which in a real process is of one kind
        every = (all_plans, encoded_plans, gather_plans, listed_plans)
        for op, plan in itertools.chain.from_iterable(plans_of(arguments.all) for plans_of in every):
            for launch in plan.launches:
                compiled = launch.compile()
                print(json.dumps({"arch": arch, "op": op, "kernel": launch.kernel.__name__, **facts(compiled)}))
            driver.launched.clear()
            driver.stream += 1
            plan.run(CPU)
            given = driver.launched[:]
            for launch in plan.launches:
                assert [*launch.constants] == launch.kernel.arg_names[len(launch.args) :]
                launch.run()
            # What Triton itself gives its launcher: grid, stream, binary, metadata, hooks, arguments.
            by_triton = driver.launched[len(given) :]
            assert len(given) == len(by_triton) == len(plan.launches)
            for ours, own in zip(given, by_triton, strict=True):
                assert all(map(same, ours, own)), (ours[:4], own[:4], op)
    # Other numbers compile nothing: neither hyper-parameters nor lengths, as long as these are multiples of 16.
    kernel = plans.adam_(*operands("adam_", 1504), **OPTIONS["adam_"]).launches[0].kernel
    known = [len(cache[0]) for cache in kernel.device_caches.values()]
    for step in range(1, 5):
        options = {**OPTIONS["adam_"], "step": step, "lr": 1 / step, "beta1": 1.0 - 1 / step, "eps": float(step)}
        plans.adam_(*operands("adam_", 1504 + 16 * step), **options).run(CPU)
    compiled_since = sum(len(cache[0]) for cache in kernel.device_caches.values()) - sum(known)
    print(json.dumps({"compiled_for_other_numbers": compiled_since}))


if __name__ == "__main__":
    main()
