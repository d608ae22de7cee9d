# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which share of seeded mutants the tests kill: ``PYTHONPATH=tests python -m mutants record``, then ``run``.

``record`` runs the tests once under coverage, with the name of each test as its context: all but sweeps on the CPU,
and those of amp on the simulated NPU as well, where it is installed. ``run`` draws mutants of each area. For each
mutant it runs the tests that cover its lines, shortest first, until one fails or their recorded durations add up to
the budget. Mutants of C++ take the tests of ops, fusion and optimizers. Each mutant is a row of ``results.csv``. The
share killed in each area is printed with its interval of 95 %. One seed draws the same mutants of the same sources.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import coverage
from mutants.operators import Mutant, mutants_of
from mutants.recording import ON_NPU

ROOT = Path(__file__).resolve().parents[2]
AREAS = {name: f"apex_npu/{name}" for name in ("amp", "optimizers", "fusion", "debug", "migrate")} | {"csrc": "csrc"}
ON_CPU = ("--ignore=tests/simulator", "--ignore=tests/vendor")
ON_SIMULATED_NPU = ("-m", "not slow and not sweep", "tests/amp")
CPP_TESTS = ("tests/ops", "tests/fusion", "tests/optimizers")
RC = """[run]
source_pkgs = apex_npu
data_file = {folder}/coverage
parallel = true
context = {context}
disable_warnings = no-data-collected, module-not-imported, trace-changed
"""


class Outcome(NamedTuple):
    """A mutant and what became of it: killed, survived, or uncovered where no test runs its lines."""

    area: str
    mutant: Mutant
    result: str
    by: str
    seconds: float


def record(folder: Path, workers: int, devices: Sequence[str], marks: str) -> None:
    """Run the tests with ``marks`` under coverage, and combine what all their processes have recorded."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", *f"-q -p mutants.recording -n {workers} --dist worksteal".split()]
    rc = folder / "coveragerc"
    on_cpu = ("cpu", "${PYTEST_CURRENT_TEST-}", ("-m", marks, *ON_CPU))
    for device, context, arguments in (on_cpu, ("npu", "", ON_SIMULATED_NPU)):
        if device not in devices or (device == "npu" and importlib.util.find_spec("npu_simulator") is None):
            continue
        rc.write_text(RC.format(folder=folder, context=context))
        variables = {
            "APEX_NPU_TEST_DEVICE": device,
            "COVERAGE_PROCESS_START": str(rc),
            "MUTANTS_FOLDER": str(folder),
        }
        subprocess.run([*command, *arguments], cwd=ROOT, env=os.environ | variables, check=False)
    combined = coverage.Coverage(config_file=str(rc))
    combined.combine(keep=False)
    combined.save()


# What follows the name of a test in PYTEST_CURRENT_TEST.
_PHASE = re.compile(r" \((setup|call|teardown)\)$")


class Recorded:
    """What ``record`` has found: the tests that run a line, and their durations."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()
        self.durations: dict[str, float] = {}
        for file in folder.glob("durations.*.jsonl"):
            for line in file.read_text().splitlines():
                test, outcome, seconds = json.loads(line)
                if outcome == "passed":
                    self.durations[test] = seconds

    def covering(self, mutant: Mutant) -> list[str]:
        """The tests that run one of the lines of ``mutant``, shortest first."""
        contexts = self._data.contexts_by_lineno(str(ROOT / mutant.path))
        first, last = mutant.lines
        found = {_PHASE.sub("", c) for line in range(first, last + 1) for c in contexts.get(line, ())}
        return sorted((test for test in found if test in self.durations), key=lambda t: (self.durations[t], t))


def chosen(tests: list[str], durations: dict[str, float], budget: float) -> list[str]:
    """The first of ``tests`` whose durations add up to ``budget`` seconds; at least one."""
    total, few = 0.0, []
    for test in tests:
        total += durations[test]
        if few and total > budget:
            break
        few.append(test)
    return few


