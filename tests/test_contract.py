"""The message contract: everything a caller can say, and what becomes of what he says wrong."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from notification_outbox import (
    Draft,
    IdempotencyConflict,
    InvalidMessage,
    Publisher,
    Receipt,
    conf,
    enqueue,
    enqueue_many,
    leases,
    operations,
    validate_destination,
)
from notification_outbox.delivery import as_message, open_claim
from notification_outbox.envelope import Message
from notification_outbox.exceptions import (
    ConfigurationError,
    OutboxError,
    PermanentPublishError,
    PublishFailed,
    Tampered,
    UnknownKey,
)
from notification_outbox.lifecycle import State
from notification_outbox.models import OutboxMessage
from tests.processes import ROOT, Outbox, database_url
from tests.settings import SIGNER

URL = "https://hooks.acme.com/shop?token=abc"
BODIES = ("plain", "bound", "standard")
CASES = json.loads((Path(__file__).parent / "cases/json_bodies.json").read_text())["cases"]
URLS = json.loads((Path(__file__).parent / "cases/urls.json").read_text())["cases"]


class Topics(Publisher):
    """A publisher whose destinations are topics and who takes any scope."""


class Trusting(Publisher):
    """A publisher that takes whatever it is given."""

    def validate(self, draft: Draft) -> Draft:
        return draft


class Plan(str, Enum):  # noqa: UP042 - as projects write it, whose str() is the member's name
    """A project's own names, as text."""

    PAID = "order.paid"


class Shop(int, Enum):
    """A project's own numbers."""

    NORTH = 7


def refuse_negative(payload: Any) -> None:
    if payload.get("total", 0) < 0:
        raise ValueError(f"the total {payload['total']} is negative")


def read_a_missing_key(payload: Any) -> None:
    payload["secretmark"]


def refuse_always(payload: Any) -> None:
    raise ValidationError("no")


@pytest.fixture
def tx(transactional_db: None) -> Iterator[None]:
    """A transaction of the caller's own, rolled back afterwards."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def body_mode(configure: Callable[..., None]) -> Callable[..., None]:
    def set_mode(mode: str, **root: Any) -> None:
        configure(
            PUBLISHERS={
                "default": {"BODY": mode, "OPTIONS": {"signer": SIGNER}},
                "topics": {"BACKEND": "tests.test_contract.Topics", "BODY": mode},
            },
            **root,
        )

    return set_mode


def stored(receipt: Receipt) -> OutboxMessage:
    return OutboxMessage.objects.get(id=receipt.id)


def opened() -> list[Message]:
    """Return what a worker would hand to the publishers now, in id order."""
    messages = []
    for lane in conf.get().publishers:
        claims = leases.claim(lane, limit=100, budget=10**9, worker="w", lease=9, using="default").claims
        messages += [(one.id, as_message(one, open_claim(one, conf.get().keyring))) for one in claims]
    return [message for _, message in sorted(messages, key=lambda pair: pair[0])]


# when


@pytest.mark.parametrize("delay", [timedelta(hours=2), 7200, 7200.0])
def test_a_delay_counts_from_the_databases_now(tx: None, delay: Any) -> None:
    """A delayed message is due later and gives up that much later."""
    row = stored(enqueue("t", {}, to=URL, delay=delay))
    assert row.due_at == row.available_at
    assert abs(row.due_at - row.created_at - timedelta(hours=2)) < timedelta(milliseconds=2)
    assert row.retry_until - row.due_at == timedelta(days=3)
    assert opened() == []


def test_a_moment_of_its_own_is_kept_and_a_past_one_is_now(tx: None) -> None:
    """``available_at`` is kept to the microsecond; what lies in the past is due at once."""
    moment = datetime.now(UTC) + timedelta(days=1, microseconds=7)
    assert stored(enqueue("t", {}, to=URL, available_at=moment)).due_at == moment
    assert stored(enqueue("t", {}, to=URL, available_at=datetime.min.replace(tzinfo=UTC))).state == "pending"
    past = stored(enqueue("t", {}, to=URL, available_at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert past.due_at == past.created_at
    assert past.retry_until - past.due_at == timedelta(days=3)


@pytest.mark.parametrize("span", [timedelta(minutes=5), 300])
def test_a_message_can_have_a_horizon_of_its_own(tx: None, span: Any) -> None:
    """``give_up_after`` overrides the alias's and is kept for a requeue."""
    row = stored(enqueue("t", {}, to=URL, give_up_after=span))
    assert row.retry_until - row.due_at == row.give_up_after == timedelta(minutes=5)


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"delay": -1}, "delay", "duration"),
        ({"delay": timedelta(days=400)}, "delay", "duration"),
        ({"delay": "5m"}, "delay", "duration"),
        ({"delay": float("nan")}, "delay", "duration"),
        ({"delay": True}, "delay", "duration"),
        ({"delay": False}, "delay", "duration"),
        ({"content_type": "text/plain\r\n ;a=b"}, "content_type", "media-type"),
        ({"content_type": "text/plain\u2003;a=b"}, "content_type", "media-type"),
        ({"give_up_after": 59}, "give_up_after", "duration"),
        ({"give_up_after": timedelta(days=31)}, "give_up_after", "duration"),
        ({"available_at": datetime(2030, 1, 1)}, "available_at", "aware"),  # noqa: DTZ001
        ({"available_at": "tomorrow"}, "available_at", "aware"),
        ({"available_at": datetime.max.replace(tzinfo=UTC)}, "available_at", "duration"),
        ({"available_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "available_at", "due-twice"),
        ({"on_invalid": "ignore"}, "on_invalid", "choice"),
        ({"ordering_key": "a\nb"}, "ordering_key", "identifier-printable"),
        ({"account_id": 10**6000}, "account_id", "identifier-length"),
    ],
)
def test_wrong_arguments_are_refused_by_field_and_rule(
    tx: None, change: dict[str, Any], field: str, rule: str
) -> None:
    """Nothing is inserted and the transaction stays usable, whatever on_invalid says: these are mistakes of code."""
    for on_invalid in ("raise", "quarantine"):
        with pytest.raises(InvalidMessage) as caught:
            enqueue("t", {}, **({"to": URL, "on_invalid": on_invalid} | change))
        assert (caught.value.field, caught.value.rule, caught.value.data) == (field, rule, False)
    assert not OutboxMessage.objects.exists()


