# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What processes agree on: set-up, loss scales, overflow.

Run in several processes; the arguments are names of functions here.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from common import assert_averages, assert_equal_on_all, backward, data, local_grads, loss_on, main, mlp, start, step_on
from devices import DEVICE, SIMULATOR, VENDOR
from torch import nn
from torch.distributed.algorithms import Join

from apex_npu import amp, optimizers
from apex_npu.distributed.consistency import RanksDifferError


def refusals():
    rank = dist.get_rank()

    def refused(model, said, error=RanksDifferError, optimizer=None, **options):
        before = {name: (p, p.dtype, p.clone()) for name, p in model.named_parameters()}
        kind = type(optimizer)
        with pytest.raises(error, match=said):
            start(model, optimizer, level="O2", **options)
        assert optimizer is None or type(optimizer) is kind
        for name, (p, dtype, value) in before.items():
            assert dict(model.named_parameters())[name] is p
            assert p.dtype == dtype
            assert torch.equal(p, value)

    refused(
        nn.Linear(3, 4 if rank else 2), r"ranks 0 and 1 .* differ in parameter weight: .*\(2, 3\).* rank 0, \(4, 3\)"
    )
    refused(nn.Linear(3, 2, bias=not rank), "where rank 0 has parameter bias")
    double = nn.Linear(3, 2)
    double.bias = nn.Parameter(double.bias.double() if rank else double.bias.clone())
    refused(double, "float32.* on rank 0, .*float64")
    names = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
    model = nn.ModuleDict(dict(names[::-1] if rank else names))
    refused(model, "where rank 0 has parameter a.weight .* rank 1 has parameter b.weight")
    model = mlp()
    order = list(model.parameters())
    refused(model, r"param_groups\[0\]", optimizer=torch.optim.SGD(order[::-1] if rank else order, lr=0.1))
    refused(mlp().requires_grad_(rank == 0), "trainable on rank 0")
    refused(mlp(), "options", ddp_replica_count=1 + rank)
    # What fails on one rank alone fails on all.
    model = mlp()
    error, said = (
        (RuntimeError, "expected torch.float32") if rank else (RanksDifferError, "rank 1 .* has failed.*Found param")
    )
    refused(model.half() if rank else model, said, error)
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    refused(wrapped, "0 is an instance of DistributedDataParallel", RuntimeError)
    refused(mlp(), "combine_ddp=True with enabled=False", RuntimeError, enabled=False)
    refused(mlp(), "ddp_replica_count must be an integer >= 1, got 0", ValueError, ddp_replica_count=0)
    refused(mlp(), "must be a torch.distributed process group or None, got 3", TypeError, process_group=3)
    alone = dist.new_group([0])
    if rank:
        refused(
            mlp(), "process_group does not contain this process, which has global rank", ValueError, process_group=alone
        )
        with pytest.raises(ValueError, match="overflow_group"):
            amp.initialize(mlp(), opt_level="O1", overflow_group=alone, verbosity=0)
    with pytest.raises(RuntimeError, match="process_group is for combine_ddp=True"):
        amp.initialize(mlp(), opt_level="O1", process_group=dist.group.WORLD)
    amp.initialize(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), combine_ddp=False, verbosity=0)


