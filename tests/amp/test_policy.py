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


def test_none_means_as_the_level_has_it():
    assert resolve("O2", loss_scale=None, master_weights=None) == OPT_LEVELS["O2"]


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


@pytest.mark.parametrize(
    ("level", "given", "error", "message"),
    [
        ("02", {}, RuntimeError, "Unexpected optimization level '02'.*the letter O, not the number zero"),
        ("O9", {}, RuntimeError, "Options are 'O0', 'O1', 'O2', 'O3'"),
        (2, {}, RuntimeError, "Unexpected optimization level 2.*did you mean 'O2'"),
        ("o2", {}, RuntimeError, "did you mean 'O2'"),
        ("o0", {}, RuntimeError, "did you mean 'O0'"),
        ("O2", {"loss_scale": "banana"}, ValueError, "loss_scale must be \"dynamic\" or a positive number.*'banana'"),
        ("O2", {"loss_scale": 0}, ValueError, "got 0"),
        ("O2", {"loss_scale": -2.0}, ValueError, "got -2.0"),
        ("O2", {"loss_scale": float("nan")}, ValueError, "got nan"),
        ("O2", {"loss_scale": True}, ValueError, "got True"),
        ("O2", {"cast_model_type": "half"}, TypeError, "cast_model_type must be a floating-point torch.dtype.*'half'"),
        ("O2", {"cast_model_type": torch.int8}, TypeError, "got torch.int8"),
        ("O2", {"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32 must be True, False or None, got 1"),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "O1, batchnorm functions run in fp32"),
        ("O1", {"master_weights": False}, RuntimeError, "leave master_weights unspecified"),
        ("O1", {"cast_model_type": torch.float16}, RuntimeError, "leave cast_model_type unspecified"),
        ("O2", {"patch_torch_functions": True}, RuntimeError, "patch_torch_functions=True goes with .*, got O2"),
        ("O2", {"user_cast_preferred": True}, RuntimeError, "user_cast_preferred=True should only be set"),
        ("O2", {"combine_ddp": True}, RuntimeError, "combine_ddp=True needs combine_grad=True"),
        ("O2", {"ddp_reduce_dtype": torch.float32}, RuntimeError, "dtype in which combine_ddp=True reduces"),
        ("O2", {"ddp_reduce_dtype": torch.float16}, TypeError, "must be torch.float32, torch.bfloat16 or None"),
        ("O2", {"ddp_replica_count": 0}, ValueError, "ddp_replica_count must be an integer >= 1, got 0"),
        ("O2", {"check_combined_tensors": "warn"}, TypeError, "must be True, False, 'error' or None"),
    ],
)
def test_refused(level, given, error, message):
    with pytest.raises(error, match=message):
        resolve(level, **given)