def test_an_unknown_database_is_answered_with_the_known_ones(transactional_db: None) -> None:
    """``using=`` names an alias of the project."""
    with pytest.raises(ConfigurationError, match="DATABASES has default"):
        enqueue("t", {}, to=URL, using="elsewhere")


# bodies


def test_a_bound_body_carries_key_and_type(tx: None, body_mode: Callable[..., None]) -> None:
    """A mapping is filled in, bytes and values that carry them are kept."""
    body_mode("bound")
    enqueue("order.paid", {"total": 5, "account_id": 7}, to=URL, idempotency_key="k1", account_id=7)
    raw = b'{ "idempotency_key":"k2", "notification_type":"order.paid" }'
    enqueue("order.paid", raw, to=URL, idempotency_key="k2")
    filled, kept = opened()
    assert filled.payload == {
        "total": 5,
        "account_id": 7,
        "idempotency_key": "k1",
        "notification_type": "order.paid",
    }
    assert kept.body == raw


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        ([1], "bound-object"),
        (b"[1]", "bound-object"),
        ({"idempotency_key": "other"}, "bound-idempotency_key"),
        (b'{"notification_type":"order.paid"}', "bound-idempotency_key"),
        (b'{"notification_type":"other","idempotency_key":"k"}', "bound-notification_type"),
        ({"account_id": 8}, "bound-account"),
        (b'{"notification_type":"order.paid","idempotency_key":"k","account_id":"8"}', "bound-account"),
    ],
)
def test_a_bound_body_that_disagrees_is_refused(
    tx: None, body_mode: Callable[..., None], payload: Any, rule: str
) -> None:
    """What the body says of itself must be what the arguments say."""
    body_mode("bound")
    with pytest.raises(InvalidMessage) as caught:
        enqueue("order.paid", payload, to=URL, idempotency_key="k", account_id=7)
    assert caught.value.rule == rule


def test_a_standard_body_is_wrapped(tx: None, body_mode: Callable[..., None]) -> None:
    """Type, timestamp and data, the caller's own bytes inside."""
    body_mode("standard")
    enqueue("order.paid", b'{"n": 1.0}', to=URL)
    (message,) = opened()
    assert set(message.payload) == {"type", "timestamp", "data"}
    assert message.payload["type"] == "order.paid"
    assert message.body.endswith(b',"data":{"n": 1.0}}')
    assert abs(datetime.fromisoformat(message.payload["timestamp"]) - datetime.now(UTC)) < timedelta(
        minutes=5
    )


