# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Private names of Apex that old scripts use: the patterns of public code."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from devices import DEVICE, needs
from small_programs import backward, saturating_device
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.compat.amp.scaler import LossScaler
from apex_npu.compat.amp.state import _amp_state, maybe_print, warn_or_err

pytestmark = pytest.mark.host


def make(level="O2", maker=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(DEVICE)
    optimizer = maker(model.parameters(), lr=0.05, **({"momentum": 0.9} if maker is torch.optim.SGD else {}))
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator).to(DEVICE), torch.randn(16, 3, generator=generator).to(DEVICE)


def loss_of(model, step):
    x, y = batch(step)
    return nn.functional.mse_loss(model(x).float(), y)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------------------------------------------------- _amp_state


def test_public_names_are_in_the_modules_dict():
    # timm: `if 'state_dict' in amp.__dict__`
    assert {"state_dict", "load_state_dict", "initialize", "scale_loss", "master_params", "init"} <= set(amp.__dict__)
    assert amp._amp_state is _amp_state


def test_what_initialize_brings_is_no_attribute_before_it():
    for name in ("opt_properties", "loss_scalers", "handle", "min_loss_scale", "max_loss_scale"):
        assert not hasattr(_amp_state, name)
    assert _amp_state.verbosity == 1
    assert _amp_state.hard_override is False
    assert _amp_state.allow_incoming_model_not_fp32 is False
    make("O1", min_loss_scale=0.5, max_loss_scale=2.0**20)
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (0.5, 2.0**20)
    assert hasattr(_amp_state, "handle")
    make("O2")
    assert not hasattr(_amp_state, "handle")


def test_an_assigned_loss_scale_is_what_the_loss_is_multiplied_with():
    model, optimizer = make("O2", num_losses=2)
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 32.0
    assert [s._loss_scale for s in amp._amp_state.loss_scalers] == [32.0, 32.0]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [32.0, 32.0]
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
        torch.testing.assert_close(scaled_loss, loss * 32.0, rtol=0, atol=0)
        scaled_loss.backward()
    assert amp._amp_state.loss_scalers[1].loss_scale() == 32.0
    assert amp._amp_state.loss_scalers[1]._unskipped == 1
    assert amp._amp_state.loss_scalers[0]._unskipped == 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_no_loss_scale_is_assigned_that_gradients_could_not_be_divided_by(value):
    make("O2")
    with pytest.raises(ValueError, match="positive and finite"):
        amp._amp_state.loss_scalers[0]._loss_scale = value
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_has_overflow_tells_of_the_last_block(level):
    model, optimizer = make(level)
    scaler = amp._amp_state.loss_scalers[0]
    for factor, overflow in ((1.0, False), (float("inf"), True), (1.0, False)):
        optimizer.zero_grad()
        backward(loss_of(model, 0) * factor, optimizer)
        assert scaler._has_overflow is overflow
        optimizer.step()
    assert scaler._loss_scale == 2.0**15


def test_opt_properties_hold_what_initialize_decided():
    make("O2", loss_scale=128.0)
    properties = amp._amp_state.opt_properties
    assert properties.enabled
    assert properties.opt_level == "O2"
    assert properties.master_weights is True
    assert properties.options["loss_scale"] == properties.loss_scale == 128.0
    assert properties.options["cast_model_type"] is torch.float16
    with pytest.raises(AttributeError, match="call it again with opt_level='O1'"):
        properties.opt_level = "O1"
    with pytest.raises(AttributeError, match="loss_scalers"):
        _amp_state.loss_scalers = []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = properties.nonsense


def test_a_model_in_half_is_accepted_once_the_state_allows_it():
    model = nn.Linear(4, 2).to(DEVICE).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="Found param weight"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    _amp_state.allow_incoming_model_not_fp32 = True
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    finally:
        _amp_state.allow_incoming_model_not_fp32 = False
    with pytest.raises(RuntimeError, match="Found param weight"):
        amp.initialize(nn.Linear(4, 2).to(DEVICE).half(), opt_level="O2", verbosity=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cls", [torch.optim.SGD, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("cast_model_type", [None, False])
def test_parameters_that_a_model_defines_in_half_are_trained_in_float32_and_looped_over_in_half(cls, cast_model_type):
    model = nn.Linear(4, 2).to(DEVICE)
    model.bias = nn.Parameter(torch.ones(2, device=DEVICE, dtype=torch.float16))
    model.forward = lambda x: (x.float() @ model.weight.float().T * model.bias.float()).sum()
    optimizer = cls(model.parameters(), lr=2e-4)
    options = {"loss_scale": 1.0, "verbosity": 0, "cast_model_type": cast_model_type}
    _amp_state.allow_incoming_model_not_fp32 = True
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    finally:
        _amp_state.allow_incoming_model_not_fp32 = False
    expected = torch.ones(2)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model(torch.ones(3, 4, device=DEVICE)), optimizer)
        expected -= 2e-4 * model.bias.grad.cpu()
        optimizer.step()
    _, copied = copy.deepcopy((model, optimizer))
    assert [p.dtype for p in amp.master_params(copied)] == [torch.float32, torch.float16]
    for param, looped in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert looped is param
        assert param.dtype == (torch.float32 if param is model.weight else torch.float16)
        assert param.grad.dtype == torch.float32
    with amp.float32_params(optimizer):
        torch.testing.assert_close(model.bias.detach().cpu(), expected, rtol=1e-7, atol=1e-7)


def test_verbosity_can_be_set_later(capsys):
    make("O2")
    maybe_print("silent")
    _amp_state.verbosity = 1
    maybe_print("said")
    assert capsys.readouterr().out == "said\n"


def test_hard_override_serves_warn_or_err(capsys):
    with pytest.raises(RuntimeError, match=r"^contradiction$"):
        warn_or_err("contradiction")
    _amp_state.hard_override = True
    try:
        warn_or_err("contradiction")
    finally:
        _amp_state.hard_override = False
    assert capsys.readouterr().out == "Warning:  contradiction\n"


# ---------------------------------------------------------------------------------------------------------- _amp_stash


def test_the_stash_lists_masters_and_model_parameters_group_by_group():
    model, optimizer = make("O2")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device=DEVICE, dtype=torch.float16))]})
    stash = optimizer._amp_stash
    linear = [model[0].weight, model[0].bias, model[3].weight, model[3].bias]
    assert [id(p) for p in stash.all_fp16_params[:4]] == [id(p) for p in linear]
    assert [len(group) for group in stash.fp16_groups] == [4, 1]
    assert [len(group) for group in stash.fp32_from_fp32_groups] == [2, 0]
    assert [id(p) for p in stash.all_fp32_from_fp32_params] == [id(model[1].weight), id(model[1].bias)]
    assert stash.all_fp32_from_fp32_grad_stash == [None, None]
    with pytest.warns(RuntimeWarning, match="writing to them has no effect"):
        masters = stash.all_fp32_from_fp16_params
    for low, master in zip(stash.all_fp16_params, masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.to(low.dtype), low)
    assert not hasattr(stash, "all_fp32_params")


def test_without_masters_the_stash_has_the_other_lists():
    model, optimizer = make("O3")
    stash = optimizer._amp_stash
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in model.parameters()]
    assert stash.all_fp32_params == []
    assert stash.all_fp16_grad_stash == [None] * 6
    # NVIDIA's FusedSGD checks for masters in this way.
    assert not hasattr(stash, "fp32_from_fp16_groups")
    assert not hasattr(torch.optim.SGD(model.parameters(), lr=0.1), "_amp_stash")


def test_flags_of_the_stash_can_be_assigned_and_follow_amp():
    model, optimizer = make("O2")
    stash = optimizer._amp_stash
    assert (stash.lazy_init_called, stash.already_patched, stash.params_have_scaled_gradients) == (True, False, False)
    stash.lazy_init_called = True
    stash.process_zero_grad = False
    stash.my_own = 3
    assert optimizer._amp_stash.my_own == 3
    backward(loss_of(model, 0), optimizer, delay_unscale=True)
    assert stash.params_have_scaled_gradients
    backward(loss_of(model, 0) * float("inf"), optimizer)
    assert stash.already_patched
    assert not stash.params_have_scaled_gradients
    optimizer.step()
    assert not stash.already_patched
    with pytest.raises(AttributeError, match=r"follows optimizer\.param_groups"):
        stash.all_fp16_params = []
    with pytest.raises(AttributeError, match="there are all_fp16_params"):
        _ = stash.nonsense


