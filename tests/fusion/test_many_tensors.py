# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is done to thousands of tensors in one call is what would be done to each."""

import weakref
from collections import defaultdict

import pytest
import torch
from devices import DEVICE, needs_extension
from torch import nn

from apex_npu import optimizers
from apex_npu._extension import extension
from apex_npu.fusion import storage, unfused
from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.storage import (
    SlotTable,
    WriteTable,
    any_grads,
    are_same,
    drop_grads,
    grads_of,
    has_values,
    hold_values,
    increment_versions,
    low_precision_of,
)


def versions_of(tensors):
    return [0 if tensor is None else tensor._version for tensor in tensors]


FUNCTIONS = [name for name in storage.__all__ if name in globals()]


@pytest.fixture(autouse=True, params=[storage, unfused], ids=["used here", "without the extension"])
def _implementation(request, monkeypatch):
    if request.param is unfused and request.node.get_closest_marker("skipif"):
        pytest.skip("tests the extension")
    for name in FUNCTIONS:
        monkeypatch.setitem(globals(), name, getattr(request.param, name))


def make(count=50):
    return [nn.Parameter(torch.full((3,), float(i), device=DEVICE)) for i in range(count)]


def test_versions_grow_by_one_each():
    params = make()
    params[3].detach().add_(1)
    before = [p._version for p in params]
    increment_versions(params)
    assert [p._version for p in params] == [version + 1 for version in before]
    increment_versions([])


def test_gradients_are_dropped_and_freed():
    params = make()
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    gone, kept = weakref.ref(params[0].grad), params[2].grad
    drop_grads(params)
    assert all(p.grad is None for p in params)
    assert gone() is None
    assert kept.tolist() == [1, 1, 1]


@pytest.mark.parametrize("replaced", [False, pytest.param(True, marks=needs_extension)])
def test_a_gradient_may_take_the_list_with_it_when_it_dies(replaced):
    params = make()
    for p in params:
        p.grad = torch.ones_like(p)
    grads, gone = [torch.zeros_like(p) for p in params], weakref.ref(params[-1])
    weakref.finalize(params[5].grad, params.clear)
    del p
    if replaced:
        extension.set_grads(params, grads)
    else:
        drop_grads(params)
    assert gone() is None


@needs_extension
def test_gradients_are_set_and_former_ones_freed():
    params = make()
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    gone, grads = weakref.ref(params[0].grad), [torch.full_like(p, 2.0) for p in params]
    extension.set_grads(params, grads)
    assert are_same([p.grad for p in params], grads)
    assert gone() is None


def test_tensors_of_inference_mode_have_no_version_to_grow():
    with torch.inference_mode():
        tensor = torch.zeros(2, device=DEVICE)
    counted = torch.zeros(2, device=DEVICE)
    increment_versions([tensor, counted])
    assert counted._version == 1


def test_gradients_are_found():
    params = make()
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    grads = grads_of(params)
    assert all(grad is p.grad for grad, p in zip(grads, params, strict=True))
    assert grads[1] is None


def test_one_gradient_is_found_wherever_it_is():
    params = make()
    assert not any_grads(params)
    assert not any_grads([])
    for i in (0, 17, 49):
        params[i].grad = torch.ones_like(params[i])
        assert any_grads(params)
        assert any_grads(tuple(params))
        params[i].grad = None
        assert not any_grads(params)


def test_writes_are_counted_and_recorded_in_one_call():
    params, table = make(6), WriteTable()
    table.add(params)
    with torch.no_grad():
        params[2].add_(1)
    params[4].data = params[4].data.clone()
    versions = [p._version for p in params]
    assert table.write(params) == [2, 4]
    assert [p._version for p in params] == [version + 1 for version in versions]
    assert table.written(params) == []
    assert table.write(params) == []


@pytest.mark.skipif(extension is None, reason="Python knows addresses alone")
def test_other_memory_at_the_same_address_is_a_write():
    """An allocator gives the memory of a tensor that was replaced to the next one."""
    array = torch.zeros(6).numpy()
    param, table = nn.Parameter(torch.from_numpy(array)), WriteTable()
    table.note([param])
    param.data = torch.from_numpy(array)
    assert table.written([param]) == [0]
    table.note([param], [0])
    param.data = param.data.view(2, 3).view(6)  # the same memory
    assert table.written([param]) == []


