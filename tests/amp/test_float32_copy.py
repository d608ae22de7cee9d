# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.float32_copy``: a plain float32 model with the weights of ``model.state_dict()``."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from amp.classifier import Net, batch, train
from devices import DEVICE, are_dropped, needs
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

LEVELS = [("O2", {}), ("O5", {}), ("O5", {"store_param_remainders": True})]


def trained(level, **options):
    model = Net()
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=16.0, verbosity=0, **options
    )
    train(model, optimizer, range(2))
    return model, optimizer


def reference_of(model):
    """Plain torch with the state dict of ``model``."""
    plain = Net()
    plain.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    return plain


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", pytest.param("O4", marks=needs("autocast_to_bfloat16")), "O5"])
def test_values_and_results_are_those_of_plain_torch(level, over):
    model, optimizer = trained(level)
    if over:
        amp.shutdown()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dtypes = [p.dtype for p in model.parameters()]
    clean = amp.float32_copy(model)
    plain = reference_of(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(clean.state_dict()[name], value), name
        assert clean.state_dict()[name].dtype == value.dtype
    x = batch(0)[0]
    with amp.disable_casts():
        assert torch.equal(clean.eval()(x), plain.eval()(x))
    # Nothing of amp is on the copy, and the model is as it was.
    assert all("forward" not in vars(m) and "__reduce_ex__" not in vars(m) for m in clean.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in clean.modules())
    assert [p.dtype for p in model.parameters()] == dtypes
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    if not over:
        train(model, optimizer, range(2))
        assert amp.last_step(optimizer).applied


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch.export traces operators of the CPU here")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_torch_export(level):
    model, _ = trained(level)
    x = batch(0)[0]
    clean = amp.float32_copy(model).eval()
    with amp.disable_casts():
        program = torch.export.export(clean, (x,))
    dtypes = {n.meta["val"].dtype for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    assert dtypes <= {torch.float32, torch.int64}
    torch.testing.assert_close(program.module()(x), reference_of(model).eval()(x))


def test_weights_in_low_precision_alone_are_refused():
    model, _ = trained("O3")
    with pytest.raises(RuntimeError, match=r"exist in float16 alone.*allow_rounded=True"):
        amp.float32_copy(model)
    clean = amp.float32_copy(model, allow_rounded=True)
    for param, rounded in zip(clean.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, rounded.float())
    with pytest.raises(TypeError, match=r"takes a model, .*got list"):
        amp.float32_copy([model])


def test_a_model_without_amp():
    model = Net()
    clean = amp.float32_copy(model)
    assert clean is not model
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), model.parameters(), strict=True))


def test_hooks_of_the_users_stay():
    model, _ = trained("O2")
    seen = []
    model.conv.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    clean = amp.float32_copy(model)
    clean.eval()(batch(0)[0])
    assert seen == [torch.float32]
    copy.deepcopy(clean)


# Weights without masters, and buffers


class Partly(nn.Module):
    """A frozen weight, a trained one and buffers, of which half precision holds only some."""

    def __init__(self, weight=1 / 3, third=1 / 3, mask=-1e4):
        super().__init__()
        self.frozen = nn.Parameter(torch.full((3,), float(weight)), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(3))
        self.register_buffer("third", torch.full((2,), float(third)))
        self.register_buffer("exact", torch.full((2,), 0.5))
        self.register_buffer("mask", torch.full((2,), float(mask)))

    def forward(self, x):
        return (x * (self.frozen + self.trained)).sum()


def partly(level="O2", kind=optimizers.NpuFusedSGD, **options):
    model = Partly().to(DEVICE)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0, **options)


