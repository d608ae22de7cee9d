# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Git trees shaped like NVIDIA's Apex in each era: its file names, the lines that patches hold on to, no more."""

from __future__ import annotations

import subprocess
from pathlib import Path

ERAS = ("2020", "2025", "master")

_SETUP = """\
import os
import subprocess

from setuptools import setup, find_packages
from torch.utils.cpp_extension import CUDA_HOME

def get_cuda_bare_metal_version(cuda_dir):
    raw_output = subprocess.check_output([cuda_dir + "/bin/nvcc", "-V"], universal_newlines=True)
    output = raw_output.split()
    return output[output.index("release") + 1].split(",")[0]

version = get_cuda_bare_metal_version(CUDA_HOME)
assert CUDA_HOME or version == "0.0"

setup(
    name="apex",
    version="0.1",
    packages=find_packages(exclude=("tests",)),
    description="a stand-in",
)
"""
# Upstream's, which do not answer any more: each would fail if it were imported.
_OLD = 'raise RuntimeError("upstream\'s module has been imported")\n'
_OLD_FILES = (
    *(f"apex/amp/{name}.py" for name in ("__init__", "_amp_state", "_initialize", "_process_optimizer", "__version__")),
    *(f"apex/amp/{name}.py" for name in ("amp", "frontend", "handle", "scaler", "lists/__init__", "utils")),
    *(f"apex/fp16_utils/{name}.py" for name in ("__init__", "fp16_optimizer", "fp16util", "loss_scaler")),
    *(f"apex/parallel/{name}.py" for name in ("__init__", "LARC", "distributed", "multiproc", "sync_batchnorm_kernel")),
)
_NORMS = ("apex/normalization/__init__.py", "apex/normalization/fused_layer_norm.py")
_MULTI_TENSOR = """\
class MultiTensorApply:
    available = False
"""


def files(era: str) -> dict[str, str]:
    """What the tree of an era holds."""
    imports = {
        "2020": "# a remark\n\nimport torch\nimport warnings\n\nfrom . import parallel\nfrom . import amp\n",
        "2025": "import logging\n\n# a remark\nimport torch\n\nfrom . import parallel, amp, transformer\n",
        "master": "import logging\n\n# a remark\nimport torch\n\n",
    }
    tree = {
        "setup.py": _SETUP.replace('name="apex"', "name='apex'") if era == "2020" else _SETUP,
        "README.md": f"A stand-in for Apex, era {era}.\n",
        "LICENSE": "None.\n",
        ".gitignore": "apex.egg-info\nbuild\n__pycache__\n",
        "apex/__init__.py": imports[era] + "from . import optimizers\nfrom . import normalization\n",
        "apex/contrib/__init__.py": "",
        "apex/contrib/xentropy/__init__.py": "LOSS = 'upstream'\n",
        "apex/multi_tensor_apply/__init__.py": "from .multi_tensor_apply import MultiTensorApply\n",
        "apex/multi_tensor_apply/multi_tensor_apply.py": _MULTI_TENSOR,
        "apex/optimizers/fused_sgd.py": _OLD,
        "apex/optimizers/fused_adam.py": _OLD,
        **dict.fromkeys(_NORMS, _OLD),
    }
    optimizers = "from .fused_sgd import FusedSGD\nfrom .fused_adam import FusedAdam"
    if era == "2020":
        # As upstream had it: no newline at the end.
        tree |= {"apex/optimizers/__init__.py": optimizers, "apex/pyprof/__init__.py": ""}
    else:
        tree["apex/optimizers/__init__.py"] = (
            f"{optimizers}\nfrom .fused_mixed_precision_lamb import FusedMixedPrecisionLamb\n"
        )
        tree["apex/optimizers/fused_mixed_precision_lamb.py"] = "class FusedMixedPrecisionLamb:\n    pass\n"
    if era == "2025":
        tree["apex/transformer/__init__.py"] = "from apex.normalization import MixedFusedLayerNorm\n"
    if era != "master":
        tree |= dict.fromkeys(_OLD_FILES, _OLD)
    return tree


def git(folder: Path, *arguments: str) -> str:
    """What git prints in ``folder``."""
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(folder: Path, contents: dict[str, str]) -> Path:
    """A git tree of one commit that holds ``contents``."""
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A stand-in for Apex")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files with their modes, but for git's own."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }
