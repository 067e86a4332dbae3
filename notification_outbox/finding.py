"""Finding messages in a table of any size, for admin and commands: each lookup is served by an index, or looks at a
bounded part of the table and says so. Reads only.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import connections
from django.db.models import Q, QuerySet, Subquery
from django.db.models.functions import Now

from .conf import Settings
from .drafts import MAX_IDENTIFIER_BYTES, Draft
from .exceptions import ConfigurationError, InvalidMessage
from .explain import Standing
from .lifecycle import State
from .models import OutboxMessage
from .publishers import publisher_for

# where no index helps, so many of the newest ids are looked at
NEWEST = 20_000
# a search by time: so many probes in one query, so many queries
PROBES = 32
ROUNDS = 3
MAX_ID = 2**63 - 1

_WAITS = Q(state=State.PENDING.value, available_at__gt=Now())
_UNTRIED = Q(attempts=0, last_error="")


def is_standing(standing: Standing) -> Q:
    """Return the condition that a row's state is this one, as operators see it."""
    match standing:
        case Standing.DUE:
            return Q(state=State.PENDING.value, available_at__lte=Now())
        case Standing.SCHEDULED:
            return _WAITS & _UNTRIED
        case Standing.RETRYING:
            return _WAITS & ~_UNTRIED
    return Q(state=standing.value)


def estimated_rows(*, using: str) -> int | None:
    """Return about how many messages there are, as the database guesses it; None where it keeps no guess."""
    connection = connections[using]
    table = OutboxMessage._meta.db_table
    guess = {
        "postgresql": "SELECT reltuples FROM pg_class WHERE oid = to_regclass(%s)",
        "mysql": "SELECT table_rows FROM information_schema.tables "
        "WHERE table_schema = DATABASE() AND table_name = %s",
    }.get(connection.vendor)
    if guess is None:
        return None
    with connection.cursor() as cursor:
        cursor.execute(
            guess, [connection.ops.quote_name(table) if connection.vendor == "postgresql" else table]
        )
        found = cursor.fetchone()
    # -1: PostgreSQL has never looked
    return int(found[0]) if found and found[0] is not None and found[0] >= 0 else None


def newest(*, using: str, count: int = NEWEST) -> int:
    """Return the id above which the newest ``count`` ids are."""
    last = OutboxMessage.objects.using(using).order_by("-id").values_list("id", flat=True).first()
    return (last or 0) - count


class Edge(NamedTuple):
    """Where a time falls in the table: rows below ``low`` were made before ``moment``, those from ``high`` on not."""

    moment: datetime
    low: int
    high: int


def edge(ago: timedelta, *, using: str) -> Edge | None:
    """Return where the time ``ago`` falls; None in an empty table.

    There is no index by age: ids grow with time, so a few rounds of probes by id find it.
    """
    rows = OutboxMessage.objects.using(using)
    first = rows.order_by("id").values_list("id", Now()).first()
    last = rows.order_by("-id").values_list("id", flat=True).first()
    if first is None or last is None:
        return None
    moment = first[1] - ago
    low, high = first[0], last + 1
    for _ in range(ROUNDS):
        probes = range(low, high, max((high - low) // PROBES, 1))
        found = (
            rows.order_by("id")
            .values_list(
                *(Subquery(rows.filter(id__gte=at).order_by("id").values("created_at")[:1]) for at in probes)
            )
            .first()
        )
        if not probes or found is None:
            break
        for at, created_at in zip(probes, found, strict=True):
            if created_at is None or created_at >= moment:
                high = at
                break
            low = at
    return Edge(moment, low, high)


class Search(NamedTuple):
    """What a search term names; ``said`` tells it without any secret that was in the term."""

    condition: Q
    said: str


def search(term: str, settings: Settings, rows: QuerySet[OutboxMessage]) -> Search:
    """Return the messages that a term names exactly: by id, ``msg_…``, account, idempotency key or full destination.

    A URL is found through the key of its destination, for each publisher there is. Idempotency keys, which have no
    index, are looked for among the ``NEWEST`` messages only.
    """
    term = term.strip()
    if not 0 < len(term) <= 8 * MAX_IDENTIFIER_BYTES:
        return Search(Q(id__in=[]), "nothing")
    rows = OutboxMessage.objects.using(rows.db)
    ids: list[int] = []
    if term.isascii() and term.isdigit() and int(term) <= MAX_ID:
        ids += [int(term)]
    if name := _uuid(term.removeprefix("msg_")):
        ids += rows.filter(dedup_id=name).values_list("id", flat=True)
    recent = rows.filter(id__gt=newest(using=rows.db), idempotency_key=term)
    ids += recent.order_by("-id").values_list("id", flat=True)[:100]
    found = Q(id__in=ids)
    said = [f"id {', '.join(map(str, ids))}"] if ids else []
    # looked for from the newest: where nearly every row fits, an EXISTS may walk the table instead
    newest_first = rows.order_by("-id").values_list("id", flat=True)
    if newest_first.filter(account_id=term).first():
        found |= Q(account_id=term)
        said.append(f"account {term}")
    keys = _destination_keys(term, settings)
    if newest_first.filter(destination_key__in=keys).first():
        found |= Q(destination_key__in=keys)
        said.append(f"destination {', '.join(key.hex for key in keys)}")
    return Search(found, " or ".join(said) or "nothing")


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _destination_keys(term: str, settings: Settings) -> list[uuid.UUID]:
    keys = []
    for alias, publisher in settings.publishers.items():
        to = term
        try:
            to = publisher_for(publisher).validate(Draft("search", b"", to=term)).to or term
        except (ConfigurationError, InvalidMessage):
            # what is refused today may have been stored before
            pass
        keys.append(settings.lookup.destination_key(alias, to))
    return keys
