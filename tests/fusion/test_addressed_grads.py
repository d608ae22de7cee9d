# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that a kernel of Triton's takes into slots by a table of addresses: on a GPU, else on the CPU, interpreted.

What is expected is computed in plain torch from gradients as they were.
"""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from triton_interpreter import DEVICE, INTERPRETED, mend

from apex_npu._extension import extension
from apex_npu.distributed.part_sums import clip_grad_norm_
from apex_npu.fusion import FlatGrads, flat_grads, fuse, grad_slots
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, NONE
from apex_npu.ops import gather, wide_dtype
from apex_npu.ops.gather import AddressTable
from apex_npu.ops.triton_kernels import plans

if extension is None:
    pytest.skip("it is the extension that finds addresses", allow_module_level=True)

# numpy, in which the interpreter computes, warns of every nan; kernels do not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")

# More than one chunk, few elements, one, none, and one element more than a multiple of 16.
SHAPES = [(4100,), (3,), (7, 5), (), (0,), (2, 3, 4, 5), (129,)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALLER = 2.0**-3


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The dtypes that have been launched for. A CPU is given what a GPU has, in place of the extension's kernels."""
    dtypes = []
    take = plans.take_addressed

    def noted(flat, chunks, addresses, dtype, *args, **options):
        dtypes.append(dtype)
        return take(flat, chunks, addresses, dtype, *args, **options)

    monkeypatch.setattr(plans, "take_addressed", noted)
    monkeypatch.setattr(FlatGrads, "gathers_all", True)
    monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", 1 << 60)
    if INTERPRETED:
        mend(monkeypatch)
        for module in (flat_grads, gather):
            monkeypatch.setattr(module, "takes_addresses", lambda slot: True)
        monkeypatch.setattr(flat_grads, "gathers_in_one_pass", lambda slot: False)
    return dtypes


def make_params(dtype=torch.float32, shapes=SHAPES):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE)) for shape in shapes]


def slots_of(params):
    (group,) = fuse(params)
    return group.grads


