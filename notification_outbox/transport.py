"""One POST over guarded connections: one deadline, one free reconnect, and an answer believed only so far.

aiohttp moves the bytes, ``connector`` guards the sockets; this room says how long it may take, when it is
tried once more, and what it came to. Nothing follows redirects, keeps cookies, reads proxies from the
environment or lets another library's hooks see the request. What a status means is the publisher's business.

No foreign exception leaves: its text and context would carry URLs, headers and peer text into logs.
aiohttp's private ``ClientSession._trace_configs`` is used; a test fails when it moves.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from .connector import FORBIDDEN, Attempt, Connector, current
from .exceptions import (
    ConfigurationError,
    OutboxError,
    PermanentPublishError,
    PublishFailed,
    TransientPublishError,
)
from .lifecycle import Answer, Fault, QuarantineReason
from .resolver import Resolver
from .tls import client_context
from .urls import Destination, DestinationPolicy

logger = logging.getLogger(__name__)

WRITE_BYTES = 256 * 1024
BODY_BYTES = 64 * 1024
BODY_SECONDS = 1.0

# means of this machine that ran out: no destination is to blame
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})

# aiohttp writes Host and Content-Length; the others change where the message ends or what the line is for
FRAMING = frozenset({"connection", "content-length", "expect", "host", "transfer-encoding", "upgrade"})
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Response:
    """The peer's final answer: ``status`` from 200 to 599, ``headers`` as pairs with lower-case names."""

    status: int
    headers: list[tuple[str, str]] = field(repr=False)
    answer: Answer


class GuardedTransport:
    """POSTs to destinations that ``policy`` allows, from one event loop, between ``open()`` and ``close()``.

    ``timeout`` in seconds covers everything from the name lookup to the final head. ``ca_file`` is a PEM file
    of the authorities to trust instead of the system's (ConfigurationError when it cannot be read).
    ``max_idle`` bounds the connections kept open for later messages. A ``resolver`` handed in is
    its owner's to close.
    """

    def __init__(
        self,
        policy: DestinationPolicy,
        *,
        timeout: float,
        ca_file: str | None = None,
        resolver: Resolver | None = None,
        max_idle: int = 256,
    ) -> None:
        self._policy = policy
        self._timeout = timeout
        self._context = client_context(ca_file)
        self._resolver = resolver
        self._own_resolver: Resolver | None = None
        self._max_idle = max_idle
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make ready to post; called in the loop that posts."""
        resolver = self._resolver
        if resolver is None:
            resolver = self._own_resolver = Resolver()
        session = aiohttp.ClientSession(
            connector=Connector(self._policy, resolver, context=self._context, max_idle=self._max_idle),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            # half the time for one round of addresses leaves the other half for the next
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout / 2),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        # error trackers patch ClientSession to add theirs, which sees and extends the signed request
        session._trace_configs.clear()
        self._session = session

    async def close(self) -> None:
        """Close every connection; posts under way fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._own_resolver is not None:
            await self._own_resolver.close()
            self._own_resolver = None

    async def post(
        self, destination: Destination, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Response:
        """Send one POST with exactly ``headers``, Host and Content-Length; return the peer's final answer.

        A redirect is an answer like any other. Raises PublishFailed: ``timeout``, ``refused``,
        ``unreachable``, ``reset``, ``tls``, ``protocol``, ``answer_too_large`` (DESTINATION), ``dns`` (NAME),
        ``forbidden_address`` (FORBIDDEN); TransientPublishError ``local_...`` when this machine ran out of
        something; PermanentPublishError (invalid_request) when a header is none (RFC 9110, section 5).
        ``PublishFailed.answer`` says how far it got.
        """
        outcome = await self._attempt(destination, headers, body)
        if isinstance(outcome, Response):
            return outcome
        # error trackers keep the variables of every frame an error passes
        del headers, body
        raise outcome

    async def _attempt(
        self, destination: Destination, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Response | OutboxError:
        if self._session is None:
            return ConfigurationError("GuardedTransport: post() belongs between open() and close()")
        fields = _checked(headers)
        if fields is None:
            return PermanentPublishError(QuarantineReason.INVALID_REQUEST)
        attempt = Attempt()
        token = current.set(attempt)
        try:
            url = URL(destination.url, encoded=True)
            attempt.host, attempt.port = url.raw_host or "", url.port or 0
            # a destination that did not come from parse(), or came from a laxer policy
            if not self._policy.admits(url.scheme, attempt.host, attempt.port) or "@" in url.raw_authority:
                return _error(attempt, *FORBIDDEN)
            return await self._exchange(self._session, url, fields, body, attempt)
        except Exception as error:
            return _explain(error, attempt)
        finally:
            current.reset(token)

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        fields: CIMultiDict[str],
        body: bytes,
        attempt: Attempt,
    ) -> Response | OutboxError:
        deadline = asyncio.get_running_loop().time() + self._timeout
        attempt.phase = "dns"
        async with asyncio.timeout_at(deadline):
            try:
                answer = await _send(session, url, fields, body)
            except aiohttp.ClientConnectionError as error:
                if not _went_stale(error, attempt):
                    raise
                attempt.fresh_only = True
                answer = await _send(session, url, fields, body)
        # from here on the status stands, whatever becomes of the body
        attempt.phase = "answered"
        await _drain(answer, deadline)
        if not 200 <= answer.status <= 599:
            return _error(attempt, "protocol")
        pairs = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in answer.raw_headers
        ]
        return Response(answer.status, pairs, Answer(answer.status, attempt.phase, attempt.peer))


