"""The threads that share a kernel's work: with others in their way, from several callers, and after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu_backend import CpuBackend

pytestmark = pytest.mark.stage0

ROWS, WIDTH = 64, 2048  # large enough to be shared out


@pytest.fixture
def more_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def products(backend: CpuBackend, times: int) -> bool:
    """Whether one linear layer gives the same bits so many times."""
    generator = torch.Generator().manual_seed(1)
    linear = backend.pack_linear(torch.randn(512, WIDTH, generator=generator))
    x = torch.randn(ROWS, WIDTH, generator=generator)
    wanted = linear(x)
    return all(torch.equal(linear(x), wanted) for _ in range(times))


@pytest.mark.usefixtures("more_threads")
def test_given_more_threads_than_cores_when_many_loops_run_then_each_is_whole() -> None:
    assert products(CpuBackend(), 200)


@pytest.mark.usefixtures("more_threads")
def test_given_several_callers_when_they_compute_at_once_then_each_gets_its_own() -> None:
    results: list[bool] = []
    callers = [threading.Thread(target=lambda: results.append(products(CpuBackend(), 30))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert results == [True] * 3


@pytest.mark.usefixtures("more_threads")
def test_given_a_process_that_has_computed_when_it_forks_then_the_child_computes_too() -> None:
    assert products(CpuBackend(), 3)
    child = os.fork()
    if child == 0:
        os._exit(0 if products(CpuBackend(), 3) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
