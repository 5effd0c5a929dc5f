"""A TCP proxy that does to connections what networks do: it delays, throttles, falls silent, cuts, spoils, refuses.

It runs in a thread of its own and is told what to do from any other. It never reorders: TCP does not. What it holds
back while it is silent is passed on afterwards, unless the connection was cut meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

UP, DOWN = "up", "down"  # towards who listens behind the proxy; towards who has connected
BOTH = frozenset({UP, DOWN})
_PIECE_BYTES = 1024  # so much is held back or passed on at once
_PIECES_ON_THE_WAY = 256  # then the sender must wait, as it does when a network's buffers are full
Pieces = asyncio.Queue[tuple[float, bytes]]  # (when it came, on the loop's clock; b"" = the end)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Weather:
    """How the network is, for old connections and new ones."""

    delay: float = 0.0  # seconds for each piece, in each direction
    rate: float | None = None  # bytes a second, of each direction of a connection
    silent: frozenset[str] = frozenset()  # directions in which nothing gets through
    refuses: bool = False  # new connections


FAIR = Weather()


@dataclass(eq=False)
class _Connection:
    """One connection and its other half."""

    writers: dict[str, asyncio.StreamWriter] = field(default_factory=dict)  # by the direction in which they write
    ended: set[str] = field(default_factory=set)  # directions in which a FIN was sent
    task: asyncio.Task[None] | None = None

    def end(self, direction: str) -> None:
        """FIN in this direction; what would follow is dropped."""
        writer = self.writers.get(direction)
        if writer is not None and direction not in self.ended and not writer.is_closing():
            self.ended.add(direction)
            with contextlib.suppress(OSError):
                writer.write_eof()

    def abort(self) -> None:
        """RST at both ends."""
        for writer in self.writers.values():
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()


class Proxy:
    """Listens at 127.0.0.1:`port`, which stays its own while it refuses connections; close it."""

    def __init__(self, upstream: Callable[[], tuple[str, int]]) -> None:
        """`upstream`: where to connect to, asked for each connection."""
        self._upstream = upstream
        self._weather = FAIR
        self._spoil: set[str] = set()  # directions in which the next piece gets a wrong bit
        self._connections: set[_Connection] = set()
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port: int = self._holder.getsockname()[1]
        self.changed = threading.Condition()
        self.num_opened = self.num_closed = 0  # connections so far; `changed` tells
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._call(self._open())

    # -- orders, from any thread --------------------------------------------------------------------------------

    def set(self, weather: Weather) -> None:
        """From now on it is so."""
        self._call(self._set(weather))

    def cut(self, *, orderly: bool = False) -> None:
        """End every connection at both ends: RST, or (orderly) FIN."""
        self._call(self._cut(orderly))

    def close_half(self, direction: str) -> None:
        """FIN in one direction of every connection; the other one stays open."""
        self._call(self._close_half(direction))

    def spoil(self, direction: str) -> None:
        """The next piece in this direction has a wrong bit."""
        self._call(self._add_spoil(direction))

    def close(self) -> None:
        """End every connection and the thread."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._holder.close()

    def _call(self, order: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(order, self._loop).result()

    # -- on the loop --------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._weather_changed = asyncio.Condition()
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _set(self, weather: Weather) -> None:
        refused = self._weather.refuses
        self._weather = weather
        if weather.refuses and not refused:
            self._server.close()
        elif refused and not weather.refuses:
            await self._listen()
        async with self._weather_changed:
            self._weather_changed.notify_all()

    async def _cut(self, orderly: bool) -> None:
        for connection in list(self._connections):
            if orderly:
                for writer in connection.writers.values():
                    writer.close()
            else:
                connection.abort()
            assert connection.task is not None
            connection.task.cancel()

    async def _close_half(self, direction: str) -> None:
        for connection in self._connections:
            connection.end(direction)

    async def _add_spoil(self, direction: str) -> None:
        self._spoil.add(direction)

    async def _stop(self) -> None:
        self._server.close()
        await self._cut(orderly=False)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection({DOWN: writer}, task=asyncio.current_task())
        self._connections.add(connection)
        self._count(opened=1)
        try:
            up_reader, connection.writers[UP] = await asyncio.open_connection(*self._upstream())
            async with asyncio.TaskGroup() as pumps:
                for source, direction in ((reader, UP), (up_reader, DOWN)):
                    pieces: Pieces = asyncio.Queue(_PIECES_ON_THE_WAY)
                    pumps.create_task(self._take(source, pieces))
                    pumps.create_task(self._give(pieces, connection, direction))
        except* OSError:
            connection.abort()
        except* asyncio.CancelledError:  # cut
            pass
        finally:
            for each in connection.writers.values():
                each.close()
            self._connections.discard(connection)
            self._count(closed=1)

    async def _take(self, reader: asyncio.StreamReader, pieces: Pieces) -> None:
        data = b"-"
        while data:
            data = await reader.read(_PIECE_BYTES)
            await pieces.put((self._loop.time(), data))

    async def _give(self, pieces: Pieces, connection: _Connection, direction: str) -> None:
        writer = connection.writers[direction]
        data = b"-"
        while data:
            came_at, data = await pieces.get()
            await self._hold_back(came_at, len(data), direction)
            if not data:
                connection.end(direction)
            elif direction not in connection.ended:
                writer.write(self._perhaps_spoilt(data, direction))
                await writer.drain()

    def _perhaps_spoilt(self, data: bytes, direction: str) -> bytes:
        if direction not in self._spoil:
            return data
        self._spoil.remove(direction)
        return data[:-1] + bytes([data[-1] ^ 1])

    async def _hold_back(self, came_at: float, num_bytes: int, direction: str) -> None:
        if self._weather.rate is not None:
            await asyncio.sleep(num_bytes / self._weather.rate)
        await asyncio.sleep(max(0.0, came_at + self._weather.delay - self._loop.time()))
        async with self._weather_changed:
            await self._weather_changed.wait_for(lambda: direction not in self._weather.silent)

    def _count(self, opened: int = 0, closed: int = 0) -> None:
        with self.changed:
            self.num_opened += opened
            self.num_closed += closed
            self.changed.notify_all()