def randn(like, seed, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return values.to(DEVICE, dtype or like.dtype)


def give(params, dtype=None):
    """A gradient for each, in memory of its own; what they are."""
    for i, p in enumerate(params):
        p.grad = randn(p, i, dtype)
    return [p.grad.clone() for p in params]


def times(grad, factor, dtype=None):
    """The product, rounded once from what is computed in."""
    dtype = dtype or grad.dtype
    return (grad.to(wide_dtype(dtype)) * factor).to(dtype)


def check(params, wanted, grads):
    """``params`` have the gradients ``wanted``, to the bit, in their slots, with zeros between these."""
    for p, want in zip(params, wanted, strict=True):
        assert (p.grad is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(p.grad, want, rtol=0, atol=0, equal_nan=True)
    assert set(grads.states()) <= {IN_BUFFER, NONE}
    assert not grads.flat[grads.memory.find_padding()].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_copies_multiplies_and_checks(dtype, launched):
    params = make_params(dtype)
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    before = give(params)
    grads.unscale_(SMALLER / 3, found_inf)
    check(params, [times(grad, SMALLER / 3) for grad in before], grads)
    assert launched == [dtype]
    assert not found_inf.any()


@pytest.mark.parametrize("bad", [None, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_clipping_writes_gradients_in_slots_and_nothing_between_them(dtype, bad, monkeypatch):
    params = make_params(dtype)
    grads = slots_of(params)
    give(params)
    params[1].grad = None
    if bad is not None:
        params[0].grad[7] = bad
    before = [None if p.grad is None else p.grad.clone() for p in params]
    grads.gather()
    monkeypatch.setattr(FlatGrads, "gathers_all", False)
    versions = [p.grad._version for p in params if p.grad is not None]
    monkeypatch.setattr(grads.memory, "clear_padding", None)  # a launch of its own
    norm = clip_grad_norm_([grads], [], 2.0)
    total = torch.cat([grad.double().flatten() for grad in before if grad is not None]).norm()
    torch.testing.assert_close(norm.double(), total, rtol=1e-6, atol=0, equal_nan=True)
    coefficient = (2.0 / (norm + 1e-6)).clamp(max=1.0).to(dtype)
    check(params, [None if grad is None else times(grad, coefficient.to(wide_dtype(dtype))) for grad in before], grads)
    written = [p.grad._version > v for p, v in zip((p for p in params if p.grad is not None), versions, strict=True)]
    assert written == [p.numel() > 0 for p in params if p.grad is not None]


def test_gradients_that_could_not_be_taken_stay(monkeypatch):
    """A GPU has no memory for the addresses: the gradients are as they were, and are taken later."""
    params = make_params()
    grads, before = slots_of(params), give(params)

    def no_memory(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(AddressTable, "take", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            grads.gather()
    assert set(grads.states()) == {ELSEWHERE}
    params[1].grad = before[1] = None
    grads.gather()
    check(params, before, grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_keeps_the_bits(dtype, launched):
    params = make_params(dtype)
    grads = slots_of(params)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(i)
        limits = torch.iinfo(bits)
        drawn = torch.randint(limits.min, limits.max, p.shape, generator=generator, dtype=bits)  # nan of all kinds
        p.grad = drawn.view(dtype).to(DEVICE) if drawn.dim() else torch.ones_like(p)
    before = [p.grad.clone() for p in params]
    assert grads.gather() == bytes([IN_BUFFER]) * len(params)
    for p, grad in zip(params, before, strict=True):
        assert torch.equal(p.grad.reshape(-1).view(bits), grad.reshape(-1).view(bits))
    assert launched == [dtype]


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_widened_before_they_are_divided(source, launched):
    params = make_params(source)
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    grads.widen()
    for i, p in enumerate(params):
        p.grad = randn(p, i) * 1e-4
    kept = [p.grad.clone() for p in params]
    grads.take(2.0**-16, found_inf)
    check(params, [times(grad, 2.0**-16, torch.float32) for grad in kept], grads)
    assert launched == [source]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [(0, 0), (0, 2047), (0, 2048), (0, 4099), (2, 34), (3, 0), (6, 128)])
def test_an_element_that_is_not_finite_is_found_wherever_it_is(place, bad):
    params = make_params(torch.float16)
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    give(params)
    params[place[0]].grad.view(-1)[place[1]] = bad
    grads.unscale_(SMALLER, found_inf)
    assert found_inf.tolist() == [1.0]
    found = params[place[0]].grad.view(-1)[place[1]]
    assert found.isnan() if math.isnan(bad) else found == bad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", range(9))
def test_addresses_that_are_aligned_to_less_and_what_is_beside_them(begin, dtype, launched):
    """Nan before and after each gradient, with which pieces of 16 bytes may be read, is neither checked nor copied."""
    params = make_params(dtype, [(4100,), (37,), (3,)])
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    before = give(params)
    for p in params:
        around = torch.full((p.numel() + 16,), math.nan, dtype=dtype, device=DEVICE)
        around[begin : begin + p.numel()] = p.grad
        p.grad = around[begin : begin + p.numel()]
    grads.unscale_(SMALLER, found_inf)
    check(params, [times(grad, SMALLER) for grad in before], grads)
    assert not found_inf.any()
    assert launched == [dtype]


def test_slots_that_begin_anywhere(launched):
    params = make_params(shapes=[(5,), (300,)])
    grads = flat_grads.FlatGrads(params, [0, 5], 305)
    before = give(params)
    found_inf = torch.zeros(1, device=DEVICE)
    grads.unscale_(0.5, found_inf)
    assert torch.equal(grads.flat, torch.cat(before) * 0.5)
    assert launched == [torch.float32]


def test_layouts(launched):
    """Alike ones are taken as they are in memory; others are copied by their indices."""
    params = make_params(shapes=[(2, 3, 4, 5), (2, 3, 4, 5), (6, 4), (6, 4), (7,)])
    params[0] = nn.Parameter(params[0].detach().to(memory_format=torch.channels_last))
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    give(params)
    for i in (0, 1):
        params[i].grad = params[i].grad.to(memory_format=torch.channels_last)
    params[3].grad = params[3].grad.t().contiguous().t()
    params[4].grad = torch._neg_view(params[4].grad)
    before = [p.grad.resolve_neg().clone() for p in params]
    places = [p.grad.data_ptr() - 4 * grads.offsets[i] for i, p in enumerate(params)]
    read = torch.zeros(len(params), dtype=torch.int64)
    found = grads.memory.slots.addresses(params, grads.views, 0, None, grads.flat, read)
    assert found[1:] == ([1, 3, 4], torch.float32, True)
    assert read.tolist() == [places[0], 0, places[2], 0, 0]
    grads.unscale_(SMALLER, found_inf)
    check(params, [times(grad, SMALLER) for grad in before], grads)
    assert params[0].grad.is_contiguous(memory_format=torch.channels_last)
    assert not found_inf.any()
    assert launched == [torch.float32]


def test_what_is_copied_by_its_indices_is_checked_too():
    params = make_params(shapes=[(6, 4), (7,)])
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    give(params)
    params[0].grad = params[0].grad.t().contiguous().t()
    params[0].grad[5, 3] = math.inf
    grads.unscale_(0.5, found_inf)
    assert found_inf.tolist() == [1.0]


def test_gradients_in_other_slots_and_one_that_two_parameters_have(launched):
    params = make_params(shapes=[(40,), (40,), (40,), (40,)])
    grads = slots_of(params)
    give(params)
    grads.gather()
    first, second = params[0].grad, params[1].grad
    params[0].grad, params[1].grad = second, first
    shared = params[2].grad = params[3].grad = randn(params[3], 9)
    wanted = [times(grad, 0.5) for grad in (second, first, shared, shared)]
    grads.unscale_(0.5, None)
    check(params, wanted, grads)


def test_what_is_looked_at_has_slots_and_room():
    params = make_params()
    grads = slots_of(params)
    known, flat, views = grads.memory.slots, grads.flat, grads.views
    room = torch.zeros(len(params), dtype=torch.int64)
    with pytest.raises(ValueError, match="and a slot for each, got 5 of 5 from slot 3 on, of 7"):
        known.addresses(params[2:], views[2:], 3, None, flat, room)
    with pytest.raises(ValueError, match="expected room for 7 numbers, and views, got 6"):
        known.addresses(params, views, 0, None, flat, room[1:])
    with pytest.raises(IndexError):
        known.addresses(params, views, 0, [7], flat, room)


@pytest.mark.parametrize("spoil", [lambda g: g.double(), lambda g: g.to_sparse()], ids=["dtype", "sparse"])
def test_what_cannot_be_fused_is_refused_before_anything_is_written(spoil, launched):
    params = make_params(shapes=[(5,), (6,), (7,)])
    grads = slots_of(params)
    give(params)
    if spoil(params[1].grad).layout == torch.strided:
        params[1] = nn.Parameter(params[1].detach())
        params[1].grad_dtype = None
        grads = slots_of(params)
        give(params)
    params[1].grad = spoil(params[1].grad)
    held = [p.grad for p in params]
    with pytest.raises(RuntimeError, match=r"parameter 1 .* cannot\s*be fused"):
        grads.unscale_(0.5, None)
    assert [p.grad is grad for p, grad in zip(params, held, strict=True)] == [True] * 3
    assert launched == []
    assert not grads.flat.any()


def test_memory_of_gradients_is_let_go_of_and_views_stay_the_same():
    params = make_params(shapes=[(5,), (6,)])
    grads, views = slots_of(params), []
    for _ in range(2):
        give(params)
        gone = [weakref.ref(p.grad) for p in params]
        grads.unscale_(0.5, None)
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        views.append([id(p.grad) for p in params])
        for p in params:
            p.grad = None
    assert views[0] == views[1]


def test_a_capture_follows_no_addresses(monkeypatch, launched):
    params = make_params()
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    monkeypatch.setattr(flat_grads, "is_capturing", lambda: True)
    before = give(params)
    grads.unscale_(SMALLER, found_inf)
    check(params, [times(grad, SMALLER) for grad in before], grads)
    assert launched == []


def test_without_a_compiler_torch_copies(monkeypatch, launched):
    params = make_params()
    grads, found_inf = slots_of(params), torch.zeros(1, device=DEVICE)
    monkeypatch.setattr(plans, "take_addressed", lambda *_, **__: launched.append(None))
    for _ in range(2):
        before = give(params)
        grads.unscale_(SMALLER, found_inf)
        check(params, [times(grad, SMALLER) for grad in before], grads)
    assert launched == [None]


def test_some_slots(launched):
    params = make_params()
    grads = slots_of(params)
    before = give(params)
    params[2].grad = None
    assert grads.gather_times(0.5, range(1, 4)) == bytes([IN_BUFFER, NONE, IN_BUFFER])
    assert grads.gather(range(6, 7)) == bytes([IN_BUFFER])
    assert [state == IN_BUFFER for state in grads.states()] == [False, True, False, True, False, False, True]
    grads.gather()
    wanted = [times(grad, 0.5) if i in (1, 3) else grad for i, grad in enumerate(before)]
    check(params, [*wanted[:2], None, *wanted[3:]], grads)
    assert len(launched) == 3
