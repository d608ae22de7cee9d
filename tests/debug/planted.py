# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small models with one fault each, and what is to be said of it. A comment ``fault: name`` marks the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from devices import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_npu import amp


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: Also of the marked line.
        model: Makes the model.
        loss: Takes the model, gives the loss; of several losses a list.
        kind, operator, phase, module: What is expected; with levels as keys where they differ.
        tensor: Likewise, of what was not finite already.
        scale: The first loss scale, instead of the usual one.
        levels: At which there is this fault.
        backwards: How often each loss is computed, and its backward called, in its block.
        plant: What is done to the model once it is initialized.
        marks: The mark of the line at a level, where it is not ``name``.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Any]
    kind: str
    operator: Any
    phase: str = "forward"
    module: Any = ""
    tensor: str | None = None
    scale: float | None = None
    levels: tuple[str, ...] = ("O1", "O2", "O3")
    backwards: int = 1
    plant: Callable[[nn.Module], None] = lambda model: None
    marks: dict[str, str] = field(default_factory=dict)

    def at(self, level: str, marked: dict[str, int] | None = None) -> dict[str, Any]:
        """What is expected at ``level``; ``marked`` are the lines of another file."""
        expected = {"kind": self.kind, "phase": self.phase, "module": self.module, "operator": self.operator}
        found = {k: v[level] if isinstance(v, dict) else v for k, v in expected.items()}
        return {**found, "line": (marked or MARKED).get(self.marks.get(level, self.name))}

    def check(self, found: Any, level: str, marked: dict[str, int] | None = None) -> None:
        """``found`` has this fault and no other."""
        expected = self.at(level, marked)
        assert [{key: getattr(cause, key) for key in expected} for cause in found.causes] == [expected], str(found)
        assert found.causes[0].tensor == self.tensor or self.tensor is None


def marked_lines(file: str) -> dict[str, int]:
    """The numbers of the lines that end with a comment ``fault: name``, by the name."""
    lines = enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1)
    return {line.rpartition("# fault: ")[2]: i for i, line in lines if "# fault: " in line}


MARKED = marked_lines(__file__)


def batch(*shape: int, value: float | None = None) -> torch.Tensor:
    made = torch.randn(shape) if value is None else torch.full(shape, value)
    return made.to(DEVICE)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        nn.init.constant_(self.first.weight, 50.0)

    def forward(self, x):
        h = self.first(x)
        return self.last(h * h)  # fault: squared


def mean_of_ones(model):
    return model(batch(4, 8, value=1.0)).float().square().mean()


