# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small residual network on handwritten digits, in plain fp32 and in mixed precision.

Without ``--opt-level`` three runs are compared: plain fp32 torch, a level that casts per operation with torch's Adam
(O4 where the device computes bfloat16 natively, else O1), and one that casts the model with NpuFusedAdam and
combine_grad (O5, else O2). With it, there is one run, which can be saved after every epoch and resumed:

    python examples/digits.py
    python examples/digits.py --opt-level O2 --combine-grad --save run.pt
    python examples/digits.py --opt-level O2 --combine-grad --save run.pt --resume run.pt

A run that was killed and resumed gives the same losses, bit for bit, as one that was not: an epoch's order of samples
and learning rate follow from the seed and the epoch's number, and everything else is in the checkpoint.
"""

import argparse
import importlib.util
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from digits_report import History, Progress, print_table, save_plot
from torch import Tensor, nn
from torch.nn import functional as F

from apex_npu import amp, optimizers
from apex_npu.doctor.precision import native_dtypes, speed_of_low_precision

FORMAT = "apex_npu digits checkpoint 1"
BATCH_SIZE = 64
TORCH_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
FUSED_OPTIMIZERS = {name: getattr(optimizers, name) for name in optimizers.__all__ if name.startswith("NpuFused")}
OPTIMIZERS = FUSED_OPTIMIZERS | TORCH_OPTIMIZERS


class UserError(Exception):
    """Something in the command or its files is wrong; the message is the one line that the user sees."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run's losses. ``opt_level=None`` is plain torch, without amp."""

    opt_level: str | None
    optimizer: str
    combine_grad: bool = False
    loss_scale: str | float | None = None
    epochs: int = 12
    seed: int = 0
    lr: float = 3e-3
    samples: int = 0  # training samples; 0 for all
    channels: int = 16  # of the first layers; the last ones have twice as many

    @property
    def label(self) -> str:
        """The run's name in the table and the plot."""
        if self.opt_level is None:
            return f"fp32 torch, {self.optimizer}"
        return f"{self.opt_level}, {self.optimizer}" + (", combine_grad" if self.combine_grad else "")


