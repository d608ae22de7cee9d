# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile traces every op whole, and what it has traced computes the same."""

import pytest
import torch
from triton_cases import NUMEL, OPTIONS, inside, operands, segments

from apex_npu import ops

DOT = ("norm", "segment_dot", "segment_add_")


def arguments(op):
    """Of the typed functions."""
    if op == "lamb_":
        direction, starts, lengths, _, *more = segments()
        where = ops.Segments.of(starts.tolist(), lengths.tolist(), NUMEL, direction.device)
        return [*operands(op, NUMEL), direction, *where, *more]
    where = ops.Segments.of([0, 60], [50, 40], 112, torch.device("cpu"))
    if op in DOT:
        x, y = operands("sgd_", 112)[:2]
        add = [x, y, torch.tensor([2.0, 3.0]), *where]
        return {"norm": [x], "segment_dot": [x, y, *where], "segment_add_": add}[op]
    return operands(op, 112)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", [*OPTIONS, *DOT])
def test_fullgraph(op, backend):
    function, options = getattr(ops, op), dict(OPTIONS.get(op, {}))
    if op in OPTIONS:
        options["grad_scale"] = torch.tensor([2.0])

    def step(*args):
        result = function(*args, **options)
        # An operation after the op that depends on what the op has written.
        return args[0] * 2 if result is None else result + 1

    torch._dynamo.reset()
    traced, plain = arguments(op), arguments(op)
    got, want = torch.compile(step, fullgraph=True, backend=backend)(*traced), step(*plain)
    which = inside() if op == "lamb_" else slice(None)
    for one, other in zip([got, *traced], [want, *plain], strict=True):
        if isinstance(one, torch.Tensor):
            same = (one[which], other[which]) if one.shape == (NUMEL,) else (one, other)
            torch.testing.assert_close(*same, rtol=0, atol=0)