class Body(nn.Module):
    """A linear layer, and what ``run`` makes of its result, which is ``value`` where inputs are 1."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], value: float | None = None) -> None:
        super().__init__()
        self.fc, self.run = nn.Linear(8, 8), run
        if value is not None:
            nn.init.constant_(self.fc.weight, value / 8)
            nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.run(self.fc(x))


def body(run, value=None):
    return lambda: Body(run, value)


def mean_over(*shape):
    return lambda model: model(batch(*shape)).float().mean()


def root(h):
    return (h * h).sum(-1).sqrt()  # fault: root


def log_of_softmax(model):
    p = model(batch(4, 8, value=1.0)).float().softmax(-1)
    return -p.log()[:, 0].mean()  # fault: log


def far_logits() -> nn.Module:
    model = nn.Linear(8, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-100.0], [100.0]]).expand(2, 8))
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.gain = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.gain.weight, 3000.0)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask, -math.inf).softmax(-1)
        h = self.out((scores.to(v.dtype) @ v) * 0 + 1)
        return self.gain(h * 0 + 4)  # fault: mask


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x):
        return self.conv(x)  # fault: bias


def inf_in_bias(model):
    model.conv.bias[1] = math.inf


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)  # fault: plain


def load_batch(model):
    model.batch = batch(4, 8)
    model.batch[1, 2] = math.nan


def nan_in_batch(model):
    return model(model.batch).float().mean()  # fault: batch


def widened(h):
    return h.float()  # fault: scale


def mean_of_scaled(model):
    return model(batch(4, 8)).mean()


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * x


def steep(model):
    return (model(batch(1, value=200.0)) * 200).float().sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Squared()

    def forward(self, x):
        return checkpoint(self.run, self.first(x) * 0 + 1, use_reentrant=True)

    def run(self, x):
        h = self.inner.first(x)
        return self.inner.last(h * h)  # fault: checkpoint


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e7  # fault: function


def sum_of(model):
    return model(batch(4, 8)).float().sum()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Squared(), nn.Linear(2, 2)
        self.body.requires_grad_(False)

    def forward(self, x):
        h = self.body.first(x)
        h = h * h  # fault: frozen
        return self.head(self.body.last(h))


def two_losses(model):
    y = model(batch(4, 8, value=1.0)).float()
    return [y.square().mean() * 1e-6, (y * 0).log().mean()]  # fault: second


def product(model):
    y = model(batch(4, 8)).float()
    large = y * 0 + 1e30
    return (large * large).mean()  # fault: product


OF_BIAS = {"O1": "aten::_to_copy", "O2": "aten::convolution", "O3": "aten::convolution"}
AT_O1 = {"O1": "fc", "O2": "", "O3": ""}  # casts its input there
WITH_BIAS = {"tensor": "conv.bias", "plant": inf_in_bias}
WITH_BATCH = {"tensor": "argument 0 of Plain", "plant": load_batch, "module": AT_O1, "marks": {"O1": "plain"}}
FAULTS = [
    Fault("squared", Squared, mean_of_ones, "overflow", "aten::mul"),
    Fault("root", body(root, 0.0), mean_over(4, 8), "math", "aten::div", "backward"),
    Fault("log", far_logits, log_of_softmax, "math", "aten::log", module=None),
    Fault("mask", Attention, mean_over(2, 3, 8), "overflow", "aten::addmm", module="gain"),
    Fault("bias", Convolution, mean_over(2, 2, 5, 5), "weights", OF_BIAS, module="conv", **WITH_BIAS),
    Fault("batch", Plain, nan_in_batch, "data", "aten::_to_copy", **WITH_BATCH),
    Fault("scale", body(widened), mean_of_scaled, "scale", "aten::_to_copy", "backward", scale=2.0**24),
    Fault("sum", One, steep, "accumulation", "aten::add_", "backward", scale=1.0, levels=("O2", "O3"), backwards=2),
    Fault("checkpoint", Checkpointed, mean_of_ones, "overflow", "aten::mul"),
    Fault("function", body(Steep.apply), sum_of, "gradient", "aten::mul", "backward", scale=4.0),
    Fault("frozen", Frozen, mean_of_ones, "overflow", "aten::mul"),
    Fault("second", Plain, two_losses, "math", "aten::log", module=None),
    Fault("product", Plain, product, "overflow", "aten::mul", module=None),
]


def set_up(fault: Fault, level: str, optimizer: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any, int]:
    """The model and the optimizer under amp, and how many losses there are."""
    model = fault.model().to(DEVICE)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = 2 if fault.name == "second" else 1
    made = optimizer(trained, lr=0.0)
    options = {**({} if fault.scale is None else {"dynamic_init_scale": fault.scale}), **options}
    model, made = amp.initialize(
        model, made, opt_level=level, loss_scale="dynamic", verbosity=0, num_losses=losses, **options
    )
    with torch.no_grad():
        fault.plant(model)
    return model, made, losses


def iterate(fault: Fault, model: nn.Module, optimizer: Any) -> None:
    """One iteration."""
    optimizer.zero_grad()
    losses = fault.loss(model)
    for loss_id, loss in enumerate(losses if isinstance(losses, list) else [losses]):
        retain = isinstance(losses, list) and loss_id == 0
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward(retain_graph=retain)
            for _ in range(fault.backwards - 1):
                (fault.loss(model) * scaled_loss.detach() / loss.detach()).backward()
    optimizer.step()
