# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models with simple gradients, trained under amp in few lines; "right or refused"; the mark of a known fault."""

import functools
import io

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.backends import Backend

CASTING = ("O1", "O4")
WITH_MASTERS = ("O2", "O5")
LEVELS = ("O0", *CASTING, *WITH_MASTERS)

# Ways to step: torch's optimizer, the same with gradients in flat buffers, and fused optimizers.
KINDS = {
    "torch": (torch.optim.SGD, {}),
    "combine_grad": (torch.optim.SGD, {"combine_grad": True}),
    "fused": (optimizers.NpuFusedSGD, {}),
    "fuse_unscale": (optimizers.NpuFusedSGD, {"fuse_unscale": True}),
}
levels = functools.partial(pytest.mark.parametrize, "level")
kinds = functools.partial(pytest.mark.parametrize, "kind")


def known_fault(reason, raises=AssertionError):
    """A test that states what is right and fails today, in just this way."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)


class Weights(nn.Module):
    """Vectors of three elements; the gradient of each that takes part is the input."""

    def __init__(self, *values):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.full((3,), float(v), device=DEVICE)) for v in values])

    def forward(self, x, only=None):
        return sum((w * x).float().sum() for i, w in enumerate(self.w) if only is None or i in only)


class OddShapes(nn.Module):
    """Passes its input on, with parameters that are 0-d, of one element, and empty."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.empty = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in ((0,), (3, 0))])

    def forward(self, x):
        return x * self.scale + self.shift + sum(p.sum() for p in self.empty)


class Saturating(Backend):
    """A device that clamps instead of giving inf: overflow is known by its sticky flag alone, which tests raise."""

    flag = False

    def saturates(self):
        return True

    def clear_overflow_flag(self, device):
        self.flag = False

    def overflow_flag(self, device):
        return self.flag


def saturating_device(monkeypatch):
    """Have amp take all devices for one that saturates."""
    backend = Saturating()
    monkeypatch.setattr("apex_npu.amp.optimizer_grads.for_device", lambda device: backend)
    return backend


def vector(*values):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


X = (1.0, 2.0, -4.0)  # a usual input, exact in every dtype


def start(model, params=None, kind="fused", level="O2", lr=1.0, loss_scale=64.0, momentum=0.0, **options):
    cls, kind_options = KINDS[kind]
    optimizer = cls(list(model.parameters()) if params is None else params, lr=lr, momentum=momentum)
    return initialize(model, optimizer, level, loss_scale=loss_scale, **kind_options, **options)


def initialize(model, optimizer, level="O2", loss_scale=64.0, **options):
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0, **options)


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def step_on(loss, optimizer, **options):
    """An iteration: a block, a step, and gradients cleared."""
    backward(loss, optimizer, **options)
    optimizer.step()
    optimizer.zero_grad()


def train_step(model, optimizer, x=X, **options):
    step_on(model(vector(*x), **options), optimizer)


def values(tensors):
    """As float32, on the host."""
    return [t.detach().float().cpu().clone() for t in tensors]


def saved_and_loaded(thing):
    """``thing``, by torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_values(tensors, *expected, **tolerance):
    """Each tensor is the number, or the sequence of numbers, expected."""
    for found, want in zip(values(tensors), expected, strict=True):
        want = torch.as_tensor(want, dtype=torch.float32).expand_as(found)
        torch.testing.assert_close(found, want, **{"rtol": 0.0, "atol": 0.0, **tolerance})


def near(found, expected, within):
    """Whether the norm of the difference is ``within`` that of ``expected``, times this."""
    found, expected = (value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in (found, expected))
    return (found - expected).norm() <= within * expected.norm()


def right_or_refused(act, check, tensors=(), naming=""):
    """``act()`` does what ``check`` of its result asserts, or is refused before any of ``tensors`` has changed.

    The refusal names ``naming``.
    """
    tensors = list(tensors)
    before = [t.detach().clone() for t in tensors]
    try:
        result = act()
    except (RuntimeError, ValueError, TypeError) as error:
        refusal = str(error)
    else:
        return check(result)
    assert len(refusal.split()) > 5, f"says neither what nor how: {refusal}"
    assert naming in refusal, refusal
    # What initialize has cast by then keeps its values: those of these tests are exact in every dtype.
    assert all(torch.equal(t.detach().float(), b.float()) for t, b in zip(tensors, before, strict=True))
