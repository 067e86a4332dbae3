"""``enqueue()``: a message that exists if and only if the caller's transaction commits.

Validates, seals and hands over to ``inserts``, in the caller's open transaction; it never commits, never waits for
the network and calls no publisher beyond its static rules. When it disagrees with a row that is already there
under the same key, the row is right.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from django.core.exceptions import ValidationError
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from . import conf, inserts
from .drafts import (
    GIVE_UP_AFTER,
    Draft,
    Identifier,
    due,
    duration,
    header_fields,
    header_pairs,
    identifier,
    media_type,
)
from .envelope import Binding, Content, seal
from .exceptions import ConfigurationError, InvalidMessage, NotInTransaction, OutboxError
from .inserts import NewRow, Stored
from .lifecycle import State
from .models import OutboxMessage
from .payloads import HARD_MAX_BYTES, bind, check_size, is_json, serialise, wrap
from .publishers import publisher_for

OnInvalid = Literal["raise", "quarantine"]
# how much of what breaks a rule is kept: beyond it is no customer's typing error
MAX_KEPT = 16 * 1024
MAX_SPREAD = timedelta(days=30)
REFUSED_DESTINATION = "(refused)"

T = TypeVar("T")


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
    ordering_key: Identifier = "",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    delay: timedelta | float | None = None,
    available_at: datetime | None = None,
    give_up_after: timedelta | float | None = None,
    on_invalid: OnInvalid = "raise",
    using: str | None = None,
) -> Receipt:
    """Store one message in the open transaction of the database ``using`` (default: the router's choice).

    ``payload`` is serialised as JSON, or kept byte for byte when it is bytes. ``to`` is the destination as the
    ``publisher`` alias understands it (a webhook: its URL). The same ``idempotency_key`` for the same type,
    destination, ``account_id`` and ``caller_scope_id`` names the same message: repeated with the same content
    it returns the first one's receipt, with other content it raises ``IdempotencyConflict``. Without a key every
    call is a message of its own.

    It is due after ``delay`` (timedelta or seconds) or at ``available_at`` (aware datetime), and given up
    ``give_up_after`` that, by the database's clock. ``on_invalid="quarantine"`` stores a message whose data
    breaks a rule (URL, header values, body) as quarantined, with its receipt, instead of raising: one bad
    customer URL never rolls back a payment. ``ordering_key`` is stored and bound to the message; workers do not
    keep order by it yet.

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
        ordering_key=ordering_key,
        headers=headers,
        content_type=content_type,
        delay=delay,
        available_at=available_at,
        give_up_after=give_up_after,
    )
    alias = _database(using)
    _check_choice(on_invalid)
    row = _prepare(draft, conf.get(), on_invalid)
    (stored,) = inserts.store([row], using=alias)
    return _receipt(row, stored)


def enqueue_many(
    drafts: Iterable[Draft],
    *,
    spread: timedelta | float | None = None,
    on_invalid: OnInvalid = "raise",
    using: str | None = None,
) -> list[Receipt]:
    """Store many messages, a few hundred to a statement; return their receipts in the order given.

    All or nothing. ``spread`` places their due times evenly over so long (timedelta or seconds), so that a
    campaign does not arrive at once: each is due its share of that after its own time or now, whichever is later.
    A draft repeated among the given is ``created=False``.

    Raises as ``enqueue()`` does; ``error.position`` says which draft was refused, counted from 0.
    """
    alias = _database(using)
    settings = conf.get()
    _check_choice(on_invalid)
    length = timedelta(0) if spread is None else duration("spread", spread, timedelta(0), MAX_SPREAD)
    if not isinstance(drafts, Iterable):
        raise InvalidMessage("drafts", "draft-type", "expected an iterable of Draft")
    rows: list[NewRow] = []
    for position, draft in enumerate(drafts):
        try:
            rows.append(replace(_prepare(draft, settings, on_invalid), position=position))
        except OutboxError as error:
            error.position = position
            raise
    if length:
        rows = [_postponed(row, length * place / len(rows)) for place, row in enumerate(rows)]
    with transaction.atomic(using=alias):
        stored = inserts.store(rows, using=alias)
    return [_receipt(row, one) for row, one in zip(rows, stored, strict=True)]


def _postponed(row: NewRow, wait: timedelta) -> NewRow:
    if isinstance(row.due, timedelta):
        return replace(row, due=row.due + wait)
    # only the database knows whether that moment is still ahead
    return replace(row, later=wait)


def validate_destination(url: object, publisher: str = "default") -> None:
    """Check a destination as ``enqueue()`` would: a validator for model and form fields.

    Raises ``django.core.exceptions.ValidationError`` with the rule as its code, never with the value.
    """
    settings = conf.get()
    problem = None
    try:
        publisher_for(settings.publisher(publisher)).validate(Draft("validate", b"", to=url))  # type: ignore[arg-type]
    except InvalidMessage as error:
        problem = error
    if problem is not None:
        raise ValidationError(problem.hint, code=problem.rule)


def _receipt(row: NewRow, stored: Stored) -> Receipt:
    binding = row.binding
    return Receipt(stored.id, binding.message_id, binding.idempotency_key, stored.state, stored.created)


def _check_choice(on_invalid: object) -> None:
    if on_invalid not in ("raise", "quarantine"):
        raise InvalidMessage("on_invalid", "choice", "expected 'raise' or 'quarantine'")


class _Faults:
    """Runs the steps that data can break: raises what they find, or keeps the first of it."""

    def __init__(self, on_invalid: OnInvalid) -> None:
        self._keep = on_invalid == "quarantine"
        self.first: InvalidMessage | None = None

    def step(self, run: Callable[[], T], otherwise: T) -> T:
        try:
            return run()
        except InvalidMessage as error:
            if not (self._keep and error.data):
                raise
            self.first = self.first or error
        return otherwise


def _prepare(draft: Draft, settings: conf.Settings, on_invalid: OnInvalid) -> NewRow:
    """Hold a draft to every rule; return it sealed and under the names it will be found by."""
    if not isinstance(draft, Draft):
        raise InvalidMessage("drafts", "draft-type", "expected Draft(...)")
    faults = _Faults(on_invalid)
    lane = settings.publisher(draft.publisher)
    notification_type = identifier("notification_type", draft.notification_type)
    account_id = _optional_identifier("account_id", draft.account_id)
    caller = settings.caller_scope_id if draft.caller_scope_id is None else draft.caller_scope_id
    caller_scope_id = identifier("caller_scope_id", caller() if callable(caller) else caller)
    key = uuid.uuid4().hex if draft.idempotency_key is None else draft.idempotency_key
    idempotency_key = identifier("idempotency_key", key)
    content_type = media_type(draft.content_type)
    headers = faults.step(lambda: header_fields(draft.headers), header_pairs(draft.headers))
    names = {"idempotency_key": idempotency_key, "notification_type": notification_type}
    payload, body = _body(draft, lane, settings, faults, content_type, names, account_id)
    destination, display = _destination(draft, lane, faults)
    binding = Binding(
        publisher=lane.alias,
        notification_type=notification_type,
        destination=display,
        destination_key=settings.lookup.destination_key(lane.alias, destination),
        caller_scope_id=caller_scope_id,
        account_id=account_id,
        signing_scope_id=_optional_identifier("signing_scope_id", draft.signing_scope_id),
        idempotency_key=idempotency_key,
        ordering_key="" if draft.ordering_key == "" else identifier("ordering_key", draft.ordering_key),
        dedup_id=settings.lookup.dedup_id(
            caller_scope_id=caller_scope_id,
            account_id=account_id,
            publisher=lane.alias,
            destination=destination,
            notification_type=notification_type,
            idempotency_key=idempotency_key,
        ),
        encryption_key_id=settings.keyring.current_id,
    )
    fault = faults.first
    content = Content(body, content_type, headers, destination, checked=fault is None)
    give_up_after = lane.give_up_after
    if draft.give_up_after is not None:
        give_up_after = duration("give_up_after", draft.give_up_after, *GIVE_UP_AFTER)
    return NewRow(
        binding=binding,
        sealed=seal(content, binding, settings.keyring),
        content_mac=settings.lookup.content_mac(payload, content_type, headers),
        due=_due(draft, use_tz=settings.use_tz),
        give_up_after=give_up_after,
        refused=f"{fault.field}:{fault.rule}" if fault else "",
    )


