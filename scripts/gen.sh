#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Clones Apex and patches the copy; --reverse takes the patch out again. scripts/gen.sh --help
set -euo pipefail
unset CDPATH
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Neither torch nor an installation is needed. PYTHONPATH would be cut at a colon in a name, and modules of the current
# folder, which may be a tree of others, are not imported.
run='import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module("apex_npu.compat.pipeline", None, "__main__", True)'
exec "${PYTHON:-python3}" -I -c "$run" "$root" gen "$@"
