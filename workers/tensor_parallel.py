"""The ranks that one model is split over, and what they say to each other inside a step.

Lives in the worker process, one per rank. On CPUs, and in deterministic mode on GPUs, every sum is taken in rank order,
so that a row's bits depend neither on where it stands in the batch nor on which algorithm the communication library
would pick for the message's size. Otherwise NCCL adds up as it likes, which sends less.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from novainfer.errors import PeerLostError, UnsupportedModelError

_CPU = torch.device("cpu")


class TensorParallel:
    """This rank's place in its tensor-parallel group. With one rank every operation is the identity."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        device: torch.device = _CPU,
        *,
        in_order: bool = True,
    ) -> None:
        """device: where this rank's tensors are; in_order: sums are taken in rank order."""
        self.rank = rank
        self.world_size = world_size
        self.adds_in_order = in_order or world_size == 1
        # a + b has one order, so two ranks need no more than gloo's sum. NCCL has several ways to add two numbers, the
        # network's own among them, and none says how it rounds.
        self._gathers = in_order and (world_size > 2 or device.type != "cpu")
        self._group = group  # None: one rank, torch.distributed is not used
        self._device = device

    @classmethod
    def single(cls) -> TensorParallel:
        """One rank that owns the whole model."""
        return cls(0, 1, None)

    @classmethod
    def init(
        cls, rank: int, world_size: int, meeting_point: str, device: torch.device, *, deterministic: bool = False
    ) -> TensorParallel:
        """Join the group; returns when all ranks have, which are on one host. NCCL on cuda, gloo on cpu.

        deterministic: sums are taken in rank order on GPUs, too.
        meeting_point is the path of a file that no earlier group has used (torch's TCPStore would listen on all
        interfaces). Gloo's and NCCL's sockets are on loopback.
        """
        if world_size == 1:
            return cls.single()
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ["NCCL_SOCKET_IFNAME"] = loopback
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=world_size,
            device_id=device if on_gpu else None,
        )
        return cls(rank, world_size, dist.group.WORLD, device, in_order=deterministic or not on_gpu)

    def close(self) -> None:
        """Leave the group (idempotent)."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._group = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each; x may be overwritten. Raises `PeerLostError`, as all below."""
        if self.world_size == 1:
            return x
        if not self._gathers:
            with _peers():
                dist.all_reduce(x, group=self._group)
            return x
        parts = self._gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather_columns(self, local: Tensor) -> Tensor:
        """local [R, n] -> [R, world_size * n] on every rank, the ranks' columns in rank order."""
        return local if self.world_size == 1 else torch.cat(self._gather(local), dim=-1)

    def gather_number(self, number: int) -> list[int]:
        """Each rank's 64-bit number, in rank order. They travel as the rest does: NCCL takes no tensor of the host."""
        if self.world_size == 1:
            return [number]
        return [int(part) for part in self._gather(torch.tensor([number], device=self._device))]

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrite x with rank src's, and return it."""
        if self.world_size > 1:
            with _peers():
                dist.broadcast(x, src, group=self._group)
        return x

    def shard(self, size: int, what: str) -> slice:
        """This rank's equal part of `size` things. Raises `UnsupportedModelError` if they do not divide."""
        if size % self.world_size:
            raise UnsupportedModelError(f"{size} {what} cannot be split evenly over {self.world_size} ranks")
        part = size // self.world_size
        return slice(self.rank * part, (self.rank + 1) * part)

    def _gather(self, local: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        with _peers():
            dist.all_gather(parts, local.contiguous(), group=self._group)
        return parts


@contextmanager
def _peers() -> Iterator[None]:
    """What goes wrong in here goes wrong between the ranks: one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"another rank cannot be reached: {error}") from error
