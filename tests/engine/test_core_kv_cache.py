"""Block pool, prefix index and block tables: exact ids, exact eviction order, and a state machine over the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from novainfer.kv.block_pool import BlockPool
from novainfer.kv.manager import BlockTable, KVCacheManager
from novainfer.kv.prefix_index import IndexChanges, PrefixIndex, chain_key, root_key
from novainfer.protocol.columns import column

pytestmark = pytest.mark.stage0


def table(salt: str = "") -> BlockTable:
    return BlockTable(root_key(salt), use_prefix_cache=True)


def fill(manager: KVCacheManager, tokens: list[int], salt: str = "") -> BlockTable:
    """A sequence that has computed all its tokens."""
    new = table(salt)
    computed = manager.attach_prefix(new, column(tokens))
    assert manager.grow(new, computed, len(tokens)) is not None
    manager.index_blocks(new, column(tokens), len(tokens))
    return new


def test_given_a_new_pool_when_allocating_then_ids_come_in_order() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError):
        pool.allocate()


def test_given_released_blocks_when_allocating_then_the_longest_free_goes_first() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.allocate()
    pool.release([2, 0])
    pool.release([3])
    assert [pool.allocate() for _ in range(3)] == [2, 0, 3]


def test_given_a_shared_block_when_released_once_then_it_stays_taken() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release([block])
    assert pool.references(block) == 1
    assert pool.num_free == 1
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])


def test_given_equal_tokens_when_salts_differ_then_keys_differ() -> None:
    assert root_key("a", "b") != root_key("ab", "")
    assert chain_key(root_key("a"), column([1, 2])) != chain_key(root_key("b"), column([1, 2]))
    assert chain_key(root_key(), column([1, 2])) == chain_key(root_key(), column((1, 2)))


def test_given_a_colliding_key_when_tokens_differ_then_it_is_a_miss() -> None:
    index = PrefixIndex()
    entry = index.insert(7, b"k", b"root", column([1, 2]))
    assert index.insert(8, b"k", b"root", column([1, 2])) is index.find(b"k", b"root", column([1, 2])) is entry
    assert index.find(b"k", b"root", column([1, 3])) is None
    assert index.find(b"k", b"another root", column([1, 2])) is None
    assert index.find(b"k", entry, column([1, 2])) is None
    after = index.insert(8, b"k2", entry, column([5, 6]))
    assert index.find(b"k2", entry, column([5, 6])) is after
    assert index.insert(9, b"k", b"root", column([1, 3])).block == 9  # the newer content has the key
    assert index.find(b"k", b"root", column([1, 2])) is None
    assert index.find(b"k2", index.find(b"k", b"root", column([1, 3])) or b"", column([5, 6])) is None
    index.evict(9)
    index.evict(8)
    assert len(index) == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_given_keys_of_four_bits_when_prefixes_are_attached_then_their_blocks_hold_those_very_tokens(
    data: st.DataObject,
) -> None:
    """Identity must not hang on the digest: whatever collides, only speed may be lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("novainfer.kv.manager.chain_key", lambda parent, ids: bytes([chain_key(parent, ids)[0] & 15]))
        manager, held = KVCacheManager(40, 2), dict[int, list[int]]()
        for _ in range(30):
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
            new = table(data.draw(st.sampled_from(["", "tenant"])))
            computed = manager.attach_prefix(new, column(tokens))
            for i, block in enumerate(new.blocks):
                assert held[block] == [*new.root, *tokens[: 2 * (i + 1)]]
            assert manager.grow(new, computed, len(tokens)) is not None
            for i in range(computed // 2, len(new.blocks)):
                held[new.blocks[i]] = [*new.root, *tokens[: 2 * (i + 1)]]
            manager.index_blocks(new, column(tokens), len(tokens))
            manager.release(new)
        assert manager.pool.num_free == 40


def test_given_a_known_prefix_when_attached_then_exactly_its_blocks_and_the_last_token_is_left() -> None:
    manager = KVCacheManager(8, 4)
    first = fill(manager, list(range(12)))
    assert first.blocks == [0, 1, 2]
    second = table()
    assert manager.attach_prefix(second, column(range(12))) == 8
    assert second.blocks == [0, 1]
    third = table()
    assert manager.attach_prefix(third, column([*range(12), 99])) == 12
    assert third.blocks == [0, 1, 2]
    assert [manager.pool.references(b) for b in range(3)] == [3, 3, 2]
    other = table("tenant")
    assert manager.attach_prefix(other, column(range(12))) == 0


def test_given_freed_sequences_when_blocks_are_needed_then_tails_go_before_heads() -> None:
    manager = KVCacheManager(4, 2)
    a = fill(manager, [1, 2, 3, 4])  # blocks 0, 1
    b = fill(manager, [5, 6, 7, 8])  # blocks 2, 3
    manager.release(a)
    manager.release(b)
    growth = manager.grow(table(), 0, 6)
    assert growth is not None
    assert growth.new_blocks == [1, 0, 3]
    again = table()
    assert manager.attach_prefix(again, column([5, 6, 7, 8, 9])) == 2  # the head of b survived
    assert again.blocks == [2]


def test_given_a_hit_on_free_blocks_when_attached_then_they_are_not_given_away() -> None:
    manager = KVCacheManager(2, 2)
    manager.release(fill(manager, [1, 2, 3]))
    kept = table()
    assert manager.attach_prefix(kept, column([1, 2, 9])) == 2
    assert kept.blocks == [0]
    assert manager.grow(table(), 0, 4) is None
    assert manager.pool.num_free == 1


def test_given_a_fork_when_the_child_writes_then_only_the_written_block_is_copied() -> None:
    manager = KVCacheManager(8, 4)
    parent = fill(manager, list(range(10)))  # blocks 0, 1, 2
    child = table()
    manager.fork(parent, child, 9)
    assert child.blocks == [0, 1, 2]
    growth = manager.grow(child, 9, 10)
    assert growth is not None
    assert growth.copies == [(2, 3)]
    assert growth.new_blocks == []
    assert child.blocks == [0, 1, 3]
    assert manager.pool.references(2) == 1
    manager.release(parent)
    manager.release(child)
    assert manager.pool.num_free == 8


def test_given_too_few_blocks_when_growing_then_nothing_changes() -> None:
    manager = KVCacheManager(3, 4)
    parent = fill(manager, list(range(10)))
    child = table()
    manager.fork(parent, child, 9)
    before = (list(child.blocks), manager.pool.num_free)
    assert manager.grow(child, 9, 10) is None
    assert (child.blocks, manager.pool.num_free) == before


def test_given_tables_that_grow_together_when_their_blocks_were_indexed_then_nobody_finds_these_any_more() -> None:
    manager = KVCacheManager(3, 2)
    manager.release(fill(manager, [1, 2, 3, 4, 5, 6]))
    manager.index.take_changes()
    one, two = table(), table()
    assert manager.append_blocks([one, two]) == [2, 1]  # the end of the chain goes first
    assert (one.blocks, two.blocks) == ([2], [1])
    assert manager.index.take_changes() == IndexChanges([2, 1])
    assert manager.append_blocks([one, two]) is None
    assert (one.blocks, two.blocks, manager.pool.num_free) == ([2], [1], 1)
    assert manager.attach_prefix(table(), column([1, 2, 3, 4, 5, 6])) == 2


def entered(changes: IndexChanges, size: int) -> dict[int, tuple[bytes, list[int]]]:
    """By block: the key of what stands before it, and its ids."""
    parents, ids = changes.parents, changes.token_ids.tolist()
    return {
        block: (parents[32 * i : 32 * i + 32], ids[size * i : size * i + size])
        for i, block in enumerate(changes.indexed)
    }


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_given_tables_of_all_kinds_when_indexed_together_then_it_is_as_if_one_after_the_other(
    data: st.DataObject,
) -> None:
    """Those with no full block, with one or several, with the same content, without the cache, with another's block."""
    managers = [KVCacheManager(60, 2) for _ in range(2)]
    contents = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5))
    uses_cache = [data.draw(st.booleans()) for _ in contents]
    first_ends = [data.draw(st.integers(0, len(tokens))) for tokens in contents]
    tables = [[BlockTable(root_key("t"), use) for use in uses_cache] for _ in managers]
    for manager, mine in zip(managers, tables, strict=True):
        for new, tokens, end in zip(mine, contents, first_ends, strict=True):
            assert manager.grow(new, 0, len(tokens)) is not None
            manager.index_blocks(new, column(tokens), end)
        child = BlockTable(root_key("t"), True)
        manager.fork(mine[0], child, len(contents[0]))
        mine.append(child)
    computed = [column(tokens) for tokens in (*contents, contents[0])]
    counts = [data.draw(st.integers(0, len(tokens))) for tokens in computed]  # also fewer than are indexed already
    managers[0].index_all(list(zip(tables[0], computed, counts, strict=True)))
    for new, ids, count in zip(tables[1], computed, counts, strict=True):
        managers[1].index_blocks(new, ids, count)
    assert [(t.num_indexed, t.keys) for t in tables[0]] == [(t.num_indexed, t.keys) for t in tables[1]]
    assert set(managers[0].index._by_key) == set(managers[1].index._by_key)
    told = [entered(manager.index.take_changes(), size=2) for manager in managers]
    assert sorted(told[0].values()) == sorted(told[1].values())  # of the same content another block may have come first
    untold = {chain_key(parent, column(ids)) for parent, ids in told[0].values()}
    for block, (parent, ids) in told[0].items():
        assert managers[0].index._by_block[block].key == chain_key(parent, column(ids))
        assert parent not in untold  # it was told before
        untold.discard(chain_key(parent, column(ids)))
    assert sorted(managers[0].index._by_key) == sorted(entry.key for entry in managers[0].index._by_block.values())
    for tokens in contents:
        hits = [manager.attach_prefix(table("t"), column([*tokens, 2])) for manager in managers]
        assert hits[0] == hits[1]


