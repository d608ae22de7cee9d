# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One of two processes whose Trainers shard their model; prints for each way a checksum of the weights at its end."""

import hashlib
import os

import processes
import test_transformers as alone
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from apex_npu import amp
from apex_npu.integrations.transformers import use_amp

OPTIONS = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def trained(folder, level=None, *, resume=None, **options):
    alone.reset()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which an Accelerator sets for those that follow
    if level is None:
        trainer = alone.trainer_of(folder, **OPTIONS)
    else:
        trainer = use_amp(alone.trainer_of(folder, cls="NpuFusedAdamW", **OPTIONS, **FSDP, **options), level)
    trainer.train(resume_from_checkpoint=resume)
    found = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    amp.shutdown()
    return torch.cat([found[name].detach().float().cpu().flatten() for name in sorted(found)])


def checksum(weights):
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main():
    processes.join(like_torchrun=True)
    if not hasattr(torch.npu.random, "get_rng_state_all"):  # which the simulated device lacks
        torch.npu.random.get_rng_state_all = lambda: [torch.npu.get_rng_state()]
        torch.npu.random.set_rng_state_all = lambda states: torch.npu.set_rng_state(states[0])
    folder = os.environ["STORE"] + "-trainer"
    expected = trained(folder)
    for level in ("O1", "O2", "O5"):
        found = trained(folder, level)
        near = ((found - expected).norm() / expected.norm()).item()
        processes.tell(level, checksum(found), near)
    whole = trained(folder, "O2", save_strategy="steps", save_steps=4)
    processes.tell("saved", checksum(whole))
    dist.barrier()
    resumed = trained(folder, "O2", resume=os.path.join(folder, "checkpoint-4"))
    processes.tell("resumed", checksum(resumed))
    processes.leave()


if __name__ == "__main__":
    main()
