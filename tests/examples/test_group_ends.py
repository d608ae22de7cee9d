# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Examples on several processes leave no thread of their group's to the interpreter's end, which it could abort."""

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

# The first process of one, as torchrun starts it. The interpreter tells as it ends whether the group is still there.
BEFORE = """
import atexit, gc, os, weakref
import torch.distributed as dist
os.environ.update(
    LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
)
gc.disable()  # cycles are freed where the example says so, or not at all
destroy = dist.destroy_process_group
def destroyed():
    group = weakref.ref(dist.group.WORLD)
    destroy()
    print("the group is destroyed")
    atexit.register(lambda: print("the interpreter ends", "without a group" if group() is None else "with a group"))
dist.destroy_process_group = destroyed
"""
IMAGENET = ["-a", "tiny", "-j", "0", "-b", "8", "--image-size", "16", "--dummy", "8", "--epochs", "1"]
TINY = ["--layers", "1", "--heads", "1", "--width", "8", "--context", "8", "-b", "4"]
LANGUAGE = ["--steps", "1", *TINY, "--sample", "0", "--opt-level", "O5", "--fsdp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "end"),
    [
        ("ddp_digits.py", ["--engine", "ddp", "--epochs", "1"], "the interpreter ends without a group"),
        ("ddp_digits.py", ["--engine", "fully_shard", "--epochs", "1"], None),
        ("imagenet/main.py", [*IMAGENET, "--output", "{folder}"], "the interpreter ends without a group"),
        ("language_model/main.py", ["{folder}/text", *LANGUAGE], None),
    ],
)
def test_no_group_is_left_when_the_interpreter_ends(start_example, tmp_path, script, arguments, end):
    (tmp_path / "text").write_text("Once upon a time there was a princess. " * 10)
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    done = start_example(script, "--device", "cpu", *arguments, before=BEFORE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "the group is destroyed" in lines
    assert [line for line in lines if line.startswith("the interpreter ends")] == ([end] if end else [])
