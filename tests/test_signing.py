"""Signatures: exactly the published vectors, and what an independent library accepts and refuses."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import http_message_signatures
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from notification_outbox.exceptions import ConfigurationError
from notification_outbox.signing import HttpMessageSigner, SigningRequest

VECTOR = json.loads((Path(__file__).parent / "cases/signature_default_profile.json").read_text())
KEY = serialization.load_der_private_key(base64.b64decode(VECTOR["private_key_pkcs8"]), None)
PEM = KEY.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
SIGNER = HttpMessageSigner(key=PEM, key_id="test-key-ed25519", tag="shop")
P256 = HttpMessageSigner(key=generate_private_key(SECP256R1()), key_id="test-key-ecc-p256", tag="shop")


def request(**changes: Any) -> SigningRequest:
    call: dict[str, Any] = {
        "target_uri": VECTOR["url"],
        "authority": "example.com",
        "content_type": VECTOR["content_type"],
        "body": VECTOR["body"].encode(),
        "message_id": VECTOR["message_id"],
        "idempotency_key": VECTOR["message_id"],
    }
    return SigningRequest(**(call | changes))


def test_the_default_profile_is_signed_exactly_as_the_vector() -> None:
    """Components, parameters and their order are those that two other implementations agreed on."""
    headers = dict(SIGNER.sign(request(), created=VECTOR["created"], nonce=VECTOR["nonce"]))
    assert headers == VECTOR["headers"]


class OneKey(http_message_signatures.HTTPSignatureKeyResolver):
    def __init__(self, signer: HttpMessageSigner) -> None:
        self.signer = signer

    def resolve_public_key(self, key_id: str) -> Any:
        assert key_id == self.signer.key_id
        return self.signer.public_key


def verify(headers: dict[str, str], *, url: str, body: bytes, signer: HttpMessageSigner = SIGNER) -> Any:
    """Verify with a library that shares no line with ours; return what it says was signed."""
    sent = SimpleNamespace(method="POST", url=url, headers=headers, body=body)
    known = http_message_signatures.algorithms
    verifier = http_message_signatures.HTTPMessageVerifier(
        signature_algorithm=known.ED25519 if signer is not P256 else known.ECDSA_P256_SHA256,
        key_resolver=OneKey(signer),
    )
    (found,) = verifier.verify(sent, max_age=timedelta(days=40_000))
    return found


TEXT = st.text("abcdefghijklmnopqrstuvwxyzABC0123456789-._~/%2F+;=&:", max_size=30)


@pytest.mark.parametrize("signer", [SIGNER, P256], ids=["ed25519", "p256"])
@settings(max_examples=500)
@given(
    path=TEXT,
    query=TEXT,
    body=st.binary(max_size=200),
    value=st.text("abc XYZ09;,\"'", min_size=1, max_size=20),
)
def test_an_independent_library_verifies_what_we_sign(
    signer: HttpMessageSigner, path: str, query: str, body: bytes, value: str
) -> None:
    """For any target, body and caller's header the signature verifies and covers them all."""
    value = f"v{value}v"
    url = f"https://example.com/{path.replace('%', '%25')}?x={query.replace('%', '%25')}"
    signing = request(target_uri=url, body=body, headers=(("X-Shop", value), ("Accept-Language", "de")))
    headers = {"Content-Type": signing.content_type, **dict(signing.headers)}
    headers |= dict(signer.sign(signing, created=int(datetime.now().timestamp()), nonce="n"))  # noqa: DTZ005
    found = verify(headers, url=url, body=body, signer=signer)
    assert list(found.covered_components) == [
        '"@method"',
        '"@target-uri"',
        '"@authority"',
        '"content-type"',
        '"content-digest"',
        '"idempotency-key"',
        '"accept-language"',
        '"x-shop"',
        '"@signature-params"',
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"url": "https://example.com/hooks?x=/"},
        {"url": "https://example.org/hooks?x=%2F"},
        {"content-type": "text/plain"},
        {"Content-Digest": "sha-256=:AAAA:"},
        {"Idempotency-Key": '"msg_other"'},
    ],
)
def test_any_change_of_a_covered_part_is_refused(change: dict[str, str]) -> None:
    """Nothing that the signature covers can be altered on the way."""
    headers = {"content-type": VECTOR["content_type"]}
    headers |= dict(SIGNER.sign(request(), created=int(datetime.now().timestamp()), nonce="n"))  # noqa: DTZ005
    url = change.pop("url", VECTOR["url"])
    verify(headers, url=VECTOR["url"], body=b"")
    with pytest.raises(http_message_signatures.InvalidSignature):
        verify(headers | change, url=url, body=b"")


