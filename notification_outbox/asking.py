"""Questions to a database that may be away or hang: asked again until answered, given up when told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from django.db import Error

from .database import Outage

logger = logging.getLogger("notification_outbox")

# seconds that a stopping worker gives its database to answer
LAST_ANSWER = 3.0

T = TypeVar("T")


class Stopped(Exception):
    """The worker was told to stop while it waited for its database."""


class Asker:
    """Asks until told to stop.

    ``again`` is awaited before a question is repeated, ``back`` called when one was answered after an outage. The
    loop of a busy worker turns slowly, so an answer takes as few of its turns as can be.
    """

    def __init__(self, *, again: Callable[[], Coroutine[Any, Any, None]], back: Callable[[], None]) -> None:
        self.stopping = asyncio.Event()
        self._again = again
        self._back = back
        self._outage = Outage("claim")
        self._asked: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        """Give questions under way ``LAST_ANSWER`` more, and repeat none."""
        self.stopping.set()
        for patience in self._asked:
            patience.reschedule(asyncio.get_running_loop().time() + LAST_ANSWER)

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the database's answer, however long that takes. Raises ``Stopped``."""
        while True:
            try:
                if self._outage:
                    await self._answer(self._again())
                answer = await self._answer(question())
            except Error as error:
                pause = self._outage.failed(error)
            else:
                if self._outage:
                    self._back()
                self._outage.ended()
                return answer
            if await come(self.stopping, pause):
                raise Stopped

    async def once(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the answer, or None when the database is away; the next ``ask`` waits. Raises ``Stopped``."""
        try:
            return await self._answer(question())
        except Error as error:
            self._outage.failed(error)
            return None

    async def _answer(self, question: Coroutine[Any, Any, T]) -> T:
        # what a claim brings soon after the stop is handed back, not left to its lease
        patience = asyncio.timeout(LAST_ANSWER if self.stopping.is_set() else None)
        try:
            async with patience:
                self._asked.add(patience)
                try:
                    return await question
                finally:
                    self._asked.discard(patience)
        except TimeoutError:
            if not patience.expired():
                raise
        logger.error("outbox stop: the database does not answer")
        raise Stopped


async def come(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most so long; say whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
