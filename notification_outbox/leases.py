"""Leases: the only code that moves a message after its insert.

``claim`` takes due rows, ``settle`` records what came of them, ``renew`` keeps them, ``release`` hands them back
unattempted, ``requeue`` revives dead letters, ``cancel`` and ``quarantine`` give up live ones, ``send_now`` brings
pending ones forward, ``expunge`` erases bodies, ``purge`` deletes what is kept no longer. Every mover first locks
its rows in id order and then writes only those that are still as it believes (compare-and-swap on the lease
token), so that a stale worker harms nobody; what it lost, it is told. The database owns the clock. Transactions
are short, READ COMMITTED, and wait for a lock only in their first statement.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import (
    BooleanField,
    Case,
    CharField,
    DateTimeField,
    DurationField,
    Expression,
    ExpressionWrapper,
    F,
    Lookup,
    Q,
    QuerySet,
    Value,
    When,
)
from django.db.models.functions import Least, Length, Now

from .conf import Retention
from .envelope import BOUND, Binding, Claim, message_id
from .lifecycle import (
    DEAD,
    LIVE,
    LONE_AT,
    SETTLED,
    TOGETHER,
    UNKNOWN_KEY,
    Lone,
    Outcome,
    QuarantineReason,
    State,
    Verdict,
    patience,
)
from .models import DeliveryAttempt, OutboxMessage
from .tally import Counted, Tally
from .transactions import delete, lock, short_transaction

LAPSE_SPREAD = timedelta(milliseconds=50)
MAX_ERROR = 128

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
# the columns a row has while nobody holds it
UNLEASED: dict[str, Any] = {"lease_token": None, "leased_by": ""}


class StateLiteral(Expression):
    """A state written into the SQL as a literal: with a parameter, a generic plan cannot use partial indexes."""

    output_field = CharField()

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def as_sql(self, *_args: Any, **_kwargs: Any) -> tuple[str, tuple[()]]:
        return f"'{self.state.value}'", ()


class Among(Lookup):
    """``Among(F("id"), ids)``: ids written into the SQL, as parameters each of many costs as much as its row."""

    def get_prep_lookup(self) -> list[int]:
        return [int(row_id) for row_id in self.rhs]

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        left, parameters = self.process_lhs(compiler, connection)
        return f"{left} IN ({', '.join(map(str, self.rhs)) or 'NULL'})", tuple(parameters)


class Settlement(NamedTuple):
    """One claim and what it came to; with ``took`` (seconds) where the timeline should remember it."""

    claim: Claim
    outcome: Outcome
    worker: str = ""
    took: float | None = None


class Ended(NamedTuple):
    """A message that a scan found at its end: expired, or quarantined."""

    id: int
    message_id: str
    state: State


class Claimed(NamedTuple):
    """What a claim brought. ``more``: it saw as many as it asked for, so more may be due.

    ``lone_met``: it left a message where it was that may only be claimed alone.
    """

    claims: list[Claim]
    more: bool
    lone_met: bool
    ended: list[Ended]


def _rows(using: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(using)


def _among(ids: Iterable[int], using: str) -> QuerySet[OutboxMessage]:
    return _rows(using).filter(Among(F("id"), ids))


def _locked(ids: Iterable[int], using: str) -> QuerySet[OutboxMessage]:
    """Return the rows to lock in id order. Add no condition: MariaDB would lock by the index that serves it."""
    return lock(_among(ids, using).order_by("id"))


def _lock_those(
    ids: Iterable[int], states: Collection[State], using: str, *, with_body: bool = False
) -> list[int]:
    """Lock rows in id order; return the ids of those in one of the states (and not expunged)."""
    holds = ExpressionWrapper(Q(sealed__isnull=False), output_field=BooleanField())
    rows = _locked(ids, using).annotate(holds=holds).values_list("id", "state", "holds")
    return [row_id for row_id, state, body in rows if state in states and (body or not with_body)]


def _after(seconds: float) -> Any:
    return Now() + Value(timedelta(seconds=seconds), output_field=DurationField())


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
        with connections[using].cursor() as cursor:
            cursor.execute(*_scan(using, publisher, innocent_below, limit))
            scanned = cursor.fetchall()
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
    claims = [_claim(token, *rows[row_id]) for row_id in taken]
    return Claimed(claims, more, lone_met, ended)


@lru_cache
def _scan(
    using: str, publisher: str, innocent_below: int | None, limit: int
) -> tuple[str, tuple[Any, ...]]:
    """Return the query for due rows, oldest first, locked: made anew for every claim it costs a tenth of it."""
    due = _rows(using).filter(
        publisher=publisher, state=StateLiteral(State.PENDING), available_at__lte=Now()
    )
    if innocent_below is not None:
        due = due.filter(lost_leases__lt=innocent_below)
    overdue = ExpressionWrapper(Q(retry_until__lte=Now()), output_field=BooleanField())
    rows = due.order_by("available_at", "id").annotate(size=Length("sealed"), overdue=overdue)
    scanned = lock(rows, skip_locked=True).values_list("id", "lost_leases", "size", "overdue")[:limit]
    return scanned.query.sql_with_params()


def _take(
    ids: Sequence[int], token: uuid.UUID, worker: str, lease: float, using: str
) -> Iterable[tuple[Any, ...]]:
    """Lease rows that are locked; return what claims are made of, in any order."""
    if connections[using].vendor == "postgresql":
        # reading them again would cost as much as writing them
        with connections[using].cursor() as cursor:
            cursor.execute(_take_sql(ids), (token, worker, timedelta(seconds=lease)))
            return cursor.fetchall()
    _among(ids, using).update(
        state=State.IN_FLIGHT.value,
        attempts=F("attempts") + 1,
        lease_token=token,
        leased_by=worker,
        available_at=_after(lease),
        updated_at=Now(),
    )
    return _among(ids, using).values_list(*CLAIMED, *BOUND)


def _take_sql(ids: Sequence[int]) -> str:
    meta = OutboxMessage._meta
    wanted = ", ".join(meta.get_field(name).column for name in (*CLAIMED, *BOUND))
    return (
        f"UPDATE {meta.db_table} SET state = '{State.IN_FLIGHT.value}', attempts = attempts + 1, lease_token = %s,"
        " leased_by = %s, available_at = STATEMENT_TIMESTAMP() + %s, updated_at = STATEMENT_TIMESTAMP()"
        f" WHERE id IN ({', '.join(map(str, ids))}) RETURNING {wanted}"
    )


def _claim(
    token: uuid.UUID,
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
        created_at=created_at,
        traceparent=traceparent,
    )


def _expire(ids: Sequence[int], publisher: str, count: Counted, using: str) -> list[Ended]:
    """Settle rows whose time ran out. One that waited for a key it never got is not simply late."""
    if not ids:
        return []
    late = _among(ids, using)
    settled: dict[str, Any] = {"settled_at": Now(), "updated_at": Now()}
    late.filter(last_error__startswith=UNKNOWN_KEY).update(
        state=State.QUARANTINED.value, quarantine_reason=QuarantineReason.UNREADABLE.value, **settled
    )
    late.filter(state=State.PENDING.value).update(state=State.EXPIRED.value, **settled)
    return _ended(ids, publisher, count, using)


def _ended(ids: Sequence[int], publisher: str, count: Counted, using: str) -> list[Ended]:
    """Count what a scan ended, by its reason if it has one; return who it is."""
    ended = []
    for row_id, dedup_id, state, reason, now in (
        _among(ids, using)
        .annotate(now=Now())
        .values_list("id", "dedup_id", "state", "quarantine_reason", "now")
    ):
        ended.append(Ended(row_id, message_id(dedup_id), State(state)))
        count([(publisher, reason or state)], now)
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
        lapsed = list(
            lock(
                _rows(using)
                .filter(publisher=publisher, state=StateLiteral(State.IN_FLIGHT), available_at__lte=Now())
                .order_by("available_at", "id"),
                skip_locked=True,
            ).values_list("id", "lost_leases")[:limit]
        )
        waiting = [row_id for row_id, lost_leases in lapsed if lost_leases < LONE_AT]
        deadly = [row_id for row_id, lost_leases in lapsed if lost_leases >= LONE_AT]
        lost: dict[str, Any] = {"lost_leases": F("lost_leases") + 1, "updated_at": Now(), **UNLEASED}
        if waiting:
            pauses = {row_id: LAPSE_SPREAD * place for place, row_id in enumerate(waiting)}
            _among(waiting, using).update(state=State.PENDING.value, available_at=_pause(pauses), **lost)
        if deadly:
            _among(deadly, using).update(
                state=State.QUARANTINED.value,
                quarantine_reason=QuarantineReason.WORKER_LOST.value,
                settled_at=Now(),
                **lost,
            )
        return Recovered(len(waiting), _ended(deadly, publisher, count, using) if deadly else [])


def renew(claims: Sequence[Claim], *, lease: float, using: str) -> set[int]:
    """Make the leases end ``lease`` seconds from now; return the ids of those that were lost."""
    with short_transaction(using):
        held = dict(_locked((claim.id for claim in claims), using).values_list("id", "lease_token"))
        kept = [claim.id for claim in claims if held.get(claim.id) == claim.token]
        if kept:
            _among(kept, using).update(available_at=_after(lease), updated_at=Now())
    return {claim.id for claim in claims}.difference(kept)


def release(claims: Iterable[Claim], *, using: str) -> list[Settlement]:
    """Hand rows back unattempted, due as before; return those that were lost."""
    handed_back = Outcome(Verdict.RELEASED)
    return settle([Settlement(claim, handed_back) for claim in claims], using=using)


def settle(settlements: Sequence[Settlement], *, tally: Tally | None = None, using: str) -> list[Settlement]:
    """Record what came of claimed rows; return the settlements that changed nothing.

    Only the holder of the lease may fail, release or quarantine a row. A success is a fact: it may land after
    the lease was lost, on whatever state but delivered, as long as the row is the same message (``dedup_id``;
    ids repeat after a restore). Attempts are remembered either way, those that decided nothing as stale.
    What changed something is counted in ``tally`` (default: in rows of its own), but for releases.
    """
    lost: list[Settlement] = []
    groups: defaultdict[tuple[Any, ...], list[Settlement]] = defaultdict(list)
    with (tally or Tally()).transaction(using) as count:
        locked = _locked((settlement.claim.id for settlement in settlements), using).annotate(now=Now())
        rows = {row[0]: row for row in locked.values_list("id", "state", "lease_token", "now")}
        theirs = {
            claim.id: claim.binding.dedup_id
            for claim, *_ in settlements
            if rows.get(claim.id, ())[1:3] != (State.IN_FLIGHT.value, claim.token)
        }
        same = set()
        if theirs:
            found = _among(theirs, using).exclude(state=State.DELIVERED.value)
            same = {
                row_id
                for row_id, dedup_id in found.values_list("id", "dedup_id")
                if dedup_id == theirs[row_id]
            }
        for settlement in settlements:
            claim, outcome = settlement.claim, settlement.outcome
            late = outcome.verdict is Verdict.DELIVERED and claim.id in same
            if claim.id in theirs and not late:
                lost.append(settlement)
                continue
            kind = (
                outcome.verdict,
                outcome.reason,
                outcome.error[:MAX_ERROR],
                outcome.answer.status,
                outcome.rejections,
            )
            groups[kind].append(settlement)
        for group in groups.values():
            _write(group, using)
        known = [settlement for settlement in settlements if settlement.claim.id in rows]
        _remember(known, {settlement.claim.id for settlement in lost}, using)
        counted = [
            (claim.binding.publisher, outcome.reason or outcome.verdict)
            for group in groups.values()
            for claim, outcome, *_ in group
            if outcome.verdict is not Verdict.RELEASED
        ]
        if counted:
            count(counted, next(iter(rows.values()))[3])
    return lost


def _write(group: Sequence[Settlement], using: str) -> None:
    """Write one kind of outcome onto rows that are locked and known to be ours to write."""
    first = group[0].outcome
    rows = _among([settlement.claim.id for settlement in group], using)
    changes: dict[str, Any] = {"updated_at": Now(), "blocked_by": "", "quarantine_reason": "", **UNLEASED}
    if first.verdict in (Verdict.RETRY, Verdict.RELEASED):
        pauses = {
            claim.id: timedelta(seconds=outcome.delay)
            for claim, outcome, *_ in group
            if outcome.delay is not None
        }
        if len(pauses) < len(group):
            pauses |= _patience([claim.id for claim, *_ in group if claim.id not in pauses], using)
        changes |= {"state": State.PENDING.value, "available_at": _pause(pauses)}
        if first.verdict is Verdict.RETRY:
            changes["due_at"] = changes["available_at"]
    else:
        changes |= {"state": first.verdict.value, "settled_at": Now()}
    if first.reason is not None:
        changes["quarantine_reason"] = first.reason.value
    if first.verdict is Verdict.RELEASED:
        changes["attempts"] = F("attempts") - 1
        if first.error:
            changes["last_error"] = first.error[:MAX_ERROR]
    else:
        changes |= {
            "lost_leases": 0,
            "rejections": first.rejections,
            "last_error": first.error[:MAX_ERROR],
            "last_status": first.answer.status,
        }
    rows.update(**changes)


def _patience(ids: Sequence[int], using: str) -> dict[int, timedelta]:
    """Return the pause of rows that wait for another worker: the longer they wait, the longer."""
    ages = _among(ids, using).annotate(now=Now()).values_list("id", "now", "due_at")
    return {
        row_id: timedelta(seconds=patience((now - due_at).total_seconds())) for row_id, now, due_at in ages
    }


def _pause(pauses: Mapping[int, timedelta]) -> Expression:
    """Return the time each row may next be taken: now and its pause, never beyond ``retry_until``."""
    distinct = set(pauses.values())
    pause: Expression
    if len(distinct) == 1:
        pause = Value(distinct.pop(), output_field=DurationField())
    else:
        pause = Case(
            *(
                When(id=row_id, then=Value(length, output_field=DurationField()))
                for row_id, length in pauses.items()
            ),
            output_field=DurationField(),
        )
    return Least(Now() + pause, F("retry_until"), output_field=DateTimeField())


def _remember(settlements: Iterable[Settlement], lost: Collection[int], using: str) -> None:
    attempts = []
    for claim, outcome, worker, took in settlements:
        if took is None or outcome.verdict is Verdict.RELEASED:
            continue
        attempts.append(
            DeliveryAttempt(
                message_id=claim.id,
                number=claim.number,
                started_at=Now() - Value(timedelta(seconds=took), output_field=DurationField()),
                duration_ms=round(took * 1000),
                phase=outcome.answer.phase,
                outcome=outcome.verdict.value,
                status=outcome.answer.status,
                error=outcome.error[:MAX_ERROR],
                worker=worker,
                peer=outcome.answer.peer,
                trigger="requeue" if claim.number > claim.attempt else "",
                stale=claim.id in lost,
            )
        )
    if attempts:
        # a settle repeated after a lost COMMIT meets its own rows
        DeliveryAttempt.objects.using(using).bulk_create(attempts, ignore_conflicts=True)


def requeue(ids: Sequence[int], *, using: str) -> int:
    """Give dead letters fresh time and attempts; return how many were still dead and held a body."""
    with short_transaction(using):
        found = _lock_those(ids, DEAD, using, with_body=True)
        if found:
            _among(found, using).update(
                state=State.PENDING.value,
                quarantine_reason="",
                settled_at=None,
                due_at=Now(),
                available_at=Now(),
                retry_until=Now() + F("give_up_after"),
                past_attempts=F("past_attempts") + F("attempts"),
                attempts=0,
                rejections=0,
                lost_leases=0,
                requeues=F("requeues") + 1,
                last_status=None,
                last_error="",
                updated_at=Now(),
            )
    return len(found)


def cancel(ids: Iterable[int], *, using: str) -> int:
    """Give up live rows for good, whoever holds them; return how many were still live.

    A worker that has one in hand learns it when it renews the lease; a success it had by then still lands.
    """
    with short_transaction(using):
        found = _lock_those(ids, LIVE, using)
        if found:
            _among(found, using).update(
                state=State.CANCELLED.value,
                blocked_by="",
                quarantine_reason="",
                settled_at=Now(),
                updated_at=Now(),
                **UNLEASED,
            )
    return len(found)


def quarantine(ids: Iterable[int], *, using: str) -> int:
    """Set live rows aside on an operator's word, whoever holds them; return how many were still live."""
    with short_transaction(using):
        found = _lock_those(ids, LIVE, using)
        if found:
            _among(found, using).update(
                state=State.QUARANTINED.value,
                blocked_by="",
                quarantine_reason=QuarantineReason.OPERATOR.value,
                settled_at=Now(),
                updated_at=Now(),
                **UNLEASED,
            )
    return len(found)


