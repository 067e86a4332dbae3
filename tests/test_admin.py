"""The admin: what operators see of messages, find and do; who may, what is logged, and what it costs."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import resolve, reverse

from notification_outbox import enqueue, finding, leases, operations
from notification_outbox.admin import actions, messages, paging
from notification_outbox.explain import STANDINGS, Facts, Standing, explain
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Outcome, Verdict
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from tests.processes import ROOT
from tests.tables import SHAPES, backlog, make

pytestmark = pytest.mark.django_db
COMMITTED = pytest.mark.django_db(transaction=True)

LIST = "/admin/notification_outbox/outboxmessage/"
PERMISSIONS = ("reveal", "requeue", "send_now", "quarantine", "cancel", "expunge")
LATER: dict[str, Any] = {"available_at": Now() + timedelta(hours=1)}


def staff(*permissions: str, superuser: bool = False) -> Client:
    """Return a client of a new user of the admin who may see messages and what else is named."""
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True, is_superuser=superuser)
    if not superuser:
        names = [f"{name}_outboxmessage" for name in ("view", *permissions)]
        user.user_permissions.set(Permission.objects.filter(codename__in=names))
        assert user.user_permissions.count() == len(names)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def operator() -> Client:
    return staff(*PERMISSIONS)


def text(response: Any) -> str:
    """Return a page as its reader sees it, spaces folded."""
    assert response.status_code == 200, response
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", response.content.decode())))


def listed(client: Client, query: str = "") -> list[int]:
    response = client.get(f"{LIST}?{query}")
    assert response.status_code == 200, (query, response)
    return [row.pk for row in response.context["cl"].result_list]


def page(row_id: int, what: str = "change") -> str:
    return f"{LIST}{row_id}/{what}/"


def ask(client: Client, action: str, ids: list[int], query: str = "", **more: str) -> Any:
    """Choose an action of the list's menu for these rows."""
    data = {"action": action, "_selected_action": ids, "index": "0", **more}
    return client.post(f"{LIST}?{query}", data)


def confirm(client: Client, question: Any, address: str = LIST) -> Any:
    """Answer yes: send the hidden fields of the question's form as a browser would."""
    form = question.content.decode().partition('<form method="post">')[2]
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form):
        fields.setdefault(name, []).append(value)
    assert "confirmed" in fields, text(question)
    return client.post(address, fields, follow=True)


