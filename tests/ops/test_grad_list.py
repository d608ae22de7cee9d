# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients at arbitrary addresses as one operand of the C++ kernels: bit-identical to gradients in one buffer."""

import gc
import math
import weakref

import pytest
import torch
from devices import DEVICE
from kernel_cases import ADAM, BF16, F16, F32, F64, MIXES, RULES, covered, name_of, operands_for, segments_of
from torch import nn

from apex_npu import ops, optimizers
from apex_npu._extension import extension
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, NONE, InPlace

pytestmark = [
    pytest.mark.skipif(extension is None, reason="there is no extension"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels for the cpu"),
]

NUMELS = [1, 15, 16, 17, 0, 511, 513, 41 * 123, 40_000, 512, 3]
GAPS = [0, 40, 1, 0, 7, 33, 0, 48, 500, 0, 9]
NO_GRADIENT = {2, 6}


def offsets_of(numels, gaps):
    offsets, end = [], 0
    for numel, gap in zip(numels, gaps, strict=True):
        offsets.append(end)
        end += numel + gap
    return offsets, end


def place(grads, offsets, numel, dtype, *, writable=True):
    """``grads``, None where there is none, as an operand."""
    params = [nn.Parameter(torch.empty(0 if g is None else g.numel(), dtype=dtype)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        set_grad(p, g)
    slots = extension.GradSlots([p.detach() for p in params], offsets, torch.device("cpu"))
    return slots.grad_list(params, 0, numel, writable)


def set_grad(param, grad):
    """Of any dtype: Python refuses one that is not the parameter's at that time."""
    dtype = param.dtype
    if grad is not None:
        param.data = param.data.to(grad.dtype)
    param.grad = grad
    param.data = param.data.to(dtype)


def scattered(flat, dtypes):
    """Tensors of their own for parts of ``flat``, of ``dtypes`` in turn; what is in none of them becomes 0 there."""
    offsets, numel = offsets_of(NUMELS, GAPS)
    assert numel == flat.numel()
    grads = []
    kept = torch.zeros_like(flat)
    for i, (offset, size) in enumerate(zip(offsets, NUMELS, strict=True)):
        part = slice(offset, offset + size)
        grads.append(None if i in NO_GRADIENT else flat[part].to(dtypes[i % len(dtypes)]))
        if grads[-1] is not None:
            kept[part] = grads[-1].to(flat.dtype)
    return place(grads, offsets, numel, flat.dtype), kept, grads


def step(name, operands, extra, options):
    copies = [t if t is None or ops.grad_lists.is_grad_list(t) else t.clone() for t in operands]
    getattr(ops, name)(*copies, *extra, **options)
    return [copies[0], *copies[2:]]


def grad_dtypes(mix):
    return (mix[1],) if mix[0] != F32 or mix[1] == F32 else (mix[1], F32)


@pytest.mark.pairwise
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(str(d).removeprefix("torch.") for d in mix))
@pytest.mark.parametrize("case", RULES, ids=name_of)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_has_the_bits_of_one_on_a_flat_buffer(case, mix, threads):
    name, options, states = case
    offsets, numel = offsets_of(NUMELS, GAPS)
    operands = operands_for(name, states, numel, (mix[0], mix[0]))
    extra = []
    if name == "lamb_":
        extra = segments_of([(n,) for n in NUMELS], numel, F64 if mix[0] == F64 else F32)
        extra[1] = torch.tensor(offsets)
    options = {**options, "grad_scale": torch.tensor([3.0])}
    operands[1], flat, _ = scattered(operands[1], grad_dtypes(mix))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = step(name, operands, extra, options)
    finally:
        torch.set_num_threads(before)
    want = step(name, [operands[0], flat, *operands[2:]], extra, options)
    inside = covered(numel, extra)
    for a, b in zip(got, want, strict=True):
        assert a is None or torch.equal(a[inside], b[inside])


@pytest.mark.parametrize("dtypes", [(F32,), (F16,), (BF16,), (F16, F32, BF16), (F64,)], ids=str)
def test_norm_and_look_and_product(dtypes):
    generator = torch.Generator().manual_seed(0)
    wide = F64 if dtypes == (F64,) else F32
    _, numel = offsets_of(NUMELS, GAPS)
    placed, flat, grads = scattered(torch.randn(numel, generator=generator, dtype=F64).to(wide), dtypes)
    norm = ops.norm(placed)
    assert norm.dtype == wide
    torch.testing.assert_close(norm.double(), flat.double().norm(), rtol=1e-7, atol=0)
    found_inf = torch.zeros(1)
    ops.unscale_grads([placed], 1.0, found_inf)
    assert not found_inf
    wanted = [None if g is None else (g.to(wide) * 0.25).to(g.dtype) for g in grads]
    versions = [None if g is None else g._version for g in grads]
    ops.gather.multiply_(placed, torch.tensor(0.25))
    for got, want, version in zip(grads, wanted, versions, strict=True):
        if got is not None and got.numel():
            assert torch.equal(got, want)
            assert got._version > version


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("inv_scale", [1.0, 0.5])
def test_what_is_not_finite_is_found_wherever_it_is(dtype, bad, inv_scale):
    wide = F64 if dtype == F64 else F32
    for where in (0, 15, 39_999):
        grads = [torch.ones(17, dtype=dtype), torch.ones(40_000, dtype=dtype)]
        grads[1][where] = bad
        found_inf = torch.zeros(1)
        ops.unscale_grads([place(grads, [0, 48], 48 + 40_000, wide)], inv_scale, found_inf)
        assert found_inf.item() == 1.0
        assert torch.equal(grads[0], torch.full_like(grads[0], inv_scale))


def test_a_norm_that_overflows_is_no_overflow_of_a_gradient():
    placed = place([torch.full((9,), 3e38)], [0], 9, F32)
    assert ops.norm(placed).isinf()
    found_inf = torch.zeros(1)
    ops.unscale_grads([placed], 1.0, found_inf)
    assert not found_inf


def adam_with(grad, numel=20, dtype=F32, **changed):
    operands = {
        "param": torch.zeros(numel, dtype=dtype),
        "exp_avg": torch.zeros(numel, dtype=dtype),
        "exp_avg_sq": torch.zeros(numel, dtype=dtype),
        **changed,
    }
    before = {k: t.clone() for k, t in operands.items()}
    param, m, v = operands.values()
    try:
        ops.adam_(param, grad, m, v, None, **ADAM)
    finally:
        unwritten = all(torch.equal(t, before[k]) for k, t in operands.items())
        assert unwritten


def test_operands_that_do_not_fit():
    grad = torch.ones(20)
    with pytest.raises(
        ValueError, match="adam_: all buffers must have one length, but grad has 21 elements and param 20"
    ):
        adam_with(place([grad], [0], 21, F32))
    with pytest.raises(TypeError, match="adam_: grad is Float beside Double parameters"):
        adam_with(place([grad], [0], 20, F32), dtype=F64)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        with pytest.raises(ValueError, match=f"adam_: grad, the 1-th of its 2 parts, and {name} overlap in memory"):
            adam_with(place([torch.ones(2), grad[2:]], [0, 2], 20, F32), **{name: grad})


def test_nothing_but_the_kernels_reads_it():
    placed = place([torch.ones(4)], [0], 4, F32)
    assert placed.shape == (4,)
    for read in (
        torch.Tensor.clone,
        torch.Tensor.data_ptr,
        lambda t: t + 1,
        lambda t: t.numpy(),
        lambda t: t[0].item(),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(placed)


def test_profilers_and_anomaly_mode_can_look_on():
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 50)]
    optimizer = optimizers.NpuFusedSGD(params, lr=1.0)

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        step()
    assert "apex_npu::sgd_" in {event.key for event in profile.key_averages()}
    with torch.autograd.detect_anomaly(check_nan=True):
        step()
    for p in params:
        assert torch.equal(p, torch.full_like(p, -2.0))


# Which gradients are left where they are


def states(param, grad, in_place, view=None, slots=None):
    param.grad = grad
    shape = torch.empty_like(param, device="meta")
    slots = slots or extension.GradSlots([shape], [0], torch.device("cpu"))
    (state,), to_gather = slots.states([param], [param if view is None else view], 0, in_place, 0, False)
    return state, to_gather


STAYS, GATHERED = (ELSEWHERE, []), (ELSEWHERE, [0])
READ_AND_WRITTEN, READ, NEITHER = (STAYS, STAYS), (STAYS, GATHERED), (GATHERED, GATHERED)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: torch.ones(3, 4), READ_AND_WRITTEN, id="plain"),
        pytest.param(lambda: torch.ones(4, 3).t(), NEITHER, id="transposed"),
        pytest.param(lambda: torch.ones(()).expand(3, 4), NEITHER, id="expanded"),
        pytest.param(lambda: torch._neg_view(torch.ones(3, 4)), NEITHER, id="negative"),
        pytest.param(lambda: torch._efficientzerotensor(3, 4), NEITHER, id="zero tensor"),
        pytest.param(lambda: torch.ones(12).view(3, 4).detach(), READ_AND_WRITTEN, id="view of a dead tensor"),
        pytest.param(lambda: torch.ones(3, 4).to_sparse(), NEITHER, id="sparse"),
        pytest.param(lambda: torch.ones(3, 4, requires_grad=True) * 2, READ, id="with a graph"),
        pytest.param(lambda: torch.ones(3, 4).share_memory_(), READ, id="shared with processes"),
    ],
)
def test_which_can_stay(make, expected):
    param = nn.Parameter(torch.zeros(3, 4))
    assert tuple(states(param, make(), what) for what in (InPlace.READ, InPlace.WRITE)) == expected
    assert states(param, make(), InPlace.NO) == GATHERED