def send_now(ids: Iterable[int], *, using: str) -> int:
    """Make pending rows that wait for a later time due now; return how many there were.

    Only ever earlier than before, so never beyond ``retry_until``; a row that is due keeps its place.
    """
    with short_transaction(using):
        later = ExpressionWrapper(Q(available_at__gt=Now()), output_field=BooleanField())
        rows = _locked(ids, using).annotate(later=later).values_list("id", "state", "later")
        found = [row_id for row_id, state, is_later in rows if state == State.PENDING and is_later]
        if found:
            # by now even the earlier time may be over
            sooner = {
                name: Least(Now(), F(name), output_field=DateTimeField())
                for name in ("available_at", "due_at")
            }
            _among(found, using).update(updated_at=Now(), **sooner)
    return len(found)


def next_due(publishers: Iterable[str], *, using: str) -> float | None:
    """Return in how many seconds (0: now) the first row of these lanes may be taken; None when none waits."""
    waits: list[float] = []
    for publisher in publishers:
        # a row that comes back between the first two looks was seen by neither
        for state in (State.PENDING, State.IN_FLIGHT, State.PENDING):
            rows = _rows(using).filter(publisher=publisher, state=StateLiteral(state))
            first = (
                rows.order_by("available_at", "id")
                .annotate(now=Now())
                .values_list("available_at", "now")
                .first()
            )
            if first is not None:
                waits.append(max((first[0] - first[1]).total_seconds(), 0.0))
    return min(waits, default=None)