async def _send(
    session: aiohttp.ClientSession, url: URL, fields: CIMultiDict[str], body: bytes
) -> aiohttp.ClientResponse:
    # aiohttp writes bytes in one go, and warns above a megabyte that this holds the loop; files go in pieces
    data = io.BytesIO(body) if len(body) > WRITE_BYTES else body
    return await session.request("POST", url, data=data, headers=fields, allow_redirects=False)


async def _drain(answer: aiohttp.ClientResponse, deadline: float) -> None:
    """Read a small 2xx body to its end, so that its connection can serve again; close on anything else."""
    accepted = 200 <= answer.status < 300
    # mostly it came in one piece with the head; a larger one must be read, or its connection stays paused
    complete = accepted and answer.content.is_eof() and answer.content.total_bytes <= BODY_BYTES
    try:
        if accepted and not complete:
            now = asyncio.get_running_loop().time()
            async with asyncio.timeout_at(min(now + BODY_SECONDS, deadline)):
                complete = await _read_to_end(answer.content)
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # a dripping or broken body takes nothing back
    finally:
        # the protocol has the last word on what may be pooled
        if complete:
            answer.release()
        else:
            answer.close()


async def _read_to_end(content: aiohttp.StreamReader) -> bool:
    room = BODY_BYTES
    async for chunk in content.iter_any():
        room -= len(chunk)
        if room < 0:
            return False
    return True


def _went_stale(error: aiohttp.ClientConnectionError, attempt: Attempt) -> bool:
    """Say whether a used connection had been closed before our request: nothing of an answer came."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
        return False
    return attempt.reused and attempt.wire is not None and attempt.wire.got == attempt.wire.before


def _error(attempt: Attempt, code: str, fault: Fault | None = Fault.DESTINATION) -> OutboxError:
    """Return our error for ``code``, saying how far the attempt got; no ``fault``: it is this machine's."""
    if fault is None:
        return TransientPublishError(code, holds="lane")
    return PublishFailed(code, fault, answer=Answer(None, attempt.phase, attempt.peer))


def _explain(error: Exception, attempt: Attempt) -> OutboxError:
    """Return our own error for a foreign one, of which only the kind is used."""
    if attempt.failure is not None:
        return _error(attempt, *attempt.failure)
    if attempt.wire is not None and attempt.wire.flooded:
        return _error(attempt, "answer_too_large")
    match error:
        case TimeoutError():
            return _error(attempt, "timeout")
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return _error(attempt, "tls")
        case aiohttp.ClientConnectorError(os_error=OSError(errno=number)) if number in LOCAL_ERRORS:
            return _error(attempt, f"local_{errno.errorcode[number].lower()}", None)
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return _error(attempt, "refused")
        case aiohttp.ClientConnectorError() if attempt.phase == "dial":
            return _error(attempt, "unreachable")
        case aiohttp.InvalidURL() | ValueError() if attempt.phase in ("", "dns"):
            # an odd spelling that parse() would have refused; which ones aiohttp refuses depends on its version
            return _error(attempt, *FORBIDDEN)
        case aiohttp.ClientConnectionError() | OSError():
            return _error(attempt, "reset")
        case aiohttp.ClientError():
            return _error(attempt, "protocol")
    # ours or aiohttp's mistake; its text may hold what was sent
    logger.error("outbox transport unexpected=%s", type(error).__name__)
    return _error(attempt, "unexpected")


def _checked(headers: Sequence[tuple[str, str]]) -> CIMultiDict[str] | None:
    """Return the headers, or None when one would not go out as written (aiohttp checks no names)."""
    fields: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or name in fields or name.lower() in FRAMING:
            return None
        if not (value.isascii() and value.isprintable() and value == value.strip(" ")):
            return None
        fields.add(name, value)
    return fields
