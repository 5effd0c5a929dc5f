"""When the full blocks of running sequences are offered to the prefix index. Pure; in the scheduler."""

from __future__ import annotations

_MOST_BLOCKS, _MOST_TOKENS = 4, 64  # of a sequence's output that are offered together
_NEIGHBOURS = 8  # rows, whose tokens of one step lie in one line of a cache


class IndexPace:
    """A prompt's blocks are offered as soon as they are computed: others wait for them. A sequence's output fills one
    block after the other, which are offered a few at a time: most of what that costs is to fetch from memory what is
    known of the sequence. What is left is offered when it gives its row back, see `Rows.release`.

    Rows have their turns in different steps, but for neighbours, so that of many that begin together not all have it in
    the same one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = max(min(_MOST_BLOCKS, _MOST_TOKENS // block_size), 1)
        self.num_tokens = self.num_blocks * block_size  # that a row computes from one turn to its next

    def place(self, row: int, num_computed: int) -> int:
        """Tokens of a row with so many since its last turn: 0 when it has it."""
        return (row // _NEIGHBOURS * self.block_size + num_computed) % self.num_tokens

    def is_due(self, row: int, num_confirmed: int, num_new: int, prompt_len: int) -> bool:
        """Whether a sequence in this row is to be offered, of whose confirmed tokens so many are new."""
        if num_new > 1 or num_confirmed <= prompt_len:
            return num_confirmed % self.block_size < num_new
        return self.place(row, num_confirmed) == 0
