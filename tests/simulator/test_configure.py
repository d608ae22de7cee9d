# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Other chips' habits, full memory, and faults."""

from __future__ import annotations

import npu_simulator
import pytest
import torch
import torch_npu
from npu_simulator.control import Settings, current_settings
from torch import Tensor, nn

INF, NAN = float("inf"), float("nan")
MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)}


def flag(index: int = 0) -> bool:
    with torch.npu.device(index):
        return torch_npu.npu.get_npu_overflow_flag()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"saturate": True}, "saturate must be False, 'fp16' or 'all', got True"),
        ({"saturate": 0}, "saturate must be"),
        ({"saturate": "fp32"}, "got 'fp32'"),
        ({"fused_foreach": 1}, "fused_foreach must be True or False, got 1"),
        ({"padded_format": None}, "padded_format must be"),
        ({"memory_limit": 1.5}, "memory_limit must be a number of bytes or None, got 1.5"),
        ({"memory_limit": -1}, "memory_limit must be >= 0 bytes, got -1"),
    ],
)
def test_bad_settings(bad: dict, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        npu_simulator.configure(**bad)
    assert current_settings() == Settings()


def test_configure_returns_what_was() -> None:
    assert npu_simulator.configure(saturate="fp16", memory_limit=1 << 30) == Settings()
    before = npu_simulator.configure()
    assert before == Settings(saturate="fp16", memory_limit=1 << 30)
    npu_simulator.configure(**vars(before))
    assert current_settings() == before


# ---- saturation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "dtypes"),
    [(False, ()), ("fp16", (torch.float16,)), ("all", (torch.float16, torch.bfloat16, torch.float32))],
)
@pytest.mark.parametrize("dtype", MAX, ids=str)
def test_saturation(mode: str, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
    npu_simulator.configure(saturate=mode)
    x = torch.tensor([MAX[dtype], -MAX[dtype], 1.0, 0.0], dtype=dtype)
    assert torch.npu.utils.is_support_inf_nan() is (mode is False)
    assert (torch.npu.utils.get_soc_version() >= 220) is (mode is False)  # as MMEngine asks
    if mode:
        torch_npu.npu.clear_npu_overflow_flag()
    doubled, quotient = (x.npu() * 2).cpu(), (x.npu() / 0).cpu()
    if dtype in dtypes:
        assert doubled.tolist() == [MAX[dtype], -MAX[dtype], 2, 0]
        assert quotient.tolist() == [MAX[dtype], -MAX[dtype], MAX[dtype], 0]
        assert flag()
    else:
        torch.testing.assert_close(doubled, x * 2)
        torch.testing.assert_close(quotient, x / 0, equal_nan=True)
        assert not (mode and flag())


def test_saturation_in_place_views_and_copies() -> None:
    npu_simulator.configure(saturate="fp16")
    top = MAX[torch.float16]

    def full() -> Tensor:
        torch_npu.npu.clear_npu_overflow_flag()
        return torch.full((4, 4), top, dtype=torch.float16, device="npu")

    x = full()
    x.mul_(2)
    assert flag()
    assert x.eq(top).all()
    x = full()
    x.t()[1:, ::2].add_(top)  # a strided view of it
    assert flag()
    assert x.eq(top).all()
    x = full()
    torch.mul(x, x, out=torch.empty(4, 4, dtype=torch.float16, device="npu"))
    assert flag()
    x = full()
    y = x.float() * 2  # fp32 has room for it
    assert not flag()
    half = y.half()  # and fp16 has not
    assert flag()
    assert half.eq(top).all()
    full()
    torch.tensor([INF, NAN], dtype=torch.float16).npu()  # copies from the host are not checked
    assert not flag()


def test_overflow_flag_is_sticky_and_per_device() -> None:
    npu_simulator.configure(saturate="fp16")
    for index in range(2):
        with torch.npu.device(index):
            torch_npu.npu.clear_npu_overflow_flag()
    big = torch.full((3,), 6e4, dtype=torch.float16, device="npu:1")
    big * 2
    assert (flag(0), flag(1)) == (False, True)
    big * 0
    assert flag(1)
    torch_npu.npu.clear_npu_overflow_flag()  # of npu:0
    assert flag(1)
    with torch.npu.device(1), npu_simulator.count() as n:
        assert torch_npu.npu.utils.npu_check_overflow(big)  # clears it, too
        assert not torch_npu.npu.utils.get_npu_overflow_flag()
    assert n.syncs == 2


def test_flag_in_backward() -> None:
    npu_simulator.configure(saturate="fp16")
    torch_npu.npu.clear_npu_overflow_flag()
    w = torch.full((3,), 100.0, dtype=torch.float16, device="npu", requires_grad=True)
    (w * 1000).sum().backward(torch.tensor(1000.0, dtype=torch.float16, device="npu"))
    assert flag()
    assert w.grad is not None
    assert w.grad.eq(MAX[torch.float16]).all()


def test_chips_with_inf_have_no_flag() -> None:
    with pytest.raises(RuntimeError, match="npu_check_overflow"):
        torch_npu.npu.get_npu_overflow_flag()
    with pytest.warns(UserWarning, match="does nothing"):
        torch_npu.npu.clear_npu_overflow_flag()
    assert torch.npu.utils.npu_check_overflow(torch.tensor([INF], device="npu"))
    assert not torch.npu.utils.npu_check_overflow(torch.ones(3, device="npu"))
    assert torch.npu.utils.npu_check_overflow(NAN)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_limit() -> None:
    keep = torch.ones(1000, device="npu")
    used = torch.npu.memory_allocated()
    npu_simulator.configure(memory_limit=used + 10_000)
    assert torch.npu.mem_get_info() == (10_000, used + 10_000)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 12000 bytes on npu:0"):
        torch.empty(3000, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        keep.repeat(3)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(3000).npu()
    with pytest.raises(torch.OutOfMemoryError):
        torch.randn(30, 30, device="npu") @ torch.randn(30, 100, device="npu")
    part = torch.empty(2000, device="npu")
    torch.empty(2000, device="npu:1")  # the limit is per device
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2000, device="npu")
    del part
    torch.empty(2000, device="npu")
    npu_simulator.configure()
    assert keep.sum().item() == 1000
    assert torch.npu.memory_allocated() == used


def test_more_memory_than_the_host_has() -> None:
    before = torch.npu.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="which the host does not have"):
        torch.empty(1 << 50, device="npu")
    assert torch.npu.memory_allocated() == before


