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
    """Asks until ``stopping`` is set.

    ``again`` is awaited before a question is repeated, ``back`` called when one was answered after an outage.
    """

    def __init__(
        self,
        stopping: asyncio.Event,
        *,
        again: Callable[[], Coroutine[Any, Any, None]],
        back: Callable[[], None],
    ) -> None:
        self._stopping = stopping
        self._again = again
        self._back = back
        self._outage = Outage("claim")

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
            if await come(self._stopping, pause):
                raise Stopped

    async def once(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the answer, or None when the database is away; the next ``ask`` waits. Raises ``Stopped``."""
        try:
            return await self._answer(question())
        except Error as error:
            self._outage.failed(error)
            return None

    async def _answer(self, question: Coroutine[Any, Any, T]) -> T:
        """Return the answer of a database that may hang: once told to stop it is given ``LAST_ANSWER`` more."""
        asking = asyncio.ensure_future(question)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # what a claim brings after the stop is handed back, not left to its lease
            await asyncio.wait({asking}, timeout=LAST_ANSWER)
            if asking.done():
                return asking.result()
        finally:
            stopping.cancel()
            asking.cancel()
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
