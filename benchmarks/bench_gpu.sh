#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs the benchmarks of a GPU: goals, comparisons, sharded steps, tables and pictures.
#
#     [PYTHON=python3] benchmarks/bench_gpu.sh [MINUTES]
#
# MINUTES (default 15) is about the time of the rounds of all comparisons together. PYTHON has torch 2.11 or newer for
# CUDA, with its Triton; matplotlib draws the pictures. Results are in benchmarks/results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
minutes="${1:-15}" python="${PYTHON:-python3}"
[[ $minutes =~ ^[0-9]+$ ]] || { echo 'usage: [PYTHON=python3] benchmarks/bench_gpu.sh [MINUTES]' >&2; exit 2; }
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch, triton; assert torch.__version__ >= (2, 11), torch.__version__; torch.cuda.init()' ||
    { echo "bench_gpu.sh: $python needs torch 2.11 or newer for CUDA, with Triton, and a GPU; PYTHON=... names another" >&2; exit 2; }
# A goal that is missed is a result like any other.
"$python" benchmarks/goals.py --device cuda --write || [ $? -eq 1 ]
"$python" benchmarks/suite.py --device cuda --minutes "$minutes"
"$python" -m torch.distributed.run --standalone --nproc-per-node gpu benchmarks/studies/sharded_steps.py --device cuda
"$python" benchmarks/report.py
