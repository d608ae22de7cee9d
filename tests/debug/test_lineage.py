# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage`` finds the writers of each part of a storage, also if many operators have written parts of it."""

import random

import pytest
import torch

from apex_npu.debug.watching import lineage as module
from apex_npu.debug.watching.lineage import Lineage


def bytes_of(tensor):
    """The first byte of a tensor, and the one after its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


class Naive:
    """A list of all writes."""

    def __init__(self):
        self.known = []

    def write(self, tensor, writer):
        begin, end = bytes_of(tensor)
        if tensor.is_contiguous():
            self.known = [(a, b, other) for a, b, other in self.known if not (begin <= a and b <= end)]
        self.known.append((begin, end, writer))

    def writers(self, tensor):
        begin, end = bytes_of(tensor)
        return [writer for a, b, writer in self.known if a < end and begin < b]

    def forget(self, tensor):
        begin, end = bytes_of(tensor)
        self.known = [(a, b, writer) for a, b, writer in self.known if not (a < end and begin < b)]


def random_part(base, draw):
    """A slice of ``base`` of a random length, dense or with gaps."""
    begin = draw.randrange(len(base))
    end = min(len(base), begin + draw.choice([1, 2, 3, 8, 60, 300]))
    return base[begin : end : draw.choice([1, 1, 1, 2, 5])]


@pytest.mark.parametrize("seed", range(20))
def test_random_writes(seed):
    draw, base = random.Random(seed), torch.empty(300)
    lineage, naive = Lineage(), Naive()
    for i in range(300):
        part = random_part(base, draw)
        call = draw.choice(["write", "write", "write", "forget"] if i % 10 == 0 else ["write"])
        args = (part, i) if call == "write" else (part,)
        for known in (lineage, naive):
            getattr(known, call)(*args)
        read = random_part(base, draw)
        assert lineage.writers(read) == naive.writers(read)
    assert lineage.writers(base) == naive.writers(base) != []


def test_many_writes_of_one_storage_are_not_each_compared_with_all(monkeypatch):
    looked_at, find = [], module._between

    def counted(writes, begin, end):
        near = find(writes, begin, end)
        looked_at.extend(writes[near])
        return near

    monkeypatch.setattr(module, "_between", counted)
    count, lineage = 1000, Lineage()
    rows = torch.empty(count, 4)
    lineage.write(rows, "all")
    for i, row in enumerate(rows):
        lineage.write(row, i)
        assert lineage.writers(row) == ["all", i]
    assert len(looked_at) < 10 * count
