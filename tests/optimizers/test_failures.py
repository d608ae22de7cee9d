# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A step that fails leaves every run either as it was, its count included, or stepped."""

import lockstep
import pytest
import torch
from devices import DEVICE
from lockstep import assert_equal_params, assert_equal_states, set_grads
from optimizer_specs import SPECS

from apex_npu.fusion import flat_buffer
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.optimizers import NpuFusedAdam, NpuFusedLamb

pytestmark = pytest.mark.device

# As torch's allocators raise: that of the host has no error of its own.
NO_MEMORY = RuntimeError if DEVICE.type == "cpu" else torch.OutOfMemoryError


def make_params(dtype=torch.float32):
    return lockstep.make_params([(4, 3), (), (5,)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_memory_runs_out_at_any_place_of_the_first_step(spec, dtype, monkeypatch):
    kwargs = {"lr": 0.05, **spec.variants[-1]}
    twins = make_params(dtype)
    reference = spec.cls(twins, **kwargs)
    for i in range(2):
        set_grads(twins, i)
        reference.step()
    zeros, failures = torch.zeros, 0
    for allowed in range(20):
        params = make_params(dtype)
        before = [p.detach().clone() for p in params]
        optimizer = spec.cls(params, **kwargs)
        set_grads(params, 0)
        left = allowed

        def scarce(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise NO_MEMORY("not enough memory")
            return zeros(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(flat_buffer.torch, "zeros", scarce)
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                failures += 1
                assert_equal_params(params, before, 0.0)
        if left < 0:
            optimizer.step()
        set_grads(params, 1)
        optimizer.step()
        assert_equal_params(params, twins, 0.0)
        assert_equal_states(optimizer.state_dict()["state"], reference.state_dict()["state"], 0.0)
        if left >= 0:
            break
    assert failures >= 3  # parameters, gradients, counts
    assert left >= 0


def test_a_parameter_that_becomes_complex_is_refused():
    params = make_params()
    optimizer = NpuFusedAdam(params)
    set_grads(params, 0)
    optimizer.step()
    before = params[0].detach().clone()
    params[2].data = params[2].data.to(torch.complex64)
    set_grads(params[:2], 1)
    params[2].grad = torch.ones_like(params[2])
    with pytest.raises(TypeError, match=r"NpuFusedAdam: parameter 2 of shape \(5,\) is torch.complex64"):
        optimizer.step()
    assert torch.equal(params[0], before)
    params[2].data = params[2].data.real.clone()
    params[2].grad = None
    optimizer.step()
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize(
    ("device", "way_out"),
    [
        ("the device is lost", "Load the model and the optimizer"),
        ("The process exits for this inner error", "torch_npu's task queue has ended .* start a new process"),
    ],
)
def test_an_update_that_fails_half_way_says_that_it_cannot_be_repeated(monkeypatch, device, way_out):
    params = make_params()
    optimizer = NpuFusedAdam(params, lr=0.1)
    set_grads(params, 0)

    def lost(run, group):
        run.state("exp_avg").add_(1.0)
        raise RuntimeError(device)

    monkeypatch.setattr(optimizer, "update", lost)
    said = rf"NpuFusedAdam.step\(\) has failed .* cannot be repeated. {way_out}.* \(RuntimeError: {device}\)"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()


def test_memory_that_runs_out_for_a_later_buffer_leaves_the_first_as_it_was(monkeypatch):
    params = make_params()
    params[2].data = params[2].data.bfloat16()
    optimizer = NpuFusedLamb(params, lr=0.1)
    set_grads(params, 0)
    make, made = GroupBuffers.scratch_flat, []

    def scarce(group, name):
        made.append(group)
        if made[0] is not group:
            raise flat_buffer.NoRoomError("not enough memory")
        return make(group, name)

    monkeypatch.setattr(GroupBuffers, "scratch_flat", scarce)
    before = [p.detach().clone() for p in params]
    with pytest.raises(flat_buffer.NoRoomError, match="not enough memory"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    monkeypatch.undo()
    optimizer.step()
    assert not any(map(torch.equal, params, before))
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 1, 1]


def test_an_update_without_memory_is_still_an_error_of_memory(monkeypatch):
    params = make_params()
    optimizer = NpuFusedAdam(params, lr=0.1)
    set_grads(params, 0)

    def scarce(run, group):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(optimizer, "update", scarce)
    with pytest.raises(torch.OutOfMemoryError, match="cannot be repeated"):
        optimizer.step()


def test_an_interrupt_between_two_groups_counts_the_one_that_has_been_stepped(monkeypatch):
    params = make_params()
    optimizer = NpuFusedAdam([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    set_grads(params, 0)
    update = optimizer.update

    def interrupted(run, group):
        update(run, group)
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "update", interrupted)
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for i, (p, was) in enumerate(zip(params, before, strict=True)):
        stepped = i < 2
        assert torch.equal(p, was) is not stepped
        assert int(optimizer.state[p].get("step", 0)) == stepped
