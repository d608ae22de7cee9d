# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long ``python -m apex_npu migrate`` takes, and how much memory: a dry run, as a command with its start.

    python benchmarks/migrate_speed.py [--rounds 3] [--jobs 1 2]

The files are those of installed packages, in a folder of their own: 1,000, of which a third mention CUDA or apex;
torch's package; one of 500 lines. The best round counts: what else runs makes all others slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from apex_npu.migrate.rewriting import TRIGGER

PACKAGES = Path(torch.__file__).parents[1]
# The command, and what its processes have cost: seconds of the clock and of the CPU, and the largest process.
_MEASURED = """
import resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
assert done.returncode in (0, 1), done.stderr.decode()
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def _sources(package: str = "") -> Iterator[bytes]:
    for path in sorted((PACKAGES / package).rglob("*.py")):
        if not path.is_symlink():
            yield path.read_bytes()


def _mixed(count: int) -> list[bytes]:
    """Files of all packages, of 285 lines on average, of which a third mention what the rules look for."""
    found: tuple[list[bytes], list[bytes]] = ([], [])
    for data in (one for one in _sources() if one.count(b"\n") <= 1_100):
        found[TRIGGER.search(data) is not None].append(data)
    chosen = []
    for files, number in zip(found, (count - count // 3, count // 3), strict=True):
        step = max(1, len(files) // number)
        chosen += files[::step][:number]
    return chosen


def _one(lines: int) -> list[bytes]:
    """A training script, repeated: most of its lines are for the rules."""
    part = (
        "class Net{0}(torch.nn.Module):\n    def forward(self, x):\n        return self.layer(x.cuda())\n\n\n"
        "def train{0}(model, loader, device='cuda'):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for x, y in loader:\n        x, y = x.to(device), y.cuda(non_blocking=True)\n"
        "        loss = torch.nn.functional.mse_loss(model(x), y)\n        optimizer.zero_grad()\n"
        "        loss.backward()\n        optimizer.step()\n    torch.cuda.synchronize()\n\n\n"
    )
    number = lines // part.count("\n") + 1
    text = "import torch\n\n\n" + "".join(part.format(one) for one in range(number))
    return ["".join(text.splitlines(keepends=True)[:lines]).encode()]


def _fill(folder: Path, files: list[bytes]) -> int:
    """Write files, and return how many lines they have."""
    for number, data in enumerate(files):
        path = folder / f"{number // 100:03}" / f"f{number:05}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return sum(data.count(b"\n") for data in files)


def _measure(folder: Path, jobs: int) -> tuple[float, float, float]:
    command = [sys.executable, "-m", "apex_npu", "migrate", "-q", "--jobs", str(jobs), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command], env=environment, check=True, capture_output=True, text=True
    )
    seconds, cpu, memory = map(float, done.stdout.split())
    return seconds, cpu, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    print("| files | lines | jobs | seconds | seconds of CPU | MB of the largest process |\n|---|---|---|---|---|---|")
    workloads = {"1,000 files": _mixed(1_000), "torch's package": list(_sources("torch")), "one file": _one(500)}
    for name, files in workloads.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = _fill(Path(folder), files)
            for jobs in options.jobs if len(files) > 1 else [1]:
                found = [_measure(Path(folder), jobs) for _ in range(options.rounds)]
                seconds, cpu, memory = (min(column) for column in zip(*found, strict=True))
                print(f"| {name} ({len(files):,}) | {lines:,} | {jobs} | {seconds:.2f} | {cpu:.2f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
