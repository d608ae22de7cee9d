# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels read and write gradients where autograd left them: on a GPU, else on the CPU, interpreted.

What is expected is what the same kernels give for a copy of these gradients in slots, and float64 for the norm.
"""

import math

import pytest
import torch
from triton_cases import OPTIONS, Repeated, operands
from triton_interpreter import DEVICE, mend

from apex_npu import ops
from apex_npu._extension import extension
from apex_npu.ops import cuda, gather, grad_lists, segmented
from apex_npu.ops.triton_kernels import launches, plans

if extension is None:
    pytest.skip("it is the extension that lists gradients", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")

# More than one chunk, few elements, one, none, and one element more than a multiple of 16.
NUMELS = [4100, 3, 35, 1, 0, 120, 129]
ELEMENTWISE = ["sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_"]
THERE = torch.zeros((), device=DEVICE).device  # with its index
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch):
    mend(monkeypatch)


def offsets_of(numels, apart=32):
    """The first element of each slot, and how many there are."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 16) * 16 + apart
    return offsets, end


def listed(dtypes, wide=F32, begin=0, numels=NUMELS, missing=(), writable=False):
    """The operand of gradients amid nan, ``begin`` elements after an aligned address; they; and a dense copy."""
    offsets, total = offsets_of(numels)
    params = [torch.zeros(numel, dtype=wide, device=DEVICE) for numel in numels]
    dense, grads = torch.zeros(total, dtype=torch.float64), []
    for i, (p, offset) in enumerate(zip(params, offsets, strict=True)):
        if i in missing:
            continue
        values = torch.randn(numels[i], generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        around = torch.full((numels[i] + 24,), math.nan, dtype=dtypes[i % len(dtypes)], device=DEVICE)
        grad = around[begin : begin + numels[i]].copy_(values)
        # A parameter takes no gradient of another dtype from Python.
        extension.set_grads([p], [grad])
        grads.append(p.grad)
        dense[offset : offset + numels[i]] = grad.double().cpu()
    slots = extension.GradSlots([torch.empty_like(p, device="meta") for p in params], offsets, THERE)
    operand = slots.grad_list(params, 0, total, writable)
    grad_lists.ListedSlots(offsets, numels).add_addresses(operand)
    return operand, grads, dense.to(wide if len(set(dtypes)) > 1 else max(dtypes, key=lambda d: d.itemsize)).to(DEVICE)


@pytest.mark.parametrize("dtypes", [[F32], [F16], [F32, BF16]], ids=["wide", "narrow", "both"])
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_a_step_has_the_bits_of_one_of_gradients_in_slots(op, dtypes):
    grad, _, dense = listed(dtypes, begin=1 if op == "adam_" else 0)
    ours, theirs = ([None if a is None else a.to(DEVICE) for a in operands(op, dense.numel())] for _ in range(2))
    ours[1], theirs[1] = grad, dense.to(F32)
    inside = torch.zeros(dense.numel(), dtype=torch.bool, device=DEVICE)
    for offset, numel in zip(offsets_of(NUMELS)[0], NUMELS, strict=True):
        inside[offset : offset + numel] = True
    for args in (ours, theirs):
        getattr(ops, op).kernels["cuda"](*args, **OPTIONS[op], grad_scale=torch.full((1,), 3.0, device=DEVICE))
    for place, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        if place != 1 and got is not None:
            assert torch.equal(got[inside], want[inside])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_what_is_stepped_may_be_wider_than_all_that_is_listed(dtype):
    """Muon has the gradients of 16-bit parameters add to directions in float32."""
    grad, _, dense = listed([dtype], dtype)
    ours, theirs = ([a.to(DEVICE) for a in operands("sgd_", dense.numel())] for _ in range(2))
    ours[1], theirs[1] = grad, dense
    for args in (ours, theirs):
        args[0].zero_(), args[2].zero_()
        ops.sgd_.kernels["cuda"](*args, **OPTIONS["sgd_"])
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("begin", range(9))
@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64], ids=str)
def test_the_norm_is_of_what_is_listed_alone(dtype, begin):
    wide = dtype if dtype == torch.float64 else F32
    grad, _, dense = listed([dtype], wide, begin, missing=(2,))
    norm = segmented.norm.kernels["cuda"](grad)
    torch.testing.assert_close(norm.cpu(), dense.double().norm().to(wide).cpu(), rtol=torch.finfo(wide).eps, atol=0)


