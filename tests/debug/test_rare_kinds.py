# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is rare: gradients that are changed after backward, operators without float64, other processes, advice."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed
from debug import healthy, planted
from debug.planted import Body
from debug.test_watching import iterate, set_up
from devices import DEVICE, needs
from small_programs import backward

from apex_npu import amp, optimizers
from apex_npu.debug.watching import second_opinion, stream
from apex_npu.debug.watching.operators import Execution, operator_of

MARKED = planted.marked_lines(__file__)


def watched(model, optimizer, block=lambda model, scaled_loss: scaled_loss.backward()):
    """What is found where ``block`` takes the model and the scaled loss."""
    with amp.debug.find_overflow(model) as found:
        optimizer.zero_grad()
        with amp.scale_loss(model(planted.batch(4, 8, value=1.0)).float().mean(), optimizer) as scaled_loss:
            block(model, scaled_loss)
        optimizer.step()
    return found


def small(level="O2", run=lambda h: h, value=1.0, optimizer=torch.optim.SGD, **options):
    return set_up(lambda: Body(run, value), level, optimizer, **{"dynamic_init_scale": 4.0, **options})


@needs("inf")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("options", [{}, {"combine_grad": True}])
def test_gradients_that_the_block_changes(level, options):
    def block(model, scaled_loss):
        scaled_loss.backward()
        model.fc.weight.grad.mul_(1e30).mul_(1e30)  # fault: written

    found = watched(*small(level, optimizer=optimizers.NpuFusedSGD, **options), block)
    (cause,) = found.causes
    assert (cause.kind, cause.phase, cause.operator) == ("written", "block", "aten::mul_")
    assert cause.line == MARKED["written"]
    assert found.parameters == {"fc.weight": (0, 64)}


@needs("inf")
def test_gradients_that_are_there_before():
    model, optimizer = small("O1")
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    with amp.debug.find_overflow(model) as found:
        backward(model(planted.batch(4, 8, value=1.0)).float().mean(), optimizer)
        optimizer.step()
    (cause,) = found.causes
    assert (cause.kind, cause.operator) == ("stale", "aten::add_")


