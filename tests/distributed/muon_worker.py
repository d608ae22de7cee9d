# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Muon on matrices of which each process has a part.

Run in several processes; the arguments are names of functions here.
"""

import copy
import os
import signal
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import backward, data, loss_on, main, mlp
from devices import DEVICE
from fsdp_worker import (
    Twin,
    all_used,
    losses_of,
    mesh_of_all,
    replicas_of_parts,
    resumed_on_other_meshes,
    sharded,
    start,
)
from sharded_worker import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex_npu import amp
from apex_npu.distributed import matrix_exchange
from apex_npu.fusion.shards import local_part
from apex_npu.ops import newton_schulz
from apex_npu.optimizers import NpuFusedMuon, muon

# See test_muon.py. Two ways of multiplying in bfloat16 part by up to twice this.
BFLOAT16 = 0.03
# Several of a shape, one of a shape, tall and wide; rows that no number of processes divides, and fewer than processes.
SHAPES = [(24, 24)] * 5 + [(24, 40), (40, 24), (40, 24), (7, 12), (1, 9), (3, 5), (300, 260)]
STACKS = [(5, 6, 8), (5, 6, 8), (3, 12, 4)]
CUTS = ([Shard(0)], [Shard(1)], [Replicate()])


@contextmanager
def float32_products():
    with pytest.MonkeyPatch.context() as patched:
        for module in newton_schulz, muon:
            patched.setattr(module, "product_dtype", lambda device: torch.float32)
        yield


def cut_in_many_ways(mesh):
    """Groups of parameters with values and cuts, of other options each."""
    generator = torch.Generator().manual_seed(0)

    def group(shapes, cuts, **options):
        values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
        return [(value, mesh, cuts[i % len(cuts)]) for i, value in enumerate(values)], options

    return [
        group(SHAPES, [[Shard(0)]]),
        group(SHAPES, CUTS, lr=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=3),
        group(STACKS, [*CUTS, [Shard(2)]], adjust_lr_fn="spectral_unclamped"),
        group([(24, 8), (24, 8)], CUTS, split=(8, 12, 4)),
        group([(2, 9, 8)], [[Shard(1)]], split=[6, 3]),
        group([(24, 24), (7,), (2, 3, 3, 3)], [[Shard(0)]], use_muon=False, lr=0.02),
        ([(torch.randn(6, 4, generator=generator).to(DEVICE), None, None)], {}),
    ]


def cut_in_two_ways(square):
    """Experts that are cut between each other over one mesh dimension and within over the other, and replicas.

    Two processes that exchange have as many experts as each other, and not as many as the other two.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 6, 8), (5, 8, 6), (1, 8, 6), (24, 8), (24, 24), (5, 6, 8)]
    cuts = [[Shard(1), Shard(0)], [Shard(0), Shard(2)], [Shard(1), Shard(0)], [Replicate(), Shard(0)]]
    cuts += [[Shard(1), Replicate()], [Shard(0), Shard(0)]]
    values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    return [([(value, square, cut) for value, cut in zip(values, cuts, strict=True)], {})]


def made(given, *, cut):
    """The parameters, and an optimizer of them."""
    groups, params = [], []
    for members, options in given:
        found = [
            nn.Parameter(v.clone() if mesh is None or not cut else distribute_tensor(v.clone(), mesh, placements))
            for v, mesh, placements in members
        ]
        params += found
        groups.append({"params": found, **options})
    return params, NpuFusedMuon(groups, lr=0.02, weight_decay=0.1)


def give(step, params, wholes=None):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(DEVICE)
        if wholes is not None:
            wholes[i].grad = grad.clone()
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def meshes():
    found = [mesh_of_all()]
    if dist.get_world_size() == 4:
        square = replicas_of_parts()
        found += [square["shard"]]
    return found