def test_gradients_declared_scaled_are_unscaled_by_the_next_block():
    model, optimizer = make("O1", loss_scale=8.0)
    reference = copy.deepcopy(model)
    (loss_of(model, 0) * 8.0).backward()  # manually, outside
    optimizer._amp_stash.params_have_scaled_gradients = True
    backward(loss_of(model, 1), optimizer)
    (loss_of(reference, 0) + loss_of(reference, 1)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        # Two float16 backward passes; the sum is taken in another order.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-3)


def test_masters_written_by_a_script_are_the_models_values():
    model, optimizer = make("O2")
    for master in amp.master_params(optimizer):
        master.data.fill_(0.3)
    optimizer._master_params_to_model_params()
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.3))
    assert torch.equal(values(model)["0.weight"], torch.full((8, 6), 0.3, device=DEVICE))


@pytest.mark.parametrize("maker", [torch.optim.SGD, optimizers.NpuFusedSGD], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_manually_scaled_backward_gives_what_scale_loss_gives(level, maker):
    results = []
    for manual in (False, True):
        model, optimizer = make(level, maker, loss_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                loss = loss_of(model, 10 * step + micro)
                if manual:
                    scaler = amp._amp_state.loss_scalers[0]
                    optimizer._prepare_amp_backward()
                    (loss.float() * scaler.loss_scale()).backward()
                    scaler.clear_overflow_state()
                    optimizer._post_amp_backward(scaler)
                    assert scaler.update_scale() is False
                else:
                    backward(loss, optimizer)
            optimizer.step()
        results.append(values(model))
    for name in results[0]:
        # O3 accumulates in float16: scaled the one way, unscaled the other.
        tolerance = 2e-3 if level == "O3" else 1e-6
        torch.testing.assert_close(results[1][name], results[0][name], rtol=tolerance, atol=tolerance)


def test_the_grad_stash_holds_what_was_set_aside():
    model, optimizer = make("O1", loss_scale=1.0)
    backward(loss_of(model, 0), optimizer)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer._prepare_amp_backward()
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(optimizer._amp_stash.all_fp32_grad_stash, before, rtol=0, atol=0)
    optimizer._post_amp_backward(amp._amp_state.loss_scalers[0])
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def test_preparing_twice_loses_nothing_and_clearing_forgets_what_was_set_aside():
    model, optimizer = make("O1", loss_scale=4.0)
    scaler = amp._amp_state.loss_scalers[0]
    weight = model[3].weight
    grads = []
    for calls in (1, 2):
        optimizer.zero_grad()
        weight.grad = torch.ones_like(weight)
        for _ in range(calls):
            optimizer._prepare_amp_backward()
        (loss_of(model, 0) * 4.0).backward()
        optimizer._post_amp_backward(scaler)
        grads.append(weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].mean() > 0.5
    optimizer._prepare_amp_backward()  # and then the backward fails
    optimizer.zero_grad()
    optimizer._prepare_amp_backward()
    (loss_of(model, 0) * 4.0).backward()
    optimizer._post_amp_backward(scaler)
    torch.testing.assert_close(weight.grad, grads[0] - 1, rtol=1e-5, atol=1e-6)


def test_a_manual_backward_reads_the_flag_of_saturating_devices(monkeypatch):
    backend = saturating_device(monkeypatch)
    backend.flag = True  # of something before
    model, optimizer = make("O2")
    scaler = amp._amp_state.loss_scalers[0]
    for overflow in (False, True):
        optimizer.zero_grad()
        optimizer._prepare_amp_backward()
        (loss_of(model, 0) * scaler.loss_scale()).backward()
        backend.flag |= overflow
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        assert scaler.update_scale() is overflow


def test_an_adopted_optimizer_with_a_stash_copies_and_pickles():
    _, optimizer = make("O2")
    optimizer._amp_stash.my_own = 3
    assert len(copy.deepcopy(optimizer)._amp_stash.all_fp16_params) == 4
    assert pickle.loads(pickle.dumps(optimizer))._amp_stash.my_own == 3


# ---------------------------------------------------------------------------------------------------------- LossScaler


def test_a_scaler_of_ones_own_moves_as_the_rule_says():
    scaler = LossScaler("dynamic", init_scale=2.0**10, scale_window=3, max_loss_scale=2.0**11, min_loss_scale=2.0**9)
    assert (scaler.dynamic, scaler._loss_scale, scaler._scale_seq_len) == (True, 2.0**10, 3)
    expected = []
    scale, unskipped = 2.0**10, 0
    for overflow in [False, False, False, False, True, True, False, False, False, False, False, False]:
        scaler.clear_overflow_state()
        grad = torch.full((3,), float("inf") if overflow else scale, device=DEVICE)
        scaler.unscale([grad], [grad], None)
        if not overflow:
            assert torch.equal(grad, torch.ones_like(grad))
        assert scaler.update_scale() is overflow
        if overflow:
            scale, unskipped = max(scale / 2, 2.0**9), 0
        else:
            unskipped += 1
            if unskipped == 3:
                scale, unskipped = min(scale * 2, 2.0**11), 0
        expected.append((scale, unskipped))
        assert (scaler.loss_scale(), scaler._unskipped) == (scale, unskipped)
    assert {s for s, _ in expected} == {2.0**9, 2.0**10, 2.0**11}


@needs("inf")
def test_a_static_scaler_divides_and_never_skips():
    scaler = LossScaler(128.0)
    model_grad = torch.tensor([128.0, float("inf")], dtype=torch.float16, device=DEVICE)
    master_grad = torch.zeros(2, device=DEVICE)
    scaler.unscale([model_grad, None], [master_grad, master_grad], None)
    assert master_grad.tolist() == [1.0, float("inf")]
    assert not scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (128.0, 1)
    scaler.unscale([model_grad], [master_grad], None, scale_override=64.0)
    assert master_grad[0] == 2.0


@needs("inf")
def test_unscale_with_stashed_adds_and_checks_the_new_ones_alone():
    scaler = LossScaler("dynamic", init_scale=4.0)
    new = torch.tensor([4.0, 8.0], dtype=torch.float16, device=DEVICE)
    stashed = torch.tensor([10.0, float("inf")], device=DEVICE)
    out = torch.empty(2, device=DEVICE)
    scaler.unscale_with_stashed([new], [stashed], [out])
    assert out.tolist() == [11.0, float("inf")]
    assert not scaler._has_overflow
    scaler.unscale_with_stashed([new], [stashed], [out], scale_override=(2.0, 5.0, 1.0))
    assert out[0] == 2.0 + 2.0
    new[0] = float("nan")
    scaler.unscale_with_stashed([new], [stashed], [out])
    assert scaler._has_overflow
    before = out.clone()
    scaler.unscale_with_stashed([new * 0], [stashed], [out])  # after an overflow: nothing
    torch.testing.assert_close(out, before, equal_nan=True, rtol=0, atol=0)


def test_views_write_through_and_scalers_pickle_in_apexs_format():
    make("O1")
    view = amp._amp_state.loss_scalers[0]
    assert view == amp._amp_state.loss_scalers[0]
    view._unskipped = 1999
    view._max_loss_scale = 2.0**17
    assert _amp_state.max_loss_scale == 2.0**17
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 1999}
    assert set(view.__getstate__()) == {
        "dynamic", "_loss_scale", "_unskipped", "_has_overflow", "_max_loss_scale", "_min_loss_scale", "_scale_seq_len",
    }  # fmt: skip
    clone = pickle.loads(pickle.dumps(view))
    assert clone != view
    assert clone.__getstate__() == view.__getstate__()
    clone.update_scale()
    assert clone.loss_scale() == 2.0**17
    assert view.loss_scale() == 2.0**16


@pytest.mark.parametrize("bad", [0, -1.0, "junk", float("inf")])
def test_scalers_refuse_what_is_no_scale(bad):
    with pytest.raises(ValueError, match=r"loss scale must be positive|could not convert"):
        LossScaler(bad)


# ----------------------------------------------------------------------------------------------- amp.init, OptimWrapper


def test_init_casts_and_deactivate_ends_it():
    handle = amp.init()
    x, linear = torch.randn(4, 4, device=DEVICE), nn.Linear(4, 4).to(DEVICE)
    assert handle.is_active()
    assert amp._amp_state.handle == handle
    assert linear(x).dtype == torch.float16
    with handle._disable_casts():
        assert not handle.is_active()
        assert linear(x).dtype == torch.float32
    assert linear(x).dtype == torch.float16
    handle._clear_cache()
    assert handle.cache == {}
    assert (handle.has_cache, handle.verbose) == (True, False)
    handle._deactivate()
    assert not handle.is_active()
    assert linear(x).dtype == torch.float32


def test_a_second_init_replaces_the_first():
    first, second = amp.init(), amp.init(verbose=True)
    assert (first.is_active(), second.is_active(), second.verbose) == (False, True, True)
    second._deactivate()
    assert nn.Linear(4, 4).to(DEVICE)(torch.randn(4, 4, device=DEVICE)).dtype == torch.float32


def test_the_oldest_scale_loss_names_the_way_out():
    with pytest.raises(RuntimeError, match=r"^The old Amp API is no longer supported.*wrap_optimizer"):
        amp.init().scale_loss(torch.zeros(()), None)


def test_a_disabled_handle_passes_everything_through():
    handle = amp.init(enabled=False)
    model = nn.Linear(4, 1).to(DEVICE)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(4, 4, device=DEVICE)).sum()
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step(lambda: None)
    with handle._disable_casts():
        assert not handle.is_active()
    handle._clear_cache()
    handle._deactivate()
    assert (handle.has_cache, handle.verbose) == (False, False)