@torch.library.custom_op("apex_npu_tests::steep", mutates_args=())
def steep(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise NotImplementedError("no kernel for float64")
    return x * 1e30 * 1e30


@needs("inf")
def test_an_operator_without_float64():
    steep.register_autograd(lambda ctx, grad: grad)
    found = watched(*small("O2", run=lambda h: steep(h)))
    (cause,) = found.causes
    assert (cause.kind, cause.operator) == ("unknown", "apex_npu_tests::steep")
    assert "no kernel for float64" in cause.why


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("matmul_backward", ((2, 3, 4), (4, 5))),
        ("matmul_backward", ((4,), (2, 4, 5))),
        ("matmul_backward", ((3, 4), (4,))),
        ("matmul_backward", ((4,), (4,))),
        ("matmul_backward", ((2, 1, 3, 4), (6, 4, 5))),
        ("linear_backward", ((2, 3, 4), (5, 4))),
    ],
)
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_a_backward_that_a_device_has_as_one_operator(name, shapes, mask):
    func = getattr(torch.ops.aten, name).default
    x, other = (torch.randn(*shape, dtype=torch.float64).mul_(300).requires_grad_() for shape in shapes)
    y = x @ (other if name == "matmul_backward" else other.T)
    grad = torch.randn_like(y) * 300
    exact = torch.autograd.grad(y, [one for one, wanted in zip((x, other), mask, strict=True) if wanted], grad)
    if name == "linear_backward":
        args = (x, grad, other, [*mask, True])
        exact = (*exact, grad.sum((0, 1)))
    else:
        args = (grad, x, other, list(mask))
    results = [torch.full_like(one, math.inf, dtype=torch.float16) for one in exact]
    with torch.no_grad():
        opinion = second_opinion.ask(Execution(func, operator_of(func), None, (args, {}), (args, {}), results))
    assert opinion.is_finite, opinion.reason
    assert opinion.largest == pytest.approx(max(float(one.abs().max()) for one in exact), rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_a_gpu(training):
    x, weight, bias = (torch.randn(*shape).half().requires_grad_() for shape in ((4, 3, 5), (3,), (3,)))
    averages = torch.randn(3), torch.rand(3) + 0.5
    kept = [t.clone() for t in averages]
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.batch_norm(
        wide[0], *[t.double() for t in averages], *wide[1:], training=training, momentum=0.1, eps=1e-3
    )

    def executed(name, args, results):
        func = getattr(torch.ops.aten, name).default
        return Execution(func, operator_of(func), None, (args, {}), (args, {}), results)

    forward = executed("cudnn_batch_norm", (x, weight, bias, *averages, training, 0.1, 1e-3), ())
    results = second_opinion.call_on_host(forward, forward.before)
    torch.testing.assert_close(results[0], expected.detach(), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(t, k) for t, k in zip(averages, kept, strict=True))
    assert len(results) == len(forward.func._schema.returns) == 4
    if not training:  # backward is native_batch_norm's then
        return
    mean, variance = wide[0].detach().mean((0, 2)), wide[0].detach().var((0, 2), correction=0)
    torch.testing.assert_close(results[1], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[2], (variance + 1e-3).rsqrt(), rtol=1e-12, atol=1e-12)
    grad = torch.randn(4, 3, 5)
    args = (x, grad, weight, *averages, *results[1:3], 1e-3, *results[3:])
    backward = executed("cudnn_batch_norm_backward", args, ())
    exact = torch.autograd.grad(expected, wide, grad.double())
    for got, true in zip(second_opinion.call_on_host(backward, backward.before), exact, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dropout", "train", "is_random"), [(0.0, True, False), (0.5, False, False), (0.5, True, True)]
)
def test_a_recurrent_layer_of_a_gpu_draws_numbers_for_dropout_alone(dropout, train, is_random):
    x, state = torch.randn(2, 1, 3), torch.zeros(1, 1, 4)
    args = (x, [], 4, None, state, state, 2, 4, 0, 1, False, dropout, train, False, [], None)
    func = torch.ops.aten._cudnn_rnn.default
    assert Execution(func, operator_of(func), None, (args, {}), (args, {}), ()).is_random == is_random
    drawn = torch.ops.aten.bernoulli.default
    assert Execution(drawn, operator_of(drawn), None, ((x,), {}), ((x,), {}), x).is_random


class InOneBuffer(torch.nn.Module):
    """Its weight is read as part of a tensor over all of its memory, as cuDNN reads those of recurrent layers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        buffer = torch.empty(0, device=x.device, dtype=self.weight.dtype)
        buffer.set_(self.weight.untyped_storage(), self.weight.storage_offset(), (32,), (1,))
        return x @ (self.weight + buffer.view(4, 8)).t()  # fault: one buffer


@needs("inf")
def test_a_tensor_over_the_memory_of_weights_computes_nothing():
    model = InOneBuffer().to(DEVICE)
    x = planted.batch(2, 8)
    with amp.debug.check_operators(model) as checked:
        model(x).sum().backward()
    assert not [why for why in checked.left_out if "set_" in why]
    with torch.no_grad():
        model.weight[1, 2] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    with amp.debug.find_overflow(model) as found, amp.scale_loss(model(x).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    (cause,) = found.causes
    assert (cause.kind, cause.line, cause.tensor) == ("weights", MARKED["one buffer"], "weight")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo has tensors of the CPU")
def test_another_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        def of_another(h):
            h = h.clone()
            torch.distributed.all_reduce(h.detach())
            return torch.log(h - 1) if h.requires_grad else h  # fault: after the collective

        found = watched(*small("O1", run=of_another))
        (cause,) = found.causes
        # What this process has sent is what it has received: the collective is not at fault.
        assert (cause.kind, cause.line) == ("math", MARKED["after the collective"])
    finally:
        torch.distributed.destroy_process_group()


@needs("inf")
def test_views_and_operators_in_place():
    def run(h):
        h = h.clone()
        h[:, 0] = 300.0
        part = h.view(-1)[:4]
        part.mul_(300.0)  # fault: in place
        return h

    found = watched(*small("O2", run=run))
    (cause,) = found.causes
    assert (cause.kind, cause.operator, cause.line) == ("overflow", "aten::mul_", MARKED["in place"])
    assert cause.true_value == 300.0 * 300.0


@needs("inf")
def test_an_operand_that_there_is_no_memory_to_copy(monkeypatch):
    def kept(operator, given):
        if operator.plain == "mul_":
            raise torch.OutOfMemoryError("out of memory")
        return given

    def run(h):
        h = h.clone().mul_(300.0)
        return h * 300 * 300  # fault: after it

    monkeypatch.setattr(stream, "kept", kept)
    found = watched(*small("O2", run=run))
    (cause,) = found.causes
    assert (cause.kind, cause.operator, cause.line) == ("overflow", "aten::mul", MARKED["after it"])
    assert found.reports[0].not_measured == {"aten::mul_: out of memory": 1}


@needs("inf")
def test_inf_that_is_absorbed_is_no_cause():
    def run(h):
        scores = torch.where(h > 2, h, -math.inf)
        largest = torch.maximum(scores, torch.zeros_like(scores))
        return largest + h * 300 * 300  # fault: beside

    found = watched(*small("O2", run=run))
    (cause,) = found.causes
    assert (cause.kind, cause.line) == ("overflow", MARKED["beside"])


@needs("inf")
@pytest.mark.parametrize("scale", [2.0**20, 2.0**23])
def test_the_scale_that_is_named_is_the_largest_that_fits(scale):
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=scale)
    states = torch.get_rng_state()

    def skips_at(value):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": value, "unskipped": 0}})
        torch.set_rng_state(states)
        with amp.debug.find_overflow(model) as found:
            optimizer.zero_grad()
            backward(model.loss(), optimizer)
        optimizer.zero_grad()
        return found

    (cause,) = skips_at(scale).causes
    assert cause.kind == "scale"
    assert cause.fits_scale < scale
    same = [c for c in skips_at(cause.fits_scale).causes if (c.operator, c.line) == (cause.operator, cause.line)]
    assert same == []
    (again,) = skips_at(2 * cause.fits_scale).causes
    assert (again.kind, again.fits_scale) == ("scale", cause.fits_scale)


@needs("inf")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_the_table_advises_ends_the_skips(level):
    def plain(h):
        return h * h * h

    def advised(h):
        with amp.disable_casts():
            h = h.float()
            return h * h * h

    def skipped(run):
        model, optimizer = small(level, run=run, value=300.0, dynamic_init_scale=0.5)
        found = watched(model, optimizer)
        skipped = amp.last_step(optimizer).skipped
        amp.shutdown()
        return skipped, found

    skipped_before, found = skipped(plain)
    assert skipped_before
    assert "with .float(), at O1 within amp.disable_casts()" in found.causes[0].advice
    assert not skipped(advised)[0]


def test_a_device_without_aminmax(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("aclnnAminmax not in libopapi.so")

    monkeypatch.setattr(torch, "aminmax", missing)
    fault = planted.FAULTS[0]
    model, optimizer, _ = planted.set_up(fault, "O2", torch.optim.SGD)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, optimizer)
    (cause,) = found.causes
    assert (cause.kind, cause.line) == (fault.kind, planted.MARKED[fault.name])
    assert not found.reports[0].not_measured


def test_two_models_and_a_block_for_each_loss():
    first, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=4.0, num_losses=2)
    other = torch.nn.Linear(2, 2).to(DEVICE)
    with amp.debug.find_overflow(first, other) as found:
        for loss_id in range(2):
            optimizer.zero_grad()
            backward(first.loss(), optimizer, loss_id=loss_id)
            first.fc.weight.grad = None
        optimizer.zero_grad()
    assert [report.loss_id for report in found.reports] == [0, 1]
    iterate(first, optimizer)


# ---- what no dtype holds ---------------------------------------------------------------------------------------------


@needs("inf")
@pytest.mark.parametrize(("exponent", "wider"), [(12.0, True), (80.0, True), (100.0, False)])
def test_a_result_that_no_dtype_holds_is_not_for_a_wider_one(exponent, wider):
    def exp(h):
        return torch.exp(h * 0 + exponent)  # the largest bfloat16 is exp(88.7)

    model, optimizer = small("O2", exp)
    found = watched(model, optimizer)
    (cause,) = found.causes
    assert (cause.kind, cause.operator, cause.dtype) == ("overflow", "aten::exp", "float16")
    assert cause.true_value == pytest.approx(math.exp(exponent), rel=0.1)
    assert ("float()" in cause.advice, "bfloat16" in cause.advice) == (wider, wider)
    assert "scale" in cause.advice


@needs("inf")
@pytest.mark.parametrize(("factor", "wider"), [(1e10, True), (1e38, True), (1e41, False)])
def test_a_gradient_that_no_dtype_holds_is_not_for_a_wider_one(factor, wider):
    def run(h):
        h.register_hook(lambda grad: grad * factor)
        return h * 1.0

    found = watched(*small("O2", run))
    (cause,) = found.causes
    assert (cause.kind, cause.operator, cause.dtype) == ("gradient", "aten::mul", "float16")
    assert ("float32" in cause.advice, "bfloat16" in cause.advice) == (wider, wider)
    assert "scale the loss down" in cause.advice


@needs("inf")
@pytest.mark.parametrize(("level", "coefficient", "wider"), [("O0", 6e37, False), ("O3", 1e4, True)])
def test_a_sum_that_no_dtype_holds_is_not_for_a_wider_one(level, coefficient, wider):
    model, optimizer = small(level, dynamic_init_scale=1.0)
    with amp.debug.find_overflow(model) as found:
        for _ in range(2):
            y = model(planted.batch(4, 8, value=1.0)).float()
            backward(((y - y.detach()) * coefficient).sum(), optimizer)  # each gradient is 4 times the coefficient
    (cause,) = found.causes
    assert (cause.kind, cause.operator) == ("accumulation", "aten::add_")
    assert "divide each loss" in cause.advice
    assert ("O1" in cause.advice) == wider


# ---- sparse gradients ------------------------------------------------------------------------------------------------


class Table(torch.nn.Module):
    """An embedding, for which ``gradient`` replaces the gradients of the four rows that are read; one is read twice."""

    def __init__(self, gradient, sparse):
        super().__init__()
        self.rows, self.gradient = torch.nn.Embedding(6, 2, sparse=sparse), gradient

    def forward(self, x):
        found = self.rows(torch.tensor([1, 2, 2, 4], device=x.device))
        found.register_hook(lambda grad: grad * self.gradient.to(grad))
        return found


# The gradients of the row that is read twice are finite, and their sum is not.
BAD = torch.tensor([[1.0, 2.0], [4e4, 1.0], [4e4, 1.0], [math.nan, math.inf]])


def set_up_table(sparse, gradient=BAD, level="O3", scale=1.0, **options):
    model = Table(gradient, sparse).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loss_scale": "dynamic", "dynamic_init_scale": scale, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **given)


def loss_of(model):
    return model(torch.zeros(1, device=DEVICE)).float().sum()


@needs("inf")
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_an_embedding_that_are_not_finite(sparse, replay):
    model, optimizer = set_up_table(sparse)
    with amp.debug.find_overflow(model, replay=replay) as found:
        backward(loss_of(model), optimizer)
        optimizer.step()
    assert model.rows.weight.grad.is_sparse is sparse
    assert found.parameters == amp.debug.bad_gradients(optimizer) == {"rows.weight": (1, 2)}
    assert found.reports[0].gradients == 1
    assert "written" not in [cause.kind for cause in found.causes]
    assert amp.debug.gradient_range(optimizer)["rows.weight"].nonfinite == 3
    if replay:
        assert "run again as it was, its gradients are the same, bit for bit" in str(found)


@pytest.mark.parametrize("probe", [None, 2.0**8])
def test_the_range_of_a_sparse_gradient(probe):
    def measured(sparse):
        gradient = 2.0 ** torch.tensor([[-30.0, -20.0], [-1.0, 0.0], [-1.0, 0.0], [-25.0, -40.0]])
        model, optimizer = set_up_table(sparse, gradient)
        with amp.debug.gradient_range(optimizer, probe=probe) if probe else nullcontext() as found:
            backward(loss_of(model), optimizer)
        found = (found or amp.debug.gradient_range(optimizer))["rows.weight"]
        amp.shutdown()
        return found

    dense, sparse = measured(False), measured(True)
    assert (dense.elements, sparse.elements) == (12, 6)  # of three of six rows
    assert dense.zeros - sparse.zeros == 6
    for name in ("nonfinite", "nonzero", "lossy", "normal", "lost"):
        assert getattr(sparse, name) == getattr(dense, name), name
    assert (sparse.lossy, sparse.normal) == (1, 2)


@needs("inf")
def test_a_sparse_gradient_that_a_static_scale_applies(caplog):
    model, optimizer = set_up_table(True, loss_scale=1.0)
    amp.debug.explain_overflows(after=1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        optimizer.step()
        torch.nn.init.ones_(model.rows.weight)  # what the step has written would be a cause, too
    amp.debug.explain_overflows(None)
    assert "1 of 1 gradients are not finite (rows.weight)" in caplog.text
