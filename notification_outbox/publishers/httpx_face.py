"""The guarded transport as ``httpx`` sees it: for a project's own POSTs to URLs that strangers gave it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx

from ..answers import Attempt
from ..exceptions import InvalidMessage, OutboxError, PublishFailed
from ..reading import option_seconds
from ..transport import FRAMING, GuardedTransport
from ..urls import DestinationPolicy

# the body is handed on as it came in one piece: httpx would inflate it, and 400 bytes can become 200 MB
DROPPED = frozenset({b"content-encoding", b"transfer-encoding", b"content-length"})
ERRORS: dict[str, type[httpx.TransportError]] = {
    "timeout": httpx.ReadTimeout,
    "reset": httpx.ReadError,
    "protocol": httpx.RemoteProtocolError,
    "answer_too_large": httpx.RemoteProtocolError,
}


class GuardedHTTPTransport(httpx.AsyncBaseTransport):
    """``httpx.AsyncClient(transport=GuardedHTTPTransport())``: POST only, every address judged, nothing followed.

    ``timeout``, ``ca_file`` and ``client_cert`` as for ``WebhookPublisher``, ``reach`` its options that say what may
    be reached. Raises ``httpx.TransportError`` whose text is a code and holds nothing of request or answer. Answers'
    bodies are read up to 64 KiB and for a second, and are not decompressed.
    """

    def __init__(
        self,
        *,
        timeout: float | timedelta | str = 15.0,
        ca_file: str | None = None,
        client_cert: str | None = None,
        **reach: Any,
    ) -> None:
        self._policy = DestinationPolicy.from_options(**reach)
        self._transport = GuardedTransport(
            self._policy, timeout=option_seconds("timeout", timeout), ca_file=ca_file, client_cert=client_cert
        )
        self._opened = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            raise httpx.UnsupportedProtocol("only POST is guarded")
        if not self._opened:
            await self._transport.open()
            self._opened = True
        host, target = request.url.netloc.decode("ascii"), request.url.raw_path.decode("ascii")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers.raw
            if name.decode("latin-1").lower() not in FRAMING
        ]
        body = await request.aread()
        error: httpx.TransportError
        try:
            destination = self._policy.parse(f"{request.url.scheme}://{host}{target}")
            response = await self._transport.post(destination, headers, body, Attempt(keep_body=True))
            if response.body is not None:
                kept = [(name, value) for name, value in response.raw_headers if name.lower() not in DROPPED]
                return httpx.Response(response.status, headers=kept, content=response.body)
            error = httpx.ReadError("the body did not end in time, or is too large")
        except InvalidMessage as refused:
            error = httpx.UnsupportedProtocol(refused.rule)
        except PublishFailed as failed:
            error = ERRORS.get(failed.code, httpx.ConnectError)(failed.code)
        except OutboxError as failed:
            error = httpx.ConnectError(type(failed).__name__)
        raise error

    async def aclose(self) -> None:
        if self._opened:
            await self._transport.close()
            self._opened = False
