"""The connections beneath ``transport``: who may be dialled, what a peer may send, which one serves again.

Judging happens twice, because neither place sees everything: names are judged when resolved, and each socket
when it is opened, which is the only place that meets literal addresses. An answer counts only when nothing
but it could have come: a connection that said a word unasked is never used again. What was sent and what the
answer means is not known here.

aiohttp's private ``BaseConnector._factory`` and its protocol class ``ResponseHandler`` are used; a test fails
when either moves. The attempt under way is found through a context variable, since aiohttp passes nothing on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler

from .exceptions import PublishFailed, TransientPublishError
from .lifecycle import Fault
from .resolver import Resolver
from .urls import DestinationPolicy

HEAD_BYTES = 64 * 1024  # all a peer may send before its final head ends, 1xx answers included
KEEP_IDLE_SECONDS = 8.0
FORBIDDEN = ("forbidden_address", Fault.FORBIDDEN)


@dataclass(slots=True)
class Attempt:
    """How far one ``post()`` got.

    ``failure`` is a code, and whose fault it is (None: ours), that our own hooks found out; it counts before
    whatever aiohttp makes of it.
    """

    host: str = ""
    port: int = 0
    phase: str = ""
    peer: str = ""
    failure: tuple[str, Fault | None] | None = None
    wire: Wire | None = None
    reused: bool = False
    fresh_only: bool = False


current: ContextVar[Attempt] = ContextVar("notification_outbox_attempt")


class _RefusedError(OSError):
    """A dial was refused here. Only an OSError passes aiohttp's race of addresses; the attempt knows more."""


class Wire(ResponseHandler):
    """One connection: counts what arrives, ends what floods or speaks unasked, says if it may serve again.

    ``got`` counts bytes, ``before`` is ``got`` when the present exchange began, ``headed`` says that its
    final head came, ``accepted`` that it was a 2xx.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, idle: _Idle) -> None:
        super().__init__(loop)
        self.peer = ""
        self.got = 0
        self.before = 0
        self.uses = 0
        self.headed = False
        self.accepted = False
        self.flooded = False
        self._ended = False
        self._body: aiohttp.StreamReader | None = None
        self._idle = idle

    def begin(self) -> None:
        """A new exchange starts on this connection."""
        self._idle.forget(self)
        self.uses += 1
        self.before = self.got
        self.headed = False
        self.accepted = False
        self._ended = False
        self._body = None

    @property
    def should_close(self) -> bool:
        # aiohttp asks when an exchange ends; only an accepted message leaves the line in a known state
        return super().should_close or not self.accepted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = _peer(transport.get_extra_info("peername"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._idle.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.got += len(data)
        start = 0
        # aiohttp forgets a head when what came in one piece with it is broken, so each head goes in alone
        while not self.headed and start < len(data):
            blank = data.find(b"\r\n\r\n", start)
            end = len(data) if blank < 0 else blank + 4
            super().data_received(data[start:end])
            start = end
            if not self.headed and self.got - len(data) + end - self.before > HEAD_BYTES:
                self.flooded = True
                self.abort()
                return
        self._note_end()
        if start == len(data):
            return
        if self._ended:
            # nobody asked for this: on a kept connection it would pass for the next message's answer
            self.close()
            return
        super().data_received(data[start:])
        self._note_end()

    def _note_end(self) -> None:
        if not self._ended and self._body is not None and self._body.is_eof():
            self._ended = True
            if self.accepted:
                self._idle.park(self)

    def feed_data(self, data: Any, size: int = 0) -> None:
        head, body = data
        if head.code >= 200 or head.code == 101:
            self.headed = True
            self.accepted = 200 <= head.code < 300
            self._body = body
        super().feed_data(data, size)


class _Idle:
    """The connections between two exchanges. aiohttp bounds only those in use: 300 hosts were 300 sockets."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._wires: OrderedDict[Wire, None] = OrderedDict()

    def park(self, wire: Wire) -> None:
        self._wires[wire] = None
        if len(self._wires) > self._limit:
            longest, _ = self._wires.popitem(last=False)
            longest.close()

    def forget(self, wire: Wire) -> None:
        self._wires.pop(wire, None)


class Connector(aiohttp.TCPConnector):
    """Judges every dial, hands out connections that are in order, and bounds those that idle."""

    def __init__(
        self, policy: DestinationPolicy, resolver: Resolver, *, context: ssl.SSLContext, max_idle: int
    ) -> None:
        super().__init__(
            resolver=_JudgedNames(policy, resolver),
            use_dns_cache=False,
            limit=0,
            socket_factory=self._judged_socket,
            ssl=context,
            keepalive_timeout=KEEP_IDLE_SECONDS,
        )
        self._policy = policy
        self._idle = _Idle(max_idle)
        self._factory = self._new_wire  # type: ignore[assignment]

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        """Return a connection and note what it means for the attempt under way."""
        attempt = current.get()
        while True:
            connection = await super().connect(*args, **kwargs)
            wire = cast(Wire, connection.protocol)
            if wire.uses == 0 or not attempt.fresh_only:
                break
            connection.close()
        attempt.reused = wire.uses > 0
        attempt.wire = wire
        attempt.peer = wire.peer
        attempt.phase = "sent"
        wire.begin()
        return connection

    def _new_wire(self) -> Wire:
        # called once TCP stands and TLS is about to start, in the task of the request
        current.get().phase = "tls"
        return Wire(self._loop, self._idle)

    def _judged_socket(self, info: Any) -> socket.socket:
        """Open a socket to an address the policy allows. Literals come here without meeting the resolver."""
        family, kind, protocol, _, (address, port, *_rest) = info
        attempt = current.get()
        attempt.phase = "dial"
        if self._policy.judge(attempt.host, attempt.port, address) is not None or port != attempt.port:
            attempt.failure = FORBIDDEN
            raise _RefusedError
        attempt.peer = _peer((address, port))
        return socket.socket(family, kind, protocol)


class _JudgedNames(AbstractResolver):
    """Gives aiohttp the addresses of a name, all of them judged: one bad answer spoils the name."""

    def __init__(self, policy: DestinationPolicy, resolver: Resolver) -> None:
        self._policy = policy
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        attempt = current.get()
        try:
            addresses = await self._resolver.resolve(host)
        except PublishFailed as error:
            attempt.failure = (error.code, error.fault)
            raise _RefusedError from None
        except TransientPublishError as error:
            attempt.failure = (error.code, None)
            raise _RefusedError from None
        if any(self._policy.judge(host, port, address) is not None for address in addresses):
            attempt.failure = FORBIDDEN
            raise _RefusedError
        return [
            ResolveResult(
                hostname=host,
                host=str(address),  # anything but a canonical literal would be looked up again
                port=port,
                family=socket.AF_INET6 if address.version == 6 else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """The resolver belongs to the transport."""


def _peer(address: Sequence[Any] | None) -> str:
    """Write a socket address as ``address:port``; '' when the connection was gone before it was asked."""
    if not address:
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