def test_tensors_that_share_a_counter_are_not_written_by_what_counts_for_another():
    """As parameters that a script has made of views of one tensor."""
    base, table = torch.zeros(8, device=DEVICE), WriteTable()
    params = [base[:4], base[4:]]
    table.note(params)
    for _ in range(2):
        table.write(params)
        assert table.written(params) == []
    base.add_(1)
    assert table.written(params) == [0, 1]


def test_tensors_are_where_they_were_with_the_shape_that_they_had():
    sizes = [(), (1,), (2, 3), (3, 2), (4, 1, 2), (0,), (2, 3)]
    tensors = [torch.zeros(size, device=DEVICE) for size in sizes]
    tensors[-1] = torch.zeros(3, 2, device=DEVICE).t()
    table = SlotTable(tensors)
    assert table.broken(tensors) == []
    others = [t.view(t.shape) for t in tensors]
    assert table.broken(others) == []
    others[0], others[2], others[3] = tensors[0].view(1), tensors[2].view(3, 2), tensors[3].view(6)
    others[1], others[6] = tensors[1].clone(), tensors[6].as_strided((2, 3), (3, 1))
    assert table.broken(others) == [0, 1, 2, 3, 6]


@needs_extension
def test_views_that_are_lost_and_kept():
    params = make(6)
    buffer = FlatBuffer(6 * 48, torch.float32, torch.device(DEVICE))
    views = buffer.views_like([torch.empty(3, device="meta") for _ in params], [48 * i for i in range(6)])
    table = SlotTable(views)
    assert extension.lost_and_kept(table, views, params) == ([], [])
    params[0].grad = views[0]
    params[2].grad = views[1]  # another parameter's
    name = views[3]
    views[4].data = torch.zeros(3, device=DEVICE)
    assert extension.lost_and_kept(table, views, params) == ([4], [1, 3])
    del name
    params[2].grad = None
    assert extension.lost_and_kept(table, views, params) == ([4], [])


