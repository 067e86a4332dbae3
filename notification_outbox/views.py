"""Views that a project may route: the public keys its webhooks are signed with."""

from __future__ import annotations

from collections.abc import Iterator

from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

from . import conf
from .signing import HttpMessageSigner

MAX_AGE = 300


@require_safe
@cache_control(public=True, max_age=MAX_AGE)
def jwks(request: HttpRequest) -> JsonResponse:
    """Return the public keys of every ``HttpMessageSigner`` in ``PUBLISHERS`` as a JWK Set (RFC 7517, section 5).

    Those that a ``signer_resolver`` finds are not known here.
    """
    keys = {signer.key_id: signer.public_jwk() for signer in _signers()}
    return JsonResponse({"keys": list(keys.values())}, content_type="application/jwk-set+json")


def _signers() -> Iterator[HttpMessageSigner]:
    for publisher in conf.get().publishers.values():
        for signer in (publisher.options.get("signer"), *publisher.options.get("signers", ())):
            if isinstance(signer, HttpMessageSigner):
                yield signer
