"""Two million messages as a shop's outbox holds them after three weeks, for PostgreSQL.

Rows are copies of one sealed row under names of their own: good for finding and moving, not for opening. Numbers
are ids, and grow with time. What goes wrong goes wrong together: a receiver is gone for a day and its messages
die side by side, which is where a plan that expects them spread evenly walks the whole table.
"""

from __future__ import annotations

from django.db import connection, transaction

from notification_outbox import enqueue
from notification_outbox.lifecycle import QuarantineReason
from notification_outbox.models import DeliveryAttempt, OutboxMessage, OutboxStat

COUNT = 2_000_000
# the dead of each of the two bad days
INCIDENT = 50_000
RARE = [reason for reason in QuarantineReason if reason not in ("gone", "rejected")]

# what a row is by its number n; delivered where none holds
SHAPES = f"""
    CASE
        WHEN n <= 3000 THEN 'forgotten'
        WHEN n BETWEEN 100001 AND {100000 + 2 * INCIDENT} AND n % 2 = 0 THEN 'gone'
        WHEN n BETWEEN 500001 AND 540000 AND n % 4 = 0 THEN 'expired'
        WHEN n BETWEEN 600001 AND 610000 THEN 'scheduled'
        WHEN n BETWEEN 700001 AND 740000 AND n % 5 = 0 THEN 'cancelled'
        WHEN n BETWEEN 900001 AND {900000 + 2 * INCIDENT} AND n % 2 = 0 THEN 'rejected'
        WHEN n > 1900000 AND n % 50 = 7 THEN 'blocked'
        WHEN n > 1900000 AND n % 10 = 3 THEN 'retrying'
        WHEN n > 1950000 AND n % 2 = 0 THEN 'due'
        WHEN n > 1999000 AND n % 2 = 1 THEN 'in_flight'
        WHEN n % 100 = 9 THEN 'rare'
        ELSE 'delivered'
    END
"""
SETTLED = "shape IN ('delivered', 'gone', 'rejected', 'rare', 'expired', 'cancelled')"
VALUES = {
    "publisher": "CASE WHEN shape = 'forgotten' THEN 'forgotten' WHEN shape = 'rejected' THEN 'hooks' "
    "WHEN n % 7 = 0 THEN 'mail' ELSE 'default' END",
    "notification_type": "'shop.event' || n % 12",
    "account_id": "CASE WHEN n % 5 = 0 THEN NULL WHEN n % 3 = 0 THEN 'elephant' ELSE (n % 5000)::text END",
    "destination": "'hooks' || n % 300 || '.example.com'",
    "destination_key": "CASE WHEN n % 3 = 0 THEN destination_key "
    "ELSE ('00000000-0000-4000-8000-' || lpad((n % 20000)::text, 12, '0'))::uuid END",
    "idempotency_key": "'order-' || n",
    "ordering_key": "CASE WHEN shape = 'blocked' THEN 'order-' || n % 100 ELSE '' END",
    "dedup_id": "gen_random_uuid()",
    "encryption_key_id": "CASE WHEN n % 2000 = 1 THEN 'lost' WHEN n <= 1200000 THEN 'old' "
    "ELSE encryption_key_id END",
    "sealed": "CASE WHEN n > 400000 OR shape <> 'delivered' THEN sealed END",
    "state": "CASE WHEN shape IN ('forgotten', 'scheduled', 'retrying', 'due') THEN 'pending' "
    "WHEN shape IN ('gone', 'rejected', 'rare') THEN 'quarantined' ELSE shape END",
    "blocked_by": "CASE WHEN shape = 'blocked' THEN 'order' ELSE '' END",
    "quarantine_reason": "CASE WHEN shape IN ('gone', 'rejected') THEN shape "
    f"WHEN shape = 'rare' THEN ('{{{','.join(RARE)}}}'::text[])[1 + n / 100 % {len(RARE)}] ELSE '' END",
    "attempts": "CASE WHEN shape IN ('due', 'scheduled', 'blocked', 'forgotten') THEN 0 ELSE 1 + n % 3 END",
    "due_at": "at",
    "available_at": "CASE WHEN shape IN ('scheduled', 'retrying', 'in_flight') "
    "THEN now() + n % 3000 * interval '1 second' ELSE at END",
    "retry_until": "at + interval '30 days'",
    "lease_token": "CASE WHEN shape = 'in_flight' THEN gen_random_uuid() END",
    "leased_by": "CASE WHEN shape = 'in_flight' THEN 'worker-' || n % 4 ELSE '' END",
    "last_error": "CASE WHEN shape IN ('gone', 'rejected', 'rare', 'expired', 'retrying') THEN 'http_503' "
    "ELSE '' END",
    "created_at": "at",
    "updated_at": "at",
    "settled_at": f"CASE WHEN {SETTLED} THEN at + interval '1 minute' END",
}


