"""One POST over guarded connections: one deadline, one free reconnect, and an answer believed only so far.

``wire`` moves the bytes, ``connector`` guards the dials; this room writes the request, says how long it may take,
when it is tried once more, and what it came to. Nothing follows redirects, keeps cookies, reads proxies from the
environment or lets another library's hooks see the request. What a status means is the publisher's business.

No foreign exception leaves: its text and context would carry URLs, headers and peer text into logs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from .answers import Attempt, Response
from .connector import FORBIDDEN, Connector, DialFailed
from .exceptions import (
    ConfigurationError,
    InvalidMessage,
    OutboxError,
    PermanentPublishError,
    PublishFailed,
    TransientPublishError,
)
from .lifecycle import Fault, QuarantineReason
from .proxies import Proxy
from .resolver import Resolver
from .tls import client_context
from .urls import Destination, DestinationPolicy
from .wire import Wire

logger = logging.getLogger(__name__)

# a kept connection that breaks within so many seconds without a word had been given up before our request
STALE_SECONDS = 1.0
# written here, or change where the message ends or what the line is for
FRAMING = frozenset({"connection", "content-length", "expect", "host", "transfer-encoding", "upgrade"})
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Transport(ABC):
    """POSTs, and fails by errors of ours only: a foreign one's text and frames would carry what was sent."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready to post; called in the loop that posts."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection; posts under way fail."""

    async def post(
        self,
        destination: Destination,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        attempt: Attempt | None = None,
    ) -> Response:
        """Send one POST with exactly ``headers``, Host and Content-Length; return the peer's final answer.

        A redirect is an answer like any other. Raises PublishFailed: ``timeout``, ``refused``, ``unreachable``,
        ``reset``, ``tls``, ``protocol``, ``answer_too_large`` (DESTINATION), ``dns`` (NAME), ``forbidden_address``
        (FORBIDDEN); TransientPublishError ``local_...`` when this machine ran out of something;
        PermanentPublishError (invalid_request) when a header is none (RFC 9110, section 5).
        ``PublishFailed.answer`` says how far it got, an ``attempt`` handed in also when.
        """
        outcome = await self._attempt(destination, headers, body, attempt or Attempt())
        if isinstance(outcome, Response):
            return outcome
        # error trackers keep the variables of every frame an error passes
        del headers, body
        raise outcome

    @abstractmethod
    async def _attempt(
        self, destination: Destination, headers: Sequence[tuple[str, str]], body: bytes, attempt: Attempt
    ) -> Response | OutboxError:
        """Post; return the answer, or the error to raise, which nothing foreign is the context of."""


class GuardedTransport(Transport):
    """POSTs to destinations that ``policy`` allows, from one event loop, between ``open()`` and ``close()``.

    ``timeout`` in seconds covers everything from the name lookup to the final head. ``ca_file`` is a PEM file
    of the authorities to trust instead of the system's, ``client_cert`` one with our own certificate and key, shown
    to hosts that the policy opens by name only (ConfigurationError when one cannot be read).
    ``max_idle`` bounds the connections kept open for later messages. A ``resolver`` handed in is
    its owner's to close. Through a ``proxy`` names are the proxy's to resolve, and what it dials its affair.
    """

    def __init__(
        self,
        policy: DestinationPolicy,
        *,
        timeout: float,
        ca_file: str | None = None,
        client_cert: str | None = None,
        resolver: Resolver | None = None,
        max_idle: int = 256,
        proxy: Proxy | None = None,
    ) -> None:
        self._policy = policy
        self._proxy = proxy
        # a destination is believed in nothing but its URL: it may come from a laxer policy, or from none
        self._parse = lru_cache(maxsize=1024)(policy.parse)
        self._timeout = timeout
        self._context = client_context(ca_file)
        self._own_context = client_context(ca_file, client_cert) if client_cert else self._context
        self._resolver = resolver
        self._own_resolver: Resolver | None = None
        self._max_idle = max_idle
        self._connector: Connector | None = None

    async def open(self) -> None:
        resolver = self._resolver
        if resolver is None:
            resolver = self._own_resolver = Resolver()
        self._connector = Connector(
            self._policy,
            resolver,
            context=self._context,
            own_context=self._own_context,
            # half the time for one round of addresses leaves the other half for the next
            patience=self._timeout / 2,
            max_idle=self._max_idle,
            proxy=self._proxy,
        )

    async def close(self) -> None:
        if self._connector is not None:
            await self._connector.close()
            self._connector = None
        if self._own_resolver is not None:
            await self._own_resolver.close()
            self._own_resolver = None

    async def _attempt(
        self, destination: Destination, headers: Sequence[tuple[str, str]], body: bytes, attempt: Attempt
    ) -> Response | OutboxError:
        if self._connector is None:
            return ConfigurationError("GuardedTransport: post() belongs between open() and close()")
        try:
            destination = self._parse(destination.url)
            head = _request_head(destination, headers, len(body))
            if head is None:
                return PermanentPublishError(QuarantineReason.INVALID_REQUEST)
            attempt.deadline = asyncio.get_running_loop().time() + self._timeout
            return await _exchange(self._connector, destination, head + body, attempt)
        except InvalidMessage:
            return _error(attempt, *FORBIDDEN)
        except TimeoutError:
            return _error(attempt, "timeout")
        except (DialFailed, PublishFailed) as error:
            return _error(attempt, error.code, error.fault)
        except TransientPublishError as error:
            return _error(attempt, error.code, None)
        except Exception as error:
            # our mistake; its text may hold what was sent
            logger.error("outbox transport unexpected=%s", type(error).__name__)
            return _error(attempt, "unexpected")


