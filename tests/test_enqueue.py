"""``enqueue()``: exists if and only if the change does, refuses clearly, binds one key to one content."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase

from notification_outbox import IdempotencyConflict, InvalidMessage, NotInTransaction, conf, enqueue
from notification_outbox.delivery import as_message, open_claim
from notification_outbox.exceptions import ConfigurationError
from notification_outbox.lifecycle import State
from notification_outbox.models import OutboxMessage
from tests.processes import Outbox

URL = "https://hooks.acme.com/shop?token=abc"


class Abandoned(Exception):
    """The business change failed."""


@transaction.atomic
def enqueue_and_fail() -> None:
    enqueue("order.shipped", {}, to=URL)
    raise Abandoned


@pytest.fixture
def tx(transactional_db: None) -> Iterator[None]:
    """A transaction of the caller's own, rolled back afterwards."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.mark.django_db(transaction=True)
def test_a_committed_transaction_leaves_its_message() -> None:
    """The message is there when the change is, pending and due."""
    with transaction.atomic():
        receipt = enqueue("order.paid", {"order": 7}, to=URL)
    row = OutboxMessage.objects.get()
    assert (row.id, row.state, row.attempts) == (receipt.id, "pending", 0)
    assert receipt.created
    assert receipt.state is State.PENDING
    assert receipt.message_id == row.message_id == f"msg_{row.dedup_id.hex}"
    assert row.due_at == row.available_at == row.created_at
    assert row.retry_until - row.due_at == row.give_up_after == timedelta(days=3)


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_transaction_leaves_nothing() -> None:
    """No change, no message."""
    with pytest.raises(Abandoned):
        enqueue_and_fail()
    assert not OutboxMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_savepoint_takes_only_its_own_messages() -> None:
    """The message follows the innermost block it was enqueued in."""
    with transaction.atomic():
        kept = enqueue("order.paid", {}, to=URL)
        with pytest.raises(Abandoned):
            enqueue_and_fail()
    assert list(OutboxMessage.objects.values_list("id", flat=True)) == [kept.id]


def test_nothing_is_sent_before_commit(outbox: Outbox, transactional_db: None) -> None:
    """A worker that runs while the transaction is open finds nothing to send."""
    if connection.vendor == "sqlite":
        # SQLite's one writer waits for the transaction instead, which is the same promise
        with transaction.atomic():
            enqueue("order.paid", {}, to=outbox.receiver.url())
            transaction.set_rollback(True)
    else:
        with transaction.atomic():
            enqueue("order.paid", {}, to=outbox.receiver.url())
            assert outbox.start("--once").wait() == 0
            assert outbox.receiver.connections == 0
    outbox.work()
    assert outbox.receiver.connections == (0 if connection.vendor == "sqlite" else 1)


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_it_refuses() -> None:
    """A message that could outlive its change is not accepted; the error says what to do."""
    with pytest.raises(NotInTransaction, match=r"'default'.*transaction\.atomic\(\)"):
        enqueue("order.paid", {}, to=URL)
    assert not OutboxMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_autocommit_switched_off_is_not_a_block() -> None:
    """Only ``atomic()`` ties a message to its change."""
    transaction.set_autocommit(False)
    try:
        with pytest.raises(NotInTransaction):
            enqueue("order.paid", {}, to=URL)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


class InsideATestCase(TestCase):
    """The blocks that ``TestCase`` wraps around a test are not the caller's."""

    @classmethod
    def setUpTestData(cls) -> None:
        with transaction.atomic():
            enqueue("fixture", {}, to=URL)

    def test_it_refuses_without_the_callers_own_block(self) -> None:
        """A view that forgets ``atomic()`` fails in its test as it would in production."""
        with pytest.raises(NotInTransaction):
            enqueue("order.paid", {}, to=URL)

    def test_it_accepts_the_callers_own_block(self) -> None:
        """With ``atomic()`` the test passes."""
        with transaction.atomic():
            assert enqueue("order.paid", {}, to=URL).created
        assert OutboxMessage.objects.count() == 2


def test_the_same_call_again_is_the_same_message(tx: None) -> None:
    """A repeated call returns the first one's receipt and renews nothing."""
    first = enqueue("order.paid", {"order": 7}, to=URL, idempotency_key=7)
    before = OutboxMessage.objects.values().get()
    again = enqueue("order.paid", {"order": 7}, to=URL, idempotency_key=7)
    assert (again.id, again.message_id, again.idempotency_key) == (first.id, first.message_id, "7")
    assert (first.created, again.created) == (True, False)
    assert OutboxMessage.objects.values().get() == before


