"""What the worker groups have said that they compute (see `workers.fingerprint`): who takes over must say the same.

A group that does not is ended before its first step, and another one started. If that agrees with it, against the first
one, it is to serve: perhaps the hardware is another one, perhaps the first group was the one that was wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)


_FREE_REFUSALS = 3  # in a row that do not count as deaths: groups of which no two agree are a machine that is ill


class Fingerprints:
    """That of the group that serves or served last, and those that were refused since."""

    def __init__(self) -> None:
        self._known: list[str] = []
        self._was_refused = False

    def known(self) -> Sequence[str]:
        """Those that the next group may have; none: any."""
        return tuple(self._known)

    def serves(self, fingerprint: str) -> None:
        """Everything is ready, with a group of this fingerprint; empty: it has none."""
        if not fingerprint:
            return
        if self._known and fingerprint != self._known[0]:
            words = "the workers compute otherwise than before (%s, not %s), as others did that were refused"
            logger.error(words + ": tokens may differ", fingerprint, self._known[0])
        self._known = [fingerprint]

    def refused(self, fingerprint: str) -> None:
        """A group has ended since its fingerprint was none of those that are known; empty: of something else."""
        if fingerprint:
            self._known.append(fingerprint)
            self._was_refused = len(self._known) <= 1 + _FREE_REFUSALS

    def was_refused(self) -> bool:
        """Whether what has just ended was refused, and not too often: asked once of each end."""
        was_refused, self._was_refused = self._was_refused, False
        return was_refused
