# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""apex.parallel's names: in one process here, in several by parallel_worker.py."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from torch import nn

from apex_npu.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
WORKER = Path(__file__).with_name("parallel_worker.py")


@needs_gloo
@pytest.mark.slow
def test_in_two_processes():
    averages = ["gradients", "unused", "accumulation", "amp_levels"]
    processes.run(WORKER, *averages, "reductions", "flat_calls", "groups", "sync_batchnorm")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shared_param": True}, "shared_param is not supported; use delay_allreduce=True"),
        ({"retain_allreduce_buffers": True}, "retain_allreduce_buffers is not supported"),
        ({"allreduce_communicators": ([], [])}, "allreduce_communicators is not supported; pass process_group"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "leave one of them out"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "leave one of them out"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_served_are_refused_before_any_communication(options, said):
    with pytest.raises(ValueError, match=said):
        DistributedDataParallel(nn.Linear(2, 2), **options)


# --------------------------------------------------------------------------------------------------- SyncBatchNorm


def test_alone_it_is_batch_norm():
    torch.manual_seed(0)
    x = torch.randn(8, 5, 6, device=DEVICE)
    for training in (True, False):
        norm, plain = SyncBatchNorm(5).to(DEVICE).train(training), nn.BatchNorm1d(5).to(DEVICE).train(training)
        torch.testing.assert_close(norm(x), plain(x))
        assert norm.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(norm.running_var, plain.running_var)


def test_channels_may_be_last_and_an_addend_and_relu_follow():
    x, z = torch.randn(4, 6, 6, 5, device=DEVICE), torch.randn(4, 6, 6, 5, device=DEVICE)
    norm = SyncBatchNorm(5, channel_last=True, fuse_relu=True).to(DEVICE)
    expected = nn.BatchNorm2d(5).to(DEVICE)(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(norm(x, z), torch.relu(expected + z))
    flat = SyncBatchNorm(5, channel_last=True).to(DEVICE)
    torch.testing.assert_close(flat(x[0, 0]), nn.BatchNorm1d(5).to(DEVICE)(x[0, 0]))


def test_conversion_keeps_parameters_buffers_and_mode():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Sequential(nn.BatchNorm2d(4, affine=False, eps=0.5), nn.InstanceNorm2d(4)),
        nn.BatchNorm2d(4, track_running_stats=False),
    ).to(DEVICE)
    model[2][0].eval()
    before = model.state_dict(keep_vars=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    converted = convert_syncbn_model(model, process_group=None)
    assert converted is model
    kinds = [type(m) for m in (model[1], model[2][0], model[2][1], model[3])]
    assert kinds == [SyncBatchNorm, SyncBatchNorm, nn.InstanceNorm2d, SyncBatchNorm]
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert (model[1].momentum, model[2][0].eps, model[2][0].training, model[1].training) == (None, 0.5, False, True)
    assert not model[3].track_running_stats
    model(x).sum().backward()
    weight = model[1].weight.detach().clone()
    model[1].weight.grad.fill_(1.0)
    optimizer.step()  # made before the conversion
    torch.testing.assert_close(model[1].weight, weight - 0.1)
    assert convert_syncbn_model(model)[1] is model[1]
    alone = convert_syncbn_model(nn.BatchNorm1d(3), channel_last=True)
    assert isinstance(alone, SyncBatchNorm)
    assert alone.channel_last


def test_a_lazy_batch_norm_is_not_converted():
    with pytest.raises(RuntimeError, match="has no number of channels yet"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