def same_as_whole():
    """In float32 within its rounding; in bfloat16 each step within that of its products."""
    found = [cut_in_many_ways(mesh) for mesh in meshes()]
    if dist.get_world_size() == 4:
        found.append(cut_in_two_ways(replicas_of_parts()))
    for given in found:
        with float32_products():
            params, optimizer = made(given, cut=True)
            wholes, other = made(given, cut=False)
            for step in range(4):
                give(step, params, wholes)
                optimizer.step()
                other.step()
            for p, q in zip(params, wholes, strict=True):
                torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-5, atol=1e-5)
                for name, value in other.state[q].items():
                    torch.testing.assert_close(whole(optimizer.state[p][name]), value, rtol=1e-6, atol=1e-6)
        params, optimizer = made(given, cut=True)
        wholes, other = made(given, cut=False)
        largest = 0.05 * 0.2 * 300**0.5
        for step in range(4):
            give(step, params, wholes)
            optimizer.step()
            other.step()
            for p, q in zip(params, wholes, strict=True):
                assert (whole(p.detach()) - q).abs().max() <= 2 * BFLOAT16 * largest
                q.data.copy_(whole(p.detach()))


def trained(given, steps=3):
    params, optimizer = made(given, cut=True)
    for step in range(steps):
        give(step, params)
        optimizer.step()
    return [local_part(p.detach()).clone() for p in params]


def repetition():
    """Bit for bit, whatever the size of batches that are on their way at once, but for that of products."""
    given = cut_in_many_ways(mesh_of_all())
    first = trained(given)
    assert all(map(torch.equal, first, trained(given)))


def small_batches():
    """More batches than one are exchanged at once, and the last of them leave some processes without a matrix."""
    given = cut_in_many_ways(mesh_of_all())
    with float32_products():
        first = trained(given)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(matrix_exchange, "_OWNED_NUMEL", 1)
            torch.testing.assert_close(first, [*trained(given)], rtol=1e-5, atol=1e-5)


# Of models: matrices by Muon, and biases by AdamW.
OPTIONS = {"lr": 0.02, "use_muon": "auto"}


def levels(mesh=None):
    """Under a loss scale, with an overflow on one rank, clipped: as the unsharded optimizer with the same gradients."""
    for level in ("O0", "O1", "O2", "O4", "O5"):
        for extra in ({}, {"fuse_unscale": True}) if level in ("O1", "O2") else ({},):
            model = sharded(level, mesh=mesh)
            twin = Twin(model, NpuFusedMuon, OPTIONS)
            dynamic = level in ("O1", "O2")
            scaling = {"dynamic_init_scale": 2.0**8} if dynamic else {}
            model, optimizer = start(model, NpuFusedMuon(model.parameters(), **OPTIONS), level, **scaling, **extra)
            with float32_products():
                for step in range(5):
                    x = data(step, 0, dist.get_rank())
                    if dynamic and step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                        x[0, 0] = torch.inf
                    backward(loss_on(x)(model), optimizer)
                    if dynamic and step == 3:
                        assert amp.will_skip(optimizer)
                    else:
                        twin.take()
                        scale = amp.state_dict()["loss_scaler0"]["loss_scale"] if "fuse_unscale" in extra else 1.0
                        for q in twin.params:
                            if q.grad is not None:
                                q.grad.div_(scale)
                        expected = nn.utils.clip_grad_norm_(twin.params, 0.05)
                        norm = optimizer.clip_optimizer_grad_norm_fused(0.05)
                        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
                        twin.optimizer.step()
                    optimizer.step()
                    optimizer.zero_grad()
                    twin.check(rtol=1e-5, atol=1e-5)
            amp.shutdown()


