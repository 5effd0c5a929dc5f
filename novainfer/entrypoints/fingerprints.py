"""What the worker groups have said that they compute (see `workers.fingerprint`): who takes over must say the same.

A group that does not is ended before its first step, and another one started. If that agrees with it, against the first
one, it is to serve: perhaps the hardware is another one, perhaps the first group was the one that was wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from novainfer.protocol.supervision import ChildFault, ChildReady

logger = logging.getLogger(__name__)


class Fingerprints:
    """That of the group that serves or served last, and those that were refused since."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def known(self) -> Sequence[str]:
        """Those that the next group may have; none: any."""
        return tuple(self._known)

    def ready(self, report: ChildReady) -> None:
        """A child is about to serve."""
        if not report.fingerprint:
            return
        if self._known and report.fingerprint != self._known[0]:
            words = "the workers compute otherwise than before (%s, not %s), as others did that were refused"
            logger.error(words + ": tokens may differ", report.fingerprint, self._known[0])
        self._known = [report.fingerprint]

    def refused(self, report: ChildFault) -> None:
        """A child ended, perhaps since its group's fingerprint was none of those that are known."""
        if report.fingerprint:
            self._known.append(report.fingerprint)
