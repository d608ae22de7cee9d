# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import warnings

import pytest
import torch

from apex_npu.amp.scaler import DynamicLossScaler, DynamicScaleOptions, make_scaler

pytestmark = pytest.mark.host


def test_same_course_as_torchs_scaler():
    options = DynamicScaleOptions(init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    ours = DynamicLossScaler(options)
    theirs = torch.amp.GradScaler("cpu", 2.0**10, 4.0, 0.25, 3)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    theirs.scale(torch.ones(1))
    for overflow in [False, False, False, True, False, True, True, False, False, False, False]:
        param.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()


def test_bounds():
    scaler = DynamicLossScaler(
        DynamicScaleOptions(init_scale=2.0**20, growth_interval=1, min_scale=2.0**18, max_scale=2.0**21)
    )
    for _ in range(3):
        scaler.update(False)
    assert scaler.scale == 2.0**21
    for _ in range(9):
        scaler.update(True)
    assert scaler.scale == 2.0**18
    assert DynamicLossScaler(DynamicScaleOptions(init_scale=2.0**20, max_scale=2.0**9)).scale == 2.0**9


def test_never_zero_and_a_warning_below_one():
    scaler = DynamicLossScaler(DynamicScaleOptions(init_scale=4.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            scaler.update(True)
    (warning,) = caught
    assert "fallen to 0.5: gradients hold inf or nan even without scaling" in str(warning.message)
    assert scaler.scale == 2.0**-126
    assert torch.tensor(1 / scaler.scale, dtype=torch.float32).isfinite()


def test_a_count_beyond_the_window_still_grows():
    scaler = DynamicLossScaler(DynamicScaleOptions(growth_interval=10))
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 500})
    scaler.update(False)
    assert scaler.scale == 16.0


def test_static():
    scaler = make_scaler(128.0, DynamicScaleOptions())
    assert not scaler.dynamic
    with pytest.warns(RuntimeWarning, match=r"overflowed under the static loss scale 128\.0"):
        scaler.update(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.update(True)  # once
    assert scaler.scale == 128.0
    assert not scaler.found_inf
