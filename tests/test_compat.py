# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``install_as_apex``: the old names, in interpreters of their own; and ``python -m apex_npu run``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apex_npu import compat

ROOT = Path(__file__).parents[1]


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an interpreter, with ``path`` in front of this package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), str(ROOT)])}
    environment.pop("APEX_NPU_TEST_DEVICE", None)
    command = [sys.executable, "-W", "error::DeprecationWarning:apex_npu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd or ROOT)


def output(program: str, path: Path | None = None) -> str:
    result = python("-c", program, path=path)
    assert result.returncode == 0, result.stderr
    return result.stdout


def package(folder: Path, name: str, *submodules: str, source: str = "") -> Path:
    """A third-party package installed in ``folder``."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    for submodule in submodules:
        (folder / name / f"{submodule}.py").write_text("")
    return folder


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.slow
def test_every_old_name_imports_and_shows_ours():
    program = """
import importlib, sys
import apex_npu
from apex_npu.compat import MODULES
apex_npu.install_as_apex()
for old, ours in MODULES.items():
    module = importlib.import_module(old)
    assert module.__name__ == old and sys.modules[old] is module, old
    target = importlib.import_module(ours)
    for name in getattr(target, "__all__", []):
        if f"{old}.{name}" not in MODULES:
            assert getattr(module, name) is getattr(target, name), (old, name)
print(len(MODULES))
"""
    assert int(output(program)) == len(compat.MODULES)


@pytest.mark.slow
def test_imports_as_scripts_write_them():
    program = """
import apex_npu
apex_npu.install_as_apex()
import importlib.util
import apex
import apex.amp as amp2
import apex.parallel.LARC as larc_module
from apex.fp16_utils import *
from apex import amp, optimizers, parallel, fp16_utils, normalization
from apex.amp import _amp_state
from apex.amp._amp_state import _amp_state as state, maybe_print, master_params, warn_or_err
from apex.amp.frontend import initialize
from apex.amp.handle import disable_casts, scale_loss
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from apex.amp.opt import OptimWrapper
from apex.amp.scaler import LossScaler
from apex.contrib.combine_tensors import combine_npu
from apex.fp16_utils.fp16util import network_to_half as network_to_half2
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization.fused_layer_norm import FusedLayerNorm
from apex.optimizers import FusedAdam, NpuFusedSGD
from apex.optimizers.npu_fused_bert_adam import SCHEDULES, NpuFusedBertAdam
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
from apex.parallel.distributed import flat_dist_call
from apex.parallel.LARC import LARC
import change_data_ptr

assert "state_dict" in amp.__dict__ and amp is amp2 is apex.amp
assert _amp_state is state is amp._amp_state and apex.amp.frontend.initialize is amp.initialize
assert amp.scaler.LossScaler is LossScaler and amp.opt.OptimWrapper is OptimWrapper
assert larc_module.LARC is LARC is parallel.LARC.LARC
assert apex.optimizers.NpuFusedSGD is NpuFusedSGD is apex_npu.optimizers.NpuFusedSGD
assert network_to_half is network_to_half2 and callable(change_data_ptr.change_data_ptr)
assert importlib.util.find_spec("apex") is not None  # how transformers asks
assert not multi_tensor_applier.available
try:
    import apex.contrib.xentropy
except ModuleNotFoundError as error:
    assert error.name == "apex.contrib.xentropy", error.name
try:
    from apex.optimizers import NpuFusedSgd
except ImportError as error:
    print(error)
"""
    assert "cannot import name 'NpuFusedSgd' from 'apex.optimizers'" in output(program)


@pytest.mark.slow
def test_aliases_show_the_same_objects():
    program = """
import importlib
import apex_npu
from apex_npu.parallel import LARC
from apex_npu import fp16_utils
from apex_npu.compat.table import ALIASES
import apex_npu.compat.parallel.larc as larc, apex_npu.compat.fp16_utils as utils
assert larc.LARC is LARC is apex_npu.parallel.LARC and fp16_utils is utils
for name, home in ALIASES.items():
    alias, home = importlib.import_module(name), importlib.import_module(home)
    assert all(getattr(alias, public) is getattr(home, public) for public in getattr(home, "__all__", ())), name
try:
    import apex_npu.parallel.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    assert output(program).startswith("No module named 'apex_npu.parallel.nothing'")


@pytest.mark.slow
def test_uninstall_removes_every_module():
    program = """
import sys
import apex_npu
before = set(sys.modules), list(sys.path)
apex_npu.install_as_apex()
apex_npu.install_as_apex()  # again: nothing new
from apex import amp
assert len(sys.path) == len(before[1]) + 1
apex_npu.uninstall_apex()
apex_npu.uninstall_apex()
assert sys.path == before[1]
assert not [name for name in sys.modules if name.partition(".")[0] in ("apex", "apex_C", "change_data_ptr")]
assert amp.initialize is apex_npu.amp.initialize
try:
    import apex
except ModuleNotFoundError:
    print("gone")
"""
    assert output(program) == "gone\n"


@pytest.mark.slow
def test_pickles_with_old_names_load():
    program = """
import pickle
import apex_npu
apex_npu.install_as_apex()
# The pickle of apex.amp.scaler.LossScaler("dynamic") with its scale at 512, as NVIDIA's Apex writes it.
pickled = (b"\\x80\\x03capex.amp.scaler\\nLossScaler\\nq\\x00)\\x81q\\x01}q\\x02("
           b"X\\x07\\x00\\x00\\x00dynamicq\\x03\\x88"
           b"X\\x0b\\x00\\x00\\x00_loss_scaleq\\x04G@\\x80\\x00\\x00\\x00\\x00\\x00\\x00X\\x0f\\x00\\x00\\x00_max_loss_scaleq\\x05"
           b"GAp\\x00\\x00\\x00\\x00\\x00\\x00X\\x0f\\x00\\x00\\x00_min_loss_scaleq\\x06NX\\x0e\\x00\\x00\\x00_scale_seq_lenq\\x07"
           b"M\\xd0\\x07X\\n\\x00\\x00\\x00_unskippedq\\x08K\\x05X\\r\\x00\\x00\\x00_has_overflowq\\t\\x89ub.")
scaler = pickle.loads(pickled)
print(scaler.dynamic, scaler.loss_scale(), scaler._unskipped, scaler._max_loss_scale)
"""
    assert output(program).split() == ["True", "512.0", "5", "16777216.0"]


# ------------------------------------------------------------------------------------------------------ third-party one

REFUSED = """
import sys
import apex_npu
before = set(sys.modules), list(sys.path)
try:
    apex_npu.install_as_apex()
except RuntimeError as error:
    print(error)
assert sys.path == before[1]
assert not {name for name in set(sys.modules) - before[0] if name.partition(".")[0] == "apex"}
"""


def test_a_real_apex_is_not_hidden_unless_forced(tmp_path):
    package(tmp_path, "apex", "amp", "optimizers", "transformer", source="from . import amp, transformer")
    said = output(REFUSED, tmp_path)
    assert said.startswith(f"apex is installed ({tmp_path}/apex/__init__.py), another package of this name. ")
    assert "force=True" in said
    program = """
import sys
import apex, apex.optimizers
theirs = apex
import apex_npu
try:
    apex_npu.install_as_apex()
except RuntimeError as error:
    assert "has been imported already" in str(error)
assert sys.modules["apex"] is theirs
apex_npu.install_as_apex(force=True)
from apex import amp
assert amp.initialize is apex_npu.amp.initialize
try:
    import apex.transformer
except ModuleNotFoundError as error:
    assert error.name == "apex.transformer"
apex_npu.uninstall_apex()
import apex, apex.transformer
assert apex is theirs and "apex.optimizers" in sys.modules and not hasattr(apex.amp, "initialize")
print("theirs again")
"""
    assert output(program, tmp_path) == "theirs again\n"


@pytest.mark.parametrize("name", ["apex_C", "change_data_ptr"])  # the first may be that of NVIDIA's Apex
def test_a_foreign_module_beside_apex_is_not_hidden(tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text("")
    assert output(REFUSED, tmp_path).startswith(f"{name} is installed ({path}), another package of this name. ")


@pytest.mark.slow
def test_a_mere_folder_is_no_obstacle(tmp_path):
    (tmp_path / "apex" / "apex").mkdir(parents=True)  # a checkout of Apex beside the script
    program = "import apex_npu; apex_npu.install_as_apex(); from apex import amp; print(amp.initialize.__module__)"
    assert output(program, tmp_path) == "apex_npu.amp.frontend\n"


PATCHED = """
from apex_npu.compat.apex_hook import serve
serve(__file__)
__apex_npu__ = True
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import apex"])
def test_a_patched_apex_is_left_in_place(tmp_path, first):
    package(tmp_path, "apex", "amp", "transformer", source=PATCHED)
    (tmp_path / "apex_C.py").write_text("")  # upstream's, built with --cpp_ext
    program = f"""
import sys
{first}
import apex_npu
path = list(sys.path)
apex_npu.install_as_apex()
import apex, apex.transformer, apex.amp.handle
assert apex.__file__.startswith({str(tmp_path)!r}) and sys.path == path
apex_npu.uninstall_apex()
print(sys.modules["apex"] is apex, apex.amp.initialize.__module__)
"""
    assert output(program, tmp_path) == "True apex_npu.amp.frontend\n"


@pytest.mark.slow
def test_a_patched_apex_that_fails_to_import_removes_its_finder(tmp_path):
    package(tmp_path, "apex", source=PATCHED)
    program = """
import importlib, sys
import apex_npu  # which has a finder of its own
finders = list(sys.meta_path)
sys.modules["apex_npu.compat.parallel"] = None  # so that importing it fails
try:
    import apex
except ImportError as error:
    assert "apex_npu.compat.parallel" in str(error), error
assert sys.meta_path == finders
print([name for name in sys.modules if name.partition(".")[0] == "apex"])
del sys.modules["apex_npu.compat.parallel"]
import apex.parallel
print(apex.parallel.__file__ == sys.modules["apex_npu.compat.parallel"].__file__)
"""
    assert output(program, tmp_path) == "[]\nTrue\n"


# ---------------------------------------------------------------------------------------------- python -m apex_npu run


def test_run_gives_a_script_what_python_would(tmp_path):
    script = tmp_path / "train.py"
    (tmp_path / "helper.py").write_text("VALUE = 5")
    script.write_text(
        "import sys, helper\nfrom apex import amp\n"
        "print(__name__, __file__, sys.argv, helper.VALUE, amp.initialize.__module__)\nsys.exit(3)"
    )
    result = python("-m", "apex_npu", "run", str(script), "--force", "-x", "1")
    assert result.returncode == 3, result.stderr
    assert result.stdout.split(" ", 2)[:2] == ["__main__", str(script)]
    assert f"['{script}', '--force', '-x', '1'] 5 apex_npu.amp.frontend" in result.stdout


@pytest.mark.slow
def test_run_passes_on_errors_and_modules(tmp_path):
    (tmp_path / "tool.py").write_text("import sys, apex.amp\nprint(sys.argv[1:])\nraise KeyError('mine')")
    result = python("-m", "apex_npu", "run", "-m", "tool", "a", path=tmp_path)
    assert result.returncode == 1
    assert result.stdout == "['a']\n"
    assert result.stderr.endswith("KeyError: 'mine'\n")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_no_error(option, capsys):
    from apex_npu.__main__ import main

    commands = ("run", "compare", "migrate", "patch", "convert", "doctor", "bench")
    for arguments, said in (
        ([option], [f"    {command} " for command in commands]),
        (["run", option], ["--force", "--host", "--explain-overflows", "--device", "-m "]),
        (["convert", option], ["Show what is in a checkpoint", "--to {apex,torch}"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert [words for words in said if words not in printed] == []


@pytest.mark.slow
def test_run_refuses_beside_a_real_apex_unless_forced(tmp_path):
    package(tmp_path, "apex", "amp")
    (tmp_path / "train.py").write_text("from apex import amp\nprint(hasattr(amp, 'initialize'))")
    result = python("-m", "apex_npu", "run", "train.py", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "--force" in result.stderr
    assert python("-m", "apex_npu", "run", "--force", "train.py", cwd=tmp_path).stdout == "True\n"


@pytest.mark.slow
def test_spawned_processes_have_the_names_too(tmp_path):
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "import apex.amp\nfrom apex.amp._amp_state import _amp_state\nimport apex_C, change_data_ptr\n"
        "def work(queue):\n"
        "    modules = apex_C.flatten.__module__, change_data_ptr.change_data_ptr.__module__\n"
        "    queue.put((apex.amp.initialize.__module__, *modules))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=work, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(process.exitcode, *queue.get())\n"
    )
    from apex_npu.fusion.storage import change_data_ptr

    result = python("-m", "apex_npu", "run", "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    modules = ["apex_npu.amp.frontend", "apex_npu.compat.flattening", change_data_ptr.__module__]
    assert result.stdout.split() == ["0", *modules]


@pytest.mark.slow
def test_the_name_has_the_metadata_of_a_distribution(tmp_path):
    """transformers takes a package without metadata for one that is not installed."""
    code = (
        "import importlib.metadata, sys\n"
        "def look():\n"
        "    found = importlib.metadata.packages_distributions().get('apex')\n"
        "    try:\n"
        "        return found, importlib.metadata.version('apex')\n"
        "    except importlib.metadata.PackageNotFoundError:\n"
        "        return found, None\n"
        "import apex_npu\n"
        "print(look())\n"
        "apex_npu.install_as_apex()\n"
        "print(look())\n"
        "apex_npu.uninstall_apex()\n"
        "print(look())\n"
    )
    (tmp_path / "look.py").write_text(code)
    result = python("look.py", cwd=tmp_path)
    assert result.stdout.splitlines() == ["(None, None)", "(['apex'], '0.1')", "(None, None)"], result.stderr


MULTIPROC = ("-m", "apex_npu", "run", "-m", "apex.parallel.multiproc")


@pytest.mark.slow
def test_the_launcher_starts_its_processes_as_it_was_started(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nfrom apex import amp\nprint(amp.initialize.__module__, sys.argv[1:])"
    )
    for given, got in (
        (["--rank", "x", "--world-size", "2"], "['--rank', '{}', '--world-size', '2']"),
        (["--world-size", "2", "--rank"], "['--world-size', '2', '--rank', '{}']"),
    ):
        result = python(*MULTIPROC, "train.py", *given, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        for rank, printed in enumerate((result.stdout, (tmp_path / "GPU_1.log").read_text())):
            assert printed == f"apex_npu.amp.frontend {got.format(rank)}\n"


@pytest.mark.slow
def test_the_launcher_fails_where_a_process_fails(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nsys.exit(3 * int(sys.argv[-1]))")
    assert python(*MULTIPROC, "train.py", "--world-size", "2", cwd=tmp_path).returncode == 3


def test_patterns_of_public_scripts():
    names = ["modelzoo", "timm", "dcgan", "private_scales", "bert", "moving_average", "imagenet"]
    result = python("-m", "apex_npu", "run", str(ROOT / "tests" / "old_scripts" / "patterns.py"), *names)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == names


def test_the_page_for_those_who_come_from_apex_names_what_is_there():
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    left = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    named = {name for cell in left for name in re.findall(r"`((?:apex|change_data_ptr)[\w.]*)`", cell)}
    assert len(named) >= 10
    assert named <= set(compat.MODULES)
