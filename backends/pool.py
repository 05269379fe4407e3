"""The books of a paged cache: which sequence holds which blocks. Ints only; whoever owns the memory follows.

A `Fork` shares blocks, the last partial one too; a block that is written while shared is first replaced by a copy. The
scheduler on the head keeps such a pool as a mirror of every stage's room.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import Command, Drop, Fork, Span
from backends.errors import BatchError, KVRoomError

Copy = tuple[int, int]
"""(from block, to block): contents to be copied before anything is written."""


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens, handed out to sequences in order of need."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def sequences(self) -> list[int]:
        return list(self._tables)

    def length(self, seq: int) -> int:
        """Tokens held by `seq`; 0 for one that does not exist."""
        return self._lengths.get(seq, 0)

    def blocks(self, seq: int) -> list[int]:
        """Blocks of `seq` in order of position. Not to be changed by the caller."""
        return self._tables.get(seq, [])

    def apply(self, command: Command) -> None:
        """Raises BatchError for a fork of or beyond an unknown sequence, and for a target that exists."""
        if isinstance(command, Fork):
            self._fork(command.src, command.dst, command.num_tokens)
        elif isinstance(command, Drop):
            for block in self._tables.pop(command.seq, ()):
                self._release(block)
            self._lengths.pop(command.seq, None)
        else:
            self._truncate(command.seq, command.num_tokens)

    def extend(self, seq: int, start: int, count: int) -> list[Copy]:
        """Make room for tokens `start` to `start + count` at the end of `seq`. All or nothing."""
        return self.extend_all([Span(seq, start, count, 0)])

    def extend_all(self, spans: Sequence[Span]) -> list[Copy]:
        """The same for a whole batch. Raises KVRoomError or BatchError, having changed nothing."""
        seen: set[int] = set()
        for span in spans:
            length = self.length(span.seq)
            if span.start != length or span.count < 1:
                raise BatchError(f"Sequence {span.seq} has {length} tokens; {span} does not continue it.")
            if span.seq in seen:
                raise BatchError(f"Sequence {span.seq} comes twice in one batch.")
            seen.add(span.seq)
        return self._write([(span.seq, span.start, span.start + span.count) for span in spans])

    def reserve(self, seq: int, start: int, stop: int) -> list[Copy]:
        """Make tokens `start` to `stop` of `seq` writable; it grows to `stop` if it was shorter. No holes."""
        if not 0 <= start <= self.length(seq) or stop <= start:
            raise BatchError(f"Sequence {seq} has {self.length(seq)} tokens; {start} to {stop} leaves a hole.")
        return self._write([(seq, start, stop)])

    def _needed(self, writes: list[tuple[int, int, int]]) -> int:
        needed = 0
        released: dict[int, int] = {}  # users that copies of this batch have already taken off a shared block
        for seq, start, stop in writes:
            table = self.blocks(seq)
            needed += max(0, -(-stop // self.block_tokens) - len(table))
            for block in table[start // self.block_tokens : -(-stop // self.block_tokens)]:
                if self._users[block] - released.get(block, 0) > 1:
                    needed += 1
                    released[block] = released.get(block, 0) + 1
        return needed

    def _write(self, writes: list[tuple[int, int, int]]) -> list[Copy]:
        needed = self._needed(writes)
        if needed > len(self._free):
            raise KVRoomError(
                f"The cache needs {needed} more blocks of {self.block_tokens} tokens and has {len(self._free)}.",
                "Serve fewer requests at once, or start with a larger --memory or a smaller --context.",
            )
        copies: list[Copy] = []
        for seq, start, stop in writes:
            table = self._tables.setdefault(seq, [])
            for i in range(start // self.block_tokens, min(len(table), -(-stop // self.block_tokens))):
                if self._users[table[i]] > 1:
                    copy = self._take()
                    copies.append((table[i], copy))
                    self._release(table[i])
                    table[i] = copy
            while len(table) * self.block_tokens < stop:
                table.append(self._take())
            self._lengths[seq] = max(stop, self.length(seq))
        return copies

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free.append(block)

    def _fork(self, src: int, dst: int, num_tokens: int) -> None:
        if dst in self._tables:
            raise BatchError(f"Sequence {dst} exists already; it cannot be forked into.")
        if not 0 <= num_tokens <= self.length(src) or src not in self._tables:
            raise BatchError(f"Sequence {src} has {self.length(src)} tokens; {num_tokens} cannot be forked off it.")
        table = self._tables[src][: -(-num_tokens // self.block_tokens)]
        for block in table:
            self._users[block] += 1
        self._tables[dst] = table
        self._lengths[dst] = num_tokens

    def _truncate(self, seq: int, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.length(seq) or seq not in self._tables:
            raise BatchError(f"Sequence {seq} has {self.length(seq)} tokens; it cannot be cut to {num_tokens}.")
        table = self._tables[seq]
        keep = -(-num_tokens // self.block_tokens)
        for block in table[keep:]:
            self._release(block)
        del table[keep:]
        self._lengths[seq] = num_tokens
