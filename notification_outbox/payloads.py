"""What a caller may say: the draft of a message and the rules for its parts.

Owns identifiers, headers, bodies and strict JSON. Every refusal is ``InvalidMessage`` naming field and rule,
never another library's error and never a value. Destinations belong to the publishers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from django.core.serializers.json import DjangoJSONEncoder

from .envelope import Headers
from .exceptions import InvalidMessage

MAX_IDENTIFIER_BYTES = 255
MAX_DEPTH = 100
MAX_HEADERS = 64
MAX_HEADER_BYTES = 8192
JSON = "application/json"

TOKEN = re.compile(r"[!#$%&'*+.^`|~0-9A-Za-z-]+\Z")  # RFC 9110 5.6.2, without "_": WSGI folds it into "-"
FIELD_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\Z")
MEDIA_TYPE = re.compile(r"[!#$&^_.+0-9A-Za-z-]+/[!#$&^_.+0-9A-Za-z-]+(?:\s*;[\x20-\x7e]*)?\Z")

REFUSED_HEADERS = frozenset(
    """accept-encoding baggage connection cookie date expect forwarded host http2-settings idempotency-key
    keep-alive sentry-trace signature signature-input te traceparent tracestate trailer transfer-encoding
    upgrade user-agent via webhook-id webhook-signature webhook-timestamp x-http-method-override
    x-real-ip""".split()
)
REFUSED_HEADER_PREFIXES = ("content-", "proxy-", "x-forwarded-")

Identifier = str | int | uuid.UUID


@dataclass(frozen=True, slots=True, repr=False)
class Draft:
    """The arguments of one ``enqueue()``, as a value. ``repr`` shows no content."""

    notification_type: str
    payload: Any
    to: str | None = None
    publisher: str = "default"
    idempotency_key: Identifier | None = None
    caller_scope_id: Identifier | None = None
    account_id: Identifier | None = None
    signing_scope_id: Identifier | None = None
    headers: Mapping[str, str] | None = None
    content_type: str | None = None
    delay: timedelta | None = None
    give_up_after: timedelta | None = None

    def __repr__(self) -> str:
        return f"<Draft {self.notification_type!r} publisher={self.publisher!r}>"

    def replace(self, **changes: Any) -> Draft:
        return dataclasses.replace(self, **changes)


def identifier(field: str, value: object) -> str:
    """Return ``value`` as an identifier: 1 to 255 UTF-8 bytes, printable; ints and UUIDs become their text."""
    if isinstance(value, uuid.UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        value = str(value)
    if not isinstance(value, str):
        raise InvalidMessage(field, "identifier-type", "expected text, an int or a UUID")
    # isprintable() also refuses lone surrogates, which no database stores
    if not value.isprintable():
        raise InvalidMessage(field, "identifier-printable", "expected printable characters only")
    if not 1 <= len(value.encode()) <= MAX_IDENTIFIER_BYTES:
        raise InvalidMessage(field, "identifier-length", f"expected 1 to {MAX_IDENTIFIER_BYTES} UTF-8 bytes")
    return value


def media_type(value: str | None) -> str:
    """Return the content type to send, JSON when none was given."""
    if value is None:
        return JSON
    if not isinstance(value, str) or len(value) > MAX_IDENTIFIER_BYTES or not MEDIA_TYPE.match(value):
        raise InvalidMessage("content_type", "media-type", "expected a media type such as application/json")
    return value


def is_json(content_type: str) -> bool:
    """Say whether bodies of this content type are held to strict JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == JSON or essence.endswith("+json")


