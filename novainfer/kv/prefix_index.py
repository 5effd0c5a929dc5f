"""Which block holds which prefix: SHA-256 chains over full blocks of token ids. Pure; lives in the scheduler.

key(block i) = SHA-256(key(block i-1) || token ids of block i); key(-1) = SHA-256 of the tenant's salt, so two
tenants never share a chain. A hit also compares the tokens: a wrong answer would need a SHA-256 collision *and*
equal tokens in the block, and then the chain before it has been compared as well.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from novainfer.protocol.step import IndexedBlock


def root_key(*salts: str) -> bytes:
    """Start of the chains of one salt (tenant, client's salt): 32 bytes."""
    digest = hashlib.sha256(b"novainfer")
    for salt in salts:
        data = salt.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the block that holds `token_ids` after the prefix `parent`: 32 bytes."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    key: bytes
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Two-way map between chain keys and blocks. At most one block per key, one key per block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, _Entry] = {}
        self._changes: dict[int, IndexedBlock | None] = {}  # since `take_changes`; None: the block has left

    def __len__(self) -> int:
        return len(self._entry_of)

    def find(self, key: bytes, token_ids: Sequence[int]) -> int | None:
        """The block with exactly this content, or None."""
        block = self._block_of.get(key)
        if block is None or self._entry_of[block].token_ids != tuple(token_ids):
            return None
        return block

    def insert(self, block: int, parent: bytes, key: bytes, token_ids: Sequence[int]) -> bool:
        """Remember a full, computed block: key = chain_key(parent, token_ids).

        False if the key or the block is already known (nothing changes).
        """
        if not self._enter(block, key, token_ids):
            return False
        self._changes.pop(block, None)  # to the end, in the order of entry
        self._changes[block] = IndexedBlock(block, parent, list(token_ids))
        return True

    def restore(self, held: IndexedBlock) -> bytes | None:
        """Remember a block that the workers told of; its key, or None where it cannot be remembered."""
        key = chain_key(held.parent, held.token_ids)
        if self._enter(held.block, key, held.token_ids):
            return key
        self._changes.setdefault(held.block, None)
        return None

    def evict(self, block: int) -> None:
        """Forget the block's content, because it is about to be overwritten. Unknown blocks are fine."""
        entry = self._entry_of.pop(block, None)
        if entry is not None:
            del self._block_of[entry.key]
            self._changes[block] = None

    def take_changes(self) -> tuple[list[int], list[IndexedBlock]]:
        """The blocks that have left, and those that have entered (oldest first), since the last call."""
        changes, self._changes = self._changes, {}
        return [block for block, entry in changes.items() if entry is None], [e for e in changes.values() if e]

    def _enter(self, block: int, key: bytes, token_ids: Sequence[int]) -> bool:
        if key in self._block_of or block in self._entry_of:
            return False
        self._block_of[key] = block
        self._entry_of[block] = _Entry(key, tuple(token_ids))
        return True