def test_a_repeated_call_says_how_the_message_stands(tx: None) -> None:
    """A caller who repeats himself learns that the message is dead."""
    first = enqueue("order.paid", {}, to=URL, idempotency_key="k")
    OutboxMessage.objects.filter(id=first.id).update(
        state="quarantined", quarantine_reason="gone", settled_at="2026-01-01T00:00Z"
    )
    assert enqueue("order.paid", {}, to=URL, idempotency_key="k").state is State.QUARANTINED


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"payload": {"order": 8}}, "payload"),
        ({"headers": {"X-Shop": "b"}}, "content type or headers"),
        ({"headers": None}, "content type or headers"),
        ({"content_type": "application/vnd.shop+json"}, "content type or headers"),
    ],
)
def test_other_content_under_the_same_key_is_a_conflict(tx: None, change: dict[str, Any], part: str) -> None:
    """The error names the part that differs and no value; the transaction stays usable."""
    call: dict[str, Any] = {
        "notification_type": "order.paid",
        "payload": {"order": 7},
        "to": URL,
        "idempotency_key": "k",
        "headers": {"X-Shop": "a"},
    }
    enqueue(**call)
    with pytest.raises(IdempotencyConflict, match=part) as caught:
        enqueue(**(call | change))
    assert caught.value.part == part
    assert "acme" not in str(caught.value)
    assert OutboxMessage.objects.count() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"notification_type": "order.shipped"},
        {"to": "https://hooks.acme.com/other"},
        {"account_id": 2},
        {"account_id": None},
        {"caller_scope_id": "billing"},
        {"idempotency_key": "other"},
    ],
)
def test_a_key_belongs_to_its_scope(tx: None, change: dict[str, Any]) -> None:
    """The same key for another type, destination, account or caller is another message."""
    call: dict[str, Any] = {
        "notification_type": "order.paid",
        "payload": {},
        "to": URL,
        "idempotency_key": "k",
        "account_id": 1,
    }
    assert enqueue(**call).message_id != enqueue(**(call | change)).message_id


def test_without_a_key_every_call_is_a_message(tx: None) -> None:
    """Two calls without a key are two messages, each with a key of its own."""
    first, second = enqueue("order.paid", {}, to=URL), enqueue("order.paid", {}, to=URL)
    assert first.id != second.id
    assert first.idempotency_key != second.idempotency_key


def test_one_url_has_one_spelling(tx: None) -> None:
    """Spellings of one destination share a key, since its normal form is what is stored."""
    first = enqueue("t", {}, to="HTTPS://Hooks.Acme.COM:443/shop", idempotency_key="k")
    assert enqueue("t", {}, to="https://hooks.acme.com/shop", idempotency_key="k").id == first.id


def test_ids_and_uuids_are_taken_as_their_text(tx: None) -> None:
    """Primary keys are passed as they are."""
    account = uuid.uuid4()
    row = OutboxMessage.objects.get(
        id=enqueue("t", {}, to=URL, account_id=account, idempotency_key=12, caller_scope_id=3).id
    )
    assert (row.account_id, row.idempotency_key, row.caller_scope_id) == (str(account), "12", "3")


