# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the amp and fp16_utils tests of a checkout of NVIDIA's Apex against this package, under the name apex.

    python tests/upstream/run_upstream.py path/to/apex [--device npu] [--installed] [-k part of a name]
    python tests/upstream/run_upstream.py --clone path/to/clone

Only the tests are taken from the checkout. They are written for CUDA: in their source, on its way into the
interpreter, CUDA's names are replaced by those of the device. What needs the CUDA kernels of amp_C skips itself.
With --installed they meet the apex that is installed, a wheel of scripts/build.sh, rather than install_as_apex.
--clone runs those of both commits of the patches that have amp, on the CPU and on an NPU that is simulated here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from pathlib import Path

import torch

import apex_npu
from apex_npu.compat.pipeline import eras

FOLDERS = ("tests/L0/run_amp", "tests/L0/run_fp16util")
# It skips itself without amp_C, but our FusedSGD does without: an empty module lets it run.
NEEDS_NO_KERNELS = {"test_fused_sgd"}


def for_device(source: str, device: str) -> str:
    """``source`` with CUDA's names replaced by those of ``device``."""
    prefix = "torch." if device == "cpu" else f"torch.{device}."
    for pattern, replacement in (
        (r"torch\.set_default_tensor_type\(torch\.cuda\.FloatTensor\)", f"torch.set_default_device({device!r})"),
        (r"torch\.set_default_tensor_type\(torch\.FloatTensor\)", "torch.set_default_device('cpu')"),
        (r"torch\.cuda\.(?=(Half|Float|Double|Int)Tensor)", prefix),
        (r"""(["'])cuda\1""", repr(device)),
        (r"\.cuda\(\)", f".to({device!r})"),
        (r"torch\.cuda\.manual_seed(_all)?\b", "torch.manual_seed"),
        (r"torch\.cuda\.synchronize\b", "torch.cpu.synchronize"),
    ):
        source = re.sub(pattern, replacement, source)
    return source


class TestFinder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports the checkout's test modules, all in one folder, from rewritten source."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__("", "")
        self.folder = folder
        self.device = device

    def find_spec(self, fullname, path=None, target=None):
        file = self.folder / f"{fullname}.py"
        if path is not None or not file.is_file():
            return None
        loader = TestFinder(self.folder, self.device)
        loader.name, loader.path = fullname, str(file)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=str(file))

    def get_code(self, fullname):
        return compile(for_device(Path(self.path).read_text(encoding="utf-8"), self.device), self.path, "exec")

    def load(self, name: str) -> types.ModuleType:
        spec = self.find_spec(name)
        module = types.ModuleType(name)
        module.__spec__, module.__file__ = spec, spec.origin
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


class Report(unittest.TestResult):
    """Prints a line per test, and leaves nothing of one test to the next."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self.counts: Counter[str] = Counter()
        self.printed = io.StringIO()

    def startTest(self, test):
        super().startTest(test)
        torch.manual_seed(0)
        self.began = time.monotonic()

    def stopTest(self, test):
        apex_npu.amp.shutdown()
        torch.set_default_device("cpu")
        super().stopTest(test)

    def say(self, outcome: str, test: unittest.TestCase, detail: str = "") -> None:
        self.counts[outcome] += 1
        seconds = time.monotonic() - self.began
        sys.__stdout__.write(f"{outcome:8} {self.module}.{test.id().partition('.')[2]}  {seconds:.1f} s  {detail}\n")
        sys.__stdout__.flush()

    def addSuccess(self, test):
        self.say("passed", test)

    def addSkip(self, test, reason):
        self.say("skipped", test, f"({reason})")

    def addError(self, test, err):
        super().addError(test, err)
        self.say("FAILED", test, f"\n{self.errors[-1][1]}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.say("FAILED", test, f"\n{self.failures[-1][1]}")


def run_folder(folder: Path, device: str, chosen: str) -> Counter[str]:
    """Run all test modules in ``folder``."""
    counts: Counter[str] = Counter()
    finder = TestFinder(folder, device)
    sys.meta_path.insert(0, finder)
    for file in sorted(folder.glob("test_*.py")):
        report = Report(file.stem)
        with contextlib.redirect_stdout(report.printed):
            if file.stem in NEEDS_NO_KERNELS:
                sys.modules["amp_C"] = types.ModuleType("amp_C")
            suite = unittest.defaultTestLoader.loadTestsFromModule(finder.load(file.stem))
            sys.modules.pop("amp_C", None)
            for test in flat(suite):
                if chosen in f"{file.stem}.{test.id()}":
                    test.run(report)
        counts += report.counts
    sys.meta_path.remove(finder)
    sys.modules.pop("utils", None)
    return counts


def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


def run_clone(clone: str) -> int:
    """Run the tests of each era that has amp, on each device, in processes of their own."""
    if not clone:
        sys.exit("make upstream: name a checkout of Apex that has apex/amp, APEX=path, or a clone, APEX_UPSTREAM=path")
    with_amp = [era for era in eras.ERAS if "apex/amp/__init__.py" in era.has]
    devices = ["cpu", *(["npu"] if importlib.util.find_spec("npu_simulator") else [])]
    for era in with_amp:
        with tempfile.TemporaryDirectory() as folder:
            archive = ["git", "-C", clone, "archive", "-o", f"{folder}/tests.tar", era.commit, "tests/L0"]
            subprocess.run(archive, check=True)
            shutil.unpack_archive(f"{folder}/tests.tar", folder)
            for device in devices:
                print(f"==> NVIDIA's own tests of {era.commit} on the {device}", flush=True)
                if subprocess.run([sys.executable, __file__, folder, "--device", device]).returncode:
                    return 1
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--clone"]:
        return run_clone(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apex", type=Path, help="a checkout of https://github.com/NVIDIA/apex that has apex/amp")
    parser.add_argument("--device", default="cpu", help='"cpu", or "npu", simulated where there is none')
    parser.add_argument("--installed", action="store_true", help="an apex is installed that answers with apex_npu")
    parser.add_argument("-k", default="", metavar="PART", help="only tests with this in their names")
    options = parser.parse_args()
    folders = [options.apex / name for name in FOLDERS if (options.apex / name).is_dir()]
    if not folders:
        parser.error(f"{options.apex} has no {FOLDERS[0]}: name a checkout of Apex from before June 2025")
    if options.device == "npu":
        os.environ["APEX_NPU_TEST_DEVICE"] = "npu"
        sys.path.append(str(Path(__file__).parents[1]))
        import devices  # noqa: F401 -- it installs what simulates an NPU
    torch.set_num_threads(1)
    if options.installed:
        import apex

        if not getattr(apex, "__apex_npu__", False) or Path(apex.__file__).is_relative_to(options.apex.resolve()):
            parser.error(f"{apex.__file__} is no installed apex that has been patched")
    else:
        apex_npu.install_as_apex(force=True)
    counts: Counter[str] = Counter()
    for folder in folders:
        counts += run_folder(folder, options.device, options.k)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "FAILED")))
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
