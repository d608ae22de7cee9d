# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small transformer that continues a text, character by character, in mixed precision, and samples from it.

    python main.py book.txt --opt-level O5 --combine-grad --checkpoint book.pt
    python main.py book.txt --opt-level O5 --combine-grad --checkpoint book.pt --resume
    python main.py book.txt --checkpoint book.pt --resume --sample-only --prompt "Once upon" --sample 500
    python main.py book.txt --opt-level O5 --store-param-remainders --state-dtype bfloat16
    torchrun --nproc-per-node 8 main.py book.txt --opt-level O5 --fsdp

This file has the options; train.py has the training, model.py the transformer, sharded.py what --fsdp needs.
"""

import argparse
import math
import os
from pathlib import Path


def loss_scale(text: str) -> str:
    """The argument of --loss-scale, as amp takes it."""
    try:
        is_scale = text == "dynamic" or 0 < float(text) < math.inf
    except ValueError:
        is_scale = False
    if not is_scale:
        raise argparse.ArgumentTypeError(f"'dynamic' or a positive number is expected, not '{text}'")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a small transformer on a text file in mixed precision.")
    add = parser.add_argument
    add("text", type=Path, help="a text file in UTF-8; its last tenth is for validation")
    add("--steps", type=int, default=5000, metavar="N", help="how many in all (default %(default)s)")
    add("-b", "--batch-size", type=int, default=64, metavar="N", help="sequences a step (default %(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="parts that a batch is cut into, one after the other")
    add("--interval", type=int, default=250, metavar="N", help="steps between validations (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, batches and dropout (default %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="default: the one that there is")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--checkpoint", type=Path, metavar="FILE", help="write it after each validation")
    add("--resume", action="store_true", help="continue from the file of --checkpoint, bit for bit")

    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--layers", type=int, default=6, metavar="N", help="default %(default)s")
    add("--heads", type=int, default=6, metavar="N", help="of attention (default %(default)s)")
    add("--width", type=int, default=384, metavar="N", help="of the embedding of a character (default %(default)s)")
    add("--context", type=int, default=256, metavar="N", help="characters that the model sees (default %(default)s)")
    add("--dropout", type=float, default=0.2, metavar="P", help="default %(default)s")

    recipe = parser.add_argument_group("optimization: AdamW or Muon, warm-up, cosine")
    add = recipe.add_argument
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: of the blocks' matrices (default adamw)")
    add("--lr", type=float, default=1e-3, help="the highest learning rate; it ends at a tenth (default %(default)s)")
    add("--warmup", type=int, default=100, metavar="N", help="steps (default %(default)s)")
    add(
        "--wd", "--weight-decay", type=float, default=0.1, dest="weight_decay", help="of matrices (default %(default)s)"
    )
    add("--clip", type=float, default=1.0, metavar="NORM", help="of all gradients (default %(default)s)")

    mixed = parser.add_argument_group("mixed precision (docs/amp.md, docs/memory.md)")
    add = mixed.add_argument
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    add("--opt-level", choices=levels, default="O4", help="default %(default)s; O4, O5: bfloat16")
    add("--loss-scale", type=loss_scale, metavar="SCALE", help="'dynamic' or a number; default: the level's")
    add("--combine-grad", action="store_true", help="gradients in one flat buffer")
    add("--store-param-remainders", action="store_true", help="no float32 masters, but 16 bits beside the model")
    states = ["float32", "bfloat16", "int8"]
    add("--state-dtype", choices=states, default="float32", help="of the optimizer's moments (default %(default)s)")
    add("--state-device", choices=["cpu"], help="keep the optimizer's state on the host, and step there")
    add("--fsdp", action="store_true", help="shard the model over the processes that torchrun has started")

    sample = parser.add_argument_group("what it writes at the end")
    add = sample.add_argument
    add("--sample", type=int, default=200, metavar="N", help="characters (default %(default)s; 0: none)")
    add("--sample-only", action="store_true", help="do not train")
    add("--prompt", default="\n", metavar="TEXT", help="what it continues")
    add("--temperature", type=float, default=0.8, metavar="T", help="above 1: more surprising (default %(default)s)")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse before the training what would fail in it, or after it."""
    lowest = dict.fromkeys(("steps", "batch_size", "accumulate", "interval", "layers", "heads", "width", "context"), 1)
    lowest |= dict.fromkeys(("lr", "warmup", "weight_decay", "clip", "sample"), 0)
    for name, number in lowest.items():
        if not getattr(args, name) >= number:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: a number from {number} on is expected")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout}: a share from 0 to less than 1 is expected")
    if not args.text.is_file():
        parser.error(f"{args.text}: there is no such file")
    parts = args.accumulate * (int(os.environ.get("WORLD_SIZE", "1")) if args.fsdp else 1)
    if args.batch_size % parts:
        of = f" × {parts // args.accumulate} processes" if args.fsdp else ""
        parser.error(f"--accumulate {args.accumulate}{of}: --batch-size {args.batch_size} is no multiple of it")
    if args.width % args.heads:
        parser.error(f"--width {args.width}: no multiple of --heads {args.heads}")
    if args.fsdp and "LOCAL_RANK" not in os.environ:
        parser.error("--fsdp: start it with torchrun, as in torchrun --nproc-per-node 8 main.py book.txt --fsdp")
    if args.fsdp and (args.combine_grad or args.compile or args.opt_level == "O3"):
        parser.error("--fsdp: without --combine-grad, --compile and --opt-level O3")
    if args.store_param_remainders and (args.opt_level not in ("O2", "O5") or args.fsdp):
        parser.error("--store-param-remainders: with --opt-level O2 or O5 and without --fsdp")
    if args.state_device and args.fsdp:
        parser.error("--state-device: without --fsdp")
    if not args.prompt:
        parser.error("--prompt: a character at least is expected")
    if not args.temperature > 0:
        parser.error(f"--temperature {args.temperature}: a number above 0 is expected")
    if (args.resume or args.sample_only) and not (args.checkpoint and args.checkpoint.is_file()):
        parser.error("--resume and --sample-only read the file of --checkpoint: name one that exists")
    if args.checkpoint and args.checkpoint.is_dir():
        parser.error(f"--checkpoint {args.checkpoint}: a folder; name a file in it")
    if args.checkpoint and not args.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint {args.checkpoint}: {args.checkpoint.parent} is no folder; create it first")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)

    from train import run  # torch takes seconds to import: --help and wrong options do not wait for it

    run(args)


if __name__ == "__main__":
    main()
