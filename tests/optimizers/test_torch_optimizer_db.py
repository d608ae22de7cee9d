# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's inputs and error inputs for its own optimizers, applied to the fused optimizers of the same rule."""

import warnings

import pytest
import torch
from lockstep import make_params
from torch import nn

from apex_npu import optimizers

OURS = {
    torch.optim.SGD: optimizers.NpuFusedSGD,
    torch.optim.Adam: optimizers.NpuFusedAdam,
    torch.optim.AdamW: optimizers.NpuFusedAdamW,
    torch.optim.Adadelta: optimizers.NpuFusedAdadelta,
    torch.optim.RMSprop: optimizers.NpuFusedRMSprop,
}
# Options that select torch's implementations; the fused optimizers have one.
IMPLEMENTATION_ARGUMENTS = {"foreach", "fused", "capturable", "differentiable"}


@pytest.fixture(scope="module")
def common_optimizers():
    """Which takes seconds to import."""
    return pytest.importorskip("torch.testing._internal.common_optimizers", reason="not in this torch")


@pytest.fixture(params=OURS, ids=lambda cls: cls.__name__)
def info(request, common_optimizers):
    return next(info for info in common_optimizers.optim_db if info.optim_cls is request.param)


def test_inputs(info):
    for config in info.optim_inputs_func(device="cpu"):
        if IMPLEMENTATION_ARGUMENTS & config.kwargs.keys():
            continue
        sets = [make_params([(4, 5), (3,), ()], device="cpu") for _ in range(2)]
        kwargs = {"lr": 0.01, **config.kwargs}
        pair = OURS[info.optim_cls](sets[0], **kwargs), info.optim_cls(sets[1], **kwargs)
        for step in range(5):
            for params, optimizer in zip(sets, pair, strict=True):
                for p in params:
                    p.grad = torch.full_like(p, 0.1 + step) * p.detach().sign()
                optimizer.step()
        torch.testing.assert_close(*sets, rtol=1e-6, atol=1e-6, msg=f"{config.desc}: {config.kwargs}")


def test_error_inputs(info, common_optimizers):
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        config = error.optimizer_error_input
        mixed_betas = any(isinstance(beta, torch.Tensor) for beta in config.kwargs.get("betas", ()))
        if IMPLEMENTATION_ARGUMENTS & config.kwargs.keys() or mixed_betas:
            continue
        if error.error_on != common_optimizers.OptimizerErrorEnum.CONSTRUCTION_ERROR:
            continue
        kwargs = {"lr": 0.01, **config.kwargs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if error.error_type is UserWarning:
                with pytest.warns(error.error_type, match=error.error_regex):
                    OURS[info.optim_cls](config.params, **kwargs)
            else:
                with pytest.raises(error.error_type, match=error.error_regex):
                    OURS[info.optim_cls](config.params, **kwargs)


def test_named_parameters():
    model = nn.Linear(3, 2)
    optimizer = optimizers.NpuFusedAdam(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if "param_names" in optimizer.param_groups[0]:  # torch 2.7 and newer
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(optimizer.state_dict())
