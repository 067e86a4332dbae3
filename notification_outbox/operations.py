"""What an operator does to messages, whatever door he comes through: small locked chunks, honest counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import router
from django.db.models import DurationField, QuerySet, Value
from django.db.models.functions import Now

from . import leases, stats, tally
from .conf import Retention
from .envelope import Binding, Keyring, open_sealed, seal
from .exceptions import Tampered, UnknownKey
from .leases import Resealed
from .models import OutboxMessage
from .pinging import Ping as Ping
from .pinging import ping as ping

CHUNK = 500
RESEAL_CHUNK = 100


Ids = Iterable[int] | QuerySet[OutboxMessage, Any]


def requeue(
    ids: Ids,
    *,
    using: str | None = None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda moved: None,
) -> int:
    """Send dead letters (quarantined, expired) again, with fresh time and attempts.

    Same row, same message id, same bytes. ``ids`` may be a queryset of messages, however many it finds:
    ``requeue(OutboxMessage.objects.filter(quarantine_reason="gone"))``. Returns how many were requeued: those that
    are no longer dead, or whose body was expunged, stay as they are. Goes through the ids in order, ``CHUNK`` to a
    transaction with ``pace`` seconds between two, tells ``progress`` how many were moved so far, and may be
    interrupted and repeated.
    """
    return _in_chunks(leases.requeue, ids, using, pace, progress)


def cancel(
    ids: Ids,
    *,
    using: str | None = None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda moved: None,
) -> int:
    """Give up messages that still wait or are in a worker's hands; they are never sent again.

    Returns how many were cancelled: those that are settled stay as they are. An attempt under way ends when its
    worker next renews the lease; what it delivered by then is recorded as delivered. In chunks like ``requeue``.
    """
    return _in_chunks(leases.cancel, ids, using, pace, progress)


def quarantine(
    ids: Ids,
    *,
    using: str | None = None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda moved: None,
) -> int:
    """Set messages that still wait or are in a worker's hands aside, for the reason ``operator``.

    Like ``cancel``, but ``requeue`` brings them back. Returns how many were quarantined.
    """
    return _in_chunks(leases.quarantine, ids, using, pace, progress)


def send_now(
    ids: Ids,
    *,
    using: str | None = None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda moved: None,
) -> int:
    """Make messages that wait for a later time, their first or their next attempt's, due now.

    How long they are tried stays as it was. Returns how many were brought forward: those that are due already, are
    blocked, in a worker's hands or settled stay as they are. In chunks like ``requeue``.
    """
    return _in_chunks(leases.send_now, ids, using, pace, progress)


def _in_chunks(
    move: Callable[..., int],
    ids: Ids,
    using: str | None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda moved: None,
) -> int:
    alias = using or router.db_for_write(OutboxMessage)
    moved = 0
    for place, chunk in enumerate(_chunks(ids, alias)):
        if place and pace:
            time.sleep(pace)
        moved += move(chunk, using=alias)
        progress(moved)
    return moved


def _chunks(ids: Ids, alias: str) -> Iterator[list[int]]:
    """Yield ids in order, ``CHUNK`` at a time; of a queryset each chunk is looked up when its turn comes."""
    if isinstance(ids, QuerySet) and ids.model is OutboxMessage:
        ids = ids.using(alias).values_list("id", flat=True)
        if not ids.query.is_sliced:
            last = 0
            while chunk := list(ids.filter(id__gt=last).order_by("id")[:CHUNK]):
                last = chunk[-1]
                yield chunk
            return
    ordered = sorted(set(ids))
    for start in range(0, len(ordered), CHUNK):
        yield ordered[start : start + CHUNK]


class Bodies(NamedTuple):
    """How many bodies an ``expunge`` finds: of ``settled`` messages, and of ``live`` ones that it leaves alone."""

    settled: int
    live: int


def expunge(
    ids: Collection[int] | QuerySet[OutboxMessage, Any] | None = None,
    *,
    account_id: str | None = None,
    older_than: timedelta | None = None,
    using: str | None = None,
    pace: float = 0.0,
    progress: Callable[[int], None] = lambda erased: None,
) -> int:
    """Erase the bodies of settled messages for good; return how many were erased.

    Of all that is given (ids, account, time since they settled) everything must hold, and something must be
    given. The row stays with what it binds, so that the same key with the same content still names the same
    message; it can be sent or requeued no more. Messages that are live stay as they are (``bodies`` counts them).
    In id order, ``CHUNK`` to a transaction; may be interrupted and repeated.
    """
    alias = using or router.db_for_write(OutboxMessage)
    holding = _holding(ids, account_id, older_than, alias).filter(settled_at__isnull=False)
    return _in_chunks(leases.expunge, holding, alias, pace, progress)


def bodies(
    ids: Collection[int] | None = None,
    *,
    account_id: str | None = None,
    older_than: timedelta | None = None,
    using: str | None = None,
) -> Bodies:
    """Return how many bodies ``expunge`` with the same arguments would erase, and how many it would leave."""
    holding = _holding(ids, account_id, older_than, using or router.db_for_write(OutboxMessage))
    return Bodies(
        settled=holding.filter(settled_at__isnull=False).count(),
        live=holding.filter(settled_at__isnull=True).count(),
    )


def _holding(
    ids: Collection[int] | QuerySet[OutboxMessage, Any] | None,
    account_id: str | None,
    older_than: timedelta | None,
    alias: str,
) -> QuerySet[OutboxMessage]:
    if ids is None and account_id is None and older_than is None:
        raise TypeError("expunge() needs ids, account_id or older_than")
    holding = OutboxMessage.objects.using(alias).filter(sealed__isnull=False)
    if isinstance(ids, QuerySet) and ids.model is OutboxMessage and not ids.query.is_sliced:
        holding = ids.using(alias).filter(sealed__isnull=False)
    elif ids is not None:
        holding = holding.filter(id__in=ids)
    if account_id is not None:
        holding = holding.filter(account_id=account_id)
    if older_than is not None:
        holding = holding.filter(settled_at__lt=Now() - Value(older_than, output_field=DurationField()))
    return holding


class Purge(NamedTuple):
    """What a purge did or would do: ``messages`` and ``attempts`` deleted, ``bodies`` of kept messages erased."""

    messages: int
    attempts: int
    bodies: int


def purge(
    retention: Retention,
    *,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Purge:
    """Do what ``RETENTION`` asks, ``CHUNK`` to a transaction: delete messages and attempts, erase bodies.

    Workers do the same by themselves once a minute; this is for those started with ``--no-purge``. Old counts of
    outcomes are brought together, too.
    """
    alias = using or router.db_for_write(OutboxMessage)
    counts = []
    for chunk in (leases.purge, leases.purge_attempts, leases.expunge_delivered):
        counts.append(0)
        while done := chunk(retention=retention, limit=CHUNK, using=alias):
            counts[-1] += done
            progress(sum(counts))
    while tally.tidy(limit=CHUNK, using=alias):
        pass
    return Purge(*counts)


def purgeable(retention: Retention, *, using: str | None = None) -> Purge:
    """Return what ``purge`` would do; of ``attempts`` it counts only those that are deleted for their own age."""
    return Purge(*leases.purgeable(retention=retention, using=using or router.db_for_write(OutboxMessage)))


@dataclass
class Rotation:
    """What ``rotate_keys`` did. ``unknown`` counts by key id, or ``version n``, the rows not opened here;
    ``tampered`` holds the ids of those that can never be opened."""

    resealed: int = 0
    tampered: list[int] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether no row is left under another key than the current one."""
        return not self.left


