# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for the package of this name: small images, a small network, no files."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
