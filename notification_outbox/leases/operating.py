"""What an operator does to rows, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.db.models import BooleanField, DateTimeField, ExpressionWrapper, F, Q
from django.db.models.functions import Least, Now

from ..lifecycle import DEAD, LIVE, QuarantineReason, State
from ..transactions import short_transaction
from .rows import UNLEASED, all_rows, among, lock_those, locked


def requeue(ids: Sequence[int], *, using: str) -> int:
    """Give dead letters fresh time and attempts; return how many were still dead and held a body."""
    with short_transaction(using):
        found = lock_those(ids, DEAD, using, with_body=True)
        if found:
            among(found, using).update(
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
    return _give_up(ids, State.CANCELLED, "", using)


def quarantine(ids: Iterable[int], *, using: str) -> int:
    """Set live rows aside on an operator's word, whoever holds them; return how many were still live."""
    return _give_up(ids, State.QUARANTINED, QuarantineReason.OPERATOR.value, using)


def _give_up(ids: Iterable[int], state: State, reason: str, using: str) -> int:
    with short_transaction(using):
        found = lock_those(ids, LIVE, using)
        if found:
            among(found, using).update(
                state=state.value,
                blocked_by="",
                quarantine_reason=reason,
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
        rows = locked(ids, using).annotate(later=later).values_list("id", "state", "later")
        found = [row_id for row_id, state, is_later in rows if state == State.PENDING and is_later]
        if found:
            # by now even the earlier time may be over
            sooner = {
                name: Least(Now(), F(name), output_field=DateTimeField())
                for name in ("available_at", "due_at")
            }
            among(found, using).update(updated_at=Now(), **sooner)
    return len(found)


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
            for row_id, key_id, sealed in locked((row.id for row in rows), using).values_list(
                "id", "encryption_key_id", "sealed"
            )
        }
        for row in rows:
            if held.get(row.id) == (row.old_key_id, row.old_sealed):
                written += (
                    all_rows(using).filter(id=row.id).update(encryption_key_id=row.key_id, sealed=row.sealed)
                )
    return written
