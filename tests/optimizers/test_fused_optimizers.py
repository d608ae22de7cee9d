# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer against the one it must equal, through everything that users do to parameters and gradients.

Two models run side by side, one with each optimizer, on the same gradients, and are compared tensor by tensor.
"""

import copy
import io
import pickle
import re
import warnings
from itertools import zip_longest

import pytest
import torch
from devices import DEVICE, needs
from lockstep import FLOAT64_TOLERANCE, LOW_PRECISION, assert_equal_params, assert_equal_states
from optimizer_specs import DTYPES, MATRIX, SPECS, needs_dtype
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

from apex_npu.optimizers import (
    FusedLAMB,
    FusedNovoGrad,
    FusedOptimizer,
    NpuFusedAdam,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedLamb,
    NpuFusedSGD,
)

pytestmark = pytest.mark.device

SHAPES = [(41, 123), (17,), (16, 1), (1,), (), (3, 2, 2), (15,), (0,)]


def make_params(seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)) for shape in shapes
    ]


def set_grads(params, step, skip=()):
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device, p.dtype)
        p.grad = None if i in skip else grad


def largest(params, so_far=()):
    """The largest magnitude that each of ``params`` has had, now or ``so_far``.

    A step's rounding is relative to what a parameter is at that step. One of few elements may end near zero.
    """
    now = [p.detach().abs().max().item() if p.numel() else 0.0 for p in params]
    return [max(pair) for pair in zip_longest(now, so_far, fillvalue=0.0)]


class Pair:
    """Our optimizer and its reference on equal parameters."""

    def __init__(self, spec, kwargs, dtype=torch.float32, groups=None):
        self.spec, self.dtype = spec, dtype
        self.tolerance = FLOAT64_TOLERANCE if dtype == torch.float64 else spec.tolerance
        self.params = [make_params(dtype=dtype), make_params(dtype=dtype)]
        self.sizes = largest(self.params[1])
        groups = groups or (lambda params: params)
        classes = spec.cls, spec.reference_for(dtype)
        self.optimizers = [cls(groups(p), **kwargs) for cls, p in zip(classes, self.params, strict=True)]

    def each(self):
        return zip(self.params, self.optimizers, strict=True)

    def step(self, number, skip=()):
        for params, optimizer in self.each():
            set_grads(params, number, skip)
            optimizer.step()
        self.sizes = largest(self.params[1], self.sizes)
        if self.dtype in LOW_PRECISION:
            self.align()

    def align(self):
        """Go on from the same values: a rounding that went the other way, once compared, must not add up."""
        assert_equal_params(*self.params, self.tolerance)
        with torch.no_grad():
            torch._foreach_copy_(self.params[1], self.params[0])

    def check(self):
        assert_equal_params(*self.params, self.tolerance, floor=self.sizes)
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        assert_equal_states(*states, self.tolerance)


@pytest.fixture
def pair(spec, kwargs, dtype):
    return Pair(spec, kwargs, dtype)


def for_all(test):
    """Run ``test`` for every variant of every optimizer in every dtype."""
    return pytest.mark.parametrize(("spec", "kwargs", "dtype"), MATRIX)(test)


def for_each_rule(test):
    """Likewise, of what is shared by all rules and depends on their states alone: quick are two variants of each."""
    ends = [case.values[1] in (case.values[0].variants[0], case.values[0].variants[-1]) for case in MATRIX]
    cases = [
        case if is_end else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.sweep])
        for case, is_end in zip(MATRIX, ends, strict=True)
    ]
    return pytest.mark.parametrize(("spec", "kwargs", "dtype"), cases)(test)


@for_all
def test_many_steps(pair):
    """100 in float32, whose roundings add up; other dtypes are aligned after each step, or have digits to spare."""
    for i in range(100 if pair.dtype == torch.float32 else 30):
        pair.step(i)
    pair.check()
    if pair.spec.in_torch and pair.dtype == torch.float32:
        assert_equal_params(*pair.params, 1e-6, floor=pair.sizes)  # what is promised


@for_each_rule
def test_an_eventful_training(spec, kwargs, dtype):
    """Groups, gradients that are late, come and go and are zero, freezing, and other memory and state, all compared."""
    pair = Pair(spec, kwargs, dtype, lambda p: [{"params": p[:3], "weight_decay": 0.2}, {"params": p[3:], "lr": 0.03}])
    numbers = iter(range(1000))

    def steps(count, skip=lambda i: ()):
        for i in range(count):
            pair.step(next(numbers), skip(i))
            for optimizer in pair.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.97  # as scripts do
        pair.check()

    for optimizer in pair.optimizers:
        optimizer.step()  # without gradients
    steps(9, lambda i: () if i > 6 else (0, 4) if i > 3 else (0, 1, 4))
    steps(6, lambda i: (i % 3, 5))
    for params, optimizer in pair.each():
        for p in params:
            p.grad = torch.zeros_like(p)  # which still decay and count
        optimizer.step()
    pair.align()
    steps(2)
    for params in pair.params:
        params[0].requires_grad_(False)
        params[3].requires_grad_(False)
    steps(4, lambda i: (0, 3))
    for params in pair.params:
        params[0].requires_grad_(True)
        params[3].requires_grad_(True)
        params[1].requires_grad_(False)
    steps(4, lambda i: (1,))
    for params, optimizer in pair.each():
        params[1].requires_grad_(True)
        params.extend(make_params(seed=7, shapes=[(9, 3), (4,)], dtype=pair.dtype))
        optimizer.add_param_group({"params": params[-2:], "lr": 0.03})
    steps(4)
    for params in pair.params:
        params[0].data = params[0].data.t().contiguous().t()
        params[1].data = torch.full_like(params[1], 0.5)
        params[2].data = params[2].data.clone()
    steps(4)
    for params, optimizer in pair.each():
        for p in params[:3]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    optimizer.state[p][key] = torch.full_like(value, 0.25)
    steps(4)
    for _, optimizer in pair.each():
        optimizer.state.clear()
    steps(4)


@for_all
def test_state_dict_looks_like_torchs(pair):
    if not pair.spec.in_torch:
        pytest.skip("torch.optim has no such rule")
    for i in range(3):
        pair.step(i, skip=(2,))
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in pair.optimizers)
    with_state = {index for index, entry in theirs.items() if any(v is not None for v in entry.values())}
    assert set(ours) == with_state
    for index in with_state:
        assert list(ours[index]) == list(theirs[index])
        for key, value in theirs[index].items():
            assert (ours[index][key].shape, ours[index][key].dtype) == (value.shape, value.dtype)
    assert_equal_states(ours, theirs, pair.tolerance)


@pytest.mark.pairwise
@for_each_rule
@pytest.mark.parametrize("direction", ["ours to ours", "ours to theirs", "theirs to ours"])
def test_state_dict_moves_in_mid_run(pair, direction):
    """Rewind: load a state dict of step 5 at step 9, through a file, and replay."""
    source, target = {"ours to ours": (0, 0), "ours to theirs": (0, 1), "theirs to ours": (1, 0)}[direction]
    for i in range(5):
        pair.step(i)
    file = io.BytesIO()
    torch.save(pair.optimizers[source].state_dict(), file)
    values = [p.detach().clone() for p in pair.params[source]]
    expected = []
    for i in range(5, 9):
        pair.step(i)
        expected.append([p.detach().clone() for p in pair.params[source]])
    file.seek(0)
    pair.optimizers[target].load_state_dict(torch.load(file, weights_only=True))
    for p, value in zip(pair.params[target], values, strict=True):
        p.data.copy_(value)
    for i, wanted in enumerate(expected, 5):
        set_grads(pair.params[target], i)
        pair.optimizers[target].step()
        # Replaying our own steps is exact; the other rule rounds in another order, which must not add up.
        assert_equal_params(pair.params[target], wanted, 0.0 if direction == "ours to ours" else pair.spec.tolerance)
        if pair.dtype in LOW_PRECISION:
            for p, value in zip(pair.params[target], wanted, strict=True):
                p.data.copy_(value)


def test_loading_copies():
    params = make_params()
    source, target = NpuFusedAdam(params), NpuFusedAdam(make_params())
    set_grads(params, 0)
    source.step()
    expected = copy.deepcopy(source.state_dict()["state"][0])
    target.load_state_dict(source.state_dict())
    set_grads(params, 1)
    source.step()  # must not reach into the loaded state
    loaded = target.state_dict()["state"][0]
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


@pytest.mark.pairwise
@for_each_rule
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alone(pair, how):
    for i in range(4):
        pair.step(i)
    original = pair.optimizers[0]
    twin = how(original)
    copies, originals = ([p for group in o.param_groups for p in group["params"]] for o in (twin, original))
    twin_of = {id(p): copied for p, copied in zip(originals, copies, strict=True)}
    twin_params = [twin_of[id(p)] for p in pair.params[0]]
    before = [p.detach().clone() for p in pair.params[0]]
    for i in range(4, 8):
        set_grads(twin_params, i)
        twin.step()
    assert_equal_params(pair.params[0], before, 0.0)
    for i in range(4, 8):
        pair.step(i)
    pair.check()
    assert_equal_params(twin_params, pair.params[0], 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_low_precision_is_updated_in_float32_and_rounded_once(spec, dtype):
    ours = make_params(dtype=dtype)
    optimizer = spec.cls(ours, lr=0.01)
    for i in range(10):
        # The reference starts each step from the rounded parameter, in float32, with its own float32 state.
        reference_params = [nn.Parameter(p.detach().float()) for p in ours]
        reference = spec.reference(reference_params, lr=0.01)
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_grads(ours, i)
        sizes = [p.detach().float().abs() for p in ours]
        for p, q in zip(ours, reference_params, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, q, before in zip(ours, reference_params, sizes, strict=True):
            ulp = torch.finfo(dtype).eps * q.abs().clamp_min(torch.finfo(dtype).tiny)
            # Half a unit for rounding, a little more where the float32 results differ in their last bits: those of the
            # parameter before the step, which is what counts where the step has brought it near zero.
            slack = 8 * torch.finfo(torch.float32).eps * (before + 0.01)
            assert ((p.float() - q).abs() <= 0.51 * ulp + slack).all()
    for entry in optimizer.state_dict()["state"].values():
        assert all(v.dtype == torch.float32 for v in entry.values())


@needs("float64")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_mixed_dtypes_in_one_group(spec):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16]
    ours, theirs = ([nn.Parameter(torch.full((5,), 2.0).to(DEVICE, dtype)) for dtype in dtypes] for _ in range(2))
    optimizer, reference = spec.cls(ours, lr=0.01), spec.reference_for(torch.float16)(theirs, lr=0.01)
    for i in range(6):
        for params, stepped in ((ours, optimizer), (theirs, reference)):
            set_grads(params, i)
            stepped.step()
        assert_equal_params(ours, theirs, spec.tolerance)  # float64, too: norms may be over all of them
        torch._foreach_copy_([p.data for p in theirs], [p.data for p in ours])
    for p in ours:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        assert all(v.dtype == (torch.float32 if k == "step" else wide) for k, v in optimizer.state[p].items())


@needs("channels_last")
@for_each_rule
def test_channels_last_and_transposed_parameters(pair):
    for params in pair.params:
        image, matrix = make_params(seed=5, shapes=[(4, 3, 5, 5), (6, 4)], dtype=pair.dtype)
        image.data = image.data.to(memory_format=torch.channels_last)
        matrix.data = matrix.data.t()
        params += [image, matrix]
    for params, optimizer in pair.each():
        optimizer.add_param_group({"params": params[-2:]})
    for i in range(10):
        pair.step(i)
    pair.check()
    assert pair.params[0][-2].is_contiguous(memory_format=torch.channels_last)


@for_each_rule
def test_gradients_are_not_written_by_step(pair):
    params, optimizer = pair.params[0], pair.optimizers[0]
    set_grads(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    for p, grad in zip(params, before, strict=True):
        assert torch.equal(p.grad, grad)


def test_sparse_gradient_is_refused_before_anything_moves():
    table = nn.Embedding(10, 4, sparse=True)
    other = nn.Parameter(torch.ones(3))
    optimizer = NpuFusedAdam([other, table.weight])
    other.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 1 of shape \(10, 4\) has a sparse gradient .*SparseAdam"):
        optimizer.step()
    assert other.tolist() == [1, 1, 1]
    assert not optimizer.state


def test_gradient_without_memory_of_its_own_is_refused_before_anything_moves():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = NpuFusedSGD(params, lr=0.1)
    params[0].grad = torch.ones(3)
    params[1].grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match=r"parameter 1 .* has a TwoTensor as gradient.* give it a plain tensor"):
        optimizer.step()
    assert params[0].tolist() == [1, 1, 1]


@for_each_rule
def test_create_graph(pair):
    for i in range(3):
        for params, optimizer in pair.each():
            optimizer.zero_grad()
            loss = sum(((p * (i + 1)) ** 2).sum() for p in params)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the reference cycle that the test is about
                loss.backward(create_graph=True)
            optimizer.step()
        pair.align()  # the next gradients come from them
    pair.check()


def test_a_write_between_forward_and_backward_is_noticed():
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = NpuFusedSGD([weight], lr=0.1)
    out = weight @ weight
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_of_all_optimizers_are_called_once_each():
    class Counting(NpuFusedSGD):
        def step(self, closure=None):
            calls.append("step")
            return super().step(closure)

    calls = []
    made = [cls(make_params(), lr=0.1) for cls in (Counting, NpuFusedSGD)]
    hooks = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(f"pre {type(optimizer).__name__}")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        made[1].step()
    finally:
        for hook in hooks:
            hook.remove()
    for optimizer in made:
        optimizer.step()
    assert calls == ["pre NpuFusedSGD", "post", "step"]


@pytest.mark.parametrize(
    ("spec", "kwargs", "error", "message"),
    [(spec, *bad) for spec in SPECS for bad in spec.bad],
    ids=[f"{spec}-{bad[0]}" for spec in SPECS for bad in spec.bad],
)
def test_bad_arguments(spec, kwargs, error, message):
    with pytest.raises(error, match=message) as caught:
        spec.cls(make_params(), **kwargs)
    assert str(spec) in str(caught.value)
    good = {"lr": 0.1}
    optimizer = spec.cls(make_params(), **good)
    groups = len(optimizer.param_groups)
    if kwargs and set(kwargs) <= set(optimizer.defaults):
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": make_params(), **kwargs})
        assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step_at_a_learning_rate_of_zero_moves_no_weight(spec, capturable):
    """torch.distributed.checkpoint takes such a step, with gradients of zero, to make state that it can load into."""
    if capturable and not spec.cls.supports_capture:
        pytest.skip("it has no capturable")
    for kwargs in ({}, *spec.variants):
        for lr in (0.0, torch.tensor(0.0, device=DEVICE)):
            params = make_params()
            before = [p.detach().clone() for p in params]
            options = {"weight_decay": 0.1, "lr": 0.1, **kwargs, **({"capturable": True} if capturable else {})}
            optimizer = spec.cls(params, **options)
            for group in optimizer.param_groups:
                group["lr"] = lr
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            assert all(map(torch.equal, params, before)), kwargs


@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_parameter_with_a_gradient_counts_as_torchs_do(late):
    """torch steps it; what cannot be fused is named, rather than passed over."""
    params = [nn.Parameter(torch.ones(3, device=DEVICE, dtype=dtype)) for dtype in (torch.float32, torch.complex64)]
    params[1].requires_grad_(False)
    twin = nn.Parameter(torch.ones(3))
    if not late:
        params[1].grad = torch.ones_like(params[1])
        with pytest.raises(TypeError, match=r"NpuFusedAdam: parameter 1 .* torch\.complex64.*torch\.optim"):
            NpuFusedAdam(params)
        return
    optimizer, plain = NpuFusedAdam(params, lr=0.1), torch.optim.Adam([twin], lr=0.1)
    params[0].requires_grad_(False)
    for step in range(3):
        params[0].grad, twin.grad = torch.ones_like(params[0]), torch.ones(3)
        if step == 2:
            params[1].grad = torch.ones_like(params[1])
            with pytest.raises(TypeError, match=r"parameter 1 of shape .* is torch\.complex64"):
                optimizer.step()
            params[1].grad = None
        optimizer.step()
        plain.step()
    torch.testing.assert_close(params[0].detach().cpu(), twin.detach())


def test_frozen_parameters_may_have_any_dtype():
    """Quantised layers have some."""
    frozen = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    param = nn.Parameter(torch.zeros(2))
    optimizer = NpuFusedSGD([frozen, param], lr=1.0)
    param.grad = torch.ones(2)
    optimizer.step()
    assert param.tolist() == [-1, -1]


def test_a_parameter_listed_twice():
    """torch warns, and so do we; it is stepped once, by torch's rule for one."""
    param, other, twin = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = NpuFusedAdam([param, other, param], lr=0.5)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(param), id(other)]
    reference = torch.optim.Adam([twin], lr=0.5)
    param.grad, twin.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    reference.step()
    torch.testing.assert_close(param, twin)
    named = [("a", param), ("b", other), ("a again", param)]
    with pytest.warns(UserWarning, match="duplicate"):
        (group,) = NpuFusedAdam(named).param_groups
    assert group["param_names"] == ["a", "b"]


