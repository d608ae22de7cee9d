# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""combine_ddp in several processes. What they check is in the workers beside; starting them takes the longest."""

from __future__ import annotations

import re
from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from devices import DEVICE, SATURATING, VENDOR, needs_counts

pytestmark = [pytest.mark.device, pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")]


def run(worker, *checks, **options):
    processes.run(Path(__file__).with_name(f"{worker}_worker.py"), *checks, **options)


# Of other numbers of processes, of more levels and optimizers, and of faults that the host finds: a simulated NPU shows
# nothing more.
AGAIN = pytest.mark.sweep if DEVICE.type == "npu" else pytest.mark.slow


# Starting the processes takes longer than a group of checks does: all of these have one start.
TOGETHER = {
    # Parameters are those of one process that sees the whole batch.
    "training": ("values_of_rank_0", "levels", "unused_parameters"),
    # Gradients are averages, whatever backward does.
    "backward": (
        "gradients_are_averages",
        "sent_during_backward",
        "recorded_order",
        "unusual_backwards",
        "accumulation",
        "changing_parameters_within_an_accumulation",
        "precision_of_averages",
        "cleared_in_a_block",
    ),
    # Processes agree, or fail together.
    "agreement": (
        "refusals",
        "failure_of_a_second_initialize",
        "another_seed",
        "masters_that_were_written",
        "state_dicts_that_were_written",
        "averaged_twice",
        "smaller_group",
        "misuse",
        "copies",
        "overflow_in_a_micro_batch",
        "overflow_group",
    ),
    # What goes wrong on one process ends the block on all.
    "failures": ("exceptions", "late_gradients"),
}
if DEVICE.type == "cpu":  # random bits are shifted, which the simulated libraries of CANN lack
    TOGETHER["agreement"] += ("remainders_of_another_seed",)


def test_two_processes():
    run("together", *(f"{worker}.{check}" for worker, checks in TOGETHER.items() for check in checks))


@pytest.mark.slow
def test_distributed_data_parallel_and_distributed_checkpoints_work():
    run("beside", "ddp_around_the_model", "checkpoints_beside_ddp")


# Most parameters divide by two, and hardly one by three.
SHARDED = {
    2: (
        "parts_are_fused",
        "random_bits",
        "refusals",
        "private_names_of_torch_have_moved",
        "steps_leave_nothing",
        "same_as_torch",
        "in_place_is_as_copied",
    ),
    3: ("same_as_whole", "checkpoints", "plain_state_dicts", "what_users_do", "gradients_are_multiplied"),
}


SHARDED_AGAIN = {2: SHARDED[3], 3: ("same_as_torch", "in_place_is_as_copied")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "checks"),
    [*SHARDED.items(), *(pytest.param(*case, marks=pytest.mark.sweep) for case in SHARDED_AGAIN.items())],
    ids=["2", "3", "2-again", "3-again"],
)
def test_sharded_parameters_are_stepped_part_by_part(count, checks):
    run("sharded", *checks, processes=count)


# One start for each number of processes. A single one can have a GPU, and with it NCCL, to itself.
FSDP: dict[int, tuple[str, ...]] = {
    1: (
        "same_as_plain_torch",
        "norms_of_parts",
        "torchs_clipping",
        "grad_scalers",
        "accumulation",
        "overflow_that_is_held_back",
        "exceptions_while_gradients_are_held_back",
        "exceptions_while_units_reduce",
    ),
    2: (
        "same_as_one_process",
        "same_as_plain_torch",
        "norms_of_parts",
        "gradients_stay_where_they_are",
        "gathered_gradients_stay_scaled",
        "copied_gradients_are_unscaled",
        "torchs_clipping",
        "grad_scalers",
        "moving_averages",
        "accumulation",
        "overflow_that_is_held_back",
        "scale_that_moves_while_gradients_are_held_back",
        "an_exception_on_one_process",
        "an_exception_on_one_process_that_holds_gradients_back",
        "exceptions_while_gradients_are_held_back",
        "exceptions_while_units_reduce",
        "adapters",
        "batch_norms",
        "nvidias_distributed_optimizers",
        "checkpoints",
        "offloaded",
        "bad_input",
    ),
    4: (
        "norms_over_two_dimensions",
        "two_ways_of_cutting",
        "accumulation_over_two_dimensions",
        "scale_that_moves_over_two_dimensions",
        "meshes_of_different_processes",
        "checkpoints_of_fewer",
    ),
}


