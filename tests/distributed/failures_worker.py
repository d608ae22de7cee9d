# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong on one process is noticed by all.

Run in several processes; the arguments are names of functions here.
"""

import contextlib
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import assert_averages, assert_equal_on_all, backward, data, local_grads, loss_on, main, mlp, start
from devices import DEVICE, SIMULATOR, VENDOR

from apex_npu import amp
from apex_npu.distributed.consistency import RanksDifferError
from apex_npu.distributed.grad_reducer import LateGradientError


def fail():
    raise ZeroDivisionError


def exceptions():
    """One rank raises inside the block: so do all, and the next step is an ordinary one."""
    for level in ("O0", "O1", "O2"):
        for failing_step in range(3):
            if level != "O0" or DEVICE.type == "cpu":  # without a wait the device reports nothing
                raise_inside(level, failing_step, contextlib.nullcontext)
            if level != "O0":  # without a dynamic scale there is nothing that the others would wait for
                raise_inside(level, failing_step, amp.no_sync)


def raise_inside(level, failing_step, apart):
    """Before backward in the last step, in its middle before."""
    rank = dist.get_rank()
    model, optimizer = start(mlp(), level=level)
    loss = loss_on(data(0, 0, rank))
    for step in range(4):
        if step != failing_step:
            backward(loss(model), optimizer)
            optimizer.step()
            assert amp.last_step(optimizer).applied
        elif rank == 1:
            hook = model[2].bias.register_hook(lambda grad: fail())
            with pytest.raises(ZeroDivisionError), apart():
                backward_or_fail(loss(model), optimizer, fails=step == 2)
            hook.remove()
        else:
            with pytest.raises(RanksDifferError, match="rank 1 of the process group has raised"), apart():
                backward(loss(model), optimizer)
        if step == failing_step:
            assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
    assert_equal_on_all([p.detach().clone() for p in amp.master_params(optimizer)])
    amp.shutdown()


def backward_or_fail(loss, optimizer, *, fails):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        if fails:
            fail()
        scaled_loss.backward()


def backward_twice(loss, model, optimizer, *, second):
    with amp.scale_loss(loss(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        if second:
            loss(model).backward()


def late_gradients():
    rank = dist.get_rank()
    model, optimizer = start(mlp(), level="O1", dynamic_init_scale=1.0)
    loss = loss_on(data(0, 0, rank))
    for _ in range(2):
        backward(loss(model), optimizer)
        optimizer.zero_grad()
    with pytest.raises(LateGradientError if rank == 1 else RanksDifferError, match=r"reached it more often|rank 1 of"):
        backward_twice(loss, model, optimizer, second=rank == 1)
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        expected = local_grads(model, loss)
        backward(loss(model), optimizer)
        assert_averages(model, expected, rtol=1e-2, atol=1e-4)  # float16 products
        optimizer.zero_grad()


def trained_until(fault):
    """Train until rank 1 runs ``fault`` in the middle of the fourth backward; then print the error of rank 0."""
    rank = dist.get_rank()
    # Of its own: processes that are slow to start need more time to meet.
    group = dist.new_group(timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
    model, optimizer = start(mlp(), level="O2", dynamic_init_scale=2.0**8, process_group=group)
    steps = []
    model[2].bias.register_hook(lambda grad: fault() if rank == 1 and len(steps) == 3 else None)
    for step in range(6):
        if step == 3 and rank == 0:
            notice_before_the_group_does()
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        try:
            backward(loss_on(data(step, 0, rank))(model), optimizer)
        except RuntimeError as error:
            assert len(steps) == 3
            assert all(torch.equal(p, old) for p, old in zip(amp.master_params(optimizer), before, strict=True))
            assert all(p.grad is None for p in amp.master_params(optimizer))
            print(f"noticed: {error}", flush=True)
            os._exit(0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)


def notice_before_the_group_does():
    """Let collectives fail before the group's timeout, when the watchdog of the vendor's torch_npu ends the process."""
    if VENDOR and SIMULATOR is not None:
        SIMULATOR.set_collective_timeout(5)


def killed():
    trained_until(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stalled():
    trained_until(lambda: threading.Event().wait())


def unfrozen_alone():
    """What rank 1 alone starts to train would be sent by it alone: an error on both, and no hang."""
    group = dist.new_group(timeout=timedelta(seconds=20))  # the wait for what never comes: twice as long as this
    model = mlp()
    model[0].requires_grad_(False)
    # With a dynamic scale: over hccl collectives fail where the host waits for the device.
    model, optimizer = start(model, level="O1", dynamic_init_scale=1.0, process_group=group)
    loss = loss_on(data(0, 0, dist.get_rank()))
    for _ in range(2):
        backward(loss(model), optimizer)
        optimizer.zero_grad()
    dist.barrier()
    notice_before_the_group_does()
    model[0].requires_grad_(dist.get_rank() == 1)
    said = "other processes have not joined the comparison" if dist.get_rank() else "could not average its gradients"
    with pytest.raises(RuntimeError, match=said):
        backward(loss(model), optimizer)
    os._exit(0)  # the group is of no use any more


if __name__ == "__main__":
    main(globals())
