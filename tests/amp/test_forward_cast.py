# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``convert_model``: parameters, the wrapped forward, containers, copies of the model, and undoing."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from apex_npu import amp
from apex_npu.amp.policy import OPT_LEVELS
from apex_npu.autocast.containers import cast_floating
from apex_npu.autocast.forward_cast import convert_model

pytestmark = pytest.mark.host

O0, O1, O2, O3 = (OPT_LEVELS[level] for level in ("O0", "O1", "O2", "O3"))
HALF, FLOAT = torch.float16, torch.float32
CPU = ("cpu",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.layer_norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.norm(self.layer(x)) * self.scale
        return y if bias is None else y + bias


class Echo(nn.Module):
    """Keeps what it was given; returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["seen"] = args, kwargs
        return args[0] if args else kwargs


# ---------------------------------------------------------------------------------------------------------- parameters


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}


@pytest.mark.parametrize(("policy", "dtype", "norms"), [(O0, FLOAT, FLOAT), (O2, HALF, FLOAT), (O3, HALF, HALF)])
def test_what_a_level_casts(policy: Any, dtype: torch.dtype, norms: torch.dtype) -> None:
    model = Net().double() if policy is O0 else Net()
    convert_model(model, policy, CPU)
    assert dtypes(model.norm) == dtypes(model.plain_norm) == {norms}
    assert dtypes(model.layer) == dtypes(model.layer_norm) == {dtype}
    assert (model.scale.dtype, model.count.dtype, model.phase.dtype) == (dtype, torch.int64, torch.complex64)
    assert model.norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("policy", [O1, replace(O2, cast_model_type=False), replace(O2, enabled=False)], ids=str)
def test_other_policies_leave_parameters_alone(policy: Any) -> None:
    model = Net()
    convert_model(model, policy, CPU)
    assert dtypes(model) == {FLOAT}


def test_parameters_keep_identity_values_and_gradients() -> None:
    model = Net()
    model(torch.randn(3, 4)).sum().backward()
    before = {name: (param, param.detach().clone(), param.grad) for name, param in model.named_parameters()}
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    buffers = dict(model.named_buffers())
    convert_model(model, O2, CPU)
    for name, param in model.named_parameters():
        old, value, grad = before[name]
        assert param is old
        assert isinstance(param, nn.Parameter)
        assert param.grad is grad
        assert torch.equal(param, value.to(param.dtype))
        if param.grad is not None:
            assert param.grad.dtype == param.dtype
            assert torch.equal(param.grad, grads[name].to(param.dtype))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    convert_model(model, O2, CPU)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == HALF


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_rnns_at_o2(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(4, 4)

        def forward(self, x: Tensor | PackedSequence) -> Any:
            return self.rnn(x)[0]

    model = Recurrent()
    x = torch.randn(3, 2, 4)
    expected = model(x)
    convert_model(model, O2, CPU)
    assert [w.dtype for w in model.rnn._flat_weights] == [HALF] * 4
    assert all(flat is param for flat, param in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    packed = model(pack_padded_sequence(x, torch.tensor([3, 2])))
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == FLOAT


def test_lazy_parameters_take_the_dtype_when_they_are_made() -> None:
    model = nn.LazyLinear(3)
    convert_model(model, O2, CPU)
    assert model(torch.randn(2, 5)).dtype == FLOAT
    assert model.weight.dtype == HALF


@pytest.mark.parametrize("last", [0, 3, 5])
def test_a_conversion_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    model = nn.Sequential(Net(), nn.LSTM(4, 4))
    model[0](torch.randn(3, 4)).sum().backward()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    before = [(t.dtype, t.data_ptr(), t.clone()) for t in tensors]
    original, calls = Tensor.to, iter(range(100))

    def out_of_memory(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if next(calls) == last:
            raise MemoryError
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", out_of_memory)
        with pytest.raises(MemoryError):
            amp.initialize(model, opt_level="O2", verbosity=0)
    assert "forward" not in vars(model)
    for tensor, (dtype, pointer, value) in zip(tensors, before, strict=True):
        assert (tensor.dtype, tensor.data_ptr()) == (dtype, pointer)
        assert torch.equal(tensor, value)
    assert model[1](torch.randn(2, 1, 4))[0].dtype == FLOAT


# ------------------------------------------------------------------------------------------------------------- forward


def test_o2_casts_inputs_and_outputs() -> None:
    model = Echo()
    convert_model(model, O2, CPU)
    x, ids = torch.randn(2), torch.tensor([1, 2])
    output = model([x, ids], mask=x, flag=True, name="a")
    (given,), kwargs = vars(model)["seen"]
    assert given[0].dtype == HALF
    assert given[1] is ids
    assert (kwargs["mask"].dtype, kwargs["flag"], kwargs["name"]) == (HALF, True, "a")
    assert output[0].dtype == FLOAT


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("policy", [O0, O1, O2, O3], ids=lambda policy: policy.opt_level)
def test_cast_model_outputs(policy: Any, dtype: torch.dtype) -> None:
    model = Echo()
    convert_model(model, replace(policy, cast_model_outputs=dtype), CPU)
    assert model({"a": torch.randn(2)})["a"].dtype == dtype


@pytest.mark.parametrize(("policy", "dtype"), [(O0, FLOAT), (O1, HALF)])
def test_o0_makes_inputs_and_outputs_float_and_o1_leaves_them(policy: Any, dtype: torch.dtype) -> None:
    model, x = Echo(), torch.randn(2).half()
    convert_model(model, policy, CPU)
    output, given = model(x), vars(model)["seen"][0][0]
    assert output.dtype == given.dtype == dtype
    assert (output is x) == (given is x) == (policy is O1)


def test_undo_restores_the_forward_and_not_the_dtypes() -> None:
    model = Net()
    attributes = {name: value for name, value in vars(model).items()}
    handle = convert_model(model, O2, CPU)
    wrapper = vars(model)["forward"]
    handle.undo()
    handle.undo()
    assert vars(model) == attributes
    assert dtypes(model.layer) == {HALF}
    model.float()
    assert wrapper(torch.randn(3, 4).double().float()).dtype == FLOAT  # kept by someone: passes through


def test_an_instance_forward_keeps_working() -> None:
    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight) * 2  # type: ignore[arg-type]

    model = Net()
    own = MethodType(doubled, model)
    model.forward = own  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    handle = convert_model(model, O2, CPU)
    torch.testing.assert_close(model(x), (F.linear(x.half(), model.layer.weight) * 2).float(), rtol=0, atol=0)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.layer.weight)
    assert twin(x).abs().sum() == 0
    assert model(x).abs().sum() > 0
    handle.undo()
    assert vars(model)["forward"] is own


def test_a_forward_wrapped_by_others_afterwards_survives_undo() -> None:
    model = Echo()
    handle = convert_model(model, O2, CPU)
    ours = vars(model)["forward"]
    model.forward = lambda *args: ("theirs", ours(*args))  # type: ignore[method-assign]
    handle.undo()
    x = torch.randn(2)
    assert model(x) == ("theirs", x)


def test_converting_again_replaces_the_wrapper() -> None:
    model = Echo()
    first = convert_model(model, O2, CPU)
    convert_model(model, replace(O2, cast_model_outputs=torch.float64), CPU)
    assert vars(model)["forward"].inner is None
    assert model(torch.randn(2)).dtype == torch.float64
    first.undo()
    assert model(torch.randn(2)).dtype == torch.float64
    convert_model(model, replace(O2, enabled=False), CPU)
    assert "forward" not in vars(model)


# -------------------------------------------------------------------------------------------------------------- copies


def test_pickle_at_o1_casts_in_its_new_home() -> None:
    model = Net()
    convert_model(model, O1, CPU)
    x = torch.randn(3, 4)
    assert not torch.is_autocast_enabled("cpu")
    assert model.layer(x).dtype == model(x).dtype == FLOAT  # this thread has no casts switched on
    assert pickle.loads(pickle.dumps(model)).layer(x).dtype == FLOAT
    loaded = pickle.loads(pickle.dumps(nn.ModuleList([model])))[0]
    loaded.norm, loaded.scale = nn.Identity(), torch.ones(4, dtype=HALF)
    assert loaded(x).dtype == HALF


def test_data_parallel_replicas_run_their_own_weights() -> None:
    model = nn.Linear(4, 4)
    convert_model(model, O2, CPU)
    replica: Any = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4, dtype=HALF), torch.ones(4, dtype=HALF)
    assert torch.equal(replica(torch.randn(2, 4)), torch.ones(2, 4))
    assert "_replicate_for_data_parallel" not in vars(nn.Linear)


def test_the_signature_is_the_forwards() -> None:
    model = Net()
    signature = inspect.signature(model.forward)
    convert_model(model, O2, CPU)
    assert inspect.signature(model.forward) == signature


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_o2_equals_eager(backend: str) -> None:
    torch._dynamo.reset()

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            x, (y, scale) = batch["x"], batch["rest"]
            return {"out": self.layer(x) * scale, "rest": [y + 1, batch["ids"]]}

    model = Nested()
    convert_model(model, O2, CPU)
    batch = {"x": torch.randn(2, 4), "rest": (torch.randn(2), 3), "ids": torch.tensor([1])}
    expected, compiled = model(batch), torch.compile(model, backend=backend, fullgraph=True)(batch)
    assert compiled["out"].dtype == compiled["rest"][0].dtype == FLOAT
    torch.testing.assert_close(compiled, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_exported_traced_and_scripted_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    scripted = torch.jit.script(copy.deepcopy(model))
    convert_model(model, O2, CPU)
    convert_model(scripted, O2, CPU)
    x = torch.randn(2, 4)
    expected = model(x)
    exported = torch.export.export(model, (x,), strict=False)  # the default from torch 2.7 on
    for other in (scripted, torch.jit.trace(model, (x,)), exported.module()):
        output = other(x)
        assert output.dtype == FLOAT
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- containers

Pair = namedtuple("Pair", "first second")


class Typed(NamedTuple):
    x: Tensor
    n: int = 3


@dataclass
class Batch:
    x: Tensor
    ids: Tensor

    def __post_init__(self) -> None:
        assert self.x.dtype == FLOAT, "a copy must not run __post_init__ again"


@dataclass(frozen=True)
class FrozenBatch:
    x: Tensor
    n: int = 1


@dataclass(frozen=True)
class SlottedBatch:
    __slots__ = ("x",)
    x: Tensor


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A mapping of the fields that are not None, which are attributes too; no ``del``, no ``update``."""

    loss: Tensor
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not for ModelOutput")


class FrozenMapping(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Ragged:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, dtype: torch.dtype) -> Ragged:
        return Ragged(self.values.to(dtype))


class Path(tuple):  # type: ignore[type-arg]
    """A tuple with other constructor arguments and an attribute."""

    def __new__(cls, name: str, *items: Any) -> Path:
        self = super().__new__(cls, items)
        self.name = name
        return self


X, IDS = torch.ones(2), torch.tensor([1, 2])
CONTAINERS: dict[str, tuple[Any, Any]] = {
    # name: (container, how to get the floating tensor in it)
    "list": ([X, IDS, None], lambda c: c[0]),
    "tuple": ((1, X), lambda c: c[1]),
    "nested": ([{"a": (X, "s")}], lambda c: c[0]["a"][0]),
    "namedtuple": (Pair(X, IDS), lambda c: c.first),
    "NamedTuple": (Typed(X), lambda c: c.x),
    "tuple subclass": (Path("p", X, 1), lambda c: c[0]),
    "torch.return_types": (torch.max(torch.ones(2, 2), 0), lambda c: c.values),
    "PackedSequence": (pack_padded_sequence(torch.ones(2, 1, 3), torch.tensor([2])), lambda c: c.data),
    "deque": (deque([X], maxlen=3), lambda c: c[0]),
    "UserList": (UserList([X]), lambda c: c[0]),
    "dict": ({"x": X, 3: IDS}, lambda c: c["x"]),
    "OrderedDict": (OrderedDict(b=IDS, x=X, a=1), lambda c: c["x"]),
    "defaultdict": (defaultdict(list, x=X), lambda c: c["x"]),
    "UserDict": (UserDict(x=X), lambda c: c["x"]),
    "mappingproxy": (MappingProxyType({"x": X}), lambda c: c["x"]),
    "Mapping": (FrozenMapping({"x": X}), lambda c: c["x"]),
    "dataclass": (Batch(X, IDS), lambda c: c.x),
    "frozen dataclass": (FrozenBatch(X), lambda c: c.x),
    "slotted dataclass": (SlottedBatch(X), lambda c: c.x),
    "ModelOutput, item": (ModelOutput(loss=X), lambda c: c["loss"]),
    "ModelOutput, attribute": (ModelOutput(loss=X, logits=IDS), lambda c: c.loss),
    "object with to()": (Ragged(X), lambda c: c.values),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type(name: str) -> None:
    container, tensor_of = CONTAINERS[name]
    result = cast_floating(container, HALF)
    assert type(result) is type(container)
    assert tensor_of(result).dtype == HALF
    assert tensor_of(container).dtype == FLOAT, "the caller's container must not change"
    assert torch.equal(tensor_of(result).float(), tensor_of(container))
    if isinstance(container, Mapping):
        assert list(result) == list(container)
    if name != "object with to()":
        assert cast_floating(container, FLOAT) is container, "nothing to cast: the same object"


def test_containers_keep_their_extras() -> None:
    assert cast_floating(deque([X], maxlen=3), HALF).maxlen == 3
    assert cast_floating(defaultdict(list, x=X), HALF).default_factory is list
    assert cast_floating(Path("p", X), HALF).name == "p"
    output = cast_floating(ModelOutput(loss=X, logits=IDS), HALF)
    assert output.loss is output["loss"]
    assert output.logits is IDS
    assert list(output) == ["loss", "logits"]


def generator() -> Iterator[Tensor]:
    yield X


LEAVES = [None, 3, 2.5, True, "text", b"bytes", range(3), {1, 2}, frozenset({1}), generator(), Net(), Net, HALF]
LEAVES += [torch.device("cpu"), torch.Size([2]), slice(1), IDS, IDS > 1, torch.ones(2, dtype=torch.complex64), object()]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: type(value).__name__)
def test_other_values_are_returned_as_they_are(value: Any) -> None:
    assert cast_floating(value, HALF) is value


def test_numpy_arrays_are_left_alone() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(2, dtype=numpy.float32)
    assert cast_floating([array, X], HALF)[0] is array


def test_eight_bit_floats_are_left_alone() -> None:
    value = X.to(torch.float8_e4m3fn)
    assert cast_floating(value, HALF) is value


def test_a_module_given_as_an_argument_is_not_converted() -> None:
    inner, model = nn.Linear(2, 2), Echo()
    convert_model(model, O2, CPU)
    assert model(inner) is inner
    assert inner.weight.dtype == FLOAT


def test_gradients_flow_through_the_casts() -> None:
    model = Net()
    convert_model(model, O2, CPU)
    x = torch.randn(3, 4, requires_grad=True)
    model(x=x, bias=torch.ones(4)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FLOAT
    assert x.grad.abs().sum() > 0
