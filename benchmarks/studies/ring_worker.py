# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of ring.py beside the collectives and the memory of a small model.

One process, by torch's fake process group one of 16 on two nodes: collectives are counted, and nothing is sent.
"""

import gc
import sys
from collections import Counter
from functools import partial

import processes
import pytest
import ring
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex_npu import amp, optimizers
from apex_npu.amp import frontend
from apex_npu.distributed.grad_reducer import ReduceOptions

CLUSTER = ring.Cluster(16)
UNITS, WIDTH = 4, 224
PARAMS = UNITS * ring.MATRICES * WIDTH**2
# Of two matrices.
BUCKET_NBYTES = 2 * ring.LOW * WIDTH**2
KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class Counting(TorchDispatchMode):
    """Counts collectives where they reach the group.

    Attributes:
        calls, nbytes: Of those on 16-bit tensors, by kind and number of ranks.
        others: Bytes of all others.
        peak: The most bytes held when one starts.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.nbytes = Counter(), Counter()
        self.others = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.peak = max(self.peak, held())
            leaves = tree_leaves(args)
            # That of a whole tensor, not of a rank's part.
            whole = max((x for x in leaves if isinstance(x, Tensor)), key=Tensor.numel)
            group = next(x for x in leaves if isinstance(x, torch.ScriptObject))
            if whole.dtype == torch.bfloat16:
                key = KINDS[func._overloadpacket.__name__], dist.ProcessGroup.unbox(group).size()
                self.calls[key] += 1
                self.nbytes[key] += whole.nbytes
            else:
                self.others += whole.nbytes
        return func(*args, **(kwargs or {}))


def held():
    """Bytes of all tensors; those in the memory of another one are counted once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not isinstance(x, DTensor)]
    total = end = 0
    for first, nbytes in sorted((s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)):
        total += max(0, first + nbytes - max(end, first))
        end = max(end, first + nbytes)
    return total


def reduced(_, bucket):
    """A communication hook in place of DistributedDataParallel's reduction, which fails without a result to read."""
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def replicated(name):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS * ring.MATRICES)])
    options = {"combine_grad": True, "combine_ddp": True, "ddp_replica_count": 1000} if name == "combine_ddp" else {}
    model, optimizer = initialized(model, **options)
    if name == "combine_ddp":
        return model, optimizer
    parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_NBYTES / 2**20, gradient_as_bucket_view=True)
    parallel.register_comm_hook(None, reduced)
    return parallel, optimizer


def sharded(name):
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS * ring.MATRICES)]
    model = nn.Sequential(*[nn.Sequential(*layers[i::UNITS]) for i in range(UNITS)])
    shape, names = ((2, 8), ("nodes", "node")) if name.startswith("hybrid") else ((16,), None)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, mp_policy=amp.fsdp_policy("O5"), reshard_after_forward=not name.endswith("=False"))
    return initialized(model)


def initialized(model, **options):
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    return amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)


def check(name):
    before = held()
    model, optimizer = (sharded if "=" in name else replicated)(name)
    x = torch.zeros(1, WIDTH)

    def step():
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    # combine_ddp records the order of gradients in the first step, and DistributedDataParallel rebuilds its buckets.
    for _ in range(2):
        step()
        optimizer.zero_grad()
    with Counting() as counted:
        step()
    engine = ring.ENGINES[name] if "=" in name else ring.replicated(BUCKET_NBYTES)
    plan = engine(PARAMS, UNITS, CLUSTER)
    assert counted.calls == {(c.kind, c.ranks): c.calls for c in plan.collectives}, name
    for c in plan.collectives:
        assert counted.nbytes[c.kind, c.ranks] == pytest.approx(c.nbytes, rel=0.01), (name, c)  # padding
    assert counted.others < 8 * UNITS * ring.MATRICES  # a number for each tensor
    output = model(x)  # it has what is gathered until backward; gradients are those of the step
    # Padding between tensors is 1 %, and so are activations.
    assert held() - before == pytest.approx(plan.kept, rel=0.03), name
    assert counted.peak - before < 1.03 * plan.held(), name
    del output


if __name__ == "__main__":
    torch.set_num_threads(1)
    frontend.ReduceOptions = partial(ReduceOptions, min_bucket_nbytes=BUCKET_NBYTES)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=CLUSTER.ranks)
    for engine in sys.argv[1:]:
        check(engine)
        amp.shutdown()
    processes.leave()
