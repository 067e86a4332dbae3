"""Finding messages in a table of any size, for admin and commands: each lookup is served by an index, or looks at a
bounded part of the table and says so. Reads only.

A planner takes what is asked for to be spread evenly over the table, and walks it from the newest row on when that
seems short. Messages that die, die together: such a walk may meet none for a million rows. So what may fit is found
first, by one index whose order nothing else provides, so many rows and no more; the rest is asked of these.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple, cast

from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet, Subquery
from django.db.models.functions import Now

from . import stats
from .conf import Settings
from .drafts import MAX_IDENTIFIER_BYTES, Draft
from .exceptions import ConfigurationError, InvalidMessage
from .explain import Standing
from .leases import Among
from .lifecycle import State
from .models import OutboxMessage
from .publishers import publisher_for

# so many rows that an index finds are looked at, and where none helps so many of the newest ids
NEWEST = 20_000
# a search by time: so many probes in one query, so many queries
PROBES = 32
ROUNDS = 3
MAX_ID = 2**63 - 1

_WAITS = Q(state=State.PENDING.value, available_at__gt=Now())
_UNTRIED = Q(attempts=0, last_error="")
_PENDING = (Standing.DUE, Standing.SCHEDULED, Standing.RETRYING)


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


def state_of(standing: Standing) -> State:
    """Return the state of a row that operators see so."""
    return State.PENDING if standing in _PENDING else State(standing.value)


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


# ids by one index, in its order
Source = QuerySet[OutboxMessage, int]


def of_newest(*, using: str, since: int = 0, below: int = MAX_ID) -> Source:
    """Return the ids of all messages, or of those from an id on or below one, the newest first."""
    return _ids(OutboxMessage.objects.using(using).filter(id__gte=since, id__lt=below), "-id")


def of_reason(reason: str, *, using: str) -> Source:
    """Return the ids of messages that were quarantined for this, the newest first."""
    rows = OutboxMessage.objects.using(using).filter(state=State.QUARANTINED.value)
    return _ids(rows.filter(_exactly("quarantine_reason", reason)), "-quarantine_reason", "-id")


def of_key(key_id: str, *, using: str) -> Source:
    """Return the ids of messages that hold a body under this key, the newest first."""
    rows = OutboxMessage.objects.using(using).filter(sealed__isnull=False)
    return _ids(rows.filter(_exactly("encryption_key_id", key_id)), "-encryption_key_id", "-id")


def of_account(account_id: str, *, using: str) -> Source:
    """Return the ids of an account's messages, the newest first."""
    rows = OutboxMessage.objects.using(using).filter(_exactly("account_id", account_id))
    return _ids(rows, "-account_id", "-id")


def of_destination(key: uuid.UUID, *, using: str, state: str | None = None) -> Source:
    """Return the ids of a destination's messages, or of those in a state: quarantined first, delivered late."""
    rows = OutboxMessage.objects.using(using).filter(_exactly("destination_key", key))
    return _ids(rows if state is None else rows.filter(state=state), "-destination_key", "-state")


def of_state(state: str, *, using: str) -> Source:
    """Return the ids of messages in a state: those first whose time ends last, which nearly are the newest."""
    return _ids(OutboxMessage.objects.using(using).filter(state=state), "-retry_until")


def of_standing(standing: Standing, *, using: str) -> list[Source]:
    """Return the ids of messages in a state as operators see it; of those that wait, lane by lane, the next first."""
    if standing not in _PENDING:
        return [of_state(standing.value, using=using)]
    rows = OutboxMessage.objects.using(using).filter(is_standing(standing))
    return [_ids(rows.filter(publisher=lane), "available_at", "id") for lane in stats.lanes(using=using)]


def _ids(rows: QuerySet[OutboxMessage], *order: str) -> Source:
    return rows.order_by(*order).values_list("id", flat=True)


def _exactly(column: str, value: str | uuid.UUID) -> Q:
    """Return an equality that keeps the column's place in the order, which only its own index then provides."""
    return Q(**{f"{column}__gte": value, f"{column}__lte": value})


class Found(NamedTuple):
    """The ids that fit, the newest first. ``complete``: all rows that may fit were looked at."""

    ids: list[int]
    complete: bool


def among(sources: Iterable[Source], rows: QuerySet[OutboxMessage], *, limit: int) -> Found:
    """Return which of the rows the sources lead to, each looked at to its ``limit`` and no more than that in all."""
    looked_at: set[int] = set()
    complete = True
    for source in sources:
        ids = list(source[: limit + 1])
        complete = complete and len(ids) <= limit
        looked_at |= set(ids[:limit])
    newest_first = sorted(looked_at, reverse=True)
    complete = complete and len(newest_first) <= limit
    # a column and not a condition: that would send the planner to an index of its own again
    fits = ExpressionWrapper(cast(Q, rows.query.where), output_field=BooleanField())
    judged = of_ids(newest_first[:limit], OutboxMessage.objects.using(rows.db)).annotate(fits=fits)
    return Found([row_id for row_id, fits in judged.values_list("id", "fits") if fits], complete)


def of_ids(ids: Iterable[int], rows: QuerySet[OutboxMessage]) -> QuerySet[OutboxMessage]:
    """Return those of the rows that have one of the ids, however many these are; the newest first."""
    return rows.filter(Among(F("id"), ids)).order_by("-id")


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
    sources: list[Source]


def search(term: str, settings: Settings, rows: QuerySet[OutboxMessage]) -> Search:
    """Return the messages that a term names exactly: by id, ``msg_…``, account, idempotency key or full destination.

    A URL is found through the key of its destination, for each publisher there is. Idempotency keys, which have no
    index, are looked for among the ``NEWEST`` messages only.
    """
    term = term.strip()
    if not 0 < len(term) <= 8 * MAX_IDENTIFIER_BYTES:
        return Search(Q(id__in=[]), "nothing", [])
    rows = OutboxMessage.objects.using(rows.db)
    ids: list[int] = []
    if term.isascii() and term.isdigit() and int(term) <= MAX_ID:
        ids += [int(term)]
    if name := _uuid(term.removeprefix("msg_")):
        ids += rows.filter(dedup_id=name).values_list("id", flat=True)
    recent = rows.filter(id__gt=newest(using=rows.db), idempotency_key=term)
    ids += recent.order_by("-id").values_list("id", flat=True)[:100]
    found = Q(id__in=ids)
    sources = [_ids(rows.filter(id__in=ids), "-id")]
    said = [f"id {', '.join(map(str, ids))}"] if ids else []
    account = of_account(term, using=rows.db)
    if account.first():
        found |= Q(account_id=term)
        sources.append(account)
        said.append(f"account {term}")
    for key in _destination_keys(term, settings):
        destination = of_destination(key, using=rows.db)
        if destination.first():
            found |= Q(destination_key=key)
            sources.append(destination)
            said.append(f"destination {key.hex}")
    return Search(found, " or ".join(said) or "nothing", sources)


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
