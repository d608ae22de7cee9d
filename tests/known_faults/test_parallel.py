# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two processes: options of ``combine_ddp`` take effect, and DistributedDataParallel averages stepped gradients.

The checks are in ``parallel_worker.py``; one start of two processes makes all of them.
"""

import json
from pathlib import Path

import processes
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]

WAYS = [f"{level} {kind}" for level in ("O1", "O2", "O5") for kind in ("torch", "fused", "fuse_unscale")]


def run_checks():
    found = {}
    for output in processes.run(Path(__file__).with_name("parallel_worker.py")):
        for line in output.splitlines():
            if line.startswith("verdict "):
                name, failure = json.loads(line.removeprefix("verdict "))
                found.setdefault(name, []).append(failure)
    return found


@pytest.fixture(scope="module")
def verdicts(made_once):
    """Of each check: the failures of both processes, as [type, text], or None."""
    return made_once("verdicts", run_checks)


def cases(name, *ids):
    """The names of one check's cases."""
    return ["-".join([name, *case.split()]) for case in ids]


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
    ),
)
def test_an_optimizer_that_is_taken_out_of_combine_ddp_keeps_its_own_gradients(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("combine_ddp_follows_its_attributes", "O1", "O2"))
def test_combine_ddp_follows_attributes_between_steps_alone(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("parameters_of_no_model_keep_their_values", "O1", "O2"))
def test_parameters_of_no_model_are_not_broadcast(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("shards_of_unequal_length_run", "O1", "O2"))
def test_shards_of_unequal_length_run(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("an_overflow_of_one_shard", "O1", "O2"))
def test_processes_skip_together_where_one_shard_overflows(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("unequal_shards_are_not_averaged", "O1"))
def test_averaging_unequal_shards_is_refused(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("ddp_after_initialize", *(f"{level} {kind}" for level in ("O1", "O2", "O5") for kind in ("torch", "fused"))),
)
def test_distributed_data_parallel_after_initialize_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases(
        "initialize_inside_of_ddp",
        *(f"{level} {kind}" for level in ("O0", "O1", "O2", "O3", "O5") for kind in ("torch", "fused")),
    ),
)
def test_initialize_of_the_module_inside_of_distributed_data_parallel_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("no_sync_with_delay_unscale", *WAYS),
)
def test_accumulation_with_no_sync_and_delay_unscale_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("no_sync", *WAYS),
)
def test_accumulation_with_no_sync_alone_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("no_sync_by_a_scaler", *(f"{level} {kind}" for level in ("O1", "O2", "O5") for kind in ("torch", "fused"))),
)
def test_accumulation_with_no_sync_by_a_scaler_averages(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", cases("accumulation_programs", *WAYS))
def test_random_accumulations_are_those_of_distributed_data_parallel_alone(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name", cases("a_step_with_gradients_of_one_process", "O1 dynamic", "O2 dynamic", "O2 64.0", "O5 1.0")
)
def test_a_step_after_no_sync_is_refused(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", ["a_step_that_torch_takes", "gradients_can_be_clipped_before_they_are_averaged"])
def test_without_masters_gradients_are_those_of_plain_torch_after_no_sync(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize("name", ["wrappers_that_cannot_be_rebuilt", "a_failure_inside_of_ddp"])
def test_initialize_inside_of_distributed_data_parallel_leaves_it_working(verdicts, name):
    verify(verdicts, name)


@pytest.mark.parametrize(
    "name",
    cases("copies_of_a_wrapper", *(f"{level} {kind}" for level in ("O1", "O2", "O5") for kind in ("torch", "fused"))),
)
def test_copies_of_distributed_data_parallel_average(verdicts, name):
    verify(verdicts, name)


def test_distributed_data_parallel_that_is_loaded_without_amp_averages(verdicts):
    verify(verdicts, "a_wrapper_that_is_loaded_without_amp")


@pytest.mark.parametrize(
    "name",
    cases("two_wrappers_of_one_optimizer", *("O1 torch", "O1 fused", "O2 torch", "O2 fused", "O2 fuse_unscale")),
)
def test_a_step_waits_for_averages_of_its_own_gradients_alone(verdicts, name):
    verify(verdicts, name)


def test_an_interrupted_shutdown_is_completed(verdicts):
    verify(verdicts, "an_interrupted_shutdown")


def test_batch_norms_are_synchronised(verdicts):
    verify(verdicts, "batch_norms_are_synchronised")