@pytest.mark.parametrize("mode", ["bound", "standard"])
def test_shaped_bodies_are_json(tx: None, body_mode: Callable[..., None], mode: str) -> None:
    """Other content types cannot be wrapped."""
    body_mode(mode)
    with pytest.raises(InvalidMessage, match="needs JSON"):
        enqueue("t", b"hello", to=URL, content_type="text/plain")


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_json_cases_get_their_verdict_through_enqueue(
    tx: None, body_mode: Callable[..., None], case: dict[str, Any], mode: str
) -> None:
    """Refused bytes raise InvalidMessage and insert nothing; accepted ones are kept where the mode allows."""
    from tests.test_payloads import case_body

    body_mode(mode)
    accepted = case["accepted"] and mode != "bound"
    if "content_type" in case:
        accepted = mode == "plain"
    call = {"to": URL, "content_type": case.get("content_type")}
    if accepted:
        assert enqueue("t", case_body(case), **call).created
    else:
        with pytest.raises(InvalidMessage):
            enqueue("t", case_body(case), **call)
        assert not OutboxMessage.objects.exists()
    assert OutboxMessage.objects.count() == int(accepted)


@pytest.mark.parametrize("case", URLS, ids=lambda case: case["url"][:40])
def test_url_cases_get_their_verdict_through_enqueue(tx: None, case: dict[str, Any]) -> None:
    """Refused URLs raise InvalidMessage and insert nothing; accepted ones are stored in their normal form."""
    if "stored" in case:
        enqueue("t", {}, to=case["url"])
        assert opened()[0].destination == case["stored"]
        return
    with pytest.raises(InvalidMessage) as caught:
        enqueue("t", {}, to=case["url"])
    assert caught.value.field == "to"
    assert not OutboxMessage.objects.exists()


JSON_VALUES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.integers() | st.text(max_size=5), max_size=3
)


@pytest.mark.parametrize("mode", BODIES)
@examples(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=JSON_VALUES, second=JSON_VALUES, key=st.integers(0, 10**12))
def test_one_key_binds_one_content_in_every_mode(
    tx: None, body_mode: Callable[..., None], mode: str, first: Any, second: Any, key: int
) -> None:
    """Two contents under one key conflict, two identical calls never do."""
    body_mode(mode)
    with transaction.atomic():
        made = enqueue("t", first, to=URL, idempotency_key=key)
        again = enqueue("t", first, to=URL, idempotency_key=key)
        assert (made.created, again.created, made.id) == (True, False, again.id)
        if list(first.items()) != list(second.items()):
            with pytest.raises(IdempotencyConflict, match="another payload"):
                enqueue("t", second, to=URL, idempotency_key=key)
        OutboxMessage.objects.all().delete()


@pytest.mark.parametrize(
    ("change", "part"),
    [({"signing_scope_id": "b"}, "signing scope"), ({"ordering_key": "b"}, "ordering key")],
)
def test_scope_and_order_belong_to_the_content(
    tx: None, body_mode: Callable[..., None], change: dict[str, Any], part: str
) -> None:
    """Another signing scope or ordering key under the same key is a conflict."""
    body_mode("plain")
    call: dict[str, Any] = {"publisher": "topics", "to": "orders", "idempotency_key": "k"}
    call |= {"signing_scope_id": "a", "ordering_key": "a"}
    enqueue("t", {}, **call)
    with pytest.raises(IdempotencyConflict, match=part):
        enqueue("t", {}, **(call | change))


def test_a_topic_of_two_publishers_is_two_destinations(tx: None, configure: Callable[..., None]) -> None:
    """Pausing or ordering one broker's topic must not touch the other's."""
    topics = {"BACKEND": "tests.test_contract.Topics"}
    configure(PUBLISHERS={"a": topics, "b": topics})
    rows = [stored(enqueue("t", {}, publisher=alias, to="orders")) for alias in ("a", "b")]
    assert {row.destination for row in rows} == {"orders"}
    assert len({row.destination_key for row in rows}) == 2


# validators


