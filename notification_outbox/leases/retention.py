"""Erasing bodies and deleting rows that are kept no longer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from django.db.models import DurationField, QuerySet, Value
from django.db.models.functions import Now

from ..conf import Retention
from ..lifecycle import DEAD, SETTLED, State
from ..models import DeliveryAttempt, OutboxMessage
from ..transactions import delete, lock_first, short_transaction
from .rows import StateLiteral, all_rows, among, lock_those


def purge(*, retention: Retention, limit: int, using: str) -> int:
    """Delete up to ``limit`` settled rows whose time of keeping is over, with their attempts; return how many."""
    for old in _purgeable(retention, using):
        with short_transaction(using):
            ids = _first(old.order_by("retry_until"), limit)
            if ids:
                delete(DeliveryAttempt.objects.using(using), "message_id", ids)
                delete(all_rows(using), "id", ids)
                return len(ids)
    return 0


def purge_attempts(*, retention: Retention, limit: int, using: str) -> int:
    """Delete up to ``limit`` attempts older than they are kept; return how many."""
    with short_transaction(using):
        ids = _first(_old_attempts(retention, using).order_by("started_at"), limit)
        if ids:
            delete(DeliveryAttempt.objects.using(using), "id", ids)
    return len(ids)


def expunge(ids: Iterable[int], *, using: str) -> int:
    """Erase the bodies of settled rows; return how many held one. The rows stay, and what they bind."""
    with short_transaction(using):
        return _erase(lock_those(ids, SETTLED, using, with_body=True), using)


def expunge_delivered(*, retention: Retention, limit: int, using: str) -> int:
    """Erase up to ``limit`` bodies of delivered rows that retention no longer keeps; return how many."""
    with short_transaction(using):
        return _erase(_first(_expungeable(retention, using).order_by("settled_at"), limit), using)


def _first(old: QuerySet[Any], limit: int) -> list[int]:
    return list(lock_first(old, limit).values_list("id", flat=True))


def _erase(ids: Collection[int], using: str) -> int:
    if ids:
        among(ids, using).update(sealed=None, updated_at=Now())
    return len(ids)


def purgeable(*, retention: Retention, using: str) -> tuple[int, int, int]:
    """Return how many messages, attempts by their own age, and bodies a purge would delete or erase."""
    messages = sum(old.count() for old in _purgeable(retention, using))
    return messages, _old_attempts(retention, using).count(), _expungeable(retention, using).count()


def _purgeable(retention: Retention, using: str) -> list[QuerySet[OutboxMessage]]:
    kept = {state: retention.dead if state in DEAD else retention.delivered for state in SETTLED}
    return [
        all_rows(using).filter(
            state=StateLiteral(state), retry_until__lt=Now() - Value(length, output_field=DurationField())
        )
        for state, length in kept.items()
    ]


def _old_attempts(retention: Retention, using: str) -> QuerySet[DeliveryAttempt]:
    kept = Value(retention.attempts, output_field=DurationField())
    return DeliveryAttempt.objects.using(using).filter(started_at__lt=Now() - kept)


def _expungeable(retention: Retention, using: str) -> QuerySet[OutboxMessage]:
    if retention.expunge_delivered is None:
        return all_rows(using).none()
    kept = Value(retention.expunge_delivered, output_field=DurationField())
    return all_rows(using).filter(
        state=StateLiteral(State.DELIVERED), sealed__isnull=False, settled_at__lt=Now() - kept
    )
