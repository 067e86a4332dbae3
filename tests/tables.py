"""Tables full of rows, made by SQL: what plans and locks look like when the outbox is not a toy."""

from __future__ import annotations

from django.db import connection, transaction

from notification_outbox import enqueue
from notification_outbox.models import OutboxMessage


def backlog(count: int, *, delivered: int = 0) -> None:
    """Commit ``count`` due rows and ``delivered`` settled ones, then let the planner know.

    Copies of one sealed row under fresh ids: good for claiming, not for opening.
    """
    with transaction.atomic():
        enqueue("t", {"n": 0}, to="https://hooks.acme.com/x")
    table = OutboxMessage._meta.db_table
    changed = {
        "dedup_id": {
            "postgresql": "gen_random_uuid()",
            "mysql": "uuid()",
            "sqlite": "lower(hex(randomblob(16)))",
        }[connection.vendor],
    }
    settled = {"state": "'delivered'", "settled_at": "created_at"}
    with connection.cursor() as cursor:
        for rows, changes in ((count - 1, changed), (delivered, changed | settled)):
            columns = [field.column for field in OutboxMessage._meta.concrete_fields if field.column != "id"]
            values = ", ".join(changes.get(column, column) for column in columns)
            while rows > 0:
                # each round doubles what there is, the first row alone at first
                cursor.execute(
                    f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} LIMIT %s",
                    [rows],
                )
                rows -= cursor.rowcount
        if connection.vendor == "postgresql":
            cursor.execute(f"VACUUM ANALYZE {table}")
        elif connection.vendor == "mysql":
            cursor.execute(f"ANALYZE TABLE {table}")
            cursor.fetchall()
