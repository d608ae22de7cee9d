# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pre-trains a BERT on a text file, as a masked language model, in mixed precision.

    python main.py book.txt --opt-level O2 --combine-grad --checkpoint bert.pt
    python main.py book.txt --opt-level O2 --combine-grad --checkpoint bert.pt --resume --output bert

This file has the options; train.py has the data and the training. Needs transformers.
"""

import argparse
import importlib.util
import math
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
    parser = argparse.ArgumentParser(description="Pre-train a BERT on a text file in mixed precision.")
    add = parser.add_argument
    add("text", type=Path, help="a text file in UTF-8")
    add("--vocab", type=Path, metavar="FILE", help="WordPiece vocabulary; default: of the text in lower case")
    add("--vocab-size", type=int, default=8000, metavar="N", help="of one that is made (default %(default)s)")
    add("--steps", type=int, default=10_000, metavar="N", help="updates in all (default %(default)s)")
    add("-b", "--batch-size", type=int, default=256, metavar="N", help="sequences an update (default %(default)s)")
    add("--accumulate", type=int, default=8, metavar="N", help="parts that a batch is cut into (default %(default)s)")
    add("-p", "--print-freq", type=int, default=10, metavar="N", help="steps between two lines (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, batches, masks, dropout (default %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="default: the one that there is")
    add("--checkpoint", type=Path, metavar="FILE", help="write it every --save-freq steps, and at the end")
    add("--save-freq", type=int, default=500, metavar="N", help="default %(default)s")
    add("--resume", action="store_true", help="continue from the file of --checkpoint, bit for bit: give its options")
    add("--output", type=Path, metavar="FOLDER", help="write model and vocabulary for transformers at the end")

    model = parser.add_argument_group("model; the default is BERT-base")
    add = model.add_argument
    add("--layers", type=int, default=12, metavar="N", help="default %(default)s")
    add("--heads", type=int, default=12, metavar="N", help="of attention (default %(default)s)")
    add("--width", type=int, default=768, metavar="N", help="of a word's vector (default %(default)s)")
    add("--sequence-length", type=int, default=128, metavar="N", help="default %(default)s")
    add("--dropout", type=float, default=0.1, metavar="P", help="default %(default)s")

    recipe = parser.add_argument_group("optimization")
    add = recipe.add_argument
    add("--optimizer", choices=["lamb", "bertadam", "adamw"], default="lamb", help="default %(default)s")
    add("--lr", type=float, help="the highest; default: 2e-3 for lamb, 1e-4 for the others")
    add("--warmup", type=float, default=0.1, metavar="SHARE", help="of the steps (default %(default)s)")
    add("--wd", "--weight-decay", type=float, default=0.01, dest="weight_decay", help="default %(default)s")

    mixed = parser.add_argument_group("mixed precision (docs/amp.md)")
    add = mixed.add_argument
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    add("--opt-level", choices=levels, default="O2", help="default %(default)s; O4, O5: bfloat16")
    add("--loss-scale", type=loss_scale, metavar="SCALE", help="'dynamic' or a number; default: the level's")
    add("--combine-grad", action="store_true", help="gradients in one flat buffer")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse before the training what would fail in it, or after it."""
    lowest = dict.fromkeys(
        ("vocab_size", "steps", "batch_size", "accumulate", "print_freq", "save_freq", "layers", "heads", "width"), 1
    )
    lowest |= {"sequence_length": 3, "weight_decay": 0} | ({} if args.lr is None else {"lr": 0})
    for name, number in lowest.items():
        if not getattr(args, name) >= number:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: a number from {number} on is expected")
    for name in ("warmup", "dropout"):
        if not 0 <= getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: a share from 0 to less than 1 is expected")
    for path in (args.text, *([args.vocab] if args.vocab else [])):
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
    if args.batch_size % args.accumulate:
        parser.error(f"--accumulate {args.accumulate}: --batch-size {args.batch_size} is no multiple of it")
    if args.width % args.heads:
        parser.error(f"--width {args.width}: no multiple of --heads {args.heads}")
    if args.resume and not (args.checkpoint and args.checkpoint.is_file()):
        parser.error("--resume reads the file of --checkpoint: name one that exists")
    if args.checkpoint and args.checkpoint.is_dir():
        parser.error(f"--checkpoint {args.checkpoint}: a folder; name a file in it")
    if args.checkpoint and not args.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint {args.checkpoint}: {args.checkpoint.parent} is no folder; create it first")
    if args.output and args.output.exists() and not args.output.is_dir():
        parser.error(f"--output {args.output}: a file; name a folder")
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers is missing: pip install transformers")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    if args.lr is None:
        args.lr = 2e-3 if args.optimizer == "lamb" else 1e-4

    from train import run  # torch and transformers take seconds to import: --help and wrong options do not wait

    run(args)


if __name__ == "__main__":
    main()