@pytest.mark.parametrize("lr", ["0.1", None, [0.1], True])
@pytest.mark.parametrize("cls", [NpuFusedAdam, NpuFusedSGD, NpuFusedBertAdam, FusedNovoGrad])
def test_a_learning_rate_that_becomes_no_number_is_refused_before_the_step(cls, lr):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = cls([{"params": [p]} for p in params], lr=0.5)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[1]["lr"] = lr
    with pytest.raises(TypeError, match=f"lr of a parameter group must be a number, got {re.escape(repr(lr))}"):
        optimizer.step()
    assert all(map(torch.equal, params, before[0]))
    torch.testing.assert_close(optimizer.state_dict()["state"], before[1], rtol=0, atol=0)


def stepped(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (
            lambda: NpuFusedAdam([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))]),
            r"'exp_avg' of parameter 0 has shape \(4,\), not \(3,\); 'exp_avg_sq' of parameter 0",
        ),
        (
            lambda: torch.optim.RMSprop([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]),
            r"parameter 0 lacks 'exp_avg'; parameter 0 lacks 'exp_avg_sq'; parameter 0 has 'square_avg', which",
        ),
        (
            lambda: torch.optim.SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], momentum=0.9),
            r"parameter 0 lacks 'step'.*parameter 1 has 'momentum_buffer'",
        ),
    ],
    ids=["other shapes", "RMSprop", "SGD"],
)
def test_foreign_state_dicts_are_refused_whole(make_other, message):
    optimizer = stepped(NpuFusedAdam([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], lr=0.1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"is not one of NpuFusedAdam.*{message}.*Nothing has been loaded"):
        optimizer.load_state_dict(stepped(make_other()).state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in entry.items())


@pytest.mark.parametrize("cls", [NpuFusedAdam, FusedNovoGrad])
def test_a_whole_checkpoint_is_refused_with_the_key_to_pass(cls):
    param = nn.Parameter(torch.ones(3))
    optimizer = stepped(cls([param], lr=0.1))
    checkpoint = {"epoch": 3, "optim": optimizer.state_dict()}
    with pytest.raises(ValueError, match=r"the keys 'epoch', 'optim' .*pass checkpoint\['optim'\]\. Nothing has been"):
        optimizer.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match=r"the keys 'epoch' and without 'param_groups'\. Nothing"):
        optimizer.load_state_dict({"epoch": 3})
    assert param in optimizer.state
    optimizer.load_state_dict(checkpoint["optim"])


