# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamW with each format of its state, beside 8-bit AdamWs of other packages: loss after training, bytes, time.

    PYTHONPATH=benchmarks python benchmarks/studies/state_training.py [--seeds 10]
        [--numel 4000000] [--rounds 7] [--tasks digits characters] [--of state masters]

Losses are the mean of the last 100 steps, of a perceptron on scikit-learn's handwritten digits (600 steps), and of the
language model of the examples, small, on the pages of docs/ (300 steps, beta2 0.99). Differences to float32 state are
paired by seed. ``masters`` compares the formats of float32 values at O5 in the same way. The other packages are bitsandbytes and torchao, whose step torch.compile compiles; those that are not
installed are left out, which is said. Times are the CPU time of one thread, in turns.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds import clock
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from apex_npu import amp
from apex_npu.fusion import EncodedView
from apex_npu.optimizers import NpuFusedAdamW

Optimizers = dict[str, Callable[..., torch.optim.Optimizer]]


class Task(NamedTuple):
    """What is trained: a model, the loss of its next batch, the options of AdamW and the number of steps."""

    model: nn.Module
    loss_of_batch: Callable[[], Tensor]
    options: dict[str, Any]
    steps: int


CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
FLOAT32 = "float32"


def own_optimizers() -> Optimizers:
    """By the name of the format."""
    formats = {FLOAT32: torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}
    return {
        name: lambda params, kept=kept, **options: NpuFusedAdamW(params, state_dtype=kept, **options)
        for name, kept in formats.items()
    }


def other_optimizers() -> Optimizers:
    """The 8-bit AdamWs that are installed, by package and version."""
    found: Optimizers = {}
    for package, module in (("bitsandbytes", "bitsandbytes.optim"), ("torchao", "torchao.optim")):
        try:
            version = importlib.import_module(package).__version__
            found[f"{package} {version}, 8 bits"] = importlib.import_module(module).AdamW8bit
        except ImportError as error:
            print(f"{package} is left out: {error}")
    return found


def own_masters() -> Optimizers:
    """AdamW at O5 by the format of the float32 values, from the model instead of its parameters."""
    formats: dict[str, tuple[Any, Any]] = {
        FLOAT32: (False, None),
        "16-bit remainders": (True, None),
        "8-bit remainders": ("int8", None),
        "8-bit remainders, int8 state": ("int8", "int8"),
    }

    def at_o5(remainders: Any, state: Any) -> Callable[..., torch.optim.Optimizer]:
        def make(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
            optimizer = NpuFusedAdamW(model.parameters(), state_dtype=state, **options)
            options = {"store_param_remainders": remainders, "fuse_unscale": True, "verbosity": 0}
            adopted: torch.optim.Optimizer = amp.initialize(model, optimizer, opt_level="O5", **options)[1]
            return adopted

        return make

    return {name: at_o5(*chosen) for name, chosen in formats.items()}


def digits(seed: int) -> Task:
    """A perceptron."""
    torch.manual_seed(seed)
    images, labels = (torch.as_tensor(t) for t in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss_of_batch() -> Tensor:
        batch = torch.randint(len(images), (64,))
        return F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)

    return Task(model, loss_of_batch, {"lr": 1e-3, "weight_decay": 0.1}, 600)


def characters(seed: int) -> Task:
    """The language model of examples/language_model."""
    sys.path.insert(0, str(REPOSITORY / "examples" / "language_model"))
    module: Any = importlib.import_module("model")
    pages = [path for path in sorted((REPOSITORY / "docs").glob("*.md")) if ".zh" not in path.name]
    text = "".join(path.read_text(encoding="utf-8") for path in pages)[: 1 << 18]
    number = {character: place for place, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    torch.manual_seed(seed)
    context = 32
    model = module.LanguageModel(len(number), layers=2, heads=2, width=64, context=context, dropout=0.0)

    def loss_of_batch() -> Tensor:
        starts = torch.randint(len(tokens) - context, (16, 1))
        rows = tokens[starts + torch.arange(context + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Task(model, loss_of_batch, {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}, 300)


def train(task: Task, make: Callable[..., torch.optim.Optimizer], *, under_amp: bool) -> float:
    """The mean loss of the last 100 steps."""
    losses = []
    optimizer = make(task.model if under_amp else task.model.parameters(), **task.options)
    for _ in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss_of_batch()
        with amp.scale_loss(loss, optimizer) if under_amp else nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if under_amp:
        amp.shutdown()
    return statistics.mean(losses[-100:])


TASKS = {"digits": digits, "characters": characters}


def compare_losses(task: str, made: Optimizers, seeds: int, *, under_amp: bool = False) -> None:
    """Print a row for each."""
    losses: dict[str, list[float]] = {name: [] for name in made}
    for seed in range(seeds):
        for name, make in made.items():
            losses[name].append(train(TASKS[task](seed), make, under_amp=under_amp))
    exact = losses.pop(FLOAT32)
    mean, spread = statistics.mean(exact), statistics.stdev(exact)
    of = "values" if under_amp else "state"
    print(f"\n{task}: loss with float32 {of} {mean:.4f}, ± {spread:.4f} between {seeds} seeds")
    print(f"| {of} | mean difference | of the loss | largest |\n|---|---|---|---|")
    for name, found in losses.items():
        apart = [loss - other for loss, other in zip(found, exact, strict=True)]
        difference = statistics.mean(apart)
        print(f"| {name} | {difference:+.4f} | {difference / mean:+.2%} | {max(map(abs, apart)):.4f} |", flush=True)


def compare_steps(made: Optimizers, numel: int, rounds: int) -> None:
    """Print a row for each."""
    held = []
    for name, make in made.items():
        param = nn.Parameter(torch.randn(numel // 1024, 1024).mul_(0.02))
        param.grad = torch.randn_like(param).mul_(1e-3)
        optimizer = make([param], lr=1e-3, weight_decay=0.01)
        optimizer.step()  # compiles
        held.append((name, optimizer, param))
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds + 1):
        for name, optimizer, _ in held:
            begin = clock(CPU)
            optimizer.step()
            times[name].append(clock(CPU) - begin)
    base = times[FLOAT32][1:]
    print(f"\nA step over {numel / 1e6:.0f} million float32 elements, one thread")
    print("| state | bytes of state | ms | times as fast |\n|---|---|---|---|")
    for name, optimizer, param in held:
        ratio = statistics.median(b / t for b, t in zip(base, times[name][1:], strict=True))
        kept = sum(_bytes_of(optimizer.state[param].values())) / param.numel()
        print(f"| {name} | {kept:.2f} | {min(times[name][1:]) * 1e3:.1f} | {ratio:.2f} |", flush=True)


def _bytes_of(values: Iterable[Any]) -> Iterable[int]:
    """Of what grows with the parameter; a subclass has its memory in the tensors inside."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield sum(getattr(value, name).nbytes for name in value.__tensor_flatten__()[0])
        elif isinstance(value, EncodedView) or (isinstance(value, Tensor) and value.dim()):
            yield value.nbytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--numel", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--of", nargs="*", choices=["state", "masters"], default=["state", "masters"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = arguments.tasks if arguments.seeds > 1 else []
    if "state" in arguments.of:
        optimizers = {**own_optimizers(), **other_optimizers()}
        if arguments.rounds:
            compare_steps(optimizers, arguments.numel, arguments.rounds)
        for chosen in tasks:
            compare_losses(chosen, optimizers, arguments.seeds)
    if "masters" in arguments.of:
        for chosen in tasks:
            compare_losses(chosen, own_masters(), arguments.seeds, under_amp=True)
