# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradient buffers whose memory gradients own between steps, beside torch.optim on the same gradients."""

import gc
import math

import pytest
import torch
from devices import DEVICE, needs_extension
from small_programs import initialize
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.fusion import FlatGrads, grad_memory
from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.grad_memory import GradCopier
from apex_npu.ops.gather import AddressTable
from apex_npu.ops.grad_lists import SentTables

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU reads gradients where autograd leaves them"),
    needs_extension,
]
SHAPES = [(300, 7), (5,), (64, 33), (1,), (0,), (17,)]


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    """Buffers of few elements are lent, too, and what new memory holds is nan; no gradient stays where it is."""
    monkeypatch.setattr(grad_memory, "LENT_NUMEL", 0)
    monkeypatch.setattr(FlatGrads, "gathers_all", True)
    renew = FlatBuffer.renew

    def poisoned(self):
        renew(self)
        self.flat.fill_(math.nan)

    monkeypatch.setattr(FlatBuffer, "renew", poisoned)


def pair(kind=optimizers.NpuFusedAdam, of=torch.optim.Adam, **options):
    """A fused optimizer and torch's, of parameters with the same values."""
    torch.manual_seed(0)
    values = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    return kind(ours, lr=0.1, **options), of(theirs, lr=0.1)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def backward(*optimizers, seed, members=None):
    """Add gradients, as a backward does, to the parameters numbered ``members``; None: to all."""
    for optimizer in optimizers:
        for i, p in enumerate(params_of(optimizer)):
            if members is None or i in members:
                generator = torch.Generator().manual_seed(100 * seed + i)
                weight = torch.randn(p.shape, generator=generator).to(DEVICE)
                (p * weight).sum().backward()


def check(ours, theirs):
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()


def live_bytes():
    gc.collect()
    return torch.npu.memory_allocated() if DEVICE.type == "npu" else torch.cuda.memory_allocated()


def test_memory_is_free_when_gradients_are_cleared_by_whatever_means():
    ours, _ = pair()
    params = params_of(ours)

    def one_by_one():
        for p in params:
            p.grad = None

    cleared = []
    for clear in (ours.zero_grad, one_by_one, ours.zero_grad, nn.ParameterList(params).zero_grad, ours.zero_grad):
        backward(ours, seed=1)
        ours.step()
        held = live_bytes()
        clear()
        assert held - live_bytes() >= 4 * sum(p.numel() for p in params)
        cleared.append(live_bytes())
    # The second step is the first that gets new memory, for which a GPU finds once where the padding is. A GPU keeps
    # tables of addresses of the last steps.
    tables = 512 * SentTables.MOST if DEVICE.type == "cuda" else 0
    assert max(cleared[1:]) - min(cleared[1:]) <= tables


@pytest.mark.parametrize("kept", [range(6), [2], [0, 5]], ids=str)
@pytest.mark.parametrize("stepped", [False, True])
def test_what_a_script_keeps_of_gradients_is_never_written_again(kept, stepped):
    ours, theirs = pair()
    found = []
    for seed in range(4):
        backward(ours, theirs, seed=seed)
        if stepped:
            step(ours, theirs)
        else:
            ours.clip_optimizer_grad_norm_fused(1e9)
        found += [(params_of(ours)[i].grad, params_of(ours)[i].grad.clone()) for i in kept]
        if seed == 1:  # those that are kept alone: the others are added to
            for i in kept:
                params_of(ours)[i].grad = params_of(theirs)[i].grad = None
        else:
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
    backward(ours, theirs, seed=4)
    step(ours, theirs)
    check(ours, theirs)
    for grad, values in found:
        assert torch.equal(grad, values)


def test_gradients_that_share_memory_or_have_a_graph_are_not_taken_for_those_of_slots():
    ours, theirs = pair()
    backward(ours, theirs, seed=0)
    step(ours, theirs)
    for optimizer in (ours, theirs):
        params = params_of(optimizer)
        params[1].grad = params[1].grad.detach()  # an alias
        params[5].grad = params[5].grad.flip(0)
        alias = nn.Parameter(torch.zeros(300, 7, device=DEVICE))
        alias.grad = params[0].grad
    step(ours, theirs)
    check(ours, theirs)


def test_a_buffer_that_a_script_has_stays():
    ours, theirs = pair()
    backward(ours, theirs, seed=0)
    step(ours, theirs)
    ours.zero_grad(), theirs.zero_grad()
    (flat,) = ours.get_optimizer_combined_grads()
    for seed in range(2):
        backward(ours, theirs, seed=seed)
        (again,) = ours.get_optimizer_combined_grads()
        assert again.data_ptr() == flat.data_ptr()
        assert flat.norm() > 0
        step(ours, theirs)
        check(ours, theirs)
        ours.zero_grad(), theirs.zero_grad()


def test_a_step_that_is_skipped_leaves_the_memory_to_gradients():
    model = nn.Linear(200, 200, bias=False).to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, "O0", loss_scale="dynamic")
    for factor in (1.0, float("inf"), 1.0):
        with amp.scale_loss(model(torch.ones(1, 200, device=DEVICE)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        optimizer.step()
        held = live_bytes()
        model.zero_grad()
        assert held - live_bytes() >= 4 * 200 * 200


def test_an_interrupt_while_memory_is_left_to_gradients(monkeypatch):
    ours, theirs = pair()
    backward(ours, theirs, seed=0)
    ours.clip_optimizer_grad_norm_fused(math.inf)
    params_of(ours)[0].grad = params_of(theirs)[0].grad = None
    (grads,) = ours.flat_grads()
    slots = grads.memory.slots

    class Interrupted:
        def let_go(self, flat):
            slots.let_go(flat)
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(slots, name)

    with monkeypatch.context() as patch:
        patch.setattr(grads.memory, "slots", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            ours.step()
    theirs.step()
    backward(ours, theirs, seed=1)
    norm = ours.clip_optimizer_grad_norm_fused(math.inf)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(params_of(theirs), math.inf), rtol=1e-5, atol=1e-6)
    step(ours, theirs)
    check(ours, theirs)


def test_gradients_whose_copy_has_failed(monkeypatch):
    ours, theirs = pair()
    for seed in range(2):
        backward(ours, theirs, seed=seed)
        if seed == 0:
            step(ours, theirs)
            ours.zero_grad(), theirs.zero_grad()

    def no_memory(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        for copier, copy in ((GradCopier, "copy_in"), (AddressTable, "take")):  # the latter on a GPU
            patch.setattr(copier, copy, no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            ours.step()
    for optimizer in (ours, theirs):  # what is copied now has no neighbours
        for p in params_of(optimizer)[1::2]:
            p.grad = None
    norm = ours.clip_optimizer_grad_norm_fused(math.inf)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(params_of(theirs), math.inf), rtol=1e-5, atol=1e-6)
    step(ours, theirs)
    check(ours, theirs)


def test_the_buffer_of_a_captured_block_stays_where_it_is():
    params = [nn.Parameter(torch.ones(50, 20, device=DEVICE)) for _ in range(3)]
    optimizer = optimizers.NpuFusedAdam(params, lr=0.1, capturable=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    addresses = [p.grad.data_ptr() for p in params]
    optimizer.zero_grad()
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p.grad.data_ptr() for p in params] == addresses
