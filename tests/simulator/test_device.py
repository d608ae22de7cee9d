# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The device in torch: tensors, random numbers, saving, and that nothing leaks."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from pathlib import Path

import npu_simulator
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_tensor_names() -> None:
    x = torch.ones(3).npu()
    assert x.is_npu
    assert x.device == torch.device("npu", 0)
    assert x.type() == "torch.npu.FloatTensor"
    assert not torch.ones(3).is_npu
    assert x.npu() is x
    assert x.npu(1).device.index == 1
    assert torch.ones(3, device="npu").get_device() == 0
    assert x.untyped_storage().device.type == "npu"
    assert x.untyped_storage().is_npu
    assert torch.ones(3).untyped_storage().npu().device.type == "npu"
    assert repr(x) == "tensor([1., 1., 1.], device='npu:0')"
    with torch.device("npu:1"):
        assert torch.ones(2).device.index == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("FloatTensor", torch.float32), ("HalfTensor", torch.float16), ("BFloat16Tensor", torch.bfloat16),
     ("LongTensor", torch.int64), ("BoolTensor", torch.bool)],
)  # fmt: skip
def test_type_names(name: str, dtype: torch.dtype) -> None:
    cls = getattr(torch.npu, name)
    x = torch.ones(3, dtype=dtype, device="npu")
    assert isinstance(x, cls)
    assert x.type() == f"torch.npu.{name}"
    assert not isinstance(x.cpu(), cls)
    assert not isinstance(torch.ones(3, dtype=torch.int8, device="npu"), cls)
    assert isinstance(torch.ones(3).type(f"torch.npu.{name}"), cls)
    same(cls([1, 0, 1]), torch.tensor([1, 0, 1], dtype=dtype))
    assert cls(2, 3).shape == (2, 3)


def test_devices() -> None:
    npu = torch.npu
    assert (npu.is_available(), npu.device_count(), npu.current_device()) == (True, 2, 0)
    npu.set_device("npu:1")
    assert torch.ones(1, device="npu").device.index == 1
    npu.set_device(0)
    with npu.device(1):
        assert npu.current_device() == 1
        with npu.device_of(torch.ones(1, device="npu:0")):
            assert npu.current_device() == 0
        with npu.device(None):
            assert npu.current_device() == 1
    assert npu.current_device() == 0
    assert npu.get_device_name(0)
    with pytest.raises(ValueError, match="Expected an npu device"):
        npu.set_device("cpu")


def test_accelerator() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.device_count() == 2
    assert accelerator.current_accelerator() == torch.device("npu")
    accelerator.set_device_index(1)
    assert (accelerator.current_device_index(), torch.npu.current_device()) == (1, 1)
    accelerator.set_device_index(0)
    with npu_simulator.count() as n:
        accelerator.synchronize()
    assert n.syncs == 1
    assert accelerator.current_stream().device.type == "npu"


def test_streams_and_events() -> None:
    npu = torch.npu
    stream, default = npu.Stream(), npu.current_stream()
    assert default == npu.default_stream()
    start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    start.record()
    with npu.stream(stream):
        assert npu.current_stream() == stream
        x = torch.ones(3, device="npu") * 2
        x.record_stream(stream)
        end.record()
    assert npu.current_stream() == default
    default.wait_stream(stream)
    default.wait_event(end)
    end.synchronize()
    assert start.query()
    assert stream.query()
    assert start.elapsed_time(end) >= 0
    with npu.stream(npu.Stream(device=1)):
        assert npu.current_device() == 1
    assert npu.current_device() == 0
    with npu.stream(None):
        assert npu.current_stream() == default


# ---- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_indexing(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "npu"):
        x = torch.arange(24.0).view(4, 6).to(device, dtype)
        rows = torch.tensor([2, 0], device=device)
        taken = [
            x[1:, ::2],
            x[x > 5],
            x[[0, 2]],
            x[rows],
            x[..., None],
            x[rows, 1:3],
            x.T.contiguous(),
            x[::2].flatten(),
        ]
        x[x > 15] = 0
        x[0] = 7
        x[rows, 2] = 3
        x[:, 1:3] += 1
        x.index_add_(0, rows, torch.ones(2, 6, device=device, dtype=dtype))
        x.scatter_(1, torch.zeros(4, 1, dtype=torch.long, device=device), 9.0)
        x.t()[3].fill_(2)
        results.append([t.cpu() for t in (*taken, x, x.gather(1, rows.view(1, 2)), torch.nonzero(x))])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


