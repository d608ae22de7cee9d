#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The cuda part of the benchmarks: goals, baselines, plots. Needs this repository, and a Python with torch >= 2.11 for
# CUDA and triton; matplotlib for the plots. Writes benchmarks/results/{cuda,goals_cuda,sharded_*_cuda}.csv and the pictures of cuda.
set -euo pipefail

usage() {
    echo 'usage: benchmarks/bench_gpu.sh [--minutes N] [--python PROGRAM]'
    echo '  --minutes N        for the rounds of all comparisons together, about (default 15)'
    echo '  --python PROGRAM   the interpreter that has torch (default python3)'
}
stop() { echo "bench_gpu.sh: $*" >&2; exit 2; }

minutes=15
python=python3
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --minutes) [ $# -ge 2 ] || stop '--minutes needs a number'; minutes="$2"; shift 2 ;;
        --python) [ $# -ge 2 ] || stop '--python needs a program'; python="$2"; shift 2 ;;
        *) usage >&2; stop "unknown argument '$1'" ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" - << 'CHECK' || exit 2
import sys
try:
    import torch
except ImportError:
    sys.exit("bench_gpu.sh: this Python has no torch; install torch >= 2.11 for CUDA, or name another with --python")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(f"bench_gpu.sh: torch >= 2.11 is needed, this is {torch.__version__}")
if not torch.cuda.is_available():
    sys.exit(f"bench_gpu.sh: torch {torch.__version__} finds no CUDA device (torch.cuda.is_available() is False)")
try:
    import triton
except ImportError:
    sys.exit("bench_gpu.sh: triton is missing; it comes with torch for CUDA on Linux, or install it with pip")
from apex_npu._extension import extension
built = "with" if extension is not None else "without (scripts/setup.sh builds it)"
print(f"{built} the C++ extension")
print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
CHECK
# A goal that is missed is a result like any other.
"$python" benchmarks/goals.py --device cuda --write || [ $? -eq 1 ]
"$python" benchmarks/suite.py --device cuda --minutes "$minutes"
"$python" -m torch.distributed.run --standalone --nproc-per-node gpu benchmarks/sharded_steps.py --device cuda
"$python" benchmarks/report.py