@pytest.mark.parametrize("state_dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("lr", float("nan"), ValueError, "NpuFusedAdam: Invalid learning rate: nan"),
        ("eps", None, TypeError, "NpuFusedAdam: eps must be a number, got None"),
        ("eps", torch.ones(2), ValueError, "NpuFusedAdam: Tensor eps must be 1-element"),
    ],
)
def test_a_state_dict_with_a_bad_hyper_parameter_is_refused(name, value, error, message, state_dtype):
    groups = [{"params": [nn.Parameter(torch.ones(3))]} for _ in range(2)]
    optimizer = NpuFusedAdam(groups, lr=0.1, state_dtype=state_dtype)
    broken = copy.deepcopy(optimizer.state_dict())
    broken["param_groups"][1][name] = value
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(broken)
    assert [group[name] for group in optimizer.param_groups] == [optimizer.defaults[name]] * 2


@pytest.mark.parametrize("step", [5, 5.0, torch.tensor(5.0)], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("where", ["state", "group"])
def test_step_counts_of_other_libraries(where, step):
    """Ascend's keep an int for each parameter, NVIDIA's one for the group, torch a tensor for each parameter."""
    params = make_params()
    source = torch.optim.AdamW(params)
    for i in range(5):
        set_grads(params, i)
        source.step()
    saved = copy.deepcopy(source.state_dict())
    for entry in saved["state"].values():
        if where == "group":
            del entry["step"]
        else:
            entry["step"] = step
    if where == "group":
        saved["param_groups"][0]["step"] = step
    ours = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = NpuFusedAdamW(ours)
    optimizer.load_state_dict(saved)
    for i in range(5, 8):
        set_grads(params, i)
        set_grads(ours, i)
        source.step()
        optimizer.step()
    assert_equal_params(ours, params)
    assert all(entry["step"].item() == 8 for entry in optimizer.state.values())


@pytest.mark.parametrize("answer", [True, "error"])
def test_check_combined_tensors(answer, capsys):
    params = make_params()
    optimizer = NpuFusedAdam(params)
    optimizer.check_combined_tensors = answer
    set_grads(params, 0)
    optimizer.step()
    params[0].data = params[0].data.clone()
    if answer == "error":
        with pytest.raises(RuntimeError, match=r"1 parameter\(s\) of group 0, the first of shape \(41, 123\)"):
            optimizer.step()
    else:
        optimizer.step()
        assert "Combined param has been destroyed and will be recombined" in capsys.readouterr().out


def test_a_rule_must_be_complete():
    with pytest.raises(NotImplementedError, match="FusedOptimizer must define validate"):
        FusedOptimizer([nn.Parameter(torch.ones(1))], {})


def test_compiled_model_with_fused_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    pairs = (compiled, NpuFusedSGD(model.parameters(), lr=0.1)), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    for i in range(6):
        for forward, optimizer in pairs:
            optimizer.zero_grad()
            forward(torch.full((3, 4), float(i))).square().mean().backward()
            optimizer.step()
        assert_equal_params(list(model.parameters()), list(twin.parameters()))
        twin.load_state_dict(model.state_dict())  # otherwise the next gradients depend on the rounding of these


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1e-5, 1e5])
@for_each_rule
def test_small_and_large_gradients(pair, size):
    if pair.dtype == torch.float16:
        size = min(size, 1e3)  # there is nothing larger, squared or summed
    for i in range(5):
        for params, optimizer in pair.each():
            set_grads(params, i)
            for p in params:
                p.grad.mul_(size)
            optimizer.step()
        pair.align()
    pair.check()