def test_given_full_blocks_when_indexed_then_the_changes_say_of_each_what_stands_before_it() -> None:
    manager = KVCacheManager(4, 2)
    first = fill(manager, [1, 2, 3, 4])
    other = fill(manager, [5, 6])
    root = root_key("")
    changes = manager.index.take_changes()
    assert changes.indexed.tolist() == [*first.blocks, *other.blocks]
    assert changes.parents == root + chain_key(root, column([1, 2])) + root
    assert changes.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert manager.index.take_changes() == IndexChanges()


def test_given_caching_off_when_prompts_repeat_then_no_hit() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=False)
    fill(manager, list(range(8)))
    assert manager.attach_prefix(table(), column(range(8))) == 0
    assert len(manager.index) == 0


class PoolMachine(RuleBasedStateMachine):
    """The pool against a dict of owners and a list of free blocks in the order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.owners: dict[int, int] = {}
        self.free = list(range(6))

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block == self.free.pop(0)
        self.owners[block] = 1

    @rule(count=st.integers(0, 7))
    def allocate_several(self, count: int) -> None:
        blocks = self.pool.allocate_all(count)
        assert blocks == (self.free[:count] if count <= len(self.free) else None)
        for block in blocks or ():
            self.free.remove(block)
            self.owners[block] = 1

    @precondition(lambda self: not self.free)
    @rule()
    def allocate_from_an_empty_pool(self) -> None:
        with pytest.raises(IndexError):
            self.pool.allocate()

    @rule(block=st.integers(0, 5))
    def share(self, block: int) -> None:
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.owners[block] = self.owners.get(block, 0) + 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owners)), min_size=1, max_size=4, unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                del self.owners[block]
                self.free.append(block)

    @invariant()
    def counts_match(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert [self.pool.references(b) for b in range(6)] == [self.owners.get(b, 0) for b in range(6)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
