# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data, and the training that main.py's options ask for. Start reading at ``run``."""

import json
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import BertConfig, BertForMaskedLM

from apex_npu import amp, optimizers

IGNORED = -100  # a target that does not count
# What a checkpoint decides, in its weights, words, schedule and groups of parameters: a resumed run has the same.
MODEL = ("layers", "heads", "width", "sequence_length", "vocab_size")
RECIPE = ("optimizer", "steps", "lr", "warmup", "weight_decay")


def run(args: Namespace) -> None:
    """Train and save."""
    device = find_device(args.device)
    state = read_checkpoint(args.checkpoint, args) if args.resume else None
    tokenizer = make_tokenizer(args, state)
    sequences = read_sequences(args, tokenizer)
    torch.manual_seed(args.seed)
    model: nn.Module = BertForMaskedLM(make_config(args, tokenizer.get_vocab_size())).to(device)
    model, optimizer = amp.initialize(
        model,
        make_optimizer(model, args),
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        combine_grad=args.combine_grad or None,
    )
    scheduler = make_scheduler(optimizer, args)
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        if scheduler:
            scheduler.load_state_dict(state["scheduler"])
        first = state["step"]

    since, last = time.perf_counter(), first
    model.train()
    for step in range(first, args.steps):
        # Batch, masks and dropout of a step follow from its number: a resumed run draws what this one does.
        torch.manual_seed(args.seed + 1 + step)
        tokens = sequences[torch.randint(len(sequences), (args.batch_size,))]
        inputs, targets = (part.to(device) for part in mask(tokens, tokenizer))
        loss, right = train_step(model, optimizer, inputs, targets, args.accumulate)
        if scheduler and amp.last_step(optimizer).applied:
            scheduler.step()
        done = step + 1
        if done % args.print_freq == 0 or done == args.steps:
            speed = (done - last) * args.batch_size / (time.perf_counter() - since)
            print(f"step {done}  loss {loss.item():.4f}  right {right.item():.1%}  {speed:.0f} sequences/s", flush=True)
            since, last = time.perf_counter(), done
        if args.checkpoint and (done % args.save_freq == 0 or done == args.steps):
            save(args, model, optimizer, scheduler, tokenizer, done)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        amp.float32_copy(model).save_pretrained(args.output)
        tokenizer.save_model(str(args.output))
        lower = not is_cased(tokenizer.get_vocab())
        (args.output / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}), encoding="utf-8")
        print(f"{args.output}: written")


def train_step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, accumulate: int
) -> tuple[Tensor, Tensor]:
    """One update from a batch in parts; the mean loss of masked words, and how many of them the model has found."""
    count = (targets != IGNORED).sum().clamp(min=1)
    total = torch.zeros(2, device=inputs.device)
    parts = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
    optimizer.zero_grad()
    for number, (part, part_targets) in enumerate(parts, 1):
        logits = model(input_ids=part).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), part_targets.flatten(), reduction="sum") / count
        # Gradients of parts are added up as backward makes them, and unscaled once.
        with amp.scale_loss(loss, optimizer, delay_unscale=number < len(parts)) as scaled_loss:
            scaled_loss.backward()
        total += torch.stack([loss.detach(), (logits.argmax(-1) == part_targets).sum() / count])
    optimizer.step()
    return total[0], total[1]


# --- model and optimizer ---------------------------------------------------------------------------------------------


def make_config(args: Namespace, words: int) -> BertConfig:
    return BertConfig(
        vocab_size=words,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=args.sequence_length,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )


def make_optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    """Weight decay is for matrices, not for biases and layer norms."""
    without = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if not name.endswith(without)], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name.endswith(without)], "weight_decay": 0.0},
    ]
    if args.optimizer == "bertadam":
        schedule = {"schedule": "warmup_linear", "warmup": args.warmup, "t_total": args.steps}
        return optimizers.NpuFusedBertAdam(groups, lr=args.lr, b2=0.999, max_grad_norm=1.0, **schedule)
    if args.optimizer == "lamb":
        return optimizers.NpuFusedLamb(groups, lr=args.lr, use_global_grad_norm=True)
    return optimizers.NpuFusedAdamW(groups, lr=args.lr)