def test_memory_figures() -> None:
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    x = torch.empty(256, device="npu")
    y = torch.mm(x.view(16, 16), x.view(16, 16))
    assert torch.npu.memory_allocated() == before + 2048
    del y
    assert torch.npu.memory_allocated() == before + 1024
    assert torch.npu.max_memory_allocated() == before + 2048
    assert torch.npu.memory_stats()["allocated_bytes.all.peak"] == before + 2048
    assert torch.accelerator.memory_allocated() == before + 1024
    x.resize_(512)
    assert torch.npu.memory_allocated() == before + 2048
    x.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == before


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_formats_are_plain_by_default() -> None:
    x = torch.ones(5, 7, device="npu")
    assert (torch_npu.get_npu_format(x), torch_npu.get_storage_size(x)) == (2, 35)
    assert torch_npu.get_storage_size(x[1:]) == 35  # of the memory, as where this is real
    assert torch_npu.npu_format_cast(x, 29) is x
    assert torch_npu.get_npu_format(torch.ones(1, 2, 3, 4, device="npu")) == 0


def test_padded_format() -> None:
    npu_simulator.configure(padded_format=True)
    x = torch.arange(35.0, device="npu").view(5, 7)
    nz = torch_npu.npu_format_cast(x, torch_npu.Format.FRACTAL_NZ)
    assert (torch_npu.get_npu_format(nz), torch_npu.get_storage_size(nz)) == (29, 256)
    assert nz.untyped_storage().nbytes() == 1024
    torch.testing.assert_close(nz.cpu(), x.cpu(), rtol=0, atol=0)
    torch.testing.assert_close((nz.t() @ nz).cpu(), x.cpu().t() @ x.cpu())
    back = torch_npu.npu_format_cast(nz, 2)
    assert (torch_npu.get_npu_format(back), torch_npu.get_storage_size(back)) == (2, 35)
    image = torch_npu.npu_format_cast(torch.ones(2, 3, 5, 5, device="npu"), 3)
    assert torch_npu.get_storage_size(image) == 2 * 3 * 256
    with pytest.raises(ValueError, match=r"acl_format .*got 99"):
        torch_npu.npu_format_cast(x, 99)
    with pytest.raises(RuntimeError, match="must be on npu, got one on cpu"):
        torch_npu.get_npu_format(torch.ones(3))


def test_padded_parameters_train() -> None:
    npu_simulator.configure(padded_format=True)
    layer, plain = nn.Linear(7, 5).npu(), nn.Linear(7, 5).npu()
    plain.load_state_dict(layer.state_dict())
    torch_npu.npu_format_cast_(layer.weight, 29)
    assert isinstance(layer.weight, nn.Parameter)
    assert torch_npu.get_npu_format(layer.weight) == 29
    x = torch.randn(3, 7, device="npu")
    for module in (layer, plain):
        optimizer = torch.optim.Adam(module.parameters())
        torch_npu.npu_format_cast(module(x), 29).sum().backward()  # a cast has a gradient
        optimizer.step()
    torch.testing.assert_close(layer.weight, plain.weight, rtol=0, atol=0)
    assert torch_npu.get_storage_size(layer.weight) == 256


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_fail_after_raises_once_and_changes_nothing() -> None:
    x = torch.zeros(3, device="npu")
    npu_simulator.fail_after(2)
    x.add_(1)
    x.view(-1)  # no launch
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"NPU function error: mul_\.Tensor failed on npu:0"):
        x.mul_(5)
    x.add_(1)
    assert x.tolist() == [3, 3, 3]


def test_fail_after_in_backward_and_step() -> None:
    w = nn.Parameter(torch.ones(3, device="npu"))
    optimizer = torch.optim.SGD([w], lr=1.0)
    loss = (w * w).sum()
    npu_simulator.fail_after(0)
    with pytest.raises(RuntimeError, match="NPU function error"):
        loss.backward()
    loss = (w * w).sum()
    loss.backward()
    npu_simulator.fail_after(0)
    with pytest.raises(RuntimeError, match="NPU function error"):
        optimizer.step()
    assert w.tolist() == [1, 1, 1]
    npu_simulator.fail_after(0)
    npu_simulator.fail_after(None)
    optimizer.step()
    assert w.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("bad", "error"), [(-1, "must be >= 0, got -1"), (1.5, "must be an int or None"), (True, "int")]
)
def test_fail_after_bad_arguments(bad: object, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        npu_simulator.fail_after(bad)
