# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Casts for the user's own functions: decorators, registered names, and that both are undone."""

from __future__ import annotations

import threading
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs, require
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from apex_npu import amp
from apex_npu.amp import user_casts

pytestmark = pytest.mark.host

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Pair = namedtuple("Pair", "a b")
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "half": (amp.half_function, amp.register_half_function),
    "float": (amp.float_function, amp.register_float_function),
    "promote": (amp.promote_function, amp.register_promote_function),
}


@pytest.fixture(autouse=True)
def _no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_casts, "_registered", [])


@pytest.fixture
def o1() -> Iterator[None]:
    initialize()
    yield
    amp.shutdown()


def initialize(opt_level: str = "O1", **options: Any) -> None:
    amp.initialize(nn.Linear(2, 2).to(DEVICE), opt_level=opt_level, verbosity=0, **options)


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, 2, dtype=dtype, device=DEVICE)


def dtypes(*args: Any, **kwargs: Any) -> tuple[list[torch.dtype], bool]:
    """A user's function: returns the dtypes of its arguments, and whether the casts are on."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            visit(list(value.values()))

    visit([*args, *kwargs.values()])
    return [tensor.dtype for tensor in tensors], torch.is_autocast_enabled(DEVICE.type)


# --------------------------------------------------------------------------------------------------------- decorators

GIVEN = {
    # kind: (types given, types that the function gets)
    "half": ([FLOAT, HALF, BF16, DOUBLE, torch.int64, torch.complex64], [HALF, HALF, HALF, DOUBLE, torch.int64]),
    "float": ([FLOAT, HALF, BF16, DOUBLE, torch.int64, torch.complex64], [FLOAT, FLOAT, FLOAT, DOUBLE, torch.int64]),
    "promote": ([HALF, FLOAT, torch.int64], [FLOAT, FLOAT, torch.int64]),
    "promote, two halves": ([HALF, HALF], [HALF, HALF]),
    "promote, half and bfloat16": ([HALF, BF16], [FLOAT, FLOAT]),
    "promote, double": ([HALF, FLOAT, DOUBLE], [DOUBLE, DOUBLE, DOUBLE]),
    "promote, integers": ([torch.int64, torch.int32], [torch.int64, torch.int32]),
}


@pytest.mark.parametrize("case", GIVEN)
def test_decorators_cast_and_only_float_switches_the_casts_off(o1: None, case: str) -> None:
    if case == "promote, double":
        require("float64")
    if case in ("half", "float"):
        require("undocumented_dtypes")  # ones of complex numbers
    given, expected = GIVEN[case]
    decorate, _ = KINDS[case.partition(",")[0]]
    got, casts_on = decorate(dtypes)(*[ones(dtype) for dtype in given])
    assert got[: len(expected)] == expected
    assert casts_on == (decorate is not amp.float_function)
    assert torch.is_autocast_enabled(DEVICE.type)


def test_a_decorated_function_has_the_casts_of_the_lists_inside(o1: None) -> None:
    # As in Apex: exp of a half tensor gives float there, with the decorator and without.
    @amp.half_function
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.exp(x @ weight)

    x, weight = torch.rand(3, 4, device=DEVICE), torch.rand(4, 2, device=DEVICE)
    result = product(x, weight)
    with amp.disable_casts():
        expected = torch.exp((x.half() @ weight.half()).float())
    assert result.dtype == FLOAT
    assert torch.equal(result, expected)


@pytest.mark.parametrize("operator", [torch.exp, Tensor.exp, F.softmax], ids=["torch", "method", "functional"])
def test_a_decorated_operator_computes_in_the_type_of_its_cast(o1: None, operator: Callable[..., Tensor]) -> None:
    options = {"dim": 1} if operator is F.softmax else {}
    assert amp.half_function(operator)(ones(FLOAT), **options).dtype == HALF


@pytest.mark.parametrize("kind", ["half", "float", "promote"])
@pytest.mark.parametrize("how", ["decorated", "registered", "registered, of torch's"])
def test_weights_inside_of_a_module_are_cast(kind: str, how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def body(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.half())

    decorate, register = KINDS[kind]
    if how == "decorated":
        Model.body = decorate(Model.body)  # type: ignore[method-assign]
    elif how == "registered":
        register(Model, "body")
    else:
        register(nn.Linear, "forward")
    model = amp.initialize(Model().to(DEVICE), opt_level="O1", verbosity=0)
    assert model(ones(FLOAT)).dtype == (FLOAT if kind == "float" else HALF)


def test_arguments_are_found_in_containers_and_by_name(o1: None) -> None:
    @amp.half_function
    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    x = ones(FLOAT)
    nested = [x, (x, {"a": x, "b": [3, None, "text"]})]
    packed = pack_padded_sequence(torch.ones(2, 1, 3, device=DEVICE), torch.tensor([2]))
    (got_nested, pair, got_packed), got = function(nested, Pair(x, 1), packed, key=x, number=2)
    assert [got_nested[0].dtype, got_nested[1][0].dtype, got_nested[1][1]["a"].dtype] == [HALF] * 3
    assert got_nested[1][1]["b"] == [3, None, "text"]
    assert (type(pair), pair.a.dtype, pair.b) == (Pair, HALF, 1)
    assert isinstance(got_packed, PackedSequence)
    assert got_packed.data.dtype == HALF
    assert (got["key"].dtype, got["number"]) == (HALF, 2)
    assert nested[0].dtype == FLOAT, "the caller's container must not change"


@pytest.mark.parametrize("kind", KINDS)
def test_decorators_do_nothing_without_o1(kind: str) -> None:
    function = KINDS[kind][0](dtypes)
    given = [HALF, FLOAT, DOUBLE]

    def unchanged() -> bool:
        return bool(function(*[ones(dtype) for dtype in given])[0] == given)

    assert unchanged()
    with torch.autocast(DEVICE.type, dtype=HALF):
        assert unchanged(), "torch's own autocast is not O1"
    for level in ("O0", "O2", "O3"):
        initialize(level)
        assert unchanged()
    initialize("O1")
    assert not unchanged()
    with amp.disable_casts():
        assert unchanged()
    amp.shutdown()
    assert unchanged()
    initialize("O1", enabled=False)
    assert unchanged()


def test_tensors_on_other_devices_stay(o1: None) -> None:
    other = torch.ones(2, device="meta")
    assert amp.half_function(dtypes)(other, ones(FLOAT))[0] == [FLOAT, HALF]
    assert amp.promote_function(dtypes)(other.double(), ones(HALF))[0] == [DOUBLE, HALF]


def test_the_casts_come_back_after_an_exception(o1: None) -> None:
    @amp.float_function
    def fails(x: Tensor) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails(ones(HALF))
    assert torch.is_autocast_enabled(DEVICE.type)


def test_a_shutdown_inside_stays(o1: None) -> None:
    amp.float_function(lambda x: amp.shutdown())(ones(HALF))
    assert not torch.is_autocast_enabled(DEVICE.type)


@needs("autocast_to_bfloat16")
def test_half_follows_a_users_own_autocast_block(o1: None) -> None:
    with torch.autocast(DEVICE.type, dtype=BF16):
        assert amp.half_function(dtypes)(ones(FLOAT))[0] == [BF16]


def test_decorators_keep_name_and_methods_work(o1: None) -> None:
    class Layer(nn.Module):
        @amp.float_function
        def forward(self, x: Tensor) -> Tensor:
            """What it does."""
            return x @ x

    assert (Layer.forward.__name__, Layer.forward.__doc__) == ("forward", "What it does.")
    assert Layer()(ones(HALF)).dtype == FLOAT
    with pytest.raises(TypeError, match="decorate its methods"):
        amp.half_function(Layer)


def test_other_threads_cast_inside_models_only(o1: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return amp.half_function(dtypes)(x)[0]

    model = Model().to(DEVICE)
    amp.initialize(model, opt_level="O1", verbosity=0)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend([model(ones(FLOAT)), amp.half_function(dtypes)(ones(FLOAT))[0]])
    )
    thread.start()
    thread.join()
    assert results == [[HALF], [FLOAT]]


class FloatSquare(torch.autograd.Function):
    """A layer that counts on float32, in backward too: 300² is beyond half's range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad @ x.t() + x.t() @ grad


