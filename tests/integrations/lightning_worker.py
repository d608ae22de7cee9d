# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One of two processes that Lightning trains a module on, each on its own half of the data."""

import os
import sys

import processes
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

from integrations.lightning_module import Module, fit, loader, network  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from apex_npu import amp, optimizers  # noqa: E402
from apex_npu.integrations.lightning import ApexAmpPrecision, ApexFabricPrecision  # noqa: E402


def check_equal(module, where):
    mine = torch.cat([value.flatten() for value in module.state_dict().values()])
    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine)
    assert torch.equal(*found), where
    return mine


class Elsewhere(TorchElasticEnvironment):
    """Processes that were started by the test."""

    @staticmethod
    def detect():
        return True


def trained(kind, level, **options):
    module = Module(kind)
    strategy = DDPStrategy(cluster_environment=Elsewhere())
    plugins = {"plugins": ApexAmpPrecision(level)} if level else {}
    fit(module, strategy=strategy, devices=2, num_nodes=1, max_epochs=1, **{**options, **plugins})
    return check_equal(module, (level, options))


def check_trainer(**options):
    options.setdefault("max_steps", 4)
    expected = trained(torch.optim.SGD, None, **options)
    for level in ("O1", "O2", "O4", "O5"):
        found = trained(optimizers.NpuFusedSGD, level, **options)
        assert (found - expected).norm() < (2e-3 if level in ("O1", "O2") else 1e-2) * expected.norm(), level
        amp.shutdown()


def check_accumulated():
    check_trainer(accumulate_grad_batches=2, max_steps=2)


class Sharded(Module):
    """Cut by ``fully_shard`` over the strategy's mesh."""

    level = "O0"

    def configure_model(self):
        for layer in (self.net[0], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"], mp_policy=amp.fsdp_policy(self.level))


def check_sharded():
    found = {}
    for level, kind in ((None, torch.optim.SGD), ("O1", optimizers.NpuFusedSGD), ("O5", optimizers.NpuFusedSGD)):
        module = Sharded(kind)
        module.level = level or "O0"
        plugins = [Elsewhere(), *([ApexAmpPrecision(level)] if level else [])]
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        options = {"accumulate_grad_batches": 2, "max_steps": 3, "gradient_clip_val": 0.5}
        fit(module, strategy=strategy, devices=2, num_nodes=1, max_epochs=1, plugins=plugins, **options)
        found[level] = torch.cat([p.full_tensor().flatten() for p in module.parameters()])
        amp.shutdown()
    for level in ("O1", "O5"):
        assert (found[level] - found[None]).norm() < 1e-2 * found[None].norm(), level


def check_fabric():
    def run(level):
        precision = ApexFabricPrecision(level) if level else None
        plugins = [Elsewhere(), *([precision] if level else [])]
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugins)
        fabric.launch()
        model = network()
        given = (model, optimizers.NpuFusedSGD(model.parameters(), lr=0.05))
        model, optimizer = fabric.setup(*(precision.setup(fabric, *given) if level else given))
        for i, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader())):
            with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                fabric.backward(nn.functional.mse_loss(model(inputs), targets) / 2)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        amp_state = check_equal(model, level)
        amp.shutdown()
        return amp_state

    expected = run(None)
    for level in ("O1", "O2", "O5"):
        found = run(level)
        assert (found - expected).norm() < (2e-3 if level in ("O1", "O2") else 1e-2) * expected.norm(), level


for name in sys.argv[1:]:
    globals()[f"check_{name}"]()
processes.leave()
