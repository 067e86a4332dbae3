"""Numbers about the outbox, one set for worker, admin, commands and metrics. Reads only, and never a whole table.

What waits is counted in the table by index, ``CAP`` rows of a kind at most, or found by one index probe; what
happened is summed from ``OutboxStat``. Each function asks one or two statements, however many lanes there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from django.db import connections
from django.db.models import Max, QuerySet, Sum
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.formats import number_format

from .leases import StateLiteral
from .lifecycle import QuarantineReason, State
from .models import OutboxMessage, OutboxStat
from .tally import quarter

# of one kind no more rows are counted than this and one: "more than 10,000" is all that an operator needs
CAP = 10_000
# among how many rows of a lane, those to be taken next, the oldest due one is looked for
NEXT = 1_000
DAY = timedelta(hours=24)
QUARTER = timedelta(minutes=15)
# over how many minutes a rate is taken
LATELY = timedelta(minutes=5)
MINUTE = timedelta(minutes=1)

DELIVERED = State.DELIVERED.value
RETRY = "retry"

K = TypeVar("K")
# the SQL of a bounded query → that of the one number it is asked for
COUNT = "SELECT COUNT(*) FROM ({}) AS counted"
OLDEST_DUE = "SELECT id FROM ({}) AS candidates ORDER BY due_at LIMIT 1"


def bounded(count: int) -> str:
    """Return a count as people read it: ``12``, or ``10,000+`` where counting stopped."""
    return number_format(min(count, CAP), force_grouping=True) + ("+" if count > CAP else "")


class Backlog(NamedTuple):
    """What waits in one lane, each count bounded by ``CAP`` (one more stands for "more").

    ``due`` may be taken now, ``scheduled`` later (retries among them), ``in_flight`` is in a worker's hands.
    ``oldest_due`` is for how many seconds the oldest of the ``NEXT`` rows to be taken next has been due, handed
    back or not; None: nothing is due.
    """

    due: int = 0
    scheduled: int = 0
    in_flight: int = 0
    oldest_due: float | None = None


class Lane(NamedTuple):
    """One lane: what waits in it, what became of its messages lately.

    ``delivered`` and ``failed`` are per minute, over the last ``LATELY``; ``failed`` are attempts that are repeated
    and messages given up. ``dead`` counts by reason (``expired`` is one) what workers gave up in 24 hours.
    """

    name: str
    backlog: Backlog = Backlog()
    delivered: float = 0.0
    failed: float = 0.0
    dead: Mapping[str, int] = MappingProxyType({})


class Quarter(NamedTuple):
    """A quarter of an hour: how many messages were delivered, attempts failed and repeated, messages given up."""

    start: datetime
    delivered: int
    retried: int
    dead: int


class Numbers(NamedTuple):
    """All of it, as the health page shows it.

    ``quarters``: the last 24 hours, oldest first, 96 of them. ``dead``: the dead letters that are in the table, by
    reason; ``keys``: the messages that hold a body, by the id of the key they are sealed under; both bounded.
    """

    lanes: tuple[Lane, ...]
    quarters: tuple[Quarter, ...]
    dead: Mapping[str, int]
    keys: Mapping[str, int]


def numbers(publishers: Iterable[str], *, using: str) -> Numbers:
    """Return all numbers about one database: about lanes that have a publisher, wait, or had outcomes today."""
    today = day(using=using)
    names = sorted({*publishers, *lanes(using=using), *(lane for _, lane, _, _ in today.counts)})
    waiting = backlogs(names, using=using)
    return Numbers(
        lanes=tuple(today.lane(name, waiting[name]) for name in names),
        quarters=today.quarters(),
        dead=dead_letters(using=using),
        keys=keys(using=using),
    )


def lanes(*, using: str) -> list[str]:
    """Return the lanes that have a message waiting, whether or not anybody serves them."""
    states = [State.PENDING.value, State.IN_FLIGHT.value]
    return _distinct(OutboxMessage.objects.using(using).filter(state__in=states), "publisher")


def key_ids(*, using: str) -> list[str]:
    """Return the ids of the keys that rows which still hold a body are sealed under."""
    return _distinct(OutboxMessage.objects.using(using).filter(sealed__isnull=False), "encryption_key_id")


def backlogs(names: Collection[str], *, using: str) -> dict[str, Backlog]:
    """Return what waits in each of these lanes."""
    questions: dict[tuple[str, str], tuple[str, QuerySet[OutboxMessage]]] = {}
    for name in names:
        rows = OutboxMessage.objects.using(using).filter(publisher=name).order_by("available_at", "id")
        pending = rows.filter(state=StateLiteral(State.PENDING))
        questions[name, "due"] = COUNT, pending.filter(available_at__lte=Now())[: CAP + 1]
        questions[name, "scheduled"] = COUNT, pending.filter(available_at__gt=Now())[: CAP + 1]
        questions[name, "in_flight"] = COUNT, rows.filter(state=StateLiteral(State.IN_FLIGHT))[: CAP + 1]
        questions[name, "oldest"] = OLDEST_DUE, pending[:NEXT]
    answers = _ask(questions, using)
    oldest = {answer for (_, what), answer in answers.items() if what == "oldest" and answer is not None}
    ages = {
        publisher: (now - due_at).total_seconds()
        for publisher, due_at, now in OutboxMessage.objects.using(using)
        .filter(id__in=oldest, due_at__lte=Now())
        .annotate(now=Now())
        .values_list("publisher", "due_at", "now")
    }
    return {
        name: Backlog(
            due=answers[name, "due"],
            scheduled=answers[name, "scheduled"],
            in_flight=answers[name, "in_flight"],
            oldest_due=ages.get(name),
        )
        for name in names
    }


def dead_letters(*, using: str) -> dict[str, int]:
    """Return how many dead letters there are by reason (``expired`` is one), bounded; none where there is none."""
    rows = OutboxMessage.objects.using(using).order_by("id")
    questions = {}
    for reason in ("", *QuarantineReason):
        state = State.QUARANTINED if reason else State.EXPIRED
        kind = rows.filter(state=StateLiteral(state), quarantine_reason=reason)
        questions[str(reason or state)] = COUNT, kind[: CAP + 1]
    return {reason: count for reason, count in _ask(questions, using).items() if count}


def keys(*, using: str) -> dict[str, int]:
    """Return how many messages hold a body by the id of their key, bounded."""
    rows = OutboxMessage.objects.using(using).filter(sealed__isnull=False).order_by("encryption_key_id", "id")
    found = key_ids(using=using)
    return _ask({key: (COUNT, rows.filter(encryption_key_id=key)[: CAP + 1]) for key in found}, using)


class Day(NamedTuple):
    """What came of messages in the 24 hours before ``now``: ``counts`` of (minute, lane, outcome, n)."""

    now: datetime
    counts: list[tuple[datetime, str, str, int]]

    def quarters(self) -> tuple[Quarter, ...]:
        """Return the last 96 quarters of an hour, oldest first; the last one is not over."""
        starts = [quarter(self.now) - QUARTER * back for back in reversed(range(DAY // QUARTER))]
        sums = {start: Counter[str]() for start in starts}
        for minute, _, outcome, n in self.counts:
            if (start := quarter(minute)) in sums:
                sums[start][outcome if outcome in (DELIVERED, RETRY) else "dead"] += n
        return tuple(
            Quarter(start, sums[start][DELIVERED], sums[start][RETRY], sums[start]["dead"])
            for start in starts
        )

    def lane(self, name: str, backlog: Backlog) -> Lane:
        """Return one lane's numbers."""
        since = (self.now - LATELY).replace(second=0, microsecond=0)
        minutes = (self.now - since) / MINUTE
        delivered = failed = 0
        dead = Counter[str]()
        for minute, lane, outcome, n in self.counts:
            if lane != name:
                continue
            if minute >= since:
                delivered += n if outcome == DELIVERED else 0
                failed += n if outcome != DELIVERED else 0
            if outcome not in (DELIVERED, RETRY):
                dead[outcome] += n
        return Lane(name, backlog, delivered / minutes, failed / minutes, dead)


