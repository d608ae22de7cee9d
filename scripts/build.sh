#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Builds the wheel apex-0.1+ascend: a patched Apex, and in it apex_npu with its C++ extension.
set -euo pipefail
unset CDPATH

usage() {
    cat << 'END'
usage: scripts/build.sh [--python=3.X|PATH] [--source DIR|URL] [--ref REF] [--wheel-dir DIR] [-- UPSTREAM'S OPTIONS]

  --python      the interpreter to build for, 3.10 or newer, with torch and setuptools (default: python3)
  --source      a local checkout of NVIDIA's Apex, as it is or patched, or a URL (default: upstream's, over the network)
  --ref         a commit, tag or branch, or an era: 2020, 2025, master (default: a checkout's own, or 2025)
  --wheel-dir   where the wheel goes (default: dist)
  -- ...        options of upstream's setup.py, where there is CUDA: --cpp_ext --cuda_ext

APEX_NPU_NO_EXT=1 leaves the C++ extension out: nothing is fused. MAX_JOBS=2 limits parallel compilations.
END
}

stop() { printf 'build.sh: %s\n' "$*" >&2; exit "${status:-1}"; }

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=python3 wheels=dist gen=() upstream=()
while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --) shift; for option in "$@"; do upstream+=("--config-settings=--build-option=$option"); done; break ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1${2+ }" in
        '--python ') python="$2" ;;
        '--wheel-dir ') wheels="$2" ;;
        '--source ' | '--ref ') gen+=("$1" "$2") ;;
        *) usage >&2; status=2 stop "unknown option, or one without its value: $1" ;;
    esac
    shift 2
done
case "$python" in [0-9]*.[0-9]*) python="python$python" ;; esac
python="$(command -v "$python")" || stop "there is no such interpreter: name one with --python=3.11 or --python=PATH"

# What would fail late, or not at all, is asked first. Isolated from PYTHONPATH and from the current folder.
"$python" -I - "$root" << 'END' || exit 1
import importlib.metadata, os, re, sys

def numbers(version):
    return tuple(map(int, re.findall(r"\d+", version)[:2]))

for name, least in (("Python", "3.10"), ("torch", "2.6"), ("setuptools", "77.0"), ("pip", "21.3")):
    there = [dist.version for dist in importlib.metadata.distributions(name=name)] if name != "Python" else [sys.version]
    if not there or numbers(there[0]) < numbers(least):
        sys.exit(f"build.sh: {sys.executable} needs {name} {least} or newer, and has {there[0] if there else 'none'}")
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import setup
reason = setup.skip_reason()
if reason and not setup.flag("APEX_NPU_NO_EXT"):
    sys.exit(f"build.sh: the C++ extension cannot be built: {reason}. {setup.WAY_OUT}")
END

mkdir -p "$wheels" && [ -w "$wheels" ] || stop "$wheels cannot be written: choose another --wheel-dir"
wheels="$(cd "$wheels" && pwd)"
work="$(mktemp -d "${TMPDIR:-/tmp}/apex_npu-build.XXXXXX")" || stop "no folder could be made in ${TMPDIR:-/tmp}: set TMPDIR"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
case "$work" in *:*) stop "the path $work has a colon in it, at which PYTHONPATH is cut: set TMPDIR to another" ;; esac

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
# Renamed in its place, so that no half of a wheel is ever there.
cp "$work/wheel/$wheel" "$wheels/.$wheel.$$" && mv -f "$wheels/.$wheel.$$" "$wheels/$wheel" ||
    { rm -f "$wheels/.$wheel.$$"; stop "$wheels/$wheel cannot be written: look at the free space"; }
printf '%s\n' "$wheels/$wheel"