async def _exchange(
    connector: Connector, destination: Destination, request: bytes, attempt: Attempt
) -> Response | OutboxError:
    wire = connector.kept(destination)
    if wire is not None:
        clock = asyncio.get_running_loop().time
        began = clock()
        failure = await _send(wire, request, attempt)
        if failure == "reset" and not wire.answered and clock() - began < STALE_SECONDS:
            # it had been closed before our request came: no answer began, and at once; so it is sent once more
            connector.drop_kept(destination)
            wire = None
    if wire is None:
        async with asyncio.timeout_at(attempt.deadline):
            wire = await connector.dial(destination, attempt)
        failure = await _send(wire, request, attempt)
    if failure:
        return _error(attempt, failure)
    if wire.reusable:
        connector.park(wire, destination)
    if not 200 <= wire.status <= 599:
        return _error(attempt, "protocol")
    attempt.reach("answered")
    return Response(wire.status, wire.headers, attempt.answer(wire.status), wire.body)


async def _send(wire: Wire, request: bytes, attempt: Attempt) -> str:
    attempt.peer = wire.peer
    attempt.reach("sent")
    return await wire.exchange(request, attempt.deadline, keep_body=attempt.keep_body)


def _request_head(destination: Destination, headers: Sequence[tuple[str, str]], length: int) -> bytes | None:
    """Return a POST's head (RFC 9112, section 3), or None when a header would not go out as written.

    ``length`` is that of the body in bytes.
    """
    if not all_sound(headers):
        return None
    authority = destination.authority
    target = destination.url[len(destination.scheme) + 3 + len(authority) :]
    lines = [f"POST {target} HTTP/1.1", f"Host: {authority}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join((*lines, "", "")).encode("ascii")


def all_sound(headers: Sequence[tuple[str, str]]) -> bool:
    """Say whether headers would go out as written: names that are the caller's, once each, printable ASCII values."""
    names = {_field_name(name) for name, _ in headers}
    return (
        None not in names
        and len(names) == len(headers)
        and all(value.isascii() and value.isprintable() and value == value.strip(" ") for _, value in headers)
    )


@lru_cache(maxsize=1024)
def _field_name(name: str) -> str | None:
    """Return a header's name in lower case, or None for one that is not the caller's to write."""
    lowered = name.lower()
    return lowered if _TOKEN.fullmatch(name) and lowered not in FRAMING else None


def _error(attempt: Attempt, code: str, fault: Fault | None = Fault.DESTINATION) -> OutboxError:
    """Return our error for ``code``, saying how far the attempt got; no ``fault``: it is this machine's."""
    if fault is None:
        return TransientPublishError(code, holds="lane")
    return PublishFailed(code, fault, answer=attempt.answer())