def day(*, using: str) -> Day:
    """Return what came of messages in the last 24 hours."""
    rows = list(
        OutboxStat.objects.using(using)
        .filter(minute__gte=Now() - DAY, n__gt=0)
        .values_list("minute", "lane", "outcome")
        .annotate(total=Sum("n"), now=Max(Now()))
        .order_by("minute")
    )
    # with nothing counted there is nothing that another clock could misplace
    now = rows[0][-1] if rows else timezone.now()
    return Day(now, [(minute, lane, outcome, int(total)) for minute, lane, outcome, total, _ in rows])


def _ask(questions: Mapping[K, tuple[str, QuerySet[OutboxMessage]]], using: str) -> dict[K, Any]:
    """Return one number for each question, in one statement: (its SQL around a bounded query, that query)."""
    if not questions:
        return {}
    asked: list[str] = []
    parameters: list[Any] = []
    for around, rows in questions.values():
        sql, given = _sql(rows.values("id", "due_at") if around == OLDEST_DUE else rows.values("id"))
        asked.append(f"({around.format(sql)})")
        parameters += given
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(asked)}", parameters)
        return dict(zip(questions, cursor.fetchone(), strict=True))


def _distinct(rows: QuerySet[OutboxMessage], column: str) -> list[str]:
    """Return a column's values by one index probe each; a DISTINCT would walk the whole backlog."""
    ordered = rows.order_by(column).values(column)
    first, given = _sql(ordered[:1])
    following, also_given = _sql(ordered.filter(**{f"{column}__gt": RawSQL("found.value", ())})[:1])
    with connections[rows.db].cursor() as cursor:
        cursor.execute(
            f"WITH RECURSIVE found (value) AS (SELECT ({first}) UNION ALL "
            f"SELECT ({following}) FROM found WHERE found.value IS NOT NULL) "
            "SELECT value FROM found WHERE value IS NOT NULL",
            [*given, *also_given],
        )
        return [value for (value,) in cursor.fetchall()]


def _sql(rows: QuerySet[Any, Any]) -> tuple[str, Sequence[Any]]:
    sql, parameters = rows.query.get_compiler(rows.db).as_sql()
    return sql, parameters
