"""How a prepared message becomes a row: the one statement of each database, and what a conflict means there.

On PostgreSQL and SQLite ``INSERT … ON CONFLICT DO NOTHING RETURNING``, by hand because the ORM's way costs
several times the CPU of the rest of ``enqueue()``. On the MySQL family ``INSERT … ON DUPLICATE KEY UPDATE`` that
changes nothing, between two looks. Rows go in by the order of the index of ``dedup_id``, so that two callers with
the same keys queue instead of embracing. No lock outlives the caller's transaction.

Why so on the MySQL family: an error of a plain insert takes back the rows before it, and who waits for one of
those gets a lock on the gap it leaves; two of them then keep each other out of it (deadlock). It also leaves a
shared lock, which two holders cannot both make exclusive. ``INSERT IGNORE`` stores truncated keys. The price: a row
committed between look and insert is locked, out of id order, so a mover may meet a deadlock and repeats its work.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BinaryField, DateTimeField, DurationField, Expression, Field, Value
from django.db.models.functions import Greatest, Now, Substr

from .envelope import BOUND, SEAL_ID_BYTES, Binding
from .exceptions import IdempotencyConflict, OutboxError
from .lifecycle import QuarantineReason, State
from .models import OutboxMessage

CHUNK = 300
# a MariaDB server takes 16 MB at once by default, and text of binary data is twice as long
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, repr=False)
class NewRow:
    """A message ready to be stored.

    ``due`` is so long after the database's now, or a moment of its own: then ``later`` is added to it or to now,
    whichever comes last. ``refused`` is "field:rule" for a message that is stored as quarantined because its data
    broke that rule. ``position`` is the draft's among many, for the error.
    """

    binding: Binding
    sealed: bytes
    content_mac: bytes
    due: timedelta | datetime
    give_up_after: timedelta
    refused: str = ""
    later: timedelta = timedelta(0)
    position: int | None = None

    @property
    def name(self) -> uuid.UUID:
        return self.binding.dedup_id

    @property
    def state(self) -> State:
        return State.QUARANTINED if self.refused else State.PENDING


class Stored(NamedTuple):
    """The row that stands for a message: made now, or found."""

    id: int
    state: State
    created: bool


def store(rows: Sequence[NewRow], *, using: str) -> list[Stored]:
    """Store the rows in the caller's transaction; return how each stands, in the order given.

    A row that is there already, or twice among the given, is found instead. Raises ``IdempotencyConflict`` when
    what is there under the same key is another message.
    """
    wanted: dict[uuid.UUID, NewRow] = {}
    for row in rows:
        same = wanted.setdefault(row.name, row)
        _compare(row, same.content_mac, same.binding.signing_scope_id, same.binding.ordering_key)
    place = _place_in_index(using)
    ordered = sorted(wanted.values(), key=lambda row: place(row.name))
    stored: dict[uuid.UUID, Stored] = {}
    for chunk in _chunks(ordered):
        stored |= _store_chunk(chunk, using)
    return [
        stored[row.name] if wanted[row.name] is row else stored[row.name]._replace(created=False)
        for row in rows
    ]


def _chunks(rows: Sequence[NewRow]) -> Iterator[Sequence[NewRow]]:
    chunk: list[NewRow] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == CHUNK or size + len(row.sealed) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += len(row.sealed)
    if chunk:
        yield chunk


def _place_in_index(using: str) -> Callable[[uuid.UUID], bytes]:
    """Return the key that sorts names as the unique index does: locks on its gaps must be asked for in its order."""
    connection = connections[using]
    if connection.vendor == "mysql" and connection.features.has_native_uuid_field:
        # MariaDB's type compares a version 4 from its last group to its first
        return lambda name: b"".join(bytes.fromhex(group) for group in reversed(str(name).split("-")))
    return lambda name: name.bytes


def _store_chunk(rows: Sequence[NewRow], using: str) -> dict[uuid.UUID, Stored]:
    connection = connections[using]
    tells = connection.features.supports_update_conflicts_with_target
    # elsewhere the insert locks what it meets: what is committed is met before, without a lock; but at
    # SERIALIZABLE a look locks, too, and for a key that is not there a gap, which two callers keep from each other
    looks_lock = getattr(connection, "isolation_level", None) == "serializable"
    stored = {} if tells or looks_lock else _find(rows, using)
    for _try in range(3):
        if missing := [row for row in rows if row.name not in stored]:
            stored |= _insert(missing, using)
        if missing := [row for row in rows if row.name not in stored]:
            stored |= _find(missing, using) if tells else _find_inserted(missing, using)
        if len(stored) == len(rows):
            return stored
        # purged between the conflict and the look: the key is free again
    raise OutboxError("the same key was taken and purged again and again; repeat the transaction")


def _find(rows: Sequence[NewRow], using: str, *, locked: bool = False) -> dict[uuid.UUID, Stored]:
    """Return those of the rows that are there, made by us or not. ``locked``: see what the snapshot hides."""
    there = OutboxMessage.objects.using(using).filter(dedup_id__in=[row.name for row in rows])
    if locked:
        there = there.select_for_update()
    seal_id = Substr("sealed", 1, SEAL_ID_BYTES, output_field=BinaryField())
    found = {
        name: (bytes(mac), scope, ordering_key, row_id, State(state), seal and bytes(seal))
        for name, mac, scope, ordering_key, row_id, state, seal in there.values_list(
            "dedup_id", "content_mac", "signing_scope_id", "ordering_key", "id", "state", seal_id
        )
    }
    stored: dict[uuid.UUID, Stored] = {}
    for row in rows:
        if row.name in found:
            mac, scope, ordering_key, row_id, state, seal = found[row.name]
            _compare(row, mac, scope, ordering_key)
            stored[row.name] = Stored(row_id, state, created=seal == row.sealed[:SEAL_ID_BYTES])
    return stored


def _find_inserted(rows: Sequence[NewRow], using: str) -> dict[uuid.UUID, Stored]:
    """Return what an insert that says nothing made or met."""
    stored = _find(rows, using)
    for row in rows:
        if row.name not in stored:
            # committed after our snapshot; one by one, as many would scan and lock the whole of a small table
            stored |= _find([row], using, locked=True)
    return stored


def _compare(row: NewRow, content_mac: bytes, signing_scope_id: str | None, ordering_key: str) -> None:
    for part, same in (
        ("payload", row.content_mac[:16] == content_mac[:16]),
        ("content type or headers", row.content_mac[16:] == content_mac[16:]),
        ("signing scope", row.binding.signing_scope_id == signing_scope_id),
        ("ordering key", row.binding.ordering_key == ordering_key),
    ):
        if not same:
            conflict = IdempotencyConflict(part)
            conflict.position = row.position
            raise conflict


# columns that hold the row's own values; the rest are times and the model's defaults
VARYING = (*BOUND, "content_mac", "sealed", "give_up_after", "last_error")


def _columns(row: NewRow) -> dict[str, Any]:
    values = {name: getattr(row.binding, name) for name in BOUND}
    return values | {
        "content_mac": row.content_mac,
        "sealed": row.sealed,
        "give_up_after": row.give_up_after,
        "last_error": row.refused,
    }


class _Kind(NamedTuple):
    """What a row's statement depends on: when is it due, and is it stored dead?"""

    due: Literal["now", "later", "at"]
    dead: bool

    @classmethod
    def of(cls, row: NewRow) -> _Kind:
        # most rows are due now: they spare the driver three parameters each
        when: Literal["now", "later", "at"] = "later" if row.due else "now"
        return cls("at" if isinstance(row.due, datetime) else when, bool(row.refused))

    def fixed(self) -> dict[str, Any]:
        if not self.dead:
            return {"last_error": ""}
        return {
            "state": State.QUARANTINED.value,
            "quarantine_reason": QuarantineReason.INVALID_REQUEST.value,
        }

    def times(self, value: Callable[[str, Field[Any, Any]], Expression]) -> dict[str, Expression]:
        """Return the times, all by the database's clock; ``value`` makes the expression of a named value."""
        now = Now()
        due: Expression = now
        if self.due == "at":
            due = Greatest(now, value("due", DateTimeField())) + value("later", DurationField())
        elif self.due == "later":
            due = now + value("due", DurationField())
        until = due + value("give_up_after", DurationField())
        times = {"due_at": due, "available_at": due, "retry_until": until}
        times |= {"created_at": now, "updated_at": now}
        return times | {"settled_at": now} if self.dead else times


def _insert(rows: Sequence[NewRow], using: str) -> dict[uuid.UUID, Stored]:
    """Insert in one statement; rows whose key is taken are skipped. The MySQL family does not say which."""
    connection = connections[using]
    before, after = _frame(using, connection.vendor)
    tuples: list[str] = []
    parameters: list[Any] = []
    with connection.cursor() as cursor:
        # psycopg parses a statement's placeholders anew when it is long: its own short rows cost a quarter less; a
        # cursor that has the server bind parameters cannot write them
        mogrify = (
            getattr(cursor, "mogrify", None) if len(rows) > 1 and connection.vendor == "postgresql" else None
        )
        for row in rows:
            template = _template(using, connection.vendor, _Kind.of(row))
            values = _columns(row)
            values |= {"due": row.due, "later": row.later}
            prepared = [
                field.get_db_prep_value(values[name], connection, prepared=False)
                for name, field in template.slots
            ]
            if mogrify is None:
                tuples.append(template.sql)
                parameters += prepared
            else:
                tuples.append(mogrify(template.sql, prepared))
        cursor.execute(f"{before}{', '.join(tuples)}{after}", parameters or None)
        inserted = cursor.fetchall() if connection.vendor != "mysql" else ()
    ids = {name if isinstance(name, uuid.UUID) else uuid.UUID(name): row_id for row_id, name in inserted}
    return {row.name: Stored(ids[row.name], row.state, True) for row in rows if row.name in ids}