# --- data and model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """The two halves of the data set, on the device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data(device: torch.device, *, samples: int) -> Digits:
    """Scikit-learn's 1797 digits of 8x8 pixels. The halves are fixed: seeds of runs do not move samples."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.5, random_state=0, stratify=digits.target)
    if samples > len(train):
        raise UserError(f"--samples {samples}: the training half has {len(train)}")
    train = train[: samples or None]
    return Digits(*(part.to(device) for part in (images[train], labels[train], images[test], labels[test])))


class Residual(nn.Module):
    """Two 3x3 convolutions around which the input is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class DigitNet(nn.Module):
    """A residual network in small: 8x8 pixels, then 4x4, then one average per channel."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.block1 = Residual(channels)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.block2 = Residual(2 * channels)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(F.relu(self.norm1(self.stem(x))))
        x = self.block2(F.relu(self.norm2(self.down(x))))
        return self.head(x.mean(dim=(2, 3)))


# --- training --------------------------------------------------------------------------------------------------------


class Run:
    """One recipe in training: model, optimizer and what they measured so far."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.history = History()
        # On a CPU the time of this thread, which does all the work: other programs do not count.
        self.clock = time.thread_time if device.type == "cpu" else time.perf_counter
        torch.manual_seed(recipe.seed)
        model = DigitNet(recipe.channels).to(device)
        momentum = {"momentum": 0.9} if recipe.optimizer.endswith("SGD") else {}
        optimizer = OPTIMIZERS[recipe.optimizer](model.parameters(), lr=recipe.lr, **momentum)
        if recipe.opt_level is not None:
            model, optimizer = amp.initialize(
                model,
                optimizer,
                opt_level=recipe.opt_level,
                loss_scale=recipe.loss_scale,
                combine_grad=recipe.combine_grad,
                # Far shorter than the usual 2000: so few steps would otherwise never see a dynamic scale move.
                scale_window=12,
                max_loss_scale=2.0**32,
                verbosity=0,
            )
        self.model, self.optimizer = model, optimizer

    def train_epoch(self, data: Digits, progress: Progress) -> None:
        """One pass over the training half, in an order that the seed and the epoch's number decide."""
        epoch = len(self.history.test_losses)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * (1 + math.cos(math.pi * epoch / self.recipe.epochs)) / 2
        self.model.train()
        started = self.clock()
        for batch in epoch_batches(len(data.train_labels), seed=self.recipe.seed, epoch=epoch):
            self.step(data.train_images[batch], data.train_labels[batch])
            progress.step(self.history)
        self.history.seconds += self.clock() - started

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward and update on one batch."""
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        if self.recipe.opt_level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        self.optimizer.step()
        self.history.losses.append(loss.item())
        if self.recipe.opt_level is not None:
            self.history.scales.append(float(amp.state_dict()["loss_scaler0"]["loss_scale"]))
            self.history.skipped += amp.last_step(self.optimizer).skipped

    @torch.no_grad()
    def test(self, data: Digits) -> None:
        """Loss and accuracy on the half that is not trained on."""
        self.model.eval()
        outputs = self.model(data.test_images).float()
        self.history.test_losses.append(F.cross_entropy(outputs, data.test_labels).item())
        self.history.test_accuracies.append((outputs.argmax(1) == data.test_labels).float().mean().item())

    def state_dict(self) -> dict[str, Any]:
        """The whole run, in types that ``torch.load(weights_only=True)`` reads."""
        return {
            "format": FORMAT,
            "recipe": asdict(self.recipe),
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken: the order is amp's own, initialize first, then the three states."""
        history = History.restore(state["history"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        self.history = history


def epoch_batches(count: int, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """One epoch's indices, batch by batch, without a smaller last one: BatchNorm is noisy on a handful of samples."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    batches = torch.randperm(count, generator=generator).split(BATCH_SIZE)
    return tuple(batch for batch in batches if len(batch) == len(batches[0]))


def train(recipe: Recipe, device: torch.device, *, save: Path | None = None, resume: Path | None = None) -> History:
    """Trains one recipe from the start, or from the checkpoint ``resume``, to its last epoch."""
    data = load_data(device, samples=recipe.samples)
    state = read_checkpoint(resume, recipe) if resume else None
    run = Run(recipe, device)
    if state is not None:
        try:
            run.load_state_dict(state)
        except Exception as error:
            raise UserError(f"--resume {resume}: its contents do not fit this run ({first_line(error)})") from error
    done = len(run.history.test_losses)
    steps = len(epoch_batches(len(data.train_labels), seed=recipe.seed, epoch=0))
    with Progress(recipe.label, epochs=recipe.epochs, steps_per_epoch=steps, done=done) as progress:
        for _ in range(done, recipe.epochs):
            run.train_epoch(data, progress)
            run.test(data)
            progress.epoch(run.history)
            if save:
                write_checkpoint(save, run.state_dict())
    return run.history


# --- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replaces ``path`` atomically: a process that is killed while saving leaves the previous epoch's file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: Path, recipe: Recipe) -> dict[str, Any]:
    """The checkpoint in ``path``, if it is whole and of this very recipe."""
    if not path.is_file():
        raise UserError(f"--resume {path}: there is no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load's refusals of a foreign file have no common type
        raise UserError(f"--resume {path}: not a whole checkpoint of digits.py ({type(error).__name__})") from error
    keys = {"format", "recipe", "history", "model", "optimizer", "amp"}
    if not isinstance(state, dict) or state.get("format") != FORMAT or set(state) != keys:
        raise UserError(f"--resume {path}: not a checkpoint of digits.py")
    if not all(isinstance(state[key], dict) for key in keys - {"format"}):
        raise UserError(f"--resume {path}: a damaged checkpoint of digits.py")
    for name, value in asdict(recipe).items():
        saved = state["recipe"].get(name)
        if saved != value:
            option = "--" + name.replace("_", "-")
            raise UserError(f"--resume {path}: it was saved with {option} {saved}, this run has {option} {value}")
    return state


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- command line ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"digits.py: {message}\n")


def number(text: str, *, kind: type = float, low: float, high: float = math.inf) -> Any:
    """``text`` as a finite number from ``low`` to ``high``, both included."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or value == math.inf:
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(
            f"{what} from {low} {'on' if high == math.inf else f'to {high}'} is expected, not '{text}'"
        )
    return value


def loss_scale(text: str) -> str | float:
    """The argument of --loss-scale."""
    return text if text == "dynamic" else number(text, low=1)


def make_parser() -> Parser:
    count = partial(number, kind=int, low=1)
    seed = partial(number, kind=int, low=0, high=2**32 - 1)
    parser = Parser(description="Trains a small residual network on handwritten digits.", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument("--epochs", type=count, default=Recipe.epochs, metavar="N")
    parser.add_argument("--seed", type=seed, default=Recipe.seed, metavar="N")
    parser.add_argument("--samples", type=count, default=0, metavar="N", help="train on the first N alone")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), metavar="PNG")
    single = parser.add_argument_group("one run instead of the comparison")
    single.add_argument("--opt-level", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    single.add_argument("--optimizer", choices=sorted(OPTIMIZERS), metavar="NAME", help=", ".join(sorted(OPTIMIZERS)))
    single.add_argument("--combine-grad", action="store_true", default=None, help="one flat buffer of gradients")
    single.add_argument("--loss-scale", type=loss_scale, metavar="SCALE", help="'dynamic' or a number")
    single.add_argument("--channels", type=count, metavar="N", help=f"width of the network (default {Recipe.channels})")
    single.add_argument("--lr", type=partial(number, low=1e-8, high=100))
    single.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint after every epoch")
    single.add_argument("--resume", type=Path, metavar="FILE", help="continue from a checkpoint")
    return parser


def recipes(args: argparse.Namespace, native: torch.dtype | None) -> list[Recipe]:
    """The one run that the command line names, or the three of the comparison; see ``comparison`` for ``native``."""
    common = {"epochs": args.epochs, "seed": args.seed, "samples": args.samples}
    if args.opt_level is None:
        for name in ("optimizer", "combine_grad", "loss_scale", "channels", "lr", "save", "resume"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} belongs to one run: name it with --opt-level O0..O5")
        return comparison(native, **common)
    optimizer = args.optimizer or "NpuFusedAdam"
    lr = args.lr or (0.1 if optimizer.endswith("SGD") else Recipe.lr)
    scaling = {"combine_grad": bool(args.combine_grad), "loss_scale": args.loss_scale}
    channels = args.channels or Recipe.channels
    return [Recipe(args.opt_level, optimizer, lr=lr, channels=channels, **scaling, **common)]


def comparison(dtype: torch.dtype | None, **common: int) -> list[Recipe]:
    """Plain fp32 and two levels of ``dtype``, the one that the device computes natively, or None.

    Arithmetic decides the time of a network that is wide enough. Where half precision is emulated, that would take
    minutes: the network is narrow then, and the levels show that they learn as well as fp32 does.
    """
    if dtype is None:
        print("This device computes neither float16 nor bfloat16 natively: the levels show accuracy, not speed.")
    casts_functions, casts_model = ("O4", "O5") if dtype == torch.bfloat16 else ("O1", "O2")
    channels = Recipe.channels if dtype is None else 64
    return [
        Recipe(None, "Adam", channels=channels, **common),
        Recipe(casts_functions, "Adam", channels=channels, **common),
        Recipe(casts_model, "NpuFusedAdam", combine_grad=True, channels=channels, **common),
    ]


def native_dtype(device: torch.device) -> torch.dtype | None:
    """The low-precision dtype that the device computes natively, the faster one of two; None where there is none."""
    if device.type != "cpu":
        return torch.float16
    return next(iter(native_dtypes(speed_of_low_precision("convolutions", device))), None)


def time_of_steps(device: torch.device) -> str:
    """A step of Adam over many small tensors, by torch.optim and fused: the shortest of some, taken in turns."""
    shapes = [(64,), (64, 9), (32, 8)] * 100
    # The fastest that torch has: its fused kernel on cpu and cuda.
    fused = {"fused": True} if device.type in ("cpu", "cuda") else {"foreach": True}
    makers = {"torch.optim.Adam": partial(torch.optim.Adam, **fused), "NpuFusedAdam": optimizers.NpuFusedAdam}
    steps = {}
    for name, make in makers.items():
        params = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        for param in params:
            param.grad = torch.ones_like(param)
        steps[name] = make(params).step
    times = dict.fromkeys(steps, math.inf)
    for _ in range(20):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
            times[name] = min(times[name], time.perf_counter() - started)
    shown = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())
    return f"A step of Adam over {len(shapes)} small tensors: {shown}"


def check_writable(option: str, path: Path | None) -> None:
    """Says before the training, not after it, that its result could not be written."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"{option} {path}: a file in a folder that exists and can be written to is expected")


def find_device(name: str) -> torch.device:
    """The named device, or the best that is there."""
    if name in ("auto", "npu") and importlib.util.find_spec("torch_npu"):
        import torch_npu  # noqa: F401  # registers the device with torch
    there = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if name not in ("auto", "cpu", *there):
        raise UserError(f"--device {name}: torch {torch.__version__} sees no such device; use cpu or auto")
    return torch.device((there or ["cpu"])[0] if name == "auto" else name)


def check_packages() -> None:
    """Says before the training which package is missing."""
    for name, package in {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}.items():
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{package} is missing: pip install {package}")


def run_all(args: argparse.Namespace) -> None:
    """Trains what the command line asks for and shows the result."""
    check_packages()
    check_writable("--save", args.save)
    check_writable("--plot", args.plot)
    device = find_device(args.device)
    print(f"digits.py: torch {torch.__version__} on {device.type}, {args.epochs} epochs, seed {args.seed}", flush=True)
    native = native_dtype(device) if args.opt_level is None else None
    todo = recipes(args, native)
    torch.backends.cudnn.deterministic = True  # same seed, same losses
    # Batches this small are not worth sharing among cores, which on a busy machine would mostly wait for each other.
    torch.set_num_threads(1)
    histories = {recipe.label: train(recipe, device, save=args.save, resume=args.resume) for recipe in todo}
    print_table(histories, timed=len(todo) == 1 or native is not None)
    if len(todo) > 1:
        print(time_of_steps(device))
    save_plot(histories, args.plot)
    print(f"Curves of loss and loss scale: {args.plot}")


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 2 for a mistake in the command or its files, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    try:
        run_all(args)
    except UserError as error:
        print(f"digits.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resume = f"; continue with --resume {args.save}" if args.save and args.save.is_file() else ""
        print(f"\ndigits.py: interrupted{resume}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