def test_a_key_derived_from_a_secret_is_stable_and_named_by_its_fingerprint() -> None:
    """The same secret gives the same pair; another gives another."""
    first, again, other = (HttpMessageSigner.from_secret(secret) for secret in ("a" * 50, "a" * 50, "b" * 50))
    assert (first.public_pem(), first.key_id) == (again.public_pem(), again.key_id)
    assert first.key_id != other.key_id
    assert first.public_pem().startswith("-----BEGIN PUBLIC KEY-----")


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": "not a key"},
        {"key": b""},
        {"key": 7},
        {"key": generate_private_key(SECP384R1())},
        {"key": {"kty": "OKP", "crv": "X25519", "d": "AAAA"}},
        {"key": {"kty": "OKP", "crv": "Ed25519", "d": "not a key"}},
        {"key": '{"kty": "EC"}'},
        {"label": "Sig 1"},
        {"window": 0},
        {"window": 1.5},
        {"covered": "@method"},
        {"covered": ["@method", "@target-uri"]},
        {"covered": ["@target-uri", "content-digest", "date"]},
        {"key_id": ""},
        {"key_id": "ké"},
        {"tag": "a\nb"},
    ],
)
def test_bad_keys_and_names_are_refused_without_showing_them(arguments: dict[str, Any]) -> None:
    """The error says what is expected and repeats nothing."""
    good: dict[str, Any] = {"key": Ed25519PrivateKey.generate(), "key_id": "k"}
    with pytest.raises(ConfigurationError, match="expected") as caught:
        HttpMessageSigner(**(good | arguments))
    assert caught.value.__context__ is None
    assert "not a key" not in str(caught.value)


def test_the_repr_shows_no_key() -> None:
    """A signer may end in a log with the settings."""
    assert repr(SIGNER) == "<HttpMessageSigner 'test-key-ed25519'>"


def test_p256_writes_the_parameters_of_the_vector() -> None:
    """Its signatures differ each time, so what is compared is what they are over."""
    headers = dict(P256.sign(request(), created=VECTOR["created"], nonce=VECTOR["nonce"]))
    wanted = VECTOR["headers"]["Signature-Input"]
    wanted = wanted.replace("test-key-ed25519", "test-key-ecc-p256").replace(
        '"ed25519"', '"ecdsa-p256-sha256"'
    )
    assert headers["Signature-Input"] == wanted
    assert len(base64.b64decode(headers["Signature"].removeprefix("sig1=:").removesuffix(":"))) == 64


def test_label_window_and_components_are_the_projects() -> None:
    """In the order given; what is not covered is sent all the same."""
    signer = HttpMessageSigner(
        key=PEM, key_id="k", label="shop", window=60, covered=["content-digest", "@target-uri"]
    )
    headers = dict(signer.sign(request(headers=(("X-Shop", "1"),)), created=1000, nonce="n"))
    assert headers["Signature-Input"] == (
        'shop=("content-digest" "@target-uri" "x-shop");created=1000;expires=1060;nonce="n";keyid="k";alg="ed25519"'
    )
    assert headers["Signature"].startswith("shop=:")
    assert "Idempotency-Key" in headers


def test_keys_as_jwk() -> None:
    """The pair of RFC 8037, appendix A.1, and one of P-256, there and back."""
    jwk = {
        "kty": "OKP",
        "crv": "Ed25519",
        "d": "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A",
        "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
    }
    for key in (jwk, json.dumps(jwk), json.dumps(jwk).encode()):
        signer = HttpMessageSigner(key=key, key_id="k")
        assert signer.public_jwk() == {
            "kty": "OKP",
            "crv": "Ed25519",
            "x": jwk["x"],
            "kid": "k",
            "use": "sig",
        }
    number = P256._key.private_numbers().private_value  # type: ignore[union-attr]
    private = base64.urlsafe_b64encode(number.to_bytes(32, "big")).rstrip(b"=").decode()
    again = HttpMessageSigner(key={**P256.public_jwk(), "d": private}, key_id=P256.key_id)
    assert again.public_pem() == P256.public_pem()
