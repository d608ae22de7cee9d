# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.float32_copy``: a plain float32 model with the weights of ``model.state_dict()``."""

import copy

import pytest
import torch
from devices import DEVICE, needs
from torch import nn

from apex_npu import amp, optimizers


def make():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def train(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(4, 1, 4, 4).to(DEVICE)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def trained(level, **options):
    model = make().to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=16.0, verbosity=0, **options
    )
    train(model, optimizer)
    return model, optimizer


def reference_of(model):
    """Plain torch with the state dict of ``model``."""
    plain = make().to(DEVICE)
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
    x = torch.randn(2, 1, 4, 4).to(DEVICE)
    with amp.disable_casts():
        assert torch.equal(clean.eval()(x), plain.eval()(x))
    # Nothing of amp is on the copy, and the model is as it was.
    assert all("forward" not in vars(m) and "__reduce_ex__" not in vars(m) for m in clean.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in clean.modules())
    assert [p.dtype for p in model.parameters()] == dtypes
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    if not over:
        train(model, optimizer)
        assert amp.last_step(optimizer).applied


@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch.jit traces operators of the CPU here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_is_exported_in_float32(level):
    model, _ = trained(level)
    clean = amp.float32_copy(model).eval()
    with amp.disable_casts():
        traced = torch.jit.trace(clean, torch.randn(2, 1, 4, 4).to(DEVICE))
    assert "Half" not in str(traced.inlined_graph)
    assert "aten::to" not in str(traced.inlined_graph)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch.export traces operators of the CPU here")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_torch_export(level):
    model, _ = trained(level)
    x = torch.randn(2, 1, 4, 4)
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
    model = make()
    clean = amp.float32_copy(model)
    assert clean is not model
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), model.parameters(), strict=True))


def test_hooks_of_the_users_stay():
    model, _ = trained("O2")
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    clean = amp.float32_copy(model)
    clean.eval()(torch.randn(2, 1, 4, 4).to(DEVICE))
    assert seen == [torch.float32]
    copy.deepcopy(clean)
