"""Recording what came of claimed rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db.models import DurationField, F, Value
from django.db.models.functions import Now

from ..envelope import Claim
from ..lifecycle import Outcome, State, Verdict, patience
from ..models import DeliveryAttempt
from ..tally import Tally
from .rows import UNLEASED, among, clock, locked, pause_until

MAX_ERROR = 128


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
        found = locked((settlement.claim.id for settlement in settlements), using)
        rows = {row[0]: row for row in found.values_list("id", "state", "lease_token")}
        theirs = {
            claim.id: claim.binding.dedup_id
            for claim, *_ in settlements
            if rows.get(claim.id, ())[1:] != (State.IN_FLIGHT.value, claim.token)
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


def _write(group: Sequence[Settlement], using: str) -> None:
    """Write one kind of outcome onto rows that are locked and known to be ours to write."""
    first = group[0].outcome
    rows = among([settlement.claim.id for settlement in group], using)
    changes: dict[str, Any] = {"updated_at": Now(), "blocked_by": "", "quarantine_reason": "", **UNLEASED}
    if first.verdict in (Verdict.RETRY, Verdict.RELEASED):
        pauses = {
            claim.id: timedelta(seconds=outcome.delay)
            for claim, outcome, *_ in group
            if outcome.delay is not None
        }
        if len(pauses) < len(group):
            pauses |= _patience([claim.id for claim, *_ in group if claim.id not in pauses], using)
        changes |= {"state": State.PENDING.value, "available_at": pause_until(pauses)}
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
