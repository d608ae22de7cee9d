# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor  # a subclass that has no memory but that of two inside

from apex_npu.contrib.combine_tensors import (
    combine_npu,
    get_aligned_storage_size,
    get_part_combined_tensor,
    is_combined_tensor_valid,
)


@pytest.mark.parametrize(("numel", "expected"), [(0, 32), (1, 48), (16, 48), (17, 64)])
def test_aligned_storage_size(numel, expected):
    assert get_aligned_storage_size(torch.zeros(numel)) == expected


def test_aligned_storage_size_refuses_integers():
    with pytest.raises(RuntimeError, match=r"got torch.int64"):
        get_aligned_storage_size(torch.zeros(3, dtype=torch.int64))


def test_values_identity_and_sharing():
    tensors = [nn.Parameter(torch.full((3, 5), 1.0)), torch.full((17,), 2.0), nn.Parameter(torch.tensor(3.0))]
    combined = combine_npu(tensors)
    assert combined.shape == (48 + 64 + 48,)
    assert combined[:15].eq(1).all()
    assert combined[48:65].eq(2).all()
    assert combined[112].item() == 3
    assert combined.sum().item() == 15 + 34 + 3  # padding is zero
    combined.mul_(2)  # one operation instead of three: what scripts do for moving averages
    assert tensors[0].eq(2).all()
    assert tensors[1].eq(4).all()
    assert tensors[2].item() == 6
    assert is_combined_tensor_valid(combined, tensors)


def test_without_values():
    tensors = [torch.ones(4), torch.ones(5)]
    combined = combine_npu(tensors, require_copy_value=False)
    assert not combined.any()
    assert not tensors[1].any()


def test_empty_list():
    assert combine_npu([]) is None
    assert is_combined_tensor_valid(None, [])


def test_two_views_of_one_storage_keep_their_values():
    base = torch.arange(8.0)
    head, tail = base[:3], base[3:]
    combined = combine_npu([head, tail])
    assert head.tolist() == [0, 1, 2]
    assert tail.tolist() == [3, 4, 5, 6, 7]
    assert combined[:8].tolist() == list(range(8))
    head.fill_(-1)
    assert combined[:3].tolist() == [-1, -1, -1]


def test_the_same_tensor_twice_is_one_slot():
    tensor = torch.arange(4.0)
    combined = combine_npu([tensor, tensor])
    assert combined.numel() == get_aligned_storage_size(torch.zeros(4))
    combined[0] = 9
    assert tensor[0].item() == 9


def test_tied_weights():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    values = embedding.weight.detach().clone()
    combined = combine_npu([embedding.weight, head.weight])
    assert torch.equal(embedding.weight, values)
    assert head.weight is embedding.weight
    combined.zero_()
    assert not any(p.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [torch.ones(2), torch.ones(2).half()], TypeError, r"tensors\[1\] is torch.float16"),
        (lambda: [torch.ones(2), torch.ones(2, device="meta")], ValueError, r"tensors\[1\] on meta"),
        (lambda: [torch.ones(2), None], TypeError, r"list_of_tensor\[1\] must be a tensor, got NoneType"),
        (lambda: [torch.ones(2), torch.ones(2).to_sparse()], TypeError, r"list_of_tensor\[1\] must be dense"),
        (
            lambda: [torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2))],
            TypeError,
            r"\[1\] must be a plain .* local",
        ),
        (lambda: [torch.ones(2), torch.ones(1000)[:4]], ValueError, r"list_of_tensor\[1\] .* storage of 1000 elements"),
    ],
)
def test_refused_before_anything_has_moved(make, error, message):
    tensors = make()
    address = tensors[0].data_ptr()
    with pytest.raises(error, match=message):
        combine_npu(tensors)
    assert tensors[0].data_ptr() == address


def test_parts():
    combined = combine_npu([torch.arange(10.0)])
    part = get_part_combined_tensor(combined, 2, 3)
    assert part.tolist() == [2, 3, 4]
    part.zero_()
    assert combined[2:5].tolist() == [0, 0, 0]
    assert get_part_combined_tensor(combined, 2, 0) is None
    assert get_part_combined_tensor(None, 0, 5) is None
    with pytest.raises(ValueError, match=r"\[40, 50\).* 48"):
        get_part_combined_tensor(combined, 40, 10)


def test_validity_looks_at_the_whole_extent():
    tensors = [torch.ones(3), torch.ones(30)]
    combined = combine_npu(tensors)
    assert is_combined_tensor_valid(combined, tensors)
    assert not is_combined_tensor_valid(combined, [torch.ones(3)])
    assert not is_combined_tensor_valid(combined, [None])
    assert not is_combined_tensor_valid(None, tensors)
    assert not is_combined_tensor_valid(combined[:50], tensors)  # the tail of the second is outside
    assert not is_combined_tensor_valid(combined, [tensors[0].view(torch.int32)])
