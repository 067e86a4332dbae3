"""The tables: what may never be true of a row, how claims are planned, how PostgreSQL keeps them."""

from __future__ import annotations

import json
import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from notification_outbox import conf, enqueue, leases
from notification_outbox.models import OutboxMessage
from tests.tables import backlog

TABLE = OutboxMessage._meta.db_table


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("constraint", "changes"),
    [
        ("outbox_known_state", {"state": "lost", "settled_at": Now()}),
        ("outbox_in_flight_has_token", {"state": "in_flight"}),
        ("outbox_in_flight_has_token", {"lease_token": uuid.uuid4()}),
        ("outbox_quarantined_has_reason", {"state": "quarantined", "settled_at": Now()}),
        ("outbox_quarantined_has_reason", {"quarantine_reason": "rejected"}),
        ("outbox_blocked_has_cause", {"state": "blocked"}),
        ("outbox_blocked_has_cause", {"blocked_by": "order"}),
        ("outbox_settled_or_live", {"state": "delivered"}),
        ("outbox_settled_or_live", {"settled_at": Now()}),
        ("outbox_waits_within_time", {"available_at": F("retry_until") + F("give_up_after")}),
        ("outbox_account_not_empty", {"account_id": ""}),
    ],
)
def test_the_database_refuses_rows_that_make_no_sense(constraint: str, changes: dict[str, Any]) -> None:
    """Whatever a mover or an operator's SQL does, the row's columns agree with its state."""
    with transaction.atomic():
        row_id = enqueue("t", {}, to="https://hooks.acme.com/").id
        with pytest.raises(IntegrityError, match=constraint), transaction.atomic():
            OutboxMessage.objects.filter(id=row_id).update(**changes)


@pytest.mark.django_db
@pytest.mark.parametrize("column", ["attempts", "past_attempts", "rejections", "lost_leases", "requeues"])
def test_counts_are_never_negative(column: str) -> None:
    """A refund too many is an error, not a row that never gives up."""
    with transaction.atomic():
        row_id = enqueue("t", {}, to="https://hooks.acme.com/").id
        # MariaDB's unsigned columns refuse it before the CHECK is asked
        with pytest.raises(Exception, match=r"(?i)check|range|constraint"), transaction.atomic():
            OutboxMessage.objects.filter(id=row_id).update(**{column: F(column) - 1})


@pytest.mark.django_db
def test_one_binding_is_one_row() -> None:
    """The message's own name is unique in the table."""
    with transaction.atomic():
        first, second = (enqueue("t", {}, to="https://hooks.acme.com/").id for _ in range(2))
        name = OutboxMessage.objects.get(id=first).dedup_id
        with pytest.raises(IntegrityError), transaction.atomic():
            OutboxMessage.objects.filter(id=second).update(dedup_id=name)


def _claim_query() -> str:
    with CaptureQueriesContext(connection) as queries:
        leases.claim("default", limit=50, budget=10**9, worker="w", lease=60, using="default")
    (query,) = [q["sql"] for q in queries if "SKIP LOCKED" in q["sql"]]
    return str(query)


@pytest.mark.databases("postgresql")
@pytest.mark.django_db(transaction=True)
def test_postgresql_claims_by_an_ordered_index_scan() -> None:
    """The claim walks its index in order and stops: no sort, and the pages it reads do not grow with the backlog."""
    backlog(20_000, delivered=20_000)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {_claim_query()}")
        (found,) = cursor.fetchone()
    plan = json.dumps(found)
    assert '"Index Name": "outbox_claim"' in plan
    assert not re.search(r'"Node Type": "(Sort|Incremental Sort|Seq Scan|Bitmap[^"]*)"', plan)
    assert found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"] < 600


@pytest.mark.databases("postgresql")
@pytest.mark.django_db(transaction=True)
def test_postgresql_finds_bodies_to_erase_without_walking_the_backlog() -> None:
    """An ordered scan of an index that holds neither live nor expunged rows, so that an idle round costs nothing."""
    backlog(20_000, delivered=20_000)
    retention = conf.Retention(expunge_delivered=timedelta(0))
    with CaptureQueriesContext(connection) as queries:
        while leases.expunge_delivered(retention=retention, limit=5000, using="default"):
            pass
    query = next(q["sql"] for q in queries if "SKIP LOCKED" in q["sql"])
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {TABLE}")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}")
        (found,) = cursor.fetchone()
    plan = json.dumps(found)
    assert '"Index Name": "outbox_expunge"' in plan
    assert not re.search(r'"Node Type": "(Sort|Incremental Sort|Seq Scan|Bitmap[^"]*)"', plan)
    assert found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"] < 20


@pytest.mark.databases("mysql")
@pytest.mark.django_db(transaction=True)
def test_mariadb_claims_by_an_ordered_index_scan() -> None:
    """The claim walks its index in order and stops, and locks what it found by nothing but its ids."""
    backlog(20_000, delivered=20_000)
    with CaptureQueriesContext(connection) as queries:
        leases.claim("default", limit=50, budget=10**9, worker="w", lease=60, using="default")
    looking, locking = (q["sql"] for q in queries if q["sql"].startswith("SELECT") and "pk" in q["sql"])
    assert "FOR UPDATE" not in looking
    assert "SKIP LOCKED" in locking
    plans = []
    with connection.cursor() as cursor:
        for query in (looking, locking):
            cursor.execute(f"EXPLAIN FORMAT=JSON {query}")
            plans.append(str(cursor.fetchone()[0]))
    assert '"key": "outbox_claim"' in plans[0]
    assert '"key": "PRIMARY"' in plans[1]
    assert '"access_type": "ALL"' not in "".join(plans)
    assert "filesort" not in "".join(plans)


@pytest.mark.databases("postgresql")
@pytest.mark.django_db(transaction=True)
def test_postgresql_storage_is_tuned_and_can_be_put_back() -> None:
    """Rows leave room for their own updates and sealed bytes are not compressed; the migration is reversible."""
    assert _storage() == ({"fillfactor=50", "autovacuum_vacuum_scale_factor=0.02"}, "e")
    try:
        call_command("migrate", "notification_outbox", "0001", verbosity=0)
        assert _storage() == (set(), "x")
    finally:
        call_command("migrate", "notification_outbox", verbosity=0)
    assert _storage() == ({"fillfactor=50", "autovacuum_vacuum_scale_factor=0.02"}, "e")


def _storage() -> tuple[set[str], str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE oid = %s::regclass", [TABLE])
        options = set(cursor.fetchone()[0] or ())
        cursor.execute(
            "SELECT attstorage::text FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'sealed'",
            [TABLE],
        )
        return options, str(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
def test_all_migrations_can_be_undone_and_done_again() -> None:
    """An app that cannot be removed is not adopted."""
    try:
        call_command("migrate", "notification_outbox", "zero", verbosity=0)
        assert TABLE not in connection.introspection.table_names()
    finally:
        call_command("migrate", "notification_outbox", verbosity=0)
    assert TABLE in connection.introspection.table_names()


@pytest.mark.django_db
def test_the_models_need_no_further_migration() -> None:
    """What the models say is what the migrations made."""
    call_command("makemigrations", "notification_outbox", check=True, dry_run=True, verbosity=0)