def rotate_keys(
    keyring: Keyring,
    *,
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda resealed: None,
) -> Rotation:
    """Seal every row that still holds a body under the keyring's first key, live and dead rows alike.

    May run beside workers and web processes, be interrupted and be run again: rows are written by
    compare-and-swap, ``RESEAL_CHUNK`` to a transaction. ``progress`` is told how many were resealed so far.
    With ``dry_run`` rows are opened and counted and nothing is written.
    """
    alias = using or router.db_for_write(OutboxMessage)
    rotation = Rotation()
    for key_id in stats.key_ids(using=alias):
        if key_id == keyring.current_id:
            continue
        rows = OutboxMessage.objects.using(alias).filter(encryption_key_id=key_id, sealed__isnull=False)
        if key_id not in keyring:
            rotation.unknown[key_id] = rows.count()
            continue
        last = 0
        while chunk := list(rows.filter(id__gt=last).order_by("id")[:RESEAL_CHUNK]):
            last = chunk[-1].id
            fresh = []
            for row in chunk:
                try:
                    fresh.append(_resealed(row, keyring))
                except UnknownKey as error:
                    rotation.unknown[error.key_id] += 1
                except Tampered:
                    rotation.tampered.append(row.id)
            rotation.resealed += len(fresh) if dry_run else leases.reseal(fresh, using=alias)
            progress(rotation.resealed)
    # web processes with the old settings may have sealed more meanwhile: the table is right
    rotation.left = [key_id for key_id in stats.key_ids(using=alias) if key_id != keyring.current_id]
    return rotation


def _resealed(row: OutboxMessage, keyring: Keyring) -> Resealed:
    """Return a row under the current key. Raises ``Tampered``, or ``UnknownKey`` for a version of its own."""
    before = Binding.of(row)
    sealed = bytes(row.sealed or b"")
    content = open_sealed(sealed, before, keyring)
    after = before._replace(encryption_key_id=keyring.current_id)
    return Resealed(row.id, row.encryption_key_id, sealed, keyring.current_id, seal(content, after, keyring))
