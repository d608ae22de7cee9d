#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Builds the extension in build/NAME, with CXX and SANITIZERS, and tests it: test_build.sh PYTHON NAME [PYTEST OPTION...]
set -euo pipefail
python="$1" here="build/$2"
rm -rf "$here" && mkdir -p "$here" && cp -R apex_npu "$here/" && rm -f "$here"/apex_npu/_C.*
CFLAGS="${SANITIZERS:-}" LDFLAGS="${SANITIZERS:-}" PATH="$(dirname "$python"):$PATH" \
    "$python" setup.py -q build_ext --build-lib "$here" --build-temp "$here/objects" > "$here/log"
if [ -n "${SANITIZERS:-}" ]; then
    # torch's libraries know nothing of sanitizers, hence the preloading; Python leaks at exit by design. Kernels in
    # Triton read the last 16 bytes of a gradient whole, which an allocation of the CPU's may not have.
    echo 'interceptor_via_lib:libtriton' > "$here/suppressions"
    export ASAN_OPTIONS="detect_leaks=0:suppressions='$PWD/$here/suppressions'" OMP_NUM_THREADS=2
    LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)"
    export LD_PRELOAD
fi
run='import os, sys; sys.path[0] = os.path.abspath(sys.argv.pop(1)); import torch, apex_npu._C, pytest; sys.exit(pytest.main(sys.argv[1:]))'
"$python" -c "$run" "$here" -q -o 'pythonpath=tests tests/host_cann benchmarks benchmarks/studies' "${@:3}"
