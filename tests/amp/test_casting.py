# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""O1's casts around models: modules, backward, the weight cache, threads, compile, and that everything is undone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.data._utils import worker

from apex_npu._extension import extension
from apex_npu.amp.policy import OPT_LEVELS, Policy
from apex_npu.autocast import casting
from apex_npu.autocast.casting import CastHandle
from apex_npu.autocast.forward_cast import _cached_weights_have_gradients, convert_model

O1 = OPT_LEVELS["O1"]
HALF, FLOAT = torch.float16, torch.float32
registrations = torch._C._dispatch_get_registrations_for_dispatch_key


def enable_casts(policy: Policy, device_types: tuple[str, ...]) -> CastHandle:
    handle = CastHandle(device_types)
    handle.enable(policy)
    return handle


@pytest.fixture
def casts() -> Iterator[CastHandle]:
    handle = enable_casts(O1, (DEVICE.type,))
    yield handle
    handle.undo()


def positive(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    # Exact in half, so that explicit casts lose nothing.
    return (torch.rand(*shape).mul(8).round() / 16 + 0.25).to(DEVICE, dtype)


# ------------------------------------------------------------------------------------------------------------ modules


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_rnn_cells_give_half(casts: CastHandle, kind: Callable[[int, int], nn.Module]) -> None:
    cell = kind(4, 5).to(DEVICE)
    for dtype in (HALF, FLOAT):
        x = positive(2, 4, dtype=dtype).requires_grad_()
        output = cell(x)
        output = output[0] if isinstance(output, tuple) else output
        assert output.dtype == HALF
        output.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
    assert {p.grad.dtype for p in cell.parameters() if p.grad is not None} == {FLOAT}


def test_batch_norm_keeps_its_inputs_dtype(casts: CastHandle) -> None:
    for dtype in (HALF, FLOAT):
        assert nn.BatchNorm1d(4).to(DEVICE)(positive(4, 4, dtype=dtype)).dtype == dtype


# ----------------------------------------------------------------------------------------------------------- backward


@pytest.mark.parametrize("run", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_the_backward_of_a_float_region_runs_in_float(casts: CastHandle, run: str) -> None:
    weight = torch.full((2, 2), 1.0, device=DEVICE, requires_grad=True)
    x = torch.full((2, 2), 3000.0, device=DEVICE)
    with casts.disabled():
        loss = (x @ weight).sum() * 1000.0
    if run == "Tensor.backward":
        loss.backward()
    elif run == "autograd.backward":
        torch.autograd.backward([loss])
    else:
        (weight.grad,) = torch.autograd.grad(loss, [weight])
    # 6e6 is beyond half's range.
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 6.0e6, device=DEVICE))
    assert torch.is_autocast_enabled(DEVICE.type)


def test_a_gradient_penalty_trains(casts: CastHandle) -> None:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    convert_model(critic, O1, (DEVICE.type,), casts)

    def penalty_gradient() -> Tensor:
        critic.zero_grad()
        x = torch.linspace(-1, 1, 12, device=DEVICE).reshape(3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).float().sum(), x, create_graph=True)
        (slope.norm() - 1).pow(2).backward()
        assert critic[0].weight.grad is not None
        return critic[0].weight.grad

    result = penalty_gradient()
    assert result.dtype == FLOAT
    with casts.disabled():
        torch.testing.assert_close(result, penalty_gradient(), rtol=2e-2, atol=2e-3)


def test_autocast_is_back_after_a_failing_backward(casts: CastHandle) -> None:
    x = positive(3).requires_grad_()
    y = x.exp().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    assert torch.is_autocast_enabled(DEVICE.type)


