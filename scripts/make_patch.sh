#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# Writes patch/<era>/npu.patch from a checkout of its commit in which the patch has been edited: make_patch.sh DIR
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/pipeline.sh" make-patch "$@"
