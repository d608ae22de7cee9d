# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels compile, down to machine code, for GPUs that need not be there; and what the code looks like."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = {
    "sgd", "adam", "rmsprop", "adadelta", "adagrad", "lamb_directions", "lamb_ratios", "lamb_step", "square_parts",
    "root_of_parts", "dot_parts",
    "segment_sums", "segment_add", "step_numbers", "take_addressed", "scale_listed", "check_listed",
    "listed_square_parts",
}  # fmt: skip

pytestmark = pytest.mark.slow  # a compiler, for about 20 seconds
triton = pytest.importorskip("triton", reason="Triton is not installed")
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    pytest.skip(f"Triton {triton.__version__} is too old for these kernels", allow_module_level=True)


def compile_for(cache, *arguments):
    """The worker's report of every launch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name("triton_compile_worker.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(made_once, tmp_path_factory):
    """For one architecture, and float32."""
    return made_once("compiled", lambda: compile_for(tmp_path_factory.mktemp("triton"), "90"))


def check(facts):
    assert facts["cubin"] > 0
    assert facts["atomics"] == 0, "sums would depend on the order in which programs run"
    assert facts["flushes"] == facts["approximates"] == 0, "not the arithmetic that torch has"
    assert facts["contracts"] == 0, "the last bit would depend on which operands there are"
    assert facts["narrow_offsets"] == 0, "32 bits do not reach beyond 2³¹ elements"
    assert set(facts["float_arguments"]) <= {"f64"}, "Triton has taken a number as float32"


def test_every_kernel_compiles_exactly_and_without_atomics(compiled):
    launches = compiled[:-1]
    assert {facts["kernel"] for facts in launches} == KERNELS
    for facts in launches:
        check(facts)


@pytest.mark.parametrize(("op", "per_element"), [("sgd_", 20), ("adam_", 36), ("rmsprop_", 36), ("adadelta_", 28),
                                                 ("adagrad_", 20)])  # fmt: skip
def test_every_operand_is_read_and_written_once_and_in_pieces_of_16_bytes(compiled, op, per_element):
    """Adam here with AMSGrad, RMSprop with mean and momentum: 8 bytes more for each. A thread has 8 elements."""
    facts = next(facts for facts in compiled if facts["op"] == op)
    assert set(facts["loads"]) == set(facts["stores"]) == {16}
    assert sum(facts["loads"]) + sum(facts["stores"]) == 8 * per_element


def test_moments_of_segments_are_moved_in_pieces_of_16_bytes(compiled):
    """p, g, m, v, and m, v, u: where ranges begin at multiples of 16. A thread has 8 elements."""
    facts = next(f for f in compiled if f.get("kernel") == "lamb_directions" and f["op"] == "lamb_")
    assert sum(size for size in facts["loads"] if size == 16) == 4 * 4 * 8
    assert sum(size for size in facts["stores"] if size == 16) == 4 * 3 * 8


def test_numbers_on_the_device_do_not_keep_operands_from_being_moved_in_pieces_of_16_bytes(compiled):
    facts = next(facts for facts in compiled if facts["op"] == "adam_ on device" and facts["kernel"] == "adam")
    large = [size for size in facts["loads"] + facts["stores"] if size == 16]
    assert sum(large) == 8 * 36
    assert max(facts["stores"]) == min(facts["stores"]) == 16
    assert set(facts["loads"]) <= {16, 8}, "numbers are of 8 bytes"


@pytest.mark.parametrize("counts", ["", " on device"])
@pytest.mark.parametrize(
    ("kept", "per_element"), [("bfloat16", 18), ("int8", 12), ("remainder", 34), ("int8 remainder", 32)]
)
def test_operands_in_fewer_bytes_are_read_and_written_once(compiled, kept, per_element, counts):
    """Adam with AMSGrad, and parameters of bfloat16; beside these operands places are read, and scales of 4 bytes.

    So are numbers of the step where the device counts, of 8 bytes, and the count itself, of 4.
    """
    facts = next(f for f in compiled[:-1] if f["op"] == f"adam_ {kept}{counts}" and f["kernel"] == "adam")
    loads, stores = ([size for size in facts[kind] if size != 4] for kind in ("loads", "stores"))
    assert set(loads) | set(stores) <= {8, 16}
    assert sum(stores) == 8 * (per_element - 2) // 2
    assert sum(loads) - 8 * (per_element + 2) // 2 <= (11 if counts else 6) * 8
    # Philox takes 20 products, for both states of a pair and for all eight elements of a thread
    assert facts["products"] <= {"bfloat16": 40, "int8": 40, "remainder": 0, "int8 remainder": 20}[kept]


def test_gradients_at_addresses_are_read_in_pieces_of_16_bytes_where_these_are_aligned(compiled):
    """Those of float32 and float16 into slots of float32, by threads of 8 elements; others an element at a time."""
    for dtype, size in (("float32", 4), ("float16", 2)):
        facts = next(facts for facts in compiled if facts["op"] == f"torch.{dtype} copied")
        assert facts["stores"] == [16, 16]
        assert sorted(facts["loads"]) == sorted([16] * (8 * size // 16) + [size] * 8 + [8] * 4)


def test_no_hyper_parameter_step_or_length_is_compiled_in(compiled):
    assert compiled[-1] == {"compiled_for_other_numbers": 0}


@pytest.mark.sweep
@pytest.mark.parametrize("arch", [75, 90, 100])
def test_every_dtype_and_option_compiles_for_every_architecture(tmp_path, arch):
    launches = compile_for(tmp_path, str(arch), "--all")[:-1]
    assert {facts["arch"] for facts in launches} == {arch}
    for facts in launches:
        check(facts)
