# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every mistake gets an error that names the argument, the rule, the value and the way out, and changes nothing."""

import dataclasses
import math
import pkgutil

import pytest
import torch
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host


def pair():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "02"}, RuntimeError, "'02'.*the letter O, not the number zero"),
        ({"opt_level": "O9"}, RuntimeError, "Options are 'O0', 'O1', 'O2', 'O3'"),
        ({"opt_level": 2}, RuntimeError, "level 2.*did you mean 'O2'"),
        ({"opt_level": "o0"}, RuntimeError, "did you mean 'O0'"),
        ({"cast_model_type": "half"}, TypeError, "cast_model_type must be a floating-point torch.dtype.*'half'"),
        ({"cast_model_type": torch.int8}, TypeError, "got torch.int8"),
        ({"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32 must be True, False or None, got 1"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, RuntimeError, "leave cast_model_type unspecified"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "O1, batchnorm functions run in fp32"),
        ({"opt_level": "O1", "master_weights": False}, RuntimeError, "leave master_weights unspecified"),
        ({"patch_torch_functions": True}, RuntimeError, "patch_torch_functions=True goes with .*, got O2"),
        ({"user_cast_preferred": True}, RuntimeError, "user_cast_preferred=True should only be set"),
        ({"cast_model_outputs": "half"}, TypeError, "cast_model_outputs must be a floating-point torch.dtype"),
        ({"keep_frozen_float32": 1}, TypeError, "keep_frozen_float32"),
        ({"combine_grad": "yes"}, TypeError, "combine_grad must be True, False or None, got 'yes'"),
        ({"fuse_unscale": "yes"}, TypeError, "fuse_unscale must be True, False or None, got 'yes'"),
        ({"check_combined_tensors": "warn"}, TypeError, "must be True, False, 'error' or None"),
        ({"combine_ddp": True}, RuntimeError, "combine_ddp=True needs combine_grad=True"),
        ({"ddp_reduce_dtype": torch.float32}, RuntimeError, "dtype in which combine_ddp=True reduces"),
        ({"ddp_reduce_dtype": torch.float16}, TypeError, "must be torch.float32, torch.bfloat16 or None"),
        ({"ddp_replica_count": 0}, ValueError, "ddp_replica_count must be an integer >= 1, got 0"),
        ({"num_losses": 0}, ValueError, "num_losses must be an integer >= 1, got 0"),
        *(
            ({"loss_scale": bad}, ValueError, f"loss_scale must be.*{bad}")
            for bad in ("banana", 0, -2.0, math.nan, True)
        ),
        ({"dynamic_init_scale": 0.0}, ValueError, "dynamic_init_scale must be positive and finite, got 0.0"),
        ({"dynamic_init_scale": "x"}, TypeError, "dynamic_init_scale must be a number, got 'x'"),
        ({"scale_growth_factor": 0.9}, ValueError, "scale_growth_factor must be >= 1, got 0.9"),
        ({"scale_backoff_factor": 1.0}, ValueError, r"scale_backoff_factor must be in \(0, 1\), got 1.0"),
        ({"scale_backoff_factor": -0.5}, ValueError, "scale_backoff_factor must be positive"),
        ({"scale_window": 0}, ValueError, "scale_window must be positive and finite, got 0"),
        ({"scale_window": 1.5}, ValueError, "scale_window must be an integer >= 1, got 1.5"),
        ({"min_loss_scale": -1.0}, ValueError, "min_loss_scale must be positive"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, ValueError, "4.0 must not exceed max_loss_scale 2.0"),
        ({"max_loss_scale": math.inf}, ValueError, "max_loss_scale must be positive and finite"),
        ({"max_loss_scale": 2.0**127}, ValueError, r"max_loss_scale must be at most 2\*\*126"),
        ({"scale_hysteresis": 0}, ValueError, "scale_hysteresis must be positive and finite, got 0"),
        ({"scale_hysteresis": 1.5}, ValueError, "scale_hysteresis must be an integer >= 1, got 1.5"),
        ({"scale_hysteresis": "2"}, TypeError, "scale_hysteresis must be a number, got '2'"),
        *(({"skip_alarm": bad}, ValueError, f"skip_alarm must be an integer >= 1, got {bad}") for bad in (0, True)),
    ],
)
def test_arguments(options, error, message):
    model, optimizer = pair()
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, **options})
    assert model.weight.dtype == torch.float32
    assert type(optimizer) is torch.optim.SGD
    with pytest.raises(RuntimeError, match="amp has not been initialized"):
        amp.state_dict()


def test_scale_arguments_are_keywords_only():
    """Upstream and Ascend's patch disagree about their order."""
    with pytest.raises(TypeError, match="positional"):
        amp.initialize(*pair(), True, "O1", None, None, None, None, None, None, 1, 0, 1.0)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (3, "models must be either a single model or a list of models, got int"),
        ([nn.Linear(1, 1), "x"], "got Linear, str"),
        ((nn.Linear(1, 1),), "got tuple"),
    ],
)
def test_models(models, message):
    with pytest.raises(TypeError, match=message):
        amp.initialize(models, opt_level="O1")


def test_optimizers():
    model, _ = pair()
    with pytest.raises(TypeError, match=r"optimizers must be either a single optimizer or a list.*got dict"):
        amp.initialize(model, {}, opt_level="O1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_already_in_half(dtype):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(RuntimeError, match=rf"Found param 1.weight with type {dtype}.*drop that call"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[0].weight.dtype == torch.float32


def test_wrapped_too_early():
    with pytest.raises(RuntimeError, match=r"instance of DataParallel. Parallel wrappers should only be applied AFTER"):
        amp.initialize(nn.DataParallel(nn.Linear(3, 2)), opt_level="O1")


def test_an_optimizer_initialised_twice():
    model, optimizer = pair()
    with pytest.raises(RuntimeError, match=r"only be passed through amp.initialize once: the list has one twice"):
        amp.initialize(model, [optimizer, optimizer], opt_level="O1", verbosity=0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match=r"only be passed through amp.initialize once: .* make a new optimizer"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert torch.is_autocast_enabled("cpu")  # the first one still holds


def test_step_replaced_on_the_instance():
    model, optimizer = pair()
    optimizer.step = lambda: None
    with pytest.raises(RuntimeError, match="already has step defined on the instance"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def test_scale_loss_before_initialize():
    _, optimizer = pair()
    with pytest.raises(RuntimeError, match=r"amp.scale_loss .* not been initialized"):
        backward(torch.ones(()), optimizer)


def test_scale_loss_arguments():
    model, optimizer = amp.initialize(*pair(), opt_level="O1", verbosity=0)
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 3)).sum()
    for arguments, error, message in [
        ((3.0, optimizer), TypeError, "loss must be a tensor, got float"),
        ((loss, stranger), RuntimeError, "SGD was not passed to amp.initialize"),
        ((loss, {optimizer}), TypeError, "optimizers must be an optimizer or a list of them, got set"),
        ((loss, optimizer, 1), IndexError, r"loss_id must be in \[0, 1\), got 1"),
    ]:
        with pytest.raises(error, match=message), amp.scale_loss(*arguments):
            pass


@pytest.mark.parametrize("cls", [torch.optim.SGD, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_of_flat_buffers(level, cls):
    """How it works instead, test_training.py has."""
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    optimizer = cls(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, combine_grad=True, verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"\(10, 3\) has a sparse gradient.*without combine_grad"):
        backward(model(torch.tensor([1, 2])).sum(), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("step", ["frontend.convert_model", "remainder_masters.RemainderMasters.make"])
def test_failure_half_way_puts_everything_back(step, monkeypatch):
    """The second model cannot be converted, or its optimizer adopted: all is as it was, and so is amp."""
    kept, _ = amp.initialize(*pair(), opt_level="O1", verbosity=0)
    session = amp.session.current()
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    pairs = [optimizers.NpuFusedSGD(m.parameters(), lr=0.1) for m in models]
    real, calls = pkgutil.resolve_name(f"apex_npu.amp.{step}"), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return real(*arguments)

    monkeypatch.setattr(f"apex_npu.amp.{step}", failing)
    with pytest.raises(MemoryError):
        amp.initialize(models, pairs, opt_level="O2", verbosity=0)
    for model, optimizer in zip(models, pairs, strict=True):
        assert type(optimizer) is optimizers.NpuFusedSGD
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert model.weight.dtype == torch.float32
        assert "forward" not in vars(model)
        assert not model._state_dict_hooks
    assert amp.session.current() is session
    assert kept(torch.ones(1, 3)).dtype == torch.float16  # O1 continues


def test_load_state_dict():
    amp.initialize(*pair(), opt_level="O1", verbosity=0)
    before = amp.state_dict()
    for state, error, message in [
        ([], TypeError, "state_dict must be a dict"),
        ({"model": 1}, RuntimeError, r'Unexpected key\(s\) in state_dict: "model"'),
        ({"loss_scaler0": {"loss_scale": -1.0, "unskipped": 0}}, ValueError, "must be positive and finite, got -1.0"),
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": -1}}, ValueError, "unskipped in the state dict must be"),
        ({"loss_scaler0": {}}, ValueError, "Nothing has been loaded"),
    ]:
        with pytest.raises(error, match=message):
            amp.load_state_dict(state)
        assert amp.state_dict() == before
    two = {f"loss_scaler{i}": {"loss_scale": 2.0 + i, "unskipped": i} for i in range(2)}
    with pytest.warns(RuntimeWarning, match="contains 2 entries, while 1 loss_scalers are used"):
        amp.load_state_dict(two)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}


def test_of_several_scalers_all_are_loaded_or_none():
    amp.initialize(*pair(), opt_level="O1", num_losses=2, verbosity=0)
    before = amp.state_dict()
    with pytest.raises(ValueError, match="Nothing has been loaded"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 2.0}})
    assert amp.state_dict() == before


def test_last_step_of_a_stranger():
    _, optimizer = pair()
    with pytest.raises(RuntimeError, match=r"SGD was not passed to amp.initialize"):
        amp.last_step(optimizer)


def test_combine_ddp_needs_torch_distributed_and_says_how_to_get_it():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": "O2", "combine_grad": True, "verbosity": 0}
    with pytest.raises(RuntimeError, match=r"combine_ddp=True needs torch.distributed: call .*init_process_group"):
        amp.initialize(model, optimizer, combine_ddp=True, **options)
    with pytest.raises(RuntimeError, match=r"overflow_group needs torch.distributed"):
        amp.initialize(model, optimizer, overflow_group="everyone", **options)
    assert type(optimizer) is torch.optim.SGD
    assert model.weight.dtype == torch.float32
    amp.initialize(model, optimizer, combine_ddp=False, **options)  # no warning, no requirement


def test_an_optimizer_that_has_lost_its_process_group_is_refused():
    """Of a copy that was loaded where nothing averages gradients: it must not train as if it were alone."""
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    state = optimizer._amp_state
    state.policy = dataclasses.replace(state.policy, combine_ddp=True)
    with pytest.raises(RuntimeError, match="has lost its process group"):
        amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer).__enter__()


def of_one_memory(how):
    """A parameter, and what shares its memory."""
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(12.0).view(4, 3))
    if how == "a buffer":
        model.register_buffer("b", model.a.data[1])
    elif how == "expanded":
        model.register_buffer("b", model.a.data[:1].expand(4, 3))
    else:
        views = {"tied": model.a, "rows": model.a[2:], "transposed": model.a.t(), "frozen": model.a[0]}
        model.b = nn.Parameter(views[how].detach(), requires_grad=how != "frozen")
    return model


@pytest.mark.parametrize("how", ["tied", "rows", "transposed", "frozen", "a buffer", "expanded"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_weights_that_share_memory_are_refused_where_a_cast_would_part_them(level, how):
    model = of_one_memory(how)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(RuntimeError, match=f"(a and b|b and a) share memory.*{level} casts.* Use one"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.a.dtype == torch.float32
    with torch.no_grad():
        model.a.zero_()
    assert not model.b.any()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_weights_that_share_memory_stay_so_where_they_are_not_cast(level):
    model = of_one_memory("rows")
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    with torch.no_grad():
        model.a.zero_()
    assert not model.b.any()


def test_columns_of_one_matrix_share_no_elements():
    matrix = torch.arange(12.0).view(3, 4)
    model = nn.ParameterList([nn.Parameter(part) for part in matrix.split(2, dim=1)])
    model.register_buffer("constant", matrix[:0])
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert torch.equal(torch.cat(list(model), dim=1).float(), torch.arange(12.0).view(3, 4))
