# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that fully_shard and distribute_tensor have cut: each process steps its part.

Run in several processes; the arguments are names of functions here.
"""

import copy
import gc
import math
from operator import is_

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import data, folder_of_all, loss_on, main, mlp
from devices import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex_npu import optimizers
from apex_npu._extension import extension
from apex_npu.contrib.combine_tensors import combine_npu
from apex_npu.distributed import shard_grads
from apex_npu.fusion import FlatGrads
from apex_npu.fusion.shards import local_part

# Ours, and torch's of the same rule.
RULES = [
    (optimizers.NpuFusedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.NpuFusedAdam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optimizers.NpuFusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (optimizers.NpuFusedRMSprop, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (optimizers.NpuFusedAdadelta, torch.optim.Adadelta, {"lr": 1.0}),
    (optimizers.FusedAdagrad, torch.optim.Adagrad, {"lr": 0.01}),
]


class Uneven(nn.Module):
    """Parameters that do not divide by the number of processes, and one that leaves some processes nothing."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.odd = nn.Linear(2, 7)
        self.single = nn.Linear(7, 1)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x):
        return self.single(torch.tanh(self.frozen(self.odd(self.layers(x)))))


def sharded(**options):
    torch.manual_seed(0)
    model = Uneven().to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in (model.layers[0], model.layers[2], model.odd, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def all_used():
    """Parameters that are not trained have no state to be saved, and dcp wants all that it is to load."""
    model = sharded()
    model.unused.requires_grad_(False)
    return model


def accumulate(model, step):
    for micro in range(2):  # added up in gradients that fully_shard has reduced
        loss_on(data(step, micro, dist.get_rank()))(model).backward()


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model, optimizer, steps, given=None):
    """On the model's own gradients, or on those ``given`` for each step; returns them."""
    used = []
    for i, step in enumerate(steps):
        if given is None:
            accumulate(model, step)
        else:
            for p, grad in zip(model.parameters(), given[i], strict=True):
                p.grad = grad
        used.append(grads_of(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return used


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found, expected, **tolerance):
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.full_tensor(), **{"rtol": 1e-6, "atol": 1e-7, **tolerance})


