# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The networks, their data, and the training that main.py's options ask for. Start reading at ``run``.

Radford et al. 2015, https://arxiv.org/abs/1511.06434.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apex_npu import amp, optimizers

NOISE = 64  # numbers that an image is generated from


def run(args: Namespace) -> None:
    """Train, save, and show what is generated."""
    device = find_device(args.device)
    images = load_images(args.data).to(device)
    if args.batch_size > len(images):
        raise SystemExit(f"--batch-size {args.batch_size}: there are only {len(images)} images")
    torch.manual_seed(args.seed)
    models = [Generator(args.width).to(device), Discriminator(args.width).to(device)]
    optimizers_of_both = [
        optimizers.NpuFusedAdam(model.parameters(), lr=args.lr, betas=(0.5, 0.999)) for model in models
    ]
    (generator, discriminator), (optimizer_g, optimizer_d) = amp.initialize(
        models,
        optimizers_of_both,
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        num_losses=3,
        combine_grad=args.combine_grad or None,
    )
    trained = {
        "generator": generator,
        "discriminator": discriminator,
        "optimizer_g": optimizer_g,
        "optimizer_d": optimizer_d,
        "amp": amp,
    }
    first_epoch = 0
    if args.resume:
        state = read_checkpoint(args.resume, args)
        for name, part in trained.items():
            part.load_state_dict(state[name])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, args.epochs):
        # The order of images and all noise of an epoch follow from its number.
        torch.manual_seed(args.seed + 10_007 * (epoch + 1))
        generator.train()
        sums, steps = torch.zeros(3, device=device), len(images) // args.batch_size
        for batch in torch.randperm(len(images))[: steps * args.batch_size].split(args.batch_size):
            sums += train_step(generator, discriminator, optimizer_g, optimizer_d, images[batch.to(device)])
        on_real, on_fake, of_generator = (sums / steps).tolist()
        print(f"epoch {epoch}  discriminator {on_real:.4f} + {on_fake:.4f}  generator {of_generator:.4f}", flush=True)
        if args.save:
            state = {name: part.state_dict() for name, part in trained.items()}
            state |= {"epoch": epoch + 1, "options": {"width": args.width, "lr": args.lr}}
            new = args.save.with_name(f"{args.save.name}.new")
            torch.save(state, new)
            os.replace(new, args.save)
    if args.image:
        torch.manual_seed(args.seed)
        save_image(args.image, generator, device)


def train_step(
    generator: nn.Module,
    discriminator: nn.Module,
    optimizer_g: torch.optim.Optimizer,
    optimizer_d: torch.optim.Optimizer,
    real: Tensor,
) -> Tensor:
    """One step of each: three losses, each with a loss scale of its own, since their gradients differ in size."""
    ones, zeros = torch.ones(len(real), device=real.device), torch.zeros(len(real), device=real.device)
    fake = generator(torch.randn(len(real), NOISE, 1, 1, device=real.device))

    # This clears as well what the generator's loss has left on the discriminator.
    optimizer_d.zero_grad()
    loss_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
    with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
    with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()
    return torch.stack([loss.detach().float() for loss in (loss_real, loss_fake, loss_g)])


class Generator(nn.Sequential):
    """From noise to an image of 16x16, with values from -1 to 1."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.apply(init_weights)


class Discriminator(nn.Sequential):
    """From an image to a number, positive where it takes the image for a real one."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
            nn.Flatten(0),
        )
        self.apply(init_weights)


def init_weights(module: nn.Module) -> None:
    """The paper's: small weights, norms about 1."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)


def load_images(data: str) -> Tensor:
    """Images of 16x16 with one channel, from -1 to 1."""
    if data == "digits":
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise SystemExit("--data digits needs scikit-learn: pip install scikit-learn") from error
        digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)
        return F.interpolate(digits, size=(16, 16), mode="bilinear") / 8 - 1
    generator = torch.Generator().manual_seed(0)
    x, y, radius = torch.rand(3, 2048, 1, 1, generator=generator)
    rows, columns = torch.arange(16.0).view(16, 1), torch.arange(16.0)
    distance = torch.hypot(columns - 5 - 5 * x, rows - 5 - 5 * y)
    return torch.tanh(2 + 3 * radius - distance).unsqueeze(1)


def read_checkpoint(path: Path, args: Namespace) -> dict[str, Any]:
    """The contents of a checkpoint, if it is whole and of such a model."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for other files has no common type
        raise SystemExit(f"{path}: not a whole checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or "options" not in state:
        raise SystemExit(f"{path}: not a checkpoint of this example")
    for name, saved in state["options"].items():
        if getattr(args, name) != saved:
            option = f"--{name} {saved}"
            raise SystemExit(f"{path}: it was saved with {option}, this run has {getattr(args, name)}; add {option}")
    return state


@torch.no_grad()
def save_image(path: Path, generator: nn.Module, device: torch.device) -> None:
    """8 x 8 generated images, four times as large."""
    from PIL import Image

    generator.eval()
    images = generator(torch.randn(64, NOISE, 1, 1, device=device)).float().cpu()
    grid = images.view(8, 8, 16, 16).transpose(1, 2).reshape(128, 128)
    Image.fromarray(((grid + 1) * 127.5).byte().numpy()).resize((512, 512), Image.Resampling.NEAREST).save(path)
    print(f"{path}: written")


def find_device(name: str) -> torch.device:
    """The device of that name, or the one that there is."""
    there = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if name not in ("auto", "cpu", *there):
        raise SystemExit(f"--device {name}: torch {torch.__version__} sees no such device; use cpu or auto")
    return torch.device((there or ["cpu"])[0] if name == "auto" else name)
