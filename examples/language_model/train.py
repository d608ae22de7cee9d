# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The training that main.py's options ask for. Start reading at ``run``."""

import math
import os
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import LanguageModel
from sharded import gather_states, join_processes, leave_processes, load_states, shard
from torch import Tensor, nn
from torch.nn import functional as F

from apex_npu import amp, optimizers

# A checkpoint is continued with the same.
OPTIONS = ("layers", "heads", "width", "context", "optimizer", "weight_decay")


def run(args: Namespace) -> None:
    """Train and save; then write some text."""
    device = find_device(args.device)
    if args.fsdp:
        join_processes(device)
    text = Text.read(args)
    prompt = text.encode(args.prompt)
    torch.manual_seed(args.seed)
    model = LanguageModel(
        len(text.characters),
        layers=args.layers,
        heads=args.heads,
        width=args.width,
        context=args.context,
        dropout=args.dropout,
    ).to(device)
    if args.fsdp:
        shard(model, args.opt_level)
    optimizer = make_optimizer(model, args)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        combine_grad=args.combine_grad or None,
        store_param_remainders=args.store_param_remainders or None,
    )
    first = 0
    if args.resume or args.sample_only:
        state = read_checkpoint(args.checkpoint, args)
        if state["characters"] != text.characters:
            raise SystemExit(f"--checkpoint {args.checkpoint}: it was trained on a text with other characters")
        load(model, optimizer, state, args)
        if not args.sample_only:
            amp.load_state_dict(state["amp"])
            first = state["step"]

    if not args.sample_only:
        train(model, optimizer, text, first, args, device)
    if args.sample:
        torch.manual_seed(args.seed)
        show(sample(model, text, prompt, args, device))
    if args.fsdp:
        leave_processes()


def train(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    text: "Text",
    first: int,
    args: Namespace,
    device: torch.device,
) -> None:
    """From step ``first`` to the last one."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if args.fsdp else (0, 1)
    compiled = torch.compile(model) if args.compile else model
    since, last = time.perf_counter(), first
    for step in range(first, args.steps):
        # The batch and the dropout of a step follow from its number: a resumed run draws what this one does.
        torch.manual_seed(args.seed + 1 + step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        model.train()
        optimizer.zero_grad()
        batch = [t.chunk(processes)[rank].chunk(args.accumulate) for t in text.batch("train", args.batch_size, device)]
        mean = torch.zeros((), device=device)
        for number, (part, part_targets) in enumerate(zip(*batch, strict=True), 1):
            loss = next_token_loss(compiled(part), part_targets) / args.accumulate
            # Gradients of parts are added up as backward makes them, and unscaled once.
            with amp.scale_loss(loss, optimizer, delay_unscale=number < args.accumulate) as scaled_loss:
                scaled_loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()

        if (step + 1) % args.interval == 0 or step + 1 == args.steps:
            if args.fsdp:
                dist.all_reduce(mean.div_(processes))
            loss_mean = mean.item()  # here the host waits for the device
            speed = (step + 1 - last) * args.batch_size * args.context / (time.perf_counter() - since)
            validation = validate(model, text, args, device)
            show(f"step {step + 1}  loss {loss_mean:.4f}  validation {validation:.4f}  {speed:.0f} characters/s")
            if args.checkpoint:
                save(model, optimizer, text, step + 1, args)
            since, last = time.perf_counter(), step + 1


def show(text: str) -> None:
    """Print it, of several processes by the first one."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices, and none for biases and norms; or Muon for the matrices of the blocks."""
    if args.optimizer == "muon":
        return make_muon(model, args)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    memory = {"state_dtype": args.state_dtype, "state_device": args.state_device}
    return optimizers.NpuFusedAdamW(groups, lr=args.lr, betas=(0.9, 0.99), **memory)


