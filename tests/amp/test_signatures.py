# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments and results: methods of a script's own optimizer, arguments that torch accepts."""

import warnings

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE, communication_backend
from small_programs import (
    LEVELS,
    Weights,
    X,
    assert_values,
    backward,
    initialize,
    levels,
    start,
    train_step,
    vector,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host


@pytest.mark.skipif(DEVICE.type != "cpu", reason="arrays are in the host's memory")
def test_an_array_over_a_parameter_follows_it_or_something_is_said():
    param = nn.Parameter(torch.full((3,), 10.0))
    array = param.detach().numpy()
    optimizer = optimizers.NpuFusedSGD([param], lr=1.0)
    param.sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    assert said or array.tolist() == param.tolist()


@pytest.mark.parametrize("steps", [0, 1])
@levels(LEVELS)
def test_torch_gets_and_sets_states_by_the_models_names(level, steps):
    model, optimizer = start(Weights(10.0), level=level, momentum=0.5)
    train_step(model, optimizer)
    saved_model, saved = get_state_dict(model, optimizer)
    assert_values([saved["state"]["w.0"]["momentum_buffer"]], torch.tensor(X))
    amp.shutdown()
    model, optimizer = start(Weights(3.0), level=level, momentum=0.5)
    for _ in range(steps):
        train_step(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=saved_model, optim_state_dict=saved)
    assert_values([optimizer.state[p]["momentum_buffer"] for p in model.parameters()], torch.tensor(X))
    assert_values(model.state_dict().values(), 10.0 - torch.tensor(X))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.skipif(
    DEVICE.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"),
    reason="fully_shard of this torch does not run on a CPU",
)
def test_o0_beside_fully_shard():
    dist.init_process_group(communication_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 1, bias=False).to(DEVICE)
        before = model.weight.detach().clone()
        fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)))
        model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O0")
        backward(model(vector(*X)).sum(), optimizer)
        optimizer.step()
        torch.testing.assert_close(model.weight.full_tensor(), before - vector(*X))
    finally:
        amp.shutdown()
        dist.destroy_process_group()