def test_gradients_of_any_kind_are_zeroed_as_by_zero_():
    params = [nn.Parameter(torch.empty(4, 6, device=DEVICE)) for _ in range(40)]
    kinds = [
        lambda: None,
        lambda: torch.full((4, 6), float("nan"), device=DEVICE),
        lambda: torch.ones(6, 4, device=DEVICE).t(),
        lambda: torch.ones(4, 12, device=DEVICE)[:, ::2],
        lambda: torch.ones(1, 6, device=DEVICE).expand(4, 6),
        lambda: torch.eye(4, 6, device=DEVICE).to_sparse(),
    ]
    for i, p in enumerate(params):
        p.grad = kinds[i % len(kinds)]()
    params[1].grad.requires_grad_()
    grads, versions = grads_of(params), versions_of(grads_of(params))
    optimizers.NpuFusedSGD(params, lr=0.1).zero_grad(set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
    assert not any(grad.requires_grad or grad.to_dense().any() for grad in grads if grad is not None)
    assert all(
        now > before for now, before, grad in zip(versions_of(grads), versions, grads, strict=True) if grad is not None
    )


def test_zeroing_does_not_write_around_a_gradient():
    memory = torch.ones(300, device=DEVICE)
    param = nn.Parameter(torch.empty(100, device=DEVICE))
    param.grad = memory[100:200]
    optimizers.NpuFusedSGD([param], lr=0.1).zero_grad(set_to_none=False)
    assert memory.tolist() == [1.0] * 100 + [0.0] * 100 + [1.0] * 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_gradients_are_zeroed_whole(dtype):
    params = [nn.Parameter(torch.empty(n, dtype=dtype, device=DEVICE)) for n in (1, 100_003, 0, 1 << 15)]
    for p in params:
        p.grad = torch.full_like(p, -2.0)
    optimizers.NpuFusedSGD(params, lr=0.1).zero_grad(set_to_none=False)
    for p in params:
        assert torch.equal(p.grad, torch.zeros_like(p))


@needs_extension
def test_a_combined_buffer_that_a_script_has_gets_the_zeros():
    params = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2)]
    optimizer = optimizers.NpuFusedSGD(params, lr=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    buffer = optimizer.get_optimizer_combined_grads()[0]
    for p in params:
        p.grad = p.grad.clone()
    optimizer.zero_grad(set_to_none=False)
    assert not buffer.any()
    buffer.add_(1.0)
    optimizer.step()
    assert not any(p.any() for p in params)


def test_low_precision_is_found():
    tensors = [torch.ones(1, dtype=d) for d in (torch.float16, torch.float32, torch.bfloat16, torch.int8)]
    assert low_precision_of(tensors * 10) == [i for i in range(40) if i % 4 in (0, 2)]


def test_the_very_objects_are_looked_for():
    value = torch.ones(2)
    dicts = [{"a": value, "b": 1} for _ in range(40)]
    keys, values = ["a"] * 40, [value] * 40
    assert hold_values(dicts, keys, values)
    assert hold_values([], [], [])
    dicts[39]["a"] = value.clone()  # equal, but another
    assert not hold_values(dicts, keys, values)
    del dicts[39]["a"]
    assert not hold_values(dicts, keys, values)
    assert hold_values(dicts[:39], keys[:39], values[:39])


def test_a_dict_has_the_very_same_values_in_order():
    first, second = torch.ones(2), torch.ones(2)
    entries = defaultdict(dict, {"a": first, 1: second})
    assert has_values(entries, [first, second])
    assert has_values({}, [])
    for others in ([second, first], [first], [first, second, first], [first, first], []):
        assert not has_values(entries, others)
    del entries["a"]
    assert has_values(entries, [second])


def test_lists_are_the_same_with_the_very_same_items_in_order():
    params = make()
    assert are_same(params, list(params))
    assert are_same(tuple(params), params)
    assert are_same(nn.ParameterList(params), params)
    assert are_same([], [])
    assert not are_same(params, params[:-1])
    assert not are_same(params[:-1], params)
    assert not are_same(params, params[::-1])
    assert not are_same([*params[:-1], params[-1].detach()], params)


def test_gradients_that_change_are_told_from_those_that_move():
    params, table = make(9), WriteTable()
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    params[7].grad = torch.eye(3, device=DEVICE)[0].to_sparse()
    with torch.inference_mode():
        params[8].grad = torch.ones_like(params[8])
    versions = versions_of(grads_of(params[:8]))
    table.note_grads(params)
    assert versions_of(grads_of(params[:8])) == [
        v if p.grad is None else v + 1 for v, p in zip(versions, params[:8], strict=True)
    ]
    assert table.changed_grads(params) == ([], [])
    params[0].grad = torch.ones_like(params[0])
    params[2].grad = params[2].grad.clone()
    params[3].grad.zero_()
    params[4].grad = None
    params[5].grad = params[5].grad.view(3)
    params[6].grad.data = params[6].grad.data.clone()
    params[7].grad.mul_(2)
    assert table.changed_grads(params) == ([0, 3, 7], [2, 6])
    table.note_grads(params)
    assert table.changed_grads(params) == ([], [])
    drop_grads(params)
    assert table.changed_grads(params) == ([], [])


def test_gradients_that_share_a_counter_are_not_changed_by_what_counts_for_another():
    """As those that a script has made of views of one flat tensor."""
    params, flat, table = make(2), torch.zeros(6, device=DEVICE), WriteTable()
    for p, grad in zip(params, flat.chunk(2), strict=True):
        p.grad = grad
    table.note_grads(params)
    assert table.changed_grads(params) == ([], [])
    flat.add_(1)
    assert table.changed_grads(params) == ([0, 1], [])


@needs_extension
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: extension.increment_versions([1]), TypeError, "expected a tensor at index 0, got int"),
        (lambda: extension.drop_grads(iter([])), TypeError, ""),
        (lambda: extension.set_grads([torch.ones(1)], []), ValueError, "expected one gradient per tensor, got 0 and 1"),
        (lambda: extension.WriteTable().changed_grads(make(1)), ValueError, "expected 0 parameters, got 1"),
        (lambda: extension.lost_and_kept(SlotTable([]), [], make(1)), ValueError, "expected 0 views, .* got 0 and 1"),
        (lambda: extension.lost_and_kept(SlotTable([]), make(1), make(1)), ValueError, "expected 0 views, .* got 1"),
        (lambda: extension.hold_values([{}], [], []), ValueError, "must have one length"),
        (lambda: extension.hold_values([1], ["a"], [2]), TypeError, "expected dicts"),
        (lambda: extension.hold_values([{}], [[]], [2]), TypeError, "unhashable"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