def test_secrets_are_not_in_clear_columns(tx: None) -> None:
    """Payload, header values and the URL's path and query live only sealed."""
    enqueue("order.paid", {"card": "4111mark"}, to=URL, headers={"X-Token": "headermark"})
    stored = repr(list(OutboxMessage.objects.values().get().items()))
    for secret in ("4111mark", "headermark", "token=abc", "/shop"):
        assert secret not in stored
    assert OutboxMessage.objects.get().destination == "hooks.acme.com"


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"to": None}, "to", "missing"),
        ({"to": "http://hooks.acme.com/"}, "to", "scheme"),
        ({"to": "https://127.0.0.1/"}, "to", "denied-address"),
        ({"to": "https://[::ffff:127.0.0.1]/"}, "to", "denied-address"),
        ({"to": 7}, "to", "not-text"),
        ({"payload": b""}, "payload", "body-empty"),
        ({"payload": b"x" * 1_048_577, "content_type": "text/plain"}, "payload", "body-size"),
        ({"payload": b"not json"}, "payload", "json-syntax"),
        ({"payload": {"x": float("nan")}}, "payload", "json-value"),
        ({"payload": {"x": object()}}, "payload", "json-type"),
        ({"payload": "text", "content_type": "text/plain"}, "payload", "payload-type"),
        ({"content_type": "nonsense"}, "content_type", "media-type"),
        ({"content_type": "text/plain\r\nX: y"}, "content_type", "media-type"),
        ({"headers": {"Content-Length": "1"}}, "headers", "header-reserved"),
        ({"headers": {"X-A": "a\r\nX-B: b"}}, "headers", "header-value"),
        ({"headers": {"X A": "a"}}, "headers", "header-name"),
        ({"headers": {"X_A": "a"}}, "headers", "header-name"),
        ({"headers": {"X-A": "a", "x-a": "b"}}, "headers", "header-duplicate"),
        ({"headers": {f"X-{n}": "a" for n in range(65)}}, "headers", "header-count"),
        ({"headers": {"X-A": "a" * 8200}}, "headers", "header-size"),
        ({"headers": ["X-A"]}, "headers", "header-type"),
        ({"notification_type": ""}, "notification_type", "identifier-length"),
        ({"notification_type": "a\nb"}, "notification_type", "identifier-printable"),
        ({"idempotency_key": "é" * 128}, "idempotency_key", "identifier-length"),
        ({"account_id": ""}, "account_id", "identifier-length"),
        ({"account_id": 1.5}, "account_id", "identifier-type"),
        ({"account_id": True}, "account_id", "identifier-type"),
        ({"caller_scope_id": "\ud800"}, "caller_scope_id", "identifier-printable"),
        ({"signing_scope_id": "s"}, "signing_scope_id", "scope-unused"),
    ],
)
def test_bad_input_is_refused_by_field_and_rule(
    tx: None, change: dict[str, Any], field: str, rule: str
) -> None:
    """Nothing is inserted, the transaction stays usable, and the error repeats no value."""
    call: dict[str, Any] = {"notification_type": "order.paid", "payload": {}, "to": URL}
    with pytest.raises(InvalidMessage) as caught:
        enqueue(**(call | change))
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.__context__ is None
    assert not OutboxMessage.objects.exists()


def test_an_unknown_publisher_is_answered_with_the_known_ones(tx: None) -> None:
    """A misspelt alias is a configuration error that lists what there is."""
    with pytest.raises(ConfigurationError, match=r"has default"):
        enqueue("order.paid", {}, to=URL, publisher="defualt")


def test_an_alias_can_have_a_destination_of_its_own(tx: None, configure: Callable[..., None]) -> None:
    """``TO`` stands in where the call names no destination."""
    signer = conf.get().publishers["default"].options["signer"]
    configure(PUBLISHERS={"default": {"TO": "https://fixed.acme.com/in", "OPTIONS": {"signer": signer}}})
    row = OutboxMessage.objects.get(id=enqueue("t", {}).id)
    assert row.destination == "fixed.acme.com"


def test_bytes_are_kept_as_they_are(tx: None) -> None:
    """What the caller serialised is what is sent."""
    body = b'  {"a":1}\n'
    enqueue("t", body, to=URL)
    assert opened().body == body


def test_values_are_compact_utf8_json(tx: None) -> None:
    """Django's JSON types are serialised once, without escapes or spaces."""
    enqueue("t", {"name": "Zoë", "id": uuid.UUID(int=7)}, to=URL, headers={"X-Shop": "a"})
    message = opened()
    assert message.body == '{"name":"Zoë","id":"00000000-0000-0000-0000-000000000007"}'.encode()
    assert message.payload == {"name": "Zoë", "id": "00000000-0000-0000-0000-000000000007"}
    assert (message.content_type, message.headers) == ("application/json", (("X-Shop", "a"),))
    assert message.destination == URL
    assert "Zoë" not in repr(message)


def opened() -> Any:
    """Return the one message of the table as a publisher would see it."""
    from notification_outbox import leases

    (claim,) = leases.claim("default", limit=1, budget=1, worker="w", lease=9, using="default").claims
    return as_message(claim, open_claim(claim, conf.get().keyring))


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parent.parent,
        env={"DATABASE_URL": "sqlite:///:memory:", "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_importing_the_package_needs_no_settings() -> None:
    """Types and errors can be imported before Django is configured."""
    code = "import notification_outbox as n; n.Message, n.OutboxError, n.TransientPublishError; print('ok')"
    assert run_python(code) == "ok\n"


def test_enqueue_brings_no_http_client_into_the_process() -> None:
    """Web processes do not pay for what only the worker uses."""
    code = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
from django.core.management import call_command
from django.db import transaction
from notification_outbox import enqueue
call_command("check"); call_command("migrate", verbosity=0)
with transaction.atomic():
    assert enqueue("t", {}, to="https://hooks.acme.com/").created
print(sorted({"aiohappyeyeballs", "httptools", "httpx"} & set(sys.modules)))
"""
    assert run_python(code).splitlines()[-1] == "[]"
