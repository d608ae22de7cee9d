# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What this machine has, and what the library makes of it: ``python -m apex_npu doctor``.

``checks.examine`` returns the findings as data; ``precision.speed_of_low_precision`` times what a device gains by
float16 and bfloat16. Importing this module, and ``command``, needs no torch.
"""
