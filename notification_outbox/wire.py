"""One connection to a peer: sends a request, believes only so much of the answer, knows if it may serve again.

``httptools`` (llhttp) reads HTTP; what it reads counts only when nothing but the answer could have come: a
connection that said a word unasked, or whose last answer was not an accepted and fully read one, is closed. A
final head decides; the body behind it is read for the connection's sake only, and not for long. Who is dialled
is decided in ``connector``, what an answer means in the publisher. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

HEAD_BYTES = 64 * 1024  # all a peer may send before its final head ends, 1xx answers included
LINE_BYTES = 8190  # of one header
HEADER_LINES = 128
BODY_BYTES = 64 * 1024
BODY_SECONDS = 1.0
GOODBYE_SECONDS = 1.0


class Wire(asyncio.Protocol):
    """A connection that serves one exchange at a time.

    After an exchange: ``status`` and ``headers`` (raw pairs) are those of the final head, ``body`` is what was kept
    of a complete body, ``answered`` says that some byte came, ``reusable`` that the connection may serve again.
    ``uses`` counts exchanges, ``gone`` is set when the connection is lost, of which ``lost`` is told.
    """

    def __init__(self, lost: Callable[[Wire], None]) -> None:
        self.peer = ""
        self.uses = 0
        self.parked_at = 0.0
        self.gone = asyncio.Event()
        self._lost = lost
        self._socket: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._over: asyncio.Future[str] | None = None
        self._tunnel = False
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._begin(keep_body=False)

    def _begin(self, *, keep_body: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._kept = bytearray() if keep_body else None
        self._got = 0
        self._body = 0
        self._headed = False
        self._misshapen = False
        self._complete = False
        self._spoiled = False

    @property
    def answered(self) -> bool:
        return self._got > 0

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The peer's certificate, as ``ssl.SSLSocket.getpeercert()`` has it."""
        return None if self._transport is None else self._transport.get_extra_info("peercert")

    @property
    def accepted(self) -> bool:
        """Whether the final head came and is a 2xx."""
        return 200 <= self.status < 300

    @property
    def body(self) -> bytes | None:
        return None if self._kept is None or not self._complete else bytes(self._kept)

    @property
    def reusable(self) -> bool:
        return (
            self._complete and self.accepted and not self._spoiled and not self._closing and not self._unsent
        )

    async def start(self, context: ssl.SSLContext | None, host: str) -> None:
        """Begin to speak: TLS with ``host`` under ``context``, or plainly without one. Raises ``OSError``."""
        if self._socket is None:
            raise ConnectionResetError
        self._transport = self._socket
        self._parser = HttpResponseParser(self)
        if context is None:
            self._socket.resume_reading()
            return
        loop = asyncio.get_running_loop()
        self._transport = await loop.start_tls(
            self._socket, self, context, server_hostname=host, ssl_shutdown_timeout=GOODBYE_SECONDS
        )

    async def tunnel(self, request: bytes, deadline: float) -> str:
        """Ask a proxy for a tunnel, as ``exchange`` asks; when ``accepted``, ``start`` speaks with the other end."""
        self._tunnel = True
        failure = await self.exchange(request, deadline)
        self._tunnel = False
        self.uses = 0
        return "protocol" if self._spoiled and self.accepted else failure

    async def exchange(self, request: bytes, deadline: float, *, keep_body: bool = False) -> str:
        """Send ``request`` and return '' when a final head came before ``deadline``, by the loop's clock.

        Otherwise the code of what came instead: ``timeout``, ``reset``, ``tls``, ``protocol`` or
        ``answer_too_large``. A wire that is not ``reusable`` afterwards is closed. With ``keep_body`` the body of
        any answer is waited for, within the same bounds.
        """
        self.uses += 1
        self._begin(keep_body=keep_body)
        if self._transport is None or self._closing:
            return "reset"
        if self._unread and (self.uses > 1 or self._transport is self._socket):
            # after a handshake TLS itself has something to say; anything else would pass for our answer
            self.abort()
            return "reset" if self.uses > 1 else "protocol"
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._deadline = deadline
        self._timer = loop.call_at(deadline, self._expire)
        self._transport.write(request)
        try:
            return await self._over
        finally:
            self._over = None
            self._timer.cancel()
            if not self.reusable and not (self._tunnel and self.accepted):
                self.close()

    def close(self) -> None:
        """Hang up: with a goodbye where one is due, at once where bytes are still to be sent or to come."""
        if self._transport is None:
            return
        if self._unsent or (self.uses and not self._complete):
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Hang up without a word."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def _closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def _unsent(self) -> bool:
        # an answer that did not wait for the whole request leaves the line in an unknown state; what TLS has
        # passed on waits in the transport beneath it
        return any(
            each is not None and each.get_write_buffer_size() for each in (self._transport, self._socket)
        )

    @property
    def _unread(self) -> bool:
        """Whether the kernel holds bytes, or the end, that the loop has not come round to."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _end(self, failure: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(failure)

    def _expire(self) -> None:
        self._end("" if self._headed else "timeout")

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        # not a byte before TLS
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._over is None or self._over.done():
            # nobody asked: on a kept connection it would pass for the answer to the next message
            self._spoiled = True
            self.abort()
            return
        self._got += len(data)
        if self._headed:
            self._body += len(data)
        elif self._got > HEAD_BYTES:
            # a head that ends within the bound still counts, whatever came in one piece with it
            data = data[: HEAD_BYTES - self._got]
            self._spoiled = True
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._spoiled = True
        except HttpParserError:
            self._spoiled = True
            self._misshapen = self._misshapen or not self._headed
        if self._misshapen:
            self._end("protocol")
        elif not self._headed:
            if self._got > HEAD_BYTES:
                self._end("answer_too_large")
        elif (
            self._complete
            or self._spoiled
            or self._body > BODY_BYTES
            or (not self.accepted and self._kept is None)
        ):
            self._end("")
        elif not self._body and self._timer is not None:
            # a dripping body takes nothing back
            self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(loop.time() + BODY_SECONDS, self._deadline), self._expire)

    def connection_lost(self, error: Exception | None) -> None:
        if self._headed:
            framed = {b"content-length", b"transfer-encoding"} & {name.lower() for name, _ in self.headers}
            # without either the end of the connection is the end of the body (RFC 9112, section 6.3)
            self._complete = self._complete or (error is None and not framed)
            self._end("")
        else:
            self._end("tls" if isinstance(error, ssl.SSLError) else "reset")
        self._spoiled = True
        self.gone.set()
        self._lost(self)

    # what the parser calls

    def on_message_begin(self) -> None:
        if self._headed:
            # a second answer in one piece with the first
            self._spoiled = True
        else:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:
            self.headers.append((name, value))
            self._misshapen |= len(name) + len(value) > LINE_BYTES or len(self.headers) > HEADER_LINES

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._headed and (status >= 200 or status == 101):
            self._headed = True
            self.status = status

    def on_body(self, data: bytes) -> None:
        if self._tunnel and self.accepted:
            # nobody on the other side has a reason to speak first
            self._spoiled = True
        elif self._kept is not None:
            self._kept += data

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._spoiled = self._spoiled or not (self._tunnel or self._parser.should_keep_alive())
