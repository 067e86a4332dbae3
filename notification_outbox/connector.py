"""The connections beneath ``transport``: who may be dialled, and which connection serves again.

Every dial goes to an address that was judged here, a moment before, for the host and port it is dialled for;
names and literal addresses come the same way. One refused address spoils its name. Connections are kept by
scheme, host and port, so two names on one address have one each. What is sent and answered is not known here.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import OrderedDict
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, TypeAlias

from aiohappyeyeballs import start_connection

from .answers import Attempt
from .exceptions import PublishFailed
from .lifecycle import Fault
from .proxies import Proxy
from .resolver import Address, Resolver
from .urls import Destination, DestinationPolicy
from .wire import Wire

KEEP_IDLE_SECONDS = 8.0
# how long an address may take before the next one is tried beside it (RFC 8305, section 5)
NEXT_ADDRESS_SECONDS = 0.25
FORBIDDEN = ("forbidden_address", Fault.FORBIDDEN)
PROXY = "local_proxy"

# means of this machine that ran out: no destination is to blame
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})

_Info: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]


class DialFailed(Exception):
    """No connection: a code, and whose fault it is (None: this machine's)."""

    def __init__(self, code: str, fault: Fault | None = Fault.DESTINATION) -> None:
        super().__init__(code)
        self.code = code
        self.fault = fault


class Connector:
    """Dials, keeps and hands out the connections of one event loop.

    ``context`` is for strangers, ``own_context`` for hosts that the policy opens by name. ``patience`` in seconds
    bounds each round over a name's addresses, TLS included. ``max_idle`` connections wait for later messages, each
    at most ``KEEP_IDLE_SECONDS``.
    """

    def __init__(
        self,
        policy: DestinationPolicy,
        resolver: Resolver,
        *,
        context: ssl.SSLContext,
        own_context: ssl.SSLContext,
        patience: float,
        max_idle: int,
        proxy: Proxy | None = None,
    ) -> None:
        self._policy = policy
        self._proxy = proxy
        self._resolver = resolver
        self._context = context
        self._own_context = own_context
        self._patience = patience
        self._max_idle = max_idle
        self._loop = asyncio.get_running_loop()
        self._wires: set[Wire] = set()
        # longest idle first
        self._idle: OrderedDict[Wire, Destination] = OrderedDict()
        self._by_destination: dict[tuple[str, str, int], list[Wire]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    def kept(self, destination: Destination) -> Wire | None:
        """Return a connection that is open already, the one used last."""
        wires = self._by_destination.get(_key(destination))
        while wires:
            wire = wires[-1]
            self._forget(wire)
            if self._loop.time() - wire.parked_at < KEEP_IDLE_SECONDS:
                return wire
            wire.close()
        return None

    def park(self, wire: Wire, destination: Destination) -> None:
        """Keep a connection for later messages to the same destination; beyond the limit the longest idle goes."""
        wire.parked_at = self._loop.time()
        self._idle[wire] = destination
        self._by_destination.setdefault(_key(destination), []).append(wire)
        if len(self._idle) > self._max_idle:
            self._hang_up(next(iter(self._idle)))
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(KEEP_IDLE_SECONDS, self._sweep)

    def drop_kept(self, destination: Destination) -> None:
        """Close what is kept for a destination that has given one of them up: the others will be stale too."""
        for wire in list(self._by_destination.get(_key(destination), ())):
            self._hang_up(wire)

    async def dial(self, destination: Destination, attempt: Attempt) -> Wire:
        """Return a new connection. Raises ``DialFailed``, ``TimeoutError`` or what the resolver raises."""
        attempt.reach("dns")
        left = await self._addresses(destination)
        while True:
            attempt.reach("dial")
            opened: dict[socket.socket, _Info] = {}
            connected = None
            try:
                async with asyncio.timeout(self._patience):
                    connected = await start_connection(
                        left,
                        happy_eyeballs_delay=NEXT_ADDRESS_SECONDS,
                        socket_factory=partial(_open, attempt=attempt, opened=opened),
                    )
                    attempt.peer = _spelled(opened[connected][4])
                    return await self._speak(connected, destination, attempt)
            except OSError as error:
                # one that answered the dial and failed in TLS leaves the others a chance
                left = [info for info in left if connected and info != opened[connected]]
                if not left and self._proxy and attempt.phase == "dial":
                    raise DialFailed(PROXY, None) from None
                if not left:
                    raise _explained(error, attempt) from None

    async def close(self) -> None:
        """Close every connection; exchanges under way end with ``reset``."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        going = list(self._wires)
        for wire in going:
            wire.abort()
        for wire in going:
            await wire.gone.wait()

    async def _addresses(self, destination: Destination) -> list[_Info]:
        """Return where to dial. A proxy was named by the project itself; what it dials is its own affair."""
        if self._proxy is None:
            return [_info(address, destination.port) for address in await self._judged(destination)]
        try:
            addresses: tuple[Address, ...] = (ip_address(self._proxy.host),)
        except ValueError:
            try:
                addresses = await self._resolver.resolve(self._proxy.host)
            except PublishFailed:
                raise DialFailed(PROXY, None) from None
        return [_info(address, self._proxy.port) for address in addresses]

    async def _judged(self, destination: Destination) -> tuple[Address, ...]:
        host = destination.host
        try:
            addresses: tuple[Address, ...] = (ip_address(host),)
        except ValueError:
            addresses = await self._resolver.resolve(host)
        if any(self._policy.judge(host, destination.port, address) is not None for address in addresses):
            raise DialFailed(*FORBIDDEN)
        return addresses

    async def _speak(self, connected: socket.socket, destination: Destination, attempt: Attempt) -> Wire:
        """Return the wire over a connected socket, which is closed when that fails."""
        context = None
        if destination.scheme == "https":
            opened = self._policy.opens(destination.host, destination.port)
            context = self._own_context if opened else self._context
        wire = None
        try:
            _, wire = await self._loop.create_connection(lambda: Wire(self._gone), sock=connected)
            if self._proxy is not None:
                await self._tunnel(wire, self._proxy, destination, attempt)
            if context is not None:
                attempt.reach("tls")
            await wire.start(context, destination.host)
            if self._closed:
                raise DialFailed("reset")
        except BaseException:
            if wire is None:
                connected.close()
            else:
                wire.abort()
            raise
        wire.peer = attempt.peer
        if attempt.marks is not None:
            attempt.certificate = wire.certificate
        self._wires.add(wire)
        return wire

    async def _tunnel(self, wire: Wire, proxy: Proxy, destination: Destination, attempt: Attempt) -> None:
        """Have the proxy connect us to the destination. Raises ``DialFailed`` or ``TimeoutError``."""
        attempt.reach("proxy")
        await wire.start(None, "")
        host = f"[{destination.host}]" if ":" in destination.host else destination.host
        lines = [f"CONNECT {host}:{destination.port} HTTP/1.1", f"Host: {host}:{destination.port}"]
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        request = "\r\n".join((*lines, "", "")).encode("ascii")
        failure = await wire.tunnel(request, attempt.deadline)
        if failure == "timeout":
            raise TimeoutError
        if failure or wire.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            raise DialFailed(f"{PROXY}_{failure or wire.status}", None)
        if not wire.accepted:
            refused = wire.status == HTTPStatus.FORBIDDEN
            raise DialFailed(f"proxy_{wire.status}", Fault.REJECTION if refused else Fault.DESTINATION)

    def _gone(self, wire: Wire) -> None:
        self._wires.discard(wire)
        self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        destination = self._idle.pop(wire, None)
        if destination is not None:
            key = _key(destination)
            wires = self._by_destination[key]
            wires.remove(wire)
            if not wires:
                del self._by_destination[key]

    def _hang_up(self, wire: Wire) -> None:
        self._forget(wire)
        wire.close()

    def _sweep(self) -> None:
        """Close what idled too long; come again when the next one will have."""
        self._sweeping = None
        now = self._loop.time()
        while self._idle:
            longest = next(iter(self._idle))
            left = longest.parked_at + KEEP_IDLE_SECONDS - now
            if left > 0:
                self._sweeping = self._loop.call_later(left, self._sweep)
                return
            self._hang_up(longest)


def _key(destination: Destination) -> tuple[str, str, int]:
    return destination.scheme, destination.host, destination.port


def _info(address: Address, port: int) -> _Info:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    where = (str(address), port, 0, 0) if address.version == 6 else (str(address), port)
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where


def _open(info: _Info, *, attempt: Attempt, opened: dict[socket.socket, _Info]) -> socket.socket:
    attempt.peer = _spelled(info[4])
    made = socket.socket(*info[:3])
    opened[made] = info
    return made


def _explained(error: Exception, attempt: Attempt) -> Exception:
    """Return what a failed dial says of the destination: of a foreign error only the kind is used."""
    match error:
        case TimeoutError() if not error.errno:
            return TimeoutError()
        case OSError(errno=number) if number in LOCAL_ERRORS:
            return DialFailed(f"local_{errno.errorcode[number].lower()}", None)
        case ssl.SSLError():
            return DialFailed("tls")
        case ConnectionRefusedError():
            return DialFailed("refused")
        case _:
            return DialFailed("unreachable" if attempt.phase == "dial" else "reset")


def _spelled(address: tuple[Any, ...]) -> str:
    """Write a socket address as ``address:port``."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
