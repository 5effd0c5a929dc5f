"""The gateway's end of its text processes (see `text_child`): it starts them, gives them jobs, and kills the slow ones.

There are three lanes, each with one process and one job at a time, so that short requests never wait for long ones, nor
either for grammars; in a lane it is the tenants' turns one after the other. Runs on the event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gateway.fair_lock import FairLock
from gateway.text_jobs import (
    LENGTH,
    TEXT_SCHEMA,
    Done,
    Failed,
    GrammarJob,
    Job,
    Ready,
    Refused,
    Rendered,
    RenderJob,
    frame_size,
    receive,
    to_frame,
)
from novainfer.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NovaInferError,
    OverloadedError,
    ProtocolError,
)
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.text.chat_template import RENDER_SECONDS
from novainfer.transport.processes import cpu_seconds, is_pid_stopped
from novainfer.transport.zygote import ZygoteProcess

log = logging.getLogger(__name__)

RENDER_LIMIT = RENDER_SECONDS + 0.5  # seconds of CPU; first the template may end itself, and say why
GRAMMAR_LIMIT = 0.5  # seconds of CPU; one that is not built for so long is refused (`grammars.BUILD_SECONDS`)
JOB_LIMIT = 30.0  # seconds of a job, whoever waits for it
STOPPED_LIMIT = 1.0  # seconds of a job whose process the system says is stopped
LOOK_SECONDS = 0.2  # between looks at a job
UNWANTED_LIMIT = 0.25  # seconds of a job that nobody waits for any more; few are worth a new process
START_LIMIT = 30.0  # seconds, for a zygote that has to read its files first
JOB_ATTEMPTS = 2  # at a job whose process died
START_ATTEMPTS = 3  # at a process that is ready; the zygote may have to be started first
MAX_HELD_BYTES = 2 * MAX_MESSAGE_BYTES  # of the jobs in a lane: `ByteBudget` has let go of what was read
RETRY_SECONDS = 1.0  # for a client, when no process can be started, or its lane is full
_SHORT, _LONG, _GRAMMARS = range(3)  # lanes; the processes of the first two are there from the beginning
_BOUNDS: dict[type, tuple[float, str]] = {
    RenderJob: (RENDER_LIMIT, "The chat template took too long."),
    GrammarJob: (GRAMMAR_LIMIT, "The grammar is too dear: it takes too long to build."),
}


class TextProcesses:
    """The zygote and the lanes of one gateway.

    folder: the tokenizer's.   count: told why a text process was lost, in one word: 'time', 'unwanted', 'died'.
    is_shared: there are several tenants, of which none may hold more than half of what a lane may.
    """

    def __init__(
        self,
        folder: Path,
        chat_template: str | None,
        *,
        index: int,
        count: Callable[[str], None],
        is_shared: bool = False,
    ) -> None:
        """Starts the zygote; does not wait for it. In the end call `close`."""
        arguments = ["--index", str(index), "--tokenizer", str(folder)]
        if chat_template is not None:
            arguments += ["--chat-template", chat_template]
        # One thread: it shall fork. (The tokenizers library starts some where it may.)
        self._zygote = ZygoteProcess("gateway.text_child", arguments, {"TOKENIZERS_PARALLELISM": "false"})
        lanes = (_SHORT, _LONG, _GRAMMARS)
        self._lanes = [Lane(number, self._zygote, count, is_shared=is_shared) for number in lanes]

    @property
    def zygote_pid(self) -> int:
        """The process that all others are children of."""
        return self._zygote.pid

    def wait_ready(self) -> None:
        """Block until the zygote has read its files, then start the text processes.

        Raises `ConfigError` if it cannot read them, `EngineError` if it dies.
        """
        try:
            ready = receive(self._zygote.control)
        except (EOFError, OSError):
            raise EngineError("The process that prepares texts died while it was started.") from None
        if ready.fault:
            raise ConfigError(ready.fault)
        for lane in self._lanes[:_GRAMMARS]:
            lane.prepare()

    def submit(self, job: Job, tenant: str, *, is_long: bool) -> Turn:
        """Put it into its lane. Raises `InvalidRequestError` if it is too large, `OverloadedError` if its lane is full,
        or the tenant's part of it.
        """
        number = _GRAMMARS if isinstance(job, GrammarJob) else _LONG if is_long else _SHORT
        return self._lanes[number].submit(job, tenant)

    def close(self) -> None:
        """End all processes, at once. Idempotent."""
        for lane in self._lanes:
            lane.close()
        self._zygote.close()


class Turn:
    """A job in its lane.

    task: ends with the result's parts, or raises `InvalidRequestError`, `DeadlineError`, `OverloadedError` or
    `EngineError`.
    """

    def __init__(self, lane: Lane, job: Job, tenant: str) -> None:
        self.param = job.param
        self.tenant = tenant
        # What a job that a client's own words can make last for ever may take, and what is said then.
        self.bound: tuple[float, str] | None = _BOUNDS.get(type(job))
        self.is_bounded = False
        self.is_unwanted = False
        self.began = 0.0  # on the loop's clock, once the process has it
        self.cpu_seconds: float | None = None  # of its process, at the first look
        self.timer: asyncio.TimerHandle | None = None
        # Why its process was given up: in a word, and for the client unless it is done again.
        self.verdict: tuple[str, NovaInferError | None] | None = None
        self._lane = lane
        try:
            self.frame = to_frame(job)
        except ProtocolError:
            raise InvalidRequestError("The text of this request is too large.", param=job.param) from None
        lane.hold(tenant, len(self.frame))
        self.task = asyncio.ensure_future(lane.run(self))
        self.task.add_done_callback(_look_at)
        self.task.add_done_callback(lambda _: lane.let_go(tenant, len(self.frame)))

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.is_unwanted = True
        if not self.began:
            self.task.cancel()
        elif not self.task.done():
            self._lane.watch(self)

    def stop_timer(self) -> None:
        """It is not looked at any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _look_at(task: asyncio.Task[list[bytes]]) -> None:
    """An error that nobody waits for is no news."""
    if not task.cancelled():
        task.exception()


