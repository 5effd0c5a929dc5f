"""Sums over ranks: in the order of the ranks where bits must not depend on anything else, by the library elsewhere."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import tensor_parallel
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage1

CPU = torch.device("cpu")
RANKS = 3
# In bf16 another order of these, or rounding after each sum, gives another result.
PARTS = [[1.0, 256.0, -3e38], [256.0, 1.0, 3e38], [-256.0, 1.0, 1.0]]
SUMS = [1.0, 258.0, 1.0]


class Library:
    """In the place of torch.distributed: what was asked of it, and with which tensors."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.device]] = []

    def all_reduce(self, x: Tensor, group: object) -> None:
        self.asked.append(("all_reduce", x.device))

    def all_gather(self, parts: list[Tensor], local: Tensor, group: object) -> None:
        self.asked.append(("all_gather", local.device))
        for part in parts:
            part.copy_(local)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(tensor_parallel, "dist", fake)
    return fake


@pytest.mark.parametrize(
    ("world_size", "device", "in_order", "asked", "adds_in_order"),
    [
        (1, "meta", False, [], True),
        (2, "cpu", True, ["all_reduce"], True),
        (2, "meta", False, ["all_reduce"], False),
        (2, "meta", True, ["all_gather"], True),
        (3, "cpu", True, ["all_gather"], True),
        (3, "meta", False, ["all_reduce"], False),
        (3, "meta", True, ["all_gather"], True),
    ],
)
def test_sums_when_their_order_is_free_then_the_library_takes_them(
    world_size: int, device: str, in_order: bool, asked: list[str], adds_in_order: bool, library: Library
) -> None:
    tp = TensorParallel(0, world_size, None, torch.device(device), in_order=in_order)  # meta: in a GPU's place
    tp.all_reduce(torch.ones(2))
    assert [name for name, _ in library.asked] == asked
    assert tp.adds_in_order == adds_in_order


def test_a_number_when_gathered_then_it_travels_from_the_ranks_own_device(library: Library) -> None:
    meta = torch.device("meta")  # in a GPU's place
    with pytest.raises(RuntimeError, match="meta"):  # there is no number in it
        TensorParallel(0, 2, None, meta).gather_number(7)
    assert library.asked == [("all_gather", meta)]
    assert TensorParallel.single().gather_number(-(2**63)) == [-(2**63)]


@pytest.mark.parametrize(
    ("device", "deterministic", "adds_in_order"),
    [("cpu", False, True), ("cpu", True, True), ("cuda", False, False), ("cuda", True, True)],
)
def test_ranks_when_they_meet_then_sums_are_in_order_on_cpus_and_where_that_is_asked_for(
    device: str, deterministic: bool, adds_in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = []
    monkeypatch.setattr(tensor_parallel.dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    tp = TensorParallel.init(0, RANKS, "/nowhere", torch.device(device), deterministic=deterministic)
    assert tp.adds_in_order == adds_in_order
    assert backends == ["gloo" if device == "cpu" else "nccl"]


def _run_rank(rank: int, store: str, out: str) -> None:
    tp = TensorParallel.init(rank, RANKS, store, CPU)
    found: dict[str, Any] = {
        "sums": tp.all_reduce(torch.tensor(PARTS[rank], dtype=torch.bfloat16)).tolist(),
        "numbers": tp.gather_number(-(2**62) + rank),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    tp.close()


def test_ranks_on_cpus_when_they_add_up_then_in_their_order_and_rounded_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "store"), str(tmp_path))
    ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    numbers = [-(2**62), -(2**62) + 1, -(2**62) + 2]
    for rank in range(RANKS):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"sums": SUMS, "numbers": numbers}
