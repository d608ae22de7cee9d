# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules on flat buffers. A device without a kernel of its own runs the reference."""

import apex_npu.ops.kernels  # noqa: F401 -- fills the table of kernels
from apex_npu.ops.cuda import masks_writes
from apex_npu.ops.dispatch import Call
from apex_npu.ops.elementwise import adadelta_, adagrad_, adam_, rmsprop_, sgd_
from apex_npu.ops.encoded_calls import Places, RunEncoding
from apex_npu.ops.gather import accumulate_, as_real, cats_lists, divides_in_update, unscale_grads
from apex_npu.ops.reference import FLOATS, LOW_PRECISION, chunks, wide_dtype
from apex_npu.ops.segmented import Segments, lamb_, norm, segment_add_, segment_dot

__all__ = [
    "FLOATS",
    "LOW_PRECISION",
    "Call",
    "Places",
    "RunEncoding",
    "Segments",
    "accumulate_",
    "adadelta_",
    "adagrad_",
    "adam_",
    "as_real",
    "cats_lists",
    "chunks",
    "divides_in_update",
    "lamb_",
    "masks_writes",
    "norm",
    "rmsprop_",
    "segment_add_",
    "segment_dot",
    "sgd_",
    "unscale_grads",
    "wide_dtype",
]