@pytest.mark.parametrize("how", ["decorated", "registered", "disable_casts"])
def test_a_python_function_in_a_float_region_runs_backward_in_float(how: str) -> None:
    if how == "registered":
        amp.register_float_function(FloatSquare, "apply")
    initialize()
    x = torch.full((2, 2), 300.0, device=DEVICE, requires_grad=True)
    if how == "disable_casts":
        with amp.disable_casts():
            y = FloatSquare.apply(x)
    else:
        y = (FloatSquare.apply if how == "registered" else amp.float_function(FloatSquare.apply))(x)
    assert y.dtype == FLOAT
    (y * 300).sum().backward()
    # d/dx sum(300 x·x): each element gets 300 · (sum of a row of x + sum of a column of x) = 300 · 1200.
    assert torch.equal(x.grad, torch.full((2, 2), 360000.0, device=DEVICE))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_decorated_functions_can_be_compiled(o1: None, backend: str) -> None:
    torch._dynamo.reset()

    @amp.float_function
    def product(x: Tensor) -> Tensor:
        return x @ x

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return product(x), x @ x

    x = torch.rand(3, 3, device=DEVICE).half()
    whole = torch.__version__ >= "2.9"  # before it Dynamo breaks the graph at a context manager of a generator
    compiled = torch.compile(function, backend=backend, fullgraph=whole)(x)
    assert [result.dtype for result in compiled] == [FLOAT, HALF]
    torch.testing.assert_close(compiled, function(x))


