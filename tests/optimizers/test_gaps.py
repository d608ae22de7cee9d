# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose memory has gaps, as ``nn.Parameter(t[..., 0])``: stepped where they are, with torch's values.

Dense parameters of the same values under the reference of each rule are what they are compared with.
"""

import copy

import pytest
import torch
from devices import DEVICE
from optimizer_specs import CASE_IDS, CASES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex_npu import amp
from apex_npu.optimizers import NpuFusedAdam, NpuFusedAdamW, NpuFusedLamb, NpuFusedSGD

SHAPES = ((5, 4), (3, 4, 2), (4,))
cases = pytest.mark.parametrize(("spec", "options"), CASES, ids=CASE_IDS)


def with_gaps(*, seed=0):
    """Parameters of ``SHAPES`` that are parts of larger tensors, the second one transposed, and one that is dense."""
    generator = torch.Generator().manual_seed(seed)
    larger = [torch.randn(*shape, 2, generator=generator).to(DEVICE) for shape in SHAPES]
    views = [t[..., 0] for t in larger]
    views[1] = larger[1].transpose(0, 1)[..., 0]
    params = [nn.Parameter(view) for view in views]
    assert not any(p.is_contiguous() for p in params)
    return larger, [*params, nn.Parameter(torch.randn(6, generator=generator).to(DEVICE))]


def dense_copies(params):
    return [nn.Parameter(p.detach().clone().contiguous()) for p in params]


def set_grads(step, *lists):
    for params in lists:
        generator = torch.Generator().manual_seed(100 + step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(DEVICE)
            p.grad = None if (step, i) == (1, 0) else grad


def assert_near(params, expected, tolerance=1e-5):
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=tolerance * float(q.detach().abs().max()))


@cases
def test_each_rule_steps_them_as_its_reference_steps_dense_ones(spec, options):
    larger, params = with_gaps()
    before = [t[..., 1].clone() for t in larger]
    places = [(p.data_ptr(), p.stride()) for p in params[:3]]
    others = dense_copies(params)
    optimizer, reference = spec.cls(params, **options), spec.reference(others, **options)
    for step in range(4):
        set_grads(step, params, others)
        optimizer.step()
        reference.step()
    assert_near(params, others)
    assert [(p.data_ptr(), p.stride()) for p in params[:3]] == places
    assert all(torch.equal(t[..., 1], old) for t, old in zip(larger, before, strict=True))
    assert torch.equal(larger[0][..., 0], params[0])


@cases
def test_their_state_goes_to_a_dense_model_and_back(spec, options):
    _, params = with_gaps()
    optimizer = spec.cls(params, **options)
    for step in range(2):
        set_grads(step, params)
        optimizer.step()
    others = dense_copies(params)
    second = spec.cls(others, **options)
    second.load_state_dict(optimizer.state_dict())
    _, third_params = with_gaps()
    for p, value in zip(third_params, others, strict=True):
        p.data.copy_(value)
    third = spec.cls(third_params, **options)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for one, its in ((optimizer, params), (second, others), (third, third_params)):
        set_grads(2, its)
        one.step()
    assert_near(params, others)
    assert_near(third_params, others)


def test_state_dicts_are_those_of_torch():
    _, params = with_gaps()
    _, others = with_gaps()
    optimizer, reference = NpuFusedAdam(params, lr=0.1), torch.optim.Adam(others, lr=0.1)
    for step in range(3):
        set_grads(step, params, others)
        optimizer.step()
        reference.step()
    found, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, entry in expected.items():
        assert found[index].keys() == entry.keys()
        for name, value in entry.items():
            torch.testing.assert_close(found[index][name], value)
            assert found[index][name].stride() == value.stride()
    optimizer.load_state_dict(reference.state_dict())
    set_grads(3, params, others)
    optimizer.step()
    reference.step()
    assert_near(params, others)


def test_gradients_stay_where_they_are_and_are_cleared():
    _, params = with_gaps()
    optimizer = NpuFusedSGD(params, lr=0.5, momentum=0.9)
    set_grads(0, params)
    grads, values = [p.grad for p in params[:3]], [p.grad.clone() for p in params]
    optimizer.step()
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=False))
    assert all(torch.equal(p.grad, value) for p, value in zip(params, values, strict=True))
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_what_a_script_writes_in_between_counts():
    _, params = with_gaps()
    others = dense_copies(params)
    optimizer, reference = NpuFusedAdamW(params, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    for step in range(5):
        set_grads(step, params, others)
        optimizer.step()
        reference.step()
        for its in (params, others):
            with torch.no_grad():
                its[0].mul_(0.5)
                if step == 1:
                    its[1].data = its[1].detach().clone().contiguous()  # dense from now on
                if step == 2:
                    its[3].data = torch.stack([its[3].detach()] * 2, dim=-1)[..., 0]  # with gaps from now on
    assert_near(params, others)


def test_one_that_is_unfrozen_later():
    _, params = with_gaps()
    others = dense_copies(params)
    for its in (params, others):
        its[0].requires_grad_(False)
    optimizer, reference = NpuFusedAdam(params, lr=0.1), torch.optim.Adam(others, lr=0.1)
    for step in range(4):
        for its in (params, others):
            its[0].requires_grad_(step > 1)
        set_grads(step, params[1:], others[1:])
        if step > 1:
            set_grads(step, params, others)
        optimizer.step()
        reference.step()
    assert_near(params, others)


def test_clipping_takes_them_into_the_norm():
    _, params = with_gaps()
    others = dense_copies(params)
    optimizer = NpuFusedSGD(params, lr=0.5)
    for step in (0, 2):
        set_grads(step, params, others)
        expected = torch.nn.utils.clip_grad_norm_(others, 1.0)
        torch.testing.assert_close(optimizer.clip_optimizer_grad_norm_fused(1.0), expected)
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_autograd_notices_that_one_has_changed():
    _, params = with_gaps()
    optimizer = NpuFusedSGD(params, lr=0.5)
    set_grads(0, params)
    loss = (params[0] * params[0]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Model(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x):
        matrix, cube, vector, bias = self.params
        hidden = torch.nn.functional.linear(x, matrix, bias[:5]).relu()
        return (hidden.sum() + (x * vector).sum() + (cube * cube).sum()) * bias[5]


@pytest.mark.pairwise(unless=lambda cls, extra, **_: cls is torch.optim.Adam and "fuse_unscale" in extra)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("extra", [{}, {"combine_grad": True}, {"fuse_unscale": True}], ids=str)
@pytest.mark.parametrize("cls", [NpuFusedAdam, NpuFusedLamb, torch.optim.Adam])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_under_amp_they_are_trained_as_dense_ones(level, cls, extra, clip):
    if cls is torch.optim.Adam and "fuse_unscale" in extra:
        pytest.skip("fuse_unscale is for fused optimizers")
    found = []
    for make in (lambda params: params, dense_copies):
        _, params = with_gaps()
        model = Model(make(params))
        optimizer = cls(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=2.0**6, verbosity=0, **extra
        )
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            if step == 2:
                x[0, 0] = torch.inf
            with amp.scale_loss(model(x).float(), optimizer) as scaled_loss:
                scaled_loss.backward()
            if clip:
                optimizer.clip_optimizer_grad_norm_fused(1.0)
            optimizer.step()
            assert amp.last_step(optimizer).applied == (step != 2)
            optimizer.zero_grad()
        found.append(list(model.state_dict().values()))
        amp.shutdown()
    assert_near(*found, tolerance=1e-6)


# ------------------------------------------------------------------------------------------------------------- refused


def refused(params, text, error=ValueError):
    before = [p.detach().clone() for p in params]
    optimizer = NpuFusedAdam(params)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(error, match=text):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert not optimizer.state


def test_elements_that_share_their_memory_are_refused():
    refused([nn.Parameter(torch.ones(1, device=DEVICE).expand(4))], r"elements of it share their memory")


def test_one_that_overlaps_another_parameter_is_refused():
    larger = torch.ones(4, 8, device=DEVICE)
    for other in (larger[:, ::2], larger[:, ::4], larger[:, :2]):
        text = r"size \(4, 4\) and stride \(8, 2\).*another parameter shares elements.*p\.data\.contiguous\(\)"
        refused([nn.Parameter(larger[:, ::2]), nn.Parameter(other)], text)


def test_parts_of_one_tensor_between_each_other_are_stepped():
    larger = torch.randn(4, 9, device=DEVICE)
    params = [nn.Parameter(part) for part in larger.chunk(3, dim=1)]
    others = dense_copies(params)
    optimizer, reference = NpuFusedSGD(params, lr=0.5), torch.optim.SGD(others, lr=0.5)
    set_grads(0, params, others)
    optimizer.step()
    reference.step()
    assert_near(params, others)
    assert torch.equal(larger, torch.cat(params, dim=1))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("order", [1, -1])
def test_one_that_overlaps_another_parameter_is_refused_across_groups(groups, order):
    larger = torch.zeros(4, 4, device=DEVICE)
    params = [nn.Parameter(larger), nn.Parameter(larger[:, 0])][::order]
    listed = [params] if groups == 1 else [[p] for p in params]
    optimizer = NpuFusedSGD([{"params": its} for its in listed], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"size \(4,\) and stride \(4,\).*another parameter shares elements"):
        optimizer.step()
    assert not larger.any()


def test_one_that_overlaps_a_view_of_another_dtype_is_refused():
    larger = torch.zeros(4, 4, device=DEVICE)
    refused([nn.Parameter(larger[:, 2:]), nn.Parameter(larger.view(torch.float16)[:, 4])], "another parameter shares")
    params = [nn.Parameter(larger[:, 2:]), nn.Parameter(larger.view(torch.float16)[:, 2])]
    optimizer = NpuFusedSGD(params, lr=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(p, -torch.ones_like(p)) for p in params)


def frozen_cases():
    larger = torch.ones(4, 4, device=DEVICE)
    yield [torch.ones(1, device=DEVICE).expand(4), torch.ones(3, device=DEVICE)]
    yield [larger, larger[:, 0]]
    yield [larger[:, 0], larger]
    yield [larger[:, :2], larger[:, 1:]]


@pytest.mark.parametrize("case", range(4))
def test_frozen_ones_may_overlap(case):
    frozen, trained = list(frozen_cases())[case]
    params = [nn.Parameter(frozen, requires_grad=False), nn.Parameter(trained)]
    optimizer = NpuFusedAdam(params, lr=0.1)
    (other,) = dense_copies(params[1:])
    reference = torch.optim.Adam([other], lr=0.1)
    for step in (0, 2):
        set_grads(step, params[1:], [other])
        optimizer.step()
        reference.step()
    assert_near(params[1:], [other])


def test_one_is_checked_again_when_it_is_moved_or_unfrozen():
    larger = torch.ones(4, 4, device=DEVICE)
    column, other, frozen = (nn.Parameter(larger[:, i]) for i in range(3))
    frozen.requires_grad_(False)
    optimizer = NpuFusedSGD([{"params": [column, frozen]}, {"params": [other]}], lr=0.5)

    def step(*, refused):
        before = larger.clone()
        for p in (column, other, frozen):
            p.grad = torch.ones_like(p) if p.requires_grad else None
        if refused:
            with pytest.raises(ValueError, match="another parameter shares elements"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(before, larger) == refused

    step(refused=False)
    other.data = larger[:, 0]
    step(refused=True)
    other.data = larger[:, 2]
    step(refused=False)
    frozen.requires_grad_(True)
    step(refused=True)
    other.data = larger[:, 3]
    step(refused=False)
    assert larger[0].tolist() == [-0.5, 0.5, 0.0, 0.5]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))])
        return out


def test_a_check_needs_memory_for_what_is_shared_and_not_in_each_step():
    alone, shared = torch.zeros(2, 10_000, device=DEVICE).unbind()
    params = [nn.Parameter(t) for t in (alone[-8::2], shared[-800::40], shared[-799::40])]
    params[0].data = alone.clone()[-8::2]
    optimizer = NpuFusedSGD(params, lr=0.1)
    for limit in (1_000, 400):
        for p in params:
            p.grad = torch.ones_like(p)
        with Largest() as largest:
            optimizer.step()
        assert largest.numel <= limit
    assert shared.count_nonzero() == 40


def test_combined_buffers_are_refused():
    _, params = with_gaps()
    optimizer = NpuFusedSGD(params, lr=0.5)
    set_grads(0, params)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"shape \(5, 4\) cannot be moved into a combined buffer.*Nothing has moved"):
        optimizer.get_optimizer_combined_params()
