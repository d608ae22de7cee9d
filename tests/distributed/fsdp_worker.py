# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""amp and the rules that take norms, on models that ``fully_shard`` has cut.

Run in several processes; the arguments are names of functions here.
"""

import copy
import functools
import gc
import itertools
import math
import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import backward, data, folder_of_all, loss_on, main, mlp, step_on
from devices import DEVICE, memory_of
from sharded_worker import IN_PLACE, Uneven, assert_same, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from apex_npu import amp, optimizers
from apex_npu.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex_npu.distributed import shard_grads
from apex_npu.distributed.fully_sharded import reshard
from apex_npu.fusion import FlatGrads, grad_memory
from apex_npu.fusion.shards import local_part

NORM_RULES = [
    (optimizers.NpuFusedLamb, {"lr": 0.01, "weight_decay": 0.1, "use_global_grad_norm": True}),
    (optimizers.NpuFusedLamb, {"lr": 0.01, "adam": True}),
    (optimizers.FusedLAMB, {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.05}),
    (optimizers.FusedLAMB, {"lr": 0.01, "adam_w_mode": False, "use_nvlamb": True, "weight_decay": 0.1}),
    (optimizers.NpuFusedAdamP, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.NpuFusedAdamP, {"lr": 0.01, "weight_decay": 0.1, "delta": 10.0, "nesterov": True}),
    (optimizers.NpuFusedBertAdam, {"lr": 0.01, "max_grad_norm": 0.01}),
    (optimizers.FusedNovoGrad, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.FusedNovoGrad, {"lr": 0.01, "norm_type": 0, "reg_inside_moment": True, "weight_decay": 0.1}),
]
RULES = [
    *NORM_RULES,
    (optimizers.Lamb, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.NpuFusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.NpuFusedAdam, {"lr": 0.01, "amsgrad": True}),
    (optimizers.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9}),
    (optimizers.NpuFusedRMSprop, {"lr": 0.01, "momentum": 0.5}),
    (optimizers.NpuFusedRMSpropTF, {"lr": 0.01, "momentum": 0.5}),
    (optimizers.NpuFusedAdadelta, {"lr": 1.0}),
    (optimizers.FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    (optimizers.FusedAdagrad, {"lr": 0.01}),
]
LEVELS = ("O0", "O1", "O2", "O4", "O5")
# What fully_shard of torch 2.13 calls, or that of those before.
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def mesh_of_all():
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),))


def on_last_rank():
    """Of several processes the last one is not the one that others follow; a single one is both."""
    return dist.get_rank() == dist.get_world_size() - 1


def sharded(level="O0", make=Uneven, mesh=None, **options):
    torch.manual_seed(0)
    model = make().to(DEVICE)
    mesh = mesh or mesh_of_all()
    policy = amp.fsdp_policy(level)
    layers = (model.layers[0], model.layers[2], model.odd) if isinstance(model, Uneven) else ()
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, **options)
    return model


def start(model, optimizer, level, **options):
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


class Twin:
    """Whole copies of a model's parameters, stepped by an optimizer of their own with the model's gradients."""

    def __init__(self, model, kind, options):
        self._model = list(model.parameters())
        self.params = [nn.Parameter(whole(p.detach()).clone(), requires_grad=p.requires_grad) for p in self._model]
        self.optimizer = kind(self.params, **options)

    def take(self):
        for p, q in zip(self._model, self.params, strict=True):
            q.grad = None if p.grad is None else whole(p.grad).clone()

    def step(self):
        self.take()
        self.optimizer.step()

    def check(self, **tolerance):
        for p, q in zip(self._model, self.params, strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach(), **{"rtol": 1e-6, "atol": 1e-6, **tolerance})


def same_as_one_process(steps=4):
    """Steps of each rule at each level: of whole parameters the same optimizer makes the same."""
    for kind, options in RULES:
        for level in LEVELS if kind in (optimizers.NpuFusedAdamW, optimizers.FusedLAMB) else ("O2",):
            model = sharded(level)
            twin = Twin(model, kind, options)
            model, optimizer = start(model, kind(model.parameters(), **options), level)
            assert all(p is q for p, q in zip(amp.master_params(optimizer), model.parameters(), strict=True))
            for step in range(steps):
                backward(loss_on(data(step, 0, dist.get_rank()))(model), optimizer)
                twin.step()
                optimizer.step()
                optimizer.zero_grad()
            twin.check()
            amp.shutdown()


def eight_steps():
    same_as_one_process(8)


def same_as_plain_torch():
    """10 steps of AdamW at each level, with an overflow on one rank: a loop of plain torch with the same policy.

    Optimizers of torch skip together, too.
    """
    for level in LEVELS:
        train_beside_plain_torch(level, optimizers.NpuFusedAdamW, torch.optim.AdamW, 1e-3)
        if level in ("O1", "O2"):
            train_beside_plain_torch(level, optimizers.NpuFusedAdamW, torch.optim.AdamW, 1e-3, fuse_unscale=True)
    train_beside_plain_torch("O1", torch.optim.SGD, torch.optim.SGD, 0.1)


def train_beside_plain_torch(level, kind, plain_kind, lr, **options):
    model, plain = sharded(level), sharded(level)
    optimizer, other = kind(model.parameters(), lr=lr), plain_kind(plain.parameters(), lr=lr)
    dynamic = level in ("O1", "O2")
    model, optimizer = start(model, optimizer, level, **({"dynamic_init_scale": 2.0**8} if dynamic else {}), **options)
    autocast = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    scale = 2.0**8 if dynamic else 1.0
    for step in range(10):
        x = data(step, 0, dist.get_rank())
        if dynamic and step == 5 and on_last_rank():
            x[0, 0] = torch.inf
        backward(loss_on(x)(model), optimizer)
        norm = optimizer.clip_optimizer_grad_norm_fused(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert amp.last_step(optimizer).applied == (not dynamic or step != 5)
        if dynamic and step == 5:
            scale /= 2
            continue
        casts = amp.disable_casts()
        with casts, torch.autocast(DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_on(x)(plain)
        (loss * scale).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.div_(scale)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        tolerance = 1e-5 if level == "O0" else 2e-3
        torch.testing.assert_close(norm, whole(expected), rtol=tolerance, atol=tolerance)
        other.step()
        other.zero_grad()
    tolerance = 1e-6 if level == "O0" else 1e-3
    assert_same(model, plain, rtol=tolerance, atol=tolerance)
    assert not dynamic or amp.state_dict()["loss_scaler0"]["loss_scale"] == scale
    amp.shutdown()


def norms_over_two_dimensions():
    norms_of_parts(NORM_RULES)


def norms_of_parts(rules=RULES):
    """Cut in whatever way, over one mesh dimension or two: rules and clipping see whole parameters."""
    count = dist.get_world_size()
    meshes = [(mesh_of_all(), ([Shard(0)], [Shard(1)], [Replicate()]))]
    if count == 4:
        square = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("outer", "inner"))
        placements = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()])
        meshes.append((square, placements))
        meshes.append((square["inner"], ([Shard(0)], [Shard(1)])))
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (5, 4), (12, 8, 4), (1, 4)]
    cuts = [(mesh, list(cut)) for mesh, cuts in meshes for cut in cuts]
    for kind, options in rules:
        values = [(torch.randn(shapes[i % 4], generator=generator).to(DEVICE), *cut) for i, cut in enumerate(cuts)]
        values.append((torch.randn(7, generator=generator).to(DEVICE), cuts[0][0], [Shard(0)]))
        values.append((torch.randn(3, generator=generator).to(DEVICE), None, None))
        params = [
            nn.Parameter(v.clone() if mesh is None else distribute_tensor(v.clone(), mesh, cut))
            for v, mesh, cut in values
        ]
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]
        wholes = [nn.Parameter(v.clone()) for v, _, _ in values]
        of_wholes = [{"params": wholes[::2]}, {"params": wholes[1::2], "lr": 0.02}]
        optimizer, other = kind(groups, **options), kind(of_wholes, **options)
        for step in range(4):
            for p, q, (_, mesh, cut) in zip(params, wholes, values, strict=True):
                q.grad = torch.randn(q.shape, generator=generator).to(DEVICE)
                p.grad = q.grad.clone() if mesh is None else distribute_tensor(q.grad.clone(), mesh, cut)
            if kind is not optimizers.Lamb:
                p_norm = (2.0, 1.0, math.inf, 0.0)[step]
                found = optimizer.clip_optimizer_grad_norm_fused(2.0, p_norm)
                expected = nn.utils.clip_grad_norm_(wholes, 2.0, p_norm)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            optimizer.step()
            other.step()
        for p, q in zip(params, wholes, strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=2e-6, atol=1e-6)


def wide(level="O2", **options):
    """Of a model that is large beside what a step may allocate for itself: it, and its gradients, reduced once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 64)).to(DEVICE)
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh_of_all(), mp_policy=amp.fsdp_policy(level))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is held] for held in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    model, optimizer = start(model, optimizers.NpuFusedAdamW(groups), level, **options)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    backward(model(torch.randn(4, 64, device=DEVICE, generator=generator)).square().mean(), optimizer)
    return model, optimizer, [p.grad for p in model.parameters()]


def gradients_stay_where_they_are():
    """All that follows a backward works on the memory that units have reduced into, and leaves nothing."""
    for options in {}, {"fuse_unscale": True}:
        model, optimizer, grads = wide(dynamic_init_scale=2.0**8, **options)
        loss = torch.ones((), device=DEVICE, requires_grad=True)
        places = [local_part(grad).data_ptr() for grad in grads]

        def step(model=model, optimizer=optimizer, grads=grads, loss=loss):
            with amp.scale_loss(loss, optimizer):
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
            optimizer.clip_optimizer_grad_norm_fused(1e-3)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(10):
            step()
        assert [local_part(grad).data_ptr() for grad in grads] == places or not IN_PLACE
        assert not any(group.grads.has_buffer for group in optimizer.fused_groups()) or not IN_PLACE
        gc.collect()
        gc.freeze()
        counts = []
        for _ in range(2):  # in the first what steps keep of themselves takes the place of what is frozen
            for _ in range(200):
                step()
            gc.collect()
            counts.append(len(gc.get_objects()))
        gc.unfreeze()
        # Of 200 steps; threads of gloo may hold an object of the last one for a moment.
        assert counts[1] - counts[0] < 10
        if IN_PLACE:
            with torch.autograd.profiler.profile(profile_memory=True) as profile:
                step()
            assert sum(max(event.cpu_memory_usage, 0) for event in profile.function_events) < 1024  # numbers and flags
        amp.shutdown()


def gathered_gradients_stay_scaled():
    """With ``fuse_unscale``: those that a clipping copies into slots are not taken for others, of the script's."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        gather = lambda grads, slots=None, **_: FlatGrads.gather(grads, slots)  # noqa: E731
        patched.setattr(shard_grads.ShardGrads, "gather", gather)
        model, optimizer, grads = wide(dynamic_init_scale=2.0**8, fuse_unscale=True)
        warnings.simplefilter("error")
        optimizer.clip_optimizer_grad_norm_fused(1e-3)
        assert all(group.grads.has_buffer for group in optimizer.fused_groups())
        optimizer.step()
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad.add_(grad)  # these are
        with pytest.raises(RuntimeWarning, match="gradients have been added to"):
            optimizer.step()


def memory_beside_torchs():
    """Of a device, over a training whose activations fill it: what torch.optim.AdamW takes, and padding."""
    grad_memory.LENT_NUMEL = 0
    rows = torch.randn(2048, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(dist.get_rank()))

    def peak(level, kind, **options):
        gc.collect()
        base = torch.npu.memory_allocated()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]).to(DEVICE)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh_of_all(), mp_policy=amp.fsdp_policy(level))
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        if kind is not torch.optim.AdamW:
            model, optimizer = start(model, optimizer, level, loss_scale=64.0)

        def iteration():
            x = rows
            for layer in model:
                x = layer(x).relu()
            loss = x.float().square().mean()
            if kind is torch.optim.AdamW:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()

        found = [nbytes - base for nbytes in memory_of(iteration)]
        amp.shutdown()
        return found, len(list(model.parameters()))

    for level in LEVELS:
        (theirs, left_of_theirs), _ = peak(level, torch.optim.AdamW, foreach=False)
        (ours, left_of_ours), count = peak(level, optimizers.NpuFusedAdamW)
        padding = 4 * 48 * 4 * count  # of parameters, two moments and gradients
        assert left_of_ours <= left_of_theirs + padding, (level, left_of_ours, left_of_theirs)
        assert ours <= theirs + padding, (level, ours, theirs)


def copied_gradients_are_unscaled():
    """Once a rule with norms has copied gradients into a buffer, those to come are divided as the first ones were."""
    model = sharded("O2")
    optimizer = optimizers.FusedLAMB(model.parameters(), lr=0.0, weight_decay=0.0)
    model, optimizer = start(model, optimizer, "O2", dynamic_init_scale=2.0**8)
    norms = []
    for _ in range(3):
        backward(loss_on(data(0, 0, dist.get_rank()))(model), optimizer)
        norms.append(float(optimizer.clip_optimizer_grad_norm_fused(math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-3)


def torchs_clipping():
    """torch.nn.utils.clip_grad_norm_ under amp returns a DTensor, as torch's own, and clips as that does."""
    for p_norm in (2.0, 1.0, math.inf):
        model, _optimizer, grads = wide()
        expected = [grad.full_tensor().clone() for grad in grads]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected]).double(), p_norm)
        found = nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 4, p_norm)
        torch.testing.assert_close(found.full_tensor().double(), norm, rtol=1e-5, atol=0.0)
        for p, grad, value in zip(model.parameters(), grads, expected, strict=True):
            assert p.grad is grad
            torch.testing.assert_close(grad.full_tensor(), value / 4, rtol=1e-4, atol=0.0)
        amp.shutdown()


def formats_of_states():
    """Moments in fewer bytes are near those in float32, and a state dict goes on bit for bit."""
    trained = {}
    for state_dtype in None, torch.bfloat16, "int8":
        model = all_used("O5")
        options = {} if state_dtype is None else {"state_dtype": state_dtype}
        model, optimizer = start(model, optimizers.NpuFusedAdamW(model.parameters(), lr=0.01, **options), "O5")
        losses_of(model, optimizer, range(8), dist.get_rank())
        trained[state_dtype] = [p.full_tensor() for p in model.parameters()]
        saved = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        saved = copy.deepcopy(saved)
        goes_on = losses_of(model, optimizer, range(8, 10), dist.get_rank())
        set_model_state_dict(model, saved[0])
        set_optimizer_state_dict(model, optimizer, saved[1])
        again = losses_of(model, optimizer, range(8, 10), dist.get_rank())
        # What is encoded again is rounded again.
        assert again == (goes_on if state_dtype != "int8" else pytest.approx(goes_on, rel=1e-2))
        amp.shutdown()
    for found in trained[torch.bfloat16], trained["int8"]:
        for p, q in zip(found, trained[None], strict=True):
            torch.testing.assert_close(p, q, rtol=0.0, atol=0.02)  # of 8 steps of 0.01


def sums_in_place_of_averages():
    """A gloo that adds up where it is asked for averages, or refuses: units are told, or the release is refused."""
    expected = [g.full_tensor() for g in wide("O5")[2]]
    amp.shutdown()
    scatter, reduce = getattr(dist, REDUCE_SCATTER), dist.all_reduce

    def wrong(original):
        return lambda *args, op=dist.ReduceOp.SUM, **options: original(*args, op=dist.ReduceOp.SUM, **options)

    def refusing(*args, op=dist.ReduceOp.SUM, **options):
        if op == dist.ReduceOp.AVG:
            raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
        return scatter(*args, op=op, **options)

    for fake in wrong(scatter), refusing:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dist, REDUCE_SCATTER, fake)
            patched.setattr(dist, "all_reduce", wrong(reduce))
            for grad, value in zip(wide("O5")[2], expected, strict=True):
                torch.testing.assert_close(grad.full_tensor(), value, rtol=2e-2, atol=1e-6)
            amp.shutdown()
            patched.delattr(torch.distributed.fsdp.FSDPModule, "set_force_sum_reduction_for_comms")
            with pytest.raises(RuntimeError, match=r"sums of gradients .* instead of averages.*2 times too large"):
                wide("O5")


def grad_scalers():
    """A GradScaler that hands its scale over: the flag is that of all processes."""
    for kind in (optimizers.NpuFusedAdamW, optimizers.NpuFusedLamb):
        model, plain = sharded("O2"), sharded("O2")
        optimizer = kind(model.parameters(), lr=1e-3, fuse_grad_scaler=True)
        other = kind(plain.parameters(), lr=1e-3)
        pairs = [(m, o, torch.amp.GradScaler(DEVICE.type, 2.0**8)) for m, o in ((model, optimizer), (plain, other))]
        for step in range(6):
            x = data(step, 0, dist.get_rank())
            if step == 3 and on_last_rank():
                x[0, 0] = torch.inf
            before = [p.full_tensor().clone() for p in model.parameters()]
            for m, o, scaler in pairs:
                scaler.scale(loss_on(x)(m)).backward()
                scaler.step(o)
                scaler.update()
                o.zero_grad()
            moved = any(not torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))
            assert moved == (step != 3)
            assert pairs[0][2].get_scale() == pairs[1][2].get_scale() == (2.0**8 if step < 3 else 2.0**7)
        assert_same(model, plain)


def moving_averages():
    """Of the parts, in which the model is evaluated, though units leave gathered parameters in place of them."""
    for level in ("O0", "O2"):
        model = sharded(level)
        model, optimizer = start(model, optimizers.NpuFusedAdamW(model.parameters(), lr=0.1), level)
        ema = optimizers.FusedEMA(model, decay=0.5)
        expected = [p.full_tensor() for p in model.parameters()]
        for step in range(3):
            step_on(loss_on(data(step, 0, dist.get_rank()))(model), optimizer)
            own = [p.full_tensor() for p in model.parameters()]
            expected = [(a + b) / 2 for a, b in zip(expected, own, strict=True)]
            with torch.no_grad():
                output = model(data(9, 0, 0))
            ema.update()
            with ema.swapped(), torch.no_grad():
                for p, average in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(p.full_tensor(), average)
                averaged = model(data(9, 0, 0))
            assert not torch.allclose(averaged, output)
            with torch.no_grad():
                assert torch.equal(model(data(9, 0, 0)), output)
            reshard(model)
        state = copy.deepcopy(ema.state_dict())
        plain = {name: whole(t) for name, t in state["averages"].items()}
        with pytest.raises(RuntimeError, match="do not fit the averages"):
            ema.load_state_dict({"decay": 0.5, "averages": plain})
        twin = optimizers.FusedEMA(model, decay=0.9)
        twin.load_state_dict(state)
        with twin.swapped():
            assert all(torch.equal(p.full_tensor(), plain[name]) for name, p in model.named_parameters())
        amp.shutdown()


class Tied(nn.Module):
    """A weight that two layers share, one that is frozen, a block that is recomputed, and one that is compiled."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 10)
        self.checkpointed = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
        self.compiled = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.tied = nn.Linear(10, 6, bias=False)
        self.again = self.tied

    def forward(self, x):
        x = self.embed(x)
        x = checkpoint(self.checkpointed, x, use_reentrant=False)
        x = self.frozen(self.compiled(x))
        return self.tied(x) + self.again(torch.tanh(x))


def tied(level, mesh=None):
    torch.manual_seed(0)
    model = Tied().to(DEVICE)
    policy = amp.fsdp_policy(level)
    model.compiled.compile(backend="aot_eager")
    for layer in (model.checkpointed, model.compiled, model):
        fully_shard(layer, mesh=mesh or mesh_of_all(), mp_policy=policy, reshard_after_forward=layer is not model)
    return model


def accumulate(model, steps, rank, backward_of, between=None):
    """Two micro batches whose gradients are reduced once, by FSDP's two ways; ``between``: called after the first."""
    hsdp = next(model.parameters()).device_mesh.ndim == 2
    for micro in range(2):
        last = micro == 1
        if hsdp and steps % 2:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)
        backward_of(loss_on(data(steps, micro, rank))(model))
        if not last and between is not None:
            between()
    model.set_requires_gradient_sync(True)


def replicas_of_parts():
    """A mesh of 4 processes: a model is on two of them, in two parts."""
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))


def accumulation_over_two_dimensions():
    accumulation(replicas_of_parts())


def accumulation(mesh=None):
    """Gradients that units hold back keep one scale, which moves between steps."""
    mesh = mesh or mesh_of_all()
    accumulates_at(mesh, "O2", dynamic_init_scale=2.0**6, scale_window=2)
    accumulates_at(mesh, "O2", dynamic_init_scale=2.0**6, scale_window=2, fuse_unscale=True)
    accumulates_at(mesh, "O5")
    accumulates_at(mesh, "O0", loss_scale=128.0)


def accumulates_at(mesh, level, **options):
    model, plain = tied(level, mesh), tied(level, mesh)
    other = Twin(plain, optimizers.FusedLAMB, {"lr": 0.01})
    model, optimizer = start(model, optimizers.FusedLAMB(model.parameters(), lr=0.01), level, **options)

    def between():
        with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
            optimizer.step()

    for step in range(7):
        scale = 2.0 ** (6 + step // 2) if level == "O2" else options.get("loss_scale", 1.0)
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale
        accumulate(model, step, dist.get_rank(), lambda loss: backward(loss, optimizer), between)
        optimizer.step()
        optimizer.zero_grad()
        accumulate(plain, step, dist.get_rank(), lambda loss, scale=scale: (loss * scale).backward())
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.div_(scale)
        other.step()
        plain.zero_grad()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), other.params, strict=True):
                p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
    tolerance = 1e-6 if level == "O0" else 1e-3
    assert_same(model, plain, rtol=tolerance, atol=tolerance)
    amp.shutdown()


def overflow_that_is_held_back():
    """In the first of two micro batches, on one rank: no process steps, and the scale shrinks once."""
    model = sharded("O2")
    model, optimizer = start(model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), "O2", dynamic_init_scale=2.0**8)
    before = [p.full_tensor().clone() for p in model.parameters()]
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        x = data(0, micro, dist.get_rank())
        if micro == 0 and on_last_rank():
            x[0, 0] = torch.inf
        backward(loss_on(x)(model), optimizer)
    assert amp.will_skip(optimizer)
    optimizer.step()
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**7


def scale_that_moves_over_two_dimensions():
    scale_that_moves_while_gradients_are_held_back(replicas_of_parts())


def scale_that_moves_while_gradients_are_held_back(mesh=None):
    """By the blocks of another optimizer, between two micro batches, or since the second has a loss of its own."""
    mesh = mesh or mesh_of_all()
    for reduce_dtype in None, torch.float32:
        model, plain, other = (mlp() for _ in range(3))
        for one in (model, plain, other):
            for layer in (one[0], one):
                fully_shard(layer, mesh=mesh, mp_policy=amp.fsdp_policy("O2", reduce_dtype))
        models = [model, other]
        given = [optimizers.NpuFusedSGD(one.parameters(), lr=0.1) for one in models]
        start(models, given, "O2", dynamic_init_scale=2.0**8, scale_window=2, num_losses=2)
        hold = "set_requires_all_reduce" if mesh.ndim == 2 else "set_requires_gradient_sync"
        for second_loss in range(2):
            scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
            for micro in range(2):
                x = data(0, micro, dist.get_rank())
                for one in (model, plain):
                    getattr(one, hold)(micro == 1)
                backward(loss_on(x)(model), given[0], loss_id=micro * second_loss)
                (loss_on(x)(plain) * scale).backward()
                for _ in range(2 if micro == second_loss == 0 else 0):
                    step_on(loss_on(x)(other), given[1])
            assert amp.state_dict()[f"loss_scaler{second_loss}"]["loss_scale"] != scale
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor() / scale, rtol=1e-3, atol=1e-4)
            given[0].zero_grad()
            plain.zero_grad()
        amp.shutdown()


def an_exception_on_one_process():
    """Between backward and the end of a block: all raise, and all can go on."""
    model = sharded("O2")
    optimizer = optimizers.NpuFusedAdam(model.parameters())
    model, optimizer = start(model, optimizer, "O2", dynamic_init_scale=2.0**8)
    loss = loss_on(data(0, 0, dist.get_rank()))(model)

    def block():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if dist.get_rank() == 1:
                raise KeyError("own error")

    with pytest.raises((RuntimeError, KeyError), match=r"rank 1 of the process group has raised|own error"):
        block()
    optimizer.zero_grad()
    backward(loss_on(data(0, 0, dist.get_rank()))(model), optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).applied


class Raising(torch.autograd.Function):
    """The identity, whose backward raises while there is an ``error``."""

    error = None

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Raising.error is not None:
            raise Raising.error
        return grad


class Interruptible(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers[1:](Raising.apply(self.layers[0](x)))


def interruptible(level, mesh, reduce_dtype=None):
    model = Interruptible().to(DEVICE)
    for layer in (model.layers[0], model.layers[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=amp.fsdp_policy(level, reduce_dtype))
    return model


# Whether torch can go on after an exception within a forward or backward.
RECOVERS = hasattr(FSDPModule, "reset_iter_state")


def exceptions_while_gradients_are_held_back():
    """In any of three micro batches, in the middle of backward or after it: nothing of them is left."""
    square = init_device_mesh(DEVICE.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    cases = [
        ("O2", mesh_of_all(), None, {"dynamic_init_scale": 2.0**8}),
        ("O2", mesh_of_all(), torch.float32, {"dynamic_init_scale": 2.0**8, "fuse_unscale": True}),
        ("O2", square, None, {"dynamic_init_scale": 2.0**8}),
        ("O5", mesh_of_all(), torch.float32, {}),
        ("O0", mesh_of_all(), None, {}),
        ("O0", square, None, {"loss_scale": 128.0}),
    ]
    for (level, mesh, reduce_dtype, options), within in itertools.product(cases, (True, False)):
        if within and not RECOVERS:
            continue
        model, plain = (interruptible(level, mesh, reduce_dtype) for _ in range(2))
        model, optimizer = start(model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), level, **options)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        scale = options.get("dynamic_init_scale", options.get("loss_scale", 1.0))
        for step in range(4):  # without an exception first, and then with one in each of the micro batches
            for failing in [step - 1] if step else []:
                with pytest.raises(KeyError):
                    hold_back(model, step, ours=optimizer, failing=failing, within=within)
                if within or failing < 2:
                    assert all(p.grad is None for p in model.parameters())
                else:
                    optimizer.zero_grad()  # units have reduced what they held: these are whole, and a script's
            hold_back(model, step, ours=optimizer)
            hold_back(plain, step, scale=scale)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                if "fuse_unscale" not in options:
                    tolerance = 1e-6 if level == "O0" else 2e-3
                    expected = q.grad.full_tensor() / scale
                    torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=tolerance, atol=tolerance)
                q.grad.div_(scale)
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
        tolerance = 1e-6 if level == "O0" else 1e-3
        assert_same(model, plain, rtol=tolerance, atol=tolerance)
        amp.shutdown()


def hold_back(model, step, ours=None, scale=1.0, failing=None, within=False):
    """Three micro batches, of which units reduce the sum: under amp with the optimizer ``ours``, else by torch."""
    hsdp = next(model.parameters()).device_mesh.ndim == 2
    hold = model.set_requires_all_reduce if hsdp else model.set_requires_gradient_sync
    for micro in range(3):
        hold(micro == 2)
        loss = loss_on(data(step, micro, dist.get_rank()))(model)
        if ours is None:
            (loss * scale).backward()
            continue
        error = KeyError("own error") if micro == failing else None
        try:
            Raising.error = error if within else None
            with amp.scale_loss(loss, ours) as scaled_loss:
                scaled_loss.backward()
                if error is not None:
                    raise error
        finally:
            Raising.error = None


def an_exception_on_one_process_that_holds_gradients_back():
    """Others are not told, as nothing is decided: what that process has computed since takes part in the average."""
    model, plain = (interruptible("O2", mesh_of_all()) for _ in range(2))
    model, optimizer = start(model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), "O2", dynamic_init_scale=2.0**8)
    failed = False
    for micro in range(2):
        for one in (model, plain):
            one.set_requires_gradient_sync(micro == 1)
        x = data(0, micro, dist.get_rank())
        try:
            with amp.scale_loss(loss_on(x)(model), optimizer) as scaled_loss:
                scaled_loss.backward()
                if micro == 0 and on_last_rank():
                    raise KeyError("own error")
        except KeyError:
            failed = True
        (loss_on(x)(plain) * (0.0 if micro == 0 and on_last_rank() else 2.0**8)).backward()
    assert failed == on_last_rank()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor() / 2.0**8, rtol=1e-3, atol=1e-4)


def exceptions_while_units_reduce():
    """Within the backward of an ordinary block, some of whose units have reduced their gradients by then."""
    for level, options in ("O2", {"dynamic_init_scale": 2.0**8}), ("O5", {}), ("O1", {}), ("O0", {}):
        if not RECOVERS:
            continue
        model, plain = (interruptible(level, mesh_of_all()) for _ in range(2))
        models = []
        for one, failing in (model, 1), (plain, None):
            one, optimizer = start(one, optimizers.NpuFusedAdamW(one.parameters(), lr=0.01), level, **options)
            for step in range(4):
                if step == failing:
                    Raising.error = KeyError("own error")
                    with pytest.raises(KeyError):
                        backward(loss_on(data(9, 0, dist.get_rank()))(one), optimizer)
                    Raising.error = None
                    assert all(p.grad is None for p in one.parameters())
                step_on(loss_on(data(step, 0, dist.get_rank()))(one), optimizer)
            models.append(one)
            amp.shutdown()
        assert_same(*models, rtol=0.0, atol=0.0)


class Adapted(nn.Module):
    """A frozen layer in bfloat16, which an adapter of low rank is trained beside."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters():
    """What is frozen may be sharded in low precision; the rest is trained as by plain torch with the same policy."""
    pairs = []
    for kind in optimizers.NpuFusedAdamW, torch.optim.AdamW:
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(6, 16), nn.Tanh(), Adapted(16, 2)).to(DEVICE)
        for layer in (model[0], model):
            fully_shard(layer, mesh=mesh_of_all(), mp_policy=amp.fsdp_policy("O5"))
        pairs.append((model, kind([p for p in model.parameters() if p.requires_grad], lr=0.01)))
    (model, optimizer), (plain, other) = pairs
    before = [p.full_tensor() for p in model.parameters()]
    start(model, optimizer, "O5")
    for step in range(4):
        loss = loss_on(data(step, 0, dist.get_rank()))
        backward(loss(model), optimizer)
        loss(plain).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert_same(model, plain, rtol=1e-5, atol=1e-5)
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value) == (not p.requires_grad)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Identity(), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


def batch_norms():
    """In float32, as units of their own, as the error for others says."""
    torch.manual_seed(0)
    dtypes = []
    for separate in (False, True):
        model = Normed().to(DEVICE)
        if separate:
            fully_shard(model.layers[2], mp_policy=amp.fsdp_policy("O0"))
        fully_shard(model, mp_policy=amp.fsdp_policy("O2"))
        optimizer = optimizers.NpuFusedAdam(model.parameters())
        if not separate:
            with pytest.raises(RuntimeError, match=r"layers.2 is a BatchNorm1d, which opt_level O2 keeps in float32"):
                start(model, optimizer, "O2")
            continue
        model.layers[2].register_forward_hook(lambda m, _, out: dtypes.append((m.weight.dtype, out.dtype)))
        model, optimizer = start(model, optimizer, "O2")
        output = model(data(0, 0, dist.get_rank()))
        assert output.dtype == torch.float32
        backward(output.square().mean(), optimizer)
        optimizer.step()
        assert dtypes == [(torch.float32, torch.float16)]


def bad_input():
    """Each is named, on all processes alike, before anything has changed."""
    refused = functools.partial(pytest.raises, RuntimeError)
    with refused(match="O3 keeps torch.float16 parameters without float32 values.*use O2 or O5"):
        amp.fsdp_policy("O3")
    with refused(match="Unexpected optimization level"):
        amp.fsdp_policy("O9")
    with pytest.raises(TypeError, match="reduce_dtype"):
        amp.fsdp_policy("O2", torch.int8)
    assert amp.fsdp_policy("O2", torch.float32) == MixedPrecisionPolicy(torch.float16, torch.float32)

    def refuse(said, level, model, optimizer=None, **options):
        optimizer = optimizer or optimizers.NpuFusedAdam(model.parameters())
        before = [whole(p.detach()).clone() for p in model.parameters()]
        with refused(match=said):
            start(model, optimizer, level, **options)
        assert not hasattr(optimizer, "_amp_state")
        for p, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(whole(p.detach()), value)

    refuse("O3 keeps torch.float16 parameters without", "O3", sharded("O2"))
    refuse(r"policy for the model with param_dtype=None.*write mp_policy=amp.fsdp_policy\('O2'\)", "O2", sharded("O0"))
    refuse("policy for the model with param_dtype=torch.float16", "O1", sharded("O2"))
    refuse("policy for the model with param_dtype=torch.bfloat16", "O2", sharded("O5"))
    refuse(r"combine_grad=True put.*leave these", "O2", sharded("O2"), combine_grad=True)
    refuse(r"combine_grad=True and combine_ddp=True put", "O0", sharded("O0"), combine_grad=True, combine_ddp=True)
    refuse("store_param_remainders=True of.*to the optimizer", "O5", sharded("O5"), store_param_remainders=True)
    low = mlp().bfloat16()
    fully_shard(low)
    refuse(r"parameter 0.weight is sharded in torch.bfloat16.*amp.fsdp_policy\('O5'\)", "O5", low)
    low.requires_grad_(False)
    refuse(r"parameter 0.weight is sharded in torch.bfloat16.*leave it out of the optimizer", "O5", low)
    if DEVICE.type != "npu":
        wide = mlp().double()
        fully_shard(wide)
        refuse(r"sharded in torch.float64, but opt_level O0 trains float32.*model.float\(\) before", "O0", wide)
    partly = mlp()
    fully_shard(partly[2], mp_policy=amp.fsdp_policy("O2"))
    refuse(r"parameter 0.weight is not sharded.*Call fully_shard\(model", "O2", partly)
    early = mlp()
    optimizer = optimizers.NpuFusedAdam(early.parameters())
    fully_shard(early, mp_policy=amp.fsdp_policy("O2"))
    refuse("made before fully_shard", "O2", early, optimizer)
    uncalled = mlp()
    fully_shard(uncalled, mp_policy=amp.fsdp_policy)
    refuse(r"for the model, which is no MixedPrecisionPolicy; write mp_policy=amp.fsdp_policy\('O2'\)", "O2", uncalled)
    outputs = mlp()
    fully_shard(outputs, mp_policy=MixedPrecisionPolicy(torch.float16, output_dtype=torch.float16))
    refuse("output_dtype=torch.float16", "O2", outputs)
    uncut = nn.Linear(6, 2).to(DEVICE)
    for name, p in list(uncut.named_parameters()):
        setattr(uncut, name, nn.Parameter(distribute_tensor(p.detach(), mesh_of_all(), [Shard(0)])))
    refuse("DTensors that fully_shard has not made", "O2", uncut)
    with refused(match="report on it before fully_shard"):
        amp.debug.report(sharded("O2"), data(0, 0, 0))
    with refused(
        match=r"sharded over processes \(DTensor\), which torch does not copy.*full_state_dict=True.*not sharded"
    ):
        amp.float32_copy(sharded("O2"))
    for level in ("O1", "O2", "O5"):  # after initialize
        late = mlp()
        late, optimizer = start(late, optimizers.NpuFusedAdam(late.parameters()), level)
        fully_shard(late)
        with refused(match="fully_shard was called on the model after amp.initialize"):
            backward(late(data(0, 0, dist.get_rank()).to(next(late.parameters()).dtype)).float().mean(), optimizer)
            optimizer.step()
        amp.shutdown()


def all_used(level, mesh=None):
    """dcp wants all that it is to load, and what is not trained has no state."""
    model = sharded(level, mesh=mesh)
    model.unused.requires_grad_(False)
    return model


def whole_model():
    """Likewise, of one process by itself, with other values."""
    torch.manual_seed(1)
    model = Uneven().to(DEVICE)
    model.unused.requires_grad_(False)
    return model


def losses_of(model, optimizer, steps, rank):
    """Train; what each process has lost, on the ``rank``'s data."""
    found = []
    for step in steps:
        loss = loss_on(data(step, 0, rank))(model)
        step_on(loss, optimizer)
        found.append(float(loss))
    return found


def state_of(model, optimizer):
    stepped = amp.checkpoint_view(optimizer)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, stepped),
        "amp": amp.state_dict(),
    }


def load(folder, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, amp.checkpoint_view(optimizer), state["optim"])
    amp.load_state_dict(state["amp"])


# Rules whose states are kept one by one, with a count for each group, and with norms of whole parameters.
SAVED = ((optimizers.NpuFusedAdamW, "O2"), (optimizers.FusedAdam, "O5"), (optimizers.FusedNovoGrad, "O2"))


def checkpoints_of_more_rules():
    checkpoints(((optimizers.FusedAdam, "O2"), (optimizers.FusedLAMB, "O2")))


def checkpoints(saved=SAVED):
    """Resumed bit for bit; on other meshes, by one process that is not sharded, and from that, within rounding."""
    for kind, level in saved:
        scale = {"dynamic_init_scale": 2.0**8} if level == "O2" else {}
        folder = folder_of_all()
        # All processes see the same data, so that one that is not sharded trains alike.
        model = all_used(level)
        model, optimizer = start(model, kind(model.parameters(), lr=0.01), level, **scale)
        losses_of(model, optimizer, range(3), 0)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        goes_on = losses_of(model, optimizer, range(3, 8), 0)
        amp.shutdown()

        again = all_used(level)
        again, other = start(again, kind(again.parameters(), lr=0.5), level, **scale)
        load(folder, again, other)
        assert losses_of(again, other, range(3, 8), 0) == goes_on
        assert_same(again, model, rtol=0.0, atol=0.0)
        amp.shutdown()

        if kind is optimizers.NpuFusedAdamW:  # by torch's, and from a state dict that is whole
            plain = all_used(level)
            other = torch.optim.AdamW(plain.parameters(), lr=0.5)
            set_optimizer_state_dict(plain, other, full, options=StateDictOptions(full_state_dict=True))
            for p, q in zip(plain.parameters(), again.parameters(), strict=True):
                assert (p in other.state) == q.requires_grad

        # One process for itself: fp32 masters beside a model in low precision.
        alone = whole_model()
        alone, other = start(alone, kind(alone.parameters(), lr=0.5), level, **scale)
        load(folder, alone, other)
        assert losses_of(alone, other, range(3, 8), 0) == pytest.approx(goes_on, rel=1e-3, abs=1e-3)
        back = folder_of_all()
        if dist.get_rank() == 0:
            dcp.save(state_of(alone, other), checkpoint_id=back, no_dist=True)
        dist.barrier()
        expected = losses_of(alone, other, range(8, 10), 0)
        amp.shutdown()

        again = all_used(level)
        again, other = start(again, kind(again.parameters(), lr=0.5), level, **scale)
        load(back, again, other)
        assert losses_of(again, other, range(8, 10), 0) == pytest.approx(expected, rel=1e-3, abs=1e-3)
        amp.shutdown()


def resumed_on_other_meshes(begin, steps, **near):
    """What all have saved, all of them load, of 4 two of them, and each by itself; the latter.

    Args:
        begin: Called with a model, and maybe the learning rate: both under amp.
        steps: After the third.
        near: How near losses are, but for those of the processes that have saved.
    """
    folder = folder_of_all()
    model, optimizer = begin(all_used("O5"), lr=0.02)
    losses_of(model, optimizer, range(3), 0)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    goes_on = losses_of(model, optimizer, steps, 0)
    amp.shutdown()
    meshes = [None]
    if dist.get_world_size() == 4:  # all four, two by two, and two replicas of two parts
        pairs = replicas_of_parts()
        meshes += [pairs["shard"], pairs]
    for mesh in meshes:
        again, other = begin(all_used("O5", mesh))
        load(folder, again, other)
        losses = losses_of(again, other, steps, 0)
        assert losses == (goes_on if mesh is None else pytest.approx(goes_on, **near))
        amp.shutdown()
    alone, other = begin(whole_model())
    load(folder, alone, other)
    assert losses_of(alone, other, steps, 0) == pytest.approx(goes_on, **near)
    return alone, other


def checkpoints_of_fewer():
    """And all load what one has saved."""

    def begin(model, lr=0.5):
        return start(model, optimizers.FusedLAMB(model.parameters(), lr=lr), "O5")

    alone, other = resumed_on_other_meshes(begin, range(3, 13), rel=1e-3, abs=1e-3)
    back = folder_of_all()
    if dist.get_rank() == 0:
        dcp.save(state_of(alone, other), checkpoint_id=back, no_dist=True)
    dist.barrier()
    goes_on = losses_of(alone, other, range(13, 15), 0)
    amp.shutdown()
    again, other = begin(all_used("O5"))
    load(back, again, other)
    assert losses_of(again, other, range(13, 15), 0) == pytest.approx(goes_on, rel=1e-3, abs=1e-3)


