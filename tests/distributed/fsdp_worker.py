# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""amp and the rules that take norms, on models that ``fully_shard`` has cut.

Run in several processes; the arguments are names of functions here.
"""

import math

import pytest
import torch
import torch.distributed as dist
from common import backward, data, loss_on, mlp
from devices import DEVICE
from sharded_worker import Uneven, assert_same, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from apex_npu import amp, optimizers

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


def mesh_of_all():
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),))


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

    def step(self):
        for p, q in zip(self._model, self.params, strict=True):
            q.grad = None if p.grad is None else whole(p.grad).clone()
        self.optimizer.step()

    def check(self, **tolerance):
        for p, q in zip(self._model, self.params, strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach(), **{"rtol": 1e-6, "atol": 1e-6, **tolerance})


def same_as_one_process():
    """20 steps of each rule at each level: of whole parameters the same optimizer makes the same."""
    for kind, options in RULES:
        for level in LEVELS if kind in (optimizers.NpuFusedAdamW, optimizers.FusedLAMB) else ("O0", "O5"):
            model = sharded(level)
            twin = Twin(model, kind, options)
            model, optimizer = start(model, kind(model.parameters(), **options), level)
            assert all(p is q for p, q in zip(amp.master_params(optimizer), model.parameters(), strict=True))
            for step in range(20):
                backward(loss_on(data(step, 0, dist.get_rank()))(model), optimizer)
                twin.step()
                optimizer.step()
                optimizer.zero_grad()
            twin.check()
            amp.shutdown()


def same_as_plain_torch():
    """20 steps of AdamW at each level, with an overflow on one rank: a loop of plain torch with the same policy."""
    for level in LEVELS:
        for options in ({}, {"fuse_unscale": True}) if level in ("O1", "O2") else ({},):
            model, plain = sharded(level), sharded(level)
            optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
            other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
            dynamic = level in ("O1", "O2")
            model, optimizer = start(model, optimizer, level, **({"dynamic_init_scale": 2.0**8} if dynamic else {}), **options)
            autocast = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
            scale = 2.0**8 if dynamic else 1.0
            for step in range(20):
                x = data(step, 0, dist.get_rank())
                if dynamic and step == 5 and dist.get_rank() == 1:
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


def norms_of_parts():
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
    for kind, options in RULES:
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


def grad_scalers():
    """A GradScaler that hands its scale over: the flag is that of all processes."""
    for kind in (optimizers.NpuFusedAdamW, optimizers.NpuFusedLamb):
        model, plain = sharded("O2"), sharded("O2")
        optimizer = kind(model.parameters(), lr=1e-3, fuse_grad_scaler=True)
        other = kind(plain.parameters(), lr=1e-3)
        pairs = [(m, o, torch.amp.GradScaler(DEVICE.type, 2.0**8)) for m, o in ((model, optimizer), (plain, other))]
        for step in range(6):
            x = data(step, 0, dist.get_rank())
            if step == 3 and dist.get_rank() == 1:
                x[0, 0] = torch.inf
            before = [p.full_tensor() for p in model.parameters()]
            for m, o, scaler in pairs:
                scaler.scale(loss_on(x)(m)).backward()
                scaler.step(o)
                scaler.update()
                o.zero_grad()
            moved = any(not torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))
            assert moved == (step != 3)
            assert pairs[0][2].get_scale() == pairs[1][2].get_scale() == (2.0**8 if step < 3 else 2.0**7)
        assert_same(model, plain)


if __name__ == "__main__":
    from common import main

    main(globals())
