"""Sealing and opening: what a row holds is unreadable and unchangeable without the project's keys.

Owns the envelope format, the keys derived from the project's secrets and the three values a message is at
different times: ``Binding`` (the clear columns, authenticated), ``Content`` (what is sealed) and ``Message``
(opened, what a publisher sees). Pure: secrets are arguments, rows are values.

    sealed    = version byte ‖ 16 bytes salt ‖ AES-256-GCM ciphertext and tag
    row key   = HKDF-SHA256(master key, salt, label), 32 bytes of key and 12 of nonce: no limit on rows per key
    data      = canonical JSON of version and ``Binding``, authenticated and not encrypted
    plaintext = 4 bytes length ‖ JSON [content type, headers, destination, checked] ‖ body
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .exceptions import ConfigurationError, Tampered, UnknownKey

VERSION = 1
SALT_BYTES = 16
# a seal's first bytes are those of no other
SEAL_ID_BYTES = 1 + SALT_BYTES
KEY_BYTES = 32
NONCE_BYTES = 12
HEAD = struct.Struct(">I")

Headers = tuple[tuple[str, str], ...]


def derive(secret: bytes, label: str, length: int = KEY_BYTES, salt: bytes | None = None) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) of ``secret``, separated from others by ``label``."""
    info = b"notification_outbox " + label.encode()
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


# made once: json.dumps() makes an encoder for every call that differs from its defaults, json.loads() guesses
# encodings
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def canonical(values: Iterable[object]) -> bytes:
    """Return the one JSON spelling of a list of strings, numbers and nulls that both halves agree on."""
    return _encode(list(values)).encode()


def message_id(dedup_id: uuid.UUID) -> str:
    """Return the constant name on the wire of the message with this ``dedup_id``."""
    return f"msg_{dedup_id.hex}"


class Content(NamedTuple):
    """What is sealed: ``body`` bytes as sent, ``content_type``, caller's ``headers``, the full ``destination``.

    ``checked`` is False for what was stored although it breaks a rule, so that a requeue checks it again.
    """

    body: bytes
    content_type: str
    headers: Headers
    destination: str
    checked: bool = True

    def __repr__(self) -> str:
        return "<Content>"


class Binding(NamedTuple):
    """The clear columns that the seal authenticates: change one and the row no longer opens."""

    publisher: str
    notification_type: str
    destination: str
    destination_key: uuid.UUID
    caller_scope_id: str
    account_id: str | None
    signing_scope_id: str | None
    idempotency_key: str
    ordering_key: str
    dedup_id: uuid.UUID
    encryption_key_id: str

    def __repr__(self) -> str:
        return f"<Binding {self.message_id}>"

    @property
    def message_id(self) -> str:
        """The message's constant name on the wire."""
        return message_id(self.dedup_id)

    @classmethod
    def of(cls, row: object) -> Binding:
        """Return the binding of anything that has its columns as attributes."""
        return cls(*(getattr(row, name) for name in BOUND))

    def associated_data(self) -> bytes:
        return canonical(
            (
                VERSION,
                self.publisher,
                self.notification_type,
                self.destination,
                self.destination_key.hex,
                self.caller_scope_id,
                self.account_id,
                self.signing_scope_id,
                self.idempotency_key,
                self.ordering_key,
                self.dedup_id.hex,
                self.encryption_key_id,
            )
        )


BOUND = Binding._fields


class Claim(NamedTuple):
    """One leased row: what the worker has in hand until it settles.

    ``attempt`` counts this attempt since the last requeue, ``number`` since the message was made.
    """

    id: int
    token: uuid.UUID
    binding: Binding
    sealed: bytes | None
    attempt: int
    number: int
    rejections: int
    lost_leases: int
    created_at: datetime.datetime
    traceparent: str

    def __repr__(self) -> str:
        return f"<Claim id={self.id} attempt={self.attempt}>"


@dataclass(frozen=True, repr=False)
class Message:
    """An opened message as a publisher sees it. ``repr`` shows no content.

    ``id`` is constant over all attempts (``msg_…``), ``body`` the exact bytes to send, ``destination`` the full
    destination (a webhook's URL holds secrets), ``attempt`` counts from 1 since the last requeue.
    """

    id: str
    notification_type: str
    publisher: str
    destination: str
    body: bytes
    created_at: datetime.datetime
    content_type: str = "application/json"
    headers: Headers = ()
    caller_scope_id: str = "default"
    account_id: str | None = None
    signing_scope_id: str | None = None
    idempotency_key: str = ""
    ordering_key: str = ""
    attempt: int = 1
    traceparent: str = ""

    @cached_property
    def payload(self) -> Any:
        """The body read as JSON. Raises ``ValueError`` when the body is something else."""
        return json.loads(self.body)

    def __repr__(self) -> str:
        return f"<Message {self.id} {self.notification_type!r} attempt={self.attempt}>"


