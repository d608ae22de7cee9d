# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Images from folders, read with PIL, and random ones.

The transforms take a PIL image and return a tensor, as those of torchvision and timm do, which fit in their place.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp"}
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images below ``root``, with a folder for each class, numbered in the order of their names."""

    def __init__(self, root: Path, transform: Callable[[Any], Tensor]) -> None:
        self.transform = transform
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise SystemExit(f"{root}: no images; expected are {root}/CLASS/IMAGE with {', '.join(sorted(SUFFIXES))}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


class Dummy(Dataset[tuple[Tensor, int]]):
    """``count`` random images, the same in each run: what a step costs without reading files."""

    classes = range(1000)

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % len(self.classes)


def to_tensor(image: Any) -> Tensor:
    """Channels first, normalized."""
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - MEAN) / STD


def augment(image: Any, size: int) -> Tensor:
    """A random part, from 8% to all of the image, scaled to ``size`` and mirrored in one of two cases."""
    from PIL import Image

    width, height = image.size
    box = center(width, height)
    for _ in range(10):
        share, aspect, left, top = torch.rand(4).tolist()
        area = width * height * (0.08 + 0.92 * share)
        aspect = math.exp((2 * aspect - 1) * math.log(4 / 3))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = left * (width - wide), top * (height - high)
            box = (left, top, left + wide, top + high)
            break
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if torch.rand(()) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_tensor(image)


def evaluate(image: Any, size: int) -> Tensor:
    """The middle of the image: a square of 7/8 of the shorter side."""
    from PIL import Image

    return to_tensor(image.resize((size, size), Image.Resampling.BILINEAR, box=center(*image.size, part=7 / 8)))


def center(width: int, height: int, part: float = 1.0) -> tuple[float, float, float, float]:
    """The box of the largest square in the middle, or of a part of it."""
    half = part * min(width, height) / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def make_loaders(args: Namespace) -> tuple[DataLoader[Any], DataLoader[Any], int]:
    """The loader of training, that of validation, and how many classes there are.

    Each process has its part of every batch in training, and in validation each image is seen by one process.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    train: Any
    val: Any
    if args.dummy:
        train, val = Dummy(args.dummy, args.image_size), Dummy(min(args.dummy, 50_000), args.image_size)
    else:
        val = ImageFolder(args.data / "val", partial(evaluate, size=args.image_size))
        train = val if args.evaluate else ImageFolder(args.data / "train", partial(augment, size=args.image_size))
    if train.classes != val.classes:
        raise SystemExit(f"{args.data}: train/ and val/ have different classes")
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size}: not divisible by {world} processes")
    batch_size = args.batch_size // world
    # No persistent workers: new ones are seeded from the epoch's seed, so that a resumed run augments alike.
    common = {"batch_size": batch_size, "num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    sampler = DistributedSampler(train, world, rank, seed=args.seed, drop_last=True)
    if len(sampler) < batch_size and not args.evaluate:
        raise SystemExit(f"--batch-size {args.batch_size}: there are only {len(train)} images to train on")
    return (
        DataLoader(train, sampler=sampler, drop_last=True, **common),
        DataLoader(Subset(val, range(rank, len(val), world)), **common),
        len(val.classes),
    )
