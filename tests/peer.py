"""A raw TCP or TLS peer in the test's own event loop, for answers no decent server would give.

A test hands in a script, run once per connection with the streams in hand. What a script leaves open is
closed with the peer. For a receiver that behaves, see ``receiver``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import trustme

from notification_outbox.connector import KEEP_IDLE_SECONDS
from notification_outbox.proxies import Proxy
from notification_outbox.resolver import Resolver
from notification_outbox.transport import GuardedTransport
from notification_outbox.urls import Destination, DestinationPolicy

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Talk:
    """One connection: its streams and its number, from 1."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int

    async def request(self) -> bytes:
        """Return the next request whole, head and body; b'' when the sender hung up."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        return head + await self.reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the sender closed its side."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while await self.reader.read(65536):
                pass


Script: TypeAlias = Callable[[Talk], Awaitable[None]]


def saying(*answers: bytes) -> Script:
    """Return a script that meets each request with the next answer, then closes."""

    async def script(talk: Talk) -> None:
        for answer in answers:
            if not await talk.request():
                return
            await talk.send(answer)

    return script


async def polite(talk: Talk) -> None:
    """Answer every request with 200."""
    while await talk.request():
        await talk.send(OK)


@dataclass
class Peer:
    """A listening peer: its ``port``, and how many connections it ``accepted`` and has ``open``."""

    port: int = 0
    accepted: int = 0
    open: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def at(self, target: str = "/") -> Destination:
        """Return ``target`` of this peer under the name of localhost."""
        return by_hand(f"https://localhost:{self.port}{target}", "localhost", self.port)

    async def until_open(self, count: int) -> None:
        """Wait until exactly ``count`` connections are open, not as long as idle ones are kept anyway."""
        async with asyncio.timeout(KEEP_IDLE_SECONDS / 2), self.changed:
            await self.changed.wait_for(lambda: self.open == count)

    async def count(self, step: int) -> None:
        async with self.changed:
            self.open += step
            self.changed.notify_all()


@cache
def authority() -> trustme.CA:
    """The one authority of the test run: making keys takes time."""
    return trustme.CA()


@asynccontextmanager
async def listening(
    script: Script = polite,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    names: Iterable[str] = ("localhost", "127.0.0.1", "::1"),
    tls: bool = True,
    ca: trustme.CA | None = None,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Peer]:
    """Listen while the block runs; ``names`` are those of the certificate."""
    peer = Peer()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer.tasks.add(task)
        peer.accepted += 1
        try:
            await peer.count(+1)
            await script(Talk(reader, writer, peer.accepted))
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the sender left, or the test is over
        finally:
            writer.transport.abort()
            peer.tasks.discard(task)
            with contextlib.suppress(asyncio.CancelledError):
                await peer.count(-1)

    if tls and context is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (ca or authority()).issue_cert(*names).configure_cert(context)
    server = await asyncio.start_server(meet, address, port, ssl=context if tls else None, backlog=128)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for task in list(peer.tasks):
            task.cancel()
        await asyncio.gather(*peer.tasks, return_exceptions=True)
        for _ in range(3):  # aborted transports say goodbye in the next turns of the loop
            await asyncio.sleep(0)


def open_files() -> set[str]:
    """Return what this process has open, sockets by their inodes; nothing where the system does not tell."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        # the listing itself is gone by now
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket:")}


def looking_up(names: Mapping[str, Iterable[str]]) -> Resolver:
    """Return a resolver that knows exactly ``names``."""

    async def lookup(host: str) -> Iterable[str]:
        return names.get(host, ())

    return Resolver(lookup)


@asynccontextmanager
async def posting(
    *,
    timeout: float = 5.0,
    resolver: Resolver | None = None,
    trust: trustme.CA | None = None,
    max_idle: int = 256,
    client_cert: str | None = None,
    proxy: Proxy | None = None,
    **options: Any,
) -> AsyncIterator[GuardedTransport]:
    """Open a transport under the policy ``options``; names it is not told of lead to 127.0.0.1."""

    async def loopback(host: str) -> Iterable[str]:
        return ["127.0.0.1"]

    resolver = resolver or Resolver(loopback)
    with TemporaryDirectory() as folder:
        ca_file = Path(folder) / "ca.pem"
        (trust or authority()).cert_pem.write_to_path(str(ca_file))
        transport = GuardedTransport(
            DestinationPolicy.from_options(**options),
            timeout=timeout,
            ca_file=str(ca_file),
            client_cert=client_cert,
            proxy=proxy,
            resolver=resolver,
            max_idle=max_idle,
        )
    await transport.open()
    try:
        yield transport
    finally:
        await transport.close()
        await resolver.close()


@asynccontextmanager
async def meeting(script: Script = polite, **options: Any) -> AsyncIterator[tuple[Peer, GuardedTransport]]:
    """Listen with ``script`` as localhost, and open a transport that may go there."""
    async with (
        listening(script) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"], **options) as transport,
    ):
        yield peer, transport


def by_hand(url: str, host: str = "", port: int = 0) -> Destination:
    """Return a destination that no policy has seen; host and port as somebody claims."""
    return Destination(url, url.partition(":")[0], host, port)
