# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The interface to devices."""

from apex_npu.backends.devices import Backend, for_device, is_capturing
from apex_npu.backends.host_copy import HostCopy, number_on, numbers_on

__all__ = ["Backend", "HostCopy", "for_device", "is_capturing", "number_on", "numbers_on"]