class Lane:
    """One text process and the jobs for it, the tenants' in turns. A process that is lost is replaced at once.

    turn: the one that it is at.   num_bytes: of all jobs that are here.
    """

    def __init__(self, number: int, zygote: ZygoteProcess, count: Callable[[str], None], *, is_shared: bool) -> None:
        self.turn: Turn | None = None
        self.num_bytes = 0
        self._is_shared = is_shared
        self._bytes_of: Counter[str] = Counter()  # tenants that have any
        self._number = number
        self._zygote = zygote
        self._count = count
        self._lock = FairLock()
        self._socket: socket.socket | None = None
        self._is_ready = False  # the process has said so
        self._pid = 0

    def prepare(self) -> None:
        """Have the zygote start a process, in place of the one that is there; does not wait for it.

        Raises `OSError` where the system has no socket for it; then there is none.
        """
        self._drop()
        self._socket = self._zygote.fork(self._number)
        self._socket.setblocking(False)

    def submit(self, job: Job, tenant: str) -> Turn:
        """Put a job behind those of the tenant that are there. See `TextProcesses.submit`."""
        return Turn(self, job, tenant)

    def hold(self, tenant: str, count: int) -> None:
        """Have so many bytes more here. Raises `OverloadedError` where there is no room, or the tenant has its part."""
        if self.num_bytes + count > MAX_HELD_BYTES:
            raise OverloadedError("Too much text waits to be prepared. Please retry later.", retry_after=RETRY_SECONDS)
        if self._is_shared and self._bytes_of[tenant] + count > MAX_HELD_BYTES // 2:
            words = "Too much text of this API key waits to be prepared. Please retry later."
            raise OverloadedError(words, retry_after=RETRY_SECONDS, status=429)
        self.num_bytes += count
        self._bytes_of[tenant] += count

    def let_go(self, tenant: str, count: int) -> None:
        """Of bytes that were held: their job is over."""
        self.num_bytes -= count
        self._bytes_of[tenant] -= count
        if not self._bytes_of[tenant]:
            del self._bytes_of[tenant]

    def close(self) -> None:
        """No more jobs. One that is being done ends with an error."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._lock.is_locked:
                self._drop()

    async def run(self, turn: Turn) -> list[bytes]:
        """What a turn's task does."""
        await self._lock.acquire(turn.tenant)
        self.turn = turn
        try:
            for _ in range(JOB_ATTEMPTS):
                connection = await self._connected()
                try:
                    return await self._exchange(connection, turn)
                except (OSError, EOFError, ProtocolError):
                    why, error = turn.verdict or ("died", None)
                    self._lose(why)
                    if error is not None:
                        raise error from None
                finally:
                    turn.stop_timer()
                    turn.began = 0.0
        except asyncio.CancelledError:
            self._drop()  # half a message may have been read
            raise
        finally:
            self.turn = None
            self._lock.release()
        text = "The text of this request could not be prepared: the process that was to do it died."
        raise InvalidRequestError(text, param=turn.param)

    async def _connected(self) -> socket.socket:
        """The socket of a process that is ready. Raises `OverloadedError` or `EngineError` if there can be none."""
        for _ in range(START_ATTEMPTS):
            if self._socket is None:
                try:
                    self.prepare()
                except OSError as error:
                    log.warning("no text process can be started: %s", error)
                    words = "The server cannot prepare texts now."
                    raise OverloadedError(words, retry_after=RETRY_SECONDS) from None
            if self._socket is not None and await self._hears(self._socket):
                if _is_quiet(self._socket):
                    return self._socket
                self._count("died")
            self._drop()
        raise EngineError("The server cannot prepare the text of requests.")

    async def _hears(self, connection: socket.socket) -> bool:
        """Whether the process behind it is, or gets, ready."""
        loop = asyncio.get_running_loop()
        if not self._is_ready:
            timer = loop.call_later(START_LIMIT, self._zygote.kill)
            try:
                ready = await _receive(loop, connection)
                if isinstance(ready, Ready):
                    self._is_ready, self._pid = True, ready.pid
            except (OSError, EOFError, ProtocolError):
                log.warning("a text process died before it was ready")
            finally:
                timer.cancel()
        return self._is_ready

    async def _exchange(self, connection: socket.socket, turn: Turn) -> list[bytes]:
        loop = asyncio.get_running_loop()
        turn.began = loop.time()
        turn.is_bounded = True
        turn.cpu_seconds = None
        self.watch(turn)
        await loop.sock_sendall(connection, turn.frame)
        reply = await _receive(loop, connection)
        if isinstance(reply, Rendered):
            turn.is_bounded = False
            reply = await _receive(loop, connection)
        if self._number == _LONG:
            self._replace()  # what a long text took of memory goes back to the system
        if isinstance(reply, Done):
            return reply.parts
        if isinstance(reply, Refused):
            raise InvalidRequestError(reply.message, param=reply.param, code=reply.code)
        if isinstance(reply, Failed):
            raise EngineError(f"The text of this request could not be prepared ({reply.kind}).")
        raise ProtocolError(f"text: {type(reply).__name__} is not a reply")

    def watch(self, turn: Turn) -> None:
        """Look at the running turn in a while, and again and again."""
        turn.stop_timer()
        loop = asyncio.get_running_loop()
        left = turn.began + UNWANTED_LIMIT - loop.time()
        turn.timer = loop.call_later(max(left, 0.0) if turn.is_unwanted else LOOK_SECONDS, self._look, turn)

    def _look(self, turn: Turn) -> None:
        """End the running turn if it had its time. To shut the socket down ends what waits for it."""
        turn.verdict = self._verdict(turn, asyncio.get_running_loop().time() - turn.began)
        if turn.verdict is None:
            self.watch(turn)
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _verdict(self, turn: Turn, seconds: float) -> tuple[str, NovaInferError | None] | None:
        """See `Turn.verdict`; None while the turn, which has run for so long, may go on."""
        late = DeadlineError(f"The prompt took more than {JOB_LIMIT:g} s to prepare.")
        if turn.is_unwanted and seconds >= UNWANTED_LIMIT:
            return "unwanted", late
        if seconds >= STOPPED_LIMIT and is_pid_stopped(self._pid):
            return "died", None
        if turn.is_bounded and turn.bound is not None and self._takes_too_long(turn, seconds, turn.bound[0]):
            return "time", InvalidRequestError(turn.bound[1], param=turn.param)
        return ("time", late) if seconds >= JOB_LIMIT else None

    def _takes_too_long(self, turn: Turn, seconds: float, limit: float) -> bool:
        """By the CPU time since the first look, with all the time until then: on a busy machine it waits for its turn.

        Where CPU time cannot be known, by the clock.
        """
        used = cpu_seconds(self._pid)
        if turn.cpu_seconds is None:
            turn.cpu_seconds = used
        if used is None or turn.cpu_seconds is None:
            return seconds >= limit
        return used - turn.cpu_seconds + LOOK_SECONDS >= limit

    def _lose(self, why: str) -> None:
        self._count(why)
        log.warning("text process %d is replaced (%s)", self._number, why)
        self._replace()

    def _replace(self) -> None:
        """As `prepare`, but where that cannot be done now, the next job has it tried again."""
        with contextlib.suppress(OSError):
            self.prepare()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._is_ready = None, False


def _is_quiet(connection: socket.socket) -> bool:
    """Whether the other end is alive, and has nothing to say that nobody asked for."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> object:
    """As `text_jobs.receive`."""
    head = await _receive_exactly(loop, connection, LENGTH.size)
    message: object = TEXT_SCHEMA.decode(await _receive_exactly(loop, connection, frame_size(head)))
    return message


async def _receive_exactly(loop: asyncio.AbstractEventLoop, connection: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    left = data
    while left:
        count = await loop.sock_recv_into(connection, left)
        if not count:
            raise EOFError
        left = left[count:]
    return data
