"""Real concurrent transactions: the same key twice, crossed keys, stricter isolation.

On SQLite writers queue for the one lock (``transaction_mode: IMMEDIATE``), so none of this can happen there: the
second caller begins after the first has ended, which ``test_enqueue`` covers.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from notification_outbox import Draft, IdempotencyConflict, Receipt, enqueue, enqueue_many, inserts
from notification_outbox.inserts import NewRow, Stored
from notification_outbox.models import OutboxMessage
from tests.processes import wait_until

pytestmark = [pytest.mark.databases("postgresql", "mysql"), pytest.mark.django_db(transaction=True)]

URL = "https://hooks.acme.com/shop"


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Future[Any]]]:
    """Run something in a thread with a connection of its own."""
    with ThreadPoolExecutor(8) as executor:

        def call(work: Callable[[], Any]) -> Any:
            try:
                return work()
            finally:
                connections["default"].close()

        yield lambda work: executor.submit(call, work)


def wait_for_the_second() -> None:
    wait_for_waiting(1)


def wait_for_waiting(callers: int) -> None:
    # MariaDB shows the same picture again when asked within a tenth of a second
    wait_until(lambda: waiting_for_a_lock() >= callers, f"{callers} to wait for a lock", poll=0.15)


def waiting_for_a_lock() -> int:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # inside a transaction it shows the same picture again
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        else:
            cursor.execute(
                "SELECT count(*) FROM information_schema.innodb_trx"
                " JOIN information_schema.processlist ON id = trx_mysql_thread_id"
                " WHERE trx_state = 'LOCK WAIT' AND db = DATABASE()"
            )
        return int(cursor.fetchone()[0])


@transaction.atomic
def put(payload: Any = None, key: str = "k") -> Receipt:
    return enqueue("t", payload or {}, to=URL, idempotency_key=key)


def fresh(count: int) -> list[str]:
    """Return new keys: of used ones InnoDB finds the deleted entries, and locks those and their neighbours."""
    return [uuid.uuid4().hex for _ in range(count)]


def test_the_second_of_two_waits_and_then_sees_the_first(elsewhere: Callable[..., Future[Any]]) -> None:
    """The same key in two open transactions is one row; the second caller learns whose."""
    with transaction.atomic():
        first = put()
        other = elsewhere(put)
        wait_for_the_second()
    second = other.result(20)
    assert (second.id, second.created) == (first.id, False)
    assert OutboxMessage.objects.count() == 1


def test_the_second_of_two_with_other_content_gets_the_conflict(
    elsewhere: Callable[..., Future[Any]],
) -> None:
    """Waiting does not hide the difference."""
    with transaction.atomic():
        put()
        other = elsewhere(lambda: put({"n": 2}))
        wait_for_the_second()
    with pytest.raises(IdempotencyConflict):
        other.result(20)


def test_when_the_first_rolls_back_the_second_inserts(elsewhere: Callable[..., Future[Any]]) -> None:
    """A key is taken by commits only."""
    with transaction.atomic():
        first = put()
        other = elsewhere(put)
        wait_for_the_second()
        transaction.set_rollback(True)
    second = other.result(20)
    assert second.created
    assert second.message_id == first.message_id
    assert OutboxMessage.objects.get().id == second.id


def test_crossed_keys_of_many_never_deadlock(elsewhere: Callable[..., Future[Any]]) -> None:
    """a,b against b,a: rows go in by their own order, so callers queue."""
    barrier = threading.Barrier(4)
    rounds = [fresh(20) for _ in range(10)]

    def many(order: int) -> list[Receipt]:
        barrier.wait(20)
        made: list[Receipt] = []
        for keys in rounds:
            with transaction.atomic():
                made += enqueue_many([Draft("t", {}, to=URL, idempotency_key=key) for key in keys[::order]])
        return made

    done = [elsewhere(lambda order=order: many(order)) for order in (1, -1, 1, -1)]
    receipts = [receipt for one in done for receipt in one.result(100)]
    assert OutboxMessage.objects.count() == 200
    assert sum(receipt.created for receipt in receipts) == 200


def by_index(count: int) -> list[Draft]:
    """Return drafts in the order in which rows go in."""
    drafts = [Draft("t", {}, to=URL, idempotency_key=key) for key in fresh(count)]
    with transaction.atomic():
        enqueue_many(drafts)
        keys = list(OutboxMessage.objects.order_by("dedup_id").values_list("idempotency_key", flat=True))
        transaction.set_rollback(True)
    return sorted(drafts, key=lambda draft: keys.index(str(draft.idempotency_key)))


@transaction.atomic
def put_many(drafts: list[Draft]) -> list[bool]:
    return [receipt.created for receipt in enqueue_many(drafts)]


def test_a_conflict_takes_back_no_row_that_others_wait_for(elsewhere: Callable[..., Future[Any]]) -> None:
    """Of many, the rows before one that was taken stay; on MariaDB who waits for a row taken back would deadlock."""
    low, high = by_index(2)
    with transaction.atomic():
        enqueue_many([high])
        both = elsewhere(lambda: put_many([low, high]))
        wait_for_waiting(1)
        others = [elsewhere(lambda: put_many([low])) for _ in range(3)]
        wait_for_waiting(4)
    assert both.result(20) == [True, False]
    assert [other.result(20) for other in others] == [[False]] * 3


def test_rows_go_in_by_the_order_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """MariaDB compares UUIDs by their last group first; in another order its gap locks cross."""
    asked: list[uuid.UUID] = []
    insert = inserts._insert

    def watched(rows: Sequence[NewRow], using: str) -> dict[uuid.UUID, Stored]:
        asked.extend(row.name for row in rows)
        return insert(rows, using)

    monkeypatch.setattr(inserts, "_insert", watched)
    put_many([Draft("t", {}, to=URL) for _ in range(inserts.CHUNK + 50)])
    assert asked == list(OutboxMessage.objects.order_by("dedup_id").values_list("dedup_id", flat=True))


def test_when_the_first_rolls_back_repeating_helps_whoever_waited(
    elsewhere: Callable[..., Future[Any]],
) -> None:
    """On MariaDB several waiters may deadlock then: the error says "repeat", and one row comes of it all."""

    def patient() -> Receipt:
        while True:
            try:
                return put()
            except OperationalError as error:
                if connection.vendor != "mysql" or error.args[0] != 1213:
                    raise

    with transaction.atomic():
        put()
        others = [elsewhere(patient) for _ in range(4)]
        wait_for_waiting(4)
        transaction.set_rollback(True)
    receipts = [other.result(20) for other in others]
    assert sum(receipt.created for receipt in receipts) == 1
    assert {receipt.id for receipt in receipts} == {OutboxMessage.objects.get().id}


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_conflict_above_read_committed_is_a_retryable_error(
    elsewhere: Callable[..., Future[Any]], level: str
) -> None:
    """What the snapshot cannot show fails the whole transaction, which may be repeated; nothing is hidden."""

    def attempt() -> Receipt:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                cursor.execute("SELECT 1 FROM notification_outbox_outboxmessage")
            if not OutboxMessage.objects.exists():
                elsewhere(put).result(20)
            return enqueue("t", {}, to=URL, idempotency_key="k")

    with pytest.raises(OperationalError) as caught:
        attempt()
    assert getattr(caught.value.__cause__, "sqlstate", None) == "40001"
    assert attempt().created is False


@pytest.mark.databases("mysql")
def test_under_repeatable_read_mariadb_finds_what_its_snapshot_hides(
    elsewhere: Callable[..., Future[Any]],
) -> None:
    """The conflict is found by a locking read, not by an error or a wrong receipt."""
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    try:
        with transaction.atomic():
            assert not OutboxMessage.objects.exists()
            first = elsewhere(put).result(20)
            second = enqueue("t", {}, to=URL, idempotency_key="k")
        assert (second.id, second.created) == (first.id, False)
    finally:
        connection.close()


def test_twenty_callers_at_once_make_one_row(elsewhere: Callable[..., Future[Any]]) -> None:
    """Whoever comes first creates, the others find; nobody meets an unexpected error."""
    barrier = threading.Barrier(8)

    def race() -> list[bool]:
        barrier.wait(20)
        return [put(key=f"k{n}").created for n in range(20)]

    created = [one.result(60) for one in [elsewhere(race) for _ in range(8)]]
    assert sum(flag for flags in created for flag in flags) == 20
    assert OutboxMessage.objects.count() == 20