RANDOM: dict[str, Callable[[str], Tensor]] = {
    "randn": lambda d: torch.randn(5, device=d),
    "normal_": lambda d: torch.empty(20, device=d).normal_(1, 2),
    "bernoulli": lambda d: torch.bernoulli(torch.full((9,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(5, device=d), 3),
    "dropout": lambda d: F.dropout(torch.ones(20, device=d), 0.5),
    "kaiming": lambda d: nn.init.kaiming_uniform_(torch.empty(4, 4, device=d)),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM.keys())
def test_random_numbers_are_the_cpus(draw: Callable[[str], Tensor]) -> None:
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(3)
        results.append(torch.stack([draw(device), draw(device)]))
    same(results[1], results[0])
    assert not torch.equal(results[1][0], results[1][1])


def test_generators() -> None:
    torch.manual_seed(3)
    want = torch.randn(3)
    torch.manual_seed(3)
    F.dropout(torch.randn(9, device="npu"))  # the device's numbers are not the host's
    same(torch.randn(3), want)
    torch.npu.manual_seed(3)
    same(torch.randn(3, device="npu"), want)
    torch.npu.manual_seed_all(3)
    same(torch.randn(3, device="npu:1"), want)
    generator = torch.Generator("npu").manual_seed(3)
    assert generator.device.type == "npu"
    same(torch.randn(3, device="npu", generator=generator), want)
    state = torch.npu.get_rng_state()
    x = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    same(torch.rand(3, device="npu"), x)
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.npu.set_rng_state(state)
        same(torch.rand(3, device="npu"), x)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.rand(3, device="npu", generator=torch.Generator())


def test_sparse() -> None:
    dense = torch.tensor([[0, 3.0, 0], [4, 0, 5]])
    for device in ("cpu", "npu"):
        coo = torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 2]], [3.0, 4.0, 5.0], (2, 3), device=device)
        assert coo.device.type == device
        for sparse in (
            coo,
            dense.to(device).to_sparse(),
            dense.to(device).to_sparse_csr(),
            dense.to_sparse().to(device),
        ):
            same(sparse.to_dense(), dense)
            same((sparse * 2).to_dense(), dense * 2)
            same((sparse + sparse).to_dense(), dense * 2)
            same(sparse @ torch.ones(3, 2, device=device), dense @ torch.ones(3, 2))
            same(sparse.cpu().to_dense(), dense)
            assert repr(sparse)
        twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), device=device)
        assert (twice.coalesce().values().tolist(), twice.is_coalesced()) == ([3.0], False)


def test_complex_views_and_conjugates() -> None:
    x = torch.randn(4)
    same(torch.fft.fft(x.npu()), torch.fft.fft(x))
    y = torch.fft.fft(x.npu()).conj()
    assert y.is_conj()
    same(y, torch.fft.fft(x).conj())
    same(y + 1, torch.fft.fft(x).conj() + 1)
    same(torch.view_as_real(y.resolve_conj()), torch.view_as_real(torch.fft.fft(x).conj().resolve_conj()))


def test_function_transforms_and_double_backward() -> None:
    x = torch.randn(3, 2, device="npu")
    same(torch.func.vmap(lambda row: row.sum())(x), torch.func.vmap(lambda row: row.sum())(x.cpu()))
    same(torch.func.grad(lambda t: t.sin().sum())(x), x.cos())
    same(torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1], x.cos())
    x.requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())
    assert torch.autograd.gradcheck(lambda t: (t.sin() * t).sum(), x.detach().double().requires_grad_())


# ---- data ------------------------------------------------------------------------------------------------------------


def test_pinned_memory_and_data_loader() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    data = torch.arange(8.0).view(4, 2)
    with npu_simulator.count() as n:
        batches = []
        for (batch,) in DataLoader(TensorDataset(data), 2, pin_memory=True, num_workers=1):
            assert batch.is_pinned()
            batches.append(batch.to("npu", non_blocking=True))
    assert (n.h2d, n.syncs) == (2, 0)
    same(torch.cat(batches), data)
    with pytest.raises(RuntimeError, match=r"[Oo]nly dense CPU tensors can be pinned|cannot pin"):
        torch.ones(3, device="npu").pin_memory()


def test_save_and_load() -> None:
    model = nn.Linear(3, 4).npu()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3).npu()).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = {None: "npu:0", "cpu": "cpu", "npu:1": "npu:1", "npu": "npu:0", torch.device("npu", 1): "npu:1"}
    for location, device in wanted.items():
        file.seek(0)
        state = torch.load(file, map_location=location)
        assert str(state["model"]["weight"].device) == device
        assert str(state["optimizer"]["state"][0]["exp_avg"].device) == device
        same(state["model"]["weight"], model.weight.detach())
    file.seek(0)
    moved = torch.load(file, map_location={"npu:0": "npu:1"})
    assert str(moved["model"]["bias"].device) == "npu:1"
    other = nn.Linear(3, 4)
    other.load_state_dict(moved["model"])
    same(other.weight, model.weight)


def test_resizing_and_setting() -> None:
    x = torch.arange(4.0, device="npu:1")
    x.resize_(6)
    assert (x[:4].tolist(), x.device.index) == ([0, 1, 2, 3], 1)
    x.untyped_storage().resize_(64)
    assert x.untyped_storage().nbytes() == 64
    y = torch.empty(0, device="npu:1").set_(x.untyped_storage(), 1, (2,))
    y.add_(10)
    assert x[:4].tolist() == [0, 11, 12, 3]
    y.set_()
    assert y.numel() == 0
    out = torch.empty(0, device="npu")
    assert torch.add(torch.ones(2, device="npu"), 1, out=out).tolist() == [2, 2]
    assert out.shape == (2,)


# ---- leaks and cost --------------------------------------------------------------------------------------------------


def test_a_thousand_steps_leak_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)).npu()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 1, 5, 5), torch.randint(0, 4, (4,))

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            with torch.autocast("npu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x.npu()), y.npu())
            loss.backward()
            optimizer.step()
            loss.item()
        optimizer.zero_grad()

    def figures() -> tuple[int, int]:
        gc.collect()
        return npu_simulator.live_storages(), torch.npu.memory_allocated()

    def resident_pages() -> int:
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) if statm.is_file() else 0  # reported on Linux alone

    steps(100)
    before, pages = figures(), resident_pages()
    steps(1000)
    assert figures() == before
    # 4 MiB: malloc may keep something, but a leak of one small object per operator would be a multiple.
    assert resident_pages() - pages < 1024
