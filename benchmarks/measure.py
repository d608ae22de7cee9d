# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One comparison: all of its variants in one process, in turns.

    python benchmarks/measure.py "step of LAMB" resnet50 [--device cpu|cuda|npu] [--rounds 30] [--variants ...]

README.md says what a comparison is. Without arguments the names of all are listed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import bare_steps
import iterations
import overhead
import torch
import whole_steps
from rounds import Counter, Spread, Stopwatch, Times, open_device, steps_in_turns
from workloads import WORKLOADS, Bench

from apex_npu import amp

Make = Callable[[Bench], dict[str, Callable[[], Callable[[], object]]]]


def _comparisons() -> dict[str, Make]:
    found: dict[str, Make] = {
        f"step of {rule}": lambda bench, rule=rule: bare_steps.variants(rule, bench) for rule in bare_steps.RULES
    }
    found["step of Muon"] = bare_steps.muon
    for precision in whole_steps.REFERENCE:
        whole: Make = lambda bench, precision=precision: whole_steps.variants(precision, bench)  # noqa: E731
        found[f"whole {precision} step"] = whole
    for what in ("step", "O1", "O2"):
        found[f"overhead of {what}"] = lambda bench, what=what: overhead.variants(what, bench)
    for model in iterations.MODELS:
        found[f"iteration of {model}"] = lambda bench, model=model: iterations.variants(model, bench.device)
    return found


COMPARISONS = _comparisons()


def variant_names(comparison: str, workload: str, device: torch.device) -> list[str]:
    """All variants that there are here."""
    return list(COMPARISONS[comparison](Bench(device, WORKLOADS[workload]())))


def measure(
    comparison: str,
    workload: str,
    device: torch.device,
    *,
    patterns: Sequence[str] = ("*",),
    rounds: int = 30,
    budget_s: float = float("inf"),
) -> Times:
    """Milliseconds of each variant of ``comparison`` in every round; those of others that fail are left out.

    Args:
        comparison: One of COMPARISONS.
        workload: One of WORKLOADS.
        device: Where.
        patterns: Of the names of the variants wanted, as in a shell.
        rounds: At most so many.
        budget_s: Stop after so many seconds of rounds, but not before there are a few.
    """
    bench = Bench(device, WORKLOADS[workload]())
    made = COMPARISONS[comparison](bench)
    try:
        chosen = {name: make for name, make in made.items() if any(fnmatchcase(name, p) for p in patterns)}
        steps = _made(chosen, bench.watch)
        return steps_in_turns(steps, bench.watch, rounds, budget_s)
    finally:
        steps = {}
        _leave_nothing()


def count(
    comparison: str, workload: str, device: torch.device, *, patterns: Sequence[str] = ("*",)
) -> dict[str, dict[str, int]]:
    """Launches, bytes and waits of a step of each variant on the simulated npu."""
    bench = Bench(device, WORKLOADS[workload]())
    assert isinstance(bench.watch, Counter)
    counts = {}
    for name, make in COMPARISONS[comparison](bench).items():
        if any(fnmatchcase(name, p) for p in patterns):
            counts[name] = bench.watch.of(make())
            _leave_nothing()
    return counts


def _made(chosen: dict[str, Callable[[], Callable[[], object]]], watch: Stopwatch) -> dict[str, Callable[[], object]]:
    """The step of each, which has run once. The first, to which ratios are taken, and ours have to."""
    steps = {}
    for name, make in chosen.items():
        try:
            step = make()
            watch.time(step, 1)
        except Exception:
            if not steps or name.startswith("apex_npu"):
                raise
            traceback.print_exc()
            print(f"left out: {name}", file=sys.stderr)
            watch.reset()
        else:
            steps[name] = step
    return steps


def _leave_nothing() -> None:
    """Nothing of one comparison may show in the next: no casts, no memory, no compiled code.

    Compiled steps of one class count as recompilations of one function, of which torch allows a few, and then compiles
    no more.
    """
    amp.shutdown()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", nargs="?", choices=COMPARISONS)
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, default="small2000")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--variants", nargs="+", default=["*"], help="names, as in a shell")
    options = parser.parse_args()
    if options.comparison is None:
        print(*COMPARISONS, sep="\n")
        return
    times = measure(
        options.comparison,
        options.workload,
        open_device(options.device),
        patterns=options.variants,
        rounds=options.rounds,
        budget_s=options.budget,
    )
    reference = next(iter(times))
    for name, values in times.items():
        ms, ratio = Spread.of(values), Spread.of([a / b for a, b in zip(values, times[reference], strict=True)])
        print(
            f"{name:42} {ms.middle:10.3f} ms  {ratio.middle:7.2f} ({ratio.low:.2f} .. {ratio.high:.2f}) × {reference}"
        )


if __name__ == "__main__":
    main()
