#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Checks all patches on the commits they are made from: check_patch.sh --source DIR. PYTHON names one that has torch.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# As a package of its own: neither torch nor an installation is needed.
PYTHONPATH="$root/apex_npu" exec "${PYTHON:-python3}" -m pipeline check "$@"
