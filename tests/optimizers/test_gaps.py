# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose memory has gaps, as ``nn.Parameter(t[..., 0])``: fused optimizers refuse them by name."""

import re

import pytest
import torch
from devices import DEVICE
from lockstep import set_grads
from optimizer_specs import SPECS
from small_programs import backward
from torch import nn

from apex_npu import amp
from apex_npu.optimizers import NpuFusedAdam, NpuFusedSGD


def with_gaps():
    """Parameters that do not fill their memory, or have elements in the same place, by name."""
    larger = [torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
    return {
        "slice": nn.Parameter(larger[0][..., 0]),
        "transposed slice": nn.Parameter(larger[1].transpose(0, 1)[..., 1]),
        "every second element": nn.Parameter(larger[2].view(-1)[::2]),
        "expanded": nn.Parameter(torch.ones(1, device=DEVICE).expand(4)),
    }


def dense_copies(params):
    return [nn.Parameter(p.detach().clone().contiguous()) for p in params]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_they_are_refused_by_each_optimizer(spec):
    options = {"lr": 0.1, **spec.variants[0]}
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(5, 4\) and strides \(8, 2\).*contiguous\(\)"):
        spec.cls([nn.Parameter(torch.ones(3, 4, device=DEVICE)), with_gaps()["slice"]], **options)


@pytest.mark.parametrize("kind", with_gaps())
def test_a_group_that_has_one_is_not_added(kind):
    params, refused = [nn.Parameter(torch.ones(3, device=DEVICE))], with_gaps()[kind]
    optimizer = NpuFusedAdam(params, lr=0.1)
    with pytest.raises(ValueError, match=f"^NpuFusedAdam: parameter 0 .* strides {re.escape(str(refused.stride()))}"):
        optimizer.add_param_group({"params": [refused]})
    assert len(optimizer.param_groups) == 1
    (replaced,) = dense_copies([refused])  # as the message says
    optimizer.add_param_group({"params": [replaced]})
    others = dense_copies([*params, replaced])
    reference = torch.optim.Adam(others, lr=0.1)
    for step in range(2):
        set_grads([*params, replaced], step)
        set_grads(others, step)
        optimizer.step()
        reference.step()
    for p, q in zip([*params, replaced], others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("how", ["unfrozen", "given other memory"])
def test_one_that_becomes_one_later_is_refused_by_the_step(how):
    first, second = nn.Parameter(torch.ones(3, device=DEVICE)), nn.Parameter(torch.ones(4, 2, device=DEVICE))
    wide = torch.ones(4, 3, device=DEVICE)
    if how == "unfrozen":
        second = nn.Parameter(wide[:, :2], requires_grad=False)
    optimizer = NpuFusedSGD([first, second], lr=0.5)
    set_grads([first], 0)
    optimizer.step()
    second.requires_grad_(True)
    second.data = wide[:, :2]
    set_grads([first, second], 1)
    before = [p.detach().clone() for p in (first, second)]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter 1 of shape \(4, 2\) and strides \(3, 1\)"):
            optimizer.step()
        assert all(map(torch.equal, (first, second), before))
    second.data = second.data.contiguous()
    optimizer.step()
    for p, old in zip((first, second), before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.5 * p.grad)
    assert torch.equal(wide, torch.ones_like(wide))


def test_one_without_elements_has_no_gaps():
    empty, param = nn.Parameter(torch.ones(0, 4, device=DEVICE)[:, ::2]), nn.Parameter(torch.ones(3, device=DEVICE))
    assert empty.stride() == (4, 2)
    optimizer = NpuFusedSGD([empty, param], lr=0.5)
    set_grads([empty, param], 0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), 1 - 0.5 * param.grad)


def frozen_cases():
    larger = torch.ones(4, 4, device=DEVICE)
    yield [torch.ones(1, device=DEVICE).expand(4), torch.ones(3, device=DEVICE)]
    yield [larger[:, 0], larger]
    yield [larger[:, 1:], larger[0]]


@pytest.mark.parametrize("case", range(3))
def test_frozen_ones_may_have_gaps(case):
    frozen, trained = list(frozen_cases())[case]
    params = [nn.Parameter(frozen, requires_grad=False), nn.Parameter(trained)]
    optimizer = NpuFusedAdam(params, lr=0.1)
    (other,) = dense_copies(params[1:])
    reference = torch.optim.Adam([other], lr=0.1)
    for step in (0, 2):
        set_grads(params[1:], step)
        set_grads([other], step)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(params[1], other)


class Model(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x):
        matrix, other, vector, _ = self.params
        return (torch.nn.functional.linear(x, matrix) ** 2).sum() + (x @ other).square().sum() + vector.cos().sum()


@pytest.mark.parametrize("extra", [{}, {"combine_grad": True}], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_under_amp_optimizers_of_torch_train_them_as_dense_ones(level, extra):
    found = []
    for make in (list, dense_copies):
        params = make(with_gaps().values())
        params[3].requires_grad_(False)
        model = Model(params)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=2.0**6, verbosity=0, **extra
        )
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            if step == 2:
                x[0, 0] = torch.inf
            backward(model(x).float(), optimizer)
            optimizer.clip_optimizer_grad_norm_fused(1.0)
            optimizer.step()
            assert amp.last_step(optimizer).applied == (step != 2)
            optimizer.zero_grad()
        found.append(list(model.state_dict().values()))
        amp.shutdown()
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