class Keyring:
    """Ordered sealing keys by id, 32 bytes each: the first seals, all open."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigurationError("a keyring needs at least one key")
        self._keys = dict(keys)
        self.current_id = next(iter(self._keys))

    def __repr__(self) -> str:
        return f"<Keyring of {len(self._keys)}>"

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def master(self, key_id: str) -> bytes:
        try:
            return self._keys[key_id]
        except KeyError:
            pass
        raise UnknownKey(key_id)

    @classmethod
    def from_secrets(cls, secrets: Iterable[str | bytes]) -> Keyring:
        """Derive a keyring from ``SECRET_KEY`` and its fallbacks. A key's id is its fingerprint."""
        keys: dict[str, bytes] = {}
        for secret in secrets:
            material = secret if isinstance(secret, bytes) else secret.encode()
            fingerprint = derive(material, "encryption key id", 6).hex()
            keys[f"secret-{fingerprint}"] = derive(material, "encryption key")
        return cls(keys)


class LookupKey:
    """Names for things that must be found again without being readable in the table.

    A table reader who lacks the secret can neither guess a short destination from ``destination_key`` nor a
    content from its MAC. The secret does not rotate: another secret would find nothing of what came before.
    """

    def __init__(self, secret: bytes) -> None:
        self._dedup = derive(secret, "dedup id")
        self._destination = derive(secret, "destination key")
        self._content = derive(secret, "content mac")

    def __repr__(self) -> str:
        return "<LookupKey>"

    def dedup_id(
        self,
        *,
        caller_scope_id: str,
        account_id: str | None,
        publisher: str,
        destination: str,
        notification_type: str,
        idempotency_key: str,
    ) -> uuid.UUID:
        """Return the one id of this binding."""
        parts = (caller_scope_id, account_id, publisher, destination, notification_type, idempotency_key)
        return _uuid(hmac.digest(self._dedup, canonical(parts), "sha256"))

    def destination_key(self, publisher: str, destination: str) -> uuid.UUID:
        """Return the name of one full destination of one publisher (a topic of two brokers is two)."""
        return _uuid(hmac.digest(self._destination, canonical((publisher, destination)), "sha256"))

    def content_mac(self, payload: bytes, content_type: str, headers: Headers) -> bytes:
        """Return 32 bytes: 16 of the payload's MAC, 16 of the content type's and headers'."""
        head = canonical((content_type, *(part for pair in headers for part in pair)))
        return (
            hmac.digest(self._content, payload, "sha256")[:16]
            + hmac.digest(self._content, b"head" + hashlib.sha256(head).digest(), "sha256")[:16]
        )


def _uuid(digest: bytes) -> uuid.UUID:
    # pseudorandom, so version 4 (RFC 9562 5.4); MariaDB's uuid type refuses version 8
    return uuid.UUID(bytes=digest[:16], version=4)


def _row_cipher(master: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    material = derive(master, "row", KEY_BYTES + NONCE_BYTES, salt)
    return AESGCM(material[:KEY_BYTES]), material[KEY_BYTES:]


def seal(content: Content, binding: Binding, keyring: Keyring) -> bytes:
    """Return ``content`` encrypted under the key the binding names, inseparable from the binding."""
    fields = (content.content_type, content.headers, content.destination, content.checked)
    head = canonical(fields)
    salt = os.urandom(SALT_BYTES)
    cipher, nonce = _row_cipher(keyring.master(binding.encryption_key_id), salt)
    plaintext = HEAD.pack(len(head)) + head + content.body
    return bytes((VERSION,)) + salt + cipher.encrypt(nonce, plaintext, binding.associated_data())


def open_sealed(sealed: bytes, binding: Binding, keyring: Keyring) -> Content:
    """Return what was sealed, byte for byte.

    Raises ``UnknownKey`` for a key or envelope version this process lacks and ``Tampered`` when the row does
    not authenticate. ``dedup_id`` is authenticated like every other column, so it is not computed again here:
    a rotated ``LOOKUP_KEY`` must not make old rows look forged.
    """
    master = keyring.master(binding.encryption_key_id)
    if not sealed:
        raise Tampered
    if sealed[0] != VERSION:
        raise UnknownKey(f"version {sealed[0]}")
    salt = sealed[1 : 1 + SALT_BYTES]
    plaintext = None
    if len(salt) == SALT_BYTES:
        cipher, nonce = _row_cipher(master, salt)
        try:
            plaintext = cipher.decrypt(nonce, sealed[1 + SALT_BYTES :], binding.associated_data())
        except InvalidTag:
            pass
    if plaintext is None:
        raise Tampered
    end = HEAD.size + HEAD.unpack_from(plaintext)[0]
    content_type, headers, destination, checked = _decode(plaintext[HEAD.size : end].decode())
    return Content(
        body=plaintext[end:],
        content_type=content_type,
        headers=tuple(map(tuple, headers)),
        destination=destination,
        checked=checked,
    )