def test_wrapped_optimizers_add_up_several_losses_and_match_float32():
    handle = amp.init()
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(DEVICE)
    reference = copy.deepcopy(model)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), num_loss=2)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for part in range(2):
            with optimizer.scale_loss(loss_of(model, 10 * step + part)) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        with amp.disable_casts():
            plain.zero_grad()
            (loss_of(reference, 10 * step) + loss_of(reference, 10 * step + 1)).backward()
            plain.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        # Float16 matrix products against float32 ones, five steps long.
        torch.testing.assert_close(p, q, rtol=5e-3, atol=2e-3)
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_wrapped_optimizer_skips_a_step_whose_gradients_overflow(capsys):
    handle = amp.init()
    model = nn.Linear(6, 3).to(DEVICE)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    before = values(model)
    for part, factor in enumerate((float("inf"), 1.0)):
        with optimizer.scale_loss(loss_of(model, part) * factor) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out
    optimizer.zero_grad()
    for part in range(2):
        with optimizer.scale_loss(loss_of(model, part)) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(model.weight, before["weight"])


def test_a_wrapped_optimizer_says_what_it_cannot_do():
    handle = amp.init(loss_scale=8.0)
    model = nn.Linear(6, 3).to(DEVICE)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="no closure"):
        optimizer.step(lambda: None)
    loss = loss_of(model, 0)
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss == loss * 8.0
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(loss):
        pass
    with pytest.raises(ValueError, match="num_loss must be an integer >= 1, got 0"):
        handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=0)


