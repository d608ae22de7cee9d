# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmarks share: a device, a clock, variants in turns, and tables."""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apex_npu.doctor import rounds as doctor
from apex_npu.doctor.rounds import SHORTEST_MS, WARM_UP_ROUNDS, Spread, Times, in_turns  # noqa: F401 (Spread: for others)

RESULTS = Path(__file__).parent / "results"


def open_device(name: str) -> torch.device:
    """The device, simulated where it is an npu, with one thread on the host."""
    torch.set_num_threads(1)
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device that this torch can use: torch.cuda.is_available() is False")
    if name == "npu":
        import npu_simulator

        npu_simulator.install()
    return torch.device(name)


def is_simulated(device: torch.device) -> bool:
    """True where times say nothing, and what counts is counted."""
    if device.type != "npu":
        return False
    import npu_simulator

    return bool(npu_simulator.installed())


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def clock(device: torch.device) -> float:
    """Seconds: wall time of accelerators, else CPU time, in which others do not count.

    On cpu of this thread, which all of torch runs in; on a simulated npu of the process, for there the autograd engine
    has a thread of its own.
    """
    if device.type == "cpu":
        return time.thread_time()
    return time.process_time() if is_simulated(device) else time.perf_counter()


class Stopwatch:
    """Adds up the time between ``start`` and ``stop``: a step may stop it while it hands over gradients.

    On cuda the time of the stream, between events, so that reading it waits once and pausing does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._total = 0.0
        self._started = 0.0
        self._events: list[Any] = []

    def start(self) -> None:
        if self.device.type == "cuda":
            self._mark()
        else:
            synchronize(self.device)
            self._started = clock(self.device)

    def stop(self) -> None:
        if self.device.type == "cuda":
            self._mark()
        else:
            synchronize(self.device)
            self._total += clock(self.device) - self._started

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def reset(self) -> None:
        """Forget what has been added up, and a start without a stop."""
        self._total, self._events = 0.0, []

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        total, self._total = self._total * 1e3, 0.0
        if self._events:
            torch.cuda.synchronize()
            total = sum(a.elapsed_time(b) for a, b in zip(self._events[::2], self._events[1::2], strict=True))
            self._events = []
        return total

    def time(self, step: Callable[[], object], repeats: int) -> float:
        """Milliseconds of one ``step``, without what it pauses for."""
        self.start()
        for _ in range(repeats):
            step()
        self.stop()
        return self.take_ms() / repeats


class Counter(Stopwatch):
    """Counts launches, bytes and waits of the simulated npu between ``start`` and ``stop``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts = {"launches": 0, "bytes": 0, "syncs": 0}

    def start(self) -> None:
        import npu_simulator

        self._context = npu_simulator.count()
        self._count = self._context.__enter__()

    def stop(self) -> None:
        self._context.__exit__(None, None, None)
        for name in self.counts:
            self.counts[name] += getattr(self._count, name)

    def of(self, step: Callable[[], object]) -> dict[str, int]:
        """Counts of one ``step``, after two that set up."""
        for _ in range(3):
            self.counts = dict.fromkeys(self.counts, 0)
            self.time(step, 1)
        return dict(self.counts)  # what sets up the next one is counted, too


def steps_in_turns(steps: dict[str, Callable[[], object]], watch: Stopwatch, rounds: int, budget_s: float) -> Times:
    """``in_turns`` of ``steps``, each repeated in a round until it takes long enough for the clock."""
    repeats = {}
    for name, step in steps.items():
        for _ in range(WARM_UP_ROUNDS):  # the second step compiles, too: it finds states that the first one did not
            watch.time(step, 1)
        repeats[name] = max(1, min(1000, int(SHORTEST_MS / max(watch.time(step, 1), 1e-3))))

    def time_one(name: str) -> float:
        return watch.time(steps[name], repeats[name])

    return in_turns(list(steps), rounds, time_one, warm_up=0, budget_s=budget_s)


def commit() -> str:
    """Of the working tree; "unknown" where it is a copy without its history, or there is no git."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def processor(device: torch.device) -> str:
    """The name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else doctor.processor()


def write_csv(path: Path, table: list[dict[str, str]]) -> None:
    """Write ``table``, whose first row has all columns."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(table)
    print(f"written: {path}")


def read_csv(path: Path) -> list[dict[str, str]]:
    """What ``write_csv`` has written."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
