# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A patched tree, imported in place: the modules that are served, and those that are not any more."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_npu.compat.pipeline.patching import patch

ROOT = Path(__file__).parents[2]

# Also run on the real upstream, by `make patch-check`.
EVERY_MODULE = """
import importlib, pathlib, pickle, sys
import apex
from apex import amp, fp16_utils, normalization, optimizers, parallel
import apex_npu
from apex_npu.compat.apex_hook import SERVED, is_served
from apex_npu.compat import MODULES

# Of upstream's files, those that are ours now either answer as ours or are not there.
tree = pathlib.Path(apex.__file__).parent
files = [file.relative_to(tree.parent).with_suffix("") for file in tree.rglob("*.py")]
names = {".".join(file.parts).removesuffix(".__init__") for file in files}
hidden = 0
for name in sorted(filter(is_served, names)):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, (name, error)
        hidden += 1
    else:
        assert module.__apex_npu__ and str(tree) not in module.__file__, name

# And every name of the table imports, and is reached as an attribute, but for upstream's own sharded optimizers.
for old, ours in MODULES.items():
    if old.startswith("apex.contrib.optimizers"):
        assert old not in SERVED, old
        continue
    module = importlib.import_module(old)
    assert old not in SERVED or module.__apex_npu__, old
    parent, _, name = old.rpartition(".")
    if parent and old != "apex.amp._amp_state":
        assert getattr(sys.modules[parent], name) is module, old
assert type(amp._amp_state).__name__ == "AmpState" and amp.initialize is apex_npu.amp.initialize
assert apex.__file__ == sys.modules["apex"].__file__ and apex.multi_tensor_apply.__file__.startswith(str(tree))

for name in apex_npu.optimizers.__all__:
    assert getattr(optimizers, name) is getattr(apex_npu.optimizers, name), name
optimizer = optimizers.FusedAdam([__import__("torch").nn.Parameter(__import__("torch").ones(2))])
assert type(pickle.loads(pickle.dumps(optimizer))) is optimizers.FusedAdam
assert pickle.loads(b"capex.optimizers.npu_fused_sgd\\nNpuFusedSGD\\n.") is optimizers.NpuFusedSGD
print(len(names), hidden)
"""


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, cwd=tree.parent, capture_output=True, text=True, check=False)


def output(tree: Path, *arguments: str) -> str:
    done = python(tree, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def patched(tree) -> Path:
    patch(tree)
    return tree


@pytest.mark.slow
def test_no_module_of_upstreams_amp_answers(patched, era):
    hidden = int(output(patched, "-c", EVERY_MODULE).split()[1])
    # _initialize, _process_optimizer, __version__ and sync_batchnorm_kernel.
    assert hidden == (0 if era == "master" else 4)


@pytest.fixture
def patched_2025(tree_2025) -> Path:
    patch(tree_2025)
    return tree_2025


FIRST_IMPORTS = [
    "import apex.amp._amp_state; assert type(apex.amp._amp_state).__name__ == 'AmpState'",
    "from apex.amp._amp_state import _amp_state, maybe_print",
    "import apex.parallel.LARC as module; module.LARC",
    "import change_data_ptr; change_data_ptr.change_data_ptr",
    "import apex.contrib.combine_tensors; apex.contrib.combine_tensors.combine_npu",
    "import apex.optimizers.npu_fused_adam; apex.optimizers.npu_fused_adam.NpuFusedAdam",
    "import importlib.util as u; assert u.find_spec('apex.amp') and not u.find_spec('apex.amp._initialize')",
    "from apex_npu.compat.packing import Distribution; import apex",
    "import apex.contrib.xentropy as x; assert x.LOSS == 'upstream'",
    "import apex, importlib; importlib.reload(apex); from apex import amp; amp.initialize",
]
# Each in a process of its own, which need not import torch again.
FORK = """
import os, sys, torch
for number, program in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        exec(program)
        os._exit(0)
    if os.wait()[1]:
        print(number)
"""


@pytest.mark.slow
def test_any_module_may_be_imported_first(patched_2025):
    done = python(patched_2025, "-c", FORK, *FIRST_IMPORTS)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_other_processes_of_a_script_have_the_names(patched_2025, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.multiprocessing as mp\nfrom apex import amp, optimizers\n"
        "def work(rank, queue):\n    queue.put(amp.initialize.__module__)\n"
        "if __name__ == '__main__':\n"
        "    queue = mp.get_context('spawn').SimpleQueue()\n"
        "    mp.spawn(work, (queue,), nprocs=1)\n    print(queue.get())\n"
    )
    # `run` changes nothing here: this apex is served by apex_npu already.
    assert output(patched_2025, "-m", "apex_npu", "run", str(script)) == "apex_npu.amp.frontend\n"


def test_where_there_is_cuda_its_compiler_is_asked(patched, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    # The one function: torch for the CPU alone has no CUDA_HOME, whatever is installed.
    module = ast.parse((patched / "setup.py").read_text())
    module.body = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    namespace = {"subprocess": subprocess}
    exec(compile(module, "setup.py", "exec"), namespace)
    assert namespace["get_cuda_bare_metal_version"](str(nvcc.parents[1])) == "12.4"
    assert namespace["get_cuda_bare_metal_version"](None) == "0.0"
