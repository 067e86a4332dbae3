"""``enqueue()``: a message that exists if and only if the caller's transaction commits.

Validates, seals and inserts one row in the caller's open transaction; it never commits, never waits for the
network and calls no publisher beyond its static rules. When it disagrees with a row that is already there
under the same key, the row is right.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import IntegrityError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DurationField, Expression, Field, Value
from django.db.models.functions import Now

from . import conf
from .envelope import Binding, Content, Headers, seal
from .exceptions import IdempotencyConflict, InvalidMessage, NotInTransaction, OutboxError
from .lifecycle import State
from .models import OutboxMessage
from .payloads import Draft, Identifier, header_fields, identifier, media_type, serialise
from .publishers import publisher_for


@dataclass(frozen=True, slots=True)
class Receipt:
    """What ``enqueue()`` did.

    ``id`` is the row's, ``message_id`` the constant name on the wire. ``created`` is False when this very
    message was there already: then ``state`` says how it stands, and nothing was renewed.
    """

    id: int
    message_id: str
    idempotency_key: str
    state: State
    created: bool


def enqueue(
    notification_type: str,
    payload: Any,
    *,
    to: str | None = None,
    publisher: str = "default",
    idempotency_key: Identifier | None = None,
    caller_scope_id: Identifier | None = None,
    account_id: Identifier | None = None,
    signing_scope_id: Identifier | None = None,
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    using: str | None = None,
) -> Receipt:
    """Store one message in the open transaction of the database ``using`` (default: the router's choice).

    ``payload`` is serialised as JSON, or kept byte for byte when it is bytes. ``to`` is the destination as the
    ``publisher`` alias understands it (a webhook: its URL). The same ``idempotency_key`` for the same type,
    destination, ``account_id`` and ``caller_scope_id`` names the same message: repeated with the same content
    it returns the first one's receipt, with other content it raises ``IdempotencyConflict``. Without a key every
    call is a message of its own.

    Raises ``NotInTransaction`` outside ``atomic()`` and ``InvalidMessage`` naming field and rule; neither has
    touched the database.
    """
    draft = Draft(
        notification_type=notification_type,
        payload=payload,
        to=to,
        publisher=publisher,
        idempotency_key=idempotency_key,
        caller_scope_id=caller_scope_id,
        account_id=account_id,
        signing_scope_id=signing_scope_id,
        headers=headers,
        content_type=content_type,
    )
    alias = using or router.db_for_write(OutboxMessage)
    _require_atomic(alias)
    return _store(_prepare(draft, conf.get()), alias)


@dataclass(frozen=True, slots=True, repr=False)
class _Prepared:
    """A draft that passed every rule: sealed, and with the names it will be found by."""

    binding: Binding
    sealed: bytes
    content_mac: bytes
    give_up_after: timedelta


def _prepare(draft: Draft, settings: conf.Settings) -> _Prepared:
    lane = settings.publisher(draft.publisher)
    publisher = publisher_for(lane)
    content_type = media_type(draft.content_type)
    headers: Headers = header_fields(draft.headers)
    body = serialise(draft.payload, content_type, settings.max_body_bytes)
    draft = publisher.validate(draft.replace(to=lane.to if draft.to is None else draft.to))
    destination = draft.to
    if destination is None:
        raise InvalidMessage("to", "missing", "expected a destination")
    caller = settings.caller_scope_id if draft.caller_scope_id is None else draft.caller_scope_id
    caller_scope_id = identifier("caller_scope_id", caller() if callable(caller) else caller)
    account_id = _optional_identifier("account_id", draft.account_id)
    notification_type = identifier("notification_type", draft.notification_type)
    idempotency_key = (
        uuid.uuid4().hex
        if draft.idempotency_key is None
        else identifier("idempotency_key", draft.idempotency_key)
    )
    lookup = settings.lookup
    binding = Binding(
        publisher=lane.alias,
        notification_type=notification_type,
        destination=publisher.display(destination),
        destination_key=lookup.destination_key(lane.alias, destination),
        caller_scope_id=caller_scope_id,
        account_id=account_id,
        signing_scope_id=_optional_identifier("signing_scope_id", draft.signing_scope_id),
        idempotency_key=idempotency_key,
        ordering_key="",
        dedup_id=lookup.dedup_id(
            caller_scope_id=caller_scope_id,
            account_id=account_id,
            publisher=lane.alias,
            destination=destination,
            notification_type=notification_type,
            idempotency_key=idempotency_key,
        ),
        encryption_key_id=settings.keyring.current_id,
    )
    content = Content(body=body, content_type=content_type, headers=headers, destination=destination)
    return _Prepared(
        binding=binding,
        sealed=seal(content, binding, settings.keyring),
        content_mac=lookup.content_mac(body, content_type, headers),
        give_up_after=lane.give_up_after,
    )


def _optional_identifier(field: str, value: Identifier | None) -> str | None:
    return None if value is None else identifier(field, value)


def _require_atomic(alias: str) -> None:
    if _in_real_atomic(connections[alias]):
        return
    others = [c.alias for c in connections.all(initialized_only=True) if _in_real_atomic(c)]
    hint = f", or pass using={others[0]!r}, which is in a transaction" if others else ""
    raise NotInTransaction(
        f"enqueue() needs an open transaction on database {alias!r}: call it inside "
        f"transaction.atomic() together with the change it announces{hint}"
    )


def _in_real_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Say whether the caller opened a transaction; one that a ``TestCase`` wraps around a test is not his."""
    blocks = getattr(connection, "atomic_blocks", None)
    if blocks is None:
        return connection.in_atomic_block
    return any(not getattr(block, "_from_testcase", False) for block in blocks)


def _store(prepared: _Prepared, alias: str) -> Receipt:
    one_statement = connections[alias].features.supports_update_conflicts_with_target
    insert = _insert_unless_taken if one_statement else _insert_in_savepoint
    for _try in range(3):
        row_id = insert(prepared, alias)
        if row_id is not None:
            return _receipt(prepared, row_id, State.PENDING, created=True)
        row = _find(prepared, alias, current=not one_statement)
        if row is not None:
            return _receipt(prepared, row.id, State(row.state), created=False)
        # purged between the conflict and the look: the key is free again
    raise OutboxError("the same key was taken and purged again and again; repeat the transaction")


def _receipt(prepared: _Prepared, row_id: int, state: State, *, created: bool) -> Receipt:
    binding = prepared.binding
    return Receipt(row_id, binding.message_id, binding.idempotency_key, state, created)


def _find(prepared: _Prepared, alias: str, *, current: bool = False) -> OutboxMessage | None:
    """Return the row that holds the key. Raises ``IdempotencyConflict`` when it is another message.

    ``current``: read what is committed now, whatever the transaction's snapshot says.
    """
    rows = OutboxMessage.objects.using(alias).filter(dedup_id=prepared.binding.dedup_id)
    rows = rows.only("id", "state", "content_mac", "signing_scope_id", "ordering_key")
    row = rows.first()
    if row is None and current:
        row = rows.select_for_update().first()
    if row is None:
        return None
    mine, theirs = prepared.content_mac, bytes(row.content_mac)
    for part, same in (
        ("payload", mine[:16] == theirs[:16]),
        ("content type or headers", mine[16:] == theirs[16:]),
        ("signing scope", prepared.binding.signing_scope_id == row.signing_scope_id),
        ("ordering key", prepared.binding.ordering_key == row.ordering_key),
    ):
        if not same:
            raise IdempotencyConflict(part)
    return row


def _columns(prepared: _Prepared) -> dict[str, Any]:
    """Return what the new row holds beyond the model's defaults and the times."""
    binding = prepared.binding
    return {
        "publisher": binding.publisher,
        "notification_type": binding.notification_type,
        "caller_scope_id": binding.caller_scope_id,
        "account_id": binding.account_id,
        "signing_scope_id": binding.signing_scope_id,
        "destination": binding.destination,
        "destination_key": binding.destination_key,
        "idempotency_key": binding.idempotency_key,
        "ordering_key": binding.ordering_key,
        "dedup_id": binding.dedup_id,
        "content_mac": prepared.content_mac,
        "encryption_key_id": binding.encryption_key_id,
        "sealed": prepared.sealed,
        "give_up_after": prepared.give_up_after,
    }


def _times(give_up_after: timedelta) -> dict[str, Expression]:
    now = Now()
    until = now + Value(give_up_after, output_field=DurationField())
    return {
        "due_at": now,
        "available_at": now,
        "retry_until": until,
        "created_at": now,
        "updated_at": now,
    }


def _insert_in_savepoint(prepared: _Prepared, alias: str) -> int | None:
    """Insert where a conflict is an error (MySQL family). INSERT IGNORE would store truncated keys there."""
    if _find(prepared, alias) is not None:
        return None
    row = OutboxMessage(**_columns(prepared), **_times(prepared.give_up_after))
    try:
        with transaction.atomic(using=alias):
            row.save(using=alias, force_insert=True)
    except IntegrityError:
        return None
    return row.id


def _insert_unless_taken(prepared: _Prepared, alias: str) -> int | None:
    """Insert in one statement (PostgreSQL, SQLite); the ORM's way costs five times the CPU."""
    connection = connections[alias]
    plan = _plan(alias, connection.vendor)
    columns = _columns(prepared)
    parameters = [
        field.get_db_prep_save(columns.get(field.name, default), connection) for field, default in plan.fields
    ]
    with connection.cursor() as cursor:
        cursor.execute(plan.sql, parameters)
        inserted = cursor.fetchone()
    return None if inserted is None else inserted[0]


class _Plan(NamedTuple):
    """The INSERT statement and, for each of its parameters, the field and the value to take by default."""

    sql: str
    fields: list[tuple[Field[Any, Any], Any]]


@lru_cache(maxsize=16)
def _plan(alias: str, _vendor: str) -> _Plan:
    connection = connections[alias]
    query = OutboxMessage._base_manager.using(alias).query
    compiler = query.get_compiler(alias)
    quote = connection.ops.quote_name
    meta = OutboxMessage._meta
    times = _times(timedelta(0))
    names: list[str] = []
    values: list[str] = []
    fields: list[tuple[Field[Any, Any], Any]] = []
    for field in meta.concrete_fields:
        if field.primary_key:
            continue
        names.append(quote(str(field.column)))
        if field.name in times:
            sql, params = compiler.compile(times[field.name].resolve_expression(query))
            values.append(sql)
            # the one parameter among the times is the duration in retry_until
            fields += [(meta.get_field("give_up_after"), None) for _ in params]
        else:
            values.append("%s")
            fields.append((field, field.get_default()))
    return _Plan(
        f"INSERT INTO {quote(meta.db_table)} ({', '.join(names)}) VALUES ({', '.join(values)}) "  # noqa: S608
        f"ON CONFLICT ({quote('dedup_id')}) DO NOTHING RETURNING {quote('id')}",
        fields,
    )
