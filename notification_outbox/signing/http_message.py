"""HTTP Message Signatures (RFC 9421), ed25519, by hand over ``cryptography``.

By hand because it runs for every attempt (a library costs ten times as much); the tests check it against the
library and against published vectors.
"""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..envelope import derive
from ..exceptions import ConfigurationError
from .base import Signer, SigningRequest, content_digest, sf_string

COVERED = ("@method", "@target-uri", "@authority", "content-type", "content-digest", "idempotency-key")
LABEL = "sig1"
WINDOW = 300


class HttpMessageSigner(Signer):
    """Signs with an ed25519 key under ``key_id``. ``repr`` shows no key material.

    ``key`` is an ``Ed25519PrivateKey`` or its unencrypted PKCS #8 PEM. ``tag`` names the application (RFC 9421
    section 2.3), so a signature made for one purpose is not taken for another. The signature covers ``COVERED``
    and then the caller's headers in the order of their lower-case names; it expires after 300 seconds.
    """

    def __init__(self, *, key: Ed25519PrivateKey | str | bytes, key_id: str, tag: str | None = None) -> None:
        for name, value in (("key_id", key_id), ("tag", tag)):
            if value is not None and not (value and value.isascii() and value.isprintable()):
                raise ConfigurationError(f"HttpMessageSigner: {name}: expected printable ASCII")
        self._key = key if isinstance(key, Ed25519PrivateKey) else _read_pem(key)
        self.key_id = key_id
        self._tail = f';keyid={sf_string(key_id)};alg="ed25519"'
        if tag is not None:
            self._tail += f";tag={sf_string(tag)}"

    def __repr__(self) -> str:
        return f"<HttpMessageSigner {self.key_id!r}>"

    @classmethod
    def from_secret(
        cls, secret: str | bytes, *, key_id: str | None = None, tag: str | None = None
    ) -> HttpMessageSigner:
        """Derive the key pair from a secret such as ``SECRET_KEY``: a start without any key file.

        The key changes when the secret does. ``key_id`` defaults to a fingerprint of the public key.
        """
        material = secret.encode() if isinstance(secret, str) else secret
        key = Ed25519PrivateKey.from_private_bytes(derive(material, "signing key ed25519"))
        public = key.public_key().public_bytes_raw()
        return cls(key=key, key_id=key_id or f"ed25519-{derive(public, 'key id', 6).hex()}", tag=tag)

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The half that receivers verify with."""
        return self._key.public_key()

    def public_pem(self) -> str:
        """Return the public half as PEM, ready to hand to a receiver."""
        return self.public_key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ).decode()

    def sign(self, request: SigningRequest, *, created: int, nonce: str) -> list[tuple[str, str]]:
        """Return ``Content-Digest``, ``Idempotency-Key``, ``Signature-Input`` and ``Signature``."""
        digest = content_digest(request.body)
        key_header = sf_string(request.idempotency_key)
        values = ("POST", request.target_uri, request.authority, request.content_type, digest, key_header)
        fields = [
            *zip(COVERED, values, strict=True),
            *sorted((name.lower(), value) for name, value in request.headers),
        ]
        covered = " ".join(f'"{name}"' for name, _ in fields)
        window = f";created={created};expires={created + WINDOW};nonce={sf_string(nonce)}"
        parameters = f"({covered}){window}{self._tail}"
        base = "".join(f'"{name}": {value}\n' for name, value in fields)
        base += f'"@signature-params": {parameters}'
        signature = base64.b64encode(self._key.sign(base.encode("ascii"))).decode()
        return [
            ("Content-Digest", digest),
            ("Idempotency-Key", key_header),
            ("Signature-Input", f"{LABEL}={parameters}"),
            ("Signature", f"{LABEL}=:{signature}:"),
        ]


def _read_pem(pem: object) -> Ed25519PrivateKey:
    key: object = None
    if isinstance(pem, str | bytes):
        try:
            key = serialization.load_pem_private_key(
                pem.encode() if isinstance(pem, str) else pem, password=None
            )
        except (ValueError, TypeError):
            pass
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(
            "HttpMessageSigner: key: expected an Ed25519PrivateKey or its unencrypted PKCS #8 PEM"
        )
    return key