@pytest.mark.parametrize("cls", [NpuFusedLamb, FusedLAMB, FusedNovoGrad], ids=lambda cls: cls.__name__)
def test_norms_of_long_parameters(cls):
    """Two million elements of one sign: a single float32 accumulator loses the last ones."""
    spec = next(spec for spec in SPECS if spec.cls is cls)
    ends = []
    for make in (spec.cls, spec.reference):
        params = [nn.Parameter(torch.full(shape, 0.5, device=DEVICE)) for shape in [(2_000_003,), (3,)]]
        optimizer = make(params, lr=0.1, weight_decay=0.1)
        for p in params:
            p.grad = torch.linspace(0.5, 1.0, p.numel()).to(DEVICE)
        optimizer.step()
        ends.append(params)
    assert_equal_params(*ends, spec.tolerance)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, id=str(dtype), marks=needs_dtype(dtype)) for dtype in DTYPES])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_hyper_parameters_changed_in_mid_run(spec, dtype):
    """From one variant to the next, there and back: momentum, AMSGrad, decay and the like come and go."""

    def state_count(kwargs):
        optimizer = spec.cls(make_params(), **kwargs)
        return len(optimizer.state_names(optimizer.param_groups[0]))

    # First what has all states: torch makes them at a parameter's first step only.
    variants = sorted(spec.variants, key=state_count, reverse=True)
    usual = spec.cls(make_params(), lr=0.01).defaults
    pair = Pair(spec, variants[0], dtype)
    for i, variant in enumerate([*variants, *reversed(variants)]):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0].update({**usual, **variant})
        pair.step(2 * i)
        pair.step(2 * i + 1, skip=(i % 4,))
    pair.check()
