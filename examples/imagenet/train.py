# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The training that main.py's options ask for. Start reading at ``run``."""

import gc
import importlib.util
import inspect
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions would keep as a default argument
from data import make_loaders
from models import create_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from apex_npu import amp, optimizers
from apex_npu.parallel import convert_syncbn_model


def run(args: Namespace) -> None:
    """What main.py's options ask for, on this process's device."""
    device = set_up_device(args)
    if args.channels_last and device.type == "npu":
        raise SystemExit("--channels-last: torch_npu has contiguous formats alone; leave it out")
    if args.sync_bn and device.type == "cpu" and dist.is_initialized() and not args.combine_ddp:
        raise SystemExit("--sync-bn: DistributedDataParallel has it on cards alone; add --combine-grad --combine-ddp")
    if args.export:
        check_exporter()
    train(args, device)
    if dist.is_initialized():
        # gloo's threads are to end here, rather than with the interpreter, which they can abort (docs/distributed.md):
        # when nothing refers to the group. DistributedDataParallel does, and it is in reference cycles.
        gc.collect()
        dist.destroy_process_group()


def train(args: Namespace, device: torch.device) -> None:
    """Train, validate, save; or with --evaluate validate alone."""
    train_loader, val_loader, num_classes = make_loaders(args)
    torch.backends.cudnn.deterministic = args.deterministic
    torch.backends.cudnn.benchmark = not args.deterministic
    torch.manual_seed(args.seed)
    model = create_model(args.arch, num_classes, args.pretrained)
    if args.sync_bn:
        model = convert_syncbn_model(model)
    model = model.to(device, memory_format=torch.channels_last if args.channels_last else torch.preserve_format)
    model, optimizer = amp.initialize(
        model,
        make_optimizer(model, args),
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        combine_grad=args.combine_grad or None,
        combine_ddp=(args.combine_ddp and dist.is_initialized()) or None,
        fuse_unscale=args.fuse_unscale or None,
    )
    best = load_checkpoint(args, model, optimizer, num_classes) if args.resume else 0.0
    # Buffers are averaged before each validation, see average_buffers.
    averaged_by_ddp = dist.is_initialized() and not args.combine_ddp and not args.evaluate
    parallel = DistributedDataParallel(model, broadcast_buffers=False) if averaged_by_ddp else model

    if args.evaluate:
        validate(model, val_loader, device)
    else:
        for epoch in range(args.start_epoch, args.epochs):
            train_epoch(parallel, optimizer, train_loader, epoch, args, device)
            average_buffers(model)
            accuracy = validate(model, val_loader, device)
            is_best, best = accuracy > best, max(accuracy, best)
            if is_first_process():
                save_checkpoint(args, model, optimizer, epoch + 1, best, is_best)
    if args.export and is_first_process():
        export(model, args, device)


# --- set-up ----------------------------------------------------------------------------------------------------------


def set_up_device(args: Namespace) -> torch.device:
    """This process's device; under torchrun the processes find each other as well."""
    there = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    kind = (there or ["cpu"])[0] if args.device == "auto" else args.device
    if kind not in ("cpu", *there):
        raise SystemExit(f"--device {kind}: torch {torch.__version__} sees no such device; use cpu or auto")
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", args.gpu or 0)))
        torch.get_device_module(device).set_device(device)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group({"npu": "hccl", "cuda": "nccl"}.get(kind, "gloo"))
    return device


def is_first_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def make_optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    """The optimizer by its name, with --momentum where it has one; of NpuFusedMuon AdamW steps what is no matrix."""
    kind = getattr(optimizers, args.optimizer, None) or getattr(torch.optim, args.optimizer, None)
    if not takes_options(kind):
        names = ", ".join(name for name in optimizers.__all__ if takes_options(getattr(optimizers, name)))
        raise SystemExit(
            f"--optimizer {args.optimizer}: no optimizer with lr and weight_decay, of torch.optim or one of {names}"
        )
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if "momentum" in inspect.signature(kind).parameters:
        options["momentum"] = args.momentum
    if "use_muon" in inspect.signature(kind).parameters:
        options["use_muon"] = "auto"
    try:
        return kind(model.parameters(), **options)
    except ValueError as error:  # as Muon's, which is for matrices alone
        raise SystemExit(f"--optimizer {args.optimizer}: {error}") from error


def takes_options(kind: Any) -> bool:
    is_optimizer = isinstance(kind, type) and issubclass(kind, Optimizer)
    return is_optimizer and {"lr", "weight_decay"} <= inspect.signature(kind).parameters.keys()