# -------------------------------------------------------------------------------------------------------- registered


def test_a_registered_float_function_runs_in_float(o1: None) -> None:
    amp.register_float_function(torch, "mm")
    x = torch.rand(3, 3, device=DEVICE)
    assert torch.mm(x, x).dtype == HALF, "it is for the next initialize"
    initialize()
    assert torch.mm(x, x).dtype == FLOAT
    torch.testing.assert_close(torch.mm(x, x).double(), x.double().cpu().mm(x.double().cpu()).to(DEVICE))
    assert x.mm(x).dtype == HALF, "a method is another name"


REGISTERED: dict[str, tuple[Any, str, str, Callable[[Tensor], Tensor], torch.dtype]] = {
    # name: (owner, attribute, kind, call on a float tensor, what it gives)
    "torch, to half": (torch, "exp", "half", lambda x: torch.exp(x), HALF),
    "functional, to half": (F, "softmax", "half", lambda x: F.softmax(x, 1), HALF),
    "functional, to float": (F, "linear", "float", lambda x: F.linear(x, x), FLOAT),
    "functional, a module's": (F, "linear", "float", lambda x: nn.Linear(2, 2).to(DEVICE)(x), FLOAT),
    "method, to float": (Tensor, "matmul", "float", lambda x: x.matmul(x), FLOAT),
    "operator, to float": (Tensor, "__matmul__", "float", lambda x: x @ x, FLOAT),
    "patched by O1, to half": (F, "interpolate", "half", lambda x: F.interpolate(x[None, None], scale_factor=2), HALF),
    "refused by O1, to half": (Tensor, "exp_", "half", lambda x: x.half().exp_(), HALF),
}


@pytest.mark.parametrize("preferred", [None, False, True])
@pytest.mark.parametrize("case", REGISTERED)
def test_registered_names(case: str, preferred: bool | None) -> None:
    owner, name, kind, call, dtype = REGISTERED[case]
    own, original = vars(owner).get(name), getattr(owner, name)
    x = torch.rand(2, 2, device=DEVICE)
    initialize()
    assert kind == "half" or call(x).dtype != dtype, "without the registration it is otherwise"
    amp.shutdown()
    KINDS[kind][1](owner, name)
    assert getattr(owner, name) == original
    initialize(user_cast_preferred=preferred)
    assert call(x).dtype == dtype
    amp.shutdown()
    assert getattr(owner, name) == original
    assert vars(owner).get(name) is own


@pytest.mark.parametrize(
    ("preferred", "product", "exponential"), [(None, HALF, FLOAT), (False, HALF, FLOAT), (True, FLOAT, HALF)]
)
def test_promote_leaves_the_rest_to_the_lists_unless_preferred(
    preferred: bool | None, product: torch.dtype, exponential: torch.dtype
) -> None:
    amp.register_promote_function(torch, "mm")
    amp.register_promote_function(torch, "exp")
    initialize(user_cast_preferred=preferred)
    assert torch.mm(ones(HALF), ones(FLOAT)).dtype == product
    assert torch.exp(ones(HALF)).dtype == exponential


@needs("mixed_operands")
def test_promote_serves_operators_that_refuse_mixed_types() -> None:
    amp.register_promote_function(torch, "lerp")
    with pytest.raises(RuntimeError, match="dtype"):
        torch.lerp(ones(HALF), ones(FLOAT), 0.5)
    initialize()
    assert torch.lerp(ones(HALF), ones(FLOAT), 0.5).dtype == FLOAT


def users_module() -> Any:
    module = types.ModuleType("users_ops")
    module.roi_align = dtypes  # type: ignore[attr-defined]
    return module


class Decoder:
    def method(self, x: Tensor) -> Any:
        return type(self), dtypes(x)

    @staticmethod
    def static(x: Tensor) -> Any:
        return None, dtypes(x)

    @classmethod
    def of_class(cls, x: Tensor) -> Any:
        return cls, dtypes(x)


class SubDecoder(Decoder):
    pass


