"""Housekeeping: what is deleted and when, and that its failures are nobody else's."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.db.models.functions import Now

from notification_outbox import conf, enqueue, housekeeping, leases, operations
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from tests.processes import Outbox

pytestmark = pytest.mark.django_db(transaction=True)


def make(state: str, days_past: float) -> int:
    """Commit a message of this state whose time ended so many days ago, with one attempt as old."""
    with transaction.atomic():
        row_id = enqueue("t", {}, to="https://hooks.acme.com/").id
    ended = Now() - timedelta(days=days_past)
    rows = OutboxMessage.objects.filter(id=row_id)
    if state in ("pending", "in_flight"):
        rows.update(available_at=ended, retry_until=ended)
    else:
        reason = "rejected" if state == "quarantined" else ""
        rows.update(state=state, settled_at=Now(), quarantine_reason=reason, retry_until=ended)
    DeliveryAttempt.objects.create(
        message_id=row_id, number=1, started_at=ended, duration_ms=1, outcome="delivered"
    )
    return row_id


def bodies() -> set[int]:
    return set(OutboxMessage.objects.filter(sealed__isnull=False).values_list("id", flat=True))


def purge() -> str:
    out = io.StringIO()
    call_command("outbox_purge", stdout=out)
    return out.getvalue().strip()


@pytest.mark.parametrize(
    ("state", "days_past", "kept"),
    [
        ("delivered", 6.9, True),
        ("delivered", 7.1, False),
        ("cancelled", 7.1, False),
        ("quarantined", 7.1, True),
        ("expired", 89.9, True),
        ("expired", 90.1, False),
        ("quarantined", 90.1, False),
        ("pending", 400, True),
    ],
)
def test_settled_messages_are_kept_as_long_as_retention_says(
    state: str, days_past: float, kept: bool
) -> None:
    """Delivered ones a week after the end of their time, dead letters a quarter, live ones for ever."""
    row_id = make(state, days_past)
    purge()
    assert OutboxMessage.objects.filter(id=row_id).exists() is kept
    assert DeliveryAttempt.objects.exists() is (kept and days_past < 90)


def test_retention_can_be_set_and_a_dry_run_deletes_nothing(configure: Callable[..., None]) -> None:
    """The command counts what it would delete."""
    configure(RETENTION={"delivered": 0, "attempts": "3650d"})
    for _ in range(3):
        make("delivered", 0.1)
    out = io.StringIO()
    call_command("outbox_purge", "--dry-run", stdout=out)
    assert out.getvalue() == ("3 messages and 0 attempts would be deleted, 0 bodies would be erased\n")
    assert OutboxMessage.objects.count() == 3
    assert purge() == "3 messages and 0 attempts deleted, 0 bodies erased"
    assert purge() == "0 messages and 0 attempts deleted, 0 bodies erased"


def test_bodies_of_delivered_messages_can_be_kept_shorter_than_their_rows(
    configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``expunge_delivered`` counts from settling, for delivered messages only; unset, nothing is erased."""
    monkeypatch.setattr(operations, "CHUNK", 2)
    old = [make("delivered", 0) for _ in range(5)]
    others = [make(state, 0) for state in ("cancelled", "expired", "quarantined", "pending", "delivered")]
    OutboxMessage.objects.filter(id__in=[*old, *others[:3]]).update(settled_at=Now() - timedelta(hours=3))
    assert purge() == "0 messages and 0 attempts deleted, 0 bodies erased"
    configure(RETENTION={"expunge_delivered": "2h"})
    out = io.StringIO()
    call_command("outbox_purge", "--dry-run", stdout=out)
    assert "5 bodies would be erased" in out.getvalue()
    assert bodies() == {*old, *others}
    assert purge() == "0 messages and 0 attempts deleted, 5 bodies erased"
    assert bodies() == set(others)


def test_a_worker_erases_bodies_until_drained(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own deliveries' too, as soon as their time has come."""
    monkeypatch.setattr(housekeeping, "CHUNK", 2)
    monkeypatch.setattr(housekeeping, "BREATH", 0.0)
    monkeypatch.setattr(housekeeping, "EVERY", 0.02)
    for _ in range(5):
        make("delivered", 0)
    erased: list[int] = []
    expunge = leases.expunge_delivered

    def counted(**arguments: Any) -> int:
        erased.append(expunge(**arguments))
        return erased[-1]

    monkeypatch.setattr(leases, "expunge_delivered", counted)
    outbox.configure(root={"RETENTION": {"expunge_delivered": 0}}, BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 200 if received.target == "/first" or sum(erased) == 6 else 503
    outbox.enqueue(1, path="/first")
    (last,) = outbox.enqueue(1)
    outbox.work("empty")
    assert max(erased) == 2
    assert bodies() <= {last.id}
    assert OutboxMessage.objects.count() == 7


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.parametrize("work", [leases.purge, leases.purge_attempts, leases.expunge_delivered])
def test_two_purgers_never_wait_for_each_other(work: Callable[..., int]) -> None:
    """What one has locked is left to it: both do their share at the same time."""
    for _ in range(4):
        make("delivered", 100)
    OutboxMessage.objects.update(settled_at=Now() - timedelta(days=100))
    retention = conf.Retention(expunge_delivered=timedelta(days=1))
    shares = []

    def share() -> None:
        try:
            shares.append(work(retention=retention, limit=2, using="default"))
        finally:
            connections["default"].close()

    with transaction.atomic():
        share_here = work(retention=retention, limit=2, using="default")
        other = threading.Thread(target=share, daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()
    assert [share_here, *shares] == [2, 2]
    assert work(retention=retention, limit=2, using="default") == 0


def test_a_worker_purges_until_drained_in_chunks(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is old goes while messages are delivered."""
    monkeypatch.setattr(housekeeping, "CHUNK", 2)
    monkeypatch.setattr(housekeeping, "BREATH", 0.0)
    for _ in range(5):
        make("delivered", 10)
    outbox.enqueue(1)
    purged = threading.Event()

    def last_chunk(**arguments: Any) -> int:
        purged.set()
        return 0

    monkeypatch.setattr(leases, "purge_attempts", last_chunk)
    outbox.configure(BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 200 if purged.is_set() else 503
    outbox.work("empty")
    assert OutboxMessage.objects.count() == 1


def test_a_worker_without_purge_deletes_nothing(outbox: Outbox) -> None:
    """``--no-purge`` leaves it to others."""
    make("delivered", 10)
    outbox.enqueue(1)
    assert outbox.start("--once", "--no-purge").wait() == 0
    assert OutboxMessage.objects.count() == 2


def test_a_failing_purge_is_said_once_and_stops_nothing(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deliveries go on; the purge is tried again at every round."""
    tried = []

    def broken(**arguments: Any) -> int:
        tried.append(1)
        raise OperationalError("no")

    monkeypatch.setattr(leases, "purge", broken)
    monkeypatch.setattr(housekeeping, "EVERY", 0.02)
    outbox.configure(BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 503 if len(tried) < 4 else 200
    outbox.enqueue(3)
    with caplog.at_level(logging.INFO, "notification_outbox"):
        outbox.work("empty")
    assert outbox.states() == {"delivered": 3}
    assert len([record for record in caplog.records if "purge failed" in record.message]) == 1
