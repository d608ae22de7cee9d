# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Warnings point at the user's line, once per cause, and do not advise against working code."""

import contextlib
import logging
import warnings

import pytest
import torch
from devices import DEVICE
from small_programs import LEVELS, Weights, initialize, levels, start, train_step, vector
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host


@contextlib.contextmanager
def said():
    """The warnings of a block, by what they contain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda text: [w for w in caught if text in str(w.message)]


def assert_points_here(found):
    assert [w.filename for w in found] == [__file__]


@levels(LEVELS)
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_a_step_without_gradients_is_shown_once_where_it_is_called(kind, level):
    _, optimizer = start(Weights(10.0), kind=kind, level=level)
    with said() as about:
        for _ in range(3):
            optimizer.step()
    assert_points_here(about("none of its parameters has a gradient"))


@levels(("O2", "O5"))
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_a_backward_outside_of_a_block_is_shown_where_the_step_is_called(kind, level):
    model, optimizer = start(Weights(10.0), kind=kind, level=level, loss_scale="dynamic")
    model(vector(1.0, 1.0, 1.0)).backward()
    with said() as about:
        optimizer.step()
    assert_points_here(about("no amp.scale_loss has scaled and checked"))


@levels(("O2", "O5"))
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_gradients_whose_check_an_exception_has_prevented_are_named(kind, level):
    """A block leaves the check to the next one, which ends before it."""
    model, optimizer = start(Weights(10.0), kind=kind, level=level, loss_scale="dynamic")
    with amp.scale_loss(model(vector(1.0, 1.0, 1.0)), optimizer, delay_overflow_check=True) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(KeyError), amp.scale_loss(model(vector(1.0, 1.0, 1.0)), optimizer):
        raise KeyError
    with said() as about:
        optimizer.step()
    assert_points_here(about("no amp.scale_loss has scaled and checked"))


@levels(LEVELS)
def test_a_loss_without_gradient_is_shown_where_the_block_is_opened(level):
    _, optimizer = start(Weights(10.0), level=level)
    with said() as about, amp.scale_loss(torch.ones((), device=DEVICE), optimizer):
        pass
    assert_points_here(about("does not require grad"))


def test_a_scale_below_one_is_shown_where_the_block_is_and_no_floor_is_advised():
    """It overflows at 1 and trains at 0.5."""
    model, optimizer = start(Weights(10.0), loss_scale="dynamic", dynamic_init_scale=1.0, level="O2")
    with said() as about, amp.scale_loss(model(vector(60000.0, 0.0, 0.0)) * 2.0, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert_points_here(about("loss scale has fallen"))
    assert not about("min_loss_scale=1.0")


@levels(("O1", "O2"))
def test_a_step_without_gradients_is_said_of_each_optimizer(level):
    model = Weights(10.0, 10.0)
    both = [optimizers.NpuFusedSGD([w], lr=1.0) for w in model.w]
    model, both = initialize(model, both, level)
    with said() as about:
        for optimizer in both:
            optimizer.step()
    assert len(about("none of its parameters has a gradient")) == 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="elsewhere a look costs a wait: diagnostics tell")
@levels(("O1", "O2"))
def test_an_overflow_under_a_static_scale_is_said_once(level):
    model, optimizer = start(Weights(10.0), level=level)
    with said() as about:
        for _ in range(3):
            train_step(model, optimizer, (torch.inf, 1.0, 1.0))
    found = [w for word in ("overflow", "inf") for w in about(word)]
    assert len({str(w.message) for w in found}) == 1


@levels(("O1", "O2"))
def test_small_buffers_are_not_announced(level, caplog):
    model, optimizer = start(Weights(10.0), level=level)
    with caplog.at_level(logging.INFO):
        train_step(model, optimizer)
    assert not [record for record in caplog.records if " 0.0 MiB" in record.getMessage()]


EDITS = {
    "append": lambda found: found.append(torch.ones(3)),
    "assign": lambda found: found.__setitem__(0, torch.ones(3)),
    "extend": lambda found: found.extend([torch.ones(3)]),
    "delete": lambda found: found.__delitem__(0),
    "clear": lambda found: found.clear(),
}


@levels(("O1", "O2"))
@pytest.mark.parametrize("edit", EDITS)
def test_lists_that_cannot_be_edited_say_so(edit, level):
    _, optimizer = start(Weights(10.0), level=level)
    name = "all_fp32_params" if level == "O1" else "all_fp16_params"
    before = len(getattr(optimizer._amp_stash, name))
    with pytest.raises((RuntimeError, TypeError, AttributeError), match="param_groups"):
        EDITS[edit](getattr(optimizer._amp_stash, name))
    assert len(getattr(optimizer._amp_stash, name)) == before


@pytest.mark.parametrize("make", [optimizers.NpuFusedSGD, torch.optim.SGD, optimizers.NpuFusedAdam])
def test_the_step_by_which_torch_makes_state_is_not_warned_of(make):
    """torch.distributed.checkpoint.state_dict has an optimizer without state step zeros, at a rate of 0."""
    model = torch.nn.Linear(2, 1).to(DEVICE)
    model, optimizer = initialize(model, make(model.parameters(), lr=0.1), "O2", loss_scale="dynamic")
    with said() as about:
        get_optimizer_state_dict(model, amp.checkpoint_view(optimizer))
    assert not about("no amp.scale_loss")
    assert optimizer.param_groups[0]["lr"] == 0.1


class OwnLoss(torch.nn.Module):
    """Computes its loss itself, of logits in the dtype of the model or in float32."""

    def __init__(self, dtype=None):
        super().__init__()
        self.layer, self.dtype = torch.nn.Linear(4, 8), dtype

    def forward(self, x, target=None):
        logits = self.layer(x).to(self.dtype)
        return logits if target is None else (logits, cross_entropy(logits, target))


INPUT, TARGET = torch.ones(3, 4, device=DEVICE), torch.tensor([1, 2, 3], device=DEVICE)
# Ways to a loss: the dtype of the model's logits, and the loss.
ROUNDED = {
    "inside": (None, lambda model: model(INPUT, TARGET)[1]),
    "of micro-batches": (None, lambda model: model(INPUT, TARGET)[1] / 4 * 2.0),
    "outside, in 16 bits": (None, lambda model: cross_entropy(model(INPUT).to(model.layer.weight.dtype), TARGET)),
}
FLOAT32 = {
    "inside, of float32 logits": (torch.float32, lambda model: model(INPUT, TARGET)[1]),
    "outside": (None, lambda model: cross_entropy(model(INPUT), TARGET) / 4),
    "mean": (None, lambda model: -model(INPUT).mean()),
    "with a penalty": (
        None,
        lambda model: model(INPUT).square().mean() + 0.1 * sum(p.norm() for p in model.parameters()),
    ),
}


@levels(LEVELS)
@pytest.mark.parametrize("way", [*ROUNDED, *FLOAT32])
def test_a_loss_that_has_been_rounded_is_named_once(way, level):
    dtype, loss = (ROUNDED | FLOAT32)[way]
    model = OwnLoss(dtype).to(DEVICE)
    model, optimizer = initialize(model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), level)
    with said() as about:
        for _ in range(3):
            with amp.scale_loss(loss(model), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    found = about("the loss has been rounded to")
    if level in ("O2", "O5") and way in ROUNDED:
        assert_points_here(found)
        assert ("bfloat16, 8 bits" if level == "O5" else "float16, 11 bits") in str(found[0].message)
    else:
        assert not found


CONVERSIONS = {
    "half": torch.nn.Module.half,
    "bfloat16": torch.nn.Module.bfloat16,
    "to": lambda model: model.to(torch.bfloat16),
    "of a layer": lambda model: model.layer.half() and model,
}


@levels(("O1", "O4"))
@pytest.mark.parametrize("make", [optimizers.NpuFusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_model_that_is_converted_after_initialize_is_named_once(conversion, make, level):
    model = OwnLoss(torch.float32).to(DEVICE)
    model, optimizer = initialize(model, make(model.parameters(), lr=0.1), level)
    CONVERSIONS[conversion](model)
    with said() as about:
        for _ in range(3):
            logits = model(INPUT.to(model.layer.weight.dtype))
            with amp.scale_loss(logits.float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert_points_here(about(f"which have no float32 masters at opt_level {level}"))
