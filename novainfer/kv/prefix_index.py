"""Which block holds which prefix: SHA-256 chains over full blocks of token ids. Pure; lives in the scheduler.

key(block i) = SHA-256(key(block i-1) || token ids of block i); key(-1) = SHA-256 of the tenant's salt, so two
tenants never share a chain. The key only finds an entry: a hit has equal tokens after the same entry, and so the same
tokens from the start on. Keys that collide cost speed, and give nobody the blocks of another prefix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter

from novainfer.protocol.columns import Column, column, column_from
from novainfer.protocol.step import IndexedBlock


@lru_cache(maxsize=1024)
def root_key(*salts: str) -> bytes:
    """Start of the chains of one salt (tenant, client's salt): 32 bytes."""
    digest = sha256(b"novainfer")
    for salt in salts:
        data = salt.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_key(parent: bytes, token_ids: Column) -> bytes:
    """Key of the block that holds `token_ids` after the prefix `parent`: 32 bytes."""
    return sha256(parent + token_ids.tobytes()).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """A block's content after one prefix; equal to no other. parent: the entry before it, or the chain's start.

    Never changed; not frozen, since that would make it three times as dear, and there is one for each full block.
    """

    block: int
    key: bytes
    parent: Entry | bytes
    parent_key: bytes  # the parent's, or the chain's start
    token_ids: Column


# There is a full block in nearly every step: they are looked at in C.
_BLOCK, _KEY, _PARENT_KEY, _TOKEN_IDS = map(attrgetter, ("block", "key", "parent_key", "token_ids"))


@dataclass(slots=True)
class IndexChanges:
    """The blocks that have left the index, and entered it (oldest first): see `StepPlan`. Never changed."""

    unindexed: list[int] = field(default_factory=list)
    indexed: Column = field(default_factory=column)
    parents: bytes = b""
    token_ids: Column = field(default_factory=column)


class PrefixIndex:
    """Two-way map between chain keys and blocks. At most one block per key, one key per block."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._changes: dict[int, Entry | None] = {}  # since `take_changes`; None: the block has left

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, key: bytes, parent: Entry | bytes, token_ids: Column) -> Entry | None:
        """The entry with exactly this content after `parent`, or None."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.token_ids != token_ids:
            return None
        return entry

    def insert(self, block: int, key: bytes, parent: Entry | bytes, token_ids: Column) -> Entry:
        """Remember a full, computed block. Returns its entry, or the one that was there for the same content.

        key: `chain_key` of the parent's key and the token ids. What else had that key is forgotten. A block that is
        known for other content stays so.
        """
        known = self._by_key.get(key)
        if known is not None:
            if self.find(key, parent, token_ids) is known:
                return known
            self.evict(known.block)
        entry = Entry(block, key, parent, parent.key if isinstance(parent, Entry) else parent, token_ids)
        if block in self._by_block:
            return entry
        changes = self._changes
        if block in changes:
            del changes[block]  # to the end, in the order of entry
        changes[block] = self._by_key[key] = self._by_block[block] = entry
        return entry

    def insert_new(self, entries: list[Entry]) -> bool:
        """Remember these at once, each after its parent, if no key and no block of theirs is known, so that a look at
        each is saved; else False, and nothing changed.
        """
        by_key = dict(zip(map(_KEY, entries), entries, strict=True))
        by_block = dict(zip(map(_BLOCK, entries), entries, strict=True))
        if not (
            len(by_key) == len(by_block) == len(entries)
            and self._by_key.keys().isdisjoint(by_key)
            and self._by_block.keys().isdisjoint(by_block)
            and self._changes.keys().isdisjoint(by_block)
        ):
            return False
        self._by_key.update(by_key)
        self._by_block.update(by_block)
        self._changes.update(by_block)
        return True

    def restore(self, held: IndexedBlock) -> bytes | None:
        """Remember a block that the workers told of; its key, or None where it cannot be remembered."""
        key = chain_key(held.parent, held.token_ids)
        if key in self._by_key or held.block in self._by_block:
            self._changes.setdefault(held.block, None)
            return None
        parent = self._by_key.get(held.parent, held.parent)
        self._by_key[key] = self._by_block[held.block] = Entry(held.block, key, parent, held.parent, held.token_ids)
        return key

    def evict(self, block: int) -> None:
        """Forget the block's content, because it is about to be overwritten. Unknown blocks are fine."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]
            self._changes[block] = None

    def evict_all(self, blocks: Collection[int]) -> None:
        """The same for several."""
        if not self._by_block.keys().isdisjoint(blocks):
            for block in blocks:
                self.evict(block)

    def take_changes(self) -> IndexChanges:
        """Those since the last call."""
        if not self._changes:
            return _NO_CHANGES
        changes, self._changes = self._changes, {}
        entered = list(filter(None, changes.values()))
        return IndexChanges(
            [block for block, entry in changes.items() if entry is None] if len(entered) < len(changes) else [],
            column(map(_BLOCK, entered)),
            b"".join(map(_PARENT_KEY, entered)),
            column_from(b"".join(map(_TOKEN_IDS, entered))),
        )


_NO_CHANGES = IndexChanges()