def test_strides_of_dimensions_of_one_element_do_not_matter():
    param = nn.Parameter(torch.zeros(5, 3, 1, 1))
    grad = torch.empty_strided((5, 3, 1, 1), (3, 1, 7, 9)).fill_(1)
    assert states(param, grad, InPlace.WRITE) == STAYS


def test_memory_that_others_look_at_is_not_written():
    param, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    grad = torch.ones(3)
    assert states(param, grad, InPlace.WRITE) == STAYS  # names in Python do not count
    view = grad[1:]
    assert states(param, grad, InPlace.WRITE) == GATHERED
    assert states(param, grad, InPlace.READ) == STAYS
    del view
    assert states(param, grad, InPlace.WRITE) == STAYS
    other.grad = grad
    assert states(param, grad, InPlace.WRITE) == GATHERED


def test_none_and_in_buffer():
    param = nn.Parameter(torch.zeros(3))
    view = torch.zeros(3)
    assert states(param, None, InPlace.READ, view) == (NONE, [])
    assert states(param, view, InPlace.READ, view) == (IN_BUFFER, [])


def test_neither_operands_nor_slots_keep_gradients_for_good():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    slots = extension.GradSlots([torch.empty(3, device="meta")], [0], torch.device("cpu"))
    placed = slots.grad_list([param], 0, 3, False)
    grad = weakref.ref(param.grad)
    storage = param.grad.untyped_storage()
    param.grad = None
    gc.collect()
    assert torch._C._storage_Use_Count(storage._cdata) == 2  # the operand's, and that of the name here
    del placed
    gc.collect()
    assert grad() is None
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def test_what_is_listed_to_be_stepped_is_not_scaled():
    param, first = torch.zeros(3), torch.ones(3)
    param.grad = first
    slots = extension.GradSlots([param], [0], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="listed to be read"):
        extension.scale_grad_list(slots.grad_list([param], 0, 3, False), 0.5, None)
    assert torch.equal(first, torch.ones(3))
    assert first._version == 0
    listed = slots.grad_list([param], 0, 3, True)
    param.grad = None  # the list has its memory and its version counter, if not the tensor itself
    extension.scale_grad_list(listed, 0.5, None)
    assert torch.equal(first, torch.full((3,), 0.5))
    assert first._version == 1
