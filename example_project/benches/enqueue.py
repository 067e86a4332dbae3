"""The cost of enqueue(), against what the same row costs by other means."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection, transaction

from notification_outbox import Draft, enqueue, enqueue_many
from notification_outbox.models import OutboxMessage

from .measuring import Bar, Result, medians

ROWS = 1000


def bench_enqueue() -> Result:
    """CPU of one row by enqueue(), by enqueue_many(), by the ORM and by psycopg alone, 1 KB sealed."""
    url = "https://hooks.acme.com/shop?token=abc"
    payload = {"order": 7, "lines": [{"sku": f"sku-{n}", "count": n, "price": "10.00"} for n in range(18)]}
    with transaction.atomic():
        sample = OutboxMessage.objects.get(id=enqueue("order.paid", payload, to=url, account_id=7).id)
    columns = {field.attname: getattr(sample, field.attname) for field in sample._meta.fields}
    del columns["id"]
    columns |= {"sealed": bytes(sample.sealed or b""), "content_mac": bytes(sample.content_mac)}
    names = ", ".join(columns)
    insert = f"INSERT INTO {sample._meta.db_table} ({names}) VALUES ({', '.join(['%s'] * len(columns))})"

    def fresh() -> dict[str, Any]:
        now = datetime.now(UTC)
        times = {"due_at": now, "available_at": now, "created_at": now, "updated_at": now}
        return columns | times | {"dedup_id": uuid.uuid4(), "retry_until": now + timedelta(days=3)}

    @contextmanager
    def rolled_back() -> Iterator[None]:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)

    @rolled_back()
    def by_enqueue() -> None:
        for _ in range(ROWS):
            enqueue("order.paid", payload, to=url, account_id=7)

    @rolled_back()
    def by_enqueue_many() -> None:
        enqueue_many(Draft("order.paid", payload, to=url, account_id=7) for _ in range(ROWS))

    @rolled_back()
    def by_create() -> None:
        for _ in range(ROWS):
            OutboxMessage.objects.create(**fresh())

    @rolled_back()
    def by_psycopg() -> None:
        with connection.connection.cursor() as cursor:
            for _ in range(ROWS):
                cursor.execute(insert, list(fresh().values()))

    spent = medians(
        {"enqueue": by_enqueue, "enqueue_many": by_enqueue_many, "create": by_create, "psycopg": by_psycopg}
    )
    return Result(
        ratios={
            "enqueue/create": spent["enqueue"] / spent["create"],
            "enqueue_many/enqueue": spent["enqueue_many"] / spent["enqueue"],
            "enqueue/psycopg": spent["enqueue"] / spent["psycopg"],
            "create/psycopg": spent["create"] / spent["psycopg"],
        },
        bars={"enqueue/create": Bar("at most", 1.6), "enqueue_many/enqueue": Bar("at most", 0.5)},
    )
