"""Taking leases, keeping them, and taking them back from workers that are gone."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet
from django.db.models.functions import Length, Now

from ..envelope import BOUND, Binding, Claim, message_id
from ..lifecycle import LONE_AT, TOGETHER, UNKNOWN_KEY, Lone, QuarantineReason, State
from ..models import OutboxMessage
from ..tally import Counted, Tally
from ..transactions import lock_first, short_transaction
from .rows import UNLEASED, Ended, StateLiteral, after, all_rows, among, clock, locked, pause_until

LAPSE_SPREAD = timedelta(milliseconds=50)

# what a claim carries besides its binding: whole model instances cost several times as much
CLAIMED = (
    "id",
    "attempts",
    "past_attempts",
    "rejections",
    "lost_leases",
    "created_at",
    "traceparent",
    "sealed",
)


class Claimed(NamedTuple):
    """What a claim brought. ``more``: it saw as many as it asked for, so more may be due.

    ``lone_met``: it left a message where it was that may only be claimed alone.
    """

    claims: list[Claim]
    more: bool
    lone_met: bool
    ended: list[Ended]


def claim(
    publisher: str,
    *,
    limit: int,
    budget: int,
    worker: str,
    lease: float,
    suspects: int = TOGETHER,
    lone: Lone = Lone.TAKEN,
    tally: Tally | None = None,
    using: str,
) -> Claimed:
    """Lease up to ``limit`` due rows of one lane, oldest due first, under a fresh token.

    Stops before sealed bytes exceed ``budget``, but takes one row if there is one. ``lease`` is in seconds. Of
    rows that lost a lease it takes at most ``suspects``, of those that may only be claimed alone what ``lone``
    says. Overdue rows met on the way are expired, and counted in ``tally`` (default: in rows of their own).
    Never waits: what others hold locked is left to them.
    """
    token = uuid.uuid4()
    # a scan must not fill up with rows that it would leave
    innocent_below = None
    if lone is Lone.SKIPPED or not suspects:
        innocent_below = LONE_AT if suspects else 1
    with (tally or Tally()).transaction(using) as count:
        scanned = _scan(publisher, innocent_below, limit, using)
        overdue: list[int] = []
        taken: list[int] = []
        more = len(scanned) == limit
        lone_met = False
        spent = 0
        for row_id, lost_leases, size, is_overdue in scanned:
            if is_overdue:
                overdue.append(row_id)
            elif lost_leases >= LONE_AT:
                if lone is Lone.TAKEN:
                    taken, more = [row_id], True
                    break
                lone_met = True
            elif not lost_leases or suspects:
                spent += size or 0
                if taken and spent > budget:
                    more = True
                    break
                taken.append(row_id)
                suspects -= lost_leases
        ended = _expire(overdue, publisher, count, using)
        if not taken:
            return Claimed([], more, lone_met, ended)
        rows = {row[0]: row for row in _take(taken, token, worker, lease, using)}
    zone = connections[using].timezone
    claims = [_claim(token, zone, *rows[row_id]) for row_id in taken]
    return Claimed(claims, more, lone_met, ended)


def _scan(publisher: str, innocent_below: int | None, limit: int, using: str) -> list[tuple[Any, ...]]:
    """Return id, lost leases, size and whether it is overdue of the first rows that are due, locked."""
    if connections[using].vendor == "mysql":
        return list(lock_first(_due(publisher, innocent_below, using), limit))
    with connections[using].cursor() as cursor:
        cursor.execute(*_scanning(publisher, innocent_below, limit, using))
        scanned: list[tuple[Any, ...]] = cursor.fetchall()
        return scanned


@lru_cache
def _scanning(
    publisher: str, innocent_below: int | None, limit: int, using: str
) -> tuple[str, tuple[Any, ...]]:
    """Return the query, which made anew for every claim costs a tenth of it."""
    rows = lock_first(_due(publisher, innocent_below, using), limit)
    sql, parameters = rows.query.get_compiler(using).as_sql()
    return sql, tuple(parameters)


def _due(publisher: str, innocent_below: int | None, using: str) -> QuerySet[OutboxMessage, Any]:
    due = all_rows(using).filter(
        publisher=publisher, state=StateLiteral(State.PENDING), available_at__lte=Now()
    )
    if innocent_below is not None:
        due = due.filter(lost_leases__lt=innocent_below)
    overdue = ExpressionWrapper(Q(retry_until__lte=Now()), output_field=BooleanField())
    rows = due.order_by("available_at", "id").annotate(size=Length("sealed"), overdue=overdue)
    return rows.values_list("id", "lost_leases", "size", "overdue")


def _take(
    ids: Sequence[int], token: uuid.UUID, worker: str, lease: float, using: str
) -> Iterable[tuple[Any, ...]]:
    """Lease rows that are locked; return what claims are made of, in any order."""
    connection = connections[using]
    if connection.vendor == "postgresql":
        return _take_returning(ids, (token, worker, timedelta(seconds=lease)), connection)
    rows = among(ids, using)
    rows.update(
        state=State.IN_FLIGHT.value,
        attempts=F("attempts") + 1,
        lease_token=token,
        leased_by=worker,
        available_at=after(lease),
        updated_at=Now(),
    )
    return rows.values_list(*CLAIMED, *BOUND)


def _take_returning(
    ids: Sequence[int], parameters: tuple[Any, ...], connection: BaseDatabaseWrapper
) -> list[tuple[Any, ...]]:
    """Do the same in PostgreSQL's words: the ORM knows no RETURNING and no binary results, each worth a third."""
    # other databases' sites need no driver for this one
    from psycopg import Cursor
    from psycopg.pq import Format

    quote = connection.ops.quote_name
    raw: Any = Cursor(connection.connection)
    raw.format = Format.BINARY
    with connection.make_cursor(raw) as cursor:
        cursor.execute(
            f"UPDATE {quote(OutboxMessage._meta.db_table)} SET state = '{State.IN_FLIGHT.value}',"
            " attempts = attempts + 1, lease_token = %s, leased_by = %s,"
            " available_at = STATEMENT_TIMESTAMP() + %s, updated_at = STATEMENT_TIMESTAMP()"
            f" WHERE id IN ({', '.join(map(str, ids))})"
            f" RETURNING {', '.join(map(quote, (*CLAIMED, *BOUND)))}",
            parameters,
        )
        taken: list[tuple[Any, ...]] = cursor.fetchall()
        return taken


