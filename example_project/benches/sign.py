"""The cost of signing a request, against the bare signature."""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from notification_outbox.signing import HttpMessageSigner, SigningRequest

from .measuring import Bar, Result, medians

SIGNATURES = 3_000
REQUEST = SigningRequest(
    target_uri="https://hooks.example.com/hooks?x=1",
    authority="hooks.example.com",
    content_type="application/json",
    body=b'{"filling":"' + b"x" * 1000 + b'"}',
    message_id="msg_0190f5b2c3d48e7f9a0b1c2d3e4f5061",
    idempotency_key="msg_0190f5b2c3d48e7f9a0b1c2d3e4f5061",
)
# as long as the signature base of this request
BASE = b"x" * 480


def bench_sign() -> Result:
    """CPU of HttpMessageSigner.sign() for a 1 KB body, against cryptography's call alone, for both key types."""
    edwards, curve, ecdsa = Ed25519PrivateKey.generate(), generate_private_key(SECP256R1()), ECDSA(SHA256())
    signers = {"ed25519": edwards, "p256": curve}
    bare = {"ed25519": lambda: edwards.sign(BASE), "p256": lambda: curve.sign(BASE, ecdsa)}

    def repeated(sign: Callable[[], object]) -> Callable[[], None]:
        def play() -> None:
            for _ in range(SIGNATURES):
                sign()

        return play

    def ours(name: str) -> Callable[[], object]:
        signer = HttpMessageSigner(key=signers[name], key_id="bench")
        return lambda: signer.sign(REQUEST, created=1_700_000_000, nonce="4uI0mZlGd1w9S2Yb0eQ5xA")

    spent = medians(
        {name: repeated(sign) for name, sign in bare.items()}
        | {f"our {name}": repeated(ours(name)) for name in signers}
    )
    return Result(
        ratios={f"{name}/bare": spent[f"our {name}"] / spent[name] for name in signers},
        bars={f"{name}/bare": Bar("at most", 2.0) for name in signers},
    )