def replicas():
    """Of HSDP: the exchange is within each, and all make the same of their parts, bit for bit."""
    mesh = replicas_of_parts()
    with counted() as sent:
        levels(mesh)
    assert {len(splits) for splits in sent} == {2}
    model = sharded(mesh=mesh)
    optimizer = NpuFusedMuon(model.parameters(), **OPTIONS)
    for step in range(3):
        loss_on(data(step, 0, dist.get_rank()))(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        part = local_part(p.detach())
        first = part.clone()
        dist.broadcast(first, 0 if mesh.get_local_rank("shard") == 0 else 1, group=mesh.get_group("replicate"))
        assert torch.equal(first, part)


@contextmanager
def counted():
    """The elements that this process sends in each all-to-all, to each process of the group."""
    found, exchange = [], dist.all_to_all_single

    def count(output, input, output_splits, input_splits, **options):
        assert input.dtype in (torch.bfloat16, torch.float32)
        found.append([numel * input.itemsize for numel in input_splits])
        return exchange(output, input, output_splits, input_splits, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_to_all_single", count)
        yield found


def bytes_on_the_wire():
    """2 + 2 for an element of a matrix, of which an owner's own part stays where it is."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(8 * world, 12)] * (2 * world) + [(12, 8 * world)] * world
    params, optimizer = made(
        [([(torch.ones(shape).to(DEVICE), mesh_of_all(), [Shard(0)]) for shape in shapes], {})], cut=True
    )
    stacks, compute = [], muon.orthogonalize_stack_

    def note(stack, **options):
        stacks.append(stack.shape)
        compute(stack, **options)

    for step in range(2):
        give(step, params)
        stacks.clear()
        with counted() as sent, pytest.MonkeyPatch.context() as patched:
            patched.setattr(muon, "orthogonalize_stack_", note)
            optimizer.step()
    # Of each batch a process has its share of whole matrices.
    assert sorted(stacks) == sorted([(2, 8 * world, 12), (1, 12, 8 * world)])
    wire = torch.tensor(sum(n for splits in sent for to, n in enumerate(splits) if to != rank), dtype=torch.float64)
    dist.all_reduce(wire)
    numel = sum(p.numel() for p in params)
    assert float(wire) == 4 * numel * (1 - 1 / world)
    assert len(sent) == 4  # two for each shape
    # Experts that are cut between each other: nothing.
    params, optimizer = made([([(torch.ones(world, 6, 4).to(DEVICE), mesh_of_all(), [Shard(0)])], {})], cut=True)
    give(0, params)
    with counted() as sent:
        optimizer.step()
    assert not sent


def refusals():
    """Before anything changes, with the placement."""
    mesh = mesh_of_all()
    weight = torch.ones(8, 8, device=DEVICE)
    parts = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    optimizer = NpuFusedMuon([parts])

    def refuse(error, said, param, **options):
        with pytest.raises(error, match=said):
            optimizer.add_param_group({"params": [param], **options})
        assert len(optimizer.param_groups) == 1

    refuse(TypeError, r"hold addends \(Partial\)", nn.Parameter(DTensor.from_local(weight, mesh, [Partial()])))
    vector = nn.Parameter(distribute_tensor(weight[0], mesh, [Shard(0)]))
    refuse(ValueError, "only supports 2D parameters", vector)
    refuse(ValueError, r"split=\(4, 5\) has 9 rows in all", parts_like(parts), split=(4, 5))
    own = weight[: 8 - 4 * dist.get_rank()]
    uneven = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size([12, 8]), stride=(8, 1))
    if dist.get_world_size() == 2:
        refuse(TypeError, r"This process has \d rows of it, but torch.chunk gives \(6, 6\)", nn.Parameter(uneven))
    else:
        square = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("outer", "inner"))
        both = nn.Parameter(distribute_tensor(weight, square, [Shard(0), Shard(1)]))
        refuse(TypeError, r"placements \(Shard\(dim=0\), Shard\(dim=1\)\) on a mesh of shape \(2, 2\)", both)
        optimizer.add_param_group({"params": [both], "use_muon": False})

    class OwnUpdate(NpuFusedMuon):
        def update(self, run, group):
            run.param.zero_()

    with pytest.raises(TypeError, match=r"is a DTensor.* needs whole parameters"):
        OwnUpdate([parts])


def parts_like(param):
    return nn.Parameter(param.detach().clone())


def formats_of_momentum():
    """In fewer bytes it is near that in float32, and a state dict goes on."""
    found = {}
    for state_dtype in None, torch.bfloat16, "int8":
        model = all_used("O5")
        options = {} if state_dtype is None else {"state_dtype": {"momentum_buffer": state_dtype}}
        model, optimizer = start(model, NpuFusedMuon(model.parameters(), **OPTIONS, **options), "O5")
        losses_of(model, optimizer, range(6), dist.get_rank())
        matrix = model.layers[2].weight
        assert state_dtype is None or not isinstance(optimizer.state[matrix]["momentum_buffer"], torch.Tensor)
        found[state_dtype] = [p.full_tensor() for p in model.parameters()]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        losses_of(model, optimizer, range(6, 8), dist.get_rank())
        amp.shutdown()
    for state_dtype in torch.bfloat16, "int8":
        for p, q in zip(found[state_dtype], found[None], strict=True):
            assert (p - q).abs().max() <= 0.1  # of 6 steps of up to 0.02 times sqrt(7 / 2)


def checkpoints():
    """Resumed bit for bit; by fewer processes, and by one that is not sharded."""

    def begin(model, lr=0.5):
        return start(model, NpuFusedMuon(model.parameters(), lr=lr, use_muon="auto"), "O5")

    resumed_on_other_meshes(begin, range(3, 8), rel=5e-2, abs=5e-2)


def state_dicts_of_torch():
    """Whole ones are exchanged with torch.optim.Muon in both directions."""
    model, plain = mlp(), mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of_all())
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    others = [p for p in model.parameters() if p.ndim != 2]
    for p in (*others, *(p for p in plain.parameters() if p.ndim != 2)):
        p.requires_grad_(False)
    optimizer = NpuFusedMuon(matrices.values(), lr=0.02)
    twins = {name: p for name, p in plain.named_parameters() if name in matrices}
    theirs = torch.optim.Muon(twins.values(), lr=0.02)
    full = StateDictOptions(full_state_dict=True)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        for name, p in matrices.items():
            grad = torch.randn(p.shape, generator=generator).to(DEVICE)
            twins[name].grad = grad
            p.grad = distribute_tensor(grad.clone(), p.device_mesh, p.placements)
        optimizer.step()
        theirs.step()

    for number in range(4):
        step(number)
        saved = get_optimizer_state_dict(model, optimizer, options=full)
        of_torch = get_optimizer_state_dict(plain, theirs, options=full)
        momentum = {name: entry["momentum_buffer"].clone() for name, entry in of_torch["state"].items()}
        for name, entry in saved["state"].items():
            torch.testing.assert_close(entry["momentum_buffer"], momentum[name], rtol=1e-5, atol=1e-6)
        if number == 1:
            # torch wants the keys that the optimizer's own groups have.
            for group, other in zip(of_torch["param_groups"], saved["param_groups"], strict=True):
                group.update({name: other.pop(name) for name in ("use_muon", "split")})
            set_optimizer_state_dict(model, optimizer, of_torch, options=full)
            set_optimizer_state_dict(plain, theirs, saved, options=full)
    for name, p in matrices.items():
        assert (whole(p.detach()) - twins[name]).abs().max() <= 4 * 2 * BFLOAT16 * 0.02 * 2


def lost_in_an_exchange():
    """Rank 1, in the middle of a step: all others have an error, and their parameters as they were."""
    rank = dist.get_rank()
    # Of its own: processes that are slow to start need more time to meet.
    group = dist.new_group(timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
    mesh = DeviceMesh.from_group(group, DEVICE.type, mesh=list(range(dist.get_world_size())))
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = NpuFusedMuon(model.parameters(), **OPTIONS)
    exchange, calls = dist.all_to_all_single, []

    def be_lost(*args, **options):
        calls.append(args)
        if rank == 1 and step == 2 and len(calls) > 2:
            os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])
        return exchange(*args, **options)

    dist.all_to_all_single = be_lost
    for step in range(3):
        calls.clear()
        loss_on(data(step, 0, rank))(model).backward()
        before = [p.to_local().clone() for p in model.parameters()]
        try:
            optimizer.step()
        except RuntimeError as error:
            assert step == 2
            assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
            print(f"noticed: {error}", flush=True)
            os._exit(0)
        optimizer.zero_grad()


if __name__ == "__main__":
    main(globals())
