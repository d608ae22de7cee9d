# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables of old names and the modules they map to: names of ``apex``, and shorter names of this package."""

from __future__ import annotations

__all__ = ["ALIASES", "APEX"]

# Modules with the same place below ``apex_npu.compat``.
_IN_COMPAT = """
    amp.handle amp.lists amp.lists.functional_overrides amp.lists.tensor_overrides amp.lists.torch_overrides amp.opt
    amp.scaler amp.utils contrib contrib.combine_tensors contrib.optimizers fp16_utils fp16_utils.fp16_optimizer
    fp16_utils.fp16util fp16_utils.loss_scaler multi_tensor_apply normalization parallel parallel.distributed
    parallel.multiproc parallel.sync_batchnorm
"""
# Modules of ``apex_npu.optimizers`` that are called npu_fused_... in Ascend's patch.
_NPU_FUSED = "adadelta adam adamp adamw bert_adam lamb rmsprop rmsprop_tf sgd"
# The names of Apex and of the modules that Ascend's patch adds: served by ``install_as_apex`` and a patched Apex.
APEX = {f"apex.{name}": f"apex_npu.compat.{name}" for name in _IN_COMPAT.split()}
APEX |= {f"apex.optimizers.npu_fused_{name}": f"apex_npu.optimizers.{name}" for name in _NPU_FUSED.split()}
APEX |= {
    "apex": "apex_npu",
    "apex.amp": "apex_npu.amp",
    "apex.amp._amp_state": "apex_npu.compat.amp.state",
    "apex.amp.amp": "apex_npu.amp",
    "apex.amp.compat": "apex_npu.compat.amp.utils",
    "apex.amp.frontend": "apex_npu.amp.frontend",
    "apex.amp.rnn_compat": "apex_npu.compat.amp.utils",
    "apex.amp.wrap": "apex_npu.compat.amp.utils",
    "apex.contrib.combine_tensors.combine_tensors": "apex_npu.compat.contrib.combine_tensors",
    "apex.contrib.optimizers.distributed_fused_adam": "apex_npu.compat.contrib.optimizers",
    "apex.contrib.optimizers.distributed_fused_lamb": "apex_npu.compat.contrib.optimizers",
    "apex.multi_tensor_apply.multi_tensor_apply": "apex_npu.compat.multi_tensor_apply",
    "apex.normalization.fused_layer_norm": "apex_npu.compat.normalization",
    "apex.optimizers": "apex_npu.optimizers",
    "apex.optimizers.fused_adagrad": "apex_npu.optimizers.adagrad",
    "apex.optimizers.fused_adam": "apex_npu.optimizers.nvidia",
    "apex.optimizers.fused_lamb": "apex_npu.optimizers.nvidia",
    "apex.optimizers.fused_mixed_precision_lamb": "apex_npu.optimizers.mixed_precision_lamb",
    "apex.optimizers.fused_novograd": "apex_npu.optimizers.novograd",
    "apex.optimizers.fused_sgd": "apex_npu.optimizers.nvidia",
    "apex.optimizers.lamb": "apex_npu.optimizers.lamb",
    "apex.parallel.LARC": "apex_npu.compat.parallel.larc",
    "apex.parallel.optimized_sync_batchnorm": "apex_npu.compat.parallel.sync_batchnorm",
    "apex_C": "apex_npu.compat.flattening",
    "change_data_ptr": "apex_npu.compat.contrib.combine_tensors",
}
# The same names in this package.
ALIASES = {
    f"apex_npu.{name}": f"apex_npu.compat.{name}"
    for name in _IN_COMPAT.split()
    if "." not in name or name.startswith("contrib.")
}
