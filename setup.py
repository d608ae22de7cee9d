# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Builds the C++ extension ``apex_npu._C``; everything else about the package is in pyproject.toml.

``make wheel`` sets ``APEX_NPU_WHEEL=1``: the version then says for which torch the extension is compiled
(``0.1.0+torch2.13.0.cpu``), since it is used with this one alone.

The extension is optional. It is skipped, with one line that says why, when ``APEX_NPU_NO_EXT=1`` or when there is
nothing to compile it with; the package then fuses nothing. Variables: ``APEX_NPU_NO_EXT``, ``CXX``,
``MAX_JOBS`` (parallel compilations), ``DEBUG=1`` (``-O0 -g``).
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import setup

# Older ones stop at the license in pyproject.toml, and a new environment of Python 3.11 has 65. pip compares what
# build-system requires in isolated builds alone.
OLDEST_SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    sys.exit(
        f"setup.py: setuptools {OLDEST_SETUPTOOLS} or newer is needed, and this is {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )

EXTENSION = "apex_npu._C"
# Commands that only describe the package: they must work, in pip's isolated builds too, where there is no torch.
METADATA_COMMANDS = {"clean", "dist_info", "egg_info", "sdist", "--help", "--name", "--version"}
WAY_OUT = "To install apex_npu without its C++ extension set APEX_NPU_NO_EXT=1."


def flag(name: str) -> bool:
    """Whether the environment variable ``name`` is switched on."""
    return os.environ.get(name, "").strip().lower() not in {"", "0", "false", "no", "off"}


def sources() -> list[str]:
    """The C++ files, relative to this one's folder: absolute paths may hold spaces, which compilers' flags do not."""
    return sorted(path.as_posix() for path in Path("csrc").glob("**/*.cpp"))


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX`` where it is set, else the first usual name that is on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    names = chosen[:1] or (["cl"] if os.name == "nt" else ["c++", "g++", "clang++"])
    return next((name for name in names if shutil.which(name)), None)


def skip_reason() -> str | None:
    """Why no extension will be built, or None when one will be."""
    if flag("APEX_NPU_NO_EXT"):
        return "APEX_NPU_NO_EXT is set"
    if not sources():
        return "csrc/ holds no C++ source"
    if find_compiler() is None:
        wanted = f"CXX={os.environ['CXX']} is not there" if os.environ.get("CXX") else "install g++ or clang++"
        return f"no C++ compiler found ({wanted})"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"Python.h is not in {headers} (Debian and Ubuntu: install python3-dev)"
    return None


def build_options() -> dict:
    """The arguments of ``setup`` that build the extension."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"apex_npu: torch cannot be imported while building ({error}), and the C++ extension is compiled against "
            f"the torch it will run with. Install torch first, then use: pip install --no-build-isolation . {WAY_OUT}"
        )

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, which leaves a note of the torch it built for and names the way out when compilation fails."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # What another torch has left in build/ looks new, and the note below would say it is for this one.
            self.build_temp = str(Path(self.build_temp) / f"torch-{torch.__version__}")
            self.force = True

        def run(self) -> None:
            try:
                super().run()
            except (Exception, SystemExit) as error:
                sys.exit(f"apex_npu: the C++ extension did not compile, see above ({error}). {WAY_OUT}")
            # The note goes wherever the extension went: beside the sources (in place, editable) or into the wheel.
            built = Path(self.get_ext_fullpath(EXTENSION))
            built.with_name("_C.torch_version").write_text(f"{torch.__version__}\n", encoding="utf-8")

    if "CXX" not in os.environ and os.name != "nt":
        os.environ["CXX"] = find_compiler() or "c++"
    optimize = ["-O0", "-g"] if flag("DEBUG") else ["-O3", "-fno-math-errno", "-fno-trapping-math", "-g0"]
    optimize.append("-ffp-contract=off")  # the same bits whatever vectors a machine has
    extension = cpp_extension.CppExtension(
        EXTENSION,
        sources(),
        include_dirs=[str(Path("csrc").resolve())],  # absolute: ninja compiles in another folder
        extra_compile_args=[
            *optimize,
            "-DAT_PER_OPERATOR_HEADERS",
            "-fvisibility=hidden",
            "-fopenmp-simd",  # of OpenMP the pragmas for vectors alone; csrc/parallel.h has torch's threads
            *hardening()[0],
        ],
        extra_link_args=hardening()[1],
    )
    ninja = cpp_extension.is_ninja_available()
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=ninja)}}


def hardening() -> tuple[list[str], list[str]]:
    """Flags for compiler and linker (gcc, clang; Linux) that make errors in memory harder to exploit; and no symbols.

    Position-independent code, which a library needs anyway, is what -fPIE gives programs.
    """
    if not sys.platform.startswith("linux"):
        return [], []
    link = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack"]
    if flag("DEBUG"):
        return ["-fstack-protector-strong"], link
    # Undefined first: some distributions' compilers and Pythons define it themselves, and differently.
    return ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"], [*link, "-Wl,--strip-all"]


def version() -> str:
    """That of the package; of a wheel to be published, with the torch that its extension is compiled for."""
    text = Path("apex_npu/__init__.py").read_text(encoding="utf-8")
    plain = re.search(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)[1]
    if not flag("APEX_NPU_WHEEL") or skip_reason() is not None:
        return plain
    import torch

    return f"{plain}+torch{torch.__version__.replace('+', '.')}"


def options() -> dict:
    """What ``setup`` gets for the command on the command line."""
    found = {"version": version()}
    if not sys.argv[1:] or METADATA_COMMANDS & set(sys.argv[1:]):
        return found
    reason = skip_reason()
    if reason is None:
        return {**found, **build_options()}
    print(f"apex_npu: no C++ extension, nothing will be fused: {reason}.", flush=True)
    return found


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    # A torch_npu that is installed has no driver where images are built, and torch must be imported there all the same.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    setup(**options())
