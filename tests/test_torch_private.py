# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The private names of torch that the package touches: this torch has them, and no others are touched."""

import ast
import sys
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.distributed as dist
from devices import needs, require
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apex_npu
from apex_npu import amp, optimizers
from apex_npu.backends import _torch_private


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


@contextmanager
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def unit_of_fsdp():
    require("fully_shard")
    with group_of_one():
        unit = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        unit(torch.ones(1, 2))
        return unit


def group_of_unit():
    return unit_of_fsdp()._get_fsdp_state()._fsdp_param_group


def parallel_module():
    with group_of_one():
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


# Kept, because torch 2.6 reads memory of the result through its node.
RESULT = Doubled.apply(torch.ones(1, requires_grad=True))

# The meaning of "()".
INSTANCES = {
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "torch.nn.parallel.DistributedDataParallel": parallel_module,
    "torch.distributed.fsdp.FSDPModule": unit_of_fsdp,
    "torch.distributed.fsdp.FSDPState": lambda: unit_of_fsdp()._get_fsdp_state(),
    "torch.distributed.fsdp.FSDPStateContext": lambda: unit_of_fsdp()._get_fsdp_state()._state_ctx,
    "torch.distributed.fsdp.FSDPParamGroup": group_of_unit,
    "torch.distributed.fsdp.FSDPParam": lambda: group_of_unit().fsdp_params[0],
    "torch.autograd.function.BackwardCFunction": lambda: RESULT.grad_fn,
}
# Operators of ATen, see ``_torch_private``.
OPERATORS = ("_foreach_", "_fused_", "_amp_foreach_", "_debug_has_internal_overlap")
# Modules that still reach into modules of torch themselves.
NOT_YET = {
    "autocast/forward_cast.py": {"torch.nn.modules.batchnorm._BatchNorm"},
    "compat/flattening.py": {"torch._utils._flatten_dense_tensors", "torch._utils._unflatten_dense_tensors"},
    "compat/parallel/sync_batchnorm.py": {"torch.nn.modules.batchnorm._BatchNorm"},
}


@pytest.mark.parametrize("name", _torch_private.NAMES)
def test_this_torch_has(name):
    owner, _, attribute = name.rpartition(".")
    made = INSTANCES[owner.removesuffix("()")]() if owner.endswith("()") else resolve_name(owner)
    assert hasattr(made, attribute), f"torch {torch.__version__} has no {name}: {_torch_private.NAMES[name]}"


