"""The tokens of the newest results, for those who take theirs several at a time. Pure; in the scheduler."""

from __future__ import annotations

from novainfer.protocol.columns import Column, column


class NewestTokens:
    """A ring with a part for each of so many steps, so that what one row got is a stride through it.

    A result is put there as it is, in the order of its rows, which mostly are those of the result before. When they are
    others those before are sorted by row.
    """

    def __init__(self, num_steps: int, num_rows: int) -> None:
        """num_rows: above all of their numbers."""
        self._num_steps = num_steps
        self._width = num_rows
        self._tokens = column([0]) * (num_steps * num_rows)
        self._rows = column()  # of the results from step `_same_from` on, which are not sorted
        self._same_from = self._end = 0  # before step `_end`
        self._places: dict[int, int] = {}  # of those rows; empty until somebody asks

    def put(self, step: int, rows: Column, token_ids: Column) -> None:
        """A later step's. rows: the same column if they are those of the step before."""
        if rows is not self._rows or step != self._end:
            self._sort()
            self._rows, self._places = rows, {}
            self._same_from = step
        start = step % self._num_steps * self._width
        self._tokens[start : start + len(token_ids)] = token_ids
        self._end = step + 1

    def of_row(self, row: int, step: int) -> Column:
        """What this row got from this step on; it must have a token in each since, and they must not be too many."""
        same_from = self._same_from
        if not self._places:
            self._places = {row: place for place, row in enumerate(self._rows)}
        if step >= same_from:
            return self._stride(self._places[row], step, self._end)
        return self._stride(row, step, same_from) + self._stride(self._places[row], same_from, self._end)

    def _stride(self, place: int, step: int, end: int) -> Column:
        width = self._width
        start, stop = step % self._num_steps * width + place, ((end - 1) % self._num_steps + 1) * width
        if start < stop:
            return self._tokens[start:stop:width]
        return self._tokens[start::width] + self._tokens[place:stop:width]

    def _sort(self) -> None:
        """By row: those that are not."""
        for step in range(max(self._same_from, self._end - self._num_steps), self._end):
            start = step % self._num_steps * self._width
            part = self._tokens[start : start + self._width]
            by_row = part[:]
            for row, token_id in zip(self._rows, part, strict=False):
                by_row[row] = token_id
            self._tokens[start : start + self._width] = by_row
