"""How far a POST got, and what a receiver's final answer means: delivered, to be tried again and when, or given up.

Does no I/O. This machine's clock is asked when a phase began, and for a date without a ``Date`` beside it (RFC 9110).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from django.utils.http import parse_http_date_safe

from .exceptions import PermanentPublishError, PublishFailed
from .lifecycle import Answer, Fault, QuarantineReason

# answers that ask for patience (RFC 9110 15.5.9, 15.5.10, RFC 8470, RFC 6585); every 5xx does too
BUSY = frozenset({408, 409, 425, 429})
MAX_RETRY_AFTER = 24 * 3600.0


@dataclass(slots=True)
class Attempt:
    """What one ``post()`` may take, and how far it got: the phase, the peer's ``address:port``.

    With ``keep_body`` up to 64 KiB of the answer's body that come within a second are kept. ``marks`` collects when
    each phase began, by the loop's clock, if somebody wants to know; then ``certificate`` is the peer's, as
    ``ssl.SSLSocket.getpeercert()`` has it.
    """

    deadline: float = 0.0
    keep_body: bool = False
    phase: str = ""
    peer: str = ""
    marks: list[tuple[str, float]] | None = None
    certificate: dict[str, Any] | None = None

    def reach(self, phase: str) -> None:
        """Begin a phase: dns, dial, tls, sent, answered."""
        self.phase = phase
        if self.marks is not None:
            self.marks.append((phase, asyncio.get_running_loop().time()))

    def answer(self, status: int | None = None) -> Answer:
        return Answer(status, self.phase, self.peer)


class Response(NamedTuple):
    """The peer's final answer: ``status`` from 200 to 599. ``repr`` shows nothing that the peer wrote.

    ``body`` is None unless it was asked for, small and complete.
    """

    status: int
    raw_headers: list[tuple[bytes, bytes]]
    answer: Answer
    body: bytes | None = None

    def __repr__(self) -> str:
        return f"<Response {self.status} {self.answer}>"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The header fields as pairs with lower-case names."""
        return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in self.raw_headers]


def accepted(response: Response) -> Answer:
    """Return what a 2xx says for the record. Raises ``PublishFailed`` or ``PermanentPublishError`` for the others."""
    if 200 <= response.status < 300:
        return response.answer
    if response.status == HTTPStatus.GONE:
        raise PermanentPublishError(QuarantineReason.GONE, answer=response.answer)
    busy = response.status in BUSY or response.status >= 500
    raise PublishFailed(
        f"http_{response.status}",
        Fault.DESTINATION if busy else Fault.REJECTION,
        answer=response.answer,
        retry_after=retry_after(response.headers, time.time()),
    )


def retry_after(headers: Iterable[tuple[str, str]], now: float) -> float | None:
    """Return the pause in seconds, at most a day, that ``Retry-After`` asks for (RFC 9110, section 10.2.3).

    A date counts from the answer's own ``Date``, or else from ``now`` (Unix seconds). None: it asks for nothing,
    or for nothing that can be understood.
    """
    wishes = [value.strip(" \t") for name, value in headers if name == "retry-after"]
    if len(wishes) != 1:
        return None
    (wish,) = wishes
    if wish.isascii() and wish.isdigit():
        seconds = float(wish)
    elif (until := parse_http_date_safe(wish)) is not None:
        dates = [parse_http_date_safe(value.strip(" \t")) for name, value in headers if name == "date"]
        seconds = until - (dates[0] if len(dates) == 1 and dates[0] is not None else now)
    else:
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)
