"""A rank's place in Ray: an actor that holds the rank's resources and starts its processes, one after the other.

The rank itself is a process of its own, forked from the host's zygote: so the next one is there in a hundredth of a
second when it dies, and the actor lives on. Both end with the actor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

from novainfer.errors import EngineError
from novainfer.transport.zygote import ZygoteProcess
from workers.launch import RankLaunch
from workers.rank_zygote import HERE, Order
from workers.ray_instance import session_dir
from workers.weight_ahead import read_ahead

MAX_CALLS = 4  # at a time: a rank's life, and what is asked of a spare meanwhile
_TOO_LATE = "another one has been started, or it was ended before it began"
_ZYGOTE_DIED = "its zygote has died"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # Ray sets it once it knows what a worker is: after the zygote was started


class RankHost:
    """What runs in an actor's process. A call is over when what it is about has ended.

    Calls run at the same time, and may begin in another order than they were made in: the highest epoch counts, and of
    spare ranks, which have none yet, the highest number.
    """

    def __init__(self) -> None:
        self._zygote = _zygote()
        self._lock = threading.Lock()  # for what follows
        self._epoch = 0  # the newest that was begun or ended
        self._slot = 0  # of the rank; the other one is the spare's
        self._spare: RankProcess | None = None
        self._spare_number = 0  # the newest that was begun or dropped

    def run(self, launch_json: str) -> str:
        """The life of a rank: how it ended, empty if it was told to. The one before it is killed."""
        launch = RankLaunch.from_json(launch_json)
        _read_ahead(launch)
        with self._lock:
            if launch.place.epoch <= self._epoch:
                return _TOO_LATE
            self._epoch = launch.place.epoch
            rank = self._start(self._slot, launch, is_spare=False)
        return rank.wait_end()

    def end(self, epoch: int) -> None:
        """Kill the rank of this epoch; its `run` or `serve` then returns."""
        with self._lock:
            if epoch >= self._epoch:
                self._epoch = epoch
                self._zygote.kill_child(self._slot)

    def stand_by(self, number: int, launch_json: str) -> None:
        """Start a spare rank; returns when it has done all that a rank does before its first word.

        Raises `EngineError` with its last words if it cannot, as `ping` does.
        """
        with self._lock:
            if number <= self._spare_number:
                raise EngineError(_TOO_LATE)
            self._spare_number = number
            self._spare = spare = self._start(1 - self._slot, RankLaunch.from_json(launch_json), is_spare=True)
        spare.wait_answer()

    def ping(self, number: int) -> None:
        """Return: the spare rank of this number stands by."""
        with self._lock:
            spare = self._spare_of(number)
        spare.order(Order())
        spare.wait_answer()

    def serve(self, number: int, epoch: int) -> str:
        """The life of the spare rank of this number as a rank of this epoch, as `run`."""
        with self._lock:
            if epoch <= self._epoch:
                return _TOO_LATE
            rank = self._spare_of(number)
            self._spare = None
            self._epoch, self._slot = epoch, 1 - self._slot
            rank.order(Order(epoch=epoch))
        return rank.wait_end()

    def drop_spare(self, number: int) -> None:
        """Kill the spare rank of this number."""
        with self._lock:
            if number >= self._spare_number:
                self._spare_number = number
                self._zygote.kill_child(1 - self._slot)

    def _spare_of(self, number: int) -> RankProcess:
        if self._spare is None or number != self._spare_number:
            raise EngineError("there is no spare rank of this number")
        return self._spare

    def _start(self, slot: int, launch: RankLaunch, *, is_spare: bool) -> RankProcess:
        # A relative one is on this host, which need not be the supervisor's.
        meeting_point = os.path.join(session_dir(), launch.place.meeting_point)
        launch = replace(launch, place=replace(launch.place, meeting_point=meeting_point))
        environ = {name: value for name, value in os.environ.items() if name == _VISIBLE_GPUS}
        process = RankProcess(self._zygote.fork(slot))
        process.order(Order(launch.to_json(), is_spare, environ))
        return process


class RankProcess:
    """The line to one rank's process; see `rank_zygote`."""

    def __init__(self, connection: socket.socket) -> None:
        with connection:
            self._talk = connection.makefile("rw", encoding="utf-8")

    def order(self, order: Order) -> None:
        """Tell it something; if it is dead, the next wait says so."""
        with contextlib.suppress(OSError):
            self._talk.write(order.to_line())
            self._talk.flush()

    def wait_answer(self) -> None:
        """Return when it has answered that it stands by. Raises `EngineError` if it ends instead."""
        answer = self._talk.readline().rstrip("\n")
        if answer != HERE:
            raise EngineError(answer or _ZYGOTE_DIED)

    def wait_end(self) -> str:
        """Return its last words, or how it ended, once it is dead."""
        with self._talk:
            lines = [line.rstrip("\n") for line in self._talk]
        return next((line for line in lines if line != HERE), _ZYGOTE_DIED)


def _read_ahead(launch: RankLaunch) -> None:
    """On the supervisor's host it has seen to that itself. What a hub id is called here, the rank alone finds out."""
    folder = Path(os.path.expanduser(launch.config.model.model))
    if launch.config.parallel.cluster_host is not None and folder.is_dir():
        read_ahead(folder, launch.config, (launch.place.rank,))


def _zygote() -> ZygoteProcess:
    from workers.ray_preload import ZYGOTE

    return ZYGOTE
