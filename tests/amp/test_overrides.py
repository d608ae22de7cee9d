# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every combination of overrides that ``initialize`` accepts trains like float32, up to what its dtypes round."""

import itertools

import pytest
import torch
from amp.classifier import Net, train

from apex_npu import amp, optimizers
from apex_npu.amp.policy import resolve

pytestmark = pytest.mark.host

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CHOICES = {
    "cast_model_type": [None, False, torch.float32, torch.float16, torch.bfloat16],
    "keep_batchnorm_fp32": [None, True, "False"],
    "master_weights": [None, True, False],
    "loss_scale": [None, "64.0"],
}


def accepted(level):
    for values in itertools.product(*CHOICES.values()):
        overrides = dict(zip(CHOICES, values, strict=True))
        try:
            resolve(level, **overrides)
        except RuntimeError:
            continue
        yield overrides


@pytest.fixture(scope="module")
def in_float32():
    model = Net()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), range(3), scaled=False)


@pytest.mark.parametrize(("cls", "combine_grad"), [(torch.optim.SGD, None), (optimizers.NpuFusedSGD, True)])
@pytest.mark.parametrize("level", LEVELS)
def test_every_accepted_combination_trains(level, cls, combine_grad, in_float32):
    combinations = list(accepted(level))
    assert combinations
    # Half of them by each of the optimizers, with either loss scale in turn.
    for overrides in [one for i, one in enumerate(combinations) if (i + i // 2) % 2 == (combine_grad is True)]:
        model = Net()
        optimizer = cls(model.parameters(), lr=0.02, momentum=0.9)
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=level,
            combine_grad=combine_grad,
            dynamic_init_scale=64.0,
            verbosity=0,
            **overrides,
        )
        policy = amp.session.current().policy
        found = train(model, optimizer, range(3))
        low = {policy.model_dtype, policy.autocast_dtype if policy.patch_torch_functions else None} - {
            None,
            torch.float32,
        }
        # Three steps at this rate; half precision keeps 11 bits, bfloat16 8, and without masters small steps are lost.
        tolerance = 0.05 if torch.bfloat16 in low else 0.01 if low else 1e-5
        assert found == pytest.approx(in_float32, abs=tolerance), overrides
        dtypes = {p.dtype for p in model.parameters()}
        if policy.model_dtype is not None:
            norm = torch.float32 if policy.keep_batchnorm_fp32 else policy.model_dtype
            assert model.norm.weight.dtype == norm
            assert dtypes == {policy.model_dtype, norm}
        masters = {p.dtype for p in amp.master_params(optimizer)}
        assert masters == ({torch.float32} if policy.master_weights else dtypes)
        amp.shutdown()
