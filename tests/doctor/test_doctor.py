# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``doctor`` finds what is planted: a foreign extension, another apex, a torch_npu that does not load."""

import functools
import importlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import _extension
from apex_npu.__main__ import main
from apex_npu.doctor import checks, precision

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch):
    """Times are the machine's; and a test is to change nothing of the process."""
    speeds = {"linear layers": {torch.bfloat16: 2.0, torch.float16: 1.2}}
    speeds["convolutions"] = {torch.bfloat16: 2.0, torch.float16: 0.01}
    monkeypatch.setattr(checks, "speed_of_low_precision", lambda layers, _: speeds[layers])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"))


@pytest.fixture
def examine(capsys):
    """Run the command; the exit status, and the findings by section and name."""

    def run() -> tuple[int, dict[str, dict[str, dict[str, str]]]]:
        status = main(["doctor", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert (status == 1) == (report["broken"] > 0)
        sections = report["sections"]
        return status, {title: {row["name"]: row for row in rows} for title, rows in sections.items()}

    return run


def test_a_machine_on_which_all_is_well(examine, capsys):
    status, found = examine()
    assert found["Versions"]["torch"]["value"].startswith(torch.__version__)
    linear, convolutions = (found["Devices"][f"cpu, {layers}"]["value"] for layers in ("linear layers", "convolutions"))
    assert "(bfloat16: levels O4, O5; float16: levels O1, O2)" in linear
    assert "float16 0.01 times as fast as float32 (bfloat16: levels O4, O5)" in convolutions
    assert main(["doctor"]) == status
    text = capsys.readouterr().out
    for title in found:
        assert f"{title}\n" in text


def test_the_memory_of_a_parameter_with_each_choice(capsys):
    main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)["sections"]["Memory of a parameter"]
    numbers = ("16", "16", "14", "10", "8.06", "7.06", "18", "16", "8", "4")
    assert [row["name"] for row in rows] == [f"Adam, {n} bytes" for n in numbers]
    assert rows[1]["value"] == "O2, O5: model 2, gradient 4, float32 value 2, state 8"
    assert rows[4]["value"].endswith('state_dtype="int8": model 2, gradient 2, float32 value 2, state 2.06')


def test_an_extension_of_another_torch_is_broken(examine, monkeypatch, tmp_path):
    note = tmp_path / "_C.torch_version"
    note.write_text("2.0.1")
    monkeypatch.delenv("APEX_NPU_NO_EXT", raising=False)
    monkeypatch.setattr(_extension, "load", functools.partial(_extension.load, note))
    status, found = examine()
    finding = found["C++ extension"]["apex_npu._C"]
    assert status == 1
    assert finding["value"] == f"the C++ extension was built for torch 2.0.1, this is torch {torch.__version__}"
    # Of a checkout, since no index has the package; and pip would keep what is installed.
    assert finding["remedy"].endswith("pip install --no-build-isolation --no-deps --force-reinstall .")


@pytest.mark.parametrize("switched_off", [True, False])
def test_no_extension_is_worth_a_note(examine, monkeypatch, tmp_path, switched_off):
    monkeypatch.setenv("APEX_NPU_NO_EXT", "1" if switched_off else "0")
    monkeypatch.setattr(_extension, "load", functools.partial(_extension.load, tmp_path / "missing"))
    monkeypatch.setattr(_extension, "extension", None)
    _, found = examine()
    finding = found["C++ extension"]["apex_npu._C"]
    assert finding["state"] == "note"
    assert ("APEX_NPU_NO_EXT" in finding["value"]) == switched_off
    assert found["Kernels"]["cpu"]["state"] == "note"


def test_another_apex_is_in_the_way(examine, monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    status, found = examine()
    finding = found["The name apex"]["apex"]
    assert status == 1
    assert str(tmp_path) in finding["value"]
    assert "python -m apex_npu run --force" in finding["remedy"]


def test_a_torch_npu_that_does_not_load(examine, monkeypatch, tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    importlib.invalidate_caches()
    status, found = examine()
    finding = found["Versions"]["import torch_npu"]
    assert status == 1
    assert finding["value"] == "ImportError: libhccl.so: cannot open"
    assert "set_env.sh" in finding["remedy"]


@pytest.mark.parametrize(
    ("own", "torchs", "wanted"),
    [
        ("3.0.0", "3.0.1+cpu", None),
        ("3.0.0.post1", "3.0.0", None),
        ("3.0.0", "3.1.0", "3.0.*"),
        ("2.10.0", "2.1.0", "2.10.*"),
    ],
)
def test_a_torch_npu_of_another_torch(own, torchs, wanted, examine, monkeypatch, tmp_path):
    (tmp_path / "torch_npu-0.dist-info").mkdir()
    (tmp_path / "torch_npu-0.dist-info" / "METADATA").write_text(f"Name: torch_npu\nVersion: {own}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "__version__", torchs)
    _, found = examine()
    finding = found["Versions"].get("torch_npu and torch")
    assert (finding is None) == (wanted is None)
    assert finding is None or finding["remedy"].endswith(f" pip install torch=={wanted}")


def test_a_torch_npu_that_ends_the_process(examine, monkeypatch, tmp_path):
    # As torch_npu 2.14 does beside a torch 2.14 that is built for CUDA.
    said = "terminate called after an exception\n  what():  Duplicated key 'size' found\nat"
    program = f"import os, signal, sys\nsys.stderr.write({said!r})\nos.kill(os.getpid(), signal.SIGABRT)"
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    importlib.invalidate_caches()
    status, found = examine()
    finding = found["Versions"]["import torch_npu"]
    assert status == 1
    assert finding["value"] == (
        "RuntimeError: a process that imports it ends with SIGABRT: Duplicated key 'size' found"
    )
    assert finding["remedy"].startswith("it needs a torch for the CPU, this one is for CUDA 13.0: pip install torch==")


def test_a_torch_that_is_too_old(examine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    status, found = examine()
    assert status == 1
    assert found["Versions"]["torch"]["remedy"] == "torch 2.6 or newer is needed: pip install --upgrade torch"


def test_it_says_which_versions_of_torch_have_been_tested(examine, monkeypatch):
    _, found = examine()
    assert "within the tested releases, torch 2.6 to 2.14" in found["Versions"]["torch"]["value"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| torch | 2.6 to 2.14 " in readme
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    finding = examine()[1]["Versions"]["torch"]
    assert finding["state"] == "note"
    assert finding["value"].endswith("newer than the tested releases, torch 2.6 to 2.14")


def test_a_device_that_fails_is_a_finding(examine, monkeypatch):
    def fail(*_):
        raise RuntimeError("driver\nand more")

    monkeypatch.setattr(checks, "speed_of_low_precision", fail)
    status, found = examine()
    assert status == 1
    assert found["Devices"]["cpu, convolutions"]["value"] == "RuntimeError: driver"


def test_speeds_are_ratios_of_the_shortest_times(monkeypatch):
    # Seconds of each run, by dtype.
    seconds = {torch.float32: iter([4.0, 3.0, 9, 9, 9]), torch.bfloat16: iter([2.0, 1.5, 9, 9, 9])}
    seconds[torch.float16] = itertools.repeat(90.0)
    monkeypatch.setattr(precision, "_work", lambda _, dtype, *rest: functools.partial(lambda dtype: dtype, dtype))
    monkeypatch.setattr(precision, "_seconds", lambda work, device: next(seconds[work()]))
    speeds = precision.speed_of_low_precision("convolutions", "cpu")
    assert speeds[torch.bfloat16] == 2.0
    assert speeds[torch.float16] < 0.05
    assert precision.native_dtypes(speeds) == [torch.bfloat16]


def test_a_dtype_that_the_device_refuses(monkeypatch):
    make = precision._work

    def refuse(layers, dtype, *rest):
        if dtype == torch.float16:
            raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")
        return make(layers, dtype, *rest)

    monkeypatch.setattr(precision, "_work", refuse)
    threads = torch.get_num_threads()
    speeds = precision.speed_of_low_precision("convolutions", "cpu")
    assert speeds[torch.float16] == 0.0
    assert speeds[torch.bfloat16] > 0.0
    assert torch.get_num_threads() == threads


# Operations in a second of float32 and of half precision, as of an H200, and of a simulated device.
@pytest.mark.parametrize(("single", "half"), [(5e13, 6e14), (5e9, 5e9)])
@pytest.mark.parametrize("layers", precision.LAYERS)
def test_launches_do_not_hide_what_a_fast_device_computes(monkeypatch, layers, single, half):
    launches, rates, make, dtypes, computed = 1e-4, {torch.float32: single}, precision._work, {}, []

    def work(layers, dtype, *rest):
        run = make(layers, dtype, *rest)
        dtypes[run] = dtype
        return run

    def seconds(run, device):
        with FlopCounterMode(display=False) as counter:
            run()
        computed.append(counter.get_total_flops() / rates.get(dtypes[run], half))
        return launches + computed[-1]

    monkeypatch.setattr(precision, "_work", work)
    monkeypatch.setattr(precision, "_seconds", seconds)
    speeds = precision.speed_of_low_precision(layers, "meta")
    assert speeds == pytest.approx(dict.fromkeys((torch.bfloat16, torch.float16), half / single), rel=0.25)
    assert sum(computed) < 2.0


@pytest.mark.slow
def test_on_the_simulated_npu():
    pytest.importorskip("npu_simulator")
    command = [sys.executable, "-m", "npu_simulator", "-m", "apex_npu", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    devices = [row["name"] for row in json.loads(done.stdout)["sections"]["Devices"]]
    assert "npu:0" in devices
    assert "npu, convolutions" in devices


def test_it_ends_quietly_if_nobody_reads_on():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "apex_npu", "doctor"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", ["doctor", "migrate --list-rules"])
def test_commands_work_without_an_output(command):
    command = f"{shlex.quote(sys.executable)} -m apex_npu {command} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1)  # of doctor, if the machine lacks something
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("last", ["sys.stdout.close()", "sys.stdout = types.SimpleNamespace(write=print)"])
def test_scripts_may_close_or_replace_their_output(tmp_path, last):
    (tmp_path / "script.py").write_text(f"import sys, types\nprint('done')\n{last}\n")
    outcomes = []
    for prefix in ([], ["-m", "apex_npu", "run"]):
        command = [sys.executable, *prefix, str(tmp_path / "script.py")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        outcomes.append((done.returncode, done.stdout, done.stderr))
    assert outcomes[0] == outcomes[1]


def test_it_starts_without_torch():
    program = 'import sys; sys.modules["torch"] = None; from apex_npu.__main__ import main; sys.exit(main(["doctor"]))'
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "torch 2.6 or newer is needed" in done.stderr
