# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import pytest
import torch

from apex_npu.amp.policy import OPT_LEVELS, resolve

pytestmark = pytest.mark.host


# The table that Apex documents.
@pytest.mark.parametrize(
    ("level", "cast", "functions", "batchnorm", "masters", "scale"),
    [
        ("O0", torch.float32, False, None, False, 1.0),
        ("O1", None, True, None, None, "dynamic"),
        ("O2", torch.float16, False, True, True, "dynamic"),
        ("O3", torch.float16, False, False, False, 1.0),
        ("O4", None, True, None, None, 1.0),
        ("O5", torch.bfloat16, False, True, True, 1.0),
    ],
)
def test_levels(level, cast, functions, batchnorm, masters, scale):
    policy = resolve(level)
    assert policy == OPT_LEVELS[level]
    assert policy.cast_model_type is cast
    assert policy.patch_torch_functions is functions
    assert policy.keep_batchnorm_fp32 is batchnorm
    assert policy.master_weights is masters
    assert policy.loss_scale == scale
    assert policy.autocast_dtype is (torch.bfloat16 if level == "O4" else torch.float16)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"loss_scale": "128.0"}, "loss_scale", 128.0),
        ({"loss_scale": 1024}, "loss_scale", 1024.0),
        ({"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ({"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ({"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ({"cast_model_type": False}, "cast_model_type", False),
        ({"cast_model_type": torch.bfloat16}, "cast_model_type", torch.bfloat16),
        ({"check_combined_tensors": "error"}, "check_combined_tensors", "error"),
        ({"combine_ddp": False}, "combine_ddp", False),
    ],
)
def test_overrides(given, field, value):
    assert getattr(resolve("O2", **given), field) == value
