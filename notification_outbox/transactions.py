"""Transactions as movers make them: short, READ COMMITTED, their locks taken as weakly as the database allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from django.db import connections, transaction
from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


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


def delete(rows: QuerySet[M], column: str, values: Sequence[int]) -> None:
    """Delete the rows that have one of the values, waiting for no other row's lock."""
    if connections[rows.db].vendor != "mysql":
        rows.filter(**{f"{column}__in": values}).delete()
        return
    # for many values MariaDB may walk a small table, and then its DELETE waits for every lock it meets
    # in id order, so that two who find the same rows by different indexes queue
    for row_id in rows.filter(**{f"{column}__in": values}).order_by("id").values_list("id", flat=True):
        rows.filter(id=row_id).delete()