def test_validators_run_at_enqueue_and_show_no_value(tx: None, body_mode: Callable[..., None]) -> None:
    """Types that match a pattern are checked, others are not."""
    body_mode("plain", VALIDATORS={"order.*": "tests.test_contract.refuse_negative", "x": refuse_always})
    with pytest.raises(InvalidMessage) as caught:
        enqueue("order.paid", {"total": -44}, to=URL)
    assert (caught.value.field, caught.value.rule) == ("payload", "validator")
    assert "44" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(InvalidMessage):
        enqueue("x", {}, to=URL)
    body_mode("plain", VALIDATORS={"order.*": read_a_missing_key})
    with pytest.raises(InvalidMessage) as caught:
        enqueue("order.paid", {}, to=URL)
    assert "secretmark" not in str(caught.value)
    body_mode("plain", VALIDATORS={"order.*": "tests.test_contract.refuse_negative"})
    enqueue("order.paid", {"total": 44}, to=URL)
    enqueue("refund", {"total": -44}, to=URL)
    assert OutboxMessage.objects.count() == 2


def test_validators_run_again_before_publishing(outbox: Outbox, transactional_db: None) -> None:
    """What a stricter deploy would refuse is quarantined, not sent."""
    (receipt,) = outbox.enqueue()
    outbox.configure(root={"VALIDATORS": {"order.*": "tests.test_contract.refuse_always"}})
    outbox.work()
    row = outbox.row(receipt)
    assert (row.state, row.quarantine_reason, row.last_error) == (
        "quarantined",
        "invalid_request",
        "payload:validator",
    )
    assert outbox.receiver.connections == 0


# on_invalid


def test_a_payments_fan_out_survives_one_bad_url(transactional_db: None) -> None:
    """500 endpoints are told of a payment, one of them registered a URL that cannot be: the payment is saved."""
    endpoints = [f"https://customer{n}.acme.com/hooks" for n in range(500)]
    endpoints[321] = "https://localhost/secretpath"
    with transaction.atomic():
        # the payment would be saved here
        receipts = enqueue_many(
            [Draft("payment.made", {"payment": 9}, to=url, account_id=n) for n, url in enumerate(endpoints)],
            on_invalid="quarantine",
        )
    assert [receipt.state for receipt in receipts].count(State.PENDING) == 499
    bad = stored(receipts[321])
    assert (bad.state, bad.quarantine_reason, bad.last_error) == (
        "quarantined",
        "invalid_request",
        "to:single-label",
    )
    assert (bad.destination, bad.account_id, receipts[321].state) == ("(refused)", "321", State.QUARANTINED)
    assert OutboxMessage.objects.filter(state="pending").count() == 499


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"to": "ftp://x.acme.com/"}, "to:scheme"),
        ({"headers": {"X-A": "é"}}, "headers:header-value"),
        ({"headers": {"Host": "a"}}, "headers:header-reserved"),
        ({"payload": b'{"a":NaN}'}, "payload:json-value"),
        ({"payload": b""}, "payload:body-empty"),
        ({"payload": {"a": "x" * 1_100_000}}, "payload:body-size"),
    ],
)
def test_bad_data_is_kept_as_it_came(tx: None, change: dict[str, Any], told: str) -> None:
    """The row holds what the caller passed, says which rule it broke, and is not sent by itself."""
    call: dict[str, Any] = {"payload": {}, "to": URL}
    receipt = enqueue("t", **(call | change), on_invalid="quarantine")
    assert (receipt.created, receipt.state) == (True, State.QUARANTINED)
    assert stored(receipt).last_error == told
    assert opened() == []
    again = enqueue("t", **(call | change), on_invalid="quarantine", idempotency_key=receipt.idempotency_key)
    assert (again.id, again.created, again.state) == (receipt.id, False, State.QUARANTINED)


def test_a_requeue_of_bad_data_holds_it_to_the_rules_again(outbox: Outbox, transactional_db: None) -> None:
    """Requeued unmended it is quarantined again; once the policy admits it, it is delivered."""
    url = outbox.receiver.url("/hooks")
    outbox.configure({"allow_hosts": []})
    with transaction.atomic():
        receipt = enqueue("order.paid", {"n": 1}, to=url, on_invalid="quarantine")
    for allowed, state in (([], "quarantined"), ([outbox.receiver.host], "delivered")):
        outbox.configure({"allow_hosts": allowed})
        assert operations.requeue([receipt.id]) == 1
        outbox.work()
        assert outbox.row(receipt).state == state
    assert [received.body for received in outbox.receiver.requests] == [b'{"n":1}']