def fill() -> None:
    """Commit them all, with the attempts of the dead and a week's counts, as vacuum and analysis leave them."""
    with transaction.atomic():
        enqueue("shop.event", {"n": 0}, to="https://hooks.example.com/shop")
    table, attempts, stats = (
        connection.ops.quote_name(model._meta.db_table)
        for model in (OutboxMessage, DeliveryAttempt, OutboxStat)
    )
    columns = [field.column for field in OutboxMessage._meta.concrete_fields if field.column != "id"]
    values = ", ".join(VALUES.get(column, column) for column in columns)
    # an index that is made at once costs a third of one that grows row by row
    with connection.schema_editor() as editor:
        for index in OutboxMessage._meta.indexes:
            editor.remove_index(OutboxMessage, index)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET id = 0")
        cursor.execute("SET maintenance_work_mem = '512MB'")
        cursor.execute(
            f"INSERT INTO {table} (id, {', '.join(columns)}) "
            f"SELECT n, {values} FROM (SELECT *, {SHAPES} AS shape, "
            f"now() - ({COUNT} - n) * interval '1 second' AS at "
            f"FROM generate_series(1, {COUNT}) AS n, {table} AS template) AS shaped"
        )
        cursor.execute(f"DELETE FROM {table} WHERE id = 0")
        cursor.execute(
            f"SELECT setval(pg_get_serial_sequence(%s, 'id'), {COUNT})", [OutboxMessage._meta.db_table]
        )
        cursor.execute(
            f"INSERT INTO {attempts} (message_id, number, started_at, duration_ms, phase, outcome, status, "
            "error, worker, peer, trigger, stale) "
            "SELECT id, number, created_at + number * interval '1 minute', 100 + number, 'answer', 'retry', 503, "
            "'http_503', 'worker-1', '192.0.2.7:443', '', false "
            f"FROM {table}, generate_series(1, 3) AS number "
            "WHERE state IN ('quarantined', 'expired')"
        )
        # half a day by the minute from two workers, and before that a week by quarters of an hour
        cursor.execute(
            f"INSERT INTO {stats} (minute, lane, outcome, worker, n) "
            "SELECT date_trunc('minute', now()) - ago * interval '1 minute', lane, outcome, worker, 1 + ago % 50 "
            "FROM generate_series(1, 720) AS ago, unnest('{default,mail}'::text[]) AS lane, "
            "unnest('{delivered,retry,rejected,gone}'::text[]) AS outcome, unnest('{a,b}'::text[]) AS worker "
            "UNION ALL "
            "SELECT date_trunc('hour', now()) - ago * interval '15 minutes', lane, outcome, '', 100 "
            "FROM generate_series(49, 672) AS ago, unnest('{default,mail}'::text[]) AS lane, "
            "unnest('{delivered,retry,rejected,gone}'::text[]) AS outcome"
        )
    with connection.schema_editor() as editor:
        for index in OutboxMessage._meta.indexes:
            editor.add_index(OutboxMessage, index)
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {table}, {attempts}, {stats}")
