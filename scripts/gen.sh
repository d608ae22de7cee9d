#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Clones Apex and patches the copy; --reverse takes the patch out again. scripts/gen.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/pipeline.sh" gen "$@"
