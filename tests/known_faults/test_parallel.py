# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two processes: what a script says of ``combine_ddp`` holds, and DistributedDataParallel averages what is stepped.

The checks are in ``parallel_worker.py``; one start of two processes makes all of them.
"""

import json
from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from devices import DEVICE
from known_faults.common import known_fault

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]

STILL_AVERAGES = "combine_ddp and accelerate, set on an optimizer after initialize, change nothing"
OVERWRITES = "initialize gives parameters of no model the values of rank 0"
REFUSES_SHARDS = "combine_ddp refuses parameters whose shapes differ, though their optimizer is taken out of it"
UNNOTICED = "the level casts parameters inside of a DistributedDataParallel, which averages nothing from then on"
NOT_DELAYED = "fuse_unscale brings local gradients to masters in spite of delay_unscale"
DRIFT = "each block brings the gradients of its own process to masters, where no_sync averages them no more"
NO_BATCH_NORMS = "torch's SyncBatchNorm asks for batch_norm_stats, which the simulated npu lacks"


@pytest.fixture(scope="module")
def verdicts():
    """Of each check: the failures of both processes, as [type, text], or None."""
    found = {}
    for output in processes.run(Path(__file__).with_name("parallel_worker.py")):
        for line in output.splitlines():
            if line.startswith("verdict "):
                name, failure = json.loads(line.removeprefix("verdict "))
                found.setdefault(name, []).append(failure)
    return found


def cases(name, *ids, fault=None):
    """Parametrised over the cases of one check; those of ``fault`` fail today."""
    marks = () if fault is None else fault
    return [pytest.param("-".join([name, *case.split()]), marks=marks) for case in ids]


def verify(verdicts, name):
    failures = verdicts[name]
    assert len(failures) == 2
    for kind, text in filter(None, failures):
        raise (AssertionError if kind == "AssertionError" else RuntimeError)(text)


@pytest.mark.parametrize("name", cases("gradients_are_averaged", "O1", "O2"))
def test_combine_ddp_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases(
        "combine_ddp_taken_back_by_the_script",
        *("O0 fused", "O1 combine_grad", "O1 fused", "O2 combine_grad", "O2 fused"),
        fault=known_fault(STILL_AVERAGES),
    ),
)
def test_an_optimizer_that_is_taken_out_of_combine_ddp_keeps_its_own_gradients(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name", cases("parameters_of_no_model_keep_their_values", "O1", "O2", fault=known_fault(OVERWRITES))
)
def test_parameters_of_no_model_are_not_broadcast(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("shards_of_unequal_length_run", "O1", "O2", fault=known_fault(REFUSES_SHARDS, raises=RuntimeError)),
)
def test_shards_of_unequal_length_run(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("ddp_after_initialize", *(f"{level} {kind}" for level in ("O1", "O2", "O5") for kind in ("torch", "fused"))),
)
def test_distributed_data_parallel_after_initialize_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    [
        *cases("initialize_inside_of_ddp", "O0 torch", "O0 fused", "O1 torch", "O1 fused"),
        *cases(
            "initialize_inside_of_ddp",
            *(f"{level} {kind}" for level in ("O2", "O3", "O5") for kind in ("torch", "fused")),
            fault=known_fault(UNNOTICED),
        ),
    ],
)
def test_initialize_of_the_module_inside_of_distributed_data_parallel_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    [
        *cases("no_sync_with_delay_unscale", "O1 torch", "O1 fused", "O1 fuse_unscale"),
        *cases("no_sync_with_delay_unscale", "O2 torch", "O2 fused", "O5 torch", "O5 fused"),
        *cases("no_sync_with_delay_unscale", "O2 fuse_unscale", "O5 fuse_unscale", fault=known_fault(NOT_DELAYED)),
    ],
)
def test_accumulation_with_no_sync_and_delay_unscale_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    [
        *cases("no_sync", "O1 torch", "O1 fused", "O1 fuse_unscale"),
        *cases(
            "no_sync",
            *(f"{level} {kind}" for level in ("O2", "O5") for kind in ("torch", "fused", "fuse_unscale")),
            fault=known_fault(DRIFT),
        ),
    ],
)
def test_accumulation_with_no_sync_alone_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.xfail(DEVICE.type == "npu", reason=NO_BATCH_NORMS, raises=RuntimeError, strict=True)
def test_batch_norms_are_synchronised(verdicts):
    verify(verdicts, "batch_norms_are_synchronised")
