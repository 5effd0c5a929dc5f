"""Block tables of sequences: prefix hits, growth, forks with copy-on-write, release. Pure; in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from novainfer.kv.block_pool import BlockPool
from novainfer.kv.prefix_index import Entry, PrefixIndex, chain_key
from novainfer.protocol.columns import Column
from novainfer.protocol.step import IndexedBlock


@dataclass(slots=True)
class BlockTable:
    """The KV blocks of one sequence, in order; written by the `KVCacheManager` alone.

    `keys` are the chain keys of the leading full blocks hashed so far; `num_indexed` how many of those were
    offered to the prefix index, and `prefix` what stands for them there (the root, if there are none).
    """

    root: bytes
    use_prefix_cache: bool
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    prefix: Entry | bytes = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = self.root

    def clear(self) -> None:
        """Name no block any more; the keys stay true."""
        self.blocks.clear()
        self.num_indexed = 0
        self.prefix = self.root


@dataclass(frozen=True, slots=True)
class Growth:
    """What a sequence got: new block ids for the end of its table, and whole blocks to copy first (src, dst).

    After a copy the table's entry is `dst`, so a row that already runs must be told its whole table again.
    """

    new_blocks: list[int]
    copies: list[tuple[int, int]]


class KVCacheManager:
    """Owns the pool and the prefix index of one replica."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self._caching = enable_prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, table: BlockTable, token_ids: Column) -> int:
        """Share the cached blocks of the longest known prefix; returns the number of tokens they hold.

        The table must be empty. At least the last token is left to compute, since its logits are needed.
        """
        if not (self._caching and table.use_prefix_cache):
            return 0
        size, keys = self.block_size, table.keys
        for start in range(0, len(token_ids) - size, size):
            content = token_ids[start : start + size]
            i = start // size
            if i == len(keys):
                keys.append(chain_key(keys[-1] if i else table.root, content))
            entry = self.index.find(keys[i], table.prefix, content)
            if entry is None:
                break
            self.pool.share(entry.block)
            table.blocks.append(entry.block)
            table.prefix = entry
        table.num_indexed = len(table.blocks)
        return len(table.blocks) * size

    def fork(self, parent: BlockTable, child: BlockTable, num_tokens: int) -> None:
        """Let the empty `child` share the parent's blocks that hold the first `num_tokens` tokens.

        A block that the child (or the parent) writes to later is copied first: see `grow`.
        """
        count = self.blocks_for(num_tokens)
        for block in parent.blocks[:count]:
            self.pool.share(block)
            child.blocks.append(block)
        full = num_tokens // self.block_size
        child.keys = parent.keys[:full]
        child.num_indexed = min(parent.num_indexed, full)
        prefix = parent.prefix
        for _ in range(parent.num_indexed - child.num_indexed):
            prefix = prefix.parent if isinstance(prefix, Entry) else prefix
        child.prefix = prefix

    def grow(self, table: BlockTable, first: int, num_tokens: int, *, spare: int = 0) -> Growth | None:
        """Make room for `num_tokens` tokens of which those from index `first` on will be written.

        Shared blocks in the written range are replaced by copies. None, and nothing changed, if the free
        blocks do not suffice, or fewer than `spare` would be left.
        """
        shared, missing = self._shared_from(table, first), max(0, self.blocks_for(num_tokens) - len(table.blocks))
        if missing + len(shared) + spare > self.pool.num_free:
            return None
        copies = []
        for i in shared:
            copy = self._take()
            copies.append((table.blocks[i], copy))
            self.pool.release([table.blocks[i]])
            table.blocks[i] = copy
        new_blocks = [self._take() for _ in range(missing)]
        table.blocks.extend(new_blocks)
        return Growth(new_blocks, copies)

    def append_blocks(self, tables: Sequence[BlockTable]) -> list[int] | None:
        """One block for each, for tokens behind all those that it has room for; None if there are not so many free."""
        blocks = self.pool.allocate_all(len(tables))
        if blocks is None:
            return None
        self.index.evict_all(blocks)
        for table, block in zip(tables, blocks, strict=True):
            table.blocks.append(block)
        return blocks

    def index_blocks(self, table: BlockTable, token_ids: Column, num_computed: int) -> None:
        """Offer the full blocks whose `num_computed` tokens are computed and known to the prefix index."""
        size = self.block_size
        first, end = table.num_indexed, num_computed // size
        if first >= end or not (self._caching and table.use_prefix_cache):
            return
        keys, prefix = table.keys, table.prefix
        for i in range(first, end):
            start = i * size
            content = token_ids[start : start + size]
            if i == len(keys):
                keys.append(chain_key(keys[-1] if i else table.root, content))
            prefix = self.index.insert(table.blocks[i], keys[i], prefix, content)
        table.prefix = prefix
        table.num_indexed = end

    def index_all(self, computed: Sequence[tuple[BlockTable, Column, int]]) -> None:
        """`index_blocks` for each of these."""
        size, entries = self.block_size, list[Entry]()
        tables: list[tuple[BlockTable, Entry | bytes, int]] = []
        for table, token_ids, num_computed in computed:
            first, end = table.num_indexed, num_computed // size
            if first >= end or not (self._caching and table.use_prefix_cache):
                continue
            keys, prefix = table.keys, table.prefix
            key, start = keys[first - 1] if first else table.root, first * size
            for block in table.blocks[first:end]:
                before, content = key, token_ids[start : start + size]
                if start == len(keys) * size:
                    keys.append(chain_key(before, content))
                key, start = keys[start // size], start + size
                prefix = Entry(block, key, prefix, before, content)
                entries.append(prefix)
            tables.append((table, prefix, end))
        if self.index.insert_new(entries):  # as nearly always
            for table, prefix, end in tables:
                table.prefix, table.num_indexed = prefix, end
        else:
            for one in computed:
                self.index_blocks(*one)

    def adopt(self, held: Sequence[IndexedBlock]) -> None:
        """Take over the blocks that the workers hold, listed by entry into the index; nothing may be allocated yet.

        They are reused last, the oldest chain first, and of each chain its end before its start.
        """
        entries: dict[bytes, IndexedBlock] = {}
        for entry in held:
            fits = self._caching and entry.block < self.pool.num_blocks and len(entry.token_ids) == self.block_size
            key = self.index.restore(entry) if fits else None
            if key is not None:
                entries[key] = entry
        newest_first: dict[int, None] = {}
        for key in reversed(entries):
            chain = []
            while (link := entries.get(key)) is not None and link.block not in newest_first:
                chain.append(link.block)
                key = link.parent
            newest_first.update(dict.fromkeys(reversed(chain)))
        self.pool.reuse_last(list(reversed(newest_first)))

    def forget(self, table: BlockTable) -> None:
        """Take the sequence's blocks out of the prefix index for good: their content is not to be trusted."""
        for block in table.blocks:
            self.index.evict(block)
        table.use_prefix_cache = False

    def release(self, table: BlockTable) -> None:
        """Give all blocks back, the last one first to be reused; their content stays findable till then."""
        self.pool.release(reversed(table.blocks))
        table.clear()

    def _take(self) -> int:
        block = self.pool.allocate()
        self.index.evict(block)
        return block

    def _shared_from(self, table: BlockTable, first: int) -> list[int]:
        """Positions in the table, from the block of token `first` on, whose block others own too."""
        start = first // self.block_size
        return [i for i in range(start, len(table.blocks)) if self.pool.references(table.blocks[i]) > 1]
