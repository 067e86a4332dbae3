"""Recording what came of claimed rows."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, cast

from django.db import connections
from django.db.models import DurationField, F, Value
from django.db.models.functions import Now
from django.db.models.sql import UpdateQuery

from ..envelope import Claim
from ..lifecycle import Answer, Outcome, State, Verdict, patience
from ..models import DeliveryAttempt, OutboxMessage
from ..tally import Tally
from ..transactions import lock
from .rows import UNLEASED, Statement, among, clock, pause_until, those

MAX_ERROR = 128
_TOKEN = OutboxMessage._meta.get_field("lease_token")


class Settlement(NamedTuple):
    """One claim and what it came to; with ``took`` (seconds) where the timeline should remember it."""

    claim: Claim
    outcome: Outcome
    worker: str = ""
    took: float | None = None


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
        rows = _look([settlement.claim.id for settlement in settlements], using)
        theirs = {
            claim.id: claim.binding.dedup_id
            for claim, *_ in settlements
            if rows.get(claim.id) != (State.IN_FLIGHT.value, claim.token)
        }
        same = set()
        if theirs:
            undelivered = among(theirs, using).exclude(state=State.DELIVERED.value)
            same = {
                row_id
                for row_id, dedup_id in undelivered.values_list("id", "dedup_id")
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
        count(counted, lambda: clock(rows, using))
    return lost


def _look(ids: Sequence[int], using: str) -> dict[int, tuple[str, uuid.UUID | None]]:
    """Lock rows in id order; return state and token by id of those that are there."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(*_looking(using, connection.vendor).on(ids))
        # where the database has no such type, it is a string
        return {row_id: (state, _TOKEN.to_python(token)) for row_id, state, token in cursor.fetchall()}


@lru_cache
def _looking(using: str, _vendor: str) -> Statement:
    return Statement.of(
        lock(those(using).order_by("id")).values_list("id", "state", "lease_token").query, using
    )


def _write(group: Sequence[Settlement], using: str) -> None:
    """Write one kind of outcome onto rows that are locked and known to be ours to write."""
    first = group[0].outcome
    ids = [settlement.claim.id for settlement in group]
    if first.verdict not in (Verdict.RETRY, Verdict.RELEASED):
        connection = connections[using]
        # what does not tell one ending from another is left out: it would be another statement
        ending = _ending(
            first._replace(delay=0.0, answer=Answer(first.answer.status)), using, connection.vendor
        )
        with connection.cursor() as cursor:
            cursor.execute(*ending.on(ids))
        return
    pauses = {
        claim.id: timedelta(seconds=outcome.delay)
        for claim, outcome, *_ in group
        if outcome.delay is not None
    }
    if len(pauses) < len(group):
        pauses |= _patience([row_id for row_id in ids if row_id not in pauses], using)
    changes = {**_changes(first), "state": State.PENDING.value, "available_at": pause_until(pauses)}
    if first.verdict is Verdict.RETRY:
        changes["due_at"] = changes["available_at"]
    among(ids, using).update(**changes)


@lru_cache
def _ending(outcome: Outcome, using: str, _vendor: str) -> Statement:
    """Return the statement that ends messages by this outcome."""
    query = cast(UpdateQuery, those(using).query.chain(UpdateQuery))
    query.add_update_values({**_changes(outcome), "state": outcome.verdict.value, "settled_at": Now()})
    return Statement.of(query, using)


def _changes(outcome: Outcome) -> dict[str, Any]:
    """Return the columns that an outcome writes, but for where the row goes now."""
    changes: dict[str, Any] = {"updated_at": Now(), "blocked_by": "", "quarantine_reason": "", **UNLEASED}
    if outcome.reason is not None:
        changes["quarantine_reason"] = outcome.reason.value
    if outcome.verdict is Verdict.RELEASED:
        changes["attempts"] = F("attempts") - 1
        if outcome.error:
            changes["last_error"] = outcome.error[:MAX_ERROR]
    else:
        changes |= {
            "lost_leases": 0,
            "rejections": outcome.rejections,
            "last_error": outcome.error[:MAX_ERROR],
            "last_status": outcome.answer.status,
        }
    return changes


def _patience(ids: Sequence[int], using: str) -> dict[int, timedelta]:
    """Return the pause of rows that wait for another worker: the longer they wait, the longer."""
    ages = among(ids, using).annotate(now=Now()).values_list("id", "now", "due_at")
    return {
        row_id: timedelta(seconds=patience((now - due_at).total_seconds())) for row_id, now, due_at in ages
    }


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
