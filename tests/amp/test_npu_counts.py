# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step costs on an NPU: kernels started and waits for the device, counted on the simulated one, so exact.

Per flat buffer, with ATen's operators alone.
"""

from collections.abc import Callable

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from torch import nn

from apex_npu import amp, optimizers

pytestmark = needs_counts("stand_in_counts")

# rule, class, options; the most launches of an update, whatever the number of tensors.
UPDATES = [
    ("SGD", optimizers.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9}, 3),
    ("Adam", optimizers.NpuFusedAdam, {}, 7),
    ("AdamW", optimizers.NpuFusedAdamW, {}, 8),
    ("RMSprop", optimizers.NpuFusedRMSprop, {}, 5),
    ("RMSpropTF", optimizers.NpuFusedRMSpropTF, {}, 5),
    ("Adadelta", optimizers.NpuFusedAdadelta, {}, 11),
    ("BertAdam", optimizers.NpuFusedBertAdam, {"lr": 1e-3}, 7),
    ("LAMB", optimizers.NpuFusedLamb, {}, 19),
    ("AdamP", optimizers.NpuFusedAdamP, {}, 47),
]

# part of a step of Adam, opt_level, fuse_unscale; the most launches.
PARTS = [
    ("unscale and check", "O0", False, 1),
    ("unscale and check", "O2", False, 3),  # new gradients are joined, and added to float32 ones
    ("unscale and check", "O0", True, 0),  # the norm looks for overflow, too
    ("unscale and check", "O2", True, 2),
    ("clip", "O0", False, 7),
    ("clip", "O0", True, 1),
    ("update", "O0", False, 7),
    ("update", "O0", True, 8),
    ("update", "O2", False, 8),  # one more, to write back to the model
    ("update", "O2", True, 9),
    ("zero", "O0", False, 1),
    ("zero", "O2", False, 1),
]


@pytest.fixture(autouse=True)
def _as_it_was():
    SIMULATOR.configure()
    yield
    SIMULATOR.configure()


def counted(call: Callable[[], object]):
    with SIMULATOR.count() as n:
        call()
    return n


def params(tensors: int) -> list[nn.Parameter]:
    shapes = [(3, 5), (7,), (4, 4)]
    made = [nn.Parameter(torch.ones(shapes[i % 3], device=DEVICE)) for i in range(tensors)]
    for p in made:
        p.grad = torch.full_like(p, 0.5)
    return made


@pytest.mark.parametrize(("cls", "options", "now"), [row[1:] for row in UPDATES], ids=[row[0] for row in UPDATES])
def test_update(cls, options, now):
    launches = []
    for tensors in (3, 60):
        optimizer = cls(params(tensors), **options)
        optimizer.step()
        optimizer.step()
        n = counted(optimizer.step)
        assert n.syncs == 0
        launches.append(n.launches)
    assert launches[0] == launches[1] <= now


def parts_of_a_step(
    tensors: int, level: str, fuse_unscale: bool, *, set_to_none: bool = True, max_norm: float | None = 0.1
):
    """Counts of each part of an iteration after backward, in a warmed-up loop."""
    model = nn.Module()
    model.params = nn.ParameterList(params(tensors))
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 4.0, "verbosity": 0, "fuse_unscale": fuse_unscale}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    loss = torch.ones((), device=DEVICE, requires_grad=True)
    found = {}
    for _ in range(3):
        block = amp.scale_loss(loss, optimizer)
        found["enter"] = counted(block.__enter__)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.full_like(p, 2.0)
            else:
                p.grad += 2.0
        found["unscale and check"] = counted(lambda: block.__exit__(None, None, None))  # noqa: B023
        if max_norm is not None:
            found["clip"] = counted(lambda: optimizer.clip_optimizer_grad_norm_fused(max_norm))
        found["update"] = counted(optimizer.step)
        found["zero"] = counted(lambda: optimizer.zero_grad(set_to_none))
    amp.shutdown()
    return found


@pytest.mark.parametrize(("part", "level", "fuse_unscale", "now"), PARTS)
def test_part_of_a_step(part, level, fuse_unscale, now):
    # One launch more where gradients are gathered, which those of O2 are in each block, or packed.
    gathered = part == "unscale and check" and level == "O2"
    SIMULATOR.configure(fused_foreach=True)
    launches = [
        parts_of_a_step(tensors, level, fuse_unscale, set_to_none=False)[part].launches - gathered
        for tensors in (3, 60)
    ]
    assert launches[0] == launches[1] <= now


@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_wait_for_the_device(level, fuse_unscale, set_to_none):
    for max_norm, first_look in ((0.1, "clip"), (None, "update")):
        parts = parts_of_a_step(6, level, fuse_unscale, set_to_none=set_to_none, max_norm=max_norm)
        waits = {part: n.syncs for part, n in parts.items() if n.syncs}
        assert waits == {first_look if fuse_unscale else "unscale and check": 1}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_clipping_sends_what_the_step_divides_by_with_the_norm(level):
    parts = parts_of_a_step(6, level, True)
    assert (parts["clip"].h2d, parts["update"].h2d) == (1, 0)


def test_one_wait_for_gradients_that_are_written_between_the_block_and_the_step():
    """With ``fuse_unscale`` the step looks whether they are other than zeros, and for overflow."""
    model = nn.ParameterList(params(6))
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", fuse_unscale=True, verbosity=0)
    for written in (1, 6):
        with amp.scale_loss(sum(p.sum() for p in model), optimizer) as scaled_loss:
            scaled_loss.backward()
        for p in model[:written]:
            p.grad.zero_()
        assert counted(optimizer.step).syncs == 2
        optimizer.zero_grad()


@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gathering_takes_one_launch(level, fuse_unscale):
    def launches(tensors):
        return parts_of_a_step(tensors, level, fuse_unscale)["unscale and check"].launches

    # With fuse_unscale 16-bit gradients stay where they are until clipping or the step packs them.
    expected = {"O0": 1, "O2": 0}[level] if fuse_unscale else 2
    assert launches(60) == launches(3) == expected
