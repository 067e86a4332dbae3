"""A signer for each tenant, found anew on every attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.db import transaction

from notification_outbox import conf, enqueue
from notification_outbox.exceptions import (
    ConfigurationError,
    ScopePermanentlyUnknown,
    ScopeTransientlyUnavailable,
)
from notification_outbox.models import OutboxMessage
from notification_outbox.publishers import WebhookPublisher
from notification_outbox.signing import HttpMessageSigner, Scope
from notification_outbox.worker import Worker

MARK = "s3cr3t"
SIGNERS = {name: HttpMessageSigner.from_secret(name, key_id=name) for name in ("first", "second")}
asked: list[Scope] = []


def resolve(scope: Scope) -> Any:
    """Return the signer of a scope, or do what its name says."""
    asked.append(scope)
    match scope.signing_scope_id:
        case "unknown":
            raise ScopePermanentlyUnknown
        case "away":
            raise ScopeTransientlyUnavailable
        case "breaks":
            raise KeyError(MARK)
        case "mistaken":
            return MARK
    return SIGNERS[scope.signing_scope_id or "first"]


async def resolve_slowly(scope: Scope) -> Any:
    if scope.signing_scope_id == "never":
        await asyncio.Event().wait()
    return resolve(scope)


def deliver(
    configure: Callable[..., None], resolver: object, scopes: list[str | None], **alias: Any
) -> tuple[list[OutboxMessage], list[httpx.Request]]:
    """Enqueue one message a scope and have them delivered; return their rows and what was sent."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    options = {"transport": httpx.MockTransport(answer), "signer_resolver": resolver}
    configure(PUBLISHERS={"default": {"OPTIONS": options, **alias}})
    asked.clear()
    with transaction.atomic():
        for scope in scopes:
            enqueue("t", {}, to="https://hooks.acme.com/", signing_scope_id=scope, account_id="7")
    asyncio.run(Worker(conf.get(), until="idle").run())
    return list(OutboxMessage.objects.order_by("id")), seen


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("resolver", [resolve, resolve_slowly, "tests.test_signer_resolver.resolve"])
def test_each_scope_has_its_own_signer(configure: Callable[..., None], resolver: object) -> None:
    """Asked with scope, account, caller and host; sync, async or by its path."""
    rows, sent = deliver(configure, resolver, ["first", "second", None])
    assert {row.state for row in rows} == {"delivered"}
    keys = sorted(request.headers["signature-input"].split('keyid="')[1].split('"')[0] for request in sent)
    assert keys == ["first", "first", "second"]
    assert sorted(asked, key=repr) == sorted(
        (Scope(scope, "7", "default", "hooks.acme.com") for scope in ("first", "second", None)), key=repr
    )


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("scope", "state", "word"),
    [
        ("unknown", "quarantined", "scope_unknown"),
        ("away", "pending", "local_signer_ScopeTransientlyUnavailable"),
        ("breaks", "pending", "local_signer_KeyError"),
        ("mistaken", "pending", "local_signer_type_str"),
    ],
)
def test_a_scope_without_a_signer_is_our_affair(
    configure: Callable[..., None], scope: str, state: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For good: quarantined. For now, or by mistake: it waits and no attempt is burned. Nothing is sent."""
    (row,), sent = deliver(configure, resolve, [scope])
    assert (row.state, row.last_error) == (state, word)
    assert row.attempts == (1 if state == "quarantined" else 0)
    assert not sent
    assert MARK not in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_resolver_that_does_not_answer_is_bounded(configure: Callable[..., None]) -> None:
    """By the attempt's own time; the others go on."""
    rows, sent = deliver(configure, resolve_slowly, ["never", "first"], ATTEMPT_TIMEOUT=0.3, LEASE=3)
    assert [row.state for row in rows] == ["pending", "delivered"]
    assert rows[0].last_error == "timeout"
    assert len(sent) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"signer_resolver": "nowhere.at_all"},
        {"signer_resolver": 5},
        {"signer_resolver": resolve, "unsigned": True},
        {"signer_resolver": resolve, "signer": SIGNERS["first"]},
    ],
)
def test_a_resolver_is_a_callable_and_alone(options: dict[str, Any]) -> None:
    """Or the settings are refused."""
    with pytest.raises(ConfigurationError, match="signer_resolver"):
        WebhookPublisher(**options)
