# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Builds the libraries for the torch and the torch_npu of this environment, once, into a folder that is kept."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

CSRC = Path(__file__).resolve().parent / "csrc"
# libascendcl.so; everything else needs torch's headers, and is libopapi.so.
RUNTIME = ("injection", "memory", "report", "runtime", "stream")
# What torch_npu links against as well: empty, but for the library that they bring along.
FACADES = {
    "libacl_tdt_channel.so": "libascendcl.so",
    "libge_runner.so": "libascendcl.so",
    "libgraph.so": "libascendcl.so",
    "libhccl.so": "libopapi.so",
    "libacl_op_compiler.so": "libopapi.so",
}
LIBRARIES = ("libascendcl.so", "libopapi.so", *FACADES)
# torch_npu looks for these in CANN's folder, and warns where they are not.
CANN_FOLDERS = ("opp", "compiler", "runtime")
COMPILE_ARGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", "-Wno-sign-compare")


class BuildError(RuntimeError):
    """The libraries could not be built: what is missing, and how to get it."""


def build() -> Path:
    """The folder with the libraries; compiles them where this has not been done for these sources and versions.

    Builds are kept in ``$HOST_CANN_BUILD``, or ``host_cann`` in the user's cache. Another process that builds the same
    is waited for; a build that is broken off leaves nothing that a later one would take for finished. The next removes
    what it has left.

    Raises:
        BuildError: something is missing, does not compile, or cannot be written.
    """
    torch, torch_npu, compiler = _package("torch"), _package("torch_npu"), _compiler()
    root = _cache()
    folder = root / _digest(compiler)
    if folder.is_dir():
        return folder
    with _locked(root, folder.name):
        if not folder.is_dir():
            _say(f"building the libraries in {folder} (about 2 minutes, once)")
            begun = time.monotonic()
            prefix = f"building-{folder.name}-"
            for broken_off in root.glob(f"{prefix}*"):
                shutil.rmtree(broken_off, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=prefix) as unfinished:
                finished = _Builder(Path(unfinished), torch, torch_npu, compiler).libraries()
                finished.rename(folder)
            _say(f"built in {time.monotonic() - begun:.0f} s")
    return folder


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Inside, no other process builds ``name``; the cache is made where there is none."""
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(root / f"{name}.lock", "w"))
        except OSError as error:
            raise BuildError(
                f"host_cann: builds cannot be kept in {root} ({error}); name a folder that can be written with "
                "HOST_CANN_BUILD=..."
            ) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unavailable() -> str | None:
    """Why there can be no host CANN in this environment; None: there can."""
    try:
        _package("torch"), _package("torch_npu"), _compiler()
    except BuildError as error:
        return str(error)
    return None


def _say(text: str) -> None:
    print(f"host_cann: {text}", file=sys.stderr, flush=True)


def _cache() -> Path:
    if chosen := os.environ.get("HOST_CANN_BUILD"):
        return Path(chosen).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "host_cann"


def _package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"host_cann: {name} is not installed in this environment; {_HOW_TO_INSTALL[name]}")
    folder = Path(spec.submodule_search_locations[0])
    if name == "torch_npu" and not (folder / "include/third_party/acl/inc").is_dir():
        raise BuildError(
            f"host_cann: torch_npu in {folder} has no include/third_party/acl, as the vendor's wheel has (is it a "
            f"stand-in of that name?); {_HOW_TO_INSTALL[name]}"
        )
    return folder


_HOW_TO_INSTALL = {
    "torch": "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
    "torch_npu": "pip install --no-deps torch_npu==2.13.0 (a wheel of torch's own version; x86-64 Linux)",
}


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    for program in (command[0], "nm"):
        if shutil.which(program) is None:
            raise BuildError(
                f"host_cann: there is no {program} on PATH, and the libraries are C++; install g++ 11 or newer with "
                "binutils (apt-get install g++), or name a compiler with CXX=..."
            )
    return command


def _digest(compiler: list[str]) -> str:
    """Of all that the libraries depend on."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout
    digest = hashlib.sha256(shlex.join(compiler).encode() + version)
    for package in ("torch", "torch_npu"):
        digest.update(f"{package} {importlib.metadata.version(package)}\0".encode())
    for path in [*sorted(CSRC.iterdir()), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class _Builder:
    """One build: objects in ``work``, libraries in a folder inside."""

    def __init__(self, work: Path, torch: Path, torch_npu: Path, compiler: list[str]) -> None:
        self.work = work
        self.torch = torch
        self.torch_npu = torch_npu
        self.out = work / "libraries"
        self.compiler = [
            *compiler,
            *COMPILE_ARGS,
            f"-I{torch_npu}/include/third_party/acl/inc",
            f"-I{torch_npu}/include",
        ]
        self.with_torch = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]

    def libraries(self) -> Path:
        self.compiler.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(_has_newer_strings(self.torch))}")
        for name in CANN_FOLDERS:
            (self.out / name).mkdir(parents=True)
        names = sorted(path.stem for path in CSRC.glob("*.cpp"))
        operators = [name for name in names if name not in RUNTIME]
        header = self._precompile_header()
        options = {name: ["-include", str(header), *self.with_torch] for name in operators}
        workers = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            objects = list(pool.map(lambda name: self._compile(CSRC / f"{name}.cpp", *options.get(name, [])), names))
        by_name = dict(zip(names, objects, strict=True))

        runtime = [by_name[name] for name in RUNTIME]
        torch_libraries = [f"-L{self.torch}/lib", "-ltorch_cpu", "-lc10"]
        self._link("libascendcl.so", *runtime, "-lpthread")
        self._link("libopapi.so", *(by_name[name] for name in operators), "-l:libascendcl.so", *torch_libraries, "-lrt")
        # Again, with what the two lack of what torch_npu links against.
        self._link("libascendcl.so", *runtime, self._stubs(), "-lpthread")
        for name, brings in FACADES.items():
            self._link(name, "-Wl,--no-as-needed", f"-l:{brings}")
        return self.out

    def _precompile_header(self) -> Path:
        """ATen's, which all operators include first: reading it takes longer than all that follows."""
        header = self.work / "torch.h"
        header.write_text("#include <ATen/ATen.h>\n")
        self._run(*self.compiler, *self.with_torch, "-x", "c++-header", str(header), "-o", f"{header}.gch")
        return header

    def _compile(self, source: Path, *options: str) -> Path:
        made = self.work / f"{source.stem}.o"
        self._run(*self.compiler, *options, "-c", str(source), "-o", str(made))
        return made

    def _link(self, name: str, *parts: Path | str) -> None:
        where = ["-o", str(self.out / name), f"-L{self.out}", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
        self._run(*self.compiler, "-shared", *where, *map(str, parts))

    def _stubs(self) -> Path:
        """Stubs for functions that torch_npu links against and that are not implemented; a call names the function."""
        users = [*self.torch_npu.glob("_C*.so"), *(self.torch_npu / "lib").glob("*.so")]
        missing = _symbols("--undefined-only", *users) - _symbols("--defined-only", *self.out.glob("*.so"))
        names = sorted(name for name in missing if name.startswith(("acl", "rt", "Msprof", "Hccl")) and "_" not in name)
        stubs = "".join(f'int {name}() {{ return host_cann::not_implemented("{name}"); }}\n' for name in names)
        source = self.work / "stubs.cpp"
        source.write_text(f'#include "{CSRC}/report.h"\nextern "C" {{\n{stubs}}}\n')
        return self._compile(source)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.stderr:
            print(done.stderr, file=sys.stderr)
        if done.returncode != 0:
            raise BuildError(f"host_cann: this failed, with the errors above: {shlex.join(command)}")


def _has_newer_strings(torch: Path) -> bool:
    """Whether torch is built with the std::string of C++11, as its wheels are since 2.7: those of 2.6 are not."""
    names = _symbols("--defined-only", torch / "lib" / "libc10.so")
    return any(name.startswith("_ZN3c10") and "__cxx11" in name for name in names)


def _symbols(which: str, *files: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, *map(str, files)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line and not line.endswith(":")}
