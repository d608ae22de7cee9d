# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Examples on several processes leave no thread of their group's to the interpreter's end, which it could abort."""

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

# The first process of one, as torchrun starts it; whether the group is gone once it is destroyed.
BEFORE = """
import gc, os, weakref
import torch.distributed as dist
os.environ.update(
    LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
)
gc.disable()  # cycles are freed where the example says so, or not at all
destroy = dist.destroy_process_group
def destroyed():
    group = weakref.ref(dist.group.WORLD)
    destroy()
    print("the group is", "gone" if group() is None else "kept")
dist.destroy_process_group = destroyed
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "engine"), [("ddp_digits.py", "ddp"), ("imagenet/main.py", None)])
def test_the_group_of_an_example_is_gone_when_it_is_destroyed(start_example, tmp_path, script, engine):
    arguments = ["--device", "cpu", "--epochs", "1", *(["--engine", engine] if engine else [])]
    if script == "imagenet/main.py":
        arguments += ["-a", "tiny", "-j", "0", "-b", "8", "--image-size", "16", "--dummy", "8"]
        arguments += ["--output", str(tmp_path)]
    done = start_example(script, *arguments, before=BEFORE)
    assert done.returncode == 0, done.stderr
    assert "the group is gone" in done.stdout.splitlines()