def header_fields(value: Mapping[str, str] | None) -> Headers:
    """Return the caller's extra headers, checked: nothing that frames, routes or signs the request."""
    if not value:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidMessage("headers", "header-type", "expected a mapping of names to values")
    if len(value) > MAX_HEADERS:
        raise InvalidMessage("headers", "header-count", f"expected at most {MAX_HEADERS} headers")
    seen = set()
    size = 0
    for name, text in value.items():
        if not isinstance(name, str) or not TOKEN.match(name):
            raise InvalidMessage(
                "headers", "header-name", "expected token names (RFC 9110 5.6.2) without '_'"
            )
        lowered = name.lower()
        if lowered in REFUSED_HEADERS or lowered.startswith(REFUSED_HEADER_PREFIXES):
            raise InvalidMessage(
                "headers", "header-reserved", "a name belongs to HTTP, tracing or the signer"
            )
        if lowered in seen:
            raise InvalidMessage("headers", "header-duplicate", "two names differ only in case")
        if not isinstance(text, str) or not FIELD_VALUE.match(text):
            raise InvalidMessage("headers", "header-value", "expected visible ASCII values")
        seen.add(lowered)
        size += len(name) + len(text)
    if size > MAX_HEADER_BYTES:
        raise InvalidMessage("headers", "header-size", f"expected at most {MAX_HEADER_BYTES} bytes in all")
    return tuple(value.items())


_encoder = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def serialise(payload: object, content_type: str, max_bytes: int) -> bytes:
    """Return the body to seal: ``bytes`` are kept byte for byte, anything else becomes compact JSON.

    JSON is strict either way (RFC 8259 without its leniencies): UTF-8, no BOM, no NaN or overflow, no
    duplicate keys, no lone surrogates, at most 100 levels below the top one. Bytes of another content type are
    not read.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        body = bytes(payload)
        _check_size(body, max_bytes)
        if is_json(content_type):
            read_json(body)
        return body
    if not is_json(content_type):
        raise InvalidMessage("payload", "payload-type", "expected bytes for a content type other than JSON")
    text: str | None = None
    try:
        text = _encoder.encode(payload)
        body = text.encode()
    except UnicodeEncodeError:
        rule, hint = "json-surrogate", "text holds a lone surrogate"
    except RecursionError:
        rule, hint = "json-depth", f"expected at most {MAX_DEPTH} levels"
    except ValueError:
        rule, hint = "json-value", "expected finite numbers of a sane size and no circular references"
    except TypeError:
        rule, hint = "json-type", "expected the types Django's JSON encoder knows"
    else:
        _check_size(body, max_bytes)
        _check_depth(body)
        return body
    raise InvalidMessage("payload", rule, hint)


def read_json(body: bytes) -> Any:
    """Return the value of strict JSON bytes. Raises ``InvalidMessage`` for the field ``payload``."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidMessage("payload", "json-bom", "expected UTF-8 without a byte order mark")
    _check_depth(body)
    rule, hint = "json-syntax", "expected valid JSON in UTF-8"
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except InvalidMessage:
        raise
    except UnicodeEncodeError:
        rule, hint = "json-surrogate", "text holds a lone surrogate"
    except (ValueError, RecursionError):
        pass
    raise InvalidMessage("payload", rule, hint)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidMessage("payload", "json-duplicate-key", "an object names a key twice")
    return found


def _refuse_constant(_name: str) -> NoReturn:
    raise InvalidMessage("payload", "json-value", "expected finite numbers")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidMessage("payload", "json-value", "expected finite numbers")
    return number


def _check_size(body: bytes, max_bytes: int) -> None:
    if not body:
        raise InvalidMessage("payload", "body-empty", "expected at least one byte")
    if len(body) > max_bytes:
        raise InvalidMessage("payload", "body-size", f"expected at most {max_bytes} bytes (MAX_BODY_BYTES)")


_strings_and_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _check_depth(body: bytes) -> None:
    # few brackets cannot nest deeply: the exact walk is only for bodies that have many
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    if _levels(match[0] for match in _strings_and_brackets.finditer(body)) > MAX_DEPTH + 1:
        raise InvalidMessage("payload", "json-depth", f"expected at most {MAX_DEPTH} levels")


def _levels(tokens: Iterable[bytes]) -> int:
    depth = deepest = 0
    for token in tokens:
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest
