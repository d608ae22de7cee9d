# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gathering gradients: values, dtypes, strides, and what counts as not finite."""

import math

import pytest
import torch
from devices import DEVICE
from torch.testing._internal.two_tensor import TwoTensor  # a subclass that has no memory but that of two inside

from apex_npu.ops import accumulate_, gather, unscale_grads
from apex_npu.ops.gather import gather_, gathers_in_one_pass

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(3, 5), (), (0,), (17,), (2, 3, 4), (40_000,)]


def make(dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_widened_then_multiplied_then_rounded_once(source, target):
    grads = make(source)
    slots = [torch.empty(g.shape, dtype=target, device=DEVICE) for g in grads]
    found_inf = torch.zeros(1, device=DEVICE)
    gather_(slots, grads, 1 / 128, found_inf)
    wide = torch.float64 if target == torch.float64 else torch.float32
    for slot, grad in zip(slots, grads, strict=True):
        expected = (grad.to(wide) / 128).to(target)
        if gathers_in_one_pass(slot) or target == wide:
            assert torch.equal(slot, expected)
        else:  # copied first: a second rounding, in the slots' dtype
            torch.testing.assert_close(slot, expected, rtol=torch.finfo(target).eps, atol=1e-7)
    assert found_inf.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 3, -1])
def test_every_element_is_looked_at(dtype, bad, where):
    grads = make(dtype)
    grads[where].view(-1)[grads[where].numel() // 2] = bad
    slots = [torch.empty_like(g) for g in grads]
    found_inf = torch.zeros(1, device=DEVICE)
    gather_(slots, grads, 0.5, found_inf)
    assert found_inf.item() == 1
    gather_(slots, make(dtype), 0.5, found_inf)
    assert found_inf.item() == 1  # what was found earlier stays
    gather_(slots, grads)  # without found_inf


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("source", DTYPES)
def test_gradients_are_added_in_float32_and_the_sums_are_checked(source, bad):
    grads = make(source)
    grads[4] = grads[4].transpose(0, 2).contiguous().transpose(0, 2)  # other strides than its slot
    slots = [torch.full(g.shape, 0.25, device=DEVICE) for g in grads]
    expected = [slot.double() + grad.float().double() * 2.0**-10 for slot, grad in zip(slots, grads, strict=True)]
    if bad is not None:
        slots[3][11] = bad
        expected[3][11] = bad
    found_inf = torch.zeros(1, device=DEVICE)
    accumulate_(slots, grads, 2.0**-10, found_inf)
    for slot, want in zip(slots, expected, strict=True):
        torch.testing.assert_close(slot.double(), want, rtol=2.0**-23, atol=0.0, equal_nan=True)
    assert bool(found_inf) is (bad is not None)
    accumulate_(slots, grads, 2.0**-10, None)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the C++ kernel")
def test_gradients_are_added_to_float32_alone():
    slot, grad = torch.zeros(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)
    if gathers_in_one_pass(slot):
        with pytest.raises(TypeError, match="added to float32, got"):
            accumulate_([slot], [grad], 1.0, None)
    assert not slot.any()


def test_the_largest_finite_numbers_are_finite():
    for dtype in DTYPES:
        grads = [torch.full((9,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE) for _ in range(100)]
        found_inf = torch.zeros(1, device=DEVICE)
        gather_([torch.empty_like(g) for g in grads], grads, 0.5, found_inf)
        assert found_inf.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inv_scale", [1.0, 0.5])
def test_numbers_whose_norm_is_out_of_range_are_finite(dtype, inv_scale):
    large = torch.finfo(dtype).max / 2
    grads = [torch.full((3, 5), large, dtype=dtype, device=DEVICE)[:, ::2] for _ in range(2)]
    found_inf = torch.zeros(1, device=DEVICE)
    unscale_grads(grads, inv_scale, found_inf)
    assert found_inf.item() == 0
    assert all(grad.eq(large * inv_scale).all() for grad in grads)
    grads[1][2, 1] = -math.inf
    unscale_grads(grads, inv_scale, found_inf)
    assert found_inf.item() == 1


@pytest.mark.parametrize("inv_scale", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_torchs_kernel_lacks(monkeypatch, dtype, inv_scale):
    """bfloat16 and float64 on cuda: multiplied on lists, and checked by the largest number of each tensor."""
    monkeypatch.setattr(gather, "_checks_by_norms", lambda grad: True)

    def refuse(*_):
        raise NotImplementedError("not implemented for this dtype")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    largest = torch.finfo(dtype).max
    grads = [*make(dtype), torch.full((3, 5), largest, dtype=dtype, device=DEVICE)[:, ::2]]
    expected = [(grad.double() * inv_scale).to(dtype) for grad in grads]
    found_inf = torch.zeros(1, device=DEVICE)
    gather.unscale_dense(grads, inv_scale, found_inf)
    assert found_inf.item() == 0  # they are looked at before they are multiplied
    for grad, want in zip(grads, expected, strict=True):
        assert torch.equal(grad, want)
    for bad in (math.inf, -math.inf, math.nan):
        for i, grad in enumerate(make(dtype)):
            if grad.numel():
                grads = make(dtype)
                grads[i].view(-1)[-1] = bad
                found_inf.zero_()
                gather.unscale_dense(grads, inv_scale, found_inf)
                assert found_inf.item() == 1
    gather.unscale_dense(make(dtype), inv_scale, found_inf)
    assert found_inf.item() == 1  # what was found earlier stays
    gather.unscale_dense([torch.ones(0, dtype=dtype, device=DEVICE)], inv_scale, found_inf.zero_())
    assert found_inf.item() == 0


def test_other_strides_match_element_by_element():
    grads = [
        torch.randn(4, 6).t(),
        torch.randn(1, 3).expand(5, 3),
        torch.randn(8, 6)[::2, 1:4],
        torch.randn(2, 3, 4, 4),
    ]
    grads = [g.to(DEVICE) for g in grads]
    slots = [torch.empty(g.shape, device=DEVICE) for g in grads[:3]]
    slots.append(torch.empty(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last))
    gather_(slots, grads, 2.0)
    for slot, grad in zip(slots, grads, strict=True):
        assert torch.equal(slot, grad * 2)


def test_small_float16_gradients_survive():
    grads = [torch.full((3,), 6e-8, dtype=torch.float16, device=DEVICE)]  # float16's smallest number
    slots = [torch.empty(3, device=DEVICE)]
    gather_(slots, grads, 2.0**-16)
    torch.testing.assert_close(slots[0], grads[0].float() * 2.0**-16, rtol=0, atol=0)


def test_bad_input():
    if DEVICE.type != "cpu":
        pytest.skip("checks of the C++ kernel")
    if not gathers_in_one_pass(torch.ones(1)):
        pytest.skip("there is no extension")
    from apex_npu._extension import extension

    ones = torch.ones(3)
    for slots, grads, error, message in (
        ([ones], [], ValueError, "one gradient per slot"),
        ([ones], [torch.ones(4)], ValueError, r"gradient 0 has shape \[4\], its slot \[3\]"),
        ([ones], [torch.ones(3, dtype=torch.int32)], TypeError, "got torch.FloatTensor and torch.IntTensor at index 0"),
        ([torch.ones(6)[::2]], [ones], ValueError, "slot 0 must fill its memory"),
        ([ones], [ones.to_sparse()], TypeError, "must be dense"),
        ([ones], [TwoTensor(ones, ones)], TypeError, "with memory of their own"),
    ):
        with pytest.raises(error, match=message):
            extension.gather_cpu(slots, grads, 1.0, None, False)


@pytest.mark.parametrize("inv_scale", [1.0, 0.5])
@pytest.mark.parametrize("bad", [False, True])
def test_subclasses_are_unscaled_by_their_own_code(inv_scale, bad):
    wrapped = TwoTensor(torch.ones(3, device=DEVICE), torch.full((3,), 2.0, device=DEVICE))
    plain = torch.full((2,), math.inf if bad else 4.0, device=DEVICE)
    found_inf = torch.zeros(1, device=DEVICE)
    unscale_grads([plain, wrapped], inv_scale, found_inf)
    assert wrapped.a.tolist() == [inv_scale] * 3
    assert wrapped.b.tolist() == [2 * inv_scale] * 3
    assert found_inf.item() == bad


def test_taking_gradients_in_one_call():
    if not gathers_in_one_pass(torch.ones(1, device=DEVICE)):
        pytest.skip("there is no one-pass kernel here")
    from apex_npu._extension import extension

    take_grads = extension.take_grads_cpu

    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float16, *2 * [torch.float32])]
    params[0].grad = torch.full((3,), 8.0, dtype=torch.float16)
    params[1].grad = torch.full((3,), 16.0)
    slots = [torch.zeros(3) for _ in params]
    assert take_grads(params, slots, 0.5, None) is None
    assert params[0].grad is slots[0]
    assert params[1].grad is slots[1]
    assert params[2].grad is None
    assert [s.tolist() for s in slots] == [[4.0] * 3, [8.0] * 3, [0.0] * 3]
    # An unsuitable one is refused before anything is written.
    params[2].grad = torch.ones(3).to_sparse()
    assert take_grads(params, slots, 0.5, None) == 2
    assert slots[1].tolist() == [8.0] * 3
    params[2].grad = TwoTensor(torch.ones(3), torch.ones(3))
    assert take_grads(params, slots, 0.5, None) == 2
    assert slots[1].tolist() == [8.0] * 3
