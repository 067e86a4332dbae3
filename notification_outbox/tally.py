"""Outcomes counted by the minute, in the transaction that records them, without a row that many wait for.

Every run of a worker has rows of its own and writes into them the count it has reached, not "one more", so that
nobody else's lock is ever met. Its memory of that count is trusted only while every commit was heard of: after an
error it starts rows anew, and what the doubtful transaction wrote, if it did, stands beside them. Readers add up.
Minutes are the database's; its clock is read once in each.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import DurationField, QuerySet, Value
from django.db.models.constants import OnConflict
from django.db.models.functions import Now

from .models import OutboxStat
from .transactions import delete, lock_first, short_transaction

# single minutes are of interest for so long; after that a row for each quarter of an hour is enough
FOLD_AFTER = timedelta(hours=1)
KEPT = timedelta(days=7)

_UNIQUE = ("minute", "lane", "outcome", "worker")
_Key = tuple[datetime, str, str, str]
Counted = Callable[[Iterable[tuple[str, str]], Callable[[], datetime]], None]


class _Page(NamedTuple):
    """What is known to be committed: the rows of one run in one minute, which ends at ``until`` by our clock."""

    minute: datetime
    until: float
    run: str
    counts: Counter[tuple[str, str]]


class Tally:
    """What one thread counted in the current minute. Its movers take turns with it."""

    def __init__(self) -> None:
        self._page: _Page | None = None

    @contextmanager
    def transaction(self, using: str) -> Iterator[Counted]:
        """A short transaction; yields a function that counts in it ``(lane, outcome)`` pairs, at a time ``now()``.

        ``now`` is asked once a minute. All that a transaction counts is counted if it commits, once, however often
        it is repeated.
        """
        # forgotten until the commit is heard of
        page, self._page = self._page, None

        def count(outcomes: Iterable[tuple[str, str]], now: Callable[[], datetime]) -> None:
            nonlocal page
            added = Counter(outcomes)
            if not added:
                return
            asked = time.monotonic()
            if page is None or page.until <= asked:
                moment = now()
                minute = moment.replace(second=0, microsecond=0)
                until = asked + 60 - (moment - minute).total_seconds()
                if page is None or page.minute != minute:
                    page = _Page(minute, until, secrets.token_hex(8), Counter())
                page = page._replace(until=until)
            page = page._replace(counts=page.counts + added)
            _write({(page.minute, *pair, page.run): page.counts[pair] for pair in added}, using)

        with short_transaction(using):
            yield count
        self._page = page


def _write(counts: dict[_Key, int], using: str) -> None:
    """Store counts by minute, lane, outcome and run, in the place of what their rows held."""
    connection = connections[using]
    before, row, after = _statement(using, connection.vendor)
    # in order, so that two who write the same rows wait for each other and not both
    written = sorted(counts.items())
    parameters: list[Any] = []
    for (minute, *names), n in written:
        parameters += [connection.ops.adapt_datetimefield_value(minute), *names, n]
    with connection.cursor() as cursor:
        cursor.execute(f"{before}{', '.join([row] * len(written))}{after}", parameters)


@lru_cache
def _statement(using: str, _vendor: str) -> tuple[str, str, str]:
    """Return the upsert around its rows and one row, as Django writes it: made anew it costs a settle 4 % more."""
    connection = connections[using]
    fields = [field for field in OutboxStat._meta.concrete_fields if not field.primary_key]
    quoted = ", ".join(connection.ops.quote_name(field.name) for field in fields)
    table = connection.ops.quote_name(OutboxStat._meta.db_table)
    suffix = connection.ops.on_conflict_suffix_sql(fields, OnConflict.UPDATE, ["n"], _UNIQUE)
    row = f"({', '.join(['%s'] * len(fields))})"
    return f"INSERT INTO {table} ({quoted}) VALUES ", row, f" {suffix}"


def tidy(*, limit: int, using: str) -> int:
    """Delete up to ``limit`` counts that are kept no longer, or bring so many old ones together; return how many."""
    return _purge(limit, using) or _fold(limit, using)


def _older(age: timedelta, using: str) -> QuerySet[OutboxStat]:
    """Return the rows of minutes longer ago, oldest first."""
    ended = Now() - Value(age, output_field=DurationField())
    return OutboxStat.objects.using(using).filter(minute__lt=ended).order_by("minute", "id")


def _purge(limit: int, using: str) -> int:
    with short_transaction(using):
        return _delete(list(lock_first(_older(KEPT, using), limit)), using)


def _delete(rows: list[OutboxStat], using: str) -> int:
    if rows:
        delete(OutboxStat.objects.using(using), "id", [row.id for row in rows])
    return len(rows)


def _fold(limit: int, using: str) -> int:
    """Bring rows of single minutes and runs together in one that has no run, at their quarter's beginning."""
    single = _older(FOLD_AFTER, using).exclude(worker="")
    with short_transaction(using):
        oldest = single.values_list("id", flat=True).first()
        rows = list(lock_first(single, limit))
        if not rows or rows[0].id != oldest:
            # whoever holds the oldest one folds just now: two would add to the same rows
            return 0
        counts = {
            (row.minute, row.lane, row.outcome, row.worker): row.n
            for row in OutboxStat.objects.using(using).filter(
                worker="", minute__gte=quarter(rows[0].minute), minute__lte=rows[-1].minute
            )
        }
        for row in rows:
            key = (quarter(row.minute), row.lane, row.outcome, "")
            counts[key] = counts.get(key, 0) + row.n
        _write(counts, using)
        return _delete(rows, using)


def quarter(moment: datetime) -> datetime:
    """Return when the quarter of an hour began."""
    return moment.replace(minute=moment.minute // 15 * 15, second=0, microsecond=0)
