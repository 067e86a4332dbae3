"""The movers, on every database: who may move a row, what a stale worker can still do, what it is told."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from django.db import close_old_connections, connection, connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from notification_outbox import enqueue, leases, operations, stats
from notification_outbox.envelope import Claim
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Answer, Outcome, QuarantineReason, State, Verdict
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from notification_outbox.transactions import short_transaction
from tests.tables import backlog

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERED = Outcome(Verdict.DELIVERED, answer=Answer(204, "answered", "127.0.0.1:443"))
RETRY = Outcome(Verdict.RETRY, delay=60, error="http_503", answer=Answer(503, "answered", "127.0.0.1:443"))
GIVEN_UP = Outcome(Verdict.QUARANTINED, reason=QuarantineReason.REJECTED, error="http_400", rejections=1)
RELEASED = Outcome(Verdict.RELEASED)


def make(count: int = 1, **changes: Any) -> list[int]:
    """Commit ``count`` messages, changed as given; return their ids."""
    with transaction.atomic():
        ids = [enqueue("t", {"n": n}, to="https://hooks.acme.com/x").id for n in range(count)]
    if changes:
        OutboxMessage.objects.filter(id__in=ids).update(**changes)
    return ids


def claim(limit: int = 10, *, lease: float = 60, budget: int = 10**9, worker: str = "w") -> list[Claim]:
    return leases.claim(
        "default", limit=limit, budget=budget, worker=worker, lease=lease, using="default"
    ).claims


def settle(claims: list[Claim], outcome: Outcome, took: float | None = None) -> list[Settlement]:
    return leases.settle([Settlement(one, outcome, "w", took) for one in claims], using="default")


def lapse(ids: list[int]) -> None:
    """Let the leases of these rows end now."""
    OutboxMessage.objects.filter(id__in=ids).update(available_at=Now() - timedelta(seconds=1))


def row(row_id: int) -> OutboxMessage:
    return OutboxMessage.objects.get(id=row_id)


def test_a_claim_takes_the_oldest_due_rows_under_one_fresh_token() -> None:
    """Rows are leased oldest due first, the attempt is counted, the lease ends when it says."""
    ids = make(3)
    OutboxMessage.objects.filter(id=ids[2]).update(available_at=F("available_at") - timedelta(minutes=1))
    claims = claim(2, lease=60)
    assert [one.id for one in claims] == [ids[2], ids[0]]
    assert len({one.token for one in claims}) == 1
    leased = row(ids[2])
    assert (leased.state, leased.attempts, leased.leased_by) == ("in_flight", 1, "w")
    assert leased.lease_token == claims[0].token
    assert timedelta(seconds=58) < leased.available_at - leased.updated_at <= timedelta(seconds=60)
    assert [one.id for one in claim()] == [ids[1]]
    assert claim() == []


def test_a_claim_leaves_what_is_not_due_or_not_its_own() -> None:
    """Scheduled rows, other lanes and rows in flight are not touched."""
    make(1, available_at=Now() + timedelta(hours=1))
    make(1, publisher="elsewhere")
    assert claim() == []
    assert set(OutboxMessage.objects.values_list("state", "attempts")) == {("pending", 0)}


def test_lanes_that_differ_in_case_are_two_lanes() -> None:
    """A worker never takes a row for a publisher it was not sealed for."""
    make(1, publisher="Default")
    make(1, publisher="default ")
    assert claim() == []
    assert leases.next_due(["default"], using="default") is None


def test_a_claim_carries_what_was_sealed_and_bound() -> None:
    """The claim has everything that delivery needs, so nothing is read again."""
    make()
    (one,) = claim()
    stored = row(one.id)
    assert one.sealed == bytes(stored.sealed or b"")
    assert one.binding.dedup_id == stored.dedup_id
    assert (one.attempt, one.number, one.rejections) == (1, 1, 0)


@pytest.mark.parametrize(("budget", "taken"), [(0, 1), (150, 1), (10**6, 3)])
def test_a_claim_stops_at_its_byte_budget_but_takes_one(budget: int, taken: int) -> None:
    """Bodies in hand are bounded; one that is larger than the bound is still delivered."""
    make(3)
    assert len(claim(budget=budget)) == taken


@pytest.mark.databases("postgresql", "mysql")
def test_two_claims_at_once_never_wait_and_never_overlap() -> None:
    """What another claimer holds locked is left to it."""
    backlog(2000)
    with transaction.atomic():
        mine = claim(50)
        theirs: list[Claim] = []
        thread = _in_thread(lambda: theirs.extend(claim(50)))
        thread.join(20)
        assert not thread.is_alive()
    assert len({one.id for one in mine + theirs}) == 100


def test_an_overdue_row_is_expired_by_the_claim_that_meets_it() -> None:
    """Time runs out without any reaper; the row is not attempted."""
    (late,) = make(1, available_at=Now() - timedelta(days=1), retry_until=Now() - timedelta(hours=1))
    assert claim() == []
    expired = row(late)
    assert (expired.state, expired.attempts) == ("expired", 0)
    assert expired.settled_at is not None


def test_a_row_that_waited_for_a_key_in_vain_ends_unreadable() -> None:
    """An operator must see that a key was missing, not that a receiver was slow."""
    (late,) = make(
        1,
        available_at=Now() - timedelta(days=1),
        retry_until=Now() - timedelta(hours=1),
        last_error="unknown_key:2024",
    )
    assert claim() == []
    assert (row(late).state, row(late).quarantine_reason) == ("quarantined", "unreadable")


def test_a_success_is_recorded_once_and_clears_the_lease() -> None:
    """Delivered is final: settled, no token, no reason."""
    (row_id,) = make()
    (one,) = claim()
    assert settle([one], DELIVERED) == []
    done = row(row_id)
    assert (done.state, done.lease_token, done.last_status, done.leased_by) == ("delivered", None, 204, "")
    assert done.settled_at is not None
    assert [lost.claim for lost in settle([one], DELIVERED)] == [one]


def test_a_failure_is_due_later_and_keeps_its_attempt() -> None:
    """The row goes back to pending with its pause, its error and its count."""
    (row_id,) = make(1, lost_leases=1)
    assert settle(claim(), RETRY) == []
    failed = row(row_id)
    assert (failed.state, failed.attempts, failed.last_error, failed.last_status) == (
        "pending",
        1,
        "http_503",
        503,
    )
    assert timedelta(seconds=59) < failed.available_at - failed.updated_at <= timedelta(seconds=60)
    assert failed.due_at == failed.available_at
    assert failed.lost_leases == 0


def test_a_pause_never_reaches_beyond_the_end_of_trying() -> None:
    """A pause longer than the time left ends where the time does, so the claim scan meets the row there."""
    (row_id,) = make(1, retry_until=Now() + timedelta(seconds=5))
    settle(claim(), RETRY)
    assert row(row_id).available_at == row(row_id).retry_until


def test_different_pauses_are_written_to_their_own_rows() -> None:
    """One batch of failures keeps each row's own pause."""
    ids = make(3)
    batch = [
        Settlement(one, Outcome(Verdict.RETRY, delay=60.0 * (1 + place), error="http_503"))
        for place, one in enumerate(claim())
    ]
    leases.settle(batch, using="default")
    pauses = [row(row_id).available_at - row(row_id).updated_at for row_id in ids]
    assert [round(pause.total_seconds() / 60) for pause in pauses] == [1, 2, 3]


