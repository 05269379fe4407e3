"""The block pool against a model that keeps every token of every sequence in a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.base import Drop, Fork, Span, Truncate
from backends.errors import BatchError, KVRoomError
from backends.pool import BlockPool


def pages(num_tokens: int, size: int) -> int:
    return -(-num_tokens // size)


class PoolMachine(RuleBasedStateMachine):
    """`memory` is what the owner of the blocks would hold: a tag in each slot. Tokens must read back as written."""

    @initialize(num_blocks=st.integers(0, 12), block_tokens=st.integers(1, 5))
    def make(self, num_blocks: int, block_tokens: int) -> None:
        self.pool = BlockPool(num_blocks, block_tokens)
        self.memory = [[0] * block_tokens for _ in range(num_blocks)]
        self.model: dict[int, list[int]] = {}
        self.next_tag = 1

    def write(self, spans: list[Span]) -> None:
        for source, target in self.pool.extend_all(spans):
            self.memory[target] = list(self.memory[source])
        for span in spans:
            blocks = self.pool.blocks(span.seq)
            tokens = self.model.setdefault(span.seq, [])
            for position in range(span.start, span.start + span.count):
                self.memory[blocks[position // self.pool.block_tokens]][position % self.pool.block_tokens] = (
                    self.next_tag
                )
                tokens.append(self.next_tag)
                self.next_tag += 1

    def state(self) -> object:
        pool = self.pool
        return pool.num_free, {seq: (list(pool.blocks(seq)), pool.length(seq)) for seq in pool.sequences()}

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.integers(0, 4), unique=True, max_size=3))
        counts = data.draw(st.lists(st.integers(1, 12), min_size=len(seqs), max_size=len(seqs)))
        spans = [Span(s, len(self.model.get(s, ())), n, 0) for s, n in zip(seqs, counts, strict=True)]
        before = self.state()
        num_needed, num_free = self.num_needed(spans), self.pool.num_free
        try:
            self.write(spans)
        except KVRoomError:
            assert num_needed > num_free
            assert self.state() == before
        else:
            assert self.pool.num_free == num_free - num_needed

    def num_needed(self, spans: list[Span]) -> int:
        """Fresh blocks, and a copy for each sequence but the last that writes into a block."""
        size = self.pool.block_tokens
        total = sum(pages(s.start + s.count, size) - len(self.pool.blocks(s.seq)) for s in spans)
        tails = [self.pool.blocks(s.seq)[-1] for s in spans if s.start % size]
        for block in set(tails):
            holders = sum(block in self.pool.blocks(seq) for seq in self.pool.sequences())
            total += min(tails.count(block), holders - 1)
        return total

    @rule(src=st.integers(0, 4), dst=st.integers(0, 4), count=st.integers(0, 20))
    def fork(self, src: int, dst: int, count: int) -> None:
        before = self.state()
        if src in self.model and dst not in self.model and count <= len(self.model[src]):
            free = self.pool.num_free
            self.pool.apply(Fork(src, dst, count))
            self.model[dst] = self.model[src][:count]
            assert self.pool.num_free == free
        else:
            with pytest.raises(BatchError):
                self.pool.apply(Fork(src, dst, count))
            assert self.state() == before

    @rule(seq=st.integers(0, 4), count=st.integers(-1, 20))
    def truncate(self, seq: int, count: int) -> None:
        before = self.state()
        if seq in self.model and 0 <= count <= len(self.model[seq]):
            self.pool.apply(Truncate(seq, count))
            del self.model[seq][count:]
        else:
            with pytest.raises(BatchError):
                self.pool.apply(Truncate(seq, count))
            assert self.state() == before

    @rule(seq=st.integers(0, 6))
    def drop(self, seq: int) -> None:
        self.pool.apply(Drop(seq))
        self.model.pop(seq, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length, before = len(self.model[seq]), self.state()
        for spans in (
            [Span(seq, length + 1, 1, 0)],
            [Span(seq, length, 0, 0)],
            [Span(seq, length, 1, 0), Span(seq, length + 1, 1, 0)],
        ):
            with pytest.raises(BatchError):
                self.pool.extend_all(spans)
        assert self.state() == before

    @invariant()
    def nothing_leaks(self) -> None:
        tables = [self.pool.blocks(seq) for seq in self.pool.sequences()]
        held = {block for table in tables for block in table}
        assert sorted(self.pool.sequences()) == sorted(self.model)
        assert len(held) + self.pool.num_free == self.pool.num_blocks
        for seq, table in zip(self.pool.sequences(), tables, strict=True):
            assert len(set(table)) == len(table) == pages(self.pool.length(seq), self.pool.block_tokens)

    @invariant()
    def contents_are_right(self) -> None:
        for seq, tokens in self.model.items():
            read = [slot for block in self.pool.blocks(seq) for slot in self.memory[block]]
            assert read[: self.pool.length(seq)] == tokens


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_shared_block_is_copied_once_and_only_when_written() -> None:
    pool = BlockPool(4, 4)
    assert pool.extend(1, 0, 6) == []
    pool.apply(Fork(1, 2, 6))
    assert pool.num_free == 2
    first, second = pool.blocks(1)
    [(source, target)] = pool.extend(2, 6, 1)
    assert source == second and pool.blocks(2) == [first, target] and pool.num_free == 1
    assert pool.extend(1, 6, 2) == []
    assert pool.blocks(1) == [first, second]


def test_both_holders_of_a_block_may_write_it_in_one_batch() -> None:
    pool = BlockPool(2, 4)
    pool.extend(1, 0, 3)
    pool.apply(Fork(1, 2, 3))
    copies = pool.extend_all([Span(1, 3, 1, 0), Span(2, 3, 1, 0)])
    assert len(copies) == 1 and pool.num_free == 0
    assert pool.blocks(1) != pool.blocks(2)


def test_reserve_writes_over_what_is_there_and_beyond_it() -> None:
    pool = BlockPool(4, 4)
    pool.extend(1, 0, 8)
    pool.apply(Fork(1, 2, 8))
    assert [source for source, _ in pool.reserve(2, 2, 5)] == pool.blocks(1)
    assert pool.length(2) == 8
    for start, stop in ((9, 10), (3, 3), (-1, 2)):
        with pytest.raises(BatchError):
            pool.reserve(2, start, stop)
    with pytest.raises(KVRoomError):
        pool.reserve(2, 8, 9)


def test_a_pool_that_is_too_small_says_what_is_missing() -> None:
    pool = BlockPool(2, 32)
    with pytest.raises(KVRoomError, match="3 more blocks of 32 tokens and has 2"):
        pool.extend(0, 0, 65)
    assert pool.num_free == 2 and pool.sequences() == []
