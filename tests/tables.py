"""Rows in every state, and tables full of them: what plans and locks look like when the outbox is not a toy."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import connection, transaction
from django.db.models.functions import Now

from notification_outbox import enqueue
from notification_outbox.models import OutboxMessage

# what makes a fresh row one of its state
SHAPES: dict[str, dict[str, Any]] = {
    "pending": {},
    "in_flight": {"lease_token": uuid.uuid4(), "leased_by": "w"},
    "blocked": {"blocked_by": "order"},
    "delivered": {"settled_at": Now()},
    "quarantined": {"settled_at": Now(), "quarantine_reason": "gone"},
    "expired": {"settled_at": Now()},
    "cancelled": {"settled_at": Now()},
}


def make(
    state: str = "pending",
    *,
    to: str = "https://hooks.acme.com/x",
    account_id: str | None = None,
    idempotency_key: str | None = None,
    **changes: Any,
) -> int:
    """Commit one message in a state, with further columns changed; return its id."""
    with transaction.atomic():
        row_id = enqueue("t", {}, to=to, account_id=account_id, idempotency_key=idempotency_key).id
        OutboxMessage.objects.filter(id=row_id).update(state=state, **{**SHAPES[state], **changes})
    return row_id


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
