# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fused optimizers: update rules of torch.optim, papers and NVIDIA's Apex on flat buffers, with or without amp."""

from apex_npu.optimizers.adadelta import NpuFusedAdadelta
from apex_npu.optimizers.adagrad import FusedAdagrad
from apex_npu.optimizers.adam import NpuFusedAdam
from apex_npu.optimizers.adamp import NpuFusedAdamP
from apex_npu.optimizers.adamw import NpuFusedAdamW
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions
from apex_npu.optimizers.bert_adam import NpuFusedBertAdam
from apex_npu.optimizers.ema import FusedEMA
from apex_npu.optimizers.lamb import Lamb, NpuFusedLamb
from apex_npu.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb
from apex_npu.optimizers.muon import NpuFusedMuon
from apex_npu.optimizers.novograd import FusedNovoGrad
from apex_npu.optimizers.nvidia import FusedAdam, FusedLAMB, FusedSGD
from apex_npu.optimizers.rmsprop import NpuFusedRMSprop
from apex_npu.optimizers.rmsprop_tf import NpuFusedRMSpropTF
from apex_npu.optimizers.schedules import WarmupLR
from apex_npu.optimizers.sgd import NpuFusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedEMA",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedOptions",
    "FusedSGD",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedMuon",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
    "WarmupLR",
]
