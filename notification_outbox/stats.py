"""Numbers about the table, one set for worker, admin, commands and metrics. Reads only, and never the whole table."""

from __future__ import annotations

from django.db.models import Min, QuerySet

from .lifecycle import State
from .models import OutboxMessage


def lanes(*, using: str) -> list[str]:
    """Return the lanes that have a message waiting, whether or not anybody serves them."""
    states = [State.PENDING.value, State.IN_FLIGHT.value]
    return _distinct(OutboxMessage.objects.using(using).filter(state__in=states), "publisher")


def key_ids(*, using: str) -> list[str]:
    """Return the ids of the keys that rows which still hold a body are sealed under."""
    return _distinct(OutboxMessage.objects.using(using).filter(sealed__isnull=False), "encryption_key_id")


def _distinct(rows: QuerySet[OutboxMessage], column: str) -> list[str]:
    """Return a column's values by one index probe each; a DISTINCT would walk the whole backlog."""
    found: list[str] = []
    remaining = rows
    while (first := remaining.aggregate(first=Min(column))["first"]) is not None:
        found.append(first)
        remaining = rows.filter(**{f"{column}__gt": first})
    return found