class FailingOnce(nn.RNN):
    """Fails when its parameters have been replaced, while ``error`` is set."""

    error = None

    def flatten_parameters(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().flatten_parameters()


def failure_of_a_second_initialize():
    """Where one rank cannot make its model float32 again, none begins, and the first optimizer goes on averaging."""
    rank = dist.get_rank()
    model, optimizer = start(FailingOnce(6, 3).to(DEVICE), level="O2", loss_scale=64.0)
    values = [p.detach().clone() for p in model.parameters()]
    if rank:
        model.error = MemoryError("no memory here")
    error, said = (
        (MemoryError, "no memory here") if rank else (RanksDifferError, "rank 1 .* has failed.*no memory here")
    )
    with pytest.raises(error, match=said):
        start(model, level="O2")
    for p, value in zip(model.parameters(), values, strict=True):
        assert p.dtype == value.dtype == torch.float16
        assert torch.equal(p, value)
    for _ in range(2):
        step_on(model(data(0, 0, rank))[0].square().mean(), optimizer)
    assert_equal_on_all(list(model.parameters()))
    assert not any(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def another_seed():
    """Weights and masters are those of the first process, whichever way gradients are averaged."""
    for i, level in enumerate(("O0", "O1", "O2", "O3", "O4", "O5")):
        for j, kind in enumerate((torch.optim.SGD, optimizers.NpuFusedSGD)):
            # Each pair of a level, an optimizer and a way of averaging, in two cases a level.
            train_from_another_seed(level, kind, combine_ddp=(i + j) % 2 == 1)
            amp.shutdown()


def remainders_of_another_seed():
    """Of float32 values of which remainders are kept, too."""
    train_from_another_seed("O5", optimizers.NpuFusedSGD, combine_ddp=False, store_param_remainders=True)


def train_from_another_seed(level, kind, *, combine_ddp, **more):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    values = [[p.detach().cpu().clone() for p in model.parameters()]]
    dist.broadcast_object_list(values, 0)
    optimizer = kind(model.parameters(), lr=0.05, momentum=0.9)
    options = {"combine_grad": combine_ddp, "combine_ddp": combine_ddp, "loss_scale": 64.0, **more}
    model, optimizer = start(model, optimizer, level=level, **options)
    ddp = model if combine_ddp else nn.parallel.DistributedDataParallel(model)

    def float32_values():
        shown = model.state_dict()
        return [shown[name] for name, _ in model.named_parameters()]

    begun = [first.half().float() if level == "O3" else first for first in values[0]]
    for value, first in zip(float32_values(), begun, strict=True):
        assert torch.equal(value.cpu().float(), first), (level, kind, combine_ddp)
    assert_equal_on_all([*model.parameters(), *float32_values()])
    for step in range(5):
        step_on(loss_on(data(step, 0, rank))(ddp), optimizer)
    assert_equal_on_all([*model.parameters(), *float32_values()])
    assert not any(torch.equal(value.cpu().float(), p) for value, p in zip(float32_values(), begun, strict=True))


def masters_that_were_written():
    """What the first process has written before DistributedDataParallel counts, and what all write after it."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(6, 2).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = start(model, optimizer, level="O2", combine_ddp=False)
    with torch.no_grad():
        model.bias.fill_(1.0 + rank)
        for flat in optimizer.get_optimizer_combined_params():
            flat[:2] += 0.0001 * (1 + rank)  # which the model, in float16, does not show
    written = [p.detach().clone() for p in amp.masters_of(model.parameters())]
    ddp = nn.parallel.DistributedDataParallel(model)
    weight, bias = amp.masters_of(model.parameters())
    assert torch.equal(bias, torch.ones_like(bias))
    if rank == 0:
        assert all(map(torch.equal, (weight, bias), written))
    with torch.no_grad():
        model.bias.fill_(3.0)
    backward(loss_on(data(0, 0, rank))(ddp), optimizer)
    assert torch.equal(bias, torch.full_like(bias, 3.0))
    optimizer.step()
    assert_equal_on_all([*model.parameters(), weight, bias])


def state_dicts_that_were_written():
    """What the first process alone has loaded in part before DistributedDataParallel, all have after it."""
    rank = dist.get_rank()
    for level, written in (("O2", 1 / 3), ("O3", 0.25), ("O5", 1 / 3)):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 2)).to(DEVICE)
        optimizer = optimizers.NpuFusedSGD(model[1].parameters(), lr=0.1)
        model, optimizer = start(model, optimizer, level=level, combine_ddp=False)
        if rank == 0:
            for value in model.state_dict().values():
                value.copy_(torch.full_like(value, written))
        ddp = nn.parallel.DistributedDataParallel(model)
        for tensor in (*ddp.state_dict().values(), *model.parameters()):
            assert torch.equal(tensor, torch.full_like(tensor, written))
        backward(loss_on(data(0, 0, rank))(ddp), optimizer)
        optimizer.step()
        assert_equal_on_all([*model.parameters(), *model.state_dict().values()])
        amp.shutdown()


def averaged_twice():
    model, optimizer = start(mlp(), level="O2")
    with pytest.raises(RuntimeError, match=r"combine_ddp=True.*SGD"):
        nn.parallel.DistributedDataParallel(model)
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(DEVICE))  # of another model
    backward(loss_on(data(0, 0, dist.get_rank()))(model), optimizer)
    optimizer.step()
    assert_equal_on_all(amp.masters_of(model.parameters()))


def smaller_group():
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([r]) for r in range(world)]
    model, optimizer = start(mlp(), process_group=groups[rank])
    x = data(0, 0, rank)
    expected = local_grads(model, lambda m: m(x).square().mean())
    backward(model(x).square().mean(), optimizer)
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def misuse():
    rank = dist.get_rank()
    model, optimizer = start(mlp())
    x = data(0, 0, rank)
    with (
        pytest.raises(RuntimeError, match="opened inside an amp"),
        amp.scale_loss(loss_on(x)(model), optimizer),
        amp.no_sync(),
    ):
        pass
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2, device=DEVICE))], lr=0.1)
    _, plain = amp.initialize(nn.Linear(2, 2).to(DEVICE), plain, opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match="must come from one amp"):
        backward(loss_on(x)(model), [optimizer, plain])
    # An optimizer of a former initialize still averages.
    expected = local_grads(model, loss_on(x))
    backward(loss_on(x)(model), optimizer)
    assert_averages(model, expected)
    for joinable, error, said in (
        (optimizer, RuntimeError, "Join does not support .* equally often"),
        (model, AttributeError, "join_hook"),
    ):
        with pytest.raises(error, match=said):
            Join([joinable])
    amp.shutdown()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    model, optimizer = start(mlp(), level="O1", loss_scale=64.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0 if rank else 32.0, "unskipped": 0}})
    with pytest.raises(RanksDifferError, match=r"different loss scales: 32\.0 and 64\.0"):
        backward(loss_on(x)(model), optimizer)


def copies():
    """A copy of model and optimizer averages, too."""
    rank = dist.get_rank()
    model, optimizer = start(mlp(), level="O2", loss_scale=1.0)
    model, optimizer = copy.deepcopy((model, optimizer))
    x = data(0, 0, rank)
    for _ in range(2):
        step_on(model(x).float().square().mean(), optimizer)
    assert_equal_on_all([p.detach().clone() for p in amp.master_params(optimizer)])


def overflow_in_a_micro_batch():
    """Of one rank, in a block that averages nothing: all ranks skip, and their scales stay the same."""
    rank = dist.get_rank()
    for level in ("O1", "O2"):
        model, optimizer = start(mlp(), level=level, dynamic_init_scale=2.0**8)
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        x = data(0, 0, rank)
        with amp.no_sync():
            backward((model(x).float() * (torch.inf if rank == 1 else 1.0)).mean(), optimizer)
        backward(model(x).float().mean(), optimizer)
        optimizer.step()
        assert not amp.last_step(optimizer).applied
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**7
        for p, value in zip(amp.master_params(optimizer), before, strict=True):
            assert torch.equal(p, value)
        optimizer.zero_grad()
        backward(model(x).float().mean(), optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).applied
        assert_equal_on_all([p.detach().clone() for p in amp.master_params(optimizer)])
        amp.shutdown()


def overflow_group():
    """Ranks that share no gradients skip together, and notice when their scales part."""
    rank = dist.get_rank()
    for level in ("O1", "O2"):
        model, optimizer = mlp(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, overflow_group=dist.group.WORLD, dynamic_init_scale=2.0**8
        )
        for step in range(3):
            bad = step == 1 and rank == 1
            backward((model(data(step, 0, rank)).float() * (torch.inf if bad else 1.0)).mean(), optimizer)
            optimizer.step()
            assert amp.last_step(optimizer).applied == (step != 1)
            optimizer.zero_grad()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**7
        if rank:
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 0}})
        with pytest.raises(RanksDifferError, match=r"different loss scales: 128\.0 and 512\.0"):
            backward(model(data(0, 0, rank)).float().mean(), optimizer)
        amp.shutdown()


def saturating_devices():
    """The flag is of one device alone, and all that their gradients show is a large number."""
    rank = dist.get_rank()
    if not VENDOR:  # whose chip saturates by what the process was started with
        SIMULATOR.configure(saturate="fp16")
    model, optimizer = start(mlp(), level="O2", dynamic_init_scale=2.0**8)
    for step in range(3):
        x = data(step, 0, rank)
        factor = 1e6 if step == 1 and rank == 1 else 1.0
        backward((model(x) * factor).float().mean(), optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).applied == (step != 1)
        optimizer.zero_grad()
    assert_equal_on_all([p.detach().clone() for p in amp.master_params(optimizer)])


if __name__ == "__main__":
    main(globals())
