# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reports on this machine, and on how the library uses it: ``python -m apex_npu doctor``.

``checks.examine`` returns the findings as data; ``precision.speed_of_low_precision`` measures the gain of a device by
float16 and bfloat16. Importing this module, and ``commands``, needs no torch.
"""