def same_as_torch():
    for ours, theirs, options in RULES:
        model, twin = sharded(), sharded()
        optimizer, other = ours(model.parameters(), **options), theirs(twin.parameters(), **options)
        for step in range(6):
            accumulate(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            # The same gradients for both: those of twin would carry on what the two have rounded in other ways.
            for q, grad in zip(twin.parameters(), grads_of(model), strict=True):
                q.grad = grad
            optimizer.step()
            other.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
        assert_same(model, twin)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if theirs is not torch.optim.Adagrad:  # which has state before the first step
                assert optimizer.state.get(p, {}).keys() == other.state.get(q, {}).keys(), theirs
            for name, entry in optimizer.state.get(p, {}).items():
                value = other.state[q][name]
                assert isinstance(entry, DTensor) == isinstance(value, DTensor)
                # Where addends of a momentum cancel, what is left has their rounding: eps of the largest.
                largest = float(torch.linalg.vector_norm(whole(value).flatten(), math.inf)) if value.numel() else 0.0
                eps = torch.finfo(torch.float32).eps
                torch.testing.assert_close(whole(entry), whole(value), rtol=1e-5, atol=max(1e-8, eps * largest))


def parts_are_fused():
    """The parts of all parameters that divide evenly share one buffer, which is stepped by one kernel."""
    model = sharded()
    optimizer = optimizers.NpuFusedAdam(model.parameters())
    train(model, optimizer, range(2))
    groups = optimizer.fused_groups()
    train(model, optimizer, range(2, 4))
    assert all(map(is_, optimizer.fused_groups(), groups))  # not rebuilt in every step
    largest = max(groups, key=lambda group: len(group.params))
    assert len(largest.params) >= 6  # the three layers of mlp()
    begin, end = largest.param_flat.data_ptr(), largest.param_flat.data_ptr() + largest.param_flat.nbytes
    assert all(begin <= p.to_local().data_ptr() < end for p in model.layers.parameters())
    # Uneven and empty ones with them, in the memory that fully_shard gathers from; the former memory is not kept.
    assert len(groups) == 1
    assert not any(group.kept for group in groups)
    assert not all(p.numel() for p in largest.params) or dist.get_rank() == 0


# Kernels use gradients where they are.
IN_PLACE = DEVICE.type == "cpu" and extension is not None


def grouped(model):
    """Two param groups, whose parameters alternate in memory."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is held] for held in (True, False))
    return [{"params": matrices}, {"params": vectors, "lr": 0.02}]


def train_everything(kind, options, **sharding):
    """Steps after one backward and after two, over a frozen parameter that is trained later, and a loaded state."""
    model = sharded(**sharding)
    optimizer = kind(grouped(model), **options)
    for step in range(4):
        if step == 2:
            model.frozen.requires_grad_(True)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for micro in range(1 + step % 2):
            loss_on(data(step, micro, dist.get_rank()))(model).backward()
        before = [local_part(p.grad).data_ptr() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        if IN_PLACE:
            assert before == [local_part(p.grad).data_ptr() for p in model.parameters() if p.grad is not None]
        assert all(local_part(p).grad is None for p in model.parameters())  # would keep what a script clears
        optimizer.zero_grad(set_to_none=step < 3)
    return model, optimizer


def assert_equal(found, expected):
    """Bit for bit, state included."""
    (model, optimizer), (twin, other) = found, expected
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(local_part(p), local_part(q))
        assert optimizer.state.get(p, {}).keys() == other.state.get(q, {}).keys()
        for name, value in optimizer.state.get(p, {}).items():
            assert torch.equal(local_part(value), local_part(other.state[q][name]))


def in_place_is_as_copied():
    kinds = [(kind, options) for kind, _, options in RULES] + [(optimizers.NpuFusedRMSpropTF, {"lr": 0.1})]
    for kind, options in kinds:
        for sharding in {}, {"reshard_after_forward": False}:
            found = train_everything(kind, options, **sharding)
            if IN_PLACE:
                assert not any(group.grads.has_buffer for group in found[1].fused_groups())
            with pytest.MonkeyPatch.context() as patched:
                gather = lambda grads, slots=None, **_: FlatGrads.gather(grads, slots)  # noqa: E731
                patched.setattr(shard_grads.ShardGrads, "gather", gather)
                copied = train_everything_copied(kind, options, **sharding)
            assert all(group.grads.has_buffer for group in copied[1].fused_groups())
            assert_equal(found, copied)


def train_everything_copied(kind, options, **sharding):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "IN_PLACE", False)
        return train_everything(kind, options, **sharding)


def private_names_of_torch_have_moved():
    """The memory is found in another way, with one warning, and what is trained is the same."""
    kind, _, options = RULES[0]
    found = train_everything(kind, options)
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(torch.distributed._composable_state, "_module_state_mapping")
        assert shard_grads.memory_of_shards() is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_grads, "memory_of_shards", lambda: None)
        shard_grads.finds_parts.cache_clear()
        with pytest.warns(RuntimeWarning) as noted:
            other = train_everything_copied(kind, options)
    assert len([w for w in noted if "memory of sharded parameters in a place" in str(w.message)]) == 1
    assert_equal(found, other)
    shard_grads.finds_parts.cache_clear()


def steps_leave_nothing():
    """No object of Python and no memory, once all is set up."""
    model = sharded()
    optimizer = optimizers.NpuFusedAdamW(grouped(model), lr=1e-3)
    accumulate(model, 0)
    for _ in range(10):
        optimizer.step()
    gc.collect()
    gc.freeze()
    objects = len(gc.get_objects())
    for _ in range(1000):
        optimizer.step()
    gc.collect()
    assert len(gc.get_objects()) - objects <= 0
    gc.unfreeze()
    if IN_PLACE:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            optimizer.step()
        assert not [event for event in profile.function_events if event.cpu_memory_usage > 0]


def gradients_are_multiplied():
    """What unscaling does is seen in the gradients of parameters, each of which is multiplied once."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for overlapping in False, True:
        params = [nn.Parameter(distribute_tensor(torch.ones(6, 4, device=DEVICE), mesh, [Shard(0)])) for _ in range(2)]
        memory = torch.randn(2, *local_part(params[0]).shape, device=DEVICE)
        parts = [memory[0], memory[0] if overlapping else memory[1]]
        for p, part in zip(params, parts, strict=True):
            p.grad = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        inside, expected = [local_part(p.grad) for p in params], [part * 0.25 for part in parts]
        optimizer = optimizers.NpuFusedSGD(params, lr=0.0)
        optimizer.step()
        (group,) = optimizer.fused_groups()
        found_inf = torch.zeros(1, device=DEVICE)
        group.grads.unscale_(0.25, found_inf)
        assert not found_inf.item()
        for p, part, grad in zip(params, inside, expected, strict=True):
            assert torch.equal(local_part(p.grad), grad)
            assert (local_part(p.grad) is part) == (IN_PLACE and not overlapping)
            assert local_part(p).grad is None
        for group_of_params in optimizer.param_groups:
            group_of_params["lr"] = 1.0
        optimizer.step()
        for p, grad in zip(params, expected, strict=True):
            assert torch.equal(local_part(p), 1.0 - grad)
        local_part(params[1].grad)[0, 0] = torch.inf
        group.grads.unscale_(1.0, found_inf)
        assert found_inf.item()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied_parameters():
    trained = []
    for kind in (optimizers.NpuFusedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = Tied().to(DEVICE)
        fully_shard(model, mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
        train(model, kind(model.parameters(), lr=0.01), range(4))
        assert model.first.weight is model.second.weight
        trained.append(model)
    assert_same(*trained)


def checkpoints():
    for ours, theirs, options in RULES[:3]:
        folder = folder_of_all()
        model = all_used()
        optimizer = ours(model.parameters(), **options)
        train(model, optimizer, range(3))
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        grads = train(model, optimizer, range(3, 6))
        # Both continue alike: the fused optimizer bit for bit, torch's on the same gradients.
        for kind, given, tolerance in ((ours, None, {"rtol": 0.0, "atol": 0.0}), (theirs, grads, {})):
            twin = all_used()
            other = kind(twin.parameters(), **{**options, "lr": 0.5})
            state = {"model": get_model_state_dict(twin), "optim": get_optimizer_state_dict(twin, other)}
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(twin, state["model"])
            set_optimizer_state_dict(twin, other, state["optim"])
            train(twin, other, range(3, 6), given)
            assert_same(twin, model, **tolerance)
        # What was saved whole is cut again.
        twin = all_used()
        other = ours(twin.parameters(), **options)
        set_optimizer_state_dict(twin, other, full, options=StateDictOptions(full_state_dict=True))
        for p in twin.parameters():
            for value in other.state.get(p, {}).values():
                assert isinstance(value, DTensor) or not value.dim()


def plain_state_dicts():
    model = sharded()
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(2, 4))
    twin = sharded()
    twin.load_state_dict(weights)
    other = optimizers.NpuFusedAdam(twin.parameters())
    other.load_state_dict(state)
    train(twin, other, range(2, 4))
    assert_same(twin, model, rtol=0.0, atol=0.0)
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"].full_tensor()
    with pytest.raises(ValueError, match=r"parameter 0 is sharded and has 'exp_avg' as a plain tensor.*set_optimizer"):
        other.load_state_dict(state)
    plain = mlp()
    of_plain = optimizers.NpuFusedAdam(plain.parameters())
    entry = {"step": torch.tensor(1.0), "exp_avg": None, "exp_avg_sq": None}
    cut = distribute_tensor(torch.zeros_like(plain[0].weight), next(twin.parameters()).device_mesh, [Shard(0)])
    entry["exp_avg"] = entry["exp_avg_sq"] = cut
    groups = of_plain.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=r"parameter 0 is not sharded and has 'exp_avg' as a DTensor"):
        of_plain.load_state_dict({"state": {0: entry}, "param_groups": groups})


def what_users_do():
    """Parameters replaced inside, added, unfrozen, and gradients cut in another way."""
    model, twin = sharded(), sharded()
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=0.01)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    for m in (model, twin):
        m.load_state_dict({name: value.clone() for name, value in m.state_dict().items()}, assign=False)
        m.frozen.requires_grad_(True)
        m.to(DEVICE)  # fully_shard then checks its parts again
    train(model, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert_same(model, twin)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    torch.manual_seed(1)
    value, grad = torch.randn(6, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    for kind, kwargs in ((optimizers.NpuFusedSGD, {}), (torch.optim.SGD, {})):
        for placement in (Shard(0), Shard(1), Replicate()):
            p = nn.Parameter(distribute_tensor(value.clone(), mesh, [placement]))
            p.grad = distribute_tensor(grad.clone(), mesh, [Shard(1)])
            added = nn.Parameter(value.clone())
            added.grad = grad.clone()
            mixed = kind([p], lr=0.5, **kwargs)
            mixed.add_param_group({"params": [added], "lr": 0.25})
            mixed.step()
            torch.testing.assert_close(p.full_tensor(), value - 0.5 * grad)
            torch.testing.assert_close(added.detach(), value - 0.25 * grad)


def same_as_whole():
    """Of rules that torch has not: what is stepped in parts is what the same optimizer makes of whole parameters."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    kinds = [
        (optimizers.NpuFusedRMSpropTF, {"lr": 0.1, "momentum": 0.5}),
        (optimizers.FusedAdam, {"lr": 0.1, "weight_decay": 0.1, "capturable": True}),
        (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    ]
    generator = torch.Generator().manual_seed(0)
    for kind, options in kinds:
        values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in ((6, 4), (7,), (1, 3))]
        parts = [nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)])) for value in values]
        wholes = [nn.Parameter(value.clone()) for value in values]
        of_parts, of_wholes = kind(parts, **options), kind(wholes, **options)
        for _ in range(3):
            for part, whole_param in zip(parts, wholes, strict=True):
                whole_param.grad = torch.randn(part.shape, generator=generator).to(DEVICE)
                part.grad = distribute_tensor(whole_param.grad.clone(), mesh, [Shard(0)])
            of_parts.step()
            of_wholes.step()
        for part, whole_param in zip(parts, wholes, strict=True):
            torch.testing.assert_close(part.full_tensor(), whole_param.detach(), rtol=1e-6, atol=1e-7)


def random_bits():
    """Parts of a parameter draw different bits, replicas the same, and what is loaded goes on with the next ones."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    model = nn.Module()
    for name, placement in ("cut", Shard(0)), ("replica", Replicate()):
        whole_of = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
        model.register_parameter(name, nn.Parameter(distribute_tensor(whole_of, mesh, [placement])))
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.5 * 2.0**-7, stochastic_rounding=True)

    def step():
        for p in model.parameters():
            p.grad = -torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    step()
    parts = model.cut.full_tensor().chunk(dist.get_world_size())
    assert 0.4 < float((parts[0] == parts[1]).float().mean()) < 0.6
    gathered = [torch.empty_like(local_part(model.replica)) for _ in parts]
    dist.all_gather(gathered, local_part(model.replica).detach())
    assert torch.equal(gathered[0], gathered[1])
    saved = copy.deepcopy((get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)))
    step()
    expected = [p.full_tensor() for p in model.parameters()]
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.5 * 2.0**-7, stochastic_rounding=True)
    set_model_state_dict(model, saved[0])
    set_optimizer_state_dict(model, optimizer, saved[1])
    step()
    assert all(map(torch.equal, [p.full_tensor() for p in model.parameters()], expected))


def refusals():
    model = sharded()
    before = [p.full_tensor() for p in model.parameters()]

    class OwnUpdate(optimizers.NpuFusedLamb):
        def update(self, run, group):
            run.param.zero_()

    with pytest.raises(TypeError, match="is a DTensor"):
        OwnUpdate(model.parameters())
    lamb = OwnUpdate(mlp().parameters())
    with pytest.raises(TypeError, match="is a DTensor"):
        lamb.add_param_group({"params": model.parameters()})
    assert len(lamb.param_groups) == 1
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    addends = nn.Parameter(DTensor.from_local(torch.ones(2, device=DEVICE), mesh, [Partial()]))
    with pytest.raises(TypeError, match=r"hold addends \(Partial\)"):
        optimizers.NpuFusedSGD([addends], lr=0.1)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"sharded over processes .*clip_optimizer_grad_norm_fused"):
        optimizer.get_optimizer_combined_params()
    with pytest.raises(TypeError, match=r"must be a plain tensor .* got .*; pass its local tensor"):
        combine_npu(list(model.parameters()))
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value)


if __name__ == "__main__":
    main(globals())
