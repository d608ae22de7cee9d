# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import random

import pytest
import torch

from apex_npu.fusion.flat_buffer import extent_numel, is_dense, overlapping, padded_numel, plan_slots


# Worked out manually: round up to 16, add 32.
@pytest.mark.parametrize(("numel", "expected"), [(0, 32), (1, 48), (15, 48), (16, 48), (17, 64), (41 * 123, 5088)])
def test_padded_numel(numel, expected):
    assert padded_numel(numel) == expected


def test_slots_are_disjoint_aligned_and_in_order():
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.choice([0, 1, 15, 16, 17, 31, 32, rng.randrange(5000)]) for _ in range(rng.randrange(1, 40))]
        layout = plan_slots(sizes, range(len(sizes)))
        end = 0
        for size, index in zip(sizes, layout.slot_of, strict=True):
            slot = layout.slots[index]
            assert slot.numel == size
            assert slot.offset_numel == end
            assert slot.offset_numel % 16 == 0
            end += padded_numel(size)
        assert layout.total_numel == end


def test_offsets_beyond_two_to_the_31():
    layout = plan_slots([2**31, 2**33, 5], "abc")
    assert [slot.offset_numel for slot in layout.slots] == [0, 2**31 + 32, 2**31 + 2**33 + 64]
    assert layout.total_numel == 2**31 + 2**33 + 64 + 48


def test_one_storage_is_one_slot():
    layout = plan_slots([10, 20, 10], ["a", "b", "a"])
    assert layout.slot_of == (0, 1, 0)
    assert len(layout.slots) == 2


def test_one_storage_has_one_size():
    with pytest.raises(ValueError, match="two sizes: 3 and 4"):
        plan_slots([3, 4], ["a", "a"])


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(0, 7), True),
        (torch.empty(1, 5, 1), True),
        (torch.empty(3, 8)[:, :4], False),
        (torch.empty(4, 1).expand(4, 3), False),
        (torch.empty(9)[::2], False),
    ],
)
def test_is_dense_agrees_with_torch(tensor, dense):
    assert is_dense(tensor.size(), tensor.stride()) is dense
    assert torch.ops.aten.is_non_overlapping_and_dense(tensor) is dense


def test_extent_counts_to_the_last_element():
    assert extent_numel((3, 4), (8, 1)) == 20
    assert extent_numel((), ()) == 1
    assert extent_numel((0, 4), (4, 1)) == 0


def test_what_is_left_when_overlapping_ranges_are_taken_away_is_distinct():
    rng = random.Random(0)
    for _ in range(300):
        begins = [rng.randrange(30) for _ in range(rng.randrange(8))]
        spans = [(begin, begin + rng.randrange(6)) for begin in begins]
        left_out = overlapping(spans)
        kept = [set(range(*span)) for i, span in enumerate(spans) if i not in left_out]
        assert sum(map(len, kept)) == len(set().union(*kept))
        for i in left_out:
            assert any(kept_span & set(range(*spans[i])) for kept_span in kept)


def test_of_ranges_that_begin_alike_the_first_is_kept():
    assert overlapping([(4, 9), (0, 2), (4, 6), (4, 4)]) == [2]
