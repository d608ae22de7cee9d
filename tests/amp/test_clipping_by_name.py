# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``from torch.nn.utils import clip_grad_norm_``, as most scripts import it, clips the stepped gradients or warns."""

import warnings

import pytest
import torch
from small_programs import (
    CASTING,
    WITH_MASTERS,
    Weights,
    assert_values,
    backward,
    kinds,
    levels,
    start,
    vector,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from apex_npu import amp

clippers = pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_], ids=lambda clip: clip.__name__)


def clip_and_step(level, kind, clip, params=None):
    """A gradient of 100 clipped to 1: the weights after the step, and the warnings."""
    model, optimizer = start(Weights(10.0), kind=kind, level=level)
    backward(model(vector(100.0, 0.0, 0.0)), optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip(list(amp.master_params(optimizer) if params == "masters" else model.parameters()), 1.0)
        optimizer.step()
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning) and "clip" in str(w.message)]
    return model, said


def clipped_or_said(model, said):
    if not said:
        assert_values(model.parameters(), (9.0, 10.0, 10.0), rtol=1e-6)


@clippers
@kinds(("torch", "fused", "fuse_unscale"))
@levels(WITH_MASTERS)
def test_parameters_that_have_masters(level, kind, clip):
    clipped_or_said(*clip_and_step(level, kind, clip))


@clippers
@levels(("O0", *CASTING))
def test_gradients_that_fuse_unscale_keeps_scaled(level, clip):
    clipped_or_said(*clip_and_step(level, "fuse_unscale", clip))


@clippers
@kinds(("torch", "fused", "fuse_unscale"))
@levels(WITH_MASTERS)
def test_the_function_that_is_looked_up_when_it_is_called_says_so(level, kind, clip):
    _, said = clip_and_step(level, kind, lambda *args: getattr(torch.nn.utils, clip.__name__)(*args))
    assert len(said) == 1


@clippers
@kinds(("torch", "combine_grad", "fused"))
@levels(("O0", *CASTING, *WITH_MASTERS))
def test_what_is_stepped_is_clipped(level, kind, clip):
    model, said = clip_and_step(level, kind, clip, "masters")
    assert not said
    assert_values(model.state_dict().values(), (9.0, 10.0, 10.0), rtol=1e-6)