@pytest.mark.parametrize(
    "body", [b'{"a":1}', b"[1]", b'{"idempotency_key":"other","notification_type":"order.paid"}']
)
def test_a_requeue_never_sends_what_its_mode_refuses(
    outbox: Outbox, transactional_db: None, body: bytes
) -> None:
    """A body that is not bound stays unsent, however often it is requeued."""
    outbox.configure(BODY="bound")
    call = {"to": outbox.receiver.url(), "idempotency_key": "k1", "on_invalid": "quarantine"}
    with transaction.atomic():
        receipt = enqueue("order.paid", body, **call)
    assert operations.requeue([receipt.id]) == 1
    outbox.work()
    assert (outbox.row(receipt).state, outbox.receiver.connections) == ("quarantined", 0)


@pytest.mark.parametrize(
    "change",
    [
        {"to": "x" * 20_000},
        {"headers": {"X-A": "a" * 20_000}},
        {"headers": {f"X-{n}": "a" for n in range(9000)}},
    ],
)
def test_what_is_far_too_long_is_not_even_kept(tx: None, change: dict[str, Any]) -> None:
    """Quarantine is for mistakes, not for filling the table."""
    with pytest.raises(InvalidMessage) as caught:
        enqueue("t", {}, **({"to": URL} | change), on_invalid="quarantine")
    assert caught.value.rule in ("too-long", "header-size")


def test_many_large_bodies_are_stored_in_several_statements(tx: None) -> None:
    """No server's packet limit ends the caller's transaction."""
    drafts = [Draft("t", {"x": "y" * 1_000_000}, to=URL) for _ in range(20)]
    assert all(receipt.created for receipt in enqueue_many(drafts))


@pytest.mark.parametrize("zone", ["UTC", "America/Chicago"])
@pytest.mark.parametrize("hours", [2, -2])
def test_without_time_zones_a_moment_is_still_a_moment(transactional_db: None, zone: str, hours: int) -> None:
    """``available_at`` means the same whatever the project's USE_TZ: a process that has none shows it."""
    code = f"""
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
from django.conf import settings
settings.USE_TZ, settings.TIME_ZONE = False, {zone!r}
import django; django.setup()
from datetime import UTC, datetime, timedelta
from django.db import transaction
from notification_outbox import Draft, enqueue, enqueue_many
from notification_outbox.models import OutboxMessage
at = datetime.now(UTC) + timedelta(hours={hours})
with transaction.atomic():
    enqueue("t", {{}}, to={URL!r}, available_at=at)
    enqueue_many([Draft("t", {{}}, to={URL!r}, available_at=at)] * 2, spread=20)
    for row in OutboxMessage.objects.order_by("due_at"):
        print(round((row.due_at - row.created_at).total_seconds()))
    transaction.set_rollback(True)
"""
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url()},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    first = max(hours, 0) * 3600
    assert all(
        abs(found - (first + wait)) <= 2
        for found, wait in zip(map(int, shown.split()), (0, 0, 10), strict=True)
    )


@pytest.mark.parametrize("to", ["x" * 256, "secretmark\0", "\ud800", 7])
def test_what_a_publisher_lets_pass_is_still_held_to_the_column(
    tx: None, configure: Callable[..., None], to: Any
) -> None:
    """No publisher makes the database break the caller's transaction."""
    configure(PUBLISHERS={"default": {"BACKEND": "tests.test_contract.Trusting"}})
    for _try in range(2):
        with pytest.raises(InvalidMessage, match=r"^to: ") as caught:
            enqueue("t", {}, to=to)
    assert "secretmark" not in str(caught.value)
    assert not OutboxMessage.objects.exists()


def test_a_member_of_an_enum_is_its_value(tx: None) -> None:
    """Names that a project keeps in enums are stored and returned as the text they stand for."""
    call: dict[str, Any] = {"to": URL, "idempotency_key": Plan.PAID, "account_id": Shop.NORTH}
    receipt = enqueue(Plan.PAID, {}, **call)
    assert type(receipt.idempotency_key) is str
    row = stored(receipt)
    assert (row.notification_type, row.idempotency_key, row.account_id) == ("order.paid", "order.paid", "7")
    assert enqueue("order.paid", {}, to=URL, idempotency_key="order.paid", account_id=7).id == receipt.id