def test_a_release_refunds_the_attempt_and_keeps_what_was_due() -> None:
    """A row handed back looks as if it had not been claimed; lost leases are not forgotten."""
    (row_id,) = make(1, lost_leases=1)
    before = row(row_id)
    assert leases.release(claim(), using="default") == []
    after = row(row_id)
    assert (after.state, after.attempts, after.lost_leases, after.lease_token) == ("pending", 0, 1, None)
    assert after.due_at == before.due_at
    assert [one.id for one in claim()] == [row_id]


def test_a_quarantined_row_keeps_its_reason_and_can_be_requeued() -> None:
    """No dead end: a requeue gives fresh time and attempts to the same row, whose attempt numbers go on."""
    (row_id,) = make()
    settle(claim(), GIVEN_UP, took=0.1)
    dead = row(row_id)
    assert (dead.state, dead.quarantine_reason, dead.rejections) == ("quarantined", "rejected", 1)
    assert leases.requeue([row_id], using="default") == 1
    alive = row(row_id)
    assert (alive.state, alive.quarantine_reason, alive.attempts, alive.rejections, alive.requeues) == (
        "pending",
        "",
        0,
        0,
        1,
    )
    assert alive.retry_until - alive.due_at == alive.give_up_after
    assert (alive.dedup_id, bytes(alive.sealed or b"")) == (dead.dedup_id, bytes(dead.sealed or b""))
    (again,) = claim()
    assert (again.attempt, again.number) == (1, 2)
    settle([again], GIVEN_UP, took=0.1)
    assert list(DeliveryAttempt.objects.order_by("number").values_list("number", "trigger")) == [
        (1, ""),
        (2, "requeue"),
    ]


