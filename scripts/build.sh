#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Builds the wheel apex-0.1+ascend: a patched Apex, and in it apex_npu with its C++ extension.
set -euo pipefail

usage() {
    cat << 'END'
usage: scripts/build.sh [--python=3.X|PATH] [--source DIR|URL] [--ref REF] [--wheel-dir DIR] [-- UPSTREAM'S OPTIONS]

  --python      the interpreter to build for, 3.10 or newer, with torch and setuptools (default: python3)
  --source      a local checkout of NVIDIA's Apex, as it is or patched, or a URL (default: upstream's, over the network)
  --ref         a commit, tag or branch, or an era of patch/ERAS.toml (default: a checkout's own, or 2025)
  --wheel-dir   where the wheel goes (default: dist)
  -- ...        options of upstream's setup.py, where there is CUDA: --cpp_ext --cuda_ext

APEX_NPU_NO_EXT=1 leaves the C++ extension out: nothing is fused. MAX_JOBS=2 limits parallel compilations.
END
}

stop() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }
value() { [ "$#" -ge 2 ] || { usage >&2; exit 2; }; printf '%s' "$2"; }

unset CDPATH
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=python3
wheels=dist
gen=()
upstream=()
while [ "$#" -gt 0 ]; do
    case "$1" in
        --python=* | --source=* | --ref=* | --wheel-dir=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --python) python="$(value "$@")"; shift 2 ;;
        --source | --ref) gen+=("$1" "$(value "$@")"); shift 2 ;;
        --wheel-dir) wheels="$(value "$@")"; shift 2 ;;
        --) shift; for option in "$@"; do upstream+=("--config-settings=--build-option=$option"); done; break ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; printf 'build.sh: unknown option %s\n' "$1" >&2; exit 2 ;;
    esac
done
case "$python" in [0-9]*.[0-9]*) python="python$python" ;; esac
command -v "$python" > /dev/null || stop "there is no $python: name an interpreter with --python=3.11 or --python=PATH"
python="$(command -v "$python")"

# What would fail late, or not at all, is asked first. Isolated from PYTHONPATH and from the current folder.
"$python" -I - "$root" << 'END' || exit 1
import importlib.metadata, os, re, sys, sysconfig

def stop(said):
    sys.exit(f"build.sh: {said}")

if sys.version_info < (3, 10):
    stop(f"{sys.executable} is Python {sys.version.split()[0]}: 3.10 or newer is needed (--python=3.11)")
def version_of(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def number(version):
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
for name, least in (("torch", "2.6"), ("setuptools", "77.0"), ("pip", "21.3")):
    found = version_of(name)
    if found is None or number(found) < number(least):
        stop(f"{sys.executable} needs {name} {least} or newer, and has {found or 'none'}: {sys.executable} -m pip install '{name}>={least}'")
sites = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
for other in importlib.metadata.distributions(name="apex_npu"):
    if os.path.realpath(str(other.locate_file(""))) in sites:
        stop(f"apex_npu {other.version} is installed by itself in the environment of {sys.executable}, and the wheel brings its own: "
             f"uninstall it there ({sys.executable} -m pip uninstall apex_npu), or build with the Python of another environment")
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import setup
reason = setup.skip_reason()
if reason and not setup.flag("APEX_NPU_NO_EXT"):
    stop(f"the C++ extension cannot be built: {reason}. {setup.WAY_OUT}")
END

work="$(mktemp -d "${TMPDIR:-/tmp}/apex_npu-build.XXXXXX")" || stop "no folder could be made in ${TMPDIR:-/tmp}: set TMPDIR"
aside="$work"
trap 'rm -rf "$work" "$aside"' EXIT
case "$work" in *:*) stop "the path ${TMPDIR:-/tmp} has a colon in it, at which PYTHONPATH is cut: set TMPDIR to another" ;; esac
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir -p "$wheels" || stop "$wheels cannot be made: choose another --wheel-dir"
wheels="$(cd "$wheels" && pwd)"
[ -w "$wheels" ] || stop "$wheels cannot be written: choose another --wheel-dir"

pip_wheel() { # FOLDER TARGET [OPTION...]
    "$python" -I -m pip --disable-pip-version-check wheel --quiet --no-index --no-deps --no-build-isolation --no-cache-dir \
        --wheel-dir "$2" "${@:3}" "$1"
}

echo '==> upstream, patched'
PYTHON="$python" "$root/scripts/gen.sh" ${gen[@]+"${gen[@]}"} --out "$work/apex"

echo '==> apex_npu'
mkdir "$work/source" "$work/package"
# A copy: nothing is written into this checkout, and nothing old that was built in it gets into the wheel.
for name in apex_npu csrc patch setup.py pyproject.toml README.md LICENSE; do cp -R "$root/$name" "$work/source/"; done
find "$work/source" \( -name '_C.*.so' -o -name _C.torch_version -o -name __pycache__ \) -prune -exec rm -rf {} +
pip_wheel "$work/source" "$work/wheels" || stop "apex_npu did not build, see above"
"$python" -I -m zipfile -e "$work/wheels"/apex_npu-*.whl "$work/package"
cp "$root/LICENSE" "$work/package/apex_npu/LICENSE"

echo '==> the wheel'
APEX_NPU_CARRY=1 PYTHONPATH="$work/package" pip_wheel "$work/apex" "$work/wheel" ${upstream[@]+"${upstream[@]}"} ||
    stop "the patched Apex did not build, see above"
wheel="$(cd "$work/wheel" && echo apex-*.whl)"
aside="$(mktemp -d "$wheels/.apex_npu-wheel.XXXXXX")" || stop "$wheels cannot be written: look at the free space"
cp "$work/wheel/$wheel" "$aside/" && mv -f "$aside/$wheel" "$wheels/$wheel" ||
    stop "$wheels/$wheel cannot be written: look at the free space"
printf '%s\n' "$wheels/$wheel"
