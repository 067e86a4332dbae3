"""Who sent this request? Answered with libraries that share no code with the sender.

Checks an RFC 9421 signature made by ed25519 and the RFC 9530 digest it covers, a Standard Webhooks signature, or
both. What must be covered, which keys are known and the origin the request was addressed to come from the settings,
never from the request.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest
from http_message_signatures import (
    HTTPMessageVerifier,
    HTTPSignatureKeyResolver,
    InvalidSignature,
    algorithms,
)
from standardwebhooks import Webhook, WebhookVerificationError

COVERED = {"@method", "@target-uri", "@authority", "content-type", "content-digest", "idempotency-key"}
TAG = "shop"
MAX_AGE = timedelta(minutes=5)
MESSAGE_ID = re.compile(r'"(msg_[0-9a-f]{32})"')  # an RFC 8941 string


class Unauthenticated(Exception):
    """The request is not what a known sender signed. Carries no detail: a forger learns nothing."""


class Authenticated(NamedTuple):
    """What the signature proves: the sender's key and the id of its message."""

    sender: str
    message_id: str


class SignedRequest(NamedTuple):
    """The request as the library wants to see it."""

    method: str
    url: str
    headers: Mapping[str, str]


class TrustedKeys(HTTPSignatureKeyResolver):
    """The public keys of the settings; an unknown key id raises, which the library turns into a refusal."""

    def resolve_public_key(self, key_id: str) -> object:
        return settings.WAREHOUSE_TRUSTS[key_id]

    def resolve_private_key(self, key_id: str) -> object:
        raise LookupError("a receiver signs nothing")


def authenticate(request: HttpRequest) -> Authenticated:
    """Return who sent the request, or raise ``Unauthenticated``. Whatever the settings ask for must hold."""
    proofs = [CHECKS[kind](request) for kind in WANTED[settings.WAREHOUSE_SIGNATURES]]
    if len({proof.message_id for proof in proofs}) != 1:
        raise Unauthenticated
    return proofs[0]


def check_standard_webhooks(request: HttpRequest) -> Authenticated:
    """Return what a Standard Webhooks signature under the shared secret proves, or raise ``Unauthenticated``."""
    try:
        Webhook(settings.WAREHOUSE_SHARED_SECRET).verify(request.body, dict(request.headers.items()))
    except (WebhookVerificationError, ValueError):
        raise Unauthenticated from None
    # signed like the body, so it may be remembered by
    return Authenticated("shop-demo", request.headers["webhook-id"])


def check_rfc9421(request: HttpRequest) -> Authenticated:
    """Return what an HTTP message signature proves, or raise ``Unauthenticated``."""
    signed = SignedRequest(request.method or "", external_url(request), request.headers)
    verifier = HTTPMessageVerifier(signature_algorithm=algorithms.ED25519, key_resolver=TrustedKeys())
    try:
        results = verifier.verify(signed, max_age=MAX_AGE, expect_tag=TAG)
    except InvalidSignature:
        raise Unauthenticated from None
    if len(results) != 1 or "expires" not in results[0].parameters:
        raise Unauthenticated
    covered = {name.strip('"'): value for name, value in results[0].covered_components.items()}
    if not covered.keys() >= COVERED or not _digest_matches(covered["content-digest"], request.body):
        raise Unauthenticated
    message_id = MESSAGE_ID.fullmatch(covered["idempotency-key"])
    if not message_id:
        raise Unauthenticated
    return Authenticated(str(results[0].parameters["keyid"]), message_id[1])


CHECKS = {"rfc9421": check_rfc9421, "standard": check_standard_webhooks}
WANTED = {"rfc9421": ["rfc9421"], "standard": ["standard"], "both": ["rfc9421", "standard"]}


def external_url(request: HttpRequest) -> str:
    """Return the URL the sender used: our configured origin and the target exactly as it came.

    ``build_absolute_uri()`` would decode and encode the path again and so refuse honest signatures.
    """
    if not isinstance(request, ASGIRequest):
        raise TypeError("the warehouse needs the raw request target: serve it by ASGI")
    query = request.scope["query_string"]
    target = request.scope["raw_path"] + (b"?" + query if query else b"")
    return settings.WAREHOUSE_ORIGIN + target.decode("ascii")


def _digest_matches(header: str, body: bytes) -> bool:
    expected = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return f"sha-256=:{expected}:" in [member.strip() for member in header.split(",")]