@pytest.mark.parametrize("state", ["pending", "in_flight", "delivered", "cancelled"])
def test_a_requeue_leaves_what_is_not_dead(state: str) -> None:
    """The count says how many were still dead."""
    (row_id,) = make()
    if state == "in_flight":
        claim()
    elif state != "pending":
        OutboxMessage.objects.filter(id=row_id).update(state=state, settled_at=Now())
    assert leases.requeue([row_id], using="default") == 0
    assert row(row_id).state == state


def test_a_requeue_leaves_a_row_without_a_body() -> None:
    """What was expunged can never be sent again."""
    (row_id,) = make(1, sealed=None, state="expired", settled_at=Now())
    assert leases.requeue([row_id], using="default") == 0


@pytest.mark.parametrize("state", ["pending", "in_flight", "blocked"])
def test_a_cancel_gives_up_what_is_live(state: str) -> None:
    """Waiting, held or blocked: the row is settled, free of lease and cause, and never handed out again."""
    (row_id,) = make()
    if state == "in_flight":
        claim()
    elif state == "blocked":
        OutboxMessage.objects.update(state="blocked", blocked_by="order")
    assert leases.cancel([row_id], using="default") == 1
    gone = row(row_id)
    assert (gone.state, gone.blocked_by, gone.quarantine_reason) == ("cancelled", "", "")
    assert (gone.lease_token, gone.leased_by, gone.settled_at) == (None, "", gone.updated_at)
    lapse([row_id])
    assert leases.recover("default", limit=10, using="default").pending == 0
    assert claim() == []


@pytest.mark.parametrize("state", ["delivered", "quarantined", "expired", "cancelled"])
def test_a_cancel_leaves_what_is_settled(state: str) -> None:
    """The count says how many were still live."""
    reason = "rejected" if state == "quarantined" else ""
    (row_id,) = make(1, state=state, settled_at=Now() - timedelta(days=1), quarantine_reason=reason)
    before = row(row_id)
    assert leases.cancel([row_id], using="default") == 0
    after = row(row_id)
    assert (after.state, after.settled_at) == (state, before.settled_at)


@pytest.mark.parametrize(("outcome", "state"), [(RETRY, "cancelled"), (DELIVERED, "delivered")])
def test_what_comes_of_a_cancelled_attempt(outcome: Outcome, state: str) -> None:
    """A failure after the cancel is lost, a success is a fact."""
    (row_id,) = make()
    claims = claim()
    leases.cancel([row_id], using="default")
    assert len(settle(claims, outcome)) == (1 if outcome is RETRY else 0)
    assert row(row_id).state == state


def test_cancels_and_requeues_go_in_chunks_and_count_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any iterable of ids, in any order and twice; those already there and unknown ones are not counted."""
    monkeypatch.setattr(operations, "CHUNK", 2)
    ids = make(5)
    make(1, state="delivered", settled_at=Now())
    assert operations.cancel(iter([10**9, *ids[::-1], *ids])) == 5
    assert operations.cancel(OutboxMessage.objects.values_list("id", flat=True)) == 0
    OutboxMessage.objects.filter(id__in=ids).update(state="expired")
    assert operations.requeue([*ids, ids[0]]) == 5


@pytest.mark.parametrize("outcome", [RETRY, GIVEN_UP, RELEASED], ids=lambda outcome: outcome.verdict.value)
def test_a_stale_worker_changes_nothing_but_a_success(outcome: Outcome) -> None:
    """After the lease was handed to another, the first worker's failure is lost and it is told so."""
    (row_id,) = make()
    (stale,) = claim(lease=0)
    lapse([row_id])
    assert leases.recover("default", limit=10, using="default").pending == 1
    (fresh,) = claim()
    lost = settle([stale], outcome, took=0.5)
    assert [settlement.claim for settlement in lost] == [stale]
    assert row(row_id).lease_token == fresh.token
    assert row(row_id).attempts == 2
    remembered = list(DeliveryAttempt.objects.values_list("number", "stale"))
    assert remembered == ([] if outcome is RELEASED else [(1, True)])