def test_scripts_can_go_from_a_handle_to_initialize():
    handle = amp.init()
    model, optimizer = make("O2")
    assert not handle.is_active()
    backward(loss_of(model, 0), optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).applied


# -------------------------------------------------------------------------------------------------- several optimizers


def test_an_overflow_skips_every_optimizer_of_a_shared_parameter():
    shared = nn.Linear(6, 3).to(DEVICE)
    pair = [torch.optim.SGD(shared.parameters(), lr=0.1) for _ in range(2)]
    shared, pair = amp.initialize(shared, pair, opt_level="O1", verbosity=0)
    before = values(shared)
    backward(loss_of(shared, 0) * float("inf"), pair[0])
    backward(loss_of(shared, 1), pair)
    for optimizer in pair:
        optimizer.step()
    torch.testing.assert_close(values(shared), before, rtol=0, atol=0)


def test_a_learning_rate_per_group_needs_no_default():
    params = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (0.25, 0.5), strict=True)]
    optimizer = optimizers.FusedSGD(groups, momentum=0.5)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p[0].item() for p in params] == [0.75, 0.5]
    with pytest.raises(TypeError, match="learning rate"):
        optimizers.FusedSGD([{"params": [nn.Parameter(torch.ones(1))]}], momentum=0.5)


# ------------------------------------------------------------------------------------------------------- lists, helpers


def test_lists_show_what_is_cast_and_refuse_edits():
    from apex_npu.compat.amp.lists import functional_overrides, tensor_overrides, torch_overrides

    assert {"linear", "conv2d", "conv_transpose3d", "conv_tbc"} <= set(functional_overrides.FP16_FUNCS)
    assert {"softmax", "interpolate", "cross_entropy", "grid_sample"} <= set(functional_overrides.FP32_FUNCS)
    assert [name for name, _ in functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]
    assert {"matmul", "mm", "bmm", "prelu"} <= set(torch_overrides.FP16_FUNCS)
    assert {"exp", "pow", "sum", "norm", "renorm"} <= set(torch_overrides.FP32_FUNCS)
    assert {"add", "dot", "ne"} <= set(torch_overrides.CASTS)
    assert torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]
    assert tensor_overrides.SEQUENCE_CASTS == []
    assert {"__matmul__", "matmul", "addr"} <= set(tensor_overrides.FP16_FUNCS)
    assert {"__pow__", "sum", "var"} <= set(tensor_overrides.FP32_FUNCS)
    assert {"__add__", "__itruediv__", "__lt__", "add"} <= set(tensor_overrides.CASTS)
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        assert all(hasattr(module.MODULE, name) for name in (*module.FP16_FUNCS, *module.FP32_FUNCS))
    for edit in (lambda names: names.append("exp"), lambda names: names.remove("linear")):
        with pytest.raises(TypeError, match="register_half_function"):
            edit(functional_overrides.FP16_FUNCS)


@pytest.mark.parametrize("name", ["linear", "conv2d", "softmax", "mse_loss"])
def test_the_lists_tell_the_truth(name):
    from apex_npu.compat.amp.lists import functional_overrides

    x, w = torch.randn(2, 3, 5, 5, device=DEVICE), torch.randn(3, 3, 3, 3, device=DEVICE)
    calls = {
        "linear": lambda f: f(x, torch.randn(4, 5, device=DEVICE)),
        "conv2d": lambda f: f(x, w),
        "softmax": lambda f: f(x.half(), dim=1),
        "mse_loss": lambda f: f(x.half(), x.half()),
    }
    amp.init()
    dtype = calls[name](getattr(torch.nn.functional, name)).dtype
    assert (dtype == torch.float16) == (name in functional_overrides.FP16_FUNCS)
    assert (dtype == torch.float32) == (name in functional_overrides.FP32_FUNCS)


def test_wrappers_cast_while_their_handle_is_active():
    from apex_npu.compat.amp import utils

    handle = amp.init()
    half = utils.make_cast_wrapper(lambda x, y: (x.dtype, y.dtype), utils.maybe_half, handle)
    widest = utils.make_promote_wrapper(lambda x, y: (x.dtype, y.dtype), utils.maybe_float, handle)
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE, dtype=torch.float16)
    assert half(x, y=y) == (torch.float16, torch.float16)
    assert widest(x, y) == (torch.float32, torch.float32)
    assert widest(y, y) == (torch.float16, torch.float16)
    handle._deactivate()
    assert half(x, y) == widest(x, y) == (torch.float32, torch.float16)


def test_helpers_see_nested_tensors():
    from apex_npu.compat.amp import utils

    x, i = torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert utils.is_fp_tensor([x, (x, x)])
    assert not utils.is_fp_tensor([x, i])
    assert utils.maybe_half([x, (x,)])[1][0].dtype == torch.float16
    named = namedtuple("named", "x")
    for given in (type("Own", (list,), {})([x]), named(x)):
        assert type(utils.maybe_half(given)) is type(given)
        assert utils.maybe_half(given)[0].dtype == torch.float16
    kwargs = {"a": x.half(), "b": i}
    assert utils.casted_args(utils.maybe_float, [x.half(), 3], kwargs)[0].dtype == torch.float32
    assert kwargs["a"].dtype == torch.float32
    assert kwargs["b"] is i
    assert utils.type_string(x) == "FloatTensor"
    assert utils.scalar_python_val(x) == 1.0
    assert utils.filter_attrs(torch, ["mm", "nonsense"]) == ["mm"]