class Resealed(NamedTuple):
    """One row under a new key, and what it must still hold for the new bytes to be right."""

    id: int
    old_key_id: str
    old_sealed: bytes
    key_id: str
    sealed: bytes


def reseal(rows: Sequence[Resealed], *, using: str) -> int:
    """Write rows under their new key unless somebody else did; return how many were written."""
    written = 0
    with short_transaction(using):
        held = {
            row_id: (key_id, None if sealed is None else bytes(sealed))
            for row_id, key_id, sealed in _locked((row.id for row in rows), using).values_list(
                "id", "encryption_key_id", "sealed"
            )
        }
        for row in rows:
            if held.get(row.id) == (row.old_key_id, row.old_sealed):
                written += (
                    _rows(using).filter(id=row.id).update(encryption_key_id=row.key_id, sealed=row.sealed)
                )
    return written


def purge(*, retention: Retention, limit: int, using: str) -> int:
    """Delete up to ``limit`` settled rows whose time of keeping is over, with their attempts; return how many."""
    for old in _purgeable(retention, using):
        with short_transaction(using):
            ids = list(
                lock(old.order_by("retry_until"), skip_locked=True).values_list("id", flat=True)[:limit]
            )
            if ids:
                delete(DeliveryAttempt.objects.using(using), "message_id", ids)
                delete(_rows(using), "id", ids)
                return len(ids)
    return 0


