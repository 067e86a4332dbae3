"""A receiver in trouble: TLS on loopback, in a thread and an event loop of its own.

It keeps the books that the judge reads: an order is accepted the moment its request is answered 2xx, or would have
been had the answer not been lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

MOODS = ("busy", "throttling", "resetting", "hanging", "down")
IN_A_MOOD = 0.7  # of the requests; the others are answered 200
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
MESSAGE_ID = re.compile(rb'\r\nidempotency-key: *"([^"]+)"', re.IGNORECASE)
ANSWERS = {
    "well": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "busy": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "throttling": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
}


class Receiver:
    """``with Receiver(pair, port, dice) as receiver:`` listens until the block ends, but while its mood is "down".

    Books, by order number: ``accepted`` and ``answers_lost`` (times), ``names`` (the message ids it came under).
    """

    def __init__(self, pair: Path, port: int, dice: random.Random) -> None:
        self.mood = "well"
        self.flaps = 0
        self.accepted: Counter[str] = Counter()
        self.answers_lost: Counter[str] = Counter()
        self.names: dict[str, set[bytes]] = {}
        self._lately: list[tuple[float, str]] = []
        self._books = threading.Lock()
        self._dice = dice
        self._port = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="receiver", daemon=True)
        self._server: asyncio.Server | None = None
        self._talks: set[_Talk] = set()

    def __enter__(self) -> Receiver:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def become(self, mood: str) -> None:
        """Change the mood, for all requests from now on: one of ``MOODS``, or "well"."""
        before, self.mood = self.mood, mood
        self.flaps += mood != "well"
        if mood == "down":
            self._do(self._hang_up())
        elif before == "down":
            self._do(self._listen())

    def accepted_since(self, moment: float) -> set[str]:
        """Return the orders accepted since ``moment`` (``time.monotonic()``)."""
        with self._books:
            return {number for at, number in self._lately if at >= moment}

    def serve(self, talk: _Talk, head: bytes, body: bytes) -> None:
        """Answer one request, or do not."""
        mood = self.mood if self._dice.random() < IN_A_MOOD else "well"
        if mood in ("resetting", "hanging"):
            if self._dice.random() < 0.5:
                self._accept(head, body, answered=False)
            if mood == "resetting":
                talk.reset()
        else:
            mood = "well" if mood == "down" else mood  # it came before the door was shut
            if mood == "well":
                self._accept(head, body, answered=True)
            talk.transport.write(ANSWERS[mood])

    def _accept(self, head: bytes, body: bytes, *, answered: bool) -> None:
        number = json.loads(body)["order"]
        found = MESSAGE_ID.search(head)
        with self._books:
            self.accepted[number] += 1
            self.answers_lost[number] += not answered
            self.names.setdefault(number, set()).add(found[1] if found else b"")
            self._lately.append((time.monotonic(), number))

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(
            lambda: _Talk(self, self._talks), "127.0.0.1", self._port, ssl=self._context, backlog=1024
        )

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for talk in self._talks:
            talk.transport.close()  # what was answered still goes out
        await asyncio.sleep(0.05)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class _Talk(asyncio.Protocol):
    """One connection: cuts what comes into requests."""

    transport: asyncio.Transport

    def __init__(self, receiver: Receiver, talks: set[_Talk]) -> None:
        self._receiver, self._talks = receiver, talks
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._talks.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._talks.discard(self)

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        while (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self._waiting, 0, end)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._waiting) < whole or self.transport.is_closing():
                return
            head, body = self._waiting[:end], self._waiting[end + 4 : whole]
            self._waiting = self._waiting[whole:]
            self._receiver.serve(self, head, body)

    def reset(self) -> None:
        peer = self.transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
