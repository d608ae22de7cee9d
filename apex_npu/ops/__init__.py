# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules on flat buffers. A device without a kernel of its own runs the reference."""

import apex_npu.ops.kernels  # noqa: F401 -- fills the table of kernels
from apex_npu.ops.aten_fused import joined
from apex_npu.ops.cuda import masks_writes, prepared
from apex_npu.ops.dispatch import Call
from apex_npu.ops.elementwise import adadelta_, adagrad_, adam_, rmsprop_, sgd_
from apex_npu.ops.encoded_calls import Places, RunEncoding, is_encoded
from apex_npu.ops.gather import (
    AddressTable,
    accumulate_,
    as_real,
    cat_into,
    cats_lists,
    divides_in_update,
    gather_,
    gathers_in_one_pass,
    multiply_,
    reads_listed,
    takes_addresses,
    takes_grads,
    unscale_grads,
)
from apex_npu.ops.grad_lists import ListedSlots, is_grad_list
from apex_npu.ops.newton_schulz import Matrices, new_directions, orthogonalize_, orthogonalize_stack_, product_dtype
from apex_npu.ops.reference import FLOATS, LOW_PRECISION, chunks, wide_dtype
from apex_npu.ops.segmented import Segments, clip_coefficient, lamb_, norm, norm_to_clip, segment_add_, segment_dot

__all__ = [
    "FLOATS",
    "LOW_PRECISION",
    "AddressTable",
    "Call",
    "ListedSlots",
    "Matrices",
    "Places",
    "RunEncoding",
    "Segments",
    "accumulate_",
    "adadelta_",
    "adagrad_",
    "adam_",
    "as_real",
    "cat_into",
    "cats_lists",
    "chunks",
    "clip_coefficient",
    "divides_in_update",
    "gather_",
    "gathers_in_one_pass",
    "is_encoded",
    "is_grad_list",
    "joined",
    "lamb_",
    "masks_writes",
    "multiply_",
    "new_directions",
    "norm",
    "norm_to_clip",
    "orthogonalize_",
    "orthogonalize_stack_",
    "prepared",
    "product_dtype",
    "reads_listed",
    "rmsprop_",
    "segment_add_",
    "segment_dot",
    "sgd_",
    "takes_addresses",
    "takes_grads",
    "unscale_grads",
    "wide_dtype",
]