def told(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


def state(row_id: int) -> str:
    return OutboxMessage.objects.get(id=row_id).state


def each_standing() -> dict[Standing, int]:
    ids = {Standing(name): make(name) for name in SHAPES if name != "pending"}
    return ids | {
        Standing.DUE: make(),
        Standing.SCHEDULED: make(**LATER),
        Standing.RETRYING: make(attempts=1, last_error="timeout", **LATER),
    }


# what is seen


def test_the_list_shows_each_state_as_a_badge(operator: Client) -> None:
    """Pending is told apart as due, scheduled and retrying, and what comes next is said in words."""
    ids = each_standing()
    response = operator.get(LIST)
    content = response.content.decode()
    for standing in ids:
        assert f'<span class="outbox-badge outbox-{standing}">{STANDINGS[standing]}</span>' in content
    assert "in 60 min" in content
    assert "9 messages" in text(response)
    assert listed(operator) == sorted(ids.values(), reverse=True)


def test_the_list_shows_what_an_operator_needs_and_no_secret(operator: Client) -> None:
    """Host, account, last answer, reason; neither path nor body nor sealed bytes are even read."""
    make(
        "quarantined",
        to="https://hooks.acme.com/secret-path",
        account_id="acct-7",
        quarantine_reason="rejected",
    )
    OutboxMessage.objects.update(last_status=404, last_error="http_404")
    with CaptureQueriesContext(connection) as queries:
        found = text(operator.get(LIST))
    for shown in ("hooks.acme.com", "acct-7", "HTTP 404", "rejected"):
        assert shown in found
    assert "secret-path" not in found
    lists = [q["sql"] for q in queries if "destination_key" in q["sql"] and "ORDER BY" in q["sql"]]
    assert len(lists) == 1
    assert "content_mac" not in lists[0]
    assert not re.search(r'sealed["`]?,', lists[0])


@pytest.mark.parametrize("standing", list(Standing))
def test_the_state_filter_finds_what_its_badge_says(operator: Client, standing: Standing) -> None:
    """Each choice finds those rows and no others."""
    ids = each_standing()
    assert listed(operator, f"state={standing}") == [ids[standing]]


def test_the_list_can_be_narrowed(operator: Client, configure: Callable[..., None]) -> None:
    """By reason, publisher, key, age and destination, alone and together."""
    gone, rejected = make("quarantined"), make("quarantined", quarantine_reason="rejected")
    other_key = make(encryption_key_id="old")
    other_lane = make("delivered", publisher="elsewhere")
    waiting_lane = make(publisher="forgotten")
    erased = make("delivered", encryption_key_id="old", sealed=None)
    elsewhere = make(to="https://hooks.acme.com/y")
    everything = listed(operator)
    assert len(everything) == 7
    assert listed(operator, "reason=gone") == [gone]
    assert listed(operator, "reason=rejected&state=quarantined") == [rejected]
    assert listed(operator, "publisher=elsewhere") == [other_lane]
    assert listed(operator, "publisher=forgotten&state=due") == [waiting_lane]
    assert listed(operator, "publisher=default&reason=gone") == [gone]
    assert listed(operator, "key=old") == [other_key]
    assert erased not in listed(operator, "key=old")
    key = OutboxMessage.objects.get(id=elsewhere).destination_key
    assert listed(operator, f"destination={key}") == [elsewhere]
    assert listed(operator, "age=1h") == everything
    assert listed(operator, "age=over-1d") == []
    choices = text(operator.get(LIST))
    assert "forgotten" in choices
    assert "old (not known here)" in choices


def test_a_publisher_that_no_index_serves_is_looked_for_among_the_newest(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delivered messages are found only so far back, and the filter says so; where an index helps, all are."""
    first, _second, last = make("delivered"), make("quarantined"), make("delivered")
    monkeypatch.setattr(finding, "NEWEST", 1)
    monkeypatch.setattr(finding.newest, "__kwdefaults__", {"count": 1})
    assert listed(operator, "publisher=default") == [last]
    assert "of the newest messages" in text(operator.get(f"{LIST}?publisher=default"))
    assert listed(operator, "publisher=default&state=quarantined") == [first + 1]


@pytest.mark.parametrize("old", range(0, 70, 10))
def test_age_is_found_by_probing_ids(old: int) -> None:
    """However the rows spread over time, the edge parts older from newer, with gaps in the ids too."""
    with transaction.atomic():
        ids = [enqueue("t", {}, to="https://hooks.acme.com/x").id for _ in range(60)]
    OutboxMessage.objects.filter(id__in=ids[:old]).update(created_at=Now() - timedelta(days=2))
    OutboxMessage.objects.filter(id__in=[ids[5], ids[31], ids[32]]).delete()
    with CaptureQueriesContext(connection) as queries:
        edge = finding.edge(timedelta(days=1), using="default")
    assert edge is not None
    assert len(queries) <= 2 + finding.ROUNDS
    older = set(OutboxMessage.objects.filter(created_at__lt=edge.moment).values_list("id", flat=True))
    assert all(row_id < edge.high for row_id in older)
    newer = OutboxMessage.objects.exclude(id__in=older).values_list("id", flat=True)
    assert all(row_id >= edge.low for row_id in newer)
    assert edge.high - edge.low <= 4


def test_an_empty_table_has_no_edge(operator: Client) -> None:
    """Nothing is found, and nothing fails."""
    assert finding.edge(timedelta(days=1), using="default") is None
    assert listed(operator, "age=over-1d") == []


@pytest.mark.parametrize(
    "query",
    ["state=lost", "reason=nothing", "age=5h", "destination=7", "state=pending", "reason=", "destination="],
)
def test_a_filter_that_makes_no_sense_is_refused(operator: Client, query: str) -> None:
    """An unfiltered list under a filter's name would be acted upon."""
    make("quarantined")
    assert operator.get(f"{LIST}?{query}").status_code == 302


@pytest.mark.parametrize(
    "query", ["sealed__startswith=a", "content_mac=1", "last_error__contains=x", "id__gt=1"]
)
def test_no_other_column_can_be_asked_for(operator: Client, query: str) -> None:
    """A sealed column cannot be guessed letter by letter, nor the table be scanned, through the address."""
    assert operator.get(f"{LIST}?{query}").status_code == 400


def test_a_message_is_found_by_what_people_have_in_hand(operator: Client) -> None:
    """Number, message id, account, idempotency key, full URL in any spelling: exactly, and nothing near it."""
    url = "https://hooks.acme.com/customers/7?key=s3cret"
    row_id = make(to=url, account_id="acct-7", idempotency_key="order-7")
    make(account_id="acct-77", idempotency_key="order-77")
    message = OutboxMessage.objects.get(id=row_id)
    for term in (
        str(row_id),
        message.message_id,
        str(message.dedup_id),
        "acct-7",
        "order-7",
        url,
        "https://HOOKS.acme.com:443/customers/7?key=s3cret",
        f"  {row_id} ",
    ):
        response = operator.get(LIST, {"q": term})
        assert [row.pk for row in response.context["cl"].result_list] == [row_id], term
    for term in ("acct", "https://hooks.acme.com/customers/", "msg_", "9" * 30, "x" * 5000, "\u0661"):
        assert list(operator.get(LIST, {"q": term}).context["cl"].result_list) == [], term[:20]


def test_a_term_that_names_several_things_finds_them_all(operator: Client) -> None:
    """Message 7, account 7's and the one of key 7; narrowed further by the filters."""
    first = make()
    account = make("delivered", account_id=str(first))
    key = make(idempotency_key=str(first))
    make()
    assert listed(operator, f"q={first}") == [key, account, first]
    assert listed(operator, f"q={first}&state=delivered") == [account]


@pytest.mark.parametrize("standing", list(Standing))
def test_a_message_explains_itself(operator: Client, standing: Standing) -> None:
    """Its page says why it is here, what happens next and whether a requeue can help, and shows its columns."""
    row_id = each_standing()[standing]
    found = text(operator.get(page(row_id)))
    message = OutboxMessage.objects.annotate(now=Now()).get(id=row_id)
    message.holds = True  # type: ignore[attr-defined]
    told = explain(Facts.of(message))
    assert told.requeue in found
    assert told.why.split(" for ")[0] in found
    assert told.what_next.split(" in ")[0] in found
    assert message.message_id in found


def test_the_timeline_shows_the_newest_attempts(operator: Client) -> None:
    """When, how long, what came of it and what that means."""
    row_id = make(attempts=2, last_error="http_503", **LATER)
    for number in range(1, 61):
        DeliveryAttempt.objects.create(
            message_id=row_id,
            number=number,
            started_at=Now(),
            duration_ms=number,
            outcome="retry",
            status=503,
            error="http_503",
            peer="192.0.2.7:443",
            stale=number == 60,
        )
    found = text(operator.get(page(row_id)))
    assert "60 ms" in found
    assert " 10 ms" not in found
    for words in ("192.0.2.7:443", "HTTP 503", "a failure of its own", "too late"):
        assert words in found


def test_what_strangers_wrote_is_shown_as_text(operator: Client) -> None:
    """HTML in any column is no HTML on any page."""
    evil = "<script>alert(1)</script>"
    columns = {
        field.name: evil[: field.max_length]
        for field in OutboxMessage._meta.concrete_fields
        if field.get_internal_type() == "CharField"
        and field.name not in ("state", "blocked_by", "quarantine_reason", "publisher")
    }
    assert {"destination", "notification_type", "last_error", "leased_by", "account_id"} < set(columns)
    row_id = make("quarantined", **columns | {"publisher": evil, "last_error": f"unknown_key:{evil}"})
    waiting = make(publisher=evil, last_error=evil, leased_by=evil)
    held = make("in_flight", leased_by=evil)
    DeliveryAttempt.objects.create(
        message_id=row_id,
        number=1,
        started_at=Now(),
        duration_ms=1,
        outcome="<script>",
        error=evil,
        worker=evil,
        peer=evil,
        phase="<script>",
        trigger="<script>",
    )
    pages = [LIST, page(row_id), page(waiting), page(held), f"{LIST}?q={evil}", page(row_id, "history")]
    for address in pages:
        content = operator.get(address).content.decode()
        assert "<script>" not in content, address
    question = ask(operator, "requeue", [row_id])
    assert "<script>" not in question.content.decode()
    confirm(operator, question)
    assert "<script>" not in operator.get(page(row_id, "history")).content.decode()


def test_a_revealed_body_is_shown_as_text(operator: Client) -> None:
    """What a customer put into a payload is not run by the operator who reads it."""
    with transaction.atomic():
        row_id = enqueue("t", "<script>alert(1)</script>", to="https://hooks.acme.com/x").id
    response = operator.post(page(row_id, "reveal"))
    assert "<script>" not in response.content.decode()
    assert "alert(1)" in text(response)


def test_pages_work_under_a_strict_content_security_policy(operator: Client) -> None:
    """No inline style, script or handler, nothing from elsewhere."""
    row_id = make("quarantined")
    responses = [
        operator.get(LIST),
        operator.get(page(row_id)),
        operator.post(page(row_id, "reveal")),
        operator.post(page(row_id, "act/requeue")),
        ask(operator, "requeue", [row_id]),
    ]
    for response in responses:
        content = response.content.decode()
        assert response.status_code == 200
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|(src|href)=.https?://", content)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", content))
        assert "notification_outbox/admin.css" in content


# what it costs


QUERIES = [
    "",
    *(f"state={standing}" for standing in Standing),
    "reason=gone",
    "publisher=default",
    "publisher=default&state=due",
    "publisher=default&state=delivered",
    "key=old",
    "age=1h",
    "age=over-1d",
    "age=over-1d&state=quarantined",
    "q=7",
    "q=order-7",
    "q=https://hooks.acme.com/x",
    "q=msg_00000000000040008000000000000000",
    "destination=00000000-0000-4000-8000-000000000000",
    "p=50",
]


def _table_queries(queries: CaptureQueriesContext) -> list[str]:
    return [q["sql"] for q in queries if '"notification_outbox_outboxmessage"' in q["sql"]]


def test_the_list_and_a_page_take_the_same_few_queries_however_many_rows(operator: Client) -> None:
    """Nothing is asked once per row."""

    def cost(address: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            assert operator.get(address).status_code == 200
        return len(queries)

    row_id = make("quarantined")
    addresses = [*(f"{LIST}?{query}" for query in QUERIES if query != "p=50"), page(row_id)]
    operator.get(LIST)
    before = [cost(address) for address in addresses]
    for _ in range(30):
        make("quarantined")
        make()
    for address, old, new in zip(addresses, before, map(cost, addresses), strict=True):
        # a lane that had nothing waiting is one more probe, and an edge in a few rows takes fewer rounds
        assert new <= old + 1 + (finding.ROUNDS if "age" in address else 0), address
        assert new <= 20, address


@COMMITTED
@pytest.mark.databases("postgresql")
def test_postgresql_never_walks_the_table(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100,000 rows no query of list, filters, search, page or question reads or counts them all."""
    # as small a part of this table as it is of one with millions
    monkeypatch.setattr(finding, "NEWEST", 2_000)
    monkeypatch.setattr(actions, "COUNTED", 2_000)
    backlog(20_000, delivered=78_000)
    with connection.cursor() as cursor:
        table = OutboxMessage._meta.db_table
        cursor.execute(
            f"UPDATE {table} SET state = 'quarantined', quarantine_reason = 'gone', settled_at = now() "
            f"WHERE state = 'pending' AND id % 10 = 0"
        )
        cursor.execute(
            f"UPDATE {table} SET account_id = id % 500, "
            "created_at = now() - interval '1 minute' * (100000 - id % 100000), "
            "destination_key = CASE WHEN id % 3 = 0 THEN destination_key ELSE "
            "('00000000-0000-4000-8000-' || lpad((id % 500)::text, 12, '0'))::uuid END"
        )
        cursor.execute(f"VACUUM ANALYZE {table}")
    some = OutboxMessage.objects.filter(state="quarantined").values_list("id", flat=True)[:3]
    dead = list(some)
    with CaptureQueriesContext(connection) as queries:
        for query in QUERIES:
            assert operator.get(f"{LIST}?{query}").status_code == 200, query
        operator.get(page(dead[0]))
        operator.post(page(dead[0], "reveal"))
        ask(operator, "requeue", dead)
        ask(operator, "requeue_destination", dead)
        ask(operator, "requeue", dead, "reason=gone", select_across="1")
        ask(operator, "cancel", dead, "state=due", select_across="1")
    looked = _table_queries(queries)
    assert len(looked) > 60
    with connection.cursor() as cursor:
        for sql in looked:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
            plan = json.dumps(cursor.fetchone()[0])
            assert '"Node Type": "Seq Scan"' not in plan, sql
            assert "COUNT(*)" not in sql or "LIMIT" in sql, sql


def test_a_big_table_is_not_counted(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what can be leafed through, the total is the database's guess, or "more than"."""
    for _ in range(5):
        make()
    monkeypatch.setattr(paging, "REACH", 3)
    monkeypatch.setattr(finding, "estimated_rows", lambda *, using: 2_000_000)
    assert "about 2,000,000 messages" in text(operator.get(LIST))
    assert "more than 3 messages" in text(operator.get(f"{LIST}?state=due"))
    assert "0 messages" in text(operator.get(f"{LIST}?state=expired"))
    monkeypatch.setattr(finding, "estimated_rows", lambda *, using: None)
    assert "more than 3 messages" in text(operator.get(LIST))


@pytest.mark.parametrize(
    "query", ["state=quarantined", "reason=gone", "publisher=default", "key=test", "age=1h", "q=acct-7"]
)
def test_a_list_says_when_not_all_were_looked_at(
    operator: Client, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    """It shows what fits of the newest, does not pass it off as all there is, and offers to act upon all."""
    ids = [make("quarantined", account_id="acct-7", encryption_key_id="test") for _ in range(5)]
    everything = text(operator.get(f"{LIST}?{query}"))
    assert "5 messages (" in everything
    assert "Select everything that matches" not in everything
    monkeypatch.setattr(finding, "NEWEST", 3)
    found = operator.get(f"{LIST}?{query}")
    assert "3 messages among 3 looked at" in text(found)
    assert "Select everything that matches" in text(found)
    assert [row.pk for row in found.context["cl"].result_list] == ids[:1:-1]


def test_the_first_to_be_looked_at_are_those_to_act_upon(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a destination the quarantined before the delivered, of what waits the next of each lane."""
    dead, _delivered = make("quarantined"), make("delivered")
    waiting = [make(), make(publisher="other")]
    key = OutboxMessage.objects.get(id=dead).destination_key
    monkeypatch.setattr(finding, "NEWEST", 1)
    assert listed(operator, f"destination={key}") == [dead]
    monkeypatch.setattr(finding, "NEWEST", 2)
    assert listed(operator, "state=due") == waiting[::-1]


@pytest.mark.parametrize("order", ["o=6", "o=-9.6", "o=1", "all="])
def test_no_other_order_can_be_asked_for(operator: Client, order: str) -> None:
    """None is offered, and one asked for in the address would sort the whole table."""
    ids = [make(to=f"https://{host}.example.com/") for host in ("a", "c", "b")]
    assert listed(operator, order) == ids[::-1]


@COMMITTED
def test_the_databases_guess_is_read() -> None:
    """Where the database keeps one it is near the truth after an analysis; SQLite keeps none."""
    backlog(2_000)
    guess = finding.estimated_rows(using="default")
    if connection.vendor == "sqlite":
        assert guess is None
    else:
        assert guess is not None
        assert 1_000 < guess < 4_000


# what is done


WANTS = {
    "requeue": ("quarantined", "pending"),
    "requeue_destination": ("quarantined", "pending"),
    "send_now": ("pending", "pending"),
    "quarantine": ("pending", "quarantined"),
    "cancel": ("pending", "cancelled"),
    "expunge": ("delivered", "delivered"),
}


@pytest.mark.parametrize("name", WANTS)
@pytest.mark.parametrize("door", ["list", "page"])
def test_each_action_asks_for_its_permission(name: str, door: str) -> None:
    """Who has all the others but not this one is neither offered it nor obeyed; who has it is asked, then obeyed."""
    before, after = WANTS[name]
    row_id = make(before, **(LATER if name == "send_now" else {}))
    permission = actions.ACTIONS[name].permission
    others = staff(*(other for other in PERMISSIONS if other != permission))
    address = LIST if door == "list" else page(row_id, f"act/{name}")
    yes = {"confirmed": "yes", "action": name, "_selected_action": [row_id]}
    offered = f'value="{name}"' if door == "list" else f"/act/{name}/"
    seen_at = LIST if door == "list" else page(row_id)
    assert offered not in others.get(seen_at).content.decode()
    refused = others.post(address, yes)
    assert refused.status_code == (403 if door == "page" else 302)
    fields = OutboxMessage.objects.values_list("state", "available_at", "sealed")
    untouched = fields.get()
    assert LogEntry.objects.count() == 0

    allowed = staff(permission)
    assert offered in allowed.get(seen_at).content.decode()
    question = ask(allowed, name, [row_id]) if door == "list" else allowed.post(address)
    assert f"{actions.ACTIONS[name].label}: 1 message." in text(question)
    assert fields.get() == untouched
    confirm(allowed, question, address)
    assert state(row_id) == after
    assert fields.get() != untouched
    entry = LogEntry.objects.get()
    assert entry.change_message == f"{name}: id {row_id}; 1 asked, 1 done"
    assert entry.object_id == (str(row_id) if door == "page" else None)


def test_nobody_sees_messages_without_the_permission_to() -> None:
    """Whatever else he may do."""
    user = User.objects.create_user("other", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=[f"{p}_outboxmessage" for p in PERMISSIONS])
    )
    client = Client()
    client.force_login(user)
    row_id = make("quarantined")
    for address in (LIST, page(row_id)):
        assert client.get(address).status_code == 403
    for address in (LIST, page(row_id, "reveal"), page(row_id, "act/requeue")):
        assert client.post(address, {"confirmed": "yes"}).status_code == 403
    assert state(row_id) == "quarantined"
    assert Client().get(page(row_id)).status_code == 302
    assert LogEntry.objects.count() == 0


def test_nobody_adds_changes_or_deletes_rows() -> None:
    """Not even a superuser: rows are moved by what is guarded, or not at all."""
    root = staff(superuser=True)
    row_id = make()
    assert root.get(f"{LIST}add/").status_code == 403
    assert root.get(page(row_id, "delete")).status_code == 403
    assert root.post(page(row_id, "delete"), {"post": "yes"}).status_code == 403
    assert root.post(page(row_id), {"state": "delivered"}).status_code == 405
    assert ask(root, "delete_selected", [row_id], post="yes").status_code == 302
    assert root.get(page(row_id, "act/requeue")).status_code == 405
    assert root.get(page(row_id, "reveal")).status_code == 405
    assert root.post(page(row_id, "act/explode")).status_code == 404
    assert root.get(page(10**9)).status_code == 404
    assert root.get(page(10**9, "x")).status_code in (302, 404)
    assert state(row_id) == "pending"


@COMMITTED
def test_two_operators_and_a_worker_are_counted_honestly(operator: Client) -> None:
    """Fifteen were asked about; two were requeued by another and one was delivered after all meanwhile."""
    late = make()
    (claim,) = leases.claim("default", limit=5, budget=10**9, worker="w", lease=60, using="default").claims
    operations.quarantine([late])
    ids = [late, *(make("quarantined", quarantine_reason="operator") for _ in range(14))]
    question = ask(operator, "requeue", ids, "reason=operator")
    assert "Requeue: 15 messages." in text(question)
    colleague = staff("requeue")
    confirm(colleague, ask(colleague, "requeue", ids[1:3]))
    assert leases.settle([Settlement(claim, Outcome(Verdict.DELIVERED))], using="default") == []
    done = confirm(operator, question, f"{LIST}?reason=operator")
    assert told(done) == ["12 of 15 requeued: 3 had moved on."]
    assert [state(row_id) for row_id in ids] == ["delivered"] + ["pending"] * 14
    assert set(OutboxMessage.objects.exclude(id=late).values_list("requeues", flat=True)) == {1}
    assert LogEntry.objects.latest("id").change_message.endswith("; 15 asked, 12 done")


def test_a_question_counts_only_what_it_can_do(operator: Client) -> None:
    """Selected rows that are in no state for it are left out before, and where none is left nothing is asked."""
    dead, live, erased = make("quarantined"), make(), make("expired", sealed=None)
    question = ask(operator, "requeue", [dead, live, erased])
    assert "Requeue: 1 message." in text(question)
    assert told(confirm(operator, question)) == ["1 requeued."]
    nothing = ask(operator, "requeue", [live, erased])
    assert "There is nothing to do" in text(nothing)
    assert "confirmed" not in nothing.content.decode()
    assert ask(operator, "requeue", []).status_code == 302


def test_everything_that_matches_is_done_in_chunks_under_one_entry(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the filter and not by ids, whatever the page shows; the log keeps filter and count."""
    monkeypatch.setattr(operations, "CHUNK", 4)
    monkeypatch.setattr(actions, "PACE", 0.0)
    gone = [make("quarantined", account_id="acct-7") for _ in range(10)]
    other = make("quarantined", quarantine_reason="rejected", account_id="acct-7")
    foreign = make("quarantined")
    query = "reason=gone&q=acct-7"
    question = ask(operator, "requeue", gone[:1], query, select_across="1")
    assert "Requeue: 10 messages." in text(question)
    done = confirm(operator, question, f"{LIST}?{query}")
    assert told(done) == ["10 requeued."]
    assert {state(row_id) for row_id in gone} == {"pending"}
    assert (state(other), state(foreign)) == ("quarantined", "quarantined")
    entry = LogEntry.objects.get()
    assert entry.change_message == "requeue: reason=gone and account acct-7; 10 asked, 10 done"


def test_more_than_can_be_counted_is_done_all_the_same(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question says "more than", the answer how many there were."""
    monkeypatch.setattr(actions, "COUNTED", 3)
    ids = [make() for _ in range(6)]
    question = ask(operator, "cancel", ids[:1], "state=due", select_across="1")
    assert "Cancel: 3+ messages." in text(question)
    assert told(confirm(operator, question, f"{LIST}?state=due")) == ["6 cancelled."]


def test_a_count_that_did_not_look_at_all_says_so(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """None among those looked at is no proof that there is none; where none can be, nothing is asked."""
    dead = make("quarantined", account_id="acct-7")
    newer = [make(account_id="acct-7") for _ in range(3)]
    monkeypatch.setattr(actions, "COUNTED", 2)
    question = ask(operator, "requeue", newer, "q=acct-7", select_across="1")
    assert "Requeue: 0+ messages." in text(question)
    assert told(confirm(operator, question, f"{LIST}?q=acct-7")) == ["1 requeued."]
    assert state(dead) == "pending"
    for query in ("state=due", "state=delivered"):
        assert "There is nothing to do" in text(ask(operator, "requeue", newer, query, select_across="1"))
    assert "There is nothing to do" in text(ask(operator, "cancel", newer, "reason=gone", select_across="1"))


def test_destinations_of_more_messages_than_are_looked_at_are_not_guessed(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All for the destinations of a few that match: done; of many: the operator is told to choose."""
    rejected = make("quarantined", quarantine_reason="rejected")
    gone = [make("quarantined"), make("quarantined", to="https://hooks.acme.com/y")]
    question = ask(operator, "requeue_destination", gone, "reason=rejected", select_across="1")
    assert "Requeue all for this destination: 2 messages." in text(question)
    confirm(operator, question, f"{LIST}?reason=rejected")
    assert [state(row_id) for row_id in (rejected, *gone)] == ["pending", "pending", "quarantined"]
    for name in ("NEWEST", "DESTINATIONS"):
        more = make("quarantined")
        with monkeypatch.context() as patch:
            patch.setattr(finding if name == "NEWEST" else actions, name, 1)
            yes = {"action": "requeue_destination", "_selected_action": gone, "select_across": "1"}
            done = operator.post(f"{LIST}?reason=gone", yes | {"confirmed": "yes"}, follow=True)
        assert told(done) == [actions.TOO_MANY]
        assert state(more) == "quarantined"


def test_a_url_that_was_searched_for_stays_out_of_the_log(operator: Client) -> None:
    """The log names the destination by its key."""
    url = "https://hooks.acme.com/customers/7?key=s3cret"
    row_id = make(to=url)
    query = "q=https%3A%2F%2Fhooks.acme.com%2Fcustomers%2F7%3Fkey%3Ds3cret"
    confirm(operator, ask(operator, "cancel", [row_id], query, select_across="1"), f"{LIST}?{query}")
    message = LogEntry.objects.get().change_message
    assert state(row_id) == "cancelled"
    assert "s3cret" not in message
    assert OutboxMessage.objects.get().destination_key.hex in message


def test_all_of_a_destination_are_requeued_from_one(operator: Client) -> None:
    """From one message's page: the dead of the same full destination, and not those of its host."""
    mine = [make("quarantined"), make("expired"), make("quarantined", quarantine_reason="rejected")]
    live, elsewhere = make("cancelled"), make("quarantined", to="https://hooks.acme.com/y")
    address = page(mine[0], "act/requeue_destination")
    question = operator.post(address)
    assert "Requeue all for this destination: 3 messages." in text(question)
    assert told(confirm(operator, question, address)) == ["3 requeued."]
    assert [state(row_id) for row_id in mine] == ["pending"] * 3
    assert (state(live), state(elsewhere)) == ("cancelled", "quarantined")


def test_the_log_is_written_before_anything_is_done(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was interrupted is in the log as begun, and is done by asking again."""
    monkeypatch.setattr(operations, "CHUNK", 1)
    ids = [make("quarantined") for _ in range(3)]
    requeue, done = leases.requeue, []

    def interrupted(chunk: list[int], *, using: str) -> int:
        assert LogEntry.objects.get().change_message.endswith(", began")
        if done:
            raise KeyboardInterrupt
        done.extend(chunk)
        return requeue(chunk, using=using)

    monkeypatch.setattr(leases, "requeue", interrupted)
    question = ask(operator, "requeue", ids, "reason=gone", select_across="1")
    with pytest.raises(KeyboardInterrupt):
        confirm(operator, question, f"{LIST}?reason=gone")
    assert [state(row_id) for row_id in ids] == ["pending", "quarantined", "quarantined"]
    assert LogEntry.objects.get().change_message.endswith(", began")


@pytest.mark.parametrize("name", ["changelist", "act", "reveal"])
def test_views_that_write_commit_as_they_go(name: str) -> None:
    """With ATOMIC_REQUESTS a chunk would hold its locks until the last one, and a log entry could be rolled back."""
    arguments = {"changelist": [], "act": [7, "requeue"], "reveal": [7]}[name]
    address = reverse(f"admin:notification_outbox_outboxmessage_{name}", args=arguments)
    assert "default" in resolve(address).func._non_atomic_requests  # type: ignore[attr-defined]


# what is revealed


@COMMITTED
def test_a_body_is_revealed_to_who_may_and_logged_before(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Body, headers and full destination, once the entry is written; the answer is stored nowhere."""
    with transaction.atomic():
        row_id = enqueue(
            "t", {"order": 7}, to="https://hooks.acme.com/secret-path", headers={"X-Shop": "north"}
        ).id
    opened = messages.reveal

    def watched(*args: Any) -> Any:
        assert LogEntry.objects.get().change_message == "reveal, began"
        assert not connection.in_atomic_block
        return opened(*args)

    monkeypatch.setattr(messages, "reveal", watched)
    assert "secret-path" not in text(operator.get(page(row_id)))
    response = operator.post(page(row_id, "reveal"))
    for shown in ('{"order":7}', "https://hooks.acme.com/secret-path", "X-Shop", "north", "application/json"):
        assert shown in text(response)
    assert "no-store" in response["Cache-Control"]
    entry = LogEntry.objects.get()
    assert (entry.change_message, entry.object_id) == ("reveal, shown", str(row_id))
    assert "reveal, shown" in text(operator.get(page(row_id, "history")))


def test_a_body_is_not_revealed_to_others() -> None:
    """Not offered, not opened, not logged."""
    row_id = make()
    others = staff(*(name for name in PERMISSIONS if name != "reveal"))
    assert "reveal" not in others.get(page(row_id)).content.decode()
    assert others.post(page(row_id, "reveal")).status_code == 403
    assert LogEntry.objects.count() == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"encryption_key_id": "old"}, "lacks the key the body is encrypted with (old)"),
        ({"notification_type": "mallory"}, "changed after it was stored"),
        ({"sealed": b""}, "changed after it was stored"),
        ({"sealed": None}, "was erased"),
    ],
)
def test_a_body_that_cannot_be_opened_says_why(operator: Client, changes: dict[str, Any], why: str) -> None:
    """The operator learns what is wrong, and the log that nothing was shown."""
    row_id = make("delivered", **changes)
    assert why in text(operator.post(page(row_id, "reveal")))
    assert LogEntry.objects.get().change_message == "reveal, not opened"


def test_bodies_that_are_long_or_no_text_are_shown_in_part(operator: Client) -> None:
    """Bytes in hexadecimal, and only the beginning of what would choke a browser."""
    with transaction.atomic():
        binary = enqueue(
            "t", b"\xff\x00", content_type="application/octet-stream", to="https://hooks.acme.com/"
        ).id
        long = enqueue("t", "x" * 200_000, to="https://hooks.acme.com/").id
    assert "ff 00" in text(operator.post(page(binary, "reveal")))
    response = operator.post(page(long, "reveal"))
    assert "This is its beginning" in text(response)
    assert len(response.content) < 100_000


# without it


def test_the_package_works_without_the_admin() -> None:
    """A project that has none neither imports it nor fails its checks."""
    script = """
import sys
from django.conf import settings
settings.configure(INSTALLED_APPS=["notification_outbox"], SECRET_KEY="x" * 50, USE_TZ=True)
import django
django.setup()
from django.core.management import call_command
call_command("check")
import notification_outbox, notification_outbox.operations, notification_outbox.worker
print([name for name in sys.modules if "admin" in name])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
