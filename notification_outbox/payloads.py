"""Bodies: strict JSON, the three shapes a body can have, the project's own validators.

A body is serialised once and kept byte for byte ever after. Every refusal is ``InvalidMessage`` for the field
``payload``, never another library's error and never a value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder

from .exceptions import InvalidMessage

MAX_DEPTH = 100
HARD_MAX_BYTES = 10 * 1024 * 1024


def is_json(content_type: str) -> bool:
    """Say whether bodies of this content type are held to strict JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == "application/json" or essence.endswith("+json")


# what a key that is not text becomes
_ODD_KEY = re.compile(rb'"(?:-?[0-9][0-9.e+-]*|true|false|null)":')

_encoder = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def serialise(payload: object, content_type: str, max_bytes: int) -> bytes:
    """Return the body to seal: ``bytes`` are kept byte for byte, anything else becomes compact JSON.

    JSON is strict either way (RFC 8259 without its leniencies): UTF-8, no BOM, no NaN or overflow, no
    duplicate keys, no lone surrogates, at most 100 levels below the top one. Bytes of another content type are
    not read.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        body = bytes(payload)
        check_size(body, max_bytes)
        if is_json(content_type):
            read_json(body)
        return body
    if not is_json(content_type):
        raise InvalidMessage("payload", "payload-type", "expected bytes for a content type other than JSON")
    rule, hint = "json-type", "expected the types Django's JSON encoder knows"
    try:
        body = _encoder.encode(payload).encode()
    except UnicodeEncodeError:
        rule, hint = "json-surrogate", "text holds a lone surrogate"
    except RecursionError:
        rule, hint = "json-depth", f"expected at most {MAX_DEPTH} levels"
    except ValueError:
        rule, hint = "json-value", "expected finite numbers of a sane size and no circular references"
    except TypeError:
        pass
    else:
        check_size(body, max_bytes)
        _check_depth(body)
        if _ODD_KEY.search(body):
            # {1: "a", "1": "b"} becomes an object that names a key twice
            read_json(body)
        return body
    raise InvalidMessage("payload", rule, hint)


def read_json(body: bytes) -> Any:
    """Return the value of strict JSON bytes. Raises ``InvalidMessage`` for the field ``payload``."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise _broken("json-bom", "expected UTF-8 without a byte order mark")
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
    raise _broken(rule, hint)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _broken("json-duplicate-key", "an object names a key twice")
    return found


def _refuse_constant(_name: str) -> NoReturn:
    raise _broken("json-value", "expected finite numbers")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _broken("json-value", "expected finite numbers")
    return number


def check_size(body: bytes, max_bytes: int) -> None:
    """Raise ``InvalidMessage`` for an empty body or one of more than ``max_bytes``."""
    if not body:
        raise _broken("body-empty", "expected at least one byte")
    if len(body) > max_bytes:
        # beyond the hard limit it is not even stored
        raise InvalidMessage(
            "payload",
            "body-size",
            f"expected at most {max_bytes} bytes (MAX_BODY_BYTES)",
            data=len(body) <= HARD_MAX_BYTES,
        )


def _broken(rule: str, hint: str) -> InvalidMessage:
    return InvalidMessage("payload", rule, hint, data=True)


_strings_and_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _check_depth(body: bytes) -> None:
    # few brackets cannot nest deeply: the exact walk is only for bodies that have many
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    if _levels(match[0] for match in _strings_and_brackets.finditer(body)) > MAX_DEPTH + 1:
        raise _broken("json-depth", f"expected at most {MAX_DEPTH} levels")


def _levels(tokens: Iterable[bytes]) -> int:
    depth = deepest = 0
    for token in tokens:
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def bind(
    payload: object, body: bytes, names: Mapping[str, str], account_id: str | None
) -> Mapping[str, Any] | None:
    """Hold a JSON object to the ``names`` it must carry (``BODY = "bound"``).

    ``payload`` is what the caller passed, ``body`` its bytes. Returns the object with missing names filled in
    where the caller passed a mapping, None where his bytes carry all of them already. A body that names an
    account needs the argument and must agree with it.
    """
    given_as_bytes = isinstance(payload, bytes | bytearray | memoryview)
    value = read_json(body) if given_as_bytes else payload
    if not isinstance(value, Mapping):
        raise InvalidMessage("payload", "bound-object", "expected a JSON object", data=given_as_bytes)
    for name, expected in names.items():
        if value.get(name, None if given_as_bytes else expected) != expected:
            raise InvalidMessage(
                "payload", f"bound-{name}", f"the body's {name} must be the argument's", data=given_as_bytes
            )
    named = value.get("account_id")
    if named is not None and str(named) != account_id:
        raise InvalidMessage(
            "payload", "bound-account", "a body that names an account needs the same account_id argument"
        )
    return None if given_as_bytes else {**value, **names}


def wrap(body: bytes, notification_type: str, timestamp: str) -> bytes:
    """Return a JSON body inside the object that Standard Webhooks recommends (``BODY = "standard"``)."""
    head = _encoder.encode({"type": notification_type, "timestamp": timestamp}).encode()
    return head[:-1] + b',"data":' + body + b"}"


class Validators:
    """The project's own rules for bodies: patterns of types (``order.*``) and what checks them.

    A validator is given the JSON value that is sent (bytes, where the content type is not JSON) and refuses by
    raising ``ValueError`` or Django's ``ValidationError``; its text, which may quote the payload, is dropped.
    """

    def __init__(self, entries: Iterable[tuple[str, Callable[[Any], object]]] = ()) -> None:
        self._entries = tuple(entries)

    def check(self, notification_type: str, body: bytes, content_type: str) -> None:
        """Raise ``InvalidMessage`` when a validator of this type refuses the body."""
        checks = [check for pattern, check in self._entries if fnmatchcase(notification_type, pattern)]
        if not checks:
            return
        value = json.loads(body) if is_json(content_type) else body
        try:
            for check in checks:
                check(value)
            return
        except (ValidationError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            pass  # also what reading a body of another shape raises
        raise _broken("validator", "the validator of this notification type refuses it")
