# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains the network of digits.py on several processes, each with its part of every batch.

Gradients are averaged by amp itself (``combine_ddp``), by torch's DistributedDataParallel (``ddp``), or by its
``fully_shard``, where each process has a part of every parameter, gradient and moment. Without ``--engine`` one comes
after the other, which shows that losses agree, how long a step takes, and what a process has in memory with each:

    torchrun --nproc-per-node 2 examples/ddp_digits.py
    torchrun --nproc-per-node 2 examples/ddp_digits.py --engine combine_ddp --opt-level O2

With ``--checkpoint`` one of the first two saves after every epoch, and goes on from there when it is started again:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp_digits.py --engine combine_ddp --checkpoint digits.pt
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions would keep as a default argument
from digits import DigitNet, Digits, Parser, UserError, epoch_batches, find_device, load_data, number
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from apex_npu import amp, optimizers
from apex_npu.parallel import DistributedDataParallel

ENGINES = ("combine_ddp", "ddp", "fully_shard")
# Losses of the engines, relative to each other. With two processes they are the same bit for bit; with more they may
# divide by another number before they add, and float16 shows it soon.
TOLERANCE = {"O0": 1e-5, "O1": 2e-2, "O2": 2e-2}


class Training:
    """One engine's model and optimizer on this process, and what it measured."""

    def __init__(self, engine: str, args: argparse.Namespace, device: torch.device) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.epoch = self.nbytes = 0
        torch.manual_seed(args.seed)
        model = DigitNet().to(device)
        if engine == "fully_shard":
            shard(model, args.opt_level)
        optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=3e-3)
        self.inner, self.optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            combine_grad=engine != "fully_shard",
            combine_ddp=engine == "combine_ddp",
            verbosity=0,
        )
        self.model = self.inner
        if engine == "ddp":
            # torch's; running averages of batch norms stay each process's own, as with combine_ddp.
            self.model = DistributedDataParallel(self.inner, find_unused_parameters=False)

    def train(self, data: Digits, args: argparse.Namespace) -> None:
        """All epochs; of every batch each process takes every n-th sample."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.model.train()
        for epoch in range(self.epoch, args.epochs):
            for batch in epoch_batches(len(data.train_labels), seed=args.seed, epoch=epoch):
                own = batch[rank::world]
                started = time.perf_counter()
                loss = self.step(data.train_images[own], data.train_labels[own])
                self.seconds.append(time.perf_counter() - started)
                mean = loss.detach().float()
                dist.all_reduce(mean)
                self.losses.append(mean.item() / world)
            self.epoch = epoch + 1
            if args.checkpoint and rank == 0:
                self.save(args.checkpoint)

    def save(self, path: Path) -> None:
        """Whole or not at all, even where the process ends meanwhile."""
        state = {
            "model": self.inner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
            "epoch": self.epoch,
            "losses": self.losses,
        }
        new = path.with_name(f"{path.name}.new")
        torch.save(state, new)
        new.replace(path)

    def load(self, path: Path, device: torch.device) -> None:
        """All processes, from the one file."""
        state = torch.load(path, map_location=device, weights_only=True)
        self.inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        self.epoch, self.losses = state["epoch"], state["losses"]

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward, backward and update."""
        loss = F.cross_entropy(self.model(images), labels)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.nbytes = self.nbytes or self.held_nbytes()
        self.optimizer.zero_grad()
        return loss

    def held_nbytes(self) -> int:
        """Bytes of parameters, gradients and state that this process has; padding and buckets of DDP not counted."""
        tensors = list(self.inner.parameters())
        tensors += [p.grad for p in tensors if p.grad is not None]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors += [value for value in states if isinstance(value, torch.Tensor)]
        parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        encoded = sum(value.nbytes for value in states if not isinstance(value, torch.Tensor))
        return encoded + sum({part.data_ptr(): part.nbytes for part in parts}.values())

    @torch.no_grad()
    def accuracy(self, data: Digits) -> float:
        """On the half of the data that is not trained on."""
        self.inner.eval()
        return (self.inner(data.test_images).argmax(1) == data.test_labels).float().mean().item()


