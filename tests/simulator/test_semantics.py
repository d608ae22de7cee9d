# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a device refuses and what is counted, as on a real one."""

from __future__ import annotations

from collections.abc import Callable

import npu_simulator
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def ones(*size: int, device: str = "npu") -> Tensor:
    return torch.ones(*size, device=device)


MIXED: dict[str, Callable[[], object]] = {
    "add": lambda: ones(3) + torch.ones(3),
    "add, cpu first": lambda: torch.ones(3) + ones(3),
    "add_": lambda: ones(3).add_(torch.ones(3)),
    "add_ to cpu": lambda: torch.ones(3).add_(ones(3)),
    "add_ to cpu number": lambda: torch.ones(()).add_(ones(1)[0]),
    "out on npu": lambda: torch.add(torch.ones(3), torch.ones(3), out=ones(3)),
    "two devices": lambda: ones(3) + ones(3, device="npu:1"),
    "two devices, numbers": lambda: ones(()) + ones((), device="npu:1"),
    "cat": lambda: torch.cat([ones(3), torch.ones(3)]),
    "where": lambda: torch.where(torch.ones(3) > 0, ones(3), ones(3)),
    "linear": lambda: F.linear(ones(2, 3), torch.ones(4, 3)),
    "mm": lambda: torch.mm(ones(2, 2), torch.ones(2, 2)),
    "conv": lambda: nn.Conv2d(3, 3, 3)(ones(1, 3, 5, 5)),
    "embedding": lambda: F.embedding(torch.tensor([1]), ones(3, 3)),
    "gather": lambda: ones(3).gather(0, torch.tensor([0])),
    "masked_fill": lambda: ones(3).masked_fill(torch.ones(3) > 0, 1),
    "eq": lambda: ones(3) == torch.ones(3),
    "foreach": lambda: torch._foreach_add([ones(3)], [torch.ones(3)]),
    "batch_norm": lambda: nn.BatchNorm1d(3)(ones(2, 3)),
    "cross_entropy": lambda: F.cross_entropy(ones(2, 3), torch.tensor([0, 1])),
    "lstm": lambda: nn.LSTM(3, 4)(ones(2, 1, 3)),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED.keys())
def test_mixed_devices_are_refused(mix: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"same device|on the CPU|hidden tensor"):
        mix()


def test_refusal_names_devices_and_operator() -> None:
    with pytest.raises(RuntimeError, match=r"found at least two devices, npu:0 and cpu! \(aten::mm\)"):
        torch.mm(ones(2, 2), torch.ones(2, 2))


def test_numbers_and_host_indices_are_accepted() -> None:
    x = torch.arange(3.0, device="npu")
    assert (x + torch.tensor(2.0)).tolist() == [2, 3, 4]
    assert (torch.tensor(2.0) * x).tolist() == [0, 2, 4]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    assert x[torch.tensor([True, False, True])].tolist() == [0, 2]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.__array__(), torch.from_numpy])
def test_numpy_is_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(TypeError, match=r"npu|expected np\.ndarray"):
        read(ones(3))


@pytest.mark.parametrize("device", ["npu:2", "npu:7"])
def test_devices_that_do_not_exist_are_refused(device: str) -> None:
    for make in (lambda: torch.zeros(3, device=device), lambda: torch.zeros(3).to(device)):
        with pytest.raises(RuntimeError, match=r"npu:\d .*\[0, 2\)"):
            make()
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.npu.set_device(2)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.npu.memory_allocated(2)


def test_an_operator_that_cannot_work_names_itself() -> None:
    with pytest.raises(RuntimeError, match="to_mkldnn"):
        ones(3, 3).to_mkldnn()
    with pytest.raises(NotImplementedError, match="aten::_cudnn_init_dropout_state"):
        torch._cudnn_init_dropout_state(0.5, True, 0, dtype=torch.uint8, device="npu")


