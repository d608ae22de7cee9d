# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The stand-in for torch_npu, and the redirection of cuda."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator

import pytest
import torch
import torch_npu
from npu_simulator import transfer
from torch import nn

DEVICE_NAMES = """
    is_available device_count current_device set_device device device_of synchronize current_stream default_stream
    set_stream stream Stream Event StreamContext empty_cache memory_allocated max_memory_allocated memory_reserved
    max_memory_reserved memory_cached max_memory_cached reset_peak_memory_stats reset_max_memory_allocated memory_stats
    memory_summary mem_get_info manual_seed manual_seed_all seed seed_all initial_seed get_rng_state set_rng_state
    get_rng_state_all set_rng_state_all default_generators is_initialized init _lazy_init get_device_name
    get_device_properties get_device_capability is_bf16_supported get_amp_supported_dtype amp utils
    set_compile_mode set_option FloatTensor HalfTensor get_npu_overflow_flag clear_npu_overflow_flag
"""


def test_modules() -> None:
    assert torch_npu.npu is torch.npu
    assert sys.modules["torch_npu"] is torch_npu
    assert "simulated" in torch_npu.__version__
    for name in ("npu", "npu.utils", "npu.amp", "npu.amp.grad_scaler", "npu.streams", "npu.random", "contrib"):
        module = importlib.import_module(f"torch_npu.{name}")
        assert module is importlib.import_module(f"torch_npu.{name}")
    assert importlib.import_module("torch.npu.amp") is torch.npu.amp
    with pytest.raises(ImportError):
        importlib.import_module("torch_npu.optim")  # libraries check for its presence
    for name in ("get_npu_format", "npu_format_cast", "npu_format_cast_", "get_storage_size", "empty_with_format"):
        assert callable(getattr(torch_npu, name))
    utils = importlib.import_module("torch_npu.npu.utils")
    for name in ("is_support_inf_nan", "get_npu_overflow_flag", "clear_npu_overflow_flag", "npu_check_overflow"):
        assert getattr(utils, name) is getattr(torch_npu.npu, name)


@pytest.mark.parametrize("name", DEVICE_NAMES.split())
def test_names(name: str) -> None:
    assert hasattr(torch.npu, name)


def test_amp() -> None:
    from torch_npu.npu.amp import GradScaler, autocast

    with autocast(dtype=torch.bfloat16):
        assert torch.mm(torch.ones(2, 2).npu(), torch.ones(2, 2).npu()).dtype == torch.bfloat16
    static = GradScaler(init_scale=8.0, dynamic=False)
    for value, scale in ((1.0, 8.0), (float("inf"), 8.0)):
        w = nn.Parameter(torch.ones(1, device="npu"))
        optimizer = torch.optim.SGD([w], lr=0.1)
        static.scale((w * value).sum()).backward()
        static.step(optimizer)
        static.update()
        assert static.get_scale() == pytest.approx(scale)


# ---- transfer_to_npu -------------------------------------------------------------------------------------------------


@pytest.fixture
def redirected() -> Iterator[None]:
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    yield
    transfer.redirect_cuda().undo()


@pytest.mark.usefixtures("redirected")
def test_cuda_means_npu() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    device = torch.device("cuda:1" if torch.cuda.is_available() else "cpu")
    assert (device.type, device.index) == ("npu", 1)
    assert isinstance(device, torch.device)
    x = torch.ones(3, device="cuda")
    assert x.is_cuda
    assert x.is_npu
    assert isinstance(x, torch.cuda.FloatTensor)
    for y in (
        torch.ones(3).cuda(),
        torch.ones(3).to("cuda"),
        torch.ones(3).to(torch.device("cuda")),
        torch.ones(3).to(device="cuda", dtype=torch.float16),
        torch.tensor([1.0], device="cuda:0"),
        torch.zeros_like(torch.ones(3), device="cuda"),
        torch.ones(3).new_zeros(2, device="cuda"),
        torch.ones(3).type("torch.cuda.HalfTensor"),
        nn.Linear(2, 2).cuda().weight,
        nn.Linear(2, 2).to("cuda").weight,
        nn.Linear(2, 2, device="cuda").weight,
    ):
        assert y.device == torch.device("npu", 0)
    assert torch.ones(3).cuda("cuda:1").device.index == 1
    assert torch.ones(3).cuda(1).device.index == 1
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 1
    torch.cuda.synchronize()
    torch.cuda.manual_seed_all(1)
    assert torch.Generator(device="cuda").device.type == "npu"
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.cuda.memory_allocated() > 0


@pytest.mark.usefixtures("redirected")
def test_cuda_amp_means_npu() -> None:
    from torch.cuda.amp import GradScaler, autocast

    x = torch.ones(2, 2, device="cuda")
    for context in (autocast(), torch.autocast("cuda"), torch.amp.autocast(device_type="cuda", dtype=torch.float16)):
        with context:
            assert (x @ x).dtype == torch.float16
    for scaler in (GradScaler(), torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler(enabled=False)):
        scaler.scale(x.sum())


@pytest.mark.usefixtures("redirected")
def test_load_to_cuda() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    for location in ("cuda:1", torch.device("cuda:1"), {"cpu": "cuda:1"}):
        file.seek(0)
        assert str(torch.load(file, map_location=location).device) == "npu:1"


def test_undo() -> None:
    before = {name: getattr(torch, name) for name in ("device", "ones", "Generator", "load")}
    before_cuda, to = dict(vars(torch.cuda)), torch.Tensor.to
    handle = transfer.redirect_cuda()
    assert transfer.redirect_cuda() is handle
    assert torch.device is not before["device"]
    handle.undo()
    assert {name: getattr(torch, name) for name in before} == before
    assert dict(vars(torch.cuda)) == before_cuda
    assert torch.Tensor.to is to
    assert torch.device("cuda").type == "cuda"
    assert not torch.cuda.is_available()
