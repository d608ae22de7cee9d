# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints between levels, to and from plain torch, and the state of the loss scale from and for others."""

import copy
import io

import pytest
import torch
from amp.classifier import Net, train
from devices import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from apex_npu import amp, optimizers

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
EXACT = [level for level in LEVELS if level != "O3"]  # O3 has no float32 weights to save


def make(level, cls):
    model = Net()
    optimizer = cls(model.parameters(), lr=1e-2)
    if level != "torch":
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def through_a_file(checkpoint):
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save(model, optimizer, level):
    state = {} if level == "torch" else {"amp": amp.state_dict()}
    return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **state})


def float32_values(model, optimizer):
    """What training continues from: the model's float32 values, and the optimizer's state."""
    shown, state = model.state_dict(), optimizer.state_dict()["state"]
    params = [shown[name].clone() for name, _ in model.named_parameters()]
    return params + [state[i][name].clone() for i in sorted(state) for name in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.pairwise
@pytest.mark.parametrize("before", [True, False], ids=["load before", "load after"])
@pytest.mark.parametrize("cls", [torch.optim.Adam, optimizers.NpuFusedAdam])
@pytest.mark.parametrize("target", [*EXACT, "torch"])
@pytest.mark.parametrize("source", [*EXACT, "torch"])
def test_a_checkpoint_moves_between_levels_without_losing_a_bit(source, target, cls, before):
    model, optimizer = make(source, cls)
    losses = train(model, optimizer, range(12), source != "torch")
    saved, expected = save(model, optimizer, source), float32_values(model, optimizer)
    assert all(v.dtype != torch.float16 for v in saved["model"].values())
    amp.shutdown()

    if before and target != "torch":
        model = Net()
        optimizer = cls(model.parameters(), lr=1e-2)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = amp.initialize(model, optimizer, opt_level=target, verbosity=0)
    else:
        model, optimizer = make(target, cls)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if "amp" in saved and target != "torch":
        amp.load_state_dict(saved["amp"])
    loaded = float32_values(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, loaded, strict=True))
    assert all(v.dtype == torch.float32 for v in loaded)

    # No spike: the same batches as the last ones cost no more than they did, up to what half precision rounds.
    again = train(model, optimizer, range(8, 12), target != "torch")
    assert sum(again) <= sum(losses[8:]) + 0.02


@pytest.mark.parametrize("cls", [torch.optim.Adam, optimizers.NpuFusedAdam])
@pytest.mark.parametrize("level", EXACT)
def test_resume_continues_bit_for_bit_in_either_order(level, cls):
    model, optimizer = make(level, cls)
    train(model, optimizer, range(5))
    saved = save(model, optimizer, level)
    expected = train(model, optimizer, range(5, 10)), float32_values(model, optimizer)
    for order in (("model", "optimizer", "amp"), ("amp", "optimizer", "model")):
        amp.shutdown()
        model, optimizer = make(level, cls)
        parts = {"model": model, "optimizer": optimizer, "amp": amp}
        for name in order:
            parts[name].load_state_dict(copy.deepcopy(saved[name]))  # torch.optim continues with the same tensors
        losses = train(model, optimizer, range(5, 10))
        assert losses == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(expected[1], float32_values(model, optimizer), strict=True))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (optimizers.NpuFusedAdamW, {"lr": 1e-2}),
        (optimizers.NpuFusedSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
        (optimizers.NpuFusedLamb, {"lr": 1e-2}),
        (optimizers.NpuFusedBertAdam, {"lr": 1e-2}),
        (optimizers.NpuFusedRMSpropTF, {"lr": 1e-2, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_torch_names_states_by_the_models_parameters(level, cls, options):
    first = Net()
    first, optimizer = amp.initialize(first, cls(first.parameters(), **options), opt_level=level, verbosity=0)
    train(first, optimizer, range(3))
    saved = get_optimizer_state_dict(first, optimizer)
    assert saved["state"].keys() == {name for name, _ in first.named_parameters()}
    second = Net()
    second, other = amp.initialize(second, cls(second.parameters(), **options), opt_level=level, verbosity=0)
    before = copy.deepcopy(second.state_dict())
    get_optimizer_state_dict(second, other)  # torch steps with lr = 0 to make the state
    assert other.param_groups[0]["lr"] == 1e-2
    assert all(p.grad is None for p in second.parameters())
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, other, saved)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in second.state_dict().items())
    expected, found = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert expected.keys() == found.keys()
    for index, entry in expected.items():
        assert entry.keys() == found[index].keys()
        for name, value in entry.items():
            assert found[index][name].dtype == value.dtype
            assert torch.equal(found[index][name], value)


@pytest.mark.parametrize("level", ["torch", "O1", "O2"])
def test_a_view_for_checkpoints_is_the_optimizer_itself(level):
    _, optimizer = make(level, optimizers.NpuFusedAdam)
    assert amp.checkpoint_view(optimizer) is optimizer


# ------------------------------------------------------------------------------------------------------ loss scale


def initialize(num_losses=1, **options):
    model = nn.Linear(2, 2).to(DEVICE)
    amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        opt_level="O2",
        num_losses=num_losses,
        verbosity=0,
        **options,
    )


def test_the_format_is_apexs():
    initialize(num_losses=2)
    expected = {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}
    expected["loss_scaler1"] = dict(expected["loss_scaler0"])
    assert amp.state_dict() == expected


@pytest.mark.parametrize("extra", [{}, {"dynamic": True}], ids=["torch.amp", "torch_npu"])
def test_a_grad_scalers_state_is_read(extra):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=100)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    initialize(num_losses=2)
    amp.load_state_dict({**scaler.state_dict(), **extra})
    assert [tuple(s.values()) for s in amp.state_dict().values()] == [(2.0**9, 7), (2.0**9, 7)]


def test_hysteresis_is_resumed():
    initialize(scale_hysteresis=2)
    state = amp.state_dict()
    state["loss_scaler0"]["overflows_in_a_row"] = 1
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    initialize()
    amp.load_state_dict(state)  # written with it, read without
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}


def test_loading_while_disabled_does_no_harm():
    initialize(enabled=False)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    amp.load_state_dict({})
    assert amp.state_dict() == {}
