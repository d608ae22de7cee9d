# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs test files on the vendor's torch_npu, a few to a process.

    python tests/vendor/run.py [--workers N] [--together N] [--log FOLDER] FILE_OR_FOLDER... [-- PYTEST_OPTION...]

An error of the device's is asynchronous, and spoils whatever the same process computes afterwards: where a process
fails that has run several files, each of them is run again in a process of its own, and these results count.

Prints a line for each process, the output of those that fail, the reasons of what was skipped, and the operators that
torch_npu has looked for in vain. Exit status 1 where a test has failed, or an operator is missing that it cannot do
without.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import host_cann

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")
# They take longest, so they go first: the last worker is then not left alone with one of them.
LONGEST_FIRST = (
    *("test_fused_optimizers", "test_delegated_skips", "test_data_parallel", "test_random_programs"),
    *("test_loops", "test_hccl", "test_counts", "test_failed_launches"),
)
# What torch_npu looks for first, and has an older operator in place of.
HAVE_OLDER_FORMS = {
    "aclnnAddmmWeightNz",
    "aclnnAminmax",
    "aclnnApplyAdamW",
    "aclnnChunkCat",
    "aclnnDropoutV3Grad",
    "aclnnFlashAttentionVarLenScoreV4",
    "aclnnGeGluV3",
    "aclnnMatmulWeightNz",
    "aclnnNpuFormatCast",
    "aclnnNpuFormatCastCalculateSizeAndFormat",
    "aclnnRotaryPositionEmbeddingV2",
    "aclnnTopkV2",
    "aclnnTransformBiasRescaleQkv",
}
# What a test calls in order to see it fail.
CALLED_IN_VAIN = {"aclop StrideAdd"}


@dataclass(frozen=True)
class Result:
    """What the files of one process have come to."""

    files: tuple[Path, ...]
    counts: Counter[str]
    skips: Counter[str]
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return bool(self.counts["failed"] + self.counts["error"])


def test_files(paths: list[Path], options: list[str]) -> list[Path]:
    """The files in ``paths`` of which ``options`` choose a test, those that take longest first."""
    done = run_pytest(["--collect-only", *options, *map(str, paths)])
    if done.returncode:
        sys.exit(f"no test is chosen, or a file cannot be imported:\n{done.stdout}")
    found = [ROOT / name for name in re.findall(r"^(\S+\.py)::", done.stdout, flags=re.MULTILINE)]
    return sorted(dict.fromkeys(found), key=lambda file: file.stem not in LONGEST_FIRST)


def grouped(files: list[Path], together: int) -> list[tuple[Path, ...]]:
    """At most so many files a process, all with torch_npu's task queue or all without; the longest are alone."""
    groups = [(file,) for file in files if file.stem in LONGEST_FIRST]
    for without in (True, False):
        alike = [file for file in files if file.stem not in LONGEST_FIRST and is_without_queue(file) == without]
        groups += [tuple(alike[i : i + together]) for i in range(0, len(alike), together)]
    return groups


def is_without_queue(file: Path) -> bool:
    """Whether the tests of ``file`` turn the queue off (``conftest.npu``), which a process reads once."""
    return file.parent.name == "vendor" and file.stem.startswith(("test_host_cann", "test_saturation"))


def run(files: tuple[Path, ...], options: list[str], not_found: Path) -> list[Result]:
    """Run the tests of ``files`` in a process of their own; where one fails, those of each file."""
    result = run_process(files, options, not_found)
    if len(files) > 1 and result.failed:
        return [run_process((file,), options, not_found) for file in files]
    return [result]


def run_pytest(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """pytest on the device, in a process of its own."""
    environment = {
        "HOST_CANN_QUIET": "1",
        **os.environ,
        "APEX_NPU_TEST_DEVICE": "npu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import torch_npu before there is anything to run it on
        **variables,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_process(files: tuple[Path, ...], options: list[str], not_found: Path) -> Result:
    """Run the tests of ``files`` in one process."""
    begun = time.monotonic()
    done = run_pytest([*options, *map(str, files)], HOST_CANN_NOT_FOUND=str(not_found))
    counts = Counter({name: int(n) for n, name in re.findall(r"(\d+) (\w+?)s?\b", _last_line(done.stdout))})
    if done.returncode not in (0, 1, 5) or (done.returncode == 1 and not counts["failed"] + counts["error"]):
        counts["error"] += 1  # it was ended, or could not be collected
    return Result(files, counts, Counter(dict(_skips(done.stdout))), time.monotonic() - begun, done.stdout)


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if re.search(r" in [\d.]+s", line)), "")


def _skips(output: str) -> Iterator[tuple[str, int]]:
    found: Counter[str] = Counter()
    for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", output, flags=re.MULTILINE):
        found[reason] += int(number)
    yield from found.items()


def missing_operators(not_found: Path) -> list[str]:
    """Names that torch_npu has looked for and not found, and for which there is nothing else, or that it has called."""
    names = set(not_found.read_text(encoding="utf-8").splitlines()) if not_found.exists() else set()
    return sorted(names - HAVE_OLDER_FORMS - CALLED_IN_VAIN)


def report(result: Result, log: Path | None) -> None:
    """Print a line, and the output of a file that failed; keep all output in the folder ``log``."""
    said = ", ".join(f"{result.counts[name]} {name}" for name in OUTCOMES if result.counts[name])
    names = ", ".join(str(file.relative_to(ROOT)) for file in result.files)
    print(f"{names}: {said or 'nothing to run'} ({result.seconds:.0f} s)", flush=True)
    if result.failed:
        print(result.output, flush=True)
    if log:
        (log / f"{result.files[0].parent.name}.{result.files[0].stem}.log").write_text(result.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes at a time (default 2)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="files to a process (default 1)")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="keeps the output of every process")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, options = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if reason := host_cann.unavailable():
        print(f"tests on the vendor's torch_npu are skipped: {reason}")
        return 0
    groups = grouped(test_files([path.resolve() for path in arguments.paths], options), arguments.together)
    if arguments.log:
        arguments.log.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        not_found = Path(folder) / "not_found"
        submitted = [pool.submit(run, files, options, not_found) for files in groups]
        try:
            for done in as_completed(submitted):
                for result in done.result():
                    report(result, arguments.log)
                    counts += result.counts
                    skips += result.skips
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            return 130
        missing = missing_operators(not_found)
    for reason, number in skips.most_common():
        print(f"skipped {number}: {reason}")
    if missing:
        print(f"operators that torch_npu has not found: {', '.join(missing)}")
    print(f"{time.monotonic() - begun:.0f} s")
    failed = counts["failed"] + counts["error"]
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return 1 if failed or missing or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
