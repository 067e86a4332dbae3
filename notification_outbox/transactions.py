"""Transactions as movers make them: short, READ COMMITTED, their locks taken as weakly as the database allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from django.db import connections, transaction
from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)

# where the first may be held by others, so many times as many are looked at
MORE_THAN_WANTED = 3


@contextmanager
def short_transaction(using: str) -> Iterator[None]:
    """A transaction at READ COMMITTED whatever the project's default; inside an open one it is left alone."""
    connection = connections[using]
    outermost = not connection.in_atomic_block
    with transaction.atomic(using=using):
        if outermost and connection.vendor in ("postgresql", "mysql"):
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield


def lock(rows: QuerySet[M], *, skip_locked: bool = False) -> QuerySet[M]:
    """Return the query that locks its rows until the transaction's end, where the database has row locks."""
    features = connections[rows.db].features
    return rows.select_for_update(
        skip_locked=skip_locked and features.has_select_for_update_skip_locked,
        no_key=features.has_select_for_no_key_update,
    )


def lock_first(rows: QuerySet[M], limit: int) -> QuerySet[M]:
    """Return the query for the first ``limit`` rows that nobody else holds, locked; it never waits for a lock."""
    if connections[rows.db].vendor != "mysql":
        return lock(rows, skip_locked=True)[:limit]
    # InnoDB waits for a moment before it skips a row; whoever waits meanwhile for one that we hold makes that a
    # deadlock, unless both go in id order: so what may do is found without a lock, and locked by id, all at once
    found = list(rows.values_list("pk", flat=True)[: MORE_THAN_WANTED * limit])
    every = rows.model._base_manager.using(rows.db)
    mine: list[int] = []
    for first in range(0, len(found), limit):
        some = every.filter(pk__in=found[first : first + limit]).order_by("pk")
        mine = list(lock(some, skip_locked=True).values_list("pk", flat=True))
        if mine:
            # more would not be in order
            break
    # what changed before it was locked does not do any more
    return rows.filter(pk__in=mine)[:limit]


def delete(rows: QuerySet[M], column: str, values: Sequence[int]) -> None:
    """Delete the rows that have one of the values, waiting for no other row's lock."""
    if connections[rows.db].vendor != "mysql":
        rows.filter(**{f"{column}__in": values}).delete()
        return
    # for many values MariaDB may walk a small table, and then its DELETE waits for every lock it meets
    # in id order, so that two who find the same rows by different indexes queue
    for row_id in rows.filter(**{f"{column}__in": values}).order_by("id").values_list("id", flat=True):
        rows.filter(id=row_id).delete()
