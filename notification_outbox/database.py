"""Threads with a database connection of their own: how the event loop talks to Django's synchronous ORM.

And what becomes of a database that is away: it is waited for, with growing pauses, and said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from django.db import Error, connections

logger = logging.getLogger("notification_outbox")

# seconds between two questions to a database that is away: the first pause and the longest
AWAY_PAUSE = (0.1, 5.0)
# a peer that vanished without a word is noticed after IDLE + COUNT * INTERVAL seconds
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3

T = TypeVar("T")


class DatabaseThread:
    """Runs functions that take ``using``, one at a time; its connection is closed when it broke and at the end.

    The thread is a daemon: one that hangs in a database that no longer answers cannot keep the process.
    """

    def __init__(self, using: str, name: str) -> None:
        self._using = using
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"outbox-{name}", daemon=True)
        self._thread.start()

    async def __call__(self, function: Callable[..., T], /, **arguments: Any) -> T:
        """Return what the function returns, or raise what it raises."""
        return await self._put(partial(self._run, function, arguments))

    def soon(self, function: Callable[..., object], /, **arguments: Any) -> None:
        """Run the function after what is waiting; nobody waits for it."""
        self._put(partial(function, **arguments, using=self._using)).add_done_callback(_say_failure)

    async def close(self, patience: float = 1.0) -> bool:
        """Let the thread do what is waiting and end; say whether it did within ``patience`` seconds."""
        ended = self._put(self._hang_up)
        self._calls.put(None)
        # not cancelled when it takes longer: the connection is closed whenever the database lets go
        await asyncio.wait({ended}, timeout=patience)
        return ended.done()

    def _put(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            if answer.cancelled():
                return
            try:
                resolve = partial(_succeed, answer, work())
            except Exception as error:
                resolve = partial(_fail, answer, error)
            # the loop that asked may be closed by now
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve)

        self._calls.put(call)
        return answer

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _hang_up(self) -> None:
        connections[self._using].close()

    def _run(self, function: Callable[..., T], arguments: dict[str, Any]) -> T:
        connection = connections[self._using]
        try:
            if connection.connection is None:
                connection.ensure_connection()
                _notice_vanished_peer(connection.connection)
            return function(**arguments, using=self._using)
        except Error:
            # a locked SQLite or a deadlock leaves a good connection, and a new one costs little
            connection.close()
            raise


def _succeed(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _say_failure(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        logger.error("outbox signal failed error=%s", type(error).__name__)


def _notice_vanished_peer(connection: Any) -> None:
    """Have the kernel probe a silent peer: a failed-over server may never answer, nor hang up (RFC 9293 3.8.4)."""
    if not hasattr(connection, "fileno"):
        return
    wanted = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE,
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL,
        "TCP_KEEPCNT": KEEPALIVE_COUNT,
        # in milliseconds, for what was sent and never acknowledged
        "TCP_USER_TIMEOUT": 1000 * (KEEPALIVE_IDLE + KEEPALIVE_COUNT * KEEPALIVE_INTERVAL),
    }
    # a Unix socket has no such peer, and not every system has every option
    with contextlib.suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _code(error: Exception) -> str:
    """Return the SQLSTATE or the server's number of an error: what may be said of it."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else "none"
    return str(getattr(error.__cause__, "sqlstate", None) or number)


class Outage:
    """Failures in a row of one role: said once from the second on, since one alone is a conflict, and its end."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._failures = 0

    def __bool__(self) -> bool:
        return self._failures > 0

    def failed(self, error: Exception) -> float:
        """Count a failure; return the pause in seconds before the next try."""
        self._failures += 1
        if self._failures == 2:
            logger.error(
                "outbox database away role=%s error=%s code=%s",
                self._role,
                type(error).__name__,
                _code(error),
            )
        first, longest = AWAY_PAUSE
        return min(first * 2.0 ** min(self._failures - 1, 16), longest)

    def ended(self) -> None:
        """Count a success."""
        if self._failures >= 2:
            logger.warning("outbox database back role=%s after=%s", self._role, self._failures)
        self._failures = 0
