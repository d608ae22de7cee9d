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


def test_state_dict():
    scaler = make_scaler("dynamic", DynamicScaleOptions(init_scale=4.0))
    scaler.update(False)
    assert scaler.state_dict() == {"loss_scale": 4.0, "unskipped": 1}
    for bad in ({"loss_scale": 0.0, "unskipped": 0}, {"loss_scale": 1.0, "unskipped": -1}):
        with pytest.raises(ValueError, match="in the state dict must be"):
            scaler.load_state_dict(bad)
    assert scaler.state_dict() == {"loss_scale": 4.0, "unskipped": 1}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"init_scale": 0.0}, ValueError, "dynamic_init_scale must be positive and finite, got 0.0"),
        ({"init_scale": "x"}, TypeError, "dynamic_init_scale must be a number, got 'x'"),
        ({"growth_factor": 0.9}, ValueError, "scale_growth_factor must be >= 1, got 0.9"),
        ({"backoff_factor": 1.0}, ValueError, r"scale_backoff_factor must be in \(0, 1\), got 1.0"),
        ({"backoff_factor": -0.5}, ValueError, "scale_backoff_factor must be positive"),
        ({"growth_interval": 0}, ValueError, "scale_window must be positive and finite, got 0"),
        ({"growth_interval": 1.5}, ValueError, "scale_window must be an integer >= 1, got 1.5"),
        ({"min_scale": -1.0}, ValueError, "min_loss_scale must be positive"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "min_loss_scale 4.0 must not exceed max_loss_scale 2.0"),
        ({"max_scale": float("inf")}, ValueError, "max_loss_scale must be positive and finite"),
        ({"max_scale": 2.0**127}, ValueError, r"max_loss_scale must be at most 2\*\*126"),
    ],
)
def test_bad_options(given, error, message):
    with pytest.raises(error, match=message):
        DynamicScaleOptions(**given)
