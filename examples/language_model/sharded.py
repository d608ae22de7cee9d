# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""--fsdp: each process of torchrun has a part of every parameter, of its gradient and of its moments."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from apex_npu import amp

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def join_processes(device: torch.device) -> None:
    """Meet the other processes, each with a device of its own."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device.type])


def leave_processes() -> None:
    """Leave the other processes, as the last statement: with gloo it ends this process.

    torch's caches of DTensor keep the group, so that gloo's threads outlive it. One of them could abort the process
    while the interpreter exits (docs/distributed.md).
    """
    with_gloo = dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if with_gloo:
        sys.stdout.flush()
        os._exit(0)


def shard(model: nn.Module, opt_level: str) -> None:
    """Cut ``model``. A block is gathered when it computes, so that one at a time is whole."""
    policy = amp.fsdp_policy(opt_level)
    for unit in (*model.blocks, model):
        fully_shard(unit, mp_policy=policy)


def gather_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dicts of both as if nothing were sharded. All processes take part, and the first one gets them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() > 0:
        return {}
    # torch.distributed.checkpoint goes by names, torch.optim by numbers.
    numbers = {name: number for number, name in enumerate(_names(model, optimizer))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in states["param_groups"]]
    state = {numbers[name]: entry for name, entry in states["state"].items()}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


def load_states(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give each process its part of what ``gather_states``, or a run without --fsdp, has saved."""
    names, saved = _names(model, optimizer), state["optimizer"]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={
            "state": {names[number]: entry for number, entry in saved["state"].items()},
            "param_groups": groups,
        },
        options=StateDictOptions(full_state_dict=True),
    )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the parameters of ``optimizer``, in order."""
    name_of = {id(param): name for name, param in model.named_parameters()}
    return [name_of[id(param)] for group in optimizer.param_groups for param in group["params"]]
