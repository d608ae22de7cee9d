# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each of several processes checks of apex_npu.parallel; the arguments are names of functions here."""

import copy
import sys
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex_npu import amp
from apex_npu.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    flat_dist_call,
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches():
    """The batch of every process."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(dist.get_world_size(), 6, 4, generator=generator))


def mean_gradients(loss_of, model=None):
    """The average over processes, computed by one alone."""
    model = model or net()
    for x in batches():
        (loss_of(model, x) / dist.get_world_size()).backward()
    return [p.grad for p in model.parameters()]


def loss_of(model, x):
    return model(x).square().mean()


def assert_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


def grads(model):
    return [p.grad for p in model.parameters()]


def gradients():
    for options in ({}, {"delay_allreduce": True}, {"message_size": 10}):
        model = net()
        if dist.get_rank():
            model[0].weight.data.fill_(5.0)  # rank 0's parameters are everybody's
        ddp = DistributedDataParallel(model, **options)
        loss_of(ddp, batches()[dist.get_rank()]).backward()
        assert_close(grads(model), mean_gradients(loss_of))
        assert all(name.startswith("module.") for name in ddp.state_dict())


def unused():
    def loss_of_part(model, x):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        assert inner.spare.requires_grad
        return model(x).square().mean()

    def net_with_spare():
        model = net()
        model.spare = nn.Parameter(torch.ones(3))
        return model

    model = net_with_spare()
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        loss_of_part(ddp, batches()[dist.get_rank()]).backward()
    assert_close(grads(model), mean_gradients(loss_of_part, net_with_spare()))


def accumulation():
    model = net()
    ddp = DistributedDataParallel(model)
    x = batches()[dist.get_rank()]
    ddp.disable_allreduce()
    loss_of(ddp, x).backward()
    alone = net()
    loss_of(alone, x).backward()
    assert_close(grads(model), grads(alone))
    ddp.enable_allreduce()
    loss_of(ddp, x).backward()
    assert_close(grads(model), [2 * g for g in mean_gradients(loss_of)])


def amp_levels():
    for level in ("O0", "O1", "O2"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=16.0)
        ddp = DistributedDataParallel(model, delay_allreduce=True)
        loss = ddp(batches()[dist.get_rank()]).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        found = [p.grad for p in amp.master_params(optimizer)]
        amp.shutdown()
        # Float16 products.
        assert_close(found, mean_gradients(loss_of), rtol=2e-2, atol=2e-3)


def reductions():
    world = dist.get_world_size()
    for options, factor in (
        ({"gradient_average": False}, world),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, world / 4.0),
        ({"gradient_predivide_factor": 4.0}, 1.0),
        ({"allreduce_always_fp32": True}, 1.0),
    ):
        model = net()
        ddp = DistributedDataParallel(model, **options)
        loss_of(ddp, batches()[dist.get_rank()]).backward()
        assert_close(grads(model), [factor * g for g in mean_gradients(loss_of)])
    # Summed in float16 this would be inf.
    model = nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(model, allreduce_always_fp32=True)
    ddp(torch.full((1, 1), 60000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad.item() == torch.tensor(60000.0).half().item()


def flat_calls():
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [
        torch.full((3,), float(rank)),
        torch.full((2, 2), rank, dtype=torch.float64),
        torch.full((1,), 2.0 * rank),
    ]
    flat_dist_call(tensors, dist.all_reduce)
    mean = sum(range(world)) / world
    assert [t.flatten()[0].item() for t in tensors] == [mean, mean, 2 * mean]
    p = nn.Parameter(torch.full((2,), float(rank + 3)))
    flat_dist_call([p, *tensors], dist.broadcast, (0,))
    assert p.tolist() == [3.0, 3.0]

    model = net()
    model[0].bias.data.fill_(float(rank))
    reducer = Reducer(model)
    assert model[0].bias[0] == 0.0
    model[0].weight.grad = torch.full_like(model[0].weight, float(rank))
    reducer.reduce()
    assert model[0].weight.grad[0, 0] == mean
    grads_ = [torch.full((2,), float(rank)), (torch.full((1,), float(rank)), [None])]
    Reducer(grads_).reduce()
    assert grads_[1][0][0] == mean
    for given in (lambda t: [iter([t])], lambda t: [{t}], lambda t: {"t": [t]}.values(), lambda t: t):
        t = torch.tensor(float(rank))
        Reducer(given(t)).reduce()
        assert t == mean


def groups():
    world = dist.get_world_size()
    assert create_syncbn_process_group(0) is None
    assert dist.get_world_size(create_syncbn_process_group(1)) == 1
    assert dist.get_world_size(create_syncbn_process_group(world)) == world
    for bad in (-1, world + 1):
        with pytest.raises(ValueError, match=f"got {bad}"):
            create_syncbn_process_group(bad)


def sync_batchnorm():
    x = torch.randn(dist.get_world_size(), 6, 3, 4, generator=torch.Generator().manual_seed(2)).double() * 3 + 1
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(3)).double()
    for momentum in (0.1, None):
        plain = nn.BatchNorm1d(3, momentum=momentum).double()
        norm = convert_syncbn_model(copy.deepcopy(plain))
        assert isinstance(norm, SyncBatchNorm)
        whole = x.flatten(0, 1).requires_grad_()
        own = x[dist.get_rank()].clone().requires_grad_()
        for _ in range(2):
            for tensor in (whole, own, *plain.parameters(), *norm.parameters()):
                tensor.grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                expected, found = plain(whole), norm(own)
                (expected.sin() * weight).sum().backward()
                (found.sin() * weight).sum().backward()
        rows = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
        torch.testing.assert_close(found, expected[rows])
        torch.testing.assert_close(own.grad, whole.grad[rows])
        for p in norm.parameters():
            dist.all_reduce(p.grad)
        assert_close(grads(norm), grads(plain))
        torch.testing.assert_close(norm.running_mean, plain.running_mean)
        torch.testing.assert_close(norm.running_var, plain.running_var)
        assert norm.num_batches_tracked == 2
        torch.testing.assert_close(norm.eval()(own), plain.eval()(whole)[rows])
    half = SyncBatchNorm(3).half()
    assert half(x[dist.get_rank()].half()).dtype == torch.float16


if __name__ == "__main__":
    processes.join()
    for name in sys.argv[1:]:
        globals()[name]()
    processes.leave()