class SavesFloat(torch.autograd.Function):
    """A user's layer whose backward relies on the casts: half gradient, float saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


class Recording(SavesFloat):
    seen: dict[str, Any] = {}  # noqa: RUF012 - one test at a time

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Recording.seen = {
            "grad": grad.dtype,
            "autocast": torch.is_autocast_enabled(DEVICE.type) and torch.get_autocast_dtype(DEVICE.type),
            "cache": torch.is_autocast_cache_enabled(),
        }
        return SavesFloat.backward(ctx, grad)


def test_python_functions_get_the_casts_in_backward(casts: CastHandle) -> None:
    x, weight = positive(2, 3).requires_grad_(), positive(3, 4).requires_grad_()
    Recording.apply(x, weight).sum().backward()
    assert Recording.seen == {"grad": HALF, "autocast": HALF, "cache": False}
    with casts.disabled():
        torch.testing.assert_close(x.grad, torch.ones(2, 4, device=DEVICE) @ weight.t(), rtol=4e-3, atol=1e-3)
        torch.testing.assert_close(weight.grad, x.t() @ torch.ones(2, 4, device=DEVICE), rtol=4e-3, atol=1e-3)


def test_python_functions_get_no_casts_under_disabled(casts: CastHandle) -> None:
    x, weight = positive(2, 3).requires_grad_(), positive(3, 4).requires_grad_()
    with casts.disabled():
        Recording.apply(x, weight).sum().backward()
    assert Recording.seen["grad"] == FLOAT
    assert Recording.seen["autocast"] is False


@needs("autocast_to_bfloat16")
def test_python_functions_get_the_casts_of_their_forward(casts: CastHandle) -> None:
    x, weight = positive(2, 3).requires_grad_(), positive(3, 4).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        output = Recording.apply(x, weight)
    output.float().sum().backward()
    assert Recording.seen == {"grad": torch.bfloat16, "autocast": torch.bfloat16, "cache": False}
    with casts.disabled():
        output = Recording.apply(x, weight)
    output.sum().backward()
    assert (Recording.seen["grad"], Recording.seen["autocast"]) == (FLOAT, False)
    output = Recording.apply(x, weight).float().sum()
    with casts.disabled():
        output.backward()
    assert (Recording.seen["grad"], Recording.seen["autocast"]) == (HALF, HALF)
    assert torch.get_autocast_dtype(DEVICE.type) == HALF


# -------------------------------------------------------------------------------------------------------- weight cache


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.softmax(self.norm(self.first(x)), -1))


def expected_of(model: Net, x: Tensor) -> Tensor:
    """The O1 arithmetic of ``Net`` with explicit casts."""
    a, b = model.first, model.second
    hidden = F.linear(x.half(), a.weight.half(), a.bias.half()).float()
    hidden = torch.softmax(F.layer_norm(hidden, (8,), model.norm.weight, model.norm.bias), -1)
    return F.linear(hidden.half(), b.weight.half(), b.bias.half())


def change_by_copy(model: Net) -> None:
    for param in model.parameters():
        param.data.copy_(param.data * 2 + 0.5)


def change_by_load(model: Net) -> None:
    model.load_state_dict({name: value * 2 + 0.5 for name, value in model.state_dict().items()})


def change_by_swap(model: Net) -> None:
    for param in model.parameters():
        param.data = param.data * 2 + 0.5


@pytest.mark.parametrize("change", [change_by_copy, change_by_load, change_by_swap])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "bare"])
def test_changed_weights_are_never_stale(
    casts: CastHandle, change: Callable[[Net], None], grad: bool, converted: bool
) -> None:
    model, x = Net().to(DEVICE), positive(3, 8)
    if converted:
        convert_model(model, O1, (DEVICE.type,), casts)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            result = model(x)
            with casts.disabled():
                expected = expected_of(model, x)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            change(model)


class Twice(nn.Module):
    """Uses a weight twice."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.matrix, self.use = nn.Linear(4, 4), nn.Parameter(torch.eye(4)), use

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.use(self, x), self.use(self, x)


# How a weight is used, and the node of the weight's cast in the graph of the output.
USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    # addmm(bias, x, weight.t()): over the transpose
    "linear": (lambda m, x: m.layer(x), lambda node: node.next_functions[2][0].next_functions[0][0]),
    "overlay": (lambda m, x: torch.addr(m.matrix, x[0], x[0]), lambda node: node.next_functions[0][0]),
}


@pytest.mark.skipif(not _cached_weights_have_gradients(), reason="this torch loses gradients of cached weights")
@pytest.mark.parametrize("use", USES)
def test_a_forward_casts_each_weight_once(casts: CastHandle, use: str) -> None:
    if use == "overlay" and extension is None:
        pytest.skip("the kernels in Python keep no copies")
    call, cast_of = USES[use]
    model, x = Twice(call).to(DEVICE), positive(2, 4)
    bare = model(x)
    assert cast_of(bare[0].grad_fn) is not cast_of(bare[1].grad_fn)
    convert_model(model, O1, (DEVICE.type,), casts)
    first = model(x)
    assert first[0].dtype == HALF
    assert cast_of(first[0].grad_fn) is cast_of(first[1].grad_fn)
    assert cast_of(model(x)[0].grad_fn) is not cast_of(first[0].grad_fn)


# ----------------------------------------------------------------------------------------------------------- disabled


