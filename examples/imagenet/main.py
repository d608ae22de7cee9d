# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a network on ImageNet, or on any folder of images, in mixed precision.

    python main.py -a resnet50 --opt-level O2 --combine-grad path/to/imagenet
    torchrun --nproc-per-node 8 main.py -a resnet50 --opt-level O2 --combine-grad --combine-ddp path/to/imagenet

This file has the options; train.py has the training, data.py the images, models.py the networks.
"""

import argparse
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
    parser = argparse.ArgumentParser(
        description="Train a network on ImageNet in mixed precision.",
        epilog="Several processes: torchrun --nproc-per-node N main.py ... with the same options.",
    )
    add = parser.add_argument
    add(
        "data", nargs="?", type=Path, default=Path("imagenet"), help="folder with train/ and val/ (default %(default)s)"
    )
    add("-a", "--arch", default="resnet50", help="network, by its name in torchvision or timm (default %(default)s)")
    add("-j", "--workers", type=int, default=4, metavar="N", help="processes that load data (default %(default)s)")
    add("--epochs", type=int, default=90, metavar="N", help="how many in all (default %(default)s)")
    add("--start-epoch", type=int, default=0, metavar="N", help="number of the first; --resume sets it")
    add(
        "-b", "--batch-size", type=int, default=256, metavar="N", help="of all processes together (default %(default)s)"
    )
    add("-p", "--print-freq", type=int, default=10, metavar="N", help="steps between two lines (default %(default)s)")
    add("--image-size", type=int, default=224, metavar="PIXELS", help="side of what the network sees")
    add("--resume", type=Path, metavar="FILE", help="continue from a checkpoint, bit for bit")
    add("-e", "--evaluate", action="store_true", help="validate, and do not train")
    add("--pretrained", action="store_true", help="start from the weights of torchvision or timm")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order and augmentation (default %(default)s)")
    add("--deterministic", action="store_true", help="choose deterministic kernels of cuDNN")
    add("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="default: the one that there is")
    add("--gpu", type=int, metavar="INDEX", help="which card, for one process; torchrun's processes take one each")
    add(
        "--dummy",
        type=int,
        nargs="?",
        const=1_281_167,
        metavar="N",
        help="N random images instead of files, for timing",
    )
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="of checkpoint.pth.tar and model_best.pth.tar")
    add("--export", type=Path, metavar="FILE", help="write the network as ONNX at the end")

    recipe = parser.add_argument_group("optimization")
    add = recipe.add_argument
    add("--optimizer", default="NpuFusedSGD", metavar="NAME", help="one of apex_npu.optimizers or torch.optim")
    add("--lr", "--learning-rate", type=float, default=0.1, help="the highest; 0.1 suits 256 images a step")
    add("--momentum", type=float, default=0.9, help="of SGD and RMSprop (default %(default)s)")
    add("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay", help="default %(default)s")
    add("--schedule", choices=["cosine", "step"], default="cosine", help="step: a tenth every 30 epochs")
    add("--warmup-epochs", type=float, default=5, metavar="N", help="with a rising learning rate (default %(default)s)")
    add("--label-smoothing", type=float, default=0.1, metavar="EPS", help="default %(default)s")
    add("--sync-bn", "--sync_bn", action="store_true", help="batch norms over the batches of all processes")
    add("--channels-last", action="store_true", help="memory format of images and weights")

    mixed = parser.add_argument_group("mixed precision (docs/amp.md)")
    add = mixed.add_argument
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    add("--opt-level", "--opt_level", choices=levels, default="O1", help="default %(default)s; O4, O5: bfloat16")
    add(
        "--loss-scale",
        "--loss_scale",
        type=loss_scale,
        metavar="SCALE",
        help="'dynamic' or a number; default: the level's",
    )
    add("--keep-batchnorm-fp32", "--keep_batchnorm_fp32", choices=["True", "False"], help="default: the level's")
    add("--combine-grad", "--combine_grad", action="store_true", help="gradients in one flat buffer")
    add("--combine-ddp", "--combine_ddp", action="store_true", help="average them without DistributedDataParallel")
    add("--fuse-unscale", "--fuse_unscale", action="store_true", help="unscale gradients in the step itself")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse before the training what would fail in it, or after it."""
    lowest = dict.fromkeys(("epochs", "batch_size", "print_freq", "image_size"), 1)
    lowest |= {} if args.dummy is None else {"dummy": 1}
    lowest |= dict.fromkeys(("workers", "start_epoch", "lr", "momentum", "weight_decay", "warmup_epochs"), 0)
    for name, number in lowest.items():
        if not getattr(args, name) >= number:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: a number from {number} on is expected")
    if not 0 <= args.label_smoothing <= 1:
        parser.error(f"--label-smoothing {args.label_smoothing}: a share from 0 to 1 is expected")
    if args.combine_ddp and not args.combine_grad:
        parser.error("--combine-ddp averages the flat buffer of gradients: add --combine-grad")
    if args.dummy is None and not (args.data / "val").is_dir():
        parser.error(f"{args.data}: no folder with train/ and val/ in it; --dummy trains on random images")
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume {args.resume}: there is no such file")
    for option, folder in (("--output", args.output), ("--export", (args.export or Path()).parent)):
        if not folder.is_dir():
            parser.error(f"{option}: {folder} is no folder; create it first")
    if args.export and args.export.is_dir():
        parser.error(f"--export {args.export}: a folder; name a file in it")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)

    from train import run  # torch takes seconds to import: --help and wrong options do not wait for it

    run(args)


if __name__ == "__main__":
    main()