READS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "bool": (lambda x: bool(x[0]), 1),
    "float": (lambda x: float(x[0]), 1),
    "int": (lambda x: int(x[0]), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "to": (lambda x: x.to("cpu"), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "copy_": (lambda x: torch.empty(4).copy_(x), 1),
    "if": (lambda x: 1 if x[0] else 0, 1),
}


@pytest.mark.parametrize(("read", "copies"), READS.values(), ids=READS.keys())
def test_reads_count_as_copy_and_sync(read: Callable[[Tensor], object], copies: int) -> None:
    x = torch.arange(4.0, device="npu")
    with npu_simulator.count() as n:
        read(x)
    assert (n.launches, n.h2d, n.d2h, n.syncs) == (0, 0, copies, copies)


def test_operators_that_come_and_go() -> None:
    for arguments in ("Tensor x", "Tensor x, Tensor(a!) y"):
        library = torch.library.Library("npu_simulator_test", "FRAGMENT")
        library.define(f"twice({arguments}) -> Tensor")
        library.impl("twice", lambda x, *y: (y[0].add_(1) if y else x) * 2, "CPU")
        x, y = ones(2), ones(2)
        args = (x, y) if "y" in arguments else (x,)
        with npu_simulator.count() as n:
            assert torch.ops.npu_simulator_test.twice(*args).tolist() == [2.0 * len(args)] * 2
        assert n.by_op == {"npu_simulator_test::twice": 1}
        assert y.tolist() == [float(len(args))] * 2
        library._destroy()


def test_a_copy_to_pinned_memory_need_not_wait() -> None:
    x, pinned = ones(4), torch.empty(4, pin_memory=True)
    with npu_simulator.count() as n:
        pinned.copy_(x, non_blocking=True)
    assert (n.d2h, n.syncs) == (1, 0)


def test_syncs_of_shapes_that_depend_on_data() -> None:
    x = torch.arange(4.0, device="npu")
    mask, index = x > 1, torch.tensor([1], device="npu")
    for read, syncs in (
        (lambda: torch.nonzero(x), 1),
        (lambda: x[mask], 1),
        (lambda: x[index], 0),
        (lambda: mask[index], 0),
    ):
        with npu_simulator.count() as n:
            read()
        assert (n.syncs, n.d2h) == (syncs, 0)
    with npu_simulator.count() as n:
        assert torch.equal(x, x.clone())
    assert n.syncs == 1
    with npu_simulator.count() as n:
        torch.npu.synchronize()
        torch.npu.current_stream().synchronize()
    assert n.syncs == 2


def test_counts_of_launches_and_bytes() -> None:
    x = torch.ones(8, 8)
    with npu_simulator.count() as n:
        y = x.npu()
        assert (n.h2d, n.launches, n.bytes) == (1, 0, 256)
        z = y + y  # reads y once, writes z
        assert (n.launches, n.bytes) == (1, 256 + 512)
        z.add_(1)
        z.t()[3:].unsqueeze(0).expand(2, -1, -1).as_strided((2,), (1,))  # views are no launches
        torch.empty(5, device="npu")
        assert n.launches == 2
        z.clone()
        torch.mm(y, z)
    y.add_(1)  # outside
    assert n.launches == 4
    assert n.by_op == {"add.Tensor": 1, "add_.Tensor": 1, "copy_": 1, "mm": 1}
    assert (n.d2h, n.syncs) == (0, 1)  # x, which is in ordinary memory
    with npu_simulator.count() as n:
        x.pin_memory().to("npu", non_blocking=True)
    assert (n.h2d, n.syncs) == (1, 0)
    assert "launches=0" in repr(n)


def test_foreach_is_one_launch_per_tensor_unless_fused() -> None:
    tensors = [ones(n) for n in (3, 4, 5)]
    for fused, launches in ((False, 3), (True, 1), (False, 3)):
        npu_simulator.configure(fused_foreach=fused)
        with npu_simulator.count() as n:
            torch._foreach_add_(tensors, 1.0)
        assert n.launches == launches
        with npu_simulator.count() as n:
            norms = torch._foreach_norm(tensors)
        assert n.launches == launches
        found_inf, inv_scale = torch.zeros(1, device="npu"), torch.ones(1, device="npu")
        with npu_simulator.count() as n:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)
        assert n.launches == launches
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.tensor([3.0, 4.0, 5.0]).sqrt() * 4)


def test_training_step_has_one_sync() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(3, 4).npu(), torch.tensor([0, 1, 0]).npu()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    with npu_simulator.count() as n:
        step()
    assert (n.h2d, n.d2h, n.syncs) == (0, 1, 1)
    assert n.launches > 10


def test_copy_on_write_memory() -> None:
    x = ones(3)
    y = x._lazy_clone()
    assert torch._C._is_cow_tensor(y)
    y.add_(1)
    assert (x.tolist(), y.tolist()) == ([1, 1, 1], [2, 2, 2])
