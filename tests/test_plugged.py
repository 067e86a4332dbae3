"""A transport of the project's own choice in place of the guarded one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.db import transaction

from notification_outbox import conf, enqueue
from notification_outbox.exceptions import ConfigurationError
from notification_outbox.models import OutboxMessage
from notification_outbox.publishers import WebhookPublisher
from notification_outbox.signing import Signer, SigningRequest
from notification_outbox.worker import Worker
from tests.settings import SIGNER

MARK = "s3cr3t"
URL = f"https://hooks.acme.com/{MARK}?x=%7E"


def deliver(
    configure: Callable[..., None],
    handler: Callable[[httpx.Request], Any],
    signer: Signer = SIGNER,
    **alias: Any,
) -> OutboxMessage:
    """Enqueue one message, have a worker deliver it through ``handler``; return its row."""
    options = {"signer": signer, "transport": httpx.MockTransport(handler)}
    configure(PUBLISHERS={"default": {"OPTIONS": options, **alias}})
    with transaction.atomic():
        receipt = enqueue("order.paid", {"n": 1}, to=URL, headers={"X-Shop": "1"})
    asyncio.run(Worker(conf.get(), until="idle").run())
    return OutboxMessage.objects.get(id=receipt.id)


@pytest.mark.django_db(transaction=True)
def test_the_chosen_transport_sends_what_ours_would(configure: Callable[..., None]) -> None:
    """Same target, headers, body and signature; the answer means the same."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(202)

    row = deliver(configure, answer)
    assert (row.state, row.last_status) == ("delivered", 202)
    (request,) = seen
    assert request.url.raw_path == f"/{MARK}?x=%7E".encode()
    assert request.headers["host"] == "hooks.acme.com"
    assert request.headers["x-shop"] == "1"
    assert request.headers["content-type"] == "application/json"
    assert "signature-input" in request.headers
    assert request.content == b'{"n":1}'


def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (raising(httpx.ConnectError(MARK)), "unreachable"),
        (raising(httpx.ReadTimeout(MARK)), "timeout"),
        (raising(httpx.ReadError(MARK)), "reset"),
        (raising(httpx.RemoteProtocolError(MARK)), "protocol"),
        (raising(KeyError(MARK)), "unexpected"),
        (lambda request: httpx.Response(999), "protocol"),
        (lambda request: httpx.Response(503, headers={"Retry-After": "600"}), "http_503"),
        (never, "timeout"),
    ],
)
def test_failures_mean_what_ours_mean(
    configure: Callable[..., None], handler: Any, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One code each, and none of their text."""
    row = deliver(configure, handler, ATTEMPT_TIMEOUT=0.5, LEASE=3)
    assert (row.state, row.last_error) == ("pending", code)
    assert MARK not in caplog.text
    waits = (row.available_at - row.updated_at).total_seconds()
    assert (waits >= 600) is (code == "http_503")


class Broken(Signer):
    """A signer whose key cannot be read just now."""

    def sign(self, request: SigningRequest, *, created: int, nonce: str) -> list[tuple[str, str]]:
        raise OSError(MARK)


@pytest.mark.django_db(transaction=True)
def test_a_signer_that_fails_burns_no_attempt(
    configure: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is our fault: nothing is sent, and the message waits."""
    row = deliver(configure, raising(AssertionError()), signer=Broken())
    assert (row.state, row.attempts, row.last_error) == ("pending", 0, "local_signer_OSError")
    assert MARK not in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": object()}, "expected an httpx.AsyncBaseTransport"),
        ({"transport": httpx.MockTransport(never), "ca_file": "x.pem"}, "its own ca_file"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    """A file that would not be read is not taken."""
    with pytest.raises(ConfigurationError, match=words):
        WebhookPublisher(signer=SIGNER, **options)