@pytest.mark.parametrize("state", ["pending", "in_flight", "quarantined", "expired", "cancelled"])
def test_a_success_lands_late_on_every_state_but_delivered(state: str) -> None:
    """The receiver has it: that is a fact whatever became of the lease."""
    (row_id,) = make()
    (stale,) = claim(lease=0)
    lapse([row_id])
    leases.recover("default", limit=10, using="default")
    if state == "in_flight":
        claim()
    elif state != "pending":
        reason = "rejected" if state == "quarantined" else ""
        OutboxMessage.objects.filter(id=row_id).update(
            state=state, quarantine_reason=reason, settled_at=Now()
        )
    assert settle([stale], DELIVERED) == []
    assert (row(row_id).state, row(row_id).quarantine_reason) == ("delivered", "")


def test_a_late_success_never_lands_on_another_message() -> None:
    """Ids can repeat after a restore; the message's own name must agree."""
    (row_id,) = make()
    (stale,) = claim()
    OutboxMessage.objects.filter(id=row_id).update(
        dedup_id=uuid.uuid4(), state="pending", lease_token=None, leased_by=""
    )
    assert [lost.claim for lost in settle([stale], DELIVERED)] == [stale]
    assert row(row_id).state == "pending"


def test_a_settlement_of_a_purged_row_is_lost_without_an_error() -> None:
    """Nothing is left to move or to remember."""
    (row_id,) = make()
    claims = claim()
    OutboxMessage.objects.filter(id=row_id).delete()
    assert len(settle(claims, RETRY, took=0.1)) == 1
    assert not DeliveryAttempt.objects.exists()


def test_ended_leases_go_back_to_pending_and_are_counted() -> None:
    """What a dead worker held is handed out again; the row remembers the loss."""
    ids = make(3)
    claim()
    lapse(ids[:2])
    assert leases.recover("default", limit=10, using="default").pending == 2
    assert list(OutboxMessage.objects.order_by("id").values_list("state", "lost_leases", "attempts")) == [
        ("pending", 1, 1),
        ("pending", 1, 1),
        ("in_flight", 0, 1),
    ]
    assert row(ids[0]).available_at < row(ids[1]).available_at


def test_a_renewed_lease_ends_later_and_a_lost_one_is_named() -> None:
    """Renewing keeps what is still ours and says what is not."""
    ids = make(2)
    first, second = claim(lease=5)
    lapse([ids[1]])
    leases.recover("default", limit=10, using="default")
    assert leases.renew([first, second], lease=60, using="default") == {ids[1]}
    assert row(ids[0]).available_at - row(ids[0]).updated_at > timedelta(seconds=55)
    assert row(ids[1]).state == "pending"


def test_an_ended_lease_that_nobody_took_can_still_be_renewed() -> None:
    """Late is not lost: until somebody finds the row, the token is right."""
    (row_id,) = make()
    claims = claim(lease=0)
    lapse([row_id])
    assert leases.renew(claims, lease=60, using="default") == set()
    assert leases.recover("default", limit=10, using="default").pending == 0


def test_attempts_are_remembered_with_what_is_known() -> None:
    """The timeline has number, phase, status, peer, worker and duration."""
    make()
    settle(claim(), RETRY, took=0.25)
    (attempt,) = DeliveryAttempt.objects.all()
    assert (attempt.number, attempt.outcome, attempt.status, attempt.error) == (1, "retry", 503, "http_503")
    assert (attempt.phase, attempt.peer, attempt.worker) == ("answered", "127.0.0.1:443", "w")
    assert (attempt.duration_ms, attempt.stale) == (250, False)
    # two statements, so the clock has moved between them
    began = attempt.message.updated_at - timedelta(milliseconds=250)
    assert abs(attempt.started_at - began) < timedelta(seconds=5)


def test_a_settle_repeated_after_a_lost_commit_adds_no_second_attempt() -> None:
    """The worker cannot know whether the commit arrived, so it asks again."""
    make()
    claims = claim()
    settle(claims, RETRY, took=0.1)
    assert len(settle(claims, RETRY, took=0.1)) == 1
    assert DeliveryAttempt.objects.count() == 1


def test_the_next_due_time_covers_pending_rows_and_ended_leases() -> None:
    """An idle worker knows how long it may sleep."""
    assert leases.next_due(["default"], using="default") is None
    (row_id,) = make(1, available_at=Now() + timedelta(seconds=60), retry_until=Now() + timedelta(days=1))
    assert 58 < (leases.next_due(["default"], using="default") or 0) <= 60
    assert leases.next_due(["other"], using="default") is None
    OutboxMessage.objects.filter(id=row_id).update(available_at=Now())
    assert leases.next_due(["default"], using="default") == 0
    claim(lease=30)
    assert 28 < (leases.next_due(["default"], using="default") or 0) <= 30