def nvidias_distributed_optimizers():
    """Those of apex.contrib are FusedAdam and FusedLAMB, with NVIDIA's defaults; plain parameters are refused."""
    for kind, same, options, defaults in (
        (DistributedFusedAdam, optimizers.FusedAdam, {"lr": 0.01, "overlap_grad_sync": False, "bucket_cap_mb": 25}, {}),
        (
            DistributedFusedLAMB,
            optimizers.FusedLAMB,
            {"lr": 0.01, "dwu_num_blocks": 1},
            {"eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0},
        ),
    ):
        plain = list(mlp().parameters())
        with pytest.raises(TypeError, match=rf"{kind.__name__} was given a plain.*fully_shard\(layer\); fully_shard"):
            kind(plain)
        model = sharded()
        with pytest.raises(TypeError, match="unexpected keyword argument 'dwu_blocks'"):
            kind(model.parameters(), dwu_blocks=1)
        twin = Twin(model, same, {"lr": 0.01, **defaults})
        optimizer = kind(model.parameters(), **options)
        with pytest.raises(ValueError, match="clips all parameters"):
            optimizer.clip_grad_norm(1.0, list(model.parameters())[:1])
        for step in range(4):
            loss_on(data(step, 0, dist.get_rank()))(model).backward()
            norm = optimizer.clip_grad_norm(0.05)
            assert norm > 0.05
            twin.step()
            optimizer.step()
            optimizer.zero_grad()
        twin.check()
    with pytest.raises(ValueError, match="keeps float32 state"):
        DistributedFusedAdam(model.parameters(), store_param_remainders=True)


class Wide(nn.Module):
    """A block whose two layers are cut over processes, and a norm that is not."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(level):
    """Of 4 processes two hold a model, of which the two pairs see other data."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), Wide()).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "tensor"))
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"], mp_policy=amp.fsdp_policy(level))
    return fully_shard(model, mesh=mesh["data"], mp_policy=amp.fsdp_policy(level)), mesh["data"].get_local_rank()


def two_ways_of_cutting():
    """Tensor parallelism within fully_shard: norms, clipping and the decision about overflow are those of the whole."""
    for kind in optimizers.NpuFusedAdamW, optimizers.FusedLAMB:
        for level in ("O2", "O5"):
            model, rank = tensor_parallel(level)
            # Norms are replicas over the tensor-parallel processes, and not to be added up there.
            twin = Twin(model, kind, {"lr": 0.01})
            optimizer = kind(model.parameters(), lr=0.01)
            model, optimizer = start(
                model, optimizer, level, **({"dynamic_init_scale": 2.0**8} if level == "O2" else {})
            )
            for step in range(6):
                x = data(step, 0, rank)
                if level == "O2" and step == 3 and dist.get_rank() == 3:
                    x[0, 0] = torch.inf
                backward(loss_on(x)(model), optimizer)
                if level == "O2" and step == 3:
                    assert amp.will_skip(optimizer)
                else:
                    twin.take()
                    expected = nn.utils.clip_grad_norm_(twin.params, 0.1)
                    norm = optimizer.clip_optimizer_grad_norm_fused(0.1)
                    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
                    twin.optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            twin.check(rtol=1e-5, atol=1e-5)
            amp.shutdown()


def offloaded():
    """Parts that are kept on the host are stepped there."""
    for level in ("O2", "O5"):
        model = sharded(level, offload_policy=CPUOffloadPolicy(pin_memory=False))
        plain = sharded(level)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert local_part(p).device.type == "cpu"
            assert local_part(q).device.type == DEVICE.type
        trained = []
        for one in model, plain:
            one, optimizer = start(one, optimizers.NpuFusedAdamW(one.parameters(), lr=0.01), level)
            losses = losses_of(one, optimizer, range(4), dist.get_rank())
            trained.append((one, losses))
            amp.shutdown()
        assert trained[0][1] == pytest.approx(trained[1][1], rel=1e-3)


def lost_while_sharded():
    """Rank 1, in the place that is named; rank 0 has an error, its parameters, and the checkpoint before."""
    rank, place = dist.get_rank(), os.environ["PLACE"]
    # Of its own: processes that are slow to start need more time to meet.
    group = dist.new_group(timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
    mesh = DeviceMesh.from_group(group, DEVICE.type, mesh=list(range(dist.get_world_size())))

    def be_lost(*_):
        if rank == 1:
            os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])

    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=amp.fsdp_policy("O2"))
    # Its step begins with an all-reduce, of the norm of all gradients.
    optimizer = optimizers.FusedLAMB(model.parameters(), lr=0.01)
    model, optimizer = start(model, optimizer, "O2", dynamic_init_scale=2.0**8)
    saved = []
    for step in range(3):
        folder = Path(os.environ["STORE"]).parent / str(step)
        faulty = place if step == 2 else None
        before = [p.to_local().clone() for p in amp.master_params(optimizer)]
        try:
            if faulty == "reduction" and rank == 1:
                setattr(dist, REDUCE_SCATTER, be_lost)
            backward(loss_on(data(step, 0, rank))(model), optimizer)
            if faulty == "step":
                be_lost()
            optimizer.step()
            optimizer.zero_grad()
            if faulty == "checkpoint" and rank == 1:
                dcp.FileSystemWriter.write_data = be_lost
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, process_group=group)
        except (RuntimeError, dcp.api.CheckpointException) as error:
            assert step == 2
            if place != "checkpoint":
                stepped = amp.master_params(optimizer)  # the model may have gathered ones
                assert all(torch.equal(p.to_local(), old) for p, old in zip(stepped, before, strict=True))
            print(f"noticed: {error!r}", flush=True)
            break
        saved = [p.full_tensor() for p in model.parameters()]
    with pytest.raises(dcp.api.CheckpointException):  # what is not whole is not taken for a checkpoint
        dcp.load({"model": mlp().state_dict()}, checkpoint_id=folder, no_dist=True)
    alone = mlp()
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=folder.with_name("1"), no_dist=True)
    assert all(torch.equal(found, value) for found, value in zip(state["model"].values(), saved, strict=True))
    print("loaded", flush=True)
    os._exit(0)


def meshes_of_different_processes():
    """Of 4 processes, which ones decide together is not known unless the script says so."""
    square = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("outer", "inner"))
    models = [sharded("O2", mesh=square[name]) for name in ("outer", "inner")]
    given = [optimizers.NpuFusedSGD(model.parameters(), lr=0.1) for model in models]
    with pytest.raises(RuntimeError, match=r"sharded over meshes of different processes.*overflow_group="):
        start(models, given, "O2")
    models, given = start(models, given, "O2", overflow_group=dist.group.WORLD, dynamic_init_scale=2.0**8)
    x = data(0, 0, dist.get_rank())
    if dist.get_rank() == 3:
        x[0, 0] = torch.inf
    backward(sum(loss_on(x)(model) for model in models), given)
    assert all(map(amp.will_skip, given))


if __name__ == "__main__":
    main(globals())
