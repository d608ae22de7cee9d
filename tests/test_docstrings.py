# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Public docstrings have an ``Example::``, which runs and gives what it shows.

Wrappers of torch's functions and layers need none.
"""

import contextlib
import doctest
import importlib
import inspect

import pytest
import torch
import torch.distributed as dist
from devices import require
from torch import nn

import apex_npu
from apex_npu import amp

MODULES = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
# Modules of thin wrappers, in which an example is run where there is one.
WRAPPERS = ("fp16_utils", "multi_tensor_apply", "normalization")


def public_objects():
    for module in (apex_npu, *(importlib.import_module(f"apex_npu.{name}") for name in MODULES)):
        for name in module.__all__:
            found = getattr(module, name)
            public = inspect.isclass(found) or inspect.isfunction(found)
            has_none = module.__name__.endswith(WRAPPERS) and "Example::" not in (inspect.getdoc(found) or "")
            if public and not has_none and found.__module__.startswith("apex_npu"):
                yield pytest.param(found, id=f"{module.__name__}.{name}")


class ShownOutput(doctest.OutputChecker):
    """What an example does not show, such as the lines that ``initialize`` prints, may be anything."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def names():
    """What examples take for granted: the modules, and a model with what trains it."""
    torch.manual_seed(0)
    model, input, target = nn.Linear(4, 2), torch.ones(3, 4), torch.zeros(3, 2)
    given = {"torch": torch, "nn": nn, "apex_npu": apex_npu, "loader": [(input, target)], "loss_fn": nn.MSELoss()}
    given |= {name: importlib.import_module(f"apex_npu.{name}") for name in MODULES}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield {**given, "model": model, "input": input, "target": target, "optimizer": optimizer}
    amp.shutdown()
    for name in ("logaddexp", "addcmul", "lerp"):
        with contextlib.suppress(ValueError):  # not registered by this example
            amp.unregister_function(torch, name)
    apex_npu.uninstall_apex()


@pytest.fixture
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("found", list(public_objects()))
def test_examples_run(found, names, request):
    docstring = inspect.getdoc(found)
    assert "Example::" in docstring
    if "fully_shard(" in docstring:
        require("fully_shard")
    if "process group\n" in docstring:
        request.getfixturevalue("process_group")
    examples = doctest.DocTestParser().get_doctest(docstring, names, found.__qualname__, None, None)
    assert examples.examples
    assert doctest.DocTestRunner(ShownOutput()).run(examples).failed == 0
