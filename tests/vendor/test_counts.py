# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Launches, waits and bytes of apex_npu on the vendor's torch_npu: exact, and at most those of the best baseline.

The others are torch_npu's own fused optimizers with its GradScaler, and torch.optim's foreach and fused ones with
torch's. ``benchmarks/studies/npu_counts.py`` has what they do.
"""

import functools

import host_cann
import npu_counts
import pytest
import torch
from devices import needs

from apex_npu import amp

# Launches, and waits, of a bare step and of whole iterations at O1 and O2, whatever the number of tensors. At O2 one
# writes the model's parameters.
OURS = {
    "SGD": ((2, 0), (6, 1), (7, 1)),
    "Adam": ((3, 0), (7, 1), (8, 1)),
    "AdamW": ((3, 0), (7, 1), (8, 1)),
    "LAMB": ((20, 0), (24, 1), (25, 1)),
    "RMSprop": ((6, 0), (10, 1), (11, 1)),
}
PAIRS = [(rule, comparison) for rule in OURS for comparison in npu_counts.COMPARISONS]


def marked(pairs):
    return [pytest.param(*pair, marks=[needs("fused_sgd")] if pair[0] == "SGD" else []) for pair in pairs]


EVERY = marked(PAIRS)


@pytest.fixture(autouse=True)
def _without_amp():
    yield
    amp.shutdown()


@functools.cache
def counted(rule, workload, comparison, name):
    return npu_counts.count(npu_counts.make(rule, npu_counts.LISTS[workload](), comparison, name))


def baselines(rule, workload, comparison):
    if "iteration" in comparison:
        comparison = npu_counts.COMPARISONS[1]  # they have one kind
    return {name: counted(rule, workload, comparison, name) for name in npu_counts.variant_names(rule)[1:]}


@pytest.mark.parametrize("workload", npu_counts.LISTS)
@pytest.mark.parametrize(("rule", "comparison"), EVERY)
def test_launches_and_waits_are_these_for_any_list(rule, comparison, workload):
    n = counted(rule, workload, comparison, "apex_npu")
    assert (n.launches, n.syncs) == OURS[rule][npu_counts.COMPARISONS.index(comparison)], dict(n.by_op)


@pytest.mark.parametrize("workload", ["small50", "thin_resnet50"])
@pytest.mark.parametrize(("rule", "comparison"), EVERY)
def test_others_take_no_fewer(rule, comparison, workload):
    ours = counted(rule, workload, comparison, "apex_npu")
    others = baselines(rule, workload, comparison)
    # torch's fused Adam computes on the host: it waits eight times for each tensor.
    gathers = (rule, comparison) == ("SGD", "step")  # which torch's fused SGD does not
    least = min(n.launches for name, n in others.items() if (rule, name) != ("Adam", "torch fused"))
    assert ours.launches <= least + gathers
    # Its fused AdamW does not wait because on an NPU it does not heed the flag of a GradScaler.
    assert ours.syncs <= min(n.syncs for name, n in others.items() if (rule, name) != ("AdamW", "torch fused"))


# A bare step of RMSprop gathers gradients, which the vendor's backward has added to its buffer; at O2 apex_npu
# writes the model's parameters as well.
DEARER = {("RMSprop", "step"), ("RMSprop", "O2 iteration")}


@pytest.mark.parametrize(("rule", "comparison"), marked(pair for pair in PAIRS if pair not in DEARER))
def test_bytes_are_no_more_than_the_vendors(rule, comparison):
    ours = counted(rule, "thin_resnet50", comparison, "apex_npu")
    assert ours.bytes <= baselines(rule, "thin_resnet50", comparison)["torch_npu NpuFused"].bytes


@pytest.mark.parametrize("rule", OURS)
@pytest.mark.parametrize("comparison", npu_counts.COMPARISONS[1:])
def test_fuse_unscale_costs_a_flag_where_nothing_is_clipped(rule, comparison):
    shapes = npu_counts.LISTS["small50"]()
    fused = npu_counts.count(npu_counts.make(rule, shapes, comparison, "apex_npu", fuse_unscale=True))
    plain = counted(rule, "small50", comparison, "apex_npu")
    # A check that is left to the step has a flag and a divisor of its own, which other blocks keep.
    assert (fused.launches, fused.syncs, fused.bytes) == (plain.launches + 2, plain.syncs, plain.bytes + 8)


@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_clipping_waits_once(fuse_unscale):
    variant = npu_counts.make("Adam", npu_counts.small50(), "O2 iteration", "apex_npu", fuse_unscale=fuse_unscale)
    (optimizer,) = amp.session.current().adopted
    backward = variant.backward
    clipped = variant._replace(backward=lambda: (backward(), optimizer.clip_optimizer_grad_norm_fused(1e-3)))
    assert npu_counts.count(clipped).syncs == 1


def test_a_first_step_takes_as_many_launches_for_any_list():
    launches = []
    for workload in ("small50", "thin_resnet50"):
        variant = npu_counts.make("Adam", npu_counts.LISTS[workload](), "step", "apex_npu")
        variant.trained.prepare()
        variant.backward()
        with host_cann.count() as n:
            variant.step()
        launches.append(n.launches)
    assert launches[0] == launches[1] < 20


def test_joined_gradients_take_no_memory_but_their_buffers():
    trained = npu_counts.Trained(npu_counts.LISTS["thin_resnet50"]())
    optimizer = npu_counts.optimizers.NpuFusedRMSprop(trained.params, lr=1e-3)
    for _ in range(2):
        trained.prepare()
        trained.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.prepare()
    trained.loss().backward()
    flats = optimizer.flat_grads()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    for flat in flats:
        flat.gather()
    assert torch.npu.max_memory_allocated() == before