@pytest.mark.parametrize(
    "error",
    [
        InvalidMessage("to", "scheme", "the URL must begin with https://", data=True),
        IdempotencyConflict("payload"),
        UnknownKey("2026"),
        Tampered(),
        PermanentPublishError("gone"),
        PublishFailed("http_503", retry_after=3),
    ],
)
def test_an_error_crosses_to_another_process_as_it_is(error: OutboxError) -> None:
    """Task queues and parallel test runs pickle what was raised."""
    error.position = 3
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))


def test_bytes_beyond_the_hard_limit_always_raise(tx: None) -> None:
    """Ten megabytes and one byte are nobody's typing error."""
    with pytest.raises(InvalidMessage) as caught:
        enqueue("t", b"x" * (10 * 2**20 + 1), to=URL, content_type="text/plain", on_invalid="quarantine")
    assert caught.value.rule == "body-size"


# many


def test_many_are_stored_in_few_statements_and_answered_in_order(tx: None) -> None:
    """Receipts come in call order, whatever order the rows went in by."""
    drafts = (Draft("t", {"n": n}, to=URL, idempotency_key=f"k{n}") for n in range(700))
    with CaptureQueriesContext(connection) as queries:
        receipts = enqueue_many(drafts)
    assert [receipt.idempotency_key for receipt in receipts] == [f"k{n}" for n in range(700)]
    assert all(receipt.created for receipt in receipts)
    limit = 3 if connection.vendor != "mysql" else 9
    assert sum("INSERT" in q["sql"] or "SELECT" in q["sql"] for q in queries) <= limit
    claims = leases.claim("default", limit=700, budget=10**9, worker="w", lease=9, using="default").claims
    keyring = conf.get().keyring
    bodies = {one.binding.idempotency_key: open_claim(one, keyring).body for one in claims}
    assert bodies == {f"k{n}": b'{"n":%d}' % n for n in range(700)}


def test_percent_signs_are_nothing_special(tx: None) -> None:
    """Text that looks like a driver's placeholder is kept as it is."""
    odd = "100%s %% %(x)s 'quoted' \\"
    enqueue_many(
        [Draft("t", {"odd": odd}, to=URL, account_id=odd, idempotency_key=f"{n}%s") for n in range(2)]
    )
    assert [(message.payload["odd"], message.account_id) for message in opened()] == [(odd, odd)] * 2


def test_a_repeated_draft_is_found_not_made(tx: None) -> None:
    """Within one call and over calls, the same message is one row."""
    before = enqueue("t", {"n": 1}, to=URL, idempotency_key=1)
    drafts = [Draft("t", {"n": n}, to=URL, idempotency_key=n) for n in (1, 2, 2)]
    first, second, third = enqueue_many(drafts)
    assert (first.id, first.created) == (before.id, False)
    assert (second.created, third.created, third.id) == (True, False, second.id)


def test_many_are_all_or_nothing(tx: None) -> None:
    """A conflict or a bad draft leaves no row of the call, and the transaction usable."""
    enqueue("t", {"n": 1}, to=URL, idempotency_key=650)
    good = [Draft("t", {"n": n}, to=URL, idempotency_key=n) for n in range(649)]
    for drafts, error, position in (
        ([*good, Draft("t", {"n": 2}, to=URL, idempotency_key=650)], IdempotencyConflict, 649),
        ([good[0], Draft("t", {"n": 9}, to=URL, idempotency_key=0)], IdempotencyConflict, 1),
        ([*good, Draft("t", {}, to="nonsense")], InvalidMessage, 649),
    ):
        with pytest.raises(error, match=f"^draft {position}: ") as caught:
            enqueue_many(drafts)
        assert caught.value.position == position
    assert OutboxMessage.objects.count() == 1
    assert enqueue_many([]) == []


