"""Which full KV blocks the scheduler's prefix index holds, kept on rank 0 for a scheduler that comes after it."""

from __future__ import annotations

from novainfer.protocol.step import IndexedBlock, StepPlan

# Token ids that one account may carry: some 10 MiB, far below the largest message.
_MAX_IDS = 1_000_000


class HeldBlocks:
    """By block id, ordered by entry into the index. Written by `apply`, for every plan before it runs."""

    def __init__(self) -> None:
        self._entries: dict[int, IndexedBlock] = {}

    def apply(self, plan: StepPlan) -> None:
        """Follow the index: what leaves it with this plan may be overwritten by it."""
        entered = plan.indexed_blocks()  # first: it may raise
        for block in plan.unindexed:
            self._entries.pop(block, None)
        for entry in entered:
            self._entries.pop(entry.block, None)
            self._entries[entry.block] = entry

    def tell(self) -> list[IndexedBlock]:
        """The whole account, oldest first. What is too much to tell is forgotten: the successor will not know of it."""
        entries = list(self._entries.values())
        if entries:
            entries = entries[-(_MAX_IDS // len(entries[0].token_ids)) :]
        self._entries = {entry.block: entry for entry in entries}
        return entries