def make_scheduler(optimizer: Optimizer, args: Namespace) -> LRScheduler | None:
    """None for BertAdam, which has its schedule built in."""
    if args.optimizer == "bertadam":
        return None
    schedule = "warmup_poly" if args.optimizer == "lamb" else "warmup_linear"
    return optimizers.WarmupLR(optimizer, schedule, t_total=args.steps, warmup=args.warmup)


# --- data ------------------------------------------------------------------------------------------------------------


def make_tokenizer(args: Namespace, state: dict[str, Any] | None) -> BertWordPieceTokenizer:
    """With the words of the checkpoint, or of --vocab, or else of the text."""
    if state is None and args.vocab is None:
        tokenizer = BertWordPieceTokenizer()
        tokenizer.train([str(args.text)], vocab_size=args.vocab_size, show_progress=False)
        return tokenizer
    words = args.vocab.read_text(encoding="utf-8").split() if args.vocab else state["words"]
    if state is not None and words != state["words"]:
        raise SystemExit(f"--vocab {args.vocab}: other words than those of {args.checkpoint}; leave it out")
    if missing := {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} - set(words):
        raise SystemExit(f"--vocab {args.vocab}: it lacks {', '.join(sorted(missing))}")
    word, count = Counter(words).most_common(1)[0]
    if count > 1:
        raise SystemExit(f"--vocab {args.vocab}: it has {word} {count} times; a word has one number")
    return BertWordPieceTokenizer({word: number for number, word in enumerate(words)}, lowercase=not is_cased(words))


def is_cased(words: Iterable[str]) -> bool:
    """Whether a vocabulary has capitals, except in [MASK] and the like: the text then keeps its own."""
    return any(word != word.lower() for word in words if not word.startswith("["))


def read_sequences(args: Namespace, tokenizer: BertWordPieceTokenizer) -> Tensor:
    """The text in pieces of the same length, each between [CLS] and [SEP]."""
    text = args.text.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    length = args.sequence_length - 2
    count = len(tokens) // length
    if count == 0:
        raise SystemExit(f"{args.text}: {len(tokens)} words, fewer than --sequence-length {args.sequence_length}")
    first, last = (torch.full((count, 1), tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]"))
    return torch.cat([first, tokens[: count * length].view(count, length), last], dim=1)


def mask(tokens: Tensor, tokenizer: BertWordPieceTokenizer) -> tuple[Tensor, Tensor]:
    """Inputs and targets: of 15% of all words 80% are masked, 10% replaced by any other, and 10% left as they are.

    Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
    """
    chosen = torch.rand(tokens.shape) < 0.15
    for word in ("[CLS]", "[SEP]"):
        chosen &= tokens != tokenizer.token_to_id(word)
    kind = torch.rand(tokens.shape)
    inputs = tokens.masked_fill(chosen & (kind < 0.8), tokenizer.token_to_id("[MASK]"))
    others = torch.randint_like(tokens, tokenizer.get_vocab_size())
    inputs = torch.where(chosen & (kind >= 0.9), others, inputs)
    return inputs, tokens.masked_fill(~chosen, IGNORED)


def save(
    args: Namespace,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    tokenizer: BertWordPieceTokenizer,
    step: int,
) -> None:
    """Write a checkpoint, which is complete at any time."""
    state = {
        "step": step,
        "options": {name: getattr(args, name) for name in MODEL + RECIPE},
        "words": sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler else None,
        "amp": amp.state_dict(),
    }
    new = args.checkpoint.with_name(f"{args.checkpoint.name}.new")
    torch.save(state, new)
    os.replace(new, args.checkpoint)


def read_checkpoint(path: Path, args: Namespace) -> dict[str, Any]:
    """The contents of a checkpoint, if it is whole and of a run with such options."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for other files has no common type
        raise SystemExit(f"{path}: not a whole checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or "options" not in state:
        raise SystemExit(f"{path}: not a checkpoint of this example")
    for name, saved in state["options"].items():
        if getattr(args, name) != saved:
            option = f"--{name.replace('_', '-')} {saved}"
            raise SystemExit(
                f"{path}: it was saved with {option}, this run has {getattr(args, name)}; "
                f"add {option}, or leave out --resume to start from step 0"
            )
    return state


def find_device(name: str) -> torch.device:
    """The device of that name, or the one that there is."""
    there = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if name not in ("auto", "cpu", *there):
        raise SystemExit(f"--device {name}: torch {torch.__version__} sees no such device; use cpu or auto")
    return torch.device((there or ["cpu"])[0] if name == "auto" else name)
