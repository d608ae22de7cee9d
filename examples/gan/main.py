# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a DCGAN in mixed precision: two models, two optimizers, and three losses with a loss scale each.

    python main.py --opt-level O1 --image samples.png
    python main.py --opt-level O2 --combine-grad --data digits

This file has the options; train.py has the networks and the training.
"""

import argparse
import io
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
    parser = argparse.ArgumentParser(description="Train a DCGAN on small images in mixed precision.")
    add = parser.add_argument
    add("--data", choices=["discs", "digits"], default="discs", help="discs are drawn; digits need scikit-learn")
    add("--epochs", type=int, default=25, metavar="N", help="how many in all (default %(default)s)")
    add("-b", "--batch-size", type=int, default=64, metavar="N", help="default %(default)s")
    add("--lr", type=float, default=2e-4, help="of both optimizers (default %(default)s)")
    add("--width", type=int, default=64, metavar="N", help="channels of the widest images (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order and noise (default %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="default: the one that there is")
    add("--save", type=Path, metavar="FILE", help="write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE", help="continue from a checkpoint, bit for bit")
    add("--image", type=Path, metavar="FILE", help="write 64 generated images at the end; needs pillow")

    mixed = parser.add_argument_group("mixed precision (docs/amp.md)")
    add = mixed.add_argument
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    add("--opt-level", choices=levels, default="O1", help="default %(default)s; O4, O5: bfloat16")
    add("--loss-scale", type=loss_scale, metavar="SCALE", help="'dynamic' or a number; default: the level's")
    add("--combine-grad", action="store_true", help="gradients of each optimizer in one flat buffer")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse before the training what would fail in it, or after it."""
    for name, number in (("epochs", 1), ("batch_size", 1), ("width", 1), ("lr", 0)):
        if not getattr(args, name) >= number:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: a number from {number} on is expected")
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume {args.resume}: there is no such file")
    for option, path in (("--save", args.save), ("--image", args.image)):
        if path and path.is_dir():
            parser.error(f"{option} {path}: a folder; name a file in it")
        if path and not path.parent.is_dir():
            parser.error(f"{option} {path}: {path.parent} is no folder; create it first")
    if args.image:
        check_image(parser, args.image)


def check_image(parser: argparse.ArgumentParser, path: Path) -> None:
    try:
        from PIL import Image
    except ImportError:
        parser.error("--image needs pillow: pip install pillow")
    try:
        Image.new("L", (1, 1)).save(io.BytesIO(), Image.registered_extensions()[path.suffix.lower()])
    except (KeyError, OSError, ValueError):  # an ending without a format, or a format that is not for gray images
        parser.error(f"--image {path}: pillow writes no gray image with the ending {path.suffix!r}; use .png")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)

    from train import run  # torch takes seconds to import: --help and wrong options do not wait for it

    run(args)


if __name__ == "__main__":
    main()
