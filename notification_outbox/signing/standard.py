"""Standard Webhooks signatures (standardwebhooks.com, version 1.0): HMAC-SHA256 (``v1``) and ed25519 (``v1a``)."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..exceptions import ConfigurationError
from .base import Signer, SigningRequest

SECRET, PRIVATE = "whsec_", "whsk_"
SECRET_BYTES = range(24, 65)


class StandardWebhooksSigner(Signer):
    """Signs with every one of ``secrets``, the current one first; receivers accept any. ``repr`` shows none.

    A secret is ``whsec_`` and the base64 of 24 to 64 random bytes, which the receiver shares, or ``whsk_`` and the
    base64 of an ed25519 seed (32 bytes, or 64 with the public half behind it). While one is rotated both sign.
    """

    def __init__(self, *, secrets: Sequence[str]) -> None:
        if isinstance(secrets, str) or not secrets:
            raise ConfigurationError(
                "StandardWebhooksSigner: secrets: expected a list, the current one first"
            )
        made = [_signature(place, secret) for place, secret in enumerate(secrets, start=1)]
        self._signatures = [signature for signature, _ in made]
        self.symmetric = any(symmetric for _, symmetric in made)

    def __repr__(self) -> str:
        return f"<StandardWebhooksSigner of {len(self._signatures)}>"

    def sign(self, request: SigningRequest, *, created: int, nonce: str) -> list[tuple[str, str]]:
        """Return ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature``; there is no place for a nonce."""
        signed = f"{request.message_id}.{created}.".encode("ascii") + request.body
        return [
            ("webhook-id", request.message_id),
            ("webhook-timestamp", str(created)),
            ("webhook-signature", " ".join(signature(signed) for signature in self._signatures)),
        ]


def _signature(place: int, secret: object) -> tuple[Callable[[bytes], str], bool]:
    """Return the function that signs with a secret, and whether receivers hold the secret too."""
    if isinstance(secret, str):
        if secret.startswith(SECRET) and len(key := _decoded(secret[len(SECRET) :])) in SECRET_BYTES:
            return lambda signed: f"v1,{_encoded(hmac.digest(key, signed, 'sha256'))}", True
        if secret.startswith(PRIVATE) and len(seed := _decoded(secret[len(PRIVATE) :])) in (32, 64):
            private = Ed25519PrivateKey.from_private_bytes(seed[:32])
            return lambda signed: f"v1a,{_encoded(private.sign(signed))}", False
    raise ConfigurationError(
        f"StandardWebhooksSigner: secret {place}: expected whsec_ and the base64 of 24 to 64 bytes, "
        "or whsk_ and that of an ed25519 seed"
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _encoded(signature: bytes) -> str:
    return base64.b64encode(signature).decode()