def states(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("level", "options"), LEVELS)
def test_what_has_no_master_keeps_its_float32_values(level, options):
    model, _ = partly(level, **options)
    exact = Partly().state_dict()
    assert model.frozen.dtype == model.third.dtype == model.exact.dtype != torch.float32
    for shown in (states(model), states(copy.deepcopy(model)), states(amp.float32_copy(model))):
        assert all(torch.equal(shown[name], value) for name, value in exact.items())
    # Elements that are written have the value that is written; what is loaded is kept, too.
    with torch.no_grad():
        model.frozen[0], model.third[1] = 5.0, 7.0
    shown = states(model)
    assert shown["frozen"].tolist() == [5.0, *exact["frozen"].tolist()[1:]]
    assert shown["third"].tolist() == [exact["third"][0].item(), 7.0]
    model.load_state_dict({name: value / 3 for name, value in exact.items()})
    assert all(torch.equal(value, exact[name] / 3) for name, value in states(model).items())
    amp.shutdown()
    assert {p.dtype for p in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(value, exact[name] / 3) for name, value in states(model).items())


@pytest.mark.parametrize(
    ("kind", "level", "options"),
    [(optimizers.NpuFusedSGD, "O2", {}), (torch.optim.SGD, "O2", {}), (optimizers.NpuFusedSGD, *LEVELS[-1])],
)
@pytest.mark.parametrize("added", [False, True])
def test_what_is_unfrozen_is_trained_from_its_float32_value(added, kind, level, options):
    model = Partly().to(DEVICE)
    params = [model.trained] if added else list(model.parameters())
    model, optimizer = amp.initialize(
        model, kind(params, lr=1.0), opt_level=level, loss_scale=16.0, verbosity=0, **options
    )
    model.frozen.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [model.frozen]})
    x = torch.tensor([1.0, 2.0, -4.0], device=DEVICE)
    backward(model(x), optimizer)
    optimizer.step()
    assert torch.equal(states(model)["frozen"], torch.full((3,), 1 / 3) - x.cpu())


@pytest.mark.parametrize(("level", "options"), LEVELS)
def test_masters_live_as_long_as_the_model(level, options):
    """They are shown when their optimizer is gone; a model that is gone is not kept alive."""
    model, optimizer = trained(level, **options)
    held = [weakref.ref(o) for o in (model, model.head.weight, next(amp.master_params(optimizer)))]
    values = states(model)
    del optimizer
    gc.collect()
    assert any((value != value.half().float()).any() for value in values.values())
    for found in (states(model), states(pickle.loads(pickle.dumps(model)))):
        assert all(torch.equal(found[name], value) for name, value in values.items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert all(torch.equal(states(model)[name], value) for name, value in values.items())
    del model, optimizer
    assert are_dropped(*held)


def test_an_optimizer_that_comes_later_takes_what_is_kept():
    model, _optimizer = partly()
    model.frozen.requires_grad_(True)
    second = torch.optim.SGD([model.frozen], lr=0.0)
    amp.initialize([], second, opt_level="O2", verbosity=0)
    with amp.float32_params(second):
        assert torch.equal(model.frozen.cpu(), Partly().frozen)
    assert torch.equal(states(model)["frozen"], Partly().frozen)


def test_without_keep_frozen_float32_the_cast_is_what_is_shown():
    model, _ = partly(keep_frozen_float32=False)
    assert torch.equal(states(model)["third"], torch.full((2,), 1 / 3).half().float())


@pytest.mark.parametrize("lost", [-1e9, 1e-12])
def test_buffers_that_float16_would_lose_stay_float32(lost, capsys):
    model = amp.initialize(Partly(mask=lost).to(DEVICE), opt_level="O2")
    assert model.mask.dtype == torch.float32
    assert model.third.dtype == torch.float16
    said = capsys.readouterr().out
    assert "Buffers that stay float32, since float16 does not hold their values: mask\n" in said
    assert "Buffers that are rounded in forward, since float16 does not hold their values" in said
    assert amp.initialize(Partly(mask=lost).to(DEVICE), opt_level="O5", verbosity=0).mask.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["frozen", "trained"])
def test_weights_that_become_inf_are_refused_by_name(name):
    model = nn.Sequential(Partly().to(DEVICE))
    with torch.no_grad():
        getattr(model[0], name)[1] = 1e5
    optimizer = torch.optim.SGD([model[0].trained], lr=1.0)
    with pytest.raises(RuntimeError, match=rf"parameter 0\.{name} has finite values of up to 1e\+05, which are inf"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is torch.optim.SGD
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert getattr(model[0], name).isfinite().all()
