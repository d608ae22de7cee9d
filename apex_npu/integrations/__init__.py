# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""amp and the fused optimizers inside training frameworks, one module per framework.

A module imports its framework, and nothing imports the module, so ``import apex_npu`` needs no framework. Each
framework is an extra of this package: ``pip install --no-build-isolation ".[timm]"`` in a clone.
"""
