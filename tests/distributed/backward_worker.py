# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Backward in all its forms: the gradients after scale_loss are averages.

Run in several processes; the arguments are names of functions here.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from common import assert_averages, assert_equal_on_all, average, backward, data, local_grads, loss_on, main, mlp, start
from devices import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_npu import amp, optimizers
from apex_npu.fusion import grad_memory


def gradients_are_averages():
    rank = dist.get_rank()
    for options in ({}, {"ddp_replica_count": 1}, {"ddp_replica_count": 100}):
        model, optimizer = start(mlp(), **options)
        for step in range(3):
            loss = loss_on(data(step, 0, rank))
            expected = local_grads(model, loss)
            backward(loss(model), optimizer)
            assert_averages(model, expected)
            optimizer.zero_grad(set_to_none=bool(step % 2))
        amp.shutdown()


def sent_during_backward():
    """All buckets but the last are on their way before the first layer's gradient is there."""
    torch.manual_seed(0)
    model, optimizer = start(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(DEVICE))
    reducer, sent = None, []
    x = torch.randn(3, 16, device=DEVICE)

    def look(grad):
        sent.append([bucket.sent for bucket in reducer._buckets] if reducer else [])

    model[0].weight.register_hook(look)
    for _ in range(3):
        backward(loss_on(x)(model), optimizer)
        reducer = reducer_of(optimizer)
    assert len(reducer._buckets) == 4
    assert sent[1:] == [[True] * (len(reducer._buckets) - 1) + [False]] * 2


class Backwards(nn.Module):
    """Layers are called in the opposite of the order in which they are registered."""

    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def recorded_order():
    for level in ("O0", "O2"):
        train_backwards(level)
        amp.shutdown()