def test_disabled_restores_what_was(casts: CastHandle) -> None:
    x = positive(3, 3)
    with casts.disabled():
        assert torch.mm(x, x).dtype == FLOAT
        assert torch.exp(x.half()).dtype == HALF
        assert x.half().cpu().dtype == HALF
        with casts.disabled():
            assert torch.mm(x, x).dtype == FLOAT
        assert torch.mm(x, x).dtype == FLOAT
    assert torch.mm(x, x).dtype == HALF
    for enabled, dtype in ((False, FLOAT), (True, HALF)):
        with torch.autocast(DEVICE.type, dtype=HALF, enabled=enabled):
            with casts.disabled():
                assert torch.mm(x, x).dtype == FLOAT
            assert torch.mm(x, x).dtype == dtype
    with casts.disabled():
        with torch.autocast(DEVICE.type, dtype=HALF):
            assert torch.mm(x, x).dtype == HALF
        assert torch.mm(x, x).dtype == FLOAT


def test_undo_inside_disabled_stays_undone() -> None:
    handle = enable_casts(O1, (DEVICE.type,))
    with handle.disabled():
        handle.undo()
    assert not torch.is_autocast_enabled(DEVICE.type)
    with handle.disabled():
        pass
    assert not torch.is_autocast_enabled(DEVICE.type)


# ------------------------------------------------------------------------------------------------------------- threads


def run_in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_another_thread_casts_converted_models_only(casts: CastHandle) -> None:
    model, bare, x = Net().to(DEVICE), Net().to(DEVICE), positive(2, 8)
    convert_model(model, O1, (DEVICE.type,), casts)
    torch.testing.assert_close(run_in_thread(lambda: model(x)), model(x), rtol=0, atol=0)
    assert run_in_thread(lambda: bare(x)).dtype == FLOAT