@pytest.mark.parametrize("factor", [2.0**-3 / 3, 1.0, torch.tensor(0.3, device=DEVICE)], ids=["number", "one", "there"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_gradients_are_multiplied_and_checked_where_they_are(dtype, bad, factor):
    grad, grads, _ = listed([dtype], dtype, begin=3, missing=(1,), writable=True)
    if bad is not None:
        grads[-1][-1] = bad
    wide = torch.float64 if dtype == torch.float64 else F32
    share = factor.to(wide) if isinstance(factor, torch.Tensor) else torch.tensor(factor, dtype=wide, device=DEVICE)
    wanted, versions = [(g.to(wide) * share).to(dtype) for g in grads], [g._version for g in grads]
    found_inf = torch.zeros(1, device=DEVICE)
    gather.scale_listed(grad, factor, found_inf)
    written = isinstance(factor, torch.Tensor) or factor != 1.0
    for got, want, version in zip(grads, wanted, versions, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert got._version == version + (written and got.numel() > 0)
        around = got.untyped_storage().nbytes() // got.itemsize
        whole = torch.empty(0, dtype=dtype, device=DEVICE).set_(got.untyped_storage(), 0, (around,))
        assert whole.isnan().sum() == around - got.numel() + got.isnan().sum()  # nothing beside it is written
    assert found_inf.item() == (bad is not None)


@pytest.mark.parametrize("dtypes", [[F16], [BF16], [F32, BF16]], ids=["half", "bfloat16", "both"])
@pytest.mark.parametrize("bad", [None, (0, 4099, math.nan), (6, 128, -math.inf), (3, 0, math.inf)])
def test_narrow_gradients_are_checked_where_they_are_in_one_launch(dtypes, bad, monkeypatch):
    monkeypatch.setattr(gather, "unscale_dense", None)  # how torch would check
    grad, grads, _ = listed(dtypes, begin=3, missing=(1,))
    if bad is not None:
        grads[bad[0] - (bad[0] > 1)][bad[1]] = bad[2]
    found_inf = torch.zeros(1, device=DEVICE)
    gather.scale_listed(grad, 1.0, found_inf)
    assert found_inf.item() == (bad is not None)


def test_two_narrow_dtypes_are_copied_before_they_are_read():
    grad, _, dense = listed([F16, BF16])
    assert grad_lists.addresses_of(grad) is None
    assert torch.equal(grad_lists.dense(grad), dense)
    ours, theirs = ([a.to(DEVICE) for a in operands("adagrad_", dense.numel())] for _ in range(2))
    ours[1], theirs[1] = grad, dense
    for args in (ours, theirs):
        ops.adagrad_.kernels["cuda"](*args, **OPTIONS["adagrad_"])
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, device=DEVICE)], ids=["number", "there"])
def test_without_triton_torch_does_the_same(factor, monkeypatch):
    monkeypatch.setattr(cuda, "_plans", lambda: None)
    grad, grads, dense = listed([F32], writable=True)
    wanted, found_inf = [g * 0.25 for g in grads], torch.zeros(1, device=DEVICE)
    step = [a.to(DEVICE) for a in operands("adagrad_", dense.numel())]
    beside = [a.clone() for a in step]
    step[1], beside[1] = grad, dense
    for args in (step, beside):
        ops.adagrad_.kernels["cuda"](*args, **OPTIONS["adagrad_"])
    assert torch.equal(step[0], beside[0])
    gather.scale_listed(grad, factor, found_inf)
    assert all(map(torch.equal, grads, wanted))
    assert not found_inf.any()