class Tree:
    """A copy of the checkout in which mutants are tried, one after the other."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in [*listed.rstrip("\0").split("\0"), *map(str, _built())]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self._folder = folder
        paths = os.pathsep.join(map(str, (folder, folder / "tests")))
        self._environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    def try_mutant(self, mutant: Mutant, tests: list[str], timeout: float) -> tuple[str, str]:
        """Run ``tests`` on the tree with ``mutant``: what became of it, and by which test."""
        file = self._folder / mutant.path
        source = file.read_bytes()
        try:
            file.write_bytes(mutant.apply(source))
            if file.suffix != ".py" and not self.build():
                return "killed", "the compiler"
            return self._test(tests, timeout)
        finally:
            file.write_bytes(source)

    def build(self) -> bool:
        """Build the extension; whether it compiles."""
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return subprocess.run(command, cwd=self._folder, env=self._environment, capture_output=True).returncode == 0

    def _test(self, tests: list[str], timeout: float) -> tuple[str, str]:
        on_cpu = [test for test in tests if not test.endswith(ON_NPU)]
        on_npu = [test.removesuffix(ON_NPU) for test in tests if test.endswith(ON_NPU)]
        result = ("survived", "")
        for device, some in (("cpu", on_cpu), ("npu", on_npu)):
            if some and result[0] == "survived":
                result = self._test_on(device, some, timeout)
        return result

    def _test_on(self, device: str, tests: list[str], timeout: float) -> tuple[str, str]:
        (self._folder / "tests.txt").write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "@tests.txt"]
        try:
            run = subprocess.run(
                command,
                cwd=self._folder,
                env=self._environment | {"APEX_NPU_TEST_DEVICE": device},
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return "killed", "time"
        if run.returncode == 0:
            return "survived", ""
        failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return "killed", failed[0] if failed else f"exit status {run.returncode}"


def _built() -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / "apex_npu").glob("_C.*") if path.suffix != ".pyi"]


def run(folder: Path, args: argparse.Namespace) -> list[Outcome]:
    """Try the mutants of all areas, in as many trees as there are workers."""
    recorded = Recorded(folder)
    drawn = []
    for area in args.areas:
        candidates = mutants_of(ROOT, AREAS[area])
        drawn += [(area, m) for m in random.Random(f"{args.seed} {area}").sample(candidates, args.count)]
    trees: SimpleQueue[Tree] = SimpleQueue()
    for index in range(args.workers):
        tree = Tree(folder / f"tree{index}")
        if "csrc" in args.areas:
            tree.build()
        trees.put(tree)

    def one(case: tuple[str, Mutant]) -> Outcome:
        area, mutant = case
        if area == "csrc":
            tests = sorted(t for t in recorded.durations if t.startswith(CPP_TESTS))
            random.Random(0).shuffle(tests)
        else:
            tests = recorded.covering(mutant)
        if not tests:
            return Outcome(area, mutant, "uncovered", "", 0.0)
        few = chosen(tests, recorded.durations, args.budget)
        tree, begun = trees.get(), time.monotonic()
        try:
            result, by = tree.try_mutant(mutant, few, 120 + 4 * args.budget)
        finally:
            trees.put(tree)
        outcome = Outcome(area, mutant, result, by, time.monotonic() - begun)
        print(f"{result:9} {outcome.seconds:5.0f} s  {mutant.path}:{mutant.lines[0]} {mutant.kind}  {by}", flush=True)
        return outcome

    with ThreadPoolExecutor(args.workers) as pool:
        return list(pool.map(one, drawn))


def interval(killed: int, count: int) -> tuple[float, float]:
    """The interval of 95 % of a share, by Wilson: https://doi.org/10.1080/01621459.1927.10502953."""
    z, share = 1.96, killed / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


def report(outcomes: list[Outcome], path: Path) -> None:
    """Write a row for each outcome, print the survivors as diffs, and the share killed in each area."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["area", "path", "line", "kind", "mutated", "result", "by"])
        for area, mutant, result, by, _ in outcomes:
            rows.writerow([area, mutant.path, mutant.lines[0], mutant.kind, mutant.text.strip(), result, by])
    for area, mutant, result, _, _ in outcomes:
        if result != "killed":
            before = (ROOT / mutant.path).read_bytes()
            lines = (text.decode().splitlines() for text in (before, mutant.apply(before)))
            print(f"\n{result}, {area}: {mutant.path}:{mutant.lines[0]}")
            print("\n".join(list(difflib.unified_diff(*lines, n=1, lineterm=""))[3:]))
    by_area = defaultdict(list)
    for outcome in outcomes:
        by_area[outcome.area].append(outcome.result == "killed")
    print()
    for area, killed in by_area.items():
        low, high = interval(sum(killed), len(killed))
        share = sum(killed) / len(killed)
        print(f"{area:10} {sum(killed):3} of {len(killed)} killed: {share:.0%} ({low:.0%} to {high:.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the tests under coverage")
    recording.add_argument("--devices", nargs="+", choices=["cpu", "npu"], default=["cpu", "npu"])
    recording.add_argument("--marks", default="not sweep", help="which tests on the CPU (default '%(default)s')")
    running = commands.add_parser("run", help="try mutants")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--count", type=int, default=30, help="mutants of each area")
    running.add_argument("--budget", type=float, default=30.0, help="recorded seconds of tests for a mutant")
    running.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    running.add_argument("--results", type=Path, default=ROOT / "tests" / "mutants" / "results.csv")
    args = parser.parse_args()
    if args.command == "record":
        record(args.folder, args.workers, args.devices, args.marks)
    else:
        report(run(args.folder, args), args.results)


if __name__ == "__main__":
    main()