# ------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_equal_eager(casts: CastHandle, backend: str) -> None:
    torch._dynamo.reset()
    model = Net().to(DEVICE)
    convert_model(model, O1, (DEVICE.type,), casts)
    x = positive(2, 8).requires_grad_()

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        output = call(x)
        output.float().pow(2).sum().backward()
        return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for got, want in zip(gradients(compiled), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    with casts.disabled():
        assert compiled(x).dtype == FLOAT
    assert compiled(x).dtype == HALF


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_python_functions_get_the_casts_in_backward(casts: CastHandle, backend: str) -> None:
    torch._dynamo.reset()
    x, weight = positive(2, 3).requires_grad_(), positive(3, 4).requires_grad_()
    torch.compile(SavesFloat.apply, backend=backend, fullgraph=True)(x, weight).sum().backward()
    with casts.disabled():
        torch.testing.assert_close(x.grad, torch.ones(2, 4, device=DEVICE) @ weight.t(), rtol=4e-3, atol=1e-3)


@pytest.mark.skipif(torch.__version__ < "2.9", reason="Dynamo breaks the graph at a context manager of a generator")
def test_disabled_can_be_compiled(casts: CastHandle) -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        with casts.disabled():
            inside = x @ x
            with torch.autocast(DEVICE.type, dtype=HALF):
                region = x @ x
        return inside, region, x @ x

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        called.update(node.target for node in module.graph.nodes)
        return module.forward

    called: set[object] = set()
    inside, region, after = torch.compile(function, backend=backend, fullgraph=True)(positive(2, 2))
    assert (inside.dtype, region.dtype, after.dtype) == (FLOAT, HALF, HALF)
    # Before torch 2.12 Dynamo cannot trace these.
    assert not called & {torch.set_autocast_enabled, torch.set_autocast_cache_enabled}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_use_the_overlay(casts: CastHandle, backend: str) -> None:
    torch._dynamo.reset()

    def function(half: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        target = torch.zeros(4, 4, device=DEVICE)
        target[torch.arange(3, -1, -1, device=DEVICE)] = half
        return torch.exp(half), F.gelu(half).std(), F.interpolate(image, scale_factor=2), target

    args = positive(4, 4, dtype=HALF), positive(1, 2, 6, 6, dtype=HALF)
    compiled = torch.compile(function, backend=backend, fullgraph=True)(*args)
    assert {result.dtype for result in compiled} == {FLOAT}
    for got, want in zip(compiled, function(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------- undo


def snapshot() -> dict[str, Any]:
    """Every attribute, registration and switch that the casts may touch."""
    state: dict[str, Any] = {
        f"{owner.__name__}.{name}": id(value)
        for owner in (torch, Tensor, F, torch.autograd, BackwardCFunction, worker)
        for name, value in vars(owner).items()
        if name != "_dynamo"  # imported lazily
    }
    for key in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1"):
        state[key] = sorted(registrations(key))
    for device_type in ("cpu", "cuda", private_use()):
        state[device_type] = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    state["cache"] = torch.is_autocast_cache_enabled()
    return state


def private_use() -> str:
    """The out-of-tree device type: "privateuseone", or what a backend that is loaded has renamed it to."""
    return torch._C._get_privateuse1_backend_name()


def probe() -> list[Tensor]:
    half = torch.linspace(0.25, 1.0, 16).reshape(4, 4).half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [torch.exp(half), torch.mv(half, half[0]), half.cpu(), half.clone().exp_()]
    return [*inside, torch.exp(half), half @ half, half.cpu()]


@pytest.mark.parametrize("device_types", [("cpu",), ("cuda",), ("private use",), ("cpu", "cuda")], ids=str)
def test_undo_restores_everything(device_types: tuple[str, ...]) -> None:
    device_types = tuple(private_use() if name == "private use" else name for name in device_types)
    probe()
    before, results = snapshot(), probe()
    handle = enable_casts(O1, device_types)
    assert snapshot() != before
    assert all(torch.is_autocast_enabled(device_type) for device_type in device_types)
    handle.undo()
    handle.undo()
    assert snapshot() == before
    for got, want in zip(probe(), results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_undo_restores_an_unusual_state() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        before = snapshot()
        enable_casts(O1, ("cpu",)).undo()
        assert snapshot() == before


@pytest.mark.parametrize("step", ["install_attribute_overlay", "install_dispatch_overlay", "patch_attribute"])
def test_a_failure_half_way_restores_torch(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    original, before = getattr(casting, step), snapshot()

    def fails_afterwards(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise MemoryError("after the step")

    monkeypatch.setattr(casting, step, fails_afterwards)
    handle = CastHandle(("cpu",))
    with pytest.raises(MemoryError):
        handle.enable(O1)
    handle.undo()
    assert snapshot() == before


def test_two_handles_nest() -> None:
    before = snapshot()
    outer = enable_casts(O1, (DEVICE.type,))
    between = snapshot()
    inner = enable_casts(replace(O1, autocast_dtype=torch.bfloat16), (DEVICE.type,))
    x = positive(3, 3)
    assert torch.mv(x, x[0]).dtype == torch.bfloat16
    inner.undo()
    assert snapshot() == between
    assert torch.mv(x, x[0]).dtype == HALF
    assert torch.exp(x.half()).dtype == FLOAT
    with pytest.raises(NotImplementedError):
        x.half().exp_()
    outer.undo()
    assert snapshot() == before


@pytest.mark.parametrize("policy", [OPT_LEVELS["O0"], OPT_LEVELS["O2"], replace(O1, enabled=False)], ids=str)
def test_other_policies_change_nothing(policy: Any) -> None:
    before = snapshot()
    handle = enable_casts(policy, ("cpu",))
    with handle.disabled():
        assert snapshot() == before
    handle.undo()
    assert snapshot() == before


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "private use"])
def test_enabling_is_silent(device_type: str, capfd: pytest.CaptureFixture[str]) -> None:
    device_type = private_use() if device_type == "private use" else device_type
    previous = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch issues some warnings only once per process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = enable_casts(O1, (device_type,))
            second = enable_casts(O1, (device_type,))
            second.undo()
            first.undo()
    finally:
        torch.set_warn_always(previous)
    assert capfd.readouterr() == ("", "")


def test_what_the_overlay_adds_per_device() -> None:
    added = {}
    for device_type, key in (
        ("cpu", "AutocastCPU"),
        ("cuda", "AutocastCUDA"),
        (private_use(), "AutocastPrivateUse1"),
    ):
        before = set(registrations(key))
        handle = enable_casts(O1, (device_type,))
        added[device_type] = {name.removeprefix("aten::") for name in set(registrations(key)) - before}
        handle.undo()
    common = {"gelu", "std", "var", "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"}
    assert common <= added["cpu"] & added["cuda"] & added[private_use()]
    # cuDNN's are cast by autocast for cuda; torch_npu has LSTMs and GRUs of its own, which its autocast does not cast.
    assert "lstm.input" in (added["cpu"] & added[private_use()]) - added["cuda"]
    if private_use() == "privateuseone":  # no such backend is loaded, hence nothing that its autocast does already
        assert {"mm", "exp", "softmax.int", "conv2d"} <= added["privateuseone"]
    assert not {"mm", "addmm", "linear", "mse_loss"} & (added["cpu"] | added["cuda"])


def test_unknown_device_type() -> None:
    before = snapshot()
    with pytest.raises(ValueError, match="autocast does not support device type 'abacus'"):
        enable_casts(O1, ("cpu", "abacus"))
    assert snapshot() == before