# --- training --------------------------------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    epoch: int,
    args: Namespace,
    device: torch.device,
) -> None:
    """One pass over the images, whose order and augmentation follow from the seed and the number of the epoch."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(args.seed + 10_007 * (epoch + 1) + rank)
    loader.sampler.set_epoch(epoch)
    model.train()
    memory_format = torch.channels_last if args.channels_last else torch.preserve_format
    sums, images_seen = torch.zeros(4, device=device), 0
    bar, last_line = progress_bar(loader, f"epoch {epoch}"), (0, time.perf_counter())
    for step, (images, targets) in enumerate(bar):
        lr = learning_rate(epoch * len(loader) + step, len(loader), args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        images = images.to(device, non_blocking=True, memory_format=memory_format)
        targets = targets.to(device, non_blocking=True)

        outputs = model(images)
        loss = F.cross_entropy(outputs, targets, label_smoothing=args.label_smoothing)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        images_seen += len(targets)
        sums += measure(loss.detach(), outputs.detach(), targets)
        if (step + 1) % args.print_freq == 0 or step + 1 == len(loader):
            loss_mean, top1, top5 = means(sums)  # here the host waits for the device
            speed = world * (images_seen - last_line[0]) / (time.perf_counter() - last_line[1])
            last_line = images_seen, time.perf_counter()
            text = f"loss {loss_mean:.4f}  top-1 {top1:.2%}  top-5 {top5:.2%}  lr {lr:.4g}  {speed:.0f} images/s"
            if hasattr(bar, "set_postfix_str"):
                bar.set_postfix_str(text)
            elif rank == 0:
                print(f"epoch {epoch} [{step + 1}/{len(loader)}]  {text}", flush=True)


def learning_rate(step: int, steps_per_epoch: int, args: Namespace) -> float:
    """A function of the step alone, so that a resumed run needs no scheduler's state."""
    warmup, total = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    if step < warmup:
        return args.lr * min((step + 1) / warmup, 1.0)
    if args.schedule == "step":
        return args.lr * 0.1 ** (step // steps_per_epoch // 30)
    return args.lr * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """The top-1 accuracy over all images, of which each process sees a part."""
    model.eval()
    sums = torch.zeros(4, device=device)
    for images, targets in progress_bar(loader, "validation"):
        targets = targets.to(device, non_blocking=True)
        outputs = model(images.to(device, non_blocking=True)).float()
        sums += measure(F.cross_entropy(outputs, targets), outputs, targets)
    loss, top1, top5 = means(sums)
    if is_first_process():
        print(f"validation  loss {loss:.4f}  top-1 {top1:.2%}  top-5 {top5:.2%}", flush=True)
    return top1


def measure(loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over the batch: the loss, how many images are right at first, and among the first five, and all images."""
    right = outputs.topk(min(5, outputs.size(1))).indices == targets[:, None]
    images = torch.full((), len(targets), device=loss.device)
    return torch.stack([loss.float() * len(targets), right[:, 0].sum(), right.sum(), images])


def means(sums: Tensor) -> list[float]:
    """Loss, top-1 and top-5 from the sums that ``measure`` makes, over the images of all processes."""
    if dist.is_initialized():
        sums = sums.clone()
        dist.all_reduce(sums)
    return (sums[:3] / sums[3]).tolist()


def average_buffers(model: nn.Module) -> None:
    """Batch norms have seen other images on each process: validation, and the checkpoint, take the average."""
    if dist.is_initialized():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()


def progress_bar(loader: DataLoader[Any], label: str) -> Iterable[Any]:
    """With tqdm on a terminal, else the loader itself."""
    if sys.stderr.isatty() and is_first_process():
        try:
            from tqdm import tqdm
        except ImportError:
            return loader
        return tqdm(loader, desc=label, dynamic_ncols=True)
    return loader


# --- files -----------------------------------------------------------------------------------------------------------

# What a checkpoint's groups of parameters decide: a resumed run has the same.
KEPT = ("optimizer", "momentum", "weight_decay")


def save_checkpoint(
    args: Namespace, model: nn.Module, optimizer: Optimizer, epoch: int, best: float, is_best: bool
) -> None:
    """What --resume needs, in a file that is complete at any time; a copy of it if it is the best so far."""
    state = {
        "arch": args.arch,
        "options": {name: getattr(args, name) for name in KEPT},
        "epoch": epoch,
        "best_acc1": best,
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    path = args.output / "checkpoint.pth.tar"
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)
    if is_best:
        shutil.copyfile(path, args.output / "model_best.pth.tar")


def load_checkpoint(args: Namespace, model: nn.Module, optimizer: Optimizer, num_classes: int) -> float:
    """Load what save_checkpoint has written; the best accuracy until then."""
    try:
        state = torch.load(args.resume, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for other files has no common type
        raise SystemExit(f"--resume {args.resume}: not a whole checkpoint ({type(error).__name__})") from error
    names = {"arch", "options", "epoch", "best_acc1", "state_dict", "optimizer", "amp"}
    if not isinstance(state, dict) or not names <= state.keys():
        raise SystemExit(f"--resume {args.resume}: not a checkpoint of this example")
    if state["arch"] != args.arch:
        raise SystemExit(f"--resume {args.resume}: a checkpoint of --arch {state['arch']}, this is {args.arch}")
    for name, saved in {} if args.evaluate else state["options"].items():
        if getattr(args, name) != saved:
            option = f"--{name.replace('_', '-')} {saved}"
            raise SystemExit(
                f"--resume {args.resume}: it was saved with {option}, this run has {getattr(args, name)}; add {option}"
            )
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise SystemExit(
            f"--resume {args.resume}: its weights are not those of {args.arch} for {num_classes} classes: {first}"
        ) from error
    if not args.evaluate:
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
    args.start_epoch = state["epoch"]
    if is_first_process():
        what = "the weights" if args.evaluate else "continuing"
        print(f"{args.resume}: {what} after epoch {state['epoch']}, best top-1 {state['best_acc1']:.2%}")
    return float(state["best_acc1"])


def check_exporter() -> None:
    """Say before the training, not after it, that the network cannot be exported."""
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"--export: {' and '.join(missing)} are missing: pip install {' '.join(missing)}")


def export(model: nn.Module, args: Namespace, device: torch.device) -> None:
    """Write the network in float32, for any number of images."""
    from apex_npu.export import to_onnx

    images = torch.randn(2, 3, args.image_size, args.image_size, device=device)
    to_onnx(model, (images,), args.export, dynamic_shapes=({0: torch.export.Dim("images")},))
    print(f"{args.export}: written")
