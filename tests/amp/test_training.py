# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""amp from the outside: training loops as users write them."""

import contextlib
import sys

import pytest
import torch
from amp.classifier import Net, batch, loss_of, train
from devices import DEVICE, needs
from small_programs import backward, initialize, saturating_device, step_on
from torch import nn

from apex_npu import amp, optimizers

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
MAKERS = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "NpuFusedSGD": lambda params: optimizers.NpuFusedSGD(params, lr=0.05, momentum=0.9),
    "NpuFusedAdam": lambda params: optimizers.NpuFusedAdam(params, lr=1e-2),
}


def make(level, maker="NpuFusedAdam", **options):
    model = Net()
    optimizer = MAKERS[maker](model.parameters())
    if level is None:
        return model, optimizer
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def values(model, optimizer):
    """Everything that a skipped step must not touch."""
    with amp.float32_params(optimizer):
        weights = [p.detach().clone() for p in model.parameters()]
    state = [v for entry in optimizer.state.values() for name, v in entry.items() if name != "master_param"]
    return weights + [v.clone() if isinstance(v, torch.Tensor) else v for v in state]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_the_default_dtype_makes_no_difference(level, default):
    trained = []
    for dtype in (torch.float32, default):
        model, optimizer = make(None)
        batches = list(map(batch, range(3)))
        torch.set_default_dtype(dtype)
        try:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            for x, y in batches:
                step_on(nn.functional.cross_entropy(model(x), y), optimizer)
        finally:
            torch.set_default_dtype(torch.float32)
        trained.append([*model.parameters(), *amp.master_params(optimizer)])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("maker", ["torch SGD", "NpuFusedAdam"])
def test_dynamic_scale_comes_down_from_2_to_the_32(level, maker):
    model, optimizer = make(level, maker, loss_scale="dynamic", dynamic_init_scale=2.0**32, max_loss_scale=2.0**32)
    skipped = 0
    before = values(model, optimizer)
    losses = []
    for step in range(60):
        losses += train(model, optimizer, [step])
        if amp.last_step(optimizer).skipped:
            skipped += 1
            if len(losses) == skipped:
                assert same(values(model, optimizer), before)
    if level == "O0":
        assert skipped == 0
        assert scale() == 2.0**32
    else:
        assert skipped >= 5
        assert scale() == 2.0 ** (32 - skipped)
    assert losses[-1] < 0.6 * losses[0]


def test_parameters_that_belong_to_no_model_stay_float32():
    """A criterion's weights, learned loss weights: legal, and never cast."""
    for level in LEVELS:
        model, extra = Net(), nn.Parameter(torch.ones(3, device=DEVICE))
        optimizer = optimizers.NpuFusedSGD([*model.parameters(), extra], lr=0.1)
        model, optimizer = initialize(model, optimizer, level, loss_scale=16.0)
        backward(loss_of(model, 0) + (extra**2).sum(), optimizer)
        assert extra.dtype == torch.float32
        assert extra.grad.tolist() == [2, 2, 2]
        optimizer.step()
        assert extra.tolist() == pytest.approx([0.8] * 3)


def test_optimizer_state_from_before_initialize_is_kept():
    model = Net()
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3), scaled=False)
    moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert same(moments, [optimizer.state[p]["exp_avg_sq"] for p in amp.master_params(optimizer)])
    train(model, optimizer, [3])
    assert all(optimizer.state[p]["step"].item() == 4 for p in amp.master_params(optimizer))


def test_disabled_is_pass_through():
    expected = train(*make(None), range(3), scaled=False)
    model = Net()
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-2)
    result = amp.initialize(model, optimizer, enabled=False, opt_level="O2", loss_scale=128.0)
    assert result == (model, optimizer)
    assert train(model, optimizer, range(3)) == expected
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    with amp.disable_casts():
        pass


class Watching(torch.optim.SGD):
    """Records whether autocast is on in its own step."""

    def step(self, closure=None):
        self.seen = torch.is_autocast_enabled(DEVICE.type)
        return super().step(closure)


