"""The numbers: what they count, that they stop counting, and that nothing walks the message table."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from notification_outbox import enqueue, stats
from notification_outbox.models import OutboxMessage, OutboxStat
from tests.tables import backlog

TABLE = OutboxMessage._meta.db_table
HOUR = timedelta(hours=1)


def messages(count: int, **changes: Any) -> None:
    """Store messages and change their columns."""
    with transaction.atomic():
        ids = [enqueue("t", {}, to="https://hooks.acme.com/").id for _ in range(count)]
    OutboxMessage.objects.filter(id__in=ids).update(**changes or {"attempts": 0})


def numbers(*publishers: str) -> stats.Numbers:
    return stats.numbers(publishers, using="default")


@pytest.mark.django_db(transaction=True)
class TestWhatWaits:
    """Counts of the table."""

    def test_a_lane_counts_what_is_due_later_and_in_flight(self) -> None:
        """Each live message is in one of three numbers; the oldest due one says for how long."""
        messages(2)
        messages(1, due_at=Now() - HOUR, available_at=Now() - HOUR / 2)
        messages(3, due_at=Now() + HOUR, available_at=Now() + HOUR)
        messages(4, state="in_flight", lease_token=uuid.uuid4(), available_at=Now() + HOUR)
        messages(5, state="delivered", settled_at=Now())
        (lane,) = numbers("default").lanes
        assert lane.backlog[:3] == (3, 3, 4)
        assert lane.backlog.oldest_due == pytest.approx(3600, abs=60)

    def test_a_message_that_bounces_is_still_due_for_as_long(self) -> None:
        """Handed back by a worker it waits a little, and its age goes on."""
        messages(1, due_at=Now() - HOUR, available_at=Now() + HOUR / 60)
        (lane,) = numbers("default").lanes
        assert lane.backlog[:3] == (0, 1, 0)
        assert lane.backlog.oldest_due == pytest.approx(3600, abs=60)

    def test_lanes_are_those_configured_waiting_or_lately_at_work(self) -> None:
        """None is forgotten because its publisher was."""
        messages(1, publisher="orphan")
        OutboxStat.objects.create(minute=Now() - HOUR, lane="removed", outcome="gone", worker="w", n=1)
        OutboxStat.objects.create(minute=Now() - 30 * HOUR, lane="forgotten", outcome="gone", worker="w", n=1)
        assert [lane.name for lane in numbers("default").lanes] == ["default", "orphan", "removed"]

    def test_dead_letters_and_keys_are_counted_by_their_words(self) -> None:
        """What has no dead letter is left out; what holds no body counts under no key."""
        messages(2, state="quarantined", quarantine_reason="gone", settled_at=Now())
        messages(3, state="expired", settled_at=Now(), encryption_key_id="K0")
        messages(4, state="delivered", settled_at=Now(), sealed=None, encryption_key_id="k9")
        found = numbers("default")
        assert found.dead == {"gone": 2, "expired": 3}
        assert found.keys.pop("K0") == 3  # type: ignore[attr-defined]
        assert list(found.keys.values()) == [2]

    def test_counting_stops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One more than the bound stands for "more"."""
        monkeypatch.setattr(stats, "CAP", 3)
        messages(5)
        found = numbers("default")
        assert found.lanes[0].backlog.due == 4
        assert list(found.keys.values()) == [4]
        assert [stats.bounded(count) for count in (2, 3, 4)] == ["2", "3", "3+"]

    def test_the_number_of_queries_is_fixed(self) -> None:
        """However many lanes, keys and reasons there are."""
        messages(1)
        with CaptureQueriesContext(connection) as few:
            numbers("default")
        for n in range(6):
            messages(1, publisher=f"lane{n}", encryption_key_id=f"key{n}")
        with CaptureQueriesContext(connection) as many:
            found = numbers("default")
        assert len(found.lanes) == 7
        assert len(few) == len(many) == 7

    def test_an_empty_outbox_has_numbers_too(self) -> None:
        """All nothing."""
        found = numbers("default")
        assert found.lanes == (stats.Lane("default"),)
        assert (found.dead, found.keys) == ({}, {})
        assert [quarter[1:] for quarter in found.quarters] == [(0, 0, 0)] * 96


@pytest.mark.django_db(transaction=True)
class TestWhatHappened:
    """Sums of the counted minutes."""

    def test_rates_are_those_of_the_last_minutes(self) -> None:
        """By the minute, over five to six of them; what failed is what was not delivered."""
        for ago, outcome, n in ((1, "delivered", 40), (4, "delivered", 20), (2, "retry", 6), (3, "gone", 6)):
            count(timedelta(minutes=ago), outcome, n)
        count(timedelta(minutes=10), "delivered", 1000)
        (lane,) = numbers("default").lanes
        assert 10 <= lane.delivered <= 12
        assert 2 <= lane.failed <= 2.4
        assert lane.dead == {"gone": 6}

    def test_a_day_has_quarters_that_add_up(self) -> None:
        """Minutes of all workers, folded or not, in the quarter of an hour they belong to."""
        quarter = numbers("default").quarters[50].start
        for minute, worker, outcome, n in (
            (0, "", "delivered", 5),
            (3, "a", "delivered", 7),
            (3, "b", "delivered", 1),
            (14, "a", "retry", 2),
            (14, "a", "expired", 3),
            (14, "b", "gone", 4),
            (15, "a", "delivered", 9),
        ):
            OutboxStat.objects.create(
                minute=quarter + timedelta(minutes=minute), lane="x", outcome=outcome, worker=worker, n=n
            )
        found = {q.start: q[1:] for q in numbers().quarters}
        assert len(found) == 96
        assert found[quarter] == (13, 2, 7)
        assert found[quarter + timedelta(minutes=15)] == (9, 0, 0)

    def test_what_is_older_than_a_day_is_not_told(self) -> None:
        """Neither in the plot nor among the given up."""
        count(25 * HOUR, "gone", 3)
        found = numbers("default")
        assert sum(quarter.dead for quarter in found.quarters) == 0
        assert found.lanes[0].dead == {}


def count(ago: timedelta, outcome: str, n: int) -> None:
    OutboxStat.objects.create(
        minute=Now() - ago, lane="default", outcome=outcome, worker=uuid.uuid4().hex, n=n
    )


@pytest.mark.databases("postgresql")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("delivered", [0, 100_000])
def test_postgresql_counts_by_index_and_stops(delivered: int) -> None:
    """No sequential scan of the message table, no count without a bound, and few pages read."""
    backlog(100_000, delivered=delivered)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'quarantined', quarantine_reason = 'gone', settled_at = now() "
            "WHERE id % 4 = 0 AND state = 'pending'"
        )
        cursor.execute(f"VACUUM ANALYZE {TABLE}")
    with CaptureQueriesContext(connection) as queries:
        found = numbers("default", "other")
    assert found.lanes[0].backlog.due == stats.CAP + 1
    assert found.dead["gone"] == stats.CAP + 1
    pages = 0
    for query in queries:
        sql = query["sql"]
        for counting in re.finditer(r"COUNT\(\*\) FROM \(", sql):
            assert re.search(rf"LIMIT {stats.CAP + 1}\) AS counted", sql[counting.end() :]), sql
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}")
            (plan,) = cursor.fetchone()
        for node in nodes(plan[0]["Plan"]):
            assert (node["Node Type"], node.get("Relation Name")) != ("Seq Scan", TABLE), sql
        pages += plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
    # 100,000 rows of the message table have some 30,000 pages
    assert pages < 6000


def nodes(plan: dict[str, Any]) -> Any:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)