class _Template(NamedTuple):
    """One row of VALUES and, in order, the values its parameters take."""

    sql: str
    slots: list[tuple[str, Field[Any, Any]]]


class _Slot(Value):
    """A value that differs from row to row: compiles to its placeholder and stands in the parameters itself."""

    def __init__(self, name: str, field: Field[Any, Any]) -> None:
        sample = timedelta(0) if isinstance(field, DurationField) else datetime(2000, 1, 1).astimezone()
        super().__init__(sample, output_field=field)
        self.name = name

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        sql, _parameters = super().as_sql(compiler, connection)
        return sql, (self,)


def _fields() -> list[Field[Any, Any]]:
    return [field for field in OutboxMessage._meta.concrete_fields if not field.primary_key]


@lru_cache(maxsize=16)
def _frame(using: str, _vendor: str) -> tuple[str, str]:
    """Return what stands before and after the rows of VALUES."""
    connection = connections[using]
    quote = connection.ops.quote_name
    names = ", ".join(quote(str(field.column)) for field in _fields())
    before = f"INSERT INTO {quote(OutboxMessage._meta.db_table)} ({names}) VALUES "
    dedup_id = quote("dedup_id")
    if connection.vendor == "mysql":
        return before, f" ON DUPLICATE KEY UPDATE {dedup_id} = {dedup_id}"
    return before, f" ON CONFLICT ({dedup_id}) DO NOTHING RETURNING {quote('id')}, {dedup_id}"


@lru_cache(maxsize=64)
def _template(using: str, _vendor: str, kind: _Kind) -> _Template:
    query = OutboxMessage._base_manager.using(using).query
    compiler = query.get_compiler(using)
    times, fixed = kind.times(_Slot), kind.fixed()
    parts: list[str] = []
    slots: list[tuple[str, Field[Any, Any]]] = []
    for field in _fields():
        if field.name in times:
            sql, parameters = compiler.compile(times[field.name].resolve_expression(query))
            parts.append(sql)
            slots += [(slot.name, slot.output_field) for slot in parameters]
        elif field.name in fixed:
            parts.append(_literal(fixed[field.name]))
        elif field.name in VARYING:
            parts.append("%s")
            slots.append((field.name, field))
        else:
            parts.append(_literal(field.get_default()))
    return _Template(f"({', '.join(parts)})", slots)


def _literal(value: str | int | None) -> str:
    """Return one of our own constants as SQL."""
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else f"'{value}'"
