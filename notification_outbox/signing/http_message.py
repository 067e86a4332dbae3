"""HTTP Message Signatures (RFC 9421), ed25519 and ecdsa-p256-sha256, by hand over ``cryptography``.

By hand because it runs for every attempt (a library costs ten times as much); the tests check it against the
library and against published vectors.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from ..envelope import derive
from ..exceptions import ConfigurationError
from .base import Signer, SigningRequest, content_digest, sf_string

COVERED = ("@method", "@target-uri", "@authority", "content-type", "content-digest", "idempotency-key")
LABEL = "sig1"
WINDOW = 300
_LABEL = re.compile(r"[a-z*][a-z0-9_.*-]*")  # a structured field's key (RFC 9651, section 3.1.2)

PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
PublicKey = Ed25519PublicKey | EllipticCurvePublicKey


class HttpMessageSigner(Signer):
    """Signs with an ed25519 or P-256 key under ``key_id``. ``repr`` shows no key material.

    ``key`` is a private key of ``cryptography``, its unencrypted PKCS #8 PEM, or a private JWK (RFC 7517, RFC 8037)
    as a dict or JSON. ``tag`` names the application (RFC 9421 section 2.3), so a signature made for one purpose is
    not taken for another. The signature is named ``label``, expires after ``window`` seconds, and covers
    ``covered``, of the names in ``COVERED``, and then the caller's headers in the order of their lower-case names.
    """

    def __init__(
        self,
        *,
        key: PrivateKey | str | bytes | Mapping[str, Any],
        key_id: str,
        tag: str | None = None,
        label: str = LABEL,
        window: int = WINDOW,
        covered: Sequence[str] = COVERED,
    ) -> None:
        for name, value in (("key_id", key_id), ("tag", tag)):
            if value is not None and not (value and value.isascii() and value.isprintable()):
                raise ConfigurationError(f"HttpMessageSigner: {name}: expected printable ASCII")
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise ConfigurationError("HttpMessageSigner: label: expected lower-case letters and digits")
        if not isinstance(window, int) or not 1 <= window <= 86_400:
            raise ConfigurationError("HttpMessageSigner: window: expected 1 to 86400 whole seconds")
        if isinstance(covered, str) or not {"@target-uri", "content-digest"} <= set(covered) <= set(COVERED):
            raise ConfigurationError(
                "HttpMessageSigner: covered: expected @target-uri, content-digest and any of "
                + ", ".join(name for name in COVERED if name not in ("@target-uri", "content-digest"))
            )
        self._key = _read(key)
        algorithm, self._sign = _algorithm(self._key)
        self.key_id = key_id
        self._label = label
        self._window = window
        self._covered = tuple(dict.fromkeys(covered))
        self._tail = f';keyid={sf_string(key_id)};alg="{algorithm}"'
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
    def public_key(self) -> PublicKey:
        """The half that receivers verify with."""
        return self._key.public_key()

    def public_pem(self) -> str:
        """Return the public half as PEM, ready to hand to a receiver."""
        return self.public_key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ).decode()

    def public_jwk(self) -> dict[str, str]:
        """Return the public half as a JWK (RFC 7517, RFC 8037), for a JWKS that receivers fetch."""
        public = self.public_key
        known = {"kid": self.key_id, "use": "sig"}
        if isinstance(public, Ed25519PublicKey):
            return {"kty": "OKP", "crv": "Ed25519", "x": _base64url(public.public_bytes_raw()), **known}
        numbers = public.public_numbers()
        x, y = (_base64url(number.to_bytes(32, "big")) for number in (numbers.x, numbers.y))
        return {"kty": "EC", "crv": "P-256", "x": x, "y": y, **known}

    def sign(self, request: SigningRequest, *, created: int, nonce: str) -> list[tuple[str, str]]:
        """Return ``Content-Digest``, ``Idempotency-Key``, ``Signature-Input`` and ``Signature``."""
        digest = content_digest(request.body)
        key_header = sf_string(request.idempotency_key)
        values = {
            "@method": "POST",
            "@target-uri": request.target_uri,
            "@authority": request.authority,
            "content-type": request.content_type,
            "content-digest": digest,
            "idempotency-key": key_header,
        }
        fields = [
            *((name, values[name]) for name in self._covered),
            *sorted((name.lower(), value) for name, value in request.headers),
        ]
        covered = " ".join(f'"{name}"' for name, _ in fields)
        window = f";created={created};expires={created + self._window};nonce={sf_string(nonce)}"
        parameters = f"({covered}){window}{self._tail}"
        base = "".join(f'"{name}": {value}\n' for name, value in fields)
        base += f'"@signature-params": {parameters}'
        signature = base64.b64encode(self._sign(base.encode("ascii"))).decode()
        return [
            ("Content-Digest", digest),
            ("Idempotency-Key", key_header),
            ("Signature-Input", f"{self._label}={parameters}"),
            ("Signature", f"{self._label}=:{signature}:"),
        ]


def _algorithm(key: PrivateKey) -> tuple[str, Callable[[bytes], bytes]]:
    """Return the name of a key's algorithm (RFC 9421, section 3.3) and the function that signs with it."""
    if isinstance(key, Ed25519PrivateKey):
        return "ed25519", key.sign
    ecdsa = ECDSA(SHA256())

    def sign(base: bytes) -> bytes:
        r, s = decode_dss_signature(key.sign(base, ecdsa))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")

    return "ecdsa-p256-sha256", sign


def _read(key: object) -> PrivateKey:
    found: object = key
    try:
        if isinstance(key, str | bytes):
            text = key if isinstance(key, bytes) else key.encode()
            if text.lstrip().startswith(b"{"):
                found = _from_jwk(json.loads(text))
            else:
                found = serialization.load_pem_private_key(text, password=None)
        elif isinstance(key, Mapping):
            found = _from_jwk(key)
    except (ValueError, TypeError, KeyError):
        pass
    if isinstance(found, Ed25519PrivateKey) or (
        isinstance(found, EllipticCurvePrivateKey) and isinstance(found.curve, SECP256R1)
    ):
        return found
    raise ConfigurationError(
        "HttpMessageSigner: key: expected an ed25519 or P-256 private key, its unencrypted PKCS #8 PEM, or its JWK"
    )


def _from_jwk(jwk: Mapping[str, Any]) -> PrivateKey | None:
    private = base64.urlsafe_b64decode(f"{jwk['d']}==")
    match jwk["kty"], jwk["crv"]:
        case "OKP", "Ed25519":
            return Ed25519PrivateKey.from_private_bytes(private)
        case "EC", "P-256":
            return derive_private_key(int.from_bytes(private, "big"), SECP256R1())
    return None


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
