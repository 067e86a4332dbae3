"""What every signer is given and what it gives back."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from ..envelope import Headers


@dataclass(frozen=True, slots=True, repr=False)
class SigningRequest:
    """A POST about to be sent. ``target_uri`` is byte for byte what goes on the wire, ``authority`` its host
    and port as RFC 9421 2.2.3 spells them (lower case, no default port), ``headers`` the caller's own."""

    target_uri: str
    authority: str
    content_type: str
    body: bytes
    message_id: str
    idempotency_key: str
    headers: Headers = ()


class Scope(NamedTuple):
    """For whom a signature is wanted: what ``enqueue()`` was given, and the host that is called."""

    signing_scope_id: str | None
    account_id: str | None
    caller_scope_id: str
    host: str


class Signer(ABC):
    """Makes the headers that vouch for one request.

    ``symmetric``: receivers hold the very secret, so that each could sign in our name to whoever holds it too.
    """

    symmetric = False

    @abstractmethod
    def sign(self, request: SigningRequest, *, created: int, nonce: str) -> list[tuple[str, str]]:
        """Return the headers to add. ``created`` is in Unix seconds, ``nonce`` is never used twice."""


def content_digest(body: bytes) -> str:
    """Return the ``Content-Digest`` field value, sha-256 (RFC 9530 section 2)."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def sf_string(text: str) -> str:
    """Return printable ASCII as a structured-field string (RFC 9651 section 3.3.3)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
