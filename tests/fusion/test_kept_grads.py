# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A gradient that a script keeps moves out of its slot before a new one is written there, and only then."""

import pytest
import torch
from devices import DEVICE, needs_extension
from torch import nn

from apex_npu.fusion import fuse
from apex_npu.fusion.grad_slots import IN_BUFFER

pytestmark = needs_extension


def make():
    params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in ((3, 2), (5,))]
    return params, fuse(params)[0].grads


def give(params, value):
    for p in params:
        p.grad = torch.full_like(p, value)


ALIASES = {"itself": lambda grad: grad, "a view": lambda grad: grad.view(-1), "all of its rows": lambda grad: grad[:]}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("gather", ["gather", "take"])
def test_what_is_kept_keeps_its_values(alias, gather):
    params, grads = make()
    kept = []
    for value in (1.0, 2.0, 3.0):
        give(params, value)
        grads.gather() if gather == "gather" else grads.take()
        kept.append(ALIASES[alias](params[0].grad))
        for p in params:
            p.grad = None
    assert [float(grad.sum()) for grad in kept] == [6.0, 12.0, 18.0]
    begin, end = grads.flat.data_ptr(), grads.flat.data_ptr() + grads.flat.nbytes
    assert [begin <= grad.data_ptr() < end for grad in kept] == [False, False, True]


def test_what_is_not_kept_stays_the_view_of_its_slot():
    params, grads = make()
    give(params, 1.0)
    grads.gather()
    places = [p.grad.data_ptr() for p in params]
    views = list(map(id, grads.views))
    for _ in range(2):
        for p in params:
            p.grad = None
        give(params, 2.0)
        grads.gather()
        assert [p.grad.data_ptr() for p in params] == places
        assert list(map(id, grads.views)) == views


def test_a_kept_gradient_is_accumulated_into_while_it_stays_in_place():
    params, grads = make()
    give(params, 1.0)
    grads.gather()
    kept = params[0].grad
    params[0].sum().backward()
    assert grads.gather() == bytes([IN_BUFFER] * 2)
    assert params[0].grad is kept
    assert kept.eq(2.0).all()


def test_a_kept_gradient_may_become_one_again():
    params, grads = make()
    give(params, 1.0)
    grads.gather()
    kept = params[0].grad
    params[0].grad = None
    give(params, 2.0)
    grads.gather()
    params[0].grad = kept
    grads.gather()
    assert params[0].grad.eq(1.0).all()
    assert kept.eq(1.0).all()
