"""Columns of integers of 64 bits: each is one object, which is copied, compared and sent as one piece of memory, in the
order of this processor's bytes: all hosts of a cluster must have the same.

A list has an object for each integer. Who hands on hundreds of them in every step, and looks at none, cannot afford it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Column = array[int]
else:
    Column = array  # no class to be subscripted before Python 3.12


def column(values: Iterable[int] = ()) -> Column:
    """These integers. Raises `OverflowError` for one that has more than 64 bits."""
    return array("q", values)


def column_from(data: bytes) -> Column:
    """What `tobytes` gave. Raises `ValueError` for what is no whole number of items."""
    return array("q", data)
