"""What operators do to messages: which rows move, which stay, in which chunks, and what they are told."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from notification_outbox import leases, operations
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import SETTLED, Outcome, Verdict
from notification_outbox.models import OutboxMessage
from tests.tables import SHAPES, make

pytestmark = pytest.mark.django_db(transaction=True)


def row(row_id: int) -> OutboxMessage:
    return OutboxMessage.objects.get(id=row_id)


def claim() -> list[Any]:
    return leases.claim("default", limit=50, budget=10**9, worker="w", lease=60, using="default").claims


def test_only_what_is_not_settled_can_be_quarantined() -> None:
    """Whoever holds it, with the reason ``operator`` and no lease left; a requeue brings it back."""
    ids = {state: make(state) for state in SHAPES}
    assert operations.quarantine(ids.values()) == 3
    for state in ("pending", "in_flight", "blocked"):
        found = row(ids[state])
        assert (found.state, found.quarantine_reason) == ("quarantined", "operator")
        assert (found.blocked_by, found.lease_token, found.leased_by) == ("", None, "")
    assert {row(ids[state]).state for state in SETTLED} == set(SETTLED)
    assert row(ids["quarantined"]).quarantine_reason == "gone"
    assert operations.requeue([ids["in_flight"]]) == 1


def test_a_success_of_a_quarantined_message_is_still_a_fact() -> None:
    """The worker that had it in hand cannot fail it any more, but what it delivered was delivered."""
    make()
    make()
    first, second = claim()
    assert operations.quarantine([first.id, second.id]) == 2
    failed = Settlement(first, Outcome(Verdict.RETRY, error="timeout"))
    assert leases.settle([failed, Settlement(second, Outcome(Verdict.DELIVERED))], using="default") == [
        failed
    ]
    assert [row(first.id).state, row(second.id).state] == ["quarantined", "delivered"]


def test_a_message_that_waits_is_sent_now() -> None:
    """Scheduled or waiting for its next attempt: due at once; how long it is tried stays as it was."""
    later = make(available_at=Now() + timedelta(hours=1), due_at=Now() + timedelta(hours=1))
    until = row(later).retry_until
    assert claim() == []
    assert operations.send_now([later]) == 1
    assert row(later).retry_until == until
    assert [claim.id for claim in claim()] == [later]
    assert row(later).due_at <= row(later).updated_at


def test_sending_now_never_puts_a_message_back_in_the_queue() -> None:
    """What is due keeps its place, what is blocked, held or settled stays as it is."""
    ids = [make(state) for state in SHAPES]
    due = list(OutboxMessage.objects.values_list("id", "due_at", "available_at"))
    assert operations.send_now(ids) == 0
    assert list(OutboxMessage.objects.values_list("id", "due_at", "available_at")) == due


def test_a_queryset_is_moved_in_chunks_and_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is committed as it goes; run again it does the rest, and nothing that the filter leaves out."""
    monkeypatch.setattr(operations, "CHUNK", 2)
    gone = [make("quarantined") for _ in range(5)]
    other = make("quarantined", quarantine_reason="rejected")
    dead = OutboxMessage.objects.filter(quarantine_reason="gone").order_by("-id")

    def interrupt(moved: int) -> None:
        if moved == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operations.requeue(dead, progress=interrupt)
    assert [row(row_id).state for row_id in gone] == ["pending"] * 4 + ["quarantined"]
    told: list[int] = []
    assert operations.requeue(dead, progress=told.append) == 1
    assert told == [1]
    assert row(other).state == "quarantined"


def test_a_message_that_dies_again_meanwhile_is_not_requeued_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks go through the ids once, so an endpoint that still refuses does not keep a requeue running."""
    monkeypatch.setattr(operations, "CHUNK", 1)
    ids = [make("quarantined") for _ in range(3)]

    def die_again(moved: int) -> None:
        operations.quarantine(ids[:moved])
        OutboxMessage.objects.filter(state="quarantined").update(quarantine_reason="gone")

    dead = OutboxMessage.objects.filter(quarantine_reason="gone")
    assert operations.requeue(dead, progress=die_again) == 3
    assert set(OutboxMessage.objects.values_list("requeues", flat=True)) == {1}


def test_chunks_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks workers get a turn; one chunk waits for nothing."""
    pauses: list[float] = []
    monkeypatch.setattr(operations, "CHUNK", 2)
    monkeypatch.setattr(time, "sleep", pauses.append)
    ids = [make("quarantined") for _ in range(5)]
    operations.requeue(ids[:2], pace=0.5)
    assert pauses == []
    operations.requeue(OutboxMessage.objects.filter(id__in=ids), pace=0.5)
    assert pauses == [0.5, 0.5]


def test_a_slice_of_a_queryset_is_taken_as_it_is() -> None:
    """The first two by their own order, and no more."""
    ids = [make() for _ in range(4)]
    assert operations.cancel(OutboxMessage.objects.order_by("-id")[:2]) == 2
    assert [row(row_id).state for row_id in ids] == ["pending", "pending", "cancelled", "cancelled"]


def test_bodies_of_a_queryset_are_erased_where_settled() -> None:
    """The same rules as with ids."""
    mine, live = make("delivered", account_id="7"), make(account_id="7")
    other = make("delivered", account_id="8")
    assert operations.expunge(OutboxMessage.objects.filter(account_id="7")) == 1
    assert [row(row_id).sealed is None for row_id in (mine, live, other)] == [True, False, False]


def test_each_chunk_is_looked_up_by_id() -> None:
    """No OFFSET and no list of all ids: the next chunk begins after the last one's end."""
    for _ in range(3):
        make("quarantined")
    with CaptureQueriesContext(connection) as queries:
        operations.requeue(OutboxMessage.objects.filter(quarantine_reason="gone"))
    lookups = [q["sql"] for q in queries if "LIMIT 500" in q["sql"]]
    assert len(lookups) == 2
    assert not any("OFFSET" in sql for sql in lookups)
