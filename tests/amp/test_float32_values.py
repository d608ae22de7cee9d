# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of all kinds step float32 values of 16-bit parameters; what scripts do to either counts."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts, needs_extension
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.amp import float32_masters

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}
KINDS = {
    "torch": (torch.optim.SGD, {}),
    "fused": (optimizers.NpuFusedSGD, {}),
    "float32": (optimizers.NpuFusedSGD, {"store_param_remainders": False}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
levels = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    """Parameters of many sizes, an empty one and one without dimensions among them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((4, 3), (), (0,), (1,), (70, 33))
        self.w = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])
        self.to(DEVICE)

    def forward(self, x):
        return sum((p * x.to(p.dtype)).float().sum() for p in self.w)


def start(level, kind, lr=0.1, **options):
    model = Net()
    cls, own = KINDS[kind]
    optimizer = cls(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0, **own, **options
    )
    return model, optimizer


def block(model, optimizer, x=1.0):
    backward(model(torch.full((1,), x, device=DEVICE)), optimizer)


def values(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@kinds
@levels
def test_parameters_keep_their_identity_hooks_and_aliases(level, kind):
    model, optimizer = start(level, kind)
    params, called = list(model.parameters()), []
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert listed == list(map(id, params))
    alias, version = params[0].detach(), params[0]._version
    params[0].register_hook(lambda grad: called.append(grad.dtype))
    block(model, optimizer)
    optimizer.step()
    assert called == [LEVELS[level]]
    assert params[0]._version > version
    if kind == "torch":
        assert alias.data_ptr() == params[0].data_ptr()
    assert torch.equal(alias, params[0])


@pytest.mark.parametrize("other", [torch.optim.SGD, optimizers.NpuFusedSGD])
@kinds
@levels
def test_two_optimizers_over_one_parameter(level, kind, other):
    model = Net()
    cls, own = KINDS[kind]
    both = [cls(model.parameters(), lr=2.0**-15), other(list(model.parameters())[:3], lr=2.0**-15)]
    model, both = amp.initialize(model, both, opt_level=level, verbosity=0, loss_scale=1.0, **own)
    expected = values(model)
    for optimizer in both * 8:
        optimizer.zero_grad()
        block(model, optimizer)
        optimizer.step()
        for value in expected if optimizer is both[0] else expected[:3]:
            value.sub_(2.0**-15)
    torch.testing.assert_close([*values(model)], expected, rtol=0, atol=2e-6)


@needs_extension
@pytest.mark.parametrize("first", [{}, {"state_device": "cpu"}], ids=str)
@pytest.mark.parametrize("kept", [True, "int8", None])
def test_remainders_of_a_parameter_in_two_optimizers_are_refused(kept, first):
    """Those that an argument asks for, and those of an optimizer on the host."""
    model = Net()
    options = [first, {"state_device": "cpu"} if kept is None else {}]
    both = [optimizers.NpuFusedSGD(model.parameters(), lr=0.1, **own) for own in options]
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) belongs to two optimizers.*store_param_remainders"):
        amp.initialize(model, both, opt_level="O2", verbosity=0, store_param_remainders=kept)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("other", [torch.optim.SGD, optimizers.NpuFusedSGD])
@kinds
def test_a_parameter_that_would_be_shared_later_is_refused(kind, other):
    model = Net()
    cls, own = KINDS[kind]
    both = [cls(model.w[1:], lr=0.1), other(model.w[:1], lr=0.1)]
    model, both = amp.initialize(model, both, opt_level="O2", verbosity=0, **own)
    for first, second in (both, both[::-1]):
        groups = [list(group["params"]) for group in first.param_groups]
        with pytest.raises(RuntimeError, match="a float32 value of its own"):
            first.add_param_group({"params": second.param_groups[0]["params"][:1]})
        assert [list(map(id, group["params"])) for group in first.param_groups] == [list(map(id, g)) for g in groups]
    moved = both[1].param_groups[0]["params"].pop()
    both[0].add_param_group({"params": [moved]})


def remove_one_entry(optimizer):
    optimizer.state.pop(optimizer.param_groups[0]["params"][-1], None)


REMOVALS = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "another dict": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "one entry": remove_one_entry,
}


@pytest.mark.parametrize("removal", REMOVALS)
@kinds
@levels
def test_a_state_that_is_removed_leaves_the_float32_values(level, kind, removal):
    model, optimizer = start(level, kind, lr=1e-4)

    def step(lr):
        for group in optimizer.param_groups:
            group["lr"] = lr
        block(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(1e-4)
        expected = values(model)
        REMOVALS[removal](optimizer)
        assert_same(values(model), expected)
        step(0.0)
        assert_same(values(model), expected)


@pytest.mark.parametrize("kind", ["torch", "fused"])
@levels
def test_a_state_that_is_cleared_after_pruning_begins_anew(level, kind):
    model, optimizer = start(level, kind, lr=1e-4)
    for rows in (70, 30):
        model.w[-1].data = model.w[-1].data[:rows].clone()
        optimizer.state.clear()
        written = model.w[-1].detach().float()
        block(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        # Elements may keep the bits that the written numbers lack.
        torch.testing.assert_close(values(model)[-1], written - 1e-4, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("end", ["load", "clear", "delete"])
@kinds
@levels
def test_values_after_a_return_to_the_start(level, kind, end):
    """Also if a block has moved parameters to other buffers in between."""
    model, optimizer = start(level, kind, lr=1e-2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        block(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    model.w[0].data = model.w[0].data.clone()
    block(model, optimizer)
    model.load_state_dict(saved[0])
    if end == "load":
        optimizer.load_state_dict(saved[1])
    elif end == "clear":
        optimizer.state.clear()
    else:
        del optimizer
        gc.collect()
    assert_same(values(model), [*saved[0].values()])


# Other optimizers do not say whether a step that failed has updated something.
@needs_counts("stand_in_counts")
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("kind", ["fused", "float32"])
@levels
def test_a_step_repeats_after_a_failed_launch_or_says_that_it_cannot(level, kind, fuse_unscale):
    """A script that goes on after the error must not train from parameters and float32 values that differ."""

    def trained(failing=None):
        model, optimizer = start(level, kind, lr=1e-4, fuse_unscale=fuse_unscale)
        said = None
        for step in range(3):
            optimizer.zero_grad()
            block(model, optimizer, 1.0 + step)
            if step == 1 and failing is not None:
                SIMULATOR.fail_after(failing)
                try:
                    optimizer.step()
                except RuntimeError as error:
                    said = str(error)
                finally:
                    SIMULATOR.fail_after(None)
                if said is None:
                    break
            optimizer.step()
        shown = [p.detach().float() for p in model.parameters()]
        return [*values(model), *shown], said

    expected, _ = trained()
    for launch in range(100):
        found, said = trained(launch)
        if said is None:
            return
        if "cannot be repeated" not in said:
            assert_same(found, expected)
    raise AssertionError("more than 100 launches a step")


def test_an_error_of_an_earlier_launch_in_the_rounding_says_that_the_step_cannot_be_repeated(monkeypatch):
    """torch_npu's queue raises it at any later call."""
    model, optimizer = start("O2", "torch")
    block(model, optimizer)

    def fail(*_):
        raise RuntimeError("The process exits for this inner error")

    monkeypatch.setattr(float32_masters, "_copy", fail)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) has failed .* cannot be repeated.* start a new process"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