def test_the_optimizer_steps_outside_the_casts():
    model = Net()
    model, optimizer = amp.initialize(model, Watching(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    assert torch.is_autocast_enabled(DEVICE.type)
    train(model, optimizer, [0])
    assert optimizer.seen is False
    assert torch.is_autocast_enabled(DEVICE.type)
    with amp.disable_casts(), amp.disable_casts():
        assert not torch.is_autocast_enabled(DEVICE.type)


def test_the_optimizer_of_an_earlier_session_steps_outside_the_casts_of_a_later_one():
    model = Net()
    _, earlier = amp.initialize(model, Watching(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    amp.initialize(Net(), opt_level="O1", verbosity=0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    param = next(model.parameters())
    before = param.detach().clone()
    earlier.step()
    assert earlier.seen is False
    torch.testing.assert_close(param.detach(), before - 0.1)
    amp.shutdown()
    with torch.autocast(DEVICE.type, dtype=torch.float16):  # nothing of the session is left
        earlier.step()
    assert earlier.seen is True


@pytest.mark.parametrize("maker", ["torch SGD", "NpuFusedSGD"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closure(level, maker):
    model, optimizer = make(level, maker, dynamic_init_scale=2.0**8)
    bad = [False]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if bad[0]:
                model.head.bias.grad.fill_(float("inf"))
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    bad[0] = True
    before = values(model, optimizer)
    optimizer.step(closure)
    assert amp.last_step(optimizer).skipped
    assert same(values(model, optimizer), before)


def test_what_initialize_prints(capsys):
    model = nn.Linear(2, 2).to(DEVICE)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", loss_scale="128.0")
    # Of the options those alone that differ from the level's.
    assert capsys.readouterr().out.splitlines() == [
        "Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        "loss_scale             : 128.0 (default: dynamic)",
    ]


@pytest.mark.parametrize(
    ("level", "layer", "says"),
    [
        ("O1", nn.Conv2d, "no float16 arithmetic"),
        ("O2", nn.Conv2d, "no float16 arithmetic"),
        ("O4", nn.Conv2d, None),
        ("O0", nn.Conv2d, None),
        ("O1", nn.Linear, None),
    ],
)
def test_convolutions_that_the_cpu_emulates_are_said_at_initialize(level, layer, says, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["apex_npu.amp.frontend"], "onednn_computes", lambda dtype: dtype == torch.bfloat16)
    model = layer(2, 2, 1)
    amp.initialize(model, opt_level=level)
    told = [line for line in capsys.readouterr().out.splitlines() if "This CPU" in line]
    assert len(told) == (says is not None)
    assert all(says in line and "Opt_level O4 or O5 (bfloat16) or O0 is faster" in line for line in told)
    amp.shutdown()
    amp.initialize(layer(2, 2, 1), opt_level=level, verbosity=0)
    assert capsys.readouterr().out == ""


@pytest.fixture
def saturating(monkeypatch):
    return saturating_device(monkeypatch)


@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("put_off", ["delay_unscale", "delay_overflow_check"])
def test_saturating_devices_are_asked_for_their_flag(saturating, put_off, fuse_unscale):
    model, optimizer = make("O2", dynamic_init_scale=2.0**8, fuse_unscale=fuse_unscale)
    with amp.scale_loss(loss_of(model, 0), optimizer, **{put_off: True}) as scaled_loss:
        scaled_loss.backward()
        saturating.flag = True
    saturating.flag = True  # of a forward, which is not amp's
    with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
        assert not saturating.flag
        scaled_loss.backward()  # what the first has raised is kept all the same
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    train(model, optimizer, [2])
    assert amp.last_step(optimizer).applied


def block_on(saturating, model, optimizer, *, overflows=False, raises=False, **options):
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss_of(model, 0), optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        saturating.flag |= overflows
        if raises:
            raise ZeroDivisionError


def two():
    """Models and their optimizers."""
    return amp.initialize(*map(list, zip(make(None), make(None), strict=True)), verbosity=0)


@pytest.mark.parametrize("put_off", ["delay_unscale", "delay_overflow_check"])
def test_an_overflow_on_a_saturating_device_is_of_its_own_optimizer(saturating, put_off):
    (model, other), (optimizer, other_optimizer) = two()
    block_on(saturating, model, optimizer, overflows=True, **{put_off: True})
    block_on(saturating, other, other_optimizer, delay_overflow_check=True)
    block_on(saturating, other, other_optimizer)
    block_on(saturating, model, optimizer)
    assert not amp.will_skip(other_optimizer)
    assert amp.will_skip(optimizer)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_an_overflow_on_a_saturating_device_is_not_lost_to_a_nested_block(saturating, when):
    (model, other), (optimizer, other_optimizer) = two()
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
        if when == "before":
            scaled_loss.backward()
            saturating.flag = True
        with amp.scale_loss(loss_of(other, 0), other_optimizer) as other_loss:
            if when == "inside":
                scaled_loss.backward()
                saturating.flag = True
            other_loss.backward()
    assert amp.will_skip(optimizer)
    assert amp.will_skip(other_optimizer) is (when == "inside")  # one flag for both backwards


@pytest.mark.parametrize("how", ["model", "zeros", "optimizer", None])
@pytest.mark.parametrize("raises", [True, False])
def test_an_overflow_on_a_saturating_device_stays_until_gradients_are_cleared(saturating, raises, how):
    model, optimizer = make("O1", dynamic_init_scale=2.0**8)
    block_on(saturating, model, optimizer, overflows=True, raises=raises)
    if not raises:
        optimizer.step()
        assert amp.last_step(optimizer).skipped
    if how is not None:
        (optimizer if how == "optimizer" else model).zero_grad(set_to_none=how != "zeros")
    block_on(saturating, model, optimizer)
    assert amp.will_skip(optimizer) is (how is None)  # elsewhere the inf would still be there


@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_an_overflow_on_a_saturating_device_moves_the_scale_of_its_own_loss(saturating, fuse_unscale):
    model, optimizer = make("O2", dynamic_init_scale=2.0**8, num_losses=2, fuse_unscale=fuse_unscale)
    for loss_id in (0, 1):
        with amp.scale_loss(loss_of(model, loss_id), optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
            saturating.flag = saturating.flag or loss_id == 0
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    assert scales == [2.0**7, 2.0**8]
    optimizer.step()
    assert amp.last_step(optimizer).skipped


SPARSE = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "SparseAdam": torch.optim.SparseAdam}


def train_table(maker, level=None, **options):
    """The weights after steps with an embedding whose gradients are sparse; the fourth overflows under amp."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)).to(DEVICE)
    stepped = [SPARSE[maker](list(model[0].parameters()), lr=0.05), torch.optim.SGD(model[1].parameters(), lr=0.1)]
    if level is not None:
        model, stepped = amp.initialize(model, stepped, opt_level=level, loss_scale="dynamic", verbosity=0, **options)
    for step in range(8):
        for rows in ([1, 2, 2, step], [step, 5, 5, 19]):  # some of them twice
            loss = model(torch.tensor(rows, device=DEVICE)).float().square().mean()
            if level is None:
                loss.backward()
            else:
                backward(loss * (float("inf") if step == 3 else 1.0), stepped)
        for optimizer in stepped:
            if level is not None or step != 3:
                optimizer.step()
            optimizer.zero_grad()
    found = [p.detach().float().cpu() for p in (model if level is None else amp.float32_copy(model)).parameters()]
    amp.shutdown()
    return found


@needs("coalesced_sparse")
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("maker", SPARSE)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_sparse_gradients_are_stepped_as_in_torch(level, maker, fuse_unscale):
    tolerance = {"O0": 1e-6, "O1": 1e-3, "O2": 1e-3}.get(level, 1e-2)
    torch.testing.assert_close(
        [*train_table(maker, level, fuse_unscale=fuse_unscale)], [*train_table(maker)], rtol=0.0, atol=tolerance
    )


@needs("coalesced_sparse")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_sparse_gradients_of_backwards_outside_of_blocks_are_added(level):
    """Before a block, at a loss scale of its own; the sum is unscaled."""
    table = nn.Embedding(5, 2, sparse=True).to(DEVICE)
    table, optimizer = initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), level)
    table(torch.tensor([1, 1, 3], device=DEVICE)).sum().backward()
    backward(table(torch.tensor([3, 4], device=DEVICE)).sum(), optimizer)
    (param,) = amp.master_params(optimizer)
    assert param.grad.is_sparse
    assert param.grad.to_dense().sum(1).tolist() == [0.0, 4.0, 0.0, 4.0, 2.0]
