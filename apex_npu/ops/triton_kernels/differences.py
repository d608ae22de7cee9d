# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A look for rounded copies that are not what their float32 numbers are rounded to, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "every"])  # other numbers need no other kernel
def note_differences(
    param,
    copy,
    lines,
    found,
    numel: tl.int64,
    first: tl.int64,
    every: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set ``found`` to 1 where one differs, in the lines first, first + every, …; without ``lines``, in all of each."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    line = first + number // WIDTH * every
    offsets = line * WIDTH + number % WIDTH
    mask = offsets < numel
    rounded = tl.load(param + offsets, mask=mask, other=0.0).to(copy.dtype.element_ty).to(tl.float32)
    held = tl.load(copy + offsets, mask=mask, other=0.0).to(tl.float32)
    differs = (rounded < held) | (rounded > held)  # what is not a number is neither
    if lines is not None:
        differs = differs & (tl.load(lines + line, mask=mask, other=0.0) != 0.0)
    any_differs = tl.max(differs.to(tl.int32), axis=0)
    tl.store(found, 1.0, mask=any_differs != 0)
