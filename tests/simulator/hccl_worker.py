# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each process of test_hccl.py does: ``torchrun ... hccl_worker.py CHECK...`` runs the functions named."""

from __future__ import annotations

import copy
import os
import sys

import npu_simulator
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def ramp(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(6, dtype=torch.float32) + 10 * rank).to(dtype)


def equal(got: Tensor, want: Tensor) -> None:
    assert got.device.type == "npu", got.device
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def collectives(rank: int, size: int) -> None:
    total = sum(ramp(r) for r in range(size))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        x = ramp(rank, dtype).npu()
        dist.all_reduce(x)
        equal(x, total.to(dtype))
    x = ramp(rank).npu()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    equal(x, ramp(size - 1))
    x = ramp(rank).npu()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(x.cpu(), total / size)
    x = ramp(rank).npu()
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    equal(x, total)
    equal(work.get_future().value()[0], total)

    x = ramp(rank).npu()
    dist.broadcast(x, src=1)
    equal(x, ramp(1))
    x = ramp(rank).npu()
    dist.reduce(x, dst=0)
    if rank == 0:
        equal(x, total)

    parts = [torch.empty(6, device="npu") for _ in range(size)]
    dist.all_gather(parts, ramp(rank).npu())
    for r, part in enumerate(parts):
        equal(part, ramp(r))
    whole = torch.empty(6 * size, device="npu")
    dist.all_gather_into_tensor(whole, ramp(rank).npu())
    everything = torch.cat([ramp(r) for r in range(size)])
    equal(whole, everything)
    row = torch.empty(1, 6 * size, device="npu")  # of any shape, as for nccl
    dist.all_gather_into_tensor(row, ramp(rank).npu())
    equal(row[0], everything)

    mine = torch.empty(6, device="npu")
    dist.reduce_scatter_tensor(mine, everything.npu() * (rank + 1))
    equal(mine, ramp(rank) * sum(range(1, size + 1)))
    dist.reduce_scatter(mine, [(ramp(r) + rank).npu() for r in range(size)])
    equal(mine, ramp(rank) * size + sum(range(size)))

    gathered = [torch.empty(6, device="npu") for _ in range(size)] if rank == 0 else None
    dist.gather(ramp(rank).npu(), gathered, dst=0)
    if gathered is not None:
        equal(torch.cat(gathered), everything)
    dist.scatter(mine, [ramp(r).npu() for r in range(size)] if rank == 0 else None, src=0)
    equal(mine, ramp(rank))

    exchanged = torch.empty(size, device="npu")
    dist.all_to_all_single(exchanged, torch.arange(size, dtype=torch.float32).npu() + 10 * rank)
    equal(exchanged, torch.arange(size, dtype=torch.float32) * 10 + rank)
    outputs = [torch.empty(rank + 1, device="npu") for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((to + 1,), float(rank), device="npu") for to in range(size)])
    for source, output in enumerate(outputs):
        equal(output, torch.full((rank + 1,), float(source)))

    if rank == 0:
        dist.send(ramp(7).npu(), dst=1)
    elif rank == 1:
        received = torch.empty(6, device="npu")
        dist.recv(received, src=0)
        equal(received, ramp(7))
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ramp(rank).npu(), (rank + 1) % size), dist.P2POp(dist.irecv, mine, (rank - 1) % size)]
    )
    for request in requests:
        request.wait()
    equal(mine, ramp((rank - 1) % size))
    dist.barrier()


def groups_and_objects(rank: int, size: int) -> None:
    assert dist.get_backend() == "hccl"
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = ramp(rank).npu()
        dist.all_reduce(x, group=pair)
        equal(x, ramp(0) + ramp(1))
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    shared: list[object] = [("from", rank), torch.full((2,), float(rank), device="npu")]
    dist.broadcast_object_list(shared, src=1)
    assert shared[0] == ("from", 1)

    with npu_simulator.count() as n:
        dist.all_reduce(ramp(rank).npu())
    assert n.by_op == {"hccl.all_reduce": 1}
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(ramp(rank))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(3)]


def ddp(rank: int, size: int) -> None:
    def train(device: str, group: dist.ProcessGroup | None, **options: bool) -> list[Tensor]:
        model = nn.parallel.DistributedDataParallel(net().to(device), process_group=group, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in batches(rank):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    want = train("cpu", dist.new_group(backend="gloo"))
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        for p, q in zip(train("npu", None, **options), want, strict=True):
            torch.testing.assert_close(p, q)


def fsdp(rank: int, size: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for index in range(3):
            optimizer.zero_grad()
            for r in range(size):
                x, y = batches(r)[index]
                (F.cross_entropy(model(x), y) / size).backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    sharded = copy.deepcopy(model).npu()
    mesh = init_device_mesh("npu", (size,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    plain(model, torch.optim.Adam(model.parameters(), lr=0.1))
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1)
    for x, y in batches(rank):
        optimizer.zero_grad()
        F.cross_entropy(sharded(x.npu()), y.npu()).backward()
        optimizer.step()
    for p, q in zip(sharded.parameters(), model.parameters(), strict=True):
        whole = p.full_tensor()  # type: ignore[attr-defined]
        assert whole.device.type == "npu"
        torch.testing.assert_close(whole.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)

    half = fully_shard(nn.Linear(4, 3).npu(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    out = half(batches(rank)[0][0].npu())
    assert out.dtype == torch.bfloat16
    out.sum().backward()


def dies(rank: int, size: int) -> None:
    """Rank 1 disappears; the others have to notice."""
    dist.all_reduce(ramp(rank).npu())
    if rank == 1:
        os._exit(3)
    try:
        for _ in range(3):
            dist.all_reduce(ramp(rank).npu())
    except RuntimeError as error:
        print(f"noticed: {str(error).splitlines()[0]}", flush=True)
        os._exit(0)
    raise AssertionError("an all_reduce without rank 1 succeeded")


def main() -> None:
    torch.set_num_threads(1)
    npu_simulator.install(device_count=4)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    store = None
    if "STORE" in os.environ:
        store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=size)
    for name in sys.argv[1:]:
        globals()[name](rank, size)
    processes.leave()


if __name__ == "__main__":
    main()
