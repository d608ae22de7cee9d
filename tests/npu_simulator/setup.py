# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Builds ``npu_simulator._C``, or takes it from ``build/cache``, if these sources were built for this torch before."""

import hashlib
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

EXTENSION = "npu_simulator._C"
HERE = Path(__file__).resolve().parent
# Commands that only describe the package: they work where there is no torch and no compiler.
METADATA_COMMANDS = {"clean", "dist_info", "egg_info", "sdist", "--help", "--name", "--version"}
COMPILE_ARGS = ["-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS", "-fvisibility=hidden", "-w"]


def sources() -> list[str]:
    """What is compiled, relative to this file's folder: the units include all other files, by the headers they need."""
    return sorted(path.as_posix() for path in Path("csrc").glob("unit_*.cpp"))


def compiler() -> str:
    """The C++ compiler: ``$CXX`` where it is set, else the first usual name that is on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    for name in chosen or ["c++", "g++", "clang++"]:
        if shutil.which(name):
            return name
    wanted = f"CXX={chosen[0]} is not there" if chosen else "none of c++, g++, clang++ is on PATH"
    sys.exit(f"npu_simulator: no C++ compiler found ({wanted}); install g++ or clang++, or name one with CXX=...")


def cache_folder(torch_version: str) -> Path:
    """Where the extension built from these sources, for this torch and this Python, is kept."""
    digest = hashlib.sha256(" ".join([*COMPILE_ARGS, sysconfig.get_config_var("EXT_SUFFIX") or ""]).encode())
    for path in [*sorted((HERE / "csrc").glob("*")), HERE / "setup.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return HERE / "build" / "cache" / f"torch-{torch_version}-{digest.hexdigest()[:16]}"


def build_options() -> dict:
    """The arguments of ``setup`` that build the extension."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"npu_simulator: torch cannot be imported while building ({error}), and the extension is compiled against "
            "it. Install torch first, then use: pip install --no-build-isolation ./tests/npu_simulator"
        )
    cached = cache_folder(torch.__version__)

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, with the cache, and a note of the torch that the extension was built for."""

        def build_extensions(self) -> None:
            target = Path(self.get_ext_fullpath(EXTENSION))
            kept = cached / target.name
            if kept.is_file():
                print(f"npu_simulator: using {kept}", flush=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(kept, target)
            else:
                os.environ.setdefault("CXX", compiler())
                try:
                    super().build_extensions()
                except (Exception, SystemExit) as error:
                    sys.exit(f"npu_simulator: the C++ extension did not compile, see above ({error})")
                self._keep(target, kept)
            target.with_name("_C.torch_version").write_text(f"{torch.__version__}\n", encoding="utf-8")

        @staticmethod
        def _keep(target: Path, kept: Path) -> None:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}")
                shutil.copy2(target, partial)
                partial.replace(kept)
            except OSError as error:
                print(f"npu_simulator: the build is not cached ({error})", flush=True)

    headers = Path(torch.__file__).with_name("include")

    def declares(header: str, *names: str) -> bool:
        text = (headers / header).read_text(encoding="utf-8") if (headers / header).is_file() else ""
        return all(name in text for name in names)

    # What older versions of torch lack.
    backend = ("getBackendOptions()", "void setTimeout(", "void abort()", "void shutdown()")
    known = {
        "C10D": torch.distributed.is_available(),
        "BACKEND_OPTIONS": declares("torch/csrc/distributed/c10d/Backend.hpp", *backend),
        "DEVICE_ALLOCATOR": declares("c10/core/CachingDeviceAllocator.h", "DeviceAllocator :"),
    }
    extension = cpp_extension.CppExtension(
        EXTENSION,
        sources(),
        include_dirs=[str(HERE / "csrc")],
        extra_compile_args=[*COMPILE_ARGS, *(f"-DNPU_SIMULATOR_{name}" for name, there in known.items() if there)],
    )
    ninja = cpp_extension.is_ninja_available()
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=ninja)}}


if __name__ == "__main__":
    os.chdir(HERE)
    wants_build = sys.argv[1:] and not METADATA_COMMANDS & set(sys.argv[1:])
    setup(**(build_options() if wants_build else {}))
