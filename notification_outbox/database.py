"""A thread with a database connection of its own: how the event loop talks to Django's synchronous ORM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from django.db import Error, connections

T = TypeVar("T")


class DatabaseThread:
    """Runs functions that take ``using``, one at a time; its connection is closed when it broke and at the end."""

    def __init__(self, using: str, name: str) -> None:
        self._using = using
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"outbox-{name}")

    async def __call__(self, function: Callable[..., T], /, **arguments: object) -> T:
        call = partial(self._run, function, **arguments)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _run(self, function: Callable[..., T], /, **arguments: object) -> T:
        try:
            return function(**arguments, using=self._using)
        except Error:
            # a locked SQLite or a deadlock leaves a good connection, and a new one costs little
            connections[self._using].close()
            raise

    def _hang_up(self) -> None:
        connections[self._using].close()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._hang_up)
        self._executor.shutdown()
