# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""change_data_ptr and its kin."""

import copy
import gc
import io
import pickle

import pytest
import torch
from devices import needs_extension
from torch import nn

from apex_npu.fusion import is_slot, storage
from apex_npu.fusion.storage import change_data_ptr, storage_view

pytestmark = needs_extension


def test_dst_shows_src_at_the_offset():
    src = torch.arange(64.0)
    dst = nn.Parameter(torch.zeros(2, 3))
    kept = dst
    change_data_ptr(dst, src, 10)
    assert dst is kept
    assert dst.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert dst.data_ptr() == src.data_ptr() + 40
    src[10] = -1
    assert dst[0, 0].item() == -1


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8]
)
def test_any_dense_dtype(dtype):
    src = torch.arange(20).to(dtype)
    dst = torch.zeros(4, dtype=dtype)
    change_data_ptr(dst, src, 3)
    assert dst.tolist() == [3, 4, 5, 6]


def test_memory_outlives_src():
    src = torch.arange(1000.0)
    dst = torch.zeros(4)
    change_data_ptr(dst, src, 996)
    del src
    gc.collect()
    fill = [torch.full((1000,), 7.0) for _ in range(50)]  # would reuse freed memory
    assert dst.tolist() == [996, 997, 998, 999]
    del fill


def test_src_resized_or_repointed_keeps_slots_valid():
    src = torch.arange(16.0)
    dst = torch.zeros(4)
    change_data_ptr(dst, src, 4)
    src.resize_(100_000)
    gc.collect()
    fill = [torch.full((16,), 7.0) for _ in range(50)]
    assert dst.tolist() == [4, 5, 6, 7]
    del fill


def test_offset_counts_from_where_src_begins():
    base = torch.arange(32.0)
    dst = torch.zeros(2)
    change_data_ptr(dst, base[8:24], 4)
    assert dst.tolist() == [12, 13]


def test_every_alias_of_dst_follows():
    src = torch.arange(32.0)
    dst = torch.zeros(2, 3)
    alias = dst.view(-1)
    detached = dst.detach()
    change_data_ptr(dst, src, 5)
    assert alias.tolist() == [5, 6, 7, 8, 9, 10]
    assert detached.data_ptr() == dst.data_ptr()


def test_several_move_with_their_values_or_none_does():
    def tensors():
        return [torch.full((3,), 1.0), torch.arange(6.0).view(2, 3).t(), torch.empty(0)]

    buffer = torch.zeros(32)
    moved = tensors()
    views = [moved[1][0]]
    storage.move_storages([[moved[0]], [moved[1], *views], [moved[2]]], buffer, [4, 16, 0], copy_values=True)
    assert buffer[4:7].tolist() == [1, 1, 1]
    assert buffer[16:22].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(moved[1], tensors()[1])
    buffer[19] = 7.0
    assert views[0].tolist() == [0, 7]
    refused = tensors()
    places = [t.data_ptr() for t in refused]
    with pytest.raises(ValueError, match=r"elements \[30, 36\) are outside src"):
        storage.move_storages([[t] for t in refused], torch.zeros(32), [4, 30, 0], copy_values=True)
    assert [t.data_ptr() for t in refused] == places


def test_views_are_like_tensors():
    buffer = torch.arange(64.0)
    like = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(()), torch.zeros(0)]
    views = storage.storage_views(buffer, [10, 20, 30, 40], like)
    assert [(v.size(), v.stride()) for v in views] == [(t.size(), t.stride()) for t in like]
    assert [v.data_ptr() - buffer.data_ptr() for v in views[:3]] == [40, 80, 120]
    assert views[1].tolist() == [[20, 22, 24], [21, 23, 25]]


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(3, 4).t(), lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
)
def test_strides_stay(make):
    dst = make()
    stride = dst.stride()
    src = torch.arange(200.0)
    change_data_ptr(dst, src, 7)
    assert dst.stride() == stride
    assert torch.equal(dst, src[7 : 7 + dst.numel()].as_strided(dst.size(), stride))


@pytest.mark.parametrize("make", [lambda: torch.zeros(0), lambda: torch.zeros(()), lambda: torch.zeros(3, 0, 2)])
def test_empty_and_0_dim(make):
    dst = make()
    change_data_ptr(dst, torch.arange(8.0), 7)
    assert dst.sum().item() == (7 if dst.dim() == 0 else 0)