def make_muon(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, queries, keys and values each for themselves; AdamW for all else."""
    hidden = {name: p for name, p in model.blocks.named_parameters() if p.dim() == 2}
    fused = [p for name, p in hidden.items() if name.endswith("qkv.weight")]
    others = [p for name, p in hidden.items() if not name.endswith("qkv.weight")]
    adamw = {"use_muon": False, "lr": args.lr, "betas": (0.9, 0.99)}
    groups = [
        {"params": fused, "split": (args.width,) * 3},
        {"params": others},
        {"params": [model.token.weight, model.position.weight], **adamw, "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], **adamw, "weight_decay": 0.0},
    ]
    return optimizers.NpuFusedMuon(
        groups,
        lr=args.lr,
        weight_decay=args.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # with which AdamW's learning rate suits matrices
        state_dtype=args.state_dtype,
        state_device=args.state_device,
    )


def learning_rate(step: int, args: Namespace) -> float:
    """Rises for --warmup steps, then falls along a cosine to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / (args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """In float32 at all levels."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: LanguageModel, text: "Text", args: Namespace, device: torch.device) -> float:
    """The mean loss of some batches, which are the same each time, in parts as those of the training."""
    model.eval()
    torch.manual_seed(args.seed)
    losses = []
    for _ in range(10):
        inputs, targets = text.batch("validation", args.batch_size, device)
        for part, part_targets in zip(inputs.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True):
            losses.append(next_token_loss(model(part), part_targets))
    return torch.stack(losses).mean().item()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, text: "Text", step: int, args: Namespace) -> None:
    """Write a checkpoint, which is complete at any time."""
    if args.fsdp:
        states = gather_states(model, optimizer)
    else:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not states:
        return  # the first process has them
    state = {
        "step": step,
        "options": {name: getattr(args, name) for name in OPTIONS},
        "characters": text.characters,
        "amp": amp.state_dict(),
        **states,
    }
    new = args.checkpoint.with_name(f"{args.checkpoint.name}.new")
    torch.save(state, new)
    os.replace(new, args.checkpoint)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], args: Namespace) -> None:
    """Continue with what ``save`` has written, with --fsdp or without."""
    if args.fsdp:
        load_states(model, optimizer, state)
        return
    model.load_state_dict(state["model"])
    if not args.sample_only:
        optimizer.load_state_dict(state["optimizer"])


def read_checkpoint(path: Path, args: Namespace) -> dict[str, Any]:
    """The contents of a checkpoint, if it is whole and of such a model."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for other files has no common type
        raise SystemExit(f"{path}: not a whole checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or "options" not in state:
        raise SystemExit(f"{path}: not a checkpoint of this example")
    # With --sample-only there is no optimizer; with --fsdp its state is loaded nevertheless.
    unused = ("weight_decay", *([] if args.fsdp else ["optimizer"])) if args.sample_only else ()
    for name, saved in state["options"].items():
        if name in unused:
            continue
        if getattr(args, name) != saved:
            option = f"--{name.replace('_', '-')} {saved}"
            raise SystemExit(f"{path}: it was saved with {option}, this run has {getattr(args, name)}; add {option}")
    return state


@torch.no_grad()
def sample(model: LanguageModel, text: "Text", prompt: Tensor, args: Namespace, device: torch.device) -> str:
    """The prompt, and what the model makes of it, character by character."""
    model.eval()
    tokens = prompt[None].to(device)
    for _ in range(args.sample):
        logits = model(tokens[:, -args.context :])[:, -1].float() / args.temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return "".join(text.characters[token] for token in tokens[0].tolist())


@dataclass
class Text:
    """A text as indices of its characters."""

    characters: list[str]
    parts: dict[str, Tensor]
    context: int

    @classmethod
    def read(cls, args: Namespace) -> "Text":
        try:
            content = args.text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SystemExit(f"{args.text}: no text in UTF-8 ({error})") from error
        text = cls(sorted({*content, "\n"}), {}, args.context)
        tokens = text.encode(content)
        border = len(tokens) * 9 // 10
        text.parts = {"train": tokens[:border], "validation": tokens[border:]}
        if len(tokens) - border <= args.context:
            raise SystemExit(f"{args.text}: a tenth of it is to have more than --context {args.context} characters")
        return text

    def encode(self, string: str) -> Tensor:
        numbers = {character: number for number, character in enumerate(self.characters)}
        if unknown := set(string) - numbers.keys():
            raise SystemExit(f"--prompt: the text has no {', '.join(map(repr, sorted(unknown)))}")
        return torch.tensor([numbers[character] for character in string])

    def batch(self, part: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sequences from random places, and the same ones a character later."""
        tokens = self.parts[part]
        starts = torch.randint(len(tokens) - self.context, (size, 1))
        places = starts + torch.arange(self.context)
        return tokens[places].to(device), tokens[places + 1].to(device)


def find_device(name: str) -> torch.device:
    """The device of that name, or the one that there is."""
    there = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if name not in ("auto", "cpu", *there):
        raise SystemExit(f"--device {name}: torch {torch.__version__} sees no such device; use cpu or auto")
    return torch.device((there or ["cpu"])[0] if name == "auto" else name)
