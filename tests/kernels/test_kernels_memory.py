"""Memory for packed weights."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from kernels.memory import commit, lazy_zeros
from kernels.weights import WeightMemory
from tests.resident import resident_bytes

CHUNK = 64 << 20


def test_given_weights_of_many_sizes_when_allocated_then_each_is_zero_aligned_and_apart_from_the_others() -> None:
    memory = WeightMemory()
    tensors = [memory.zeros((rows, 33), dtype) for rows in (1, 7, 4000) for dtype in (torch.bfloat16, torch.float32)]
    for number, tensor in enumerate(tensors, start=1):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert [float(tensor.mean()) for tensor in tensors] == [1, 2, 3, 4, 5, 6]
    starts = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert starts[-1][0] + starts[-1][1] - starts[0][0] < sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors)


def test_given_weights_that_nobody_holds_any_more_when_others_follow_then_their_memory_is_given_back() -> None:
    memory, process = WeightMemory(), psutil.Process()
    before = process.memory_info().rss
    for _ in range(8):
        memory.zeros((CHUNK,), torch.uint8).fill_(1)
    gc.collect()
    assert process.memory_info().rss - before < 2 * CHUNK


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_given_a_weight_about_as_large_as_a_chunk_when_allocated_then_it_can_be_used_to_its_end(size: int) -> None:
    memory = WeightMemory()
    first = memory.zeros((65,), torch.uint8)
    large = memory.zeros((size,), torch.uint8)
    large[-1], large[0] = 3, 2
    after = memory.zeros((65,), torch.uint8)
    assert (int(large[0]), int(large[-1]), int(first.sum()), int(after.sum())) == (2, 3, 0, 0)


def test_given_lazy_memory_when_some_is_committed_then_that_is_there_and_what_was_written_stays() -> None:
    tensor = lazy_zeros((2 * CHUNK + 77,), torch.uint8)
    tensor[12345] = 7
    assert commit(tensor, 4097, CHUNK)
    assert CHUNK <= resident_bytes(tensor) < CHUNK * 3 // 2  # huge pages
    assert commit(tensor, CHUNK, tensor.nbytes)
    assert resident_bytes(tensor) >= tensor.nbytes - 4097  # what lies before may have none
    assert int(tensor.sum()) == 7


def test_given_addresses_without_memory_when_committed_then_it_says_so() -> None:
    tensor = lazy_zeros((CHUNK,), torch.uint8)
    assert not commit(tensor, 0, 1 << 46)
