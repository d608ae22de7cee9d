#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Checks all patches on the commits they are made from: check_patch.sh --source DIR. PYTHON names one that has torch.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/pipeline.sh" check "$@"
