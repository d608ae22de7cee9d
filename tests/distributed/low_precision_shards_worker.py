# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that are bfloat16 before ``fully_shard``, stepped exactly with ``store_param_remainders=True``.

Run in several processes; the arguments are names of functions here.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import backward, data, folder_of_all, loss_on, main, mlp
from fsdp_worker import RULES, Twin, mesh_of_all, on_last_rank, start
from sharded_worker import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from apex_npu import amp, optimizers

FUSED = [(kind, options) for kind, options in RULES if kind is not optimizers.Lamb]
# These sum over processes, in another order than one process does.
NORMS = (
    optimizers.NpuFusedLamb,
    optimizers.FusedLAMB,
    optimizers.NpuFusedAdamP,
    optimizers.NpuFusedBertAdam,
    optimizers.FusedNovoGrad,
)
MAX_NORM = 0.05
EXACT = {"rtol": 0.0, "atol": 0.0}


def sharded(dtype=torch.bfloat16, reduce_dtype=torch.float32):
    """Rows of 16 and 2 over the processes; a bias of one element leaves some processes nothing."""
    model = nn.Sequential(*mlp(), nn.Linear(2, 1, device=next(mlp().parameters()).device)).to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh_of_all(), mp_policy=policy)
    return model


class Float32Twin(Twin):
    """Of float32 copies."""

    def __init__(self, model, kind, options):
        super().__init__(model, kind, options)
        for q in self.params:
            q.data = q.data.float()

    def step(self, factor=1.0):
        for p, q in zip(self._model, self.params, strict=True):
            q.grad = whole(p.grad).float() * factor
        self.optimizer.step()

    def check(self, optimizer, **tolerance):
        """Compare the float32 values that the state dict has, and that the model has them rounded."""
        state = optimizer.state_dict()["state"]
        for i, (p, q) in enumerate(zip(self._model, self.params, strict=True)):
            value = whole(state[i]["master_param"])
            torch.testing.assert_close(value, q.detach(), **tolerance)
            # Halves are rounded away from zero here, and to even by torch.
            torch.testing.assert_close(whole(p.detach()).float(), value, rtol=2.0**-8, atol=0.0)


def made(kind=optimizers.NpuFusedAdamW, options=None, kept=True, **of_model):
    model = sharded(**of_model)
    return model, kind(model.parameters(), store_param_remainders=kept, **(options or {"lr": 1e-3}))


def train(model, optimizer, steps, twin=None):
    for step in steps:
        loss_on(data(step, 0, dist.get_rank()).to(torch.bfloat16))(model).backward()
        if twin is not None:
            twin.step()
        optimizer.step()
        optimizer.zero_grad()


def rules_without_amp():
    """Small learning rates: without the remainders most of these updates would be lost."""
    for kind, options in FUSED:
        options = {**options, "lr": options["lr"] / 100}
        for reduce_dtype in (torch.float32, torch.bfloat16):
            model, optimizer = made(kind, options, reduce_dtype=reduce_dtype)
            twin = Float32Twin(model, kind, options)
            train(model, optimizer, range(4), twin)
            twin.check(optimizer, **({"rtol": 1e-5, "atol": 1e-6} if kind in NORMS else EXACT))


def remainders_of_8_bits():
    """Each step rounds by less than 2⁻¹⁵ of a value."""
    model, optimizer = made(kept="int8")
    twin = Float32Twin(model, optimizers.NpuFusedAdamW, {"lr": 1e-3})
    train(model, optimizer, range(4), twin)
    twin.check(optimizer, rtol=4 * 2.0**-15, atol=1e-4)
    with pytest.raises(ValueError, match=r"state_dict\(encoded=True\): 'master_param' .*DTensor"):
        optimizer.state_dict(encoded=True)


def torchs_rule():
    """The same by torch.optim.AdamW in float32, of plain copies."""
    model, optimizer = made(options={"lr": 1e-4, "weight_decay": 0.1})
    twin = Float32Twin(model, torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1})
    train(model, optimizer, range(20), twin)
    twin.check(optimizer, rtol=1e-6, atol=1e-7)


def under_amp():
    """O5 with static and dynamic scales, clipping, accumulation, and a step that all processes skip."""
    folded = {"loss_scale": 64.0, "fuse_unscale": True}
    for options in ({}, {"loss_scale": "dynamic"}, {"loss_scale": 64.0}, folded):
        model, optimizer = made()
        model, optimizer = start(model, optimizer, "O5", **options)
        twin = Float32Twin(model, optimizers.NpuFusedAdamW, {"lr": 1e-3})
        dynamic = options.get("loss_scale") == "dynamic"
        for step in range(6):
            x = data(step, 0, dist.get_rank())
            spoilt = dynamic and step == 3
            if spoilt and on_last_rank():
                x[0, 0] = torch.inf
            for micro in range(1 if spoilt else 2):
                backward(loss_on(x + micro)(model), optimizer)
            factor = 1.0
            if not spoilt:
                norm = float(optimizer.clip_optimizer_grad_norm_fused(MAX_NORM))
                assert norm > MAX_NORM
                if options is folded:
                    factor = MAX_NORM / (norm + 1e-6) / 64.0  # the step divides and clips
                else:
                    left = torch.stack([whole(p.grad).float().norm() for p in model.parameters()]).norm()
                    assert left <= MAX_NORM * (1 + 2.0**-7)
                twin.step(factor)
            optimizer.step()
            assert amp.last_step(optimizer).applied is not spoilt
            optimizer.zero_grad()
        # Six steps of 1e-3. Folded, the twin's factor is made of the norm that is returned, which has 8 bits.
        twin.check(optimizer, rtol=1e-5, atol=6e-3 * 2.0**-8 if options is folded else 1e-6)
        amp.shutdown()


def checkpoints():
    for kept in (True, "int8"):
        resume(kept)


def resume(kept):
    """Bit for bit by torch.distributed.checkpoint; whole states go to one process and back."""
    folder = folder_of_all()
    model, optimizer = made(kept=kept)
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True)
    entire = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
    train(model, optimizer, range(3, 6))
    expected = optimizer.state_dict()["state"]
    for way in ("dcp", "whole"):
        resumed, other = made(kept=kept)
        if way == "dcp":
            found = {"model": resumed.state_dict(), "optim": get_optimizer_state_dict(resumed, other)}
            dcp.load(found, checkpoint_id=folder)
            resumed.load_state_dict(found["model"])
            set_optimizer_state_dict(resumed, other, found["optim"])
        else:
            everything = [entire]
            dist.broadcast_object_list(everything, 0)  # the others have none of it
            set_optimizer_state_dict(resumed, other, everything[0], options=full)
        train(resumed, other, range(3, 6))
        for i, entry in other.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(whole(value), whole(expected[i][name])), (way, i, name)


def refusals():
    """bfloat16 without remainders, and float16, whose gradients an unscaled 16-bit number cannot hold."""
    model = sharded()
    with pytest.raises(RuntimeError, match=r"sharded in torch.bfloat16.*store_param_remainders=True"):
        start(model, optimizers.NpuFusedAdamW(model.parameters()), "O5")
    model, optimizer = made(dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"sharded in torch.float16: .*Keep the model in float32"):
        start(model, optimizer, "O2")


if __name__ == "__main__":
    main(globals())
