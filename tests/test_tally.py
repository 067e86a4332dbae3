"""Counts of outcomes: each counted once, whatever happens to a transaction, and old ones brought together."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from notification_outbox import enqueue, housekeeping, leases, tally
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Outcome, QuarantineReason, Verdict
from notification_outbox.models import OutboxMessage, OutboxStat
from notification_outbox.tally import Tally
from tests.processes import Outbox

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERED = Outcome(Verdict.DELIVERED)
OUTCOMES = [
    DELIVERED,
    Outcome(Verdict.RETRY, delay=60, error="http_503"),
    Outcome(Verdict.QUARANTINED, reason=QuarantineReason.GONE, error="http_410"),
    Outcome(Verdict.RELEASED, delay=60),
]


def counted() -> Counter[str]:
    found: Counter[str] = Counter()
    for stat in OutboxStat.objects.all():
        assert stat.lane == "default"
        found[stat.outcome] += stat.n
    return found


def claim(count: int) -> list[Any]:
    with transaction.atomic():
        for _ in range(count):
            enqueue("t", {}, to="https://hooks.acme.com/")
    return leases.claim("default", limit=count, budget=10**9, worker="w", lease=60, using="default").claims


def settle(claims: list[Any], mine: Tally, *outcomes: Outcome) -> int:
    """Settle claims, the outcomes in turn; return how many changed nothing."""
    batch = [Settlement(one, outcomes[n % len(outcomes)]) for n, one in enumerate(claims)]
    return len(leases.settle(batch, tally=mine, using="default"))


def test_outcomes_are_counted_with_their_reason_in_one_row_each() -> None:
    """Batches of the same minute add to the same rows; a release is no outcome."""
    mine = Tally()
    for _ in range(3):
        settle(claim(8), mine, *OUTCOMES)
    assert counted() == {"delivered": 6, "retry": 6, "gone": 6}
    minutes = len(set(OutboxStat.objects.values_list("minute", flat=True)))
    assert OutboxStat.objects.count() == 3 * minutes
    assert minutes <= 2


def test_minutes_are_those_of_the_database() -> None:
    """Whatever this process takes for the time."""
    settle(claim(1), Tally(), DELIVERED)
    (row,) = OutboxMessage.objects.annotate(now=Now())
    (stat,) = OutboxStat.objects.all()
    assert stat.minute.second == stat.minute.microsecond == 0
    assert timedelta(0) <= row.now - stat.minute < timedelta(minutes=2)


def test_workers_have_rows_of_their_own() -> None:
    """Nobody waits for another's count: even with the other's transaction open."""
    for _ in range(2):
        settle(claim(2), Tally(), DELIVERED)
    assert sorted(OutboxStat.objects.values_list("n", flat=True)) == [2, 2]
    assert OutboxStat.objects.values("worker").distinct().count() == 2


def test_a_new_minute_begins_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of one minute do not go on in the next, also when the clock was set back; it is read once in each."""
    mine = Tally()
    first = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)
    asked: list[datetime] = []
    for now, ours in (
        (first, 100.0),
        (first + timedelta(seconds=29), 129.9),
        (first + timedelta(seconds=30), 130.0),
        (first + timedelta(seconds=80), 180.0),
        (first, 190.0),
        (first, 221.0),
    ):
        monkeypatch.setattr(tally, "time", SimpleNamespace(monotonic=lambda ours=ours: ours))

        def clock(now: datetime = now) -> datetime:
            asked.append(now)
            return now

        with mine.transaction("default") as count:
            count([("default", "delivered")] * 2, clock)
    found: Counter[int] = Counter()
    for minute, n in OutboxStat.objects.values_list("minute", "n"):
        found[minute.minute] += n
    assert found == {0: 8, 1: 4}
    assert asked == [first, first + timedelta(seconds=30), first, first]