def train_backwards(level):
    torch.manual_seed(0)
    model, optimizer = start(Backwards().to(DEVICE), level=level, loss_scale=1.0, ddp_replica_count=6)
    early, reducers = [], []
    model.layers[-1].weight.register_hook(
        lambda grad: early.append([bucket.sent for reducer in reducers for bucket in reducer._buckets])
    )
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank())).to(DEVICE)
        reducers[:] = [reducer_of(optimizer)] if step else []
        early.clear()
        if level == "O0":
            expected = local_grads(model, loss_on(x))
            early.clear()
        backward(loss_on(x)(model), optimizer)
        if level == "O0":
            assert_averages(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        # layers[-1] comes last in backward: all others are on their way by then.
        assert early == [[True] * (len(reducers[0]._buckets) - 1) + [False]] if step else [[]]


def reducer_of(optimizer):
    (reducer,) = optimizer._amp_state.parallel.reducers
    return reducer


def several_forwards(forward, *inputs):
    def loss(model):
        return sum(forward(model, x) for x in inputs).square().mean()

    return loss


def unusual_backwards():
    rank = dist.get_rank()
    x, y = data(0, 0, rank), data(1, 0, rank)
    # Called several times before one backward; then checkpointed, which reaches parameters several times.
    for forward in (
        lambda m, x: m(x),
        lambda m, x: checkpoint(m, x, use_reentrant=False),
        lambda m, x: checkpoint(m, x.clone().requires_grad_(), use_reentrant=True),
    ):
        model, optimizer = start(mlp())
        loss = several_forwards(forward, x, y)
        for _ in range(3):
            expected = local_grads(model, loss)
            backward(loss(model), optimizer)
            assert_averages(model, expected)
            optimizer.zero_grad()
        amp.shutdown()

    # Two backward calls in a block, always.
    model, optimizer = start(mlp())
    for _ in range(3):
        expected = local_grads(model, lambda m: loss_on(x)(m) + loss_on(y)(m))
        with amp.scale_loss(loss_on(x)(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            loss_on(y)(model).backward()
        assert_averages(model, expected)
        optimizer.zero_grad()
    amp.shutdown()

    # A gradient penalty through .grad.
    model, optimizer = start(mlp())
    for _ in range(3):

        def penalised(m):
            loss_on(x)(m).backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in m.parameters())
            for p in m.parameters():
                p.grad = None
            return penalty

        expected = local_grads(model, penalised)
        with amp.scale_loss(loss_on(x)(model), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in model.parameters())
            for p in model.parameters():
                p.grad = None
            penalty.backward()
        assert_averages(model, expected)
        optimizer.zero_grad()


def accumulation():
    for level, tolerance in (("O0", {}), ("O2", {"rtol": 2e-2, "atol": 1e-3})):
        for apart in (amp.no_sync, contextlib.nullcontext):
            for kind in (optimizers.NpuFusedSGD, torch.optim.SGD):
                accumulate(level, apart, kind, tolerance)
                accumulate(level, apart, kind, tolerance, delay_unscale=True)


def accumulate(level, apart, kind, tolerance, **options):
    losses = [loss_on(data(0, micro, dist.get_rank())) for micro in range(3)]
    model = mlp()
    expected = local_grads(model, lambda m: sum(loss(m) for loss in losses))
    model, optimizer = start(model, kind(model.parameters(), lr=0.1), level=level, loss_scale=64.0)
    for _ in range(2):
        for loss in losses[:-1]:
            with apart():
                backward(loss(model), optimizer, **options)
        if apart is amp.no_sync:
            with pytest.raises(RuntimeError, match=r"of this process alone|delay_unscale=True"):
                optimizer.step()
        backward(losses[-1](model), optimizer)
        found = [p.grad for p in amp.master_params(optimizer)]
        for grad, local in zip(found, expected, strict=True):
            torch.testing.assert_close(grad.cpu().double(), average(local), **{"rtol": 1e-6, "atol": 1e-7, **tolerance})
        assert_equal_on_all(found)
        optimizer.zero_grad()
    amp.shutdown()


def changing_parameters_within_an_accumulation():
    for level, tolerance in (("O0", {"rtol": 1e-6, "atol": 1e-7}), ("O2", {"rtol": 2e-2, "atol": 1e-3})):
        for kind in (torch.optim.SGD, optimizers.NpuFusedSGD):
            for where in ("everywhere", "on rank 1"):
                change_within_an_accumulation(level, kind, tolerance, alone=where == "on rank 1")
                amp.shutdown()


def change_within_an_accumulation(level, kind, tolerance, *, alone):
    """Frozen, it counts with what it had; unfrozen, which all have to do together, with what it has since."""
    rank = dist.get_rank()
    x, y = data(0, 0, rank), data(0, 1, rank)
    model = mlp()
    of_x, of_y = local_grads(model, loss_on(x)), local_grads(model, loss_on(y))
    model, optimizer = start(model, kind(model.parameters(), lr=0.1), level=level, loss_scale=64.0)
    frozen, unfrozen = model[2].weight, model[4].bias
    for _ in range(2):
        frozen.requires_grad_(True)
        unfrozen.requires_grad_(alone)
        with amp.no_sync():
            backward(loss_on(x)(model), optimizer)
        frozen.requires_grad_(alone and rank != 1)
        unfrozen.requires_grad_(True)
        backward(loss_on(y)(model), optimizer)
        pairs = zip(model.parameters(), amp.master_params(optimizer), of_x, of_y, strict=True)
        for param, stepped, first, second in pairs:
            first = torch.zeros_like(first) if param is unfrozen and not alone else first
            second = torch.zeros_like(second) if not param.requires_grad else second
            torch.testing.assert_close(stepped.grad.cpu().double(), average(first + second), **tolerance)
        optimizer.zero_grad()


def precision_of_averages():
    for dtype, expected in ((None, torch.float16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = nn.Linear(4, 1, bias=False).to(DEVICE)
        model, optimizer = start(model, level="O2", loss_scale=1.0, ddp_reduce_dtype=dtype)
        # Near float16's largest number: a plain sum would be inf.
        backward(model(torch.full((1, 4), 40000.0, device=DEVICE)).sum(), optimizer)
        (master,) = amp.master_params(optimizer)
        want = torch.tensor(40000.0).to(expected).half().float()
        assert torch.equal(master.grad.cpu(), want.expand(1, 4)), (dtype, master.grad)
        amp.shutdown()
    # The smallest number that float16 has survives where two processes have it, and is not made of nothing.
    tiny = 2.0**-23
    model, optimizer = start(nn.Linear(4, 1, bias=False).to(DEVICE), level="O2", loss_scale=1.0)
    backward(model(torch.full((1, 4), tiny, device=DEVICE)).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.cpu(), torch.full((1, 4), tiny))


def cleared_in_a_block():
    """Gradients that a script drops while they are sent: collectives go on in memory that nothing else gets."""
    least, grad_memory.LENT_NUMEL = grad_memory.LENT_NUMEL, 0  # on a device gradients own it between steps
    try:
        model = mlp()
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        model, optimizer = start(model, optimizer)
        for step in range(4):
            loss = loss_on(data(step, 0, dist.get_rank()))
            expected = local_grads(model, loss)
            with amp.scale_loss(loss(model), optimizer) as scaled_loss:
                scaled_loss.backward()
                if step == 2:
                    wires = [bucket.wire for bucket in reducer_of(optimizer)._buckets if bucket.sent]
                    addresses = [wire.data_ptr() for wire in wires]
                    optimizer.zero_grad()
                    assert wires
                    assert [wire.data_ptr() for wire in wires] == addresses
            if step != 2:
                assert_averages(model, expected)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.flat_grads()[0].memory.lends:
                assert not optimizer.flat_grads()[0].has_buffer
    finally:
        grad_memory.LENT_NUMEL = least


if __name__ == "__main__":
    main(globals())
