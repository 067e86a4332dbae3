"""POSTs through an ``httpx`` transport that the project chose: a mock, an application in this process, its own.

The rules for URLs, headers and answers are those of ``transport``; who is dialled is the chosen transport's affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx

from .answers import Attempt, Response
from .exceptions import InvalidMessage, OutboxError, PermanentPublishError, PublishFailed
from .lifecycle import Fault, QuarantineReason
from .transport import Transport, all_sound
from .urls import Destination, DestinationPolicy

logger = logging.getLogger(__name__)


class PluggedTransport(Transport):
    """Over an ``httpx.AsyncBaseTransport``; ``timeout`` in seconds covers a whole post. No answer's body is read."""

    def __init__(
        self, policy: DestinationPolicy, transport: httpx.AsyncBaseTransport, *, timeout: float
    ) -> None:
        self._policy = policy
        self._transport = transport
        self._timeout = timeout

    async def open(self) -> None:
        await self._transport.__aenter__()

    async def close(self) -> None:
        await self._transport.__aexit__(None, None, None)

    async def _attempt(
        self, destination: Destination, headers: Sequence[tuple[str, str]], body: bytes, attempt: Attempt
    ) -> Response | OutboxError:
        if not all_sound(headers):
            return PermanentPublishError(QuarantineReason.INVALID_REQUEST)
        code, fault = "unexpected", Fault.DESTINATION
        try:
            self._policy.parse(destination.url)
            attempt.reach("sent")
            async with asyncio.timeout(self._timeout):
                response = await self._transport.handle_async_request(
                    httpx.Request("POST", destination.url, headers=list(headers), content=body)
                )
                await response.aclose()
            if not 200 <= response.status_code <= 599:
                return PublishFailed("protocol", answer=attempt.answer())
            attempt.reach("answered")
            return Response(
                response.status_code, list(response.headers.raw), attempt.answer(response.status_code)
            )
        except InvalidMessage:
            code, fault = "forbidden_url", Fault.FORBIDDEN
        except (TimeoutError, httpx.TimeoutException):
            code = "timeout"
        except (httpx.RemoteProtocolError, httpx.DecodingError):
            code = "protocol"
        except httpx.ConnectError:
            code = "unreachable"
        except httpx.TransportError:
            code = "reset"
        except Exception as error:
            # its text may hold what was sent
            logger.error("outbox transport unexpected=%s", type(error).__name__)
        return PublishFailed(code, fault, answer=attempt.answer())
