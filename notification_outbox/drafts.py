"""What a caller may say: the draft of a message, its identifiers and headers.

Every refusal is ``InvalidMessage`` naming field and rule and never a value. A rule that data can break (a header
value from a form) is told from one that only code can break (a header that is not text). Bodies belong to
``payloads``, destinations to the publishers.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from .envelope import Headers
from .exceptions import InvalidMessage
from .reading import spoken

MAX_IDENTIFIER_BYTES = 255
MAX_HEADERS = 64
MAX_HEADER_BYTES = 8192
MAX_DELAY = timedelta(days=366)
GIVE_UP_AFTER = (timedelta(minutes=1), timedelta(days=30))
DEFAULT_MEDIA_TYPE = "application/json"

TOKEN = re.compile(r"[!#$%&'*+.^`|~0-9A-Za-z-]+\Z")  # RFC 9110 5.6.2, without "_": WSGI folds it into "-"
FIELD_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\Z")
MEDIA_TYPE = re.compile(r"[!#$&^_.+0-9A-Za-z-]+/[!#$&^_.+0-9A-Za-z-]+(?:[ \t]*;[\x20-\x7e]*)?\Z")

REFUSED_HEADERS = frozenset(
    """accept-encoding baggage connection cookie date expect forwarded host http2-settings idempotency-key
    keep-alive sentry-trace signature signature-input te traceparent tracestate trailer transfer-encoding
    upgrade user-agent via webhook-id webhook-signature webhook-timestamp x-http-method-override
    x-real-ip""".split()
)
REFUSED_HEADER_PREFIXES = ("content-", "proxy-", "x-forwarded-")

# what a name of a program looks like, and neither a payload nor a URL
_PLAIN_NAME = re.compile(r"[\w.:-]{1,64}\Z")

Identifier = str | int | uuid.UUID


@dataclass(frozen=True, slots=True, repr=False)
class Draft:
    """The arguments of one ``enqueue()``, as a value. ``repr`` shows no content.

    ``delay`` and ``give_up_after`` are timedeltas or seconds, ``available_at`` an aware datetime.
    """

    notification_type: str
    payload: Any
    to: str | None = None
    publisher: str = "default"
    idempotency_key: Identifier | None = None
    caller_scope_id: Identifier | None = None
    account_id: Identifier | None = None
    signing_scope_id: Identifier | None = None
    ordering_key: Identifier = ""
    headers: Mapping[str, str] | None = None
    content_type: str | None = None
    delay: timedelta | float | None = None
    available_at: datetime | None = None
    give_up_after: timedelta | float | None = None

    def __repr__(self) -> str:
        return f"<Draft {_shown(self.notification_type)} publisher={_shown(self.publisher)}>"

    def replace(self, **changes: Any) -> Draft:
        return dataclasses.replace(self, **changes)


def _shown(name: object) -> str:
    # arguments may have been given in the wrong order
    return repr(name) if isinstance(name, str) and _PLAIN_NAME.match(name) else "(no plain name)"


def identifier(field: str, value: object) -> str:
    """Return ``value`` as an identifier: 1 to 255 UTF-8 bytes, printable; ints and UUIDs become their text."""
    if isinstance(value, int) and not isinstance(value, bool):
        # text of a number this long is refused below, and Python refuses to write longer ones
        value = str(int(value) if value.bit_length() < 1000 else 10**MAX_IDENTIFIER_BYTES)
    elif isinstance(value, uuid.UUID):
        value = str(value)
    if not isinstance(value, str):
        raise InvalidMessage(field, "identifier-type", "expected text, an int or a UUID")
    value = str.__str__(value)  # an enum's member is its value
    # isprintable() also refuses lone surrogates, which no database stores
    if not value.isprintable():
        raise InvalidMessage(field, "identifier-printable", "expected printable characters only")
    if not 1 <= len(value.encode()) <= MAX_IDENTIFIER_BYTES:
        raise InvalidMessage(field, "identifier-length", f"expected 1 to {MAX_IDENTIFIER_BYTES} UTF-8 bytes")
    return value


def media_type(value: str | None) -> str:
    """Return the content type to send, JSON when none was given."""
    if value is None:
        return DEFAULT_MEDIA_TYPE
    if not isinstance(value, str) or len(value) > MAX_IDENTIFIER_BYTES or not MEDIA_TYPE.match(value):
        raise InvalidMessage("content_type", "media-type", "expected a media type such as application/json")
    return value


def header_fields(value: Mapping[str, str] | None) -> Headers:
    """Return the caller's extra headers, checked: nothing that frames, routes or signs the request."""
    found = header_pairs(value)
    if len(found) > MAX_HEADERS:
        raise _bad_header("header-count", f"expected at most {MAX_HEADERS} headers")
    seen = set()
    for name, text in found:
        lowered = name.lower()
        if not TOKEN.match(name):
            raise _bad_header("header-name", "expected token names (RFC 9110 5.6.2) without '_'")
        if lowered in REFUSED_HEADERS or lowered.startswith(REFUSED_HEADER_PREFIXES):
            raise _bad_header("header-reserved", "a name belongs to HTTP, tracing or the signer")
        if lowered in seen:
            raise _bad_header("header-duplicate", "two names differ only in case")
        if not FIELD_VALUE.match(text):
            raise _bad_header("header-value", "expected visible ASCII values")
        seen.add(lowered)
    if sum(len(name) + len(text) for name, text in found) > MAX_HEADER_BYTES:
        raise _bad_header("header-size", f"expected at most {MAX_HEADER_BYTES} bytes in all")
    return found


def header_pairs(value: Mapping[str, str] | None) -> Headers:
    """Return the caller's extra headers as they are. Raises ``InvalidMessage`` when they are no text at all."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise InvalidMessage("headers", "header-type", "expected a mapping of names to values, both text")
    if sum(len(name) + len(text) for name, text in value.items()) > 2 * MAX_HEADER_BYTES:
        # not even kept to be looked at: no customer's data is that long by mistake
        raise InvalidMessage("headers", "header-size", f"expected at most {MAX_HEADER_BYTES} bytes in all")
    return tuple(value.items())


def _bad_header(rule: str, hint: str) -> InvalidMessage:
    return InvalidMessage("headers", rule, hint, data=True)


def duration(field: str, value: timedelta | float, low: timedelta, high: timedelta) -> timedelta:
    """Return a timedelta from a timedelta or seconds, within its bounds."""
    length: timedelta | None = None
    if isinstance(value, timedelta):
        length = value
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**9:
        length = timedelta(seconds=value)
    if length is None or not low <= length <= high:
        raise InvalidMessage(
            field,
            "duration",
            f"expected {spoken(low.total_seconds())} to {spoken(high.total_seconds())}, as seconds or a timedelta",
        )
    return length


def due(draft: Draft) -> timedelta | datetime:
    """Return when the message is due: so long after the database's now, or at a moment of its own."""
    if draft.available_at is None:
        return duration(
            "delay", timedelta(0) if draft.delay is None else draft.delay, timedelta(0), MAX_DELAY
        )
    if draft.delay is not None:
        raise InvalidMessage("available_at", "due-twice", "expected either delay or available_at")
    moment = draft.available_at
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidMessage("available_at", "aware", "expected an aware datetime")
    # databases disagree on where time ends; this clock only sorts out what is far from the database's
    ahead = moment - datetime.now(UTC)
    if ahead > MAX_DELAY:
        raise InvalidMessage("available_at", "duration", f"expected at most {MAX_DELAY.days} days from now")
    return timedelta(0) if ahead < -timedelta(days=1) else moment