def _body(
    draft: Draft,
    lane: conf.PublisherSettings,
    settings: conf.Settings,
    faults: _Faults,
    content_type: str,
    names: Mapping[str, str],
    account_id: str | None,
) -> tuple[bytes, bytes]:
    """Return the caller's payload as bytes and the body that is sent, which ``BODY`` may have wrapped."""
    given = draft.payload
    if isinstance(given, bytes | bytearray | memoryview):
        raw = bytes(given)
        payload = faults.step(lambda: serialise(raw, content_type, HARD_MAX_BYTES), raw)
    else:
        # a value that is no JSON has no bytes to keep: a mistake of the code, not of its data
        payload = serialise(given, content_type, HARD_MAX_BYTES)
    body = payload
    if lane.body != "plain" and not is_json(content_type):
        raise InvalidMessage("content_type", "body-json", f"this publisher's BODY={lane.body!r} needs JSON")
    payload_is_json = faults.first is None or faults.first.field != "payload"
    if lane.body == "standard" and payload_is_json:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        body = wrap(payload, names["notification_type"], now)
    elif lane.body == "bound":
        filled = faults.step(lambda: bind(given, payload, names, account_id), None)
        if filled is not None:
            body = serialise(filled, content_type, HARD_MAX_BYTES)
    faults.step(lambda: check_size(body, settings.max_body_bytes), None)
    if faults.first is None:
        check = settings.validators.check
        faults.step(lambda: check(names["notification_type"], body, content_type), None)
    return payload, body


def _destination(draft: Draft, lane: conf.PublisherSettings, faults: _Faults) -> tuple[str, str]:
    """Return the destination in its normal form and what people may see of it."""
    publisher = publisher_for(lane)
    named = draft.replace(to=lane.to) if draft.to is None else draft
    destination = faults.step(lambda: publisher.validate(named).to, None)
    if destination is not None:
        if not isinstance(destination, str):
            raise InvalidMessage("to", "not-text", "expected the publisher to make text of it")
        # a stranger's publisher may show what no column holds
        return destination, identifier("to", publisher.display(destination))
    if faults.first is None or named.to is None:
        raise InvalidMessage("to", "missing", "expected a destination")
    if len(named.to) > MAX_KEPT:
        raise InvalidMessage(
            "to", "too-long", f"expected at most {MAX_KEPT} characters, even to be quarantined"
        )
    return named.to, REFUSED_DESTINATION


def _due(draft: Draft, *, use_tz: bool) -> timedelta | datetime:
    moment = due(draft)
    if use_tz or isinstance(moment, timedelta):
        return moment
    # without time zones the database's columns are in a zone we do not know: say how long from now instead
    return max(moment - datetime.now(UTC), timedelta(0))


def _optional_identifier(field: str, value: Identifier | None) -> str | None:
    return None if value is None else identifier(field, value)


def _database(using: str | None) -> str:
    """Return the database to write to, which must be in a transaction of the caller's own."""
    alias = using or router.db_for_write(OutboxMessage)
    if alias not in connections:
        raise ConfigurationError(
            f"using: there is no such database; DATABASES has {', '.join(sorted(connections))}"
        )
    if _in_real_atomic(connections[alias]):
        return alias
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