def test_what_is_listed_begins_where_slots_do():
    grad, *_ = listed([F32])
    begins, lengths = torch.tensor(offsets_of(NUMELS)[0]), torch.tensor(NUMELS)
    with pytest.raises(ValueError, match="only 2 of 6 gradients begin where slots do"):
        extension.grad_addresses(grad, begins[:2], lengths[:2], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected 7 numbers on the host, got 6"):
        extension.grad_addresses(grad, begins, lengths, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(TypeError, match="expected a list of gradients"):
        extension.listed_grads(torch.zeros(3))


def test_addresses_are_copied_to_the_device_where_they_have_changed():
    offsets, _ = offsets_of(NUMELS)
    slots, tables = grad_lists.ListedSlots(offsets, NUMELS), []
    first, second = (listed([F32], missing=(i,)) for i in (1, 2))
    for operand in (first[0], first[0], second[0], first[0]):
        slots.add_addresses(operand)
        tables.append(grad_lists.addresses_of(operand).on_device)
    assert tables[0] is tables[1]
    assert [table[1].item() == 0 for table in tables] == [True, True, False, True]
    assert torch.equal(tables[0], tables[3])


@pytest.mark.parametrize("dtypes", [[F32], [F32, F16], [F16, BF16]], ids=["wide", "both", "copied"])
def test_calls_that_are_repeated_read_the_gradients_of_each_step(dtypes):
    offsets, _ = offsets_of(NUMELS)
    slots, repeated = grad_lists.ListedSlots(offsets, NUMELS), Repeated(ops.adagrad_)
    ours, theirs = ([a.to(DEVICE) for a in operands("adagrad_", offsets_of(NUMELS)[1])] for _ in range(2))
    for begin in (0, 1, 3):
        grad, grads, dense = listed(dtypes, begin=begin)
        for g in grads:
            g.mul_(begin + 1)  # exact
        vars(grad).pop("addresses", None)
        slots.add_addresses(grad)
        ours[1], theirs[1] = grad, dense.to(F32) * (begin + 1)
        repeated(*ours, **OPTIONS["adagrad_"])
        ours[1] = None
        ops.adagrad_.kernels["cuda"](*theirs, **OPTIONS["adagrad_"])
    inside = torch.zeros(ours[0].numel(), dtype=torch.bool)
    for offset, numel in zip(offsets, NUMELS, strict=True):
        inside[offset : offset + numel] = True
    # Copied ones are stepped by the device's own kernel, which is the CPU's where Triton is interpreted.
    rtol = 1e-6 if dtypes == [F16, BF16] else 0
    torch.testing.assert_close(ours[0].cpu()[inside], theirs[0].cpu()[inside], rtol=rtol, atol=rtol)


def test_an_empty_slot_may_begin_where_another_does():
    """Parameters that are views of one flat tensor have no padding between their slots."""
    numels, offsets = [0, 16, 0, 48], [0, 0, 16, 16]
    params = [torch.zeros(numel, device=DEVICE) for numel in numels]
    for p in params:
        p.grad = torch.ones_like(p)
    slots = extension.GradSlots([torch.empty_like(p, device="meta") for p in params], offsets, THERE)
    operand = slots.grad_list(params, 0, 64, False)
    grad_lists.ListedSlots(offsets, numels).add_addresses(operand)
    found = grad_lists.addresses_of(operand).on_device
    assert found.tolist() == [0, params[1].grad.data_ptr(), 0, params[3].grad.data_ptr() - 4 * 16]
    assert segmented.norm.kernels["cuda"](operand).item() == 8.0


@pytest.fixture
def sent(monkeypatch):
    """As many items as tables that have been sent."""
    found, number_on = [], grad_lists.number_on
    monkeypatch.setattr(grad_lists, "number_on", lambda *args: found.append(1) or number_on(*args))
    return found


def test_addresses_that_a_device_has_are_not_sent_again(sent):
    tables, host = grad_lists.SentTables(), torch.zeros(3, dtype=torch.int64)
    for numbers, sends in [([1, 2, 3], 1), ([1, 2, 4], 1), ([1, 2, 3], 0), ([5, 6, 7], 1), ([1, 2, 4], 0)]:
        before = len(sent)
        host.copy_(torch.tensor(numbers))  # in the same memory, as in each step
        found = tables.on(THERE, host)
        assert len(sent) - before == sends
        assert found.tolist() == numbers
        assert found.device == THERE
    first = tables.on(THERE, host)
    for i in range(10):
        host.fill_(i)
        assert tables.on(THERE, host).tolist() == [i] * 3
    assert first.tolist() == [1, 2, 4]
    assert len(tables._sent) < 8  # others are forgotten


def slots_in_use():
    """Parameters, what lists their gradients as they are then, and the slots whose addresses it keeps."""
    offsets, total = offsets_of(NUMELS)
    params = [torch.zeros(numel, device=DEVICE) for numel in NUMELS]
    slots = extension.GradSlots([torch.empty_like(p, device="meta") for p in params], offsets, THERE)
    listed_slots = grad_lists.ListedSlots(offsets, NUMELS)

    def operand():
        found = slots.grad_list(params, 0, total, True)
        listed_slots.add_addresses(found)
        return found

    return params, operand, listed_slots


def test_gradients_in_turn_at_two_places_are_sent_once(sent):
    params, operand, _ = slots_in_use()
    places = [[torch.full_like(p, value) for p in params] for value in (1.0, 2.0)]
    for turn in range(6):
        for p, grad in zip(params, places[turn % 2], strict=True):
            p.grad = grad
        norm = segmented.norm.kernels["cuda"](operand())
        assert norm.item() == pytest.approx((1 + turn % 2) * math.sqrt(sum(NUMELS)))
    assert len(sent) == 2


def test_what_was_planned_for_slots_takes_other_gradients_flags_and_factors():
    params, list_gradients, listed_slots = slots_in_use()
    factors = [0.5, torch.full((), 3.0, device=DEVICE), 1.0, 0.25, torch.full((), 2.0, device=DEVICE), 1.0]
    for turn, factor in enumerate(factors + factors):
        bad = turn == 8
        for p in params:
            p.grad = torch.full_like(p, turn + 1.0)
        if bad:
            params[2].grad[-1] = math.inf
        operand = list_gradients()
        found_inf = None if turn in (3, 6) or isinstance(factor, torch.Tensor) else torch.zeros(1, device=DEVICE)
        assert cuda.run("scale_listed", operand, factor, found_inf)
        assert found_inf is None or bool(found_inf) is bad
        for p in params if not bad else params[:2]:
            assert torch.equal(p.grad, torch.full_like(p, (turn + 1.0) * float(factor)))
        norm = segmented.norm.kernels["cuda"](operand)
        clipped, coefficient = segmented.norm_to_clip.kernels["cuda"](operand, 1.0)
        wanted = math.inf if bad else (turn + 1.0) * float(factor) * math.sqrt(sum(NUMELS))
        assert norm.item() == clipped.item() == pytest.approx(wanted)
        assert coefficient.item() == pytest.approx(min(1.0, 1.0 / wanted))
    assert len([key for key in listed_slots._kept if key[0] in ("scale", "check")]) == 4


@pytest.mark.parametrize("factor", [1.0, 0.5, torch.full((), 0.5, device=DEVICE)], ids=["one", "number", "there"])
def test_a_flag_that_is_aligned_otherwise_has_another_kernel(factor, monkeypatch):
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches.Launch, "compile", lambda launch: launch)
    grad, _, _ = listed([F32], writable=True)
    flags = torch.zeros(2, device=DEVICE)
    kernels = [plans.scale_listed(grad, factor, flags[i : i + 1]).compile(DEVICE)[0] for i in (0, 0, 0, 1)]
    assert [kernel is kernels[0] for kernel in kernels] == [True, True, True, False]