def purge_attempts(*, retention: Retention, limit: int, using: str) -> int:
    """Delete up to ``limit`` attempts older than they are kept; return how many."""
    with short_transaction(using):
        old = lock(_old_attempts(retention, using).order_by("started_at"), skip_locked=True)
        ids = list(old.values_list("id", flat=True)[:limit])
        if ids:
            delete(DeliveryAttempt.objects.using(using), "id", ids)
    return len(ids)


def expunge(ids: Iterable[int], *, using: str) -> int:
    """Erase the bodies of settled rows; return how many held one. The rows stay, and what they bind."""
    with short_transaction(using):
        return _erase(_lock_those(ids, SETTLED, using, with_body=True), using)


def expunge_delivered(*, retention: Retention, limit: int, using: str) -> int:
    """Erase up to ``limit`` bodies of delivered rows that retention no longer keeps; return how many."""
    with short_transaction(using):
        old = lock(_expungeable(retention, using).order_by("settled_at"), skip_locked=True)
        return _erase(list(old.values_list("id", flat=True)[:limit]), using)


def _erase(ids: Collection[int], using: str) -> int:
    if ids:
        _among(ids, using).update(sealed=None, updated_at=Now())
    return len(ids)


def purgeable(*, retention: Retention, using: str) -> tuple[int, int, int]:
    """Return how many messages, attempts by their own age, and bodies a purge would delete or erase."""
    messages = sum(old.count() for old in _purgeable(retention, using))
    return messages, _old_attempts(retention, using).count(), _expungeable(retention, using).count()


def _purgeable(retention: Retention, using: str) -> list[QuerySet[OutboxMessage]]:
    kept = {state: retention.dead if state in DEAD else retention.delivered for state in SETTLED}
    return [
        _rows(using).filter(
            state=StateLiteral(state), retry_until__lt=Now() - Value(length, output_field=DurationField())
        )
        for state, length in kept.items()
    ]


def _old_attempts(retention: Retention, using: str) -> QuerySet[DeliveryAttempt]:
    kept = Value(retention.attempts, output_field=DurationField())
    return DeliveryAttempt.objects.using(using).filter(started_at__lt=Now() - kept)


def _expungeable(retention: Retention, using: str) -> QuerySet[OutboxMessage]:
    if retention.expunge_delivered is None:
        return _rows(using).none()
    kept = Value(retention.expunge_delivered, output_field=DurationField())
    return _rows(using).filter(
        state=StateLiteral(State.DELIVERED), sealed__isnull=False, settled_at__lt=Now() - kept
    )
