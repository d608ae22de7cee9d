# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is cast: the settings of a level, and the precision of each function at O1. This module contains only data.

Names without a dot are aten operators with a single (default) overload; others have the form ``name.overload``. The
tables list the casts that Apex promises. The casts of a device's own autocast are removed when the overlay is built
(``autocast_ops.py``), so a name that a later torch casts by itself adds no cost.

Some functions are omitted, because torch itself does what Apex promises:

* ``add``, ``mul``, ``div``, the comparisons, ``addcmul``, ``addcdiv``, ``atan2``, ``equal``, ``cat`` and ``stack``
  promote half and float to float. (A 0-dim float does not promote a half tensor, in torch as here.)
* ``normalize``, ``softmin`` and ``einsum`` are made of operators that are listed.
* ``half += float`` stays half and in place; a wrapper that rebinds the name would break every alias of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from apex_npu.ops import LOW_PRECISION

# The dtypes that a "half" function narrows. float64 was requested explicitly and stays.
AUTOCAST_FLOATS = LOW_PRECISION | {torch.float32}
# The dtypes that a whole-model cast (O0, O2, O3) converts. 8-bit floats are storage formats with own scales, and stay.
MODEL_FLOATS = AUTOCAST_FLOATS | {torch.float64}


@dataclass(frozen=True, kw_only=True)
class CastPolicy:
    """The casts of a level. ``None`` in a tri-state field means that it does not apply.

    Attributes:
        opt_level: The name of the level, for messages.
        enabled: False: nothing is cast.
        cast_model_type: O0, O2, O3: the dtype of the model's floating-point parameters and of its forward's inputs.
            False or None: no cast.
        patch_torch_functions: O1: run under torch.autocast, completed by ``autocast_ops.py`` and ``monkey_patches.py``.
        keep_batchnorm_fp32: Keep affine BatchNorms in float32 in a model that is cast.
        user_cast_preferred: Do not apply the lists to functions with registered casts.
        allow_banned: O1: cast half arguments to float32 for functions that are not safe with them, instead of an error.
        cast_model_outputs: The dtype of the forward's outputs; None: they are not cast.
        autocast_dtype: The low-precision dtype of ``patch_torch_functions``.
    """

    opt_level: str = field(kw_only=False)
    enabled: bool = True
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    user_cast_preferred: bool | None = None
    allow_banned: bool = False
    cast_model_outputs: torch.dtype | None = None
    autocast_dtype: torch.dtype = torch.float16

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype to which the model is cast, or None if it keeps its own."""
        return self.cast_model_type or None


HALF_OPS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "conv_tbc",
    "linear",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "mm",
    "mv",
    "addbmm",
    "baddbmm",
    "bmm",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    # not Apex's: nn.MultiheadAttention in eval without grad, whose parts would give half
    "_native_multi_head_attention",
)

# Not on cuda, where autocast has a kernel for cuDNN that casts the weights into one flat buffer.
SEQUENCE_RNNS = (
    "lstm.input",
    "lstm.data",
    "gru.input",
    "gru.data",
    "rnn_tanh.input",
    "rnn_tanh.data",
    "rnn_relu.input",
    "rnn_relu.data",
)

FLOAT_OPS = (
    # pointwise
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "gelu",
    "softplus",
    # reductions; torch.norm and Tensor.norm arrive as one of the linalg and *_norm operators
    "cumprod",
    "cumsum",
    "dist",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "nuclear_norm",
    "nuclear_norm.dim",
    "frobenius_norm.dim",
    "prod",
    "prod.dim_int",
    "sum",
    "sum.dim_IntList",
    "std",
    "std.dim",
    "std.correction",
    "var",
    "var.dim",
    "var.correction",
    "renorm",
    # torch.nn.functional
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "cosine_similarity",
    "grid_sampler",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "nll_loss2d",
    "cross_entropy_loss",
    "binary_cross_entropy_with_logits",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "ctc_loss.IntList",
    "ctc_loss.Tensor",
    # not Apex's: nn.TransformerEncoderLayer in eval without grad, which ends in a layer_norm
    "_transformer_encoder_layer_fwd",
)

# Not Apex's: decompositions and solvers, which no device computes in half, and matrix_exp, whose half results are
# garbage on cpu. Autocast on cpu runs most of them in float, on accelerators none.
# (torch.nn.utils.parametrizations.orthogonal needs some.) A name that the installed torch lacks is left out:
# linalg_matrix_sqrth and linalg_polar came with torch 2.14.
LINALG_FLOAT_OPS = (
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "geqrf",
    "inverse",
    "linalg_cholesky",
    "linalg_cholesky_ex",
    "linalg_cond",
    "linalg_cond.p_str",
    "linalg_det",
    "linalg_eig",
    "linalg_eigh",
    "linalg_eigvals",
    "linalg_eigvalsh",
    "linalg_householder_product",
    "linalg_inv",
    "linalg_inv_ex",
    "linalg_lstsq",
    "linalg_lu",
    "linalg_lu_factor",
    "linalg_lu_factor_ex",
    "linalg_matrix_exp",
    "linalg_matrix_rank",
    "linalg_matrix_rank.atol_rtol_float",
    "linalg_matrix_rank.atol_rtol_tensor",
    "linalg_matrix_rank.tol_tensor",
    "linalg_matrix_sqrth",
    "linalg_pinv",
    "linalg_pinv.atol_rtol_float",
    "linalg_pinv.atol_rtol_tensor",
    "linalg_pinv.rcond_tensor",
    "linalg_polar",
    "linalg_qr",
    "linalg_slogdet",
    "linalg_solve",
    "linalg_solve_ex",
    "linalg_solve_triangular",
    "linalg_svd",
    "linalg_svdvals",
    "linalg_tensorinv",
    "linalg_tensorsolve",
    "logdet",
    "lu_solve",
    "orgqr",
    "ormqr",
    "pinverse",
    "qr",
    "svd",
    "triangular_solve",
)

# Every accelerator's autocast registers these in a way that breaks Apex's promise, so the overlay overrides them.
# grid_sampler takes the widest type there; matrix norms request float results, and then refuse half arguments.
# On cpu torch already runs these in float.
ACCELERATOR_FORCED_OPS = ("grid_sampler", "linalg_matrix_norm", "linalg_matrix_norm.str_ord")

# Arguments take the widest type; torch refuses mixed ones. vdot calls dot, which a dispatch mode moves below the casts.
PROMOTE_OPS = ("bilinear", "cross", "dot", "vdot")

# In place: the other arguments take the type of self; torch itself refuses mixed arguments.
MATCH_SELF_OPS = (
    "addmm_",
    "addmv_",
    "addr_",
    "addbmm_",
    "baddbmm_",
    # not Apex's: x[indices] = y and similar statements
    "index_put_",
    "index_copy_",
    "index_add_",
    "masked_scatter_",
    "scatter_.src",
    "scatter_add_",
    "scatter_reduce_.two",
)


def policies(device_type: str) -> dict[str, str]:
    """Return a dict from operator to policy on devices of ``device_type``.

    A policy is "half", "float", "promote" or "match_self".
    """
    table = dict.fromkeys(HALF_OPS, "half")
    table.update(dict.fromkeys((*FLOAT_OPS, *LINALG_FLOAT_OPS), "float"))
    table.update(dict.fromkeys(PROMOTE_OPS, "promote"))
    table.update(dict.fromkeys(MATCH_SELF_OPS, "match_self"))
    if device_type != "cuda":
        table.update(dict.fromkeys(SEQUENCE_RNNS, "half"))
    return table


# Functions of torch.nn.functional that call several operators; autocast casts only some of these, or none.
FLOAT_FUNCTIONS = ("interpolate", "local_response_norm", "multilabel_soft_margin_loss")

# The in-place forms of "float" functions cannot widen their argument. Attributes, not operators: torch's own kernels
# call the operators on half temporaries (logsumexp calls log_), and must not be refused.
INPLACE_ERROR_FUNCTIONS = (
    "acos_",
    "asin_",
    "cosh_",
    "exp_",
    "expm1_",
    "log_",
    "log10_",
    "log2_",
    "reciprocal_",
    "rsqrt_",
    "sinh_",
    "tan_",
)
INPLACE_ERROR_METHODS = (*INPLACE_ERROR_FUNCTIONS, "erfinv_", "pow_", "cumprod_", "cumsum_", "renorm_")