def test_lanes_with_messages_are_found() -> None:
    """A lane that nobody serves does not hide."""
    make(2)
    make(1, publisher="retired")
    make(1, publisher="done", state="delivered", settled_at=Now())
    assert stats.lanes(using="default") == ["default", "retired"]


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.parametrize("default", ["repeatable read", "serializable"])
def test_movers_run_read_committed_whatever_the_project_says(default: str) -> None:
    """The project's isolation level is neither used nor changed."""
    ask = "SHOW transaction_isolation" if connection.vendor == "postgresql" else "SELECT @@tx_isolation"
    before = _isolation(ask)
    seen = []
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SET default_transaction_isolation = '{default}'")
        else:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {default.upper()}")
    try:
        if connection.vendor == "postgresql":
            with short_transaction("default"):
                seen.append(_isolation(ask))
            assert seen == ["read committed"]
        else:
            # MariaDB does not show the level of the running transaction: what it sees tells
            (row_id,) = make()
            with short_transaction("default"):
                row(row_id)
                _in_thread(lambda: OutboxMessage.objects.filter(id=row_id).update(attempts=7)).join()
                assert row(row_id).attempts == 7
        assert _isolation(ask).lower().replace("-", " ") == default
    finally:
        connection.close()
    assert _isolation(ask) == before


@pytest.mark.databases("postgresql", "mysql")
def test_movers_on_the_same_rows_in_any_order_never_deadlock() -> None:
    """Every mover locks in id order first, so two of them queue instead of embracing."""
    ids = make(40)
    claims = claim(40, lease=600)
    errors: list[Exception] = []
    barrier = threading.Barrier(5)

    def move(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            barrier.wait(10)
            for _ in range(15):
                try:
                    work()
                except Exception as error:
                    errors.append(error)

        return run

    threads = [
        _in_thread(move(lambda: leases.renew(claims, lease=600, using="default"))),
        _in_thread(move(lambda: leases.renew(claims[::-1], lease=600, using="default"))),
        _in_thread(move(lambda: leases.requeue(ids[::-1], using="default"))),
        _in_thread(move(lambda: leases.cancel(ids[::-1], using="default"))),
        _in_thread(move(lambda: settle(claims[::-1], RETRY))),
    ]
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.databases("postgresql", "mysql")
def test_movers_lock_by_ids_alone() -> None:
    """With a condition beside the ids MariaDB may lock by another index, against the order of everybody else."""
    ids = make(4)
    with CaptureQueriesContext(connection) as queries:
        claims = claim()
        leases.renew(claims, lease=60, using="default")
        settle(claims, GIVEN_UP)
        leases.requeue(ids, using="default")
        leases.cancel(ids, using="default")
    locks = [query["sql"] for query in queries if re.search(r"FOR (NO KEY )?UPDATE$", query["sql"])]
    assert len(locks) == 4
    for lock in locks:
        assert re.search(r"WHERE \S+ IN \([\d, ]+\) ORDER BY \S+ ASC FOR", lock), lock


def _isolation(ask: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(ask)
        return str(cursor.fetchone()[0])


def _in_thread(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        finally:
            connections["default"].close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def _fresh_connection() -> Iterator[None]:
    yield
    close_old_connections()


def test_a_row_that_comes_back_between_two_looks_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--until-empty`` must not leave because a retry was in flight at the first look and waiting at the second."""
    (row_id,) = make()
    claim()
    literal = leases.StateLiteral

    def meanwhile(state: State) -> leases.StateLiteral:
        if state is State.IN_FLIGHT:
            OutboxMessage.objects.filter(id=row_id).update(state="pending", lease_token=None, leased_by="")
        return literal(state)

    monkeypatch.setattr(leases.claiming, "StateLiteral", meanwhile)
    assert leases.next_due(["default"], using="default") is not None


@pytest.mark.parametrize("zone", ["wanted", None])
def test_a_claim_knows_when_its_message_was_made(zone: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Django reads it: in the connection's zone, or without one where the project has none."""
    (row_id,) = make()
    wanted = connection.timezone if zone else None
    monkeypatch.setattr(connection, "timezone", wanted)
    made = claim()[0].created_at
    assert made.tzinfo is wanted
    assert made.replace(tzinfo=UTC) == OutboxMessage.objects.get(id=row_id).created_at.replace(tzinfo=UTC)