def test_gradients_are_on_again_after_an_error():
    @_torch_private.no_grad
    def fail(x):
        assert not (x * 2).requires_grad
        raise KeyError

    x = torch.ones(1, requires_grad=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            with pytest.raises(KeyError):
                fail(x)
            assert torch.is_grad_enabled() is enabled


def test_a_disabled_function_takes_no_references():
    """Up to torch 2.7 what tells whether something is compiled has one of its result, None, too few at each call."""
    disabled = _torch_private.disable_dynamo(lambda: None)
    before = sys.getrefcount(None)
    for _ in range(10_000):
        disabled()
    assert abs(sys.getrefcount(None) - before) < 1_000


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_what_a_disabled_function_calls_is_not_compiled():
    compiled = []

    def inner(x):
        compiled.append(torch.compiler.is_compiling())
        return x.sin()

    disabled = _torch_private.disable_dynamo(lambda x: inner(x) + 1)
    counter = CompileCounter()
    torch._dynamo.reset()

    @torch.compile(backend=counter)
    def step(x):
        return disabled(x * 2) * 3

    x = torch.ones(2)
    assert torch.equal(step(x), disabled(x * 2) * 3)
    assert (counter.frame_count, counter.op_count) == (2, 2)  # x * 2 and, after it, * 3
    assert compiled == [False, False]


def is_private(part):
    return part.startswith("_") and not part.startswith("__")


def private_names_of_torch(tree):
    """What is imported from, or looked up in, torch's modules and is private: full names."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and (text := ast.unparse(node)).startswith("torch.") and "(" not in text:
            names = [text]
        for name in names:
            private = [part for part in name.split(".") if is_private(part)]
            if private and not private[0].startswith(OPERATORS):
                yield name


def sources():
    root = Path(apex_npu.__file__).parent
    return {str(path.relative_to(root)): ast.parse(path.read_text("utf-8")) for path in sorted(root.rglob("*.py"))}


def test_modules_of_torch_are_reached_into_in_one_place():
    found = {path: set(private_names_of_torch(tree)) for path, tree in sources().items()}
    del found["backends/_torch_private.py"]
    assert {path: names for path, names in found.items() if names} == NOT_YET


def test_private_attributes_of_torchs_objects_are_listed():
    nodes = [(path, node) for path, tree in sources().items() for node in ast.walk(tree)]
    own = {"_make", "_replace", "_schema"}  # of named tuples, and of an operator that is no op of torch
    own |= {"_group_step", "_fields"}  # a method of scripts' optimizers, and what Python's syntax trees have
    own |= {"_after_closure", "_optimizers"}  # a method of Lightning's precision plugins, and what timm's registry has
    own |= {"_member_names_", "_member_map_", "_value2member_map_"}  # of Python's enumerations
    own |= {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for _, node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = [(path, node) for path, node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    own |= {node.attr for _, node in attributes if isinstance(node.ctx, ast.Store)}
    listed = {name.rpartition(".")[2] for name in _torch_private.NAMES}
    used = {node.attr: path for path, node in attributes if path != "backends/_torch_private.py"}
    assert {name: used[name] for name in used.keys() - own - listed if not name.startswith(OPERATORS)} == {}


def test_a_name_that_is_gone_fails_what_needs_it_alone(monkeypatch):
    monkeypatch.delattr(torch._C, "_get_privateuse1_backend_name")
    with pytest.raises(AttributeError, match="_get_privateuse1_backend_name"):
        _torch_private.privateuse1_device_type()
    assert not _torch_private.is_in_backward()


@needs("fully_shard")
@pytest.mark.parametrize(
    "name", ["_state_ctx", "_is_root", "iter_forward_root", "_partial_reduce_output", "unsharded_accumulated_grad"]
)
def test_gradients_that_fully_shard_holds_back_elsewhere_are_warned_of_once(name):
    with group_of_one():
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        state = model._get_fsdp_state()
        group = state._fsdp_param_group
        for owner in (state, state._state_ctx, group, group.fsdp_params[0]):
            vars(owner).pop(name, None)
        with pytest.warns(RuntimeWarning, match="fully_shard holds back in a place.*static loss_scale") as noted:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=128.0, verbosity=0)
        assert len(noted) == 1
        loss = torch.ones((), requires_grad=True)
        with pytest.raises(KeyError, match="own error"), amp.scale_loss(loss, optimizer):
            raise KeyError("own error")
    amp.shutdown()


def as_in_torch_2_15(monkeypatch, fsdp_param):
    """The gradient that a parameter holds back has two names, of which one is a property that cannot be set."""
    vars(fsdp_param).pop("unsharded_accumulated_grad", None)
    found = property(lambda self: self._unsharded_param.grad)
    monkeypatch.setattr(type(fsdp_param), "unsharded_accumulated_grad", found, raising=False)


@needs("fully_shard")
def test_a_gradient_that_fully_shard_holds_back_may_have_two_names(monkeypatch):
    """As from torch 2.15 on: it is brought to another loss scale once, and dropped after an exception."""
    with group_of_one():
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O0", loss_scale="dynamic", dynamic_init_scale=8.0, num_losses=2, verbosity=0
        )
        model.set_requires_gradient_sync(False)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        fsdp_params = model._get_fsdp_state()._fsdp_param_group.fsdp_params
        assert [p._unsharded_param.grad.unique().tolist() for p in fsdp_params] == [[8.0], [8.0]]
        for fsdp_param in fsdp_params:
            as_in_torch_2_15(monkeypatch, fsdp_param)
        scalers = amp.state_dict()
        scalers["loss_scaler1"]["loss_scale"] = 32.0
        amp.load_state_dict(scalers)

        def interrupted():
            with amp.scale_loss(torch.ones((), requires_grad=True), optimizer, loss_id=1):
                assert [p._unsharded_param.grad.unique().tolist() for p in fsdp_params] == [[32.0], [32.0]]
                raise KeyError("own error")

        with pytest.raises(KeyError, match="own error"):
            interrupted()
        assert [p._unsharded_param.grad for p in fsdp_params] == [None, None]
        assert all(p.grad is None for p in model.parameters())
    amp.shutdown()


@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_the_policy_names_the_dtype_of_reductions_whose_default_depends_on_the_torch(level, dtype):
    assert amp.fsdp_policy(level) == MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    assert amp.fsdp_policy(level, torch.float32) == MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_the_policy_of_a_level_that_computes_in_float32_leaves_reductions_in_it(level):
    assert amp.fsdp_policy(level) == MixedPrecisionPolicy()
    assert amp.fsdp_policy(level, torch.bfloat16) == MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