# Each row: what makes dst and src, offset, error, and what the message must name.
_REFUSED = {
    "dtype": (lambda: torch.zeros(2), lambda: torch.zeros(8, dtype=torch.float16), 0, TypeError, "one dtype"),
    "negative offset": (lambda: torch.zeros(2), lambda: torch.zeros(8), -1, ValueError, "must be >= 0 elements, got"),
    "over the end": (lambda: torch.zeros(2), lambda: torch.zeros(8), 7, ValueError, r"\[7, 9\) are outside src"),
    # Counting the offset in elements but the room in bytes would let this pass.
    "unit": (lambda: torch.zeros(1), lambda: torch.zeros(64), 64, ValueError, r"\[64, 65\) .* src, which has 64"),
    "extent, not numel": (
        lambda: torch.zeros(16)[::4], lambda: torch.zeros(8), 0, ValueError, r"elements \[0, 16\) are outside"),
    "range of a view": (lambda: torch.zeros(2), lambda: torch.zeros(32)[8:16], 7, ValueError, "which has 8"),
    "sparse": (lambda: torch.zeros(2).to_sparse(), lambda: torch.zeros(8), 0, TypeError, "must be dense"),
    "sparse src": (lambda: torch.zeros(2), lambda: torch.zeros(8).to_sparse(), 0, TypeError, "must be dense"),
    "device": (lambda: torch.zeros(2), lambda: torch.zeros(8, device="meta"), 0, ValueError, "one device"),
    "conjugate": (
        lambda: torch.zeros(2, dtype=torch.complex64).conj(), lambda: torch.zeros(8, dtype=torch.complex64), 0,
        TypeError, "resolve_conj"),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_refused_before_anything_moves(case):
    make_dst, make_src, offset, error, message = _REFUSED[case]
    dst, src = make_dst(), make_src()
    address = dst.data_ptr() if dst.layout == torch.strided else None
    with pytest.raises(error, match=message):
        change_data_ptr(dst, src, offset)
    assert address is None or dst.data_ptr() == address


def test_views_of_one_storage_are_refused():
    base = torch.arange(16.0)
    with pytest.raises(ValueError, match="views of one storage"):
        change_data_ptr(base, base.view(4, 4), 0)


def test_borrowed_memory_is_refused():
    owner = torch.zeros(8)
    borrowed = torch.tensor([]).set_(
        torch._C._construct_storage_from_data_pointer(owner.data_ptr(), torch.device("cpu"), 32), 0, (8,), (1,)
    )
    with pytest.raises(ValueError, match="must own its memory"):
        change_data_ptr(torch.zeros(2), borrowed, 0)


def test_fake_tensors_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(8)
    with pytest.raises(TypeError, match="plain tensor"):
        change_data_ptr(torch.zeros(2), fake, 0)


def test_int64_offsets_on_meta():
    src = torch.empty(2**31 + 16, device="meta")
    dst = torch.empty(16, device="meta")
    change_data_ptr(dst, src, 2**31)
    with pytest.raises(ValueError, match=r"elements \[2147483649, 2147483665\) are outside src"):
        change_data_ptr(dst, src, 2**31 + 1)


def test_copy_on_write_source_and_destination():
    base = torch.arange(8.0)
    src = torch._lazy_clone(base)
    dst = torch._lazy_clone(torch.zeros(4))
    change_data_ptr(dst, src, 2)
    dst.add_(100)
    assert base.tolist() == list(range(8))
    assert src.tolist() == [0, 1, 102, 103, 104, 105, 6, 7]


def test_saved_pickled_and_copied_alone():
    buffer = torch.arange(100_000.0)
    param = nn.Parameter(torch.zeros(3))
    change_data_ptr(param, buffer, 5)
    saved = io.BytesIO()
    torch.save(param, saved)
    assert saved.tell() < 10_000
    saved.seek(0)
    assert torch.load(saved, weights_only=True).tolist() == [5, 6, 7]
    assert len(pickle.dumps(param)) < 10_000
    twin = copy.deepcopy(param)
    twin.data.fill_(-1)
    assert param.tolist() == [5, 6, 7]
    view = storage_view(buffer, 50, (2,), (1,))
    saved = io.BytesIO()
    torch.save(view, saved)
    assert saved.tell() < 10_000


def test_share_memory():
    buffer = torch.arange(8.0)
    dst = torch.zeros(3)
    change_data_ptr(dst, buffer, 1)
    dst.share_memory_()  # moves it out of the buffer, values intact
    assert dst.is_shared()
    assert dst.tolist() == [1, 2, 3]
    assert buffer.tolist() == list(range(8))


def test_storage_view_has_a_storage_of_its_own():
    buffer = torch.arange(24.0)
    view = storage_view(buffer, 4, (2, 3), (1, 2))
    assert view.untyped_storage().nbytes() == 6 * 4
    assert view.tolist() == [[4, 6, 8], [5, 7, 9]]
    view.mul_(10)
    assert buffer[4].item() == 40
    with pytest.raises(ValueError, match="outside src"):
        storage_view(buffer, 20, (5,), (1,))


def test_is_slot():
    buffer, dst = torch.zeros(8), torch.zeros(2)
    assert not is_slot(dst)
    change_data_ptr(dst, buffer, 0)
    assert is_slot(dst)
    gc.collect()
    assert is_slot(dst.detach()[1:])
    assert not is_slot(dst.clone())


def test_autograd_goes_on():
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    buffer = torch.zeros(8)
    buffer[1:3] = weight.detach()
    change_data_ptr(weight, buffer, 1)
    (weight**2).sum().backward()
    assert weight.grad.tolist() == [4, 6]
    torch.optim.SGD([weight], lr=1.0).step()
    assert buffer[1:3].tolist() == [-2, -3]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.data.t(), id="transposed"),
        pytest.param(lambda p: p.data.view(2, 8), id="another shape"),
        pytest.param(lambda p: p.data.view(torch.bfloat16)[:, :4], id="another dtype"),
        pytest.param(lambda p: p.data[:3], id="fewer"),
        pytest.param(lambda p: p.data.clone(), id="elsewhere"),
    ],
)
def test_slot_table_notices_all_that_makes_up_a_place(change):
    params = [nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]
    table = storage.SlotTable(params)
    former = params[1].data
    params[1].data = change(params[1])
    assert table.broken(params) == [1]
    params[1].data = former
    assert table.broken(params) == []


def test_slot_table_does_not_mind_what_is_no_place():
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))]
    table = storage.SlotTable(params)
    params[0].requires_grad_(False)
    assert table.broken(params) == []
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert table.broken(params) == []
    assert storage.SlotTable([]).broken([]) == []