if DEVICE.type == "cpu":
    FSDP[2] += ("sums_in_place_of_averages", "formats_of_states")


# A single process repeats what two show, but on a GPU.
ALONE = [] if DEVICE.type == "cuda" else pytest.mark.sweep


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=ALONE), pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=AGAIN)]
)
def test_levels_and_norms_on_sharded_models(count):
    run("fsdp", *FSDP[count], processes=count)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("count", "checks"),
    [
        (2, ("eight_steps", "checkpoints_of_more_rules")),
        (4, ("norms_of_parts", "accumulation", "scale_that_moves_while_gradients_are_held_back")),
    ],
)
def test_more_rules_and_processes_on_sharded_models(count, checks):
    run("fsdp", *checks, processes=count)


@pytest.mark.skipif(DEVICE.type != "npu", reason="only npus saturate")
def test_a_flag_that_one_device_has_raised_skips_the_step_on_all():
    run("agreement", "saturating_devices", **SATURATING)


@pytest.mark.slow
@needs_counts("stand_in_counts")
def test_a_sharded_training_takes_no_more_memory_than_torchs_own():
    run("fsdp", "memory_beside_torchs")


@needs_counts("stand_in_counts")
def test_launches_do_not_grow_with_the_number_of_parameters():
    run("launches", "independent_of_the_number_of_parameters")


def of_the_one_that_is_left(worker, fault, folder, **environment):
    """What rank 0 prints, which is to end well, while rank 1 has a ``fault``."""
    file = Path(__file__).with_name(f"{worker}_worker.py")
    started = processes.start(file, (fault,), 2, folder / "store", **environment)
    try:
        status, output = processes.finish(started[:1])[0]
    finally:
        processes.finish_by_force(started[1:])
    assert status == 0, output
    return output


# A process that is killed is noticed as its connections close, one that stalls once the group's patience has run out.
# tests/vendor/test_hccl.py has the first with the vendor's own group.
KILLED = pytest.mark.sweep if VENDOR else [] if DEVICE.type == "npu" else pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "patience"),
    [pytest.param("killed", processes.HANG_TIMEOUT, marks=KILLED), pytest.param("stalled", 20, marks=AGAIN)],
    ids=["killed", "stalled"],
)
def test_a_process_that_is_lost_is_an_error_that_says_how_far_each_got(fault, patience, tmp_path):
    output = of_the_one_that_is_left("failures", fault, tmp_path, PATIENCE=str(patience))
    assert "noticed: rank 0 could not average its gradients" in output
    assert "failed in reduction 4" in output
    assert re.search(r"rank 0 had completed 3 and failed in .*; rank 1 had completed \d and begun a backward", output)


# What ends the wait is gloo's, wherever it waits; what becomes of its error depends on the place.
@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo notices a killed process by its connections")
@pytest.mark.parametrize(
    ("place", "signal", "patience"),
    [
        ("reduction", "SIGKILL", processes.HANG_TIMEOUT),
        ("step", "SIGKILL", processes.HANG_TIMEOUT),
        ("checkpoint", "SIGKILL", processes.HANG_TIMEOUT),
        *(pytest.param(place, "SIGSTOP", 20, marks=pytest.mark.sweep) for place in ("step", "reduction", "checkpoint")),
    ],
)
def test_a_process_that_is_lost_while_a_sharded_model_is_trained_ends_the_others(place, signal, patience, tmp_path):
    output = of_the_one_that_is_left(
        "fsdp", "lost_while_sharded", tmp_path, PLACE=place, SIGNAL=signal, PATIENCE=str(patience)
    )
    assert "noticed: " in output
    if place == "step":
        assert "rank 0 of 2 could not reduce norms of sharded parameters: " in output
    assert "loaded" in output


@AGAIN
def test_unfreezing_on_one_process_alone_is_an_error_on_all():
    run("failures", "unfrozen_alone")


@pytest.mark.sweep
def test_all_levels_optimizers_and_accumulations_are_those_of_one_process():
    run("training", "all_levels")


# Of three, averages are rounded; of four, sums are made in more than one round.
MORE_PROCESSES = {
    3: ("training.same_as_ddp",),
    4: ("training.levels", "backward.gradients_are_averages", "backward.recorded_order", "backward.accumulation"),
}


@pytest.mark.parametrize("count", [pytest.param(3, marks=AGAIN), pytest.param(4, marks=pytest.mark.sweep)])
def test_averages_of_more_processes(count):
    run("together", *MORE_PROCESSES[count], processes=count)