def _claim(
    token: uuid.UUID,
    zone: tzinfo | None,
    row_id: int,
    attempts: int,
    past_attempts: int,
    rejections: int,
    lost_leases: int,
    created_at: datetime,
    traceparent: str,
    sealed: Any,
    *binding: Any,
) -> Claim:
    return Claim(
        id=row_id,
        token=token,
        binding=Binding(*binding),
        sealed=None if sealed is None else bytes(sealed),
        attempt=attempts,
        number=past_attempts + attempts,
        rejections=rejections,
        lost_leases=lost_leases,
        # the driver's own zone, or the one that Django wants
        created_at=created_at.replace(tzinfo=zone),
        traceparent=traceparent,
    )


def _expire(ids: Sequence[int], publisher: str, count: Counted, using: str) -> list[Ended]:
    """Settle rows whose time ran out. One that waited for a key it never got is not simply late."""
    if not ids:
        return []
    late = among(ids, using)
    settled: dict[str, Any] = {"settled_at": Now(), "updated_at": Now()}
    late.filter(last_error__startswith=UNKNOWN_KEY).update(
        state=State.QUARANTINED.value, quarantine_reason=QuarantineReason.UNREADABLE.value, **settled
    )
    late.filter(state=State.PENDING.value).update(state=State.EXPIRED.value, **settled)
    return _ended(ids, publisher, count, using)


def _ended(ids: Sequence[int], publisher: str, count: Counted, using: str) -> list[Ended]:
    """Count what a scan ended, by its reason if it has one; return who it is."""
    ended = []
    outcomes = []
    rows = among(ids, using).values_list("id", "dedup_id", "state", "quarantine_reason")
    for row_id, dedup_id, state, reason in rows:
        ended.append(Ended(row_id, message_id(dedup_id), State(state)))
        outcomes.append((publisher, reason or state))
    count(outcomes, lambda: clock(ids, using))
    return ended


class Recovered(NamedTuple):
    """What became of rows whose lease ended: how many wait again, and which ended their workers too often."""

    pending: int
    ended: list[Ended]


def recover(publisher: str, *, limit: int, tally: Tally | None = None, using: str) -> Recovered:
    """Put up to ``limit`` rows whose lease ended back to pending, spread out.

    One that was already claimed alone and lost its lease again is quarantined: it is what ends its workers.
    ``tally`` as for ``claim``.
    """
    with (tally or Tally()).transaction(using) as count:
        leases = all_rows(using).filter(
            publisher=publisher, state=StateLiteral(State.IN_FLIGHT), available_at__lte=Now()
        )
        ended = lock_first(leases.order_by("available_at", "id"), limit)
        lapsed = list(ended.values_list("id", "lost_leases"))
        waiting = [row_id for row_id, lost_leases in lapsed if lost_leases < LONE_AT]
        deadly = [row_id for row_id, lost_leases in lapsed if lost_leases >= LONE_AT]
        lost: dict[str, Any] = {"lost_leases": F("lost_leases") + 1, "updated_at": Now(), **UNLEASED}
        if waiting:
            pauses = {row_id: LAPSE_SPREAD * place for place, row_id in enumerate(waiting)}
            among(waiting, using).update(state=State.PENDING.value, available_at=pause_until(pauses), **lost)
        if deadly:
            among(deadly, using).update(
                state=State.QUARANTINED.value,
                quarantine_reason=QuarantineReason.WORKER_LOST.value,
                settled_at=Now(),
                **lost,
            )
        return Recovered(len(waiting), _ended(deadly, publisher, count, using) if deadly else [])


def renew(claims: Sequence[Claim], *, lease: float, using: str) -> set[int]:
    """Make the leases end ``lease`` seconds from now; return the ids of those that were lost."""
    with short_transaction(using):
        held = dict(locked((claim.id for claim in claims), using).values_list("id", "lease_token"))
        kept = [claim.id for claim in claims if held.get(claim.id) == claim.token]
        if kept:
            among(kept, using).update(available_at=after(lease), updated_at=Now())
    return {claim.id for claim in claims}.difference(kept)


def next_due(publishers: Iterable[str], *, using: str) -> float | None:
    """Return in how many seconds (0: now) the first row of these lanes may be taken; None when none waits."""
    waits: list[float] = []
    for publisher in publishers:
        # a row that comes back between the first two looks was seen by neither
        for state in (State.PENDING, State.IN_FLIGHT, State.PENDING):
            rows = all_rows(using).filter(publisher=publisher, state=StateLiteral(state))
            first = (
                rows.order_by("available_at", "id")
                .annotate(now=Now())
                .values_list("available_at", "now")
                .first()
            )
            if first is not None:
                waits.append(max((first[0] - first[1]).total_seconds(), 0.0))
    return min(waits, default=None)
