# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One of two processes that accelerate trains together; prints for each way a checksum of its weights."""

import os

import processes
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from devices import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from apex_npu import amp, optimizers
from apex_npu.integrations.accelerate import ApexAccelerator

STEPS, MICRO = 6, 2


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)


def data(rank):
    generator = torch.Generator().manual_seed(2 + rank)
    return [torch.randn(8, 6, generator=generator).to(DEVICE) for _ in range(STEPS * MICRO)]


def weights(model):
    return torch.cat([v.detach().float().cpu().flatten() for v in model.state_dict().values()])


def together(level, cls, rank, **place):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which an Accelerator sets for those that follow
    GradientState._reset_state()
    options = {"verbosity": 0}
    place = place or ({"cpu": True} if DEVICE.type == "cpu" else {})
    accelerator = ApexAccelerator(opt_level=level, amp_options=options, gradient_accumulation_steps=MICRO, **place)
    assert accelerator.num_processes == 2
    model = network()
    model, optimizer = accelerator.prepare(model, cls(model.parameters(), lr=1e-2))
    for x in data(rank):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) if place else model.state_dict()
    return torch.cat([v.detach().float().cpu().flatten() for v in state.values()])


def alone(cls):
    """In float32, without accelerate, of the batches of both."""
    model = network()
    optimizer = cls(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(zip(data(0), data(1), strict=True)):
        (model(torch.cat([x, y])).square().mean() / MICRO).backward()
        if i % MICRO == MICRO - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def main():
    rank = processes.join(like_torchrun=True)
    for kind, cls in (("torch", torch.optim.AdamW), ("fused", optimizers.NpuFusedAdamW)):
        expected = alone(cls)
        for level in ("O1", "O2", "O4", "O5"):
            found = together(level, cls, rank)
            near = ((found - expected).norm() / expected.norm()).item()
            amp.shutdown()
            processes.tell(f"{level}-{kind}", found.double().tolist(), near)
            dist.barrier()
        # accelerate shards on accelerators alone.
        for level in ("O1", "O2", "O5") if DEVICE.type != "cpu" else ():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
            found = together(level, cls, rank, fsdp_plugin=plugin)
            amp.shutdown()
            near = ((found - expected).norm() / expected.norm()).item()
            processes.tell(f"{level}-{kind}-sharded", found.double().tolist(), near)
            dist.barrier()
    processes.leave()


if __name__ == "__main__":
    main()
