"""Standard Webhooks: exactly the published vectors, what the reference library accepts, who may share a secret."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import standardwebhooks
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.core.checks import run_checks
from django.db import transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from notification_outbox import conf, enqueue
from notification_outbox.exceptions import ConfigurationError, InvalidMessage
from notification_outbox.publishers import WebhookPublisher
from notification_outbox.signing import HttpMessageSigner, Signer, SigningRequest, StandardWebhooksSigner
from notification_outbox.worker import Worker

CASES = json.loads((Path(__file__).parent / "cases" / "standard_webhooks.json").read_text(encoding="utf-8"))
OLD, NEW = (f"whsec_{base64.b64encode(letter * 32).decode()}" for letter in (b"o", b"n"))
MARK = "s3cr3t"


def request(body: bytes) -> SigningRequest:
    return SigningRequest(
        target_uri="https://hooks.acme.com/",
        authority="hooks.acme.com",
        content_type="application/json",
        body=body,
        message_id=CASES["id"],
        idempotency_key="k",
    )


def signed(signer: Signer, body: bytes, created: int = CASES["timestamp"]) -> dict[str, str]:
    return dict(signer.sign(request(body), created=created, nonce="n"))


@pytest.mark.parametrize("case", CASES["cases"], ids=["ascii", "unicode"])
def test_v1_is_exactly_the_vector(case: dict[str, str]) -> None:
    """HMAC over id, timestamp and the raw bytes of the body."""
    headers = signed(StandardWebhooksSigner(secrets=[CASES["secret"]]), case["body"].encode())
    assert headers == {
        "webhook-id": CASES["id"],
        "webhook-timestamp": str(CASES["timestamp"]),
        "webhook-signature": f"v1,{case['v1']}",
    }


@pytest.mark.parametrize("half", [slice(None), slice(32)])
def test_v1a_is_exactly_the_vector(half: slice) -> None:
    """The key's seed is enough; with the public half behind it the same comes out."""
    known = CASES["ed25519"]
    key = base64.b64encode(base64.b64decode(known["secret"].removeprefix("whsk_"))[half]).decode()
    headers = signed(StandardWebhooksSigner(secrets=[f"whsk_{key}"]), known["body"].encode())
    assert headers["webhook-signature"] == f"v1a,{known['v1a']}"
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(known["public"]))
    signature = base64.b64decode(known["v1a"])
    with pytest.raises(InvalidSignature):
        public.verify(signature, f"{CASES['id']}.{CASES['timestamp']}.x".encode())


@settings(max_examples=500)
@given(body=st.text(max_size=200))
def test_the_reference_library_verifies_what_we_sign(body: str) -> None:
    """For any body; and refuses it when one byte is another."""
    body = json.dumps({"text": body}, ensure_ascii=False)
    headers = signed(StandardWebhooksSigner(secrets=[NEW]), body.encode(), int(datetime.now(UTC).timestamp()))
    receiver = standardwebhooks.Webhook(NEW)
    receiver.verify(body.encode(), headers)
    for changed in (
        {"body": body.encode()[:-1] + b" "},
        {"webhook-id": "msg_other"},
        {"webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)},
    ):
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            receiver.verify(changed.pop("body", body.encode()), headers | changed)  # type: ignore[arg-type]


def test_a_secret_is_rotated_without_a_gap() -> None:
    """Old alone, then new and old, then new alone: who knows only the old, only the new or both accepts all along."""
    now = int(datetime.now(UTC).timestamp())
    rollover = [[OLD], [OLD, NEW], [NEW, OLD], [NEW]]
    knows: dict[str, list[str]] = {"old": [OLD], "new": [NEW], "both": [OLD, NEW]}
    accepted: dict[str, list[bool]] = {who: [] for who in knows}
    for secrets in rollover:
        headers = signed(StandardWebhooksSigner(secrets=secrets), b"{}", now)
        assert len(headers["webhook-signature"].split(" ")) == len(secrets)
        for who, keys in knows.items():
            accepted[who].append(any(_verifies(key, headers) for key in keys))
    assert accepted == {
        "old": [True, True, True, False],
        "new": [False, True, True, True],
        "both": [True, True, True, True],
    }


def _verifies(key: str, headers: dict[str, str]) -> bool:
    try:
        standardwebhooks.Webhook(key).verify(b"{}", headers)
    except standardwebhooks.WebhookVerificationError:
        return False
    return True


@pytest.mark.parametrize(
    "secrets",
    [[], "whsec_AAAA", ["whsec_"], [NEW, MARK], ["whsec_!!!!"], ["whsec_AAAA"], ["whsk_AAAA"], [None], [5]],
)
def test_what_is_no_secret_is_refused_without_repeating_it(secrets: Any) -> None:
    """Its place is named, the secret is not."""
    with pytest.raises(ConfigurationError, match="StandardWebhooksSigner: secret") as caught:
        StandardWebhooksSigner(secrets=secrets)
    assert MARK not in str(caught.value)
    assert caught.value.__context__ is None


def test_no_secret_is_shown() -> None:
    """Not by repr, whatever is in it."""
    assert repr(StandardWebhooksSigner(secrets=[OLD, NEW])) == "<StandardWebhooksSigner of 2>"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of"),
        ({"unsigned": True, "signer": HttpMessageSigner.from_secret("x")}, "exactly one of"),
        (
            {
                "signer": HttpMessageSigner.from_secret("x"),
                "signers": [StandardWebhooksSigner(secrets=[NEW])],
            },
            "exactly one of",
        ),
        ({"signer": "key"}, "expected a Signer"),
        ({"signers": ["key"]}, "expected a Signer"),
        # an iterator would sign for whoever builds the publisher first
        ({"signers": iter([HttpMessageSigner.from_secret("x")])}, "expected a list"),
        ({"signers": [HttpMessageSigner.from_secret("x"), HttpMessageSigner.from_secret("y")]}, "one kind"),
        ({"unsigned": True, "wire_key": "body"}, "'wire_key'"),
    ],
)
def test_who_signs_is_said_once(options: dict[str, Any], words: str) -> None:
    """By one of three options, and by signers that do not write each other's headers."""
    with pytest.raises(ConfigurationError, match=words):
        WebhookPublisher(**options)


