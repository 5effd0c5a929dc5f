"""A spare worker group, process by process: from the order to load until it is needed."""

from __future__ import annotations

import logging
import time
from typing import Any

from novainfer.errors import EngineError
from workers.ray_instance import import_ray

logger = logging.getLogger(__name__)

_ASK_INTERVAL = 1.0  # seconds between two questions to ranks that stand by


class SpareRanks:
    """A spare rank in each host (see `RankHost`): nothing is asked of one before it has answered the last question."""

    def __init__(
        self, number: int, hosts: list[Any], launches: list[str], *, load_timeout: float, hang_timeout: float
    ) -> None:
        """number: above that of all groups before it. launches: a `RankLaunch` as JSON for each rank.

        load_timeout, hang_timeout: seconds that a spare rank may take to stand by, and to answer then.
        """
        self._number, self._hosts = number, hosts
        self._load_timeout, self._hang_timeout = load_timeout, hang_timeout
        self._began = self._asked_at = self._looked_at = time.monotonic()
        self._answers = [host.stand_by.remote(number, launch) for host, launch in zip(hosts, launches, strict=True)]
        self._stands_by = False

    def tend(self) -> bool:
        """The next question to those who have all answered the last one; True once the group stands by. Never waits.

        Raises `EngineError` if a rank is dead, has failed, or does not answer.
        """
        now = time.monotonic()
        if now - self._looked_at > _ASK_INTERVAL:  # we were away ourselves: the answers may have been, too
            self._asked_at = now
        self._looked_at = now
        waited = now - self._asked_at
        if not self._all_answer(timeout=0.0):
            if waited > (self._hang_timeout if self._stands_by else self._load_timeout):
                raise EngineError(f"no answer for {waited:.1f} s")
        elif not self._stands_by:
            self._stands_by = True
            logger.info("spare workers stand by (%.1f s)", time.monotonic() - self._began)
        elif waited > _ASK_INTERVAL:
            self._ping()
        return self._stands_by

    def can_serve(self) -> bool:
        """Whether all ranks stand by; asks them, and waits for `hang_timeout` at most: loading anew takes longer."""
        if not self._stands_by:
            return False
        try:
            if not self._all_answer(timeout=self._hang_timeout):
                return False
            self._ping()
            return self._all_answer(timeout=self._hang_timeout)
        except EngineError:
            return False

    def serve(self, epoch: int) -> list[Any]:
        """From now on they are the ranks of this epoch: the life of each, as `RankHost.run` tells it."""
        return [host.serve.remote(self._number, epoch) for host in self._hosts]

    def kill(self) -> None:
        """End them, whatever they do. Does not wait."""
        for host in self._hosts:
            host.drop_spare.remote(self._number)

    def _ping(self) -> None:
        self._answers, self._asked_at = [host.ping.remote(self._number) for host in self._hosts], time.monotonic()

    def _all_answer(self, timeout: float) -> bool:
        ray = import_ray()
        answered, missing = ray.wait(self._answers, num_returns=len(self._answers), timeout=timeout)
        for answer in answered:
            try:
                ray.get(answer)
            except ray.exceptions.RayActorError:
                raise EngineError("a rank's host has died") from None
            except ray.exceptions.RayError as error:
                raise EngineError(str(error).strip().splitlines()[-1]) from None
        return not missing
