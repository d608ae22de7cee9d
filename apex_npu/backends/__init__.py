# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One small protocol for all kinds of device."""

from apex_npu.backends.base import Backend
from apex_npu.backends.host_copy import HostCopy, HostFlag, number_on, numbers_on
from apex_npu.backends.registry import for_device, is_capturing

__all__ = ["Backend", "HostCopy", "HostFlag", "for_device", "is_capturing", "number_on", "numbers_on"]