@pytest.mark.parametrize("committed", [False, True])
def test_a_settle_that_is_repeated_counts_once(monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    """Whether it never committed, or did and the answer was lost: nothing is counted twice or overwritten."""
    mine = Tally()
    settle(claim(2), mine, DELIVERED)
    claims = claim(3)
    commit = connection.commit

    def unheard() -> None:
        if committed:
            commit()
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", unheard)
        with pytest.raises(OperationalError):
            settle(claims, mine, DELIVERED)
    assert settle(claims, mine, DELIVERED) == (3 if committed else 0)
    settle(claim(4), mine, DELIVERED)
    assert counted() == {"delivered": 9}


def test_lost_settlements_are_not_counted() -> None:
    """Only who changed the row counts it, so the sum is that of what happened to rows."""
    claims = claim(2)
    settle(claims, Tally(), DELIVERED)
    assert settle(claims, Tally(), OUTCOMES[1]) == 2
    assert counted() == {"delivered": 2}


def test_what_scans_end_is_counted_too() -> None:
    """Messages whose time ran out, and those that end their workers."""
    claim(2)
    OutboxMessage.objects.update(lost_leases=2, available_at=Now() - timedelta(seconds=1))
    mine = Tally()
    assert len(leases.recover("default", limit=9, tally=mine, using="default").ended) == 2
    with transaction.atomic():
        late = enqueue("t", {}, to="https://hooks.acme.com/").id
    OutboxMessage.objects.filter(id=late).update(retry_until=F("available_at"))
    leases.claim("default", limit=9, budget=9, worker="w", lease=60, tally=mine, using="default")
    assert counted() == {"worker_lost": 2, "expired": 1}


def test_a_worker_counts_what_it_delivers(outbox: Outbox) -> None:
    """Once, whatever fails on the way to the table."""
    real, failures = leases.settle, iter([OperationalError, OperationalError])

    def flaky(settlements: Any, **named: Any) -> Any:
        lost = real(settlements, **named)
        if (error := next(failures, None)) is not None:
            # committed, and not heard of
            raise error
        return lost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "settle", flaky)
        outbox.enqueue(5)
        outbox.work()
    assert counted() == {"delivered": 5}


def test_counting_costs_one_statement() -> None:
    """The minute comes with the locks; what is counted goes in one upsert at the end."""
    mine = Tally()
    settle(claim(1), mine, DELIVERED)
    claims = claim(20)
    with CaptureQueriesContext(connection) as queries:
        settle(claims, mine, *OUTCOMES)
    ours = [query["sql"] for query in queries if OutboxStat._meta.db_table in query["sql"]]
    assert len(ours) == 1
    last = [
        query["sql"] for query in queries if query["sql"].partition(" ")[0] in ("INSERT", "UPDATE", "SELECT")
    ]
    assert last[-1] == ours[0]


def old(hours: float, worker: str, n: int) -> None:
    """Store a count of a minute so many hours ago."""
    base = datetime.now(UTC).replace(second=0, microsecond=0)
    OutboxStat.objects.create(
        minute=base - timedelta(hours=hours), lane="default", outcome="delivered", worker=worker, n=n
    )


def tidy(limit: int = 3) -> None:
    while tally.tidy(limit=limit, using="default"):
        pass


def test_old_minutes_are_brought_together_by_the_quarter_hour() -> None:
    """In chunks, whose sums add up to what there was; young minutes stay as they are."""
    base = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    OutboxStat.objects.bulk_create(
        OutboxStat(
            minute=base + timedelta(minutes=m), lane="default", outcome=outcome, worker=worker, n=m + 1
        )
        for m in range(30)
        for outcome in ("delivered", "retry")
        for worker in ("a", "b")
    )
    old(0.5, "a", 7)
    old(0.5, "b", 7)
    before = counted()
    tidy()
    assert counted() == before
    folded = OutboxStat.objects.filter(worker="").order_by("minute", "outcome")
    assert list(folded.values_list("minute", "outcome", "n")) == [
        (base + timedelta(minutes=start), outcome, 2 * sum(range(start + 1, start + 16)))
        for start in (0, 15)
        for outcome in ("delivered", "retry")
    ]
    assert OutboxStat.objects.exclude(worker="").count() == 2


def test_counts_older_than_a_week_are_deleted() -> None:
    """Brought together or not."""
    old(24 * 7 + 1, "a", 1)
    OutboxStat.objects.update(worker="")
    old(24 * 7 + 1, "b", 2)
    old(24 * 6, "c", 4)
    tidy()
    assert counted() == {"delivered": 4}


def tidy_beside(found: list[int]) -> None:
    try:
        found.append(tally.tidy(limit=3, using="default"))
    finally:
        connections["default"].close()


@pytest.mark.databases("postgresql", "mysql")
def test_two_never_bring_the_same_counts_together() -> None:
    """Who finds the oldest row locked leaves the work to who holds it."""
    for n in range(6):
        old(3, f"w{n}", 1)
    with transaction.atomic():
        assert tally.tidy(limit=3, using="default") == 3
        others: list[int] = []
        other = threading.Thread(target=tidy_beside, args=(others,), daemon=True)
        other.start()
        other.join(20)
        assert others == [0]
    tidy()
    assert counted() == {"delivered": 6}
    assert OutboxStat.objects.count() == 1


def test_a_worker_tidies_counts(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping does so beside the deliveries."""
    monkeypatch.setattr(housekeeping, "CHUNK", 2)
    done, real = threading.Event(), tally.tidy

    def watched(**arguments: Any) -> int:
        went = real(**arguments)
        if not went:
            done.set()
        return went

    monkeypatch.setattr(tally, "tidy", watched)
    for n in range(5):
        old(3, f"w{n}", 1)
    outbox.configure(BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 200 if done.is_set() else 503
    outbox.enqueue(1)
    outbox.work("empty")
    assert list(OutboxStat.objects.filter(worker="").values_list("n", flat=True)) == [5]
