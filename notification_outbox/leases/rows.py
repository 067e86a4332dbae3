"""What all movers share: rows by id, locked in id order, and how their columns are written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import (
    BooleanField,
    Case,
    CharField,
    DateTimeField,
    DurationField,
    Expression,
    ExpressionWrapper,
    F,
    Lookup,
    Q,
    QuerySet,
    Value,
    When,
)
from django.db.models.functions import Least, Now
from django.db.models.sql import Query

from ..lifecycle import State
from ..models import OutboxMessage
from ..transactions import lock

# stands in a statement for the ids
IDS = "/* ids */"

# the columns a row has while nobody holds it
UNLEASED: dict[str, Any] = {"lease_token": None, "leased_by": ""}


class StateLiteral(Expression):
    """A state written into the SQL as a literal: with a parameter, a generic plan cannot use partial indexes."""

    output_field = CharField()

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def as_sql(self, *_args: Any, **_kwargs: Any) -> tuple[str, tuple[()]]:
        return f"'{self.state.value}'", ()


class Among(Lookup):
    """``Among(F("id"), ids)``: ids written into the SQL, as parameters each of many costs as much as its row."""

    def get_prep_lookup(self) -> list[int]:
        return [int(row_id) for row_id in self.rhs]

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        left, parameters = self.process_lhs(compiler, connection)
        return f"{left} IN ({', '.join(map(str, self.rhs)) or 'NULL'})", tuple(parameters)


class AmongThose(Lookup):
    """``AmongThose(F("id"), IDS)``: a place for ids, which a ``Statement`` fills in."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        left, parameters = self.process_lhs(compiler, connection)
        return f"{left} IN ({IDS})", tuple(parameters)


class Statement(NamedTuple):
    """A statement about rows by id, written by Django once: for each batch anew costs as much as a hundred rows."""

    sql: str
    parameters: tuple[Any, ...]

    @classmethod
    def of(cls, query: Query, using: str) -> Statement:
        """Return the statement of a query about ``those()`` rows."""
        sql, parameters = query.get_compiler(using).as_sql()
        return cls(sql, tuple(parameters))

    def on(self, ids: Iterable[int]) -> tuple[str, tuple[Any, ...]]:
        """Return what a cursor executes about these rows."""
        return self.sql.replace(IDS, ", ".join(map(str, ids)) or "NULL"), self.parameters


class Ended(NamedTuple):
    """A message that a scan found at its end: expired, or quarantined."""

    id: int
    message_id: str
    state: State


def all_rows(using: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(using)


def among(ids: Iterable[int], using: str) -> QuerySet[OutboxMessage]:
    return all_rows(using).filter(Among(F("id"), ids))


def those(using: str) -> QuerySet[OutboxMessage]:
    """Return the rows of a ``Statement``."""
    return all_rows(using).filter(AmongThose(F("id"), IDS))


def locked(ids: Iterable[int], using: str) -> QuerySet[OutboxMessage]:
    """Return the rows to lock in id order. Add no condition: MariaDB would lock by the index that serves it."""
    return lock(among(ids, using).order_by("id"))


def lock_those(
    ids: Iterable[int], states: Collection[State], using: str, *, with_body: bool = False
) -> list[int]:
    """Lock rows in id order; return the ids of those in one of the states (and not expunged)."""
    holds = ExpressionWrapper(Q(sealed__isnull=False), output_field=BooleanField())
    rows = locked(ids, using).annotate(holds=holds).values_list("id", "state", "holds")
    return [row_id for row_id, state, body in rows if state in states and (body or not with_body)]


def clock(ids: Iterable[int], using: str) -> datetime:
    """Return the database's time; some of these rows must be there."""
    now: datetime = among(ids, using).values_list(Now(), flat=True)[0]
    return now


def after(seconds: float) -> Any:
    return Now() + Value(timedelta(seconds=seconds), output_field=DurationField())


def pause_until(pauses: Mapping[int, timedelta]) -> Expression:
    """Return the time each row may next be taken: now and its pause, never beyond ``retry_until``."""
    distinct = set(pauses.values())
    pause: Expression
    if len(distinct) == 1:
        pause = Value(distinct.pop(), output_field=DurationField())
    else:
        pause = Case(
            *(
                When(id=row_id, then=Value(length, output_field=DurationField()))
                for row_id, length in pauses.items()
            ),
            output_field=DurationField(),
        )
    return Least(Now() + pause, F("retry_until"), output_field=DateTimeField())