def deliver(configure: Callable[..., None], **options: Any) -> httpx.Headers:
    """Have one message delivered to a mock; return the headers that came."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    configure(PUBLISHERS={"default": {"OPTIONS": {"transport": httpx.MockTransport(answer), **options}}})
    with transaction.atomic():
        enqueue("order.paid", {"n": 1}, to="https://hooks.acme.com/", idempotency_key="order-7")
    asyncio.run(Worker(conf.get(), until="idle").run())
    (request,) = seen
    return request.headers


@pytest.mark.django_db(transaction=True)
def test_both_kinds_on_one_request(configure: Callable[..., None]) -> None:
    """A receiver checks whichever it knows."""
    both = [HttpMessageSigner.from_secret("x"), StandardWebhooksSigner(secrets=[NEW])]
    headers = deliver(configure, signers=both, allow_hosts=["hooks.acme.com"])
    assert {"signature", "signature-input", "content-digest", "webhook-id", "webhook-signature"} <= set(
        headers
    )
    assert headers["idempotency-key"] == f'"{headers["webhook-id"]}"'
    standardwebhooks.Webhook(NEW).verify(b'{"n":1}', dict(headers))


@pytest.mark.django_db(transaction=True)
def test_nobody_signs_where_that_was_said(configure: Callable[..., None]) -> None:
    """And a deploy check says so."""
    headers = deliver(configure, unsigned=True)
    assert not {"signature", "webhook-signature"} & set(headers)
    said = [str(found.msg) for found in run_checks(include_deployment_checks=True)]
    assert any("unsigned=True" in sentence for sentence in said)


@pytest.mark.django_db(transaction=True)
def test_the_callers_key_goes_on_the_wire_where_asked(configure: Callable[..., None]) -> None:
    """As a structured-field string; one that no header can hold is refused at enqueue."""
    signer = HttpMessageSigner.from_secret("x")
    assert deliver(configure, signer=signer, wire_key="key")["idempotency-key"] == '"order-7"'
    with pytest.raises(InvalidMessage, match="idempotency_key"), transaction.atomic():
        enqueue("t", {}, to="https://hooks.acme.com/", idempotency_key="bücher")


def test_one_symmetric_secret_for_every_receiver_is_an_error(configure: Callable[..., None]) -> None:
    """Each could sign to the others; named receivers share it knowingly, and keys of two halves are safe."""
    shared, asymmetric = (
        StandardWebhooksSigner(secrets=[NEW]),
        StandardWebhooksSigner(secrets=[CASES["ed25519"]["secret"]]),
    )
    configure(PUBLISHERS={"default": {"OPTIONS": {"signer": shared}}})
    assert any("symmetric" in str(found.msg) for found in run_checks())
    for options in ({"signer": shared, "allow_hosts": ["partner.acme.com"]}, {"signer": asymmetric}):
        configure(PUBLISHERS={"default": {"OPTIONS": options}})
        assert not any("symmetric" in str(found.msg) for found in run_checks())