def shard(model: nn.Module, opt_level: str) -> None:
    """Cut ``model``. Batch norms compute in float32 at all levels: they are units of their own."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            fully_shard(module, mp_policy=amp.fsdp_policy("O0"))
    for unit in (model.block1, model.block2, model):
        fully_shard(unit, mp_policy=amp.fsdp_policy(opt_level))


def run(args: argparse.Namespace, device: torch.device) -> bool:
    """Train with each engine that is asked for; True if their losses agree."""
    data = load_data(device, samples=0)
    losses = {}
    for engine in [args.engine] if args.engine else ENGINES:
        training = Training(engine, args, device)
        if args.checkpoint and args.checkpoint.exists():
            training.load(args.checkpoint, device)
        training.train(data, args)
        accuracy = training.accuracy(data)
        amp.shutdown()
        losses[engine] = training.losses
        if dist.get_rank() == 0:
            # The first steps plan buckets and warm up.
            step = statistics.median(training.seconds[3:] or training.seconds or [0.0])
            print(
                f"{engine:12} last loss {training.losses[-1]:.4f}  test accuracy {accuracy:.2%}  "
                f"{1000 * step:.1f} ms a step  {training.nbytes / 1024:.0f} KiB a process"
            )
    if len(losses) == 1:
        return True
    apart = max((max(found) - min(found)) / max(min(found), 0.1) for found in zip(*losses.values(), strict=True))
    agree = apart <= TOLERANCE[args.opt_level]
    if dist.get_rank() == 0:
        print(f"losses {'agree' if agree else 'DIFFER'}: by at most {apart:.1e} of their size, over all steps")
    return agree


def make_parser() -> Parser:
    parser = Parser(description="Trains a small residual network on several processes.", allow_abbrev=False)
    parser.add_argument("--engine", choices=ENGINES, help="the default is all, one after the other")
    parser.add_argument("--opt-level", choices=sorted(TOLERANCE), default="O0")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--simulated-npu", action="store_true", help="device npu in host memory, with hccl")
    parser.add_argument("--epochs", type=lambda text: number(text, kind=int, low=1), default=2, metavar="N")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save to and go on from; with --engine")
    parser.add_argument("--seed", type=lambda text: number(text, kind=int, low=0, high=2**32 - 1), default=0)
    return parser


def set_up_device(args: argparse.Namespace) -> torch.device:
    """This process's own device of the kind that is asked for."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.simulated_npu:
        import npu_simulator

        npu_simulator.install(device_count=int(os.environ["LOCAL_WORLD_SIZE"]))
        args.device = "npu"
    device = find_device(args.device)
    if device.type == "cpu":
        return device
    getattr(torch, device.type).set_device(local_rank)
    return torch.device(device.type, local_rank)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 where losses differ, 2 for a mistake in the command."""
    args = make_parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        if "LOCAL_RANK" not in os.environ:
            raise UserError("start it with torchrun: torchrun --nproc-per-node 2 examples/ddp_digits.py")
        if args.checkpoint and not args.engine:
            raise UserError("--checkpoint holds one engine's training: name it, as in --engine combine_ddp")
        if args.checkpoint and args.engine == "fully_shard":
            raise UserError(
                "--checkpoint is for engines that keep whole parameters; examples/language_model saves parts"
            )
        device = set_up_device(args)
        dist.init_process_group(dist.Backend.default_device_backend_map[device.type])
        agree = run(args, device)
    except (UserError, ImportError) as error:
        print(f"ddp_digits.py: {error}", file=sys.stderr)
        return 2
    # gloo's threads are to end here, rather than with the interpreter, which they can abort (docs/distributed.md): when
    # nothing refers to the group. DistributedDataParallel does, and it is in reference cycles.
    gc.collect()
    with_gloo = dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if args.engine in (None, "fully_shard") and with_gloo:
        # torch's caches of DTensor keep the group: leave without the end of the interpreter.
        sys.stdout.flush()
        os._exit(0 if agree else 1)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