@pytest.mark.parametrize("owner", [Decoder, SubDecoder])
@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_methods_of_a_class_of_any_kind(owner: type, name: str) -> None:
    before = vars(owner).get(name)
    amp.register_half_function(owner, name)
    initialize()
    cls, (got, casts_on) = getattr(SubDecoder(), name)(ones(FLOAT))
    assert (got, casts_on) == ([HALF], True)
    assert cls in (SubDecoder, None)
    if owner is SubDecoder:
        assert getattr(Decoder(), name)(ones(FLOAT))[1] == ([FLOAT], True)
    amp.shutdown()
    assert vars(owner).get(name) is before


def test_functions_of_a_users_module_and_an_object() -> None:
    module, decoder = users_module(), Decoder()
    amp.register_float_function(module, "roi_align")
    amp.register_half_function(decoder, "method")
    initialize()
    assert module.roi_align([ones(HALF)]) == ([FLOAT], False)
    assert decoder.method(ones(FLOAT))[1][0] == [HALF]
    assert Decoder().method(ones(FLOAT))[1][0] == [FLOAT]
    amp.shutdown()
    assert module.roi_align is dtypes
    assert vars(decoder) == {}


def test_a_registration_serves_every_initialize_until_it_is_taken_back() -> None:
    module = users_module()
    amp.register_half_function(module, "roi_align")
    for _ in range(2):
        initialize("O1")
        assert module.roi_align(ones(FLOAT))[0] == [HALF]
        first = module.roi_align
        initialize("O1")
        assert module.roi_align(ones(FLOAT))[0] == [HALF]
        assert first.__wrapped__ is module.roi_align.__wrapped__ is dtypes, "wrappers must not pile up"
        initialize("O2")
        assert module.roi_align is dtypes
        initialize("O1")
        amp.shutdown()
        assert module.roi_align is dtypes
    amp.unregister_function(module, "roi_align")
    initialize("O1")
    assert module.roi_align is dtypes
    with pytest.raises(ValueError, match="No cast is registered for roi_align"):
        amp.unregister_function(module, "roi_align")


def test_the_last_registration_of_a_name_counts() -> None:
    module = users_module()
    for kind in ("half", "promote", "float"):
        KINDS[kind][1](module, "roi_align")
    initialize()
    assert module.roi_align(ones(HALF))[0] == [FLOAT]
    assert module.roi_align.__wrapped__ is dtypes


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_registered(kind: str) -> None:
    register = KINDS[kind][1]
    with pytest.raises(ValueError, match=r"No function named no_such_name in module <module 'torch\.nn\.functional'"):
        register(F, "no_such_name")
    with pytest.raises(TypeError, match=r"must be a function, got float"):
        register(torch, "pi")
    with pytest.raises(TypeError, match=r"is a class; register a method of it"):
        register(nn, "Linear")
    assert user_casts._registered == []


def test_a_registered_attribute_that_is_gone_stops_initialize_before_it_changes_anything() -> None:
    module, model = users_module(), nn.Linear(2, 2).to(DEVICE)
    amp.register_half_function(module, "roi_align")
    del module.roi_align
    with pytest.raises(ValueError, match=r"No function named roi_align .* amp\.unregister_function"):
        amp.initialize(model, opt_level="O1", verbosity=0)
    assert "forward" not in vars(model)
    assert not torch.is_autocast_enabled(DEVICE.type)
    initialize("O2")


# ------------------------------------------------------------------------------------------------------------- banned


def test_the_ban_on_binary_cross_entropy_names_ways_out_that_work() -> None:
    logits, target = torch.tensor([-20.0, 3.0], device=DEVICE).half(), torch.tensor([0.0, 1.0], device=DEVICE)
    amp.register_float_function(torch, "sigmoid")
    initialize()
    with pytest.raises(NotImplementedError, match=r"register_float_function\(torch, 'sigmoid'\).*allow_banned=True"):
        F.binary_cross_entropy(logits.sigmoid(), target)
    loss = F.binary_cross_entropy(torch.sigmoid(logits), target)
    expected = F.binary_cross_entropy_with_logits(logits.cpu().double(), target.cpu().double())
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-6, atol=1e-7)


def test_a_handle_of_the_old_api_applies_registrations() -> None:
    amp.register_float_function(torch, "mm")
    amp.init()
    assert (torch.mm(ones(FLOAT), ones(FLOAT)).dtype, (ones(FLOAT) @ ones(FLOAT)).dtype) == (FLOAT, HALF)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_a_registered_function_writes_out(dtype: torch.dtype) -> None:
    amp.register_float_function(torch, "sigmoid")
    initialize()
    x, out = torch.randn(3, device=DEVICE).half(), torch.zeros(3, device=DEVICE, dtype=dtype)
    assert torch.sigmoid(x, out=out) is out
    torch.testing.assert_close(out, torch.special.expit(x.float()).to(dtype))
