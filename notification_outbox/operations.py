"""What an operator does to messages, whatever door he comes through: small locked chunks, honest counts."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import router

from . import leases
from .models import OutboxMessage

CHUNK = 500


def requeue(ids: Iterable[int], *, using: str | None = None) -> int:
    """Send dead letters (quarantined, expired) again, with fresh time and attempts.

    Same row, same message id, same bytes. Returns how many were requeued: those that are no longer dead, or
    whose body was expunged, stay as they are. Goes through the ids in order, ``CHUNK`` to a transaction, and
    may be repeated.
    """
    alias = using or router.db_for_write(OutboxMessage)
    ordered = sorted(set(ids))
    return sum(
        leases.requeue(ordered[start : start + CHUNK], using=alias) for start in range(0, len(ordered), CHUNK)
    )