@pytest.mark.parametrize(
    ("drafts", "told"),
    [
        ([1], r"^draft 0: drafts: expected Draft\(\.\.\.\) \[draft-type\]$"),
        ("secretmark", r"^draft 0: drafts: expected Draft"),
        ([Draft("t", {}, to=URL), {"to": "secretmark"}], "^draft 1: drafts: expected Draft"),
        (1, r"^drafts: expected an iterable of Draft \[draft-type\]$"),
        (Draft("t", "secretmark"), "^drafts: expected an iterable of Draft"),
        ([Draft({"secretmark": 1}, "order.paid")], "^draft 0: notification_type: expected text"),  # type: ignore[arg-type]
        (
            [Draft("t", {}, to=URL), Draft("t", {}, to=URL, publisher="secretmark")],
            "^draft 1: there is no publisher",
        ),
        ([Draft("t", {"secretmark": object()}, to=URL)], "^draft 0: payload: expected the types"),
        (
            [Draft("t", {}, to=URL, delay=-1)],
            "^draft 0: delay: expected 0 s to 366 d, as seconds or a timedelta",
        ),
    ],
)
def test_a_refusal_of_many_says_which_draft(tx: None, drafts: Any, told: str) -> None:
    """Field, rule and place as enumerate counts; never the draft."""
    with pytest.raises((InvalidMessage, ConfigurationError), match=told) as caught:
        enqueue_many(drafts)
    assert "secretmark" not in repr(caught.value) + str(caught.value)
    assert not OutboxMessage.objects.exists()


def test_a_refusal_of_one_has_no_place(tx: None) -> None:
    """``enqueue()`` has one draft."""
    enqueue("t", {"n": 1}, to=URL, idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match=r"^this idempotency key") as caught:
        enqueue("t", {"n": 2}, to=URL, idempotency_key="k")
    assert caught.value.position is None


@pytest.mark.parametrize("drafts", [[], [Draft("t", {}, to=URL)]])
def test_what_is_for_all_drafts_is_refused_before_any(tx: None, drafts: list[Draft]) -> None:
    """A bad choice or spread is no draft's fault."""
    with pytest.raises(InvalidMessage, match=r"^on_invalid: "):
        enqueue_many(drafts, on_invalid="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match=r"^spread: expected 0 s to 30 d"):
        enqueue_many(drafts, spread=timedelta(days=31))


def test_a_spread_places_due_times_evenly(tx: None) -> None:
    """A campaign does not arrive at once."""
    receipts = enqueue_many((Draft("t", {"n": n}, to=URL) for n in range(5)), spread=timedelta(seconds=50))
    dues = [stored(receipt).due_at for receipt in receipts]
    steps = [round((after - before).total_seconds()) for before, after in itertools.pairwise(dues)]
    assert steps == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("ago", "first"),
    [
        (timedelta(minutes=5), timedelta(0)),
        (timedelta(days=9), timedelta(0)),
        (-timedelta(hours=1), timedelta(hours=1)),
    ],
)
def test_a_spread_begins_at_the_drafts_time_or_now(tx: None, ago: timedelta, first: timedelta) -> None:
    """A campaign that was to begin in the past is spread from now on, not all due at once."""
    at = datetime.now(UTC) - ago
    drafts = [Draft("t", {"n": n}, to=URL, available_at=at) for n in range(5)]
    rows = [stored(receipt) for receipt in enqueue_many(drafts, spread=50)]
    steps = [round((row.due_at - row.created_at - first).total_seconds()) for row in rows]
    assert steps == [0, 10, 20, 30, 40]
    assert all(row.available_at == row.due_at for row in rows)
    assert all(row.retry_until == row.due_at + row.give_up_after for row in rows)


def test_many_need_a_transaction_too(transactional_db: None) -> None:
    """The same rule as for one."""
    with pytest.raises(Exception, match=r"transaction\.atomic"):
        enqueue_many([Draft("t", {}, to=URL)])


def test_a_draft_shows_no_content() -> None:
    """Drafts are collected in lists that end in tracebacks."""
    assert repr(Draft("t", {"card": 4111}, to=URL)) == "<Draft 't' publisher='default'>"


@pytest.mark.parametrize(
    "arguments",
    [({"secretmark": 1}, "order.paid"), ('{"secretmark": 1}', "t"), ("t", {}, "default", URL + "secretmark")],
)
def test_arguments_in_the_wrong_order_show_no_content_either(arguments: tuple[Any, ...]) -> None:
    """What is not a plain name is not shown as one."""
    shown = repr(Draft(*arguments))
    assert "secretmark" not in shown
    assert "(no plain name)" in shown


# forms


def test_a_destination_can_be_validated_where_it_is_entered() -> None:
    """A form tells the customer at once, by the rules of enqueue and without repeating the URL."""
    validate_destination(URL)
    with pytest.raises(ValidationError) as caught:
        validate_destination("https://localhost/secretpath")
    assert caught.value.code == "single-label"
    assert "secretpath" not in str(caught.value)
    with pytest.raises(ValidationError):
        validate_destination(7)
