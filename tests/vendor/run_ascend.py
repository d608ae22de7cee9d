# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run Ascend's own tests of its fused optimizers on those and on ours, and print the results side by side.

    .venv-npu/bin/python tests/vendor/run_ascend.py path/to/pytorch

The checkout is that of https://gitee.com/ascend/pytorch; only test/optim/test_fused_optimizers.py is taken from it. On
its way into the interpreter its import of ``torch_npu.optim`` is replaced, and BertAdam gets the beta2 by name that is
torch_npu's default (ours is that of Ascend's patch of Apex). What upstream skips is run, too, and marked: it compares
with sums that an NPU has computed. Exit status 1 where a test that passes with Ascend's optimizers fails with ours, and
``DIFFERS`` does not say why.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
import unittest
from pathlib import Path

FILE = Path("test/optim/test_fused_optimizers.py")
PACKAGES = ("torch_npu.optim", "apex_npu.optimizers")
DIFFERS = {
    "test_step": "of float16 parameters whose gradient is 0, torch.optim.Adam and torch_npu make NaN (eps is 0 in "
    "float16); ours keeps moments in float32, and the value",
    "test_step_3rd_optims": "of float16 parameters, stepped by LAMB and BertAdam, for the same reason the last digits",
}


def tests_of(source: str, package: str) -> unittest.TestSuite:
    """The tests in ``source`` of the optimizers of ``package``."""
    source = re.sub(r"from torch_npu\.optim import", f"from {package} import", source)
    source = source.replace("NpuFusedBertAdam, dict(", "NpuFusedBertAdam, dict(b2=0.999, ")
    source = re.sub(r"^ *@unittest\.skip\(.*\)\n", "", source, flags=re.MULTILINE)
    module = types.ModuleType(f"tests_of_{package.partition('.')[0]}")
    sys.modules[module.__name__] = module
    exec(compile(source, str(FILE), "exec"), module.__dict__)
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def run(suite: unittest.TestSuite) -> dict[str, str]:
    """For each test's name "passed", or the last line of what it says."""
    result = unittest.TestResult()
    names = [test.id().rpartition(".")[2] for group in suite for test in group]  # type: ignore[union-attr]
    suite.run(result)
    failed = {
        test.id().rpartition(".")[2]: said.strip().splitlines()[-1]
        for test, said in [*result.failures, *result.errors, *result.skipped]
    }
    return {name: failed.get(name, "passed") for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    source = (parser.parse_args().checkout / FILE).read_text(encoding="utf-8")
    # An error is then one of the test that causes it.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    import host_cann

    host_cann.install()
    skipped = set(re.findall(r"@unittest\.skip\(.*\)\n *def (\w+)", source))
    theirs, ours = (run(tests_of(source, package)) for package in PACKAGES)
    print(f"| {FILE.name} | {' | '.join(PACKAGES)} |\n| --- | --- | --- |")
    for name, said in theirs.items():
        print(f"| {name}{' (skipped upstream)' if name in skipped else ''} | {said[:200]} | {ours[name][:200]} |")
    failed = {name for name, said in theirs.items() if said == "passed" and ours[name] != "passed"}
    print(*(f"{name}: {DIFFERS[name]}" for name in sorted(failed & DIFFERS.keys())), sep="\n")
    return int(bool(failed - DIFFERS.keys()))


if __name__ == "__main__":
    sys.exit(main())
