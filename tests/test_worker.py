"""The worker: real processes, real signals, a real receiver. What it delivers, keeps, hands back and says."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import (
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
)
from django.db.models import F
from django.db.models.functions import Now

from notification_outbox import Message, Publisher, conf, database, lanes, leases
from notification_outbox.exceptions import PermanentPublishError, PublishFailed, TransientPublishError
from notification_outbox.lifecycle import Answer
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from notification_outbox.worker import Worker
from tests.processes import Outbox, wait_until
from tests.receiver import Received

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "second"])

# shorter than any default, long enough for a busy machine: a lease must exceed the attempt by two seconds
QUICK: dict[str, Any] = {"ATTEMPT_TIMEOUT": 1, "LEASE": 3}


class Held:
    """A receiver's answer that waits until the test lets it go."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.gate = threading.Event()

    def __call__(self, received: Received) -> int:
        self.gate.wait(60)
        return self.status


def message_ids(requests: list[Received]) -> list[str]:
    return [(received.header("idempotency-key") or "").strip('"') for received in requests]


def test_a_due_message_is_delivered_and_settled(outbox: Outbox) -> None:
    """The whole line: enqueued, claimed, opened, signed, sent, recorded."""
    (receipt,) = outbox.enqueue(headers={"X-Shop": "zoe"})
    outbox.work()
    (received,) = outbox.receiver.requests
    assert (received.method, received.target, received.body) == ("POST", "/hooks", b'{"n":0}')
    assert message_ids([received]) == [receipt.message_id]
    assert received.header("x-shop") == "zoe"
    assert received.header("content-type") == "application/json"
    row = outbox.row(receipt)
    assert (row.state, row.attempts, row.last_status) == ("delivered", 1, 200)
    assert not DeliveryAttempt.objects.exists()


@pytest.mark.parametrize(("wanted", "logged"), [("all", 1), ("failures", 0), ("none", 0)])
def test_successes_are_remembered_where_asked(outbox: Outbox, wanted: str, logged: int) -> None:
    """``LOG_ATTEMPTS`` says which attempts are worth a row."""
    outbox.configure(root={"LOG_ATTEMPTS": wanted})
    outbox.enqueue()
    outbox.work()
    assert DeliveryAttempt.objects.count() == logged


def test_a_failure_is_retried_with_the_same_bytes_freshly_signed(outbox: Outbox) -> None:
    """Every attempt sends the sealed bytes under the constant id and a signature of its own."""
    outbox.configure(BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 503 if len(outbox.receiver.requests) < 3 else 200
    (receipt,) = outbox.enqueue()
    outbox.work("empty")
    requests = outbox.receiver.requests
    assert len(requests) == 3
    assert {received.body for received in requests} == {b'{"n":0}'}
    assert set(message_ids(requests)) == {receipt.message_id}
    assert len({received.header("signature") for received in requests}) == 3
    assert len({received.header("signature-input") for received in requests}) == 3
    assert outbox.row(receipt).attempts == 3
    assert list(DeliveryAttempt.objects.values_list("number", "status", "phase").order_by("number")) == [
        (1, 503, "answered"),
        (2, 503, "answered"),
    ]


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        (204, "delivered", ""),
        (410, "quarantined", "gone"),
        (400, "quarantined", "rejected"),
        (302, "quarantined", "rejected"),
        (429, "pending", ""),
        (500, "pending", ""),
    ],
)
def test_answers_become_outcomes(outbox: Outbox, status: int, state: str, reason: str) -> None:
    """2xx delivered, 410 gone, busy answers retried, other refusals counted against MAX_REJECTIONS (here 1)."""
    outbox.configure(MAX_REJECTIONS=1)
    outbox.receiver.answer = lambda received: status
    (receipt,) = outbox.enqueue()
    outbox.work()
    row = outbox.row(receipt)
    assert (row.state, row.quarantine_reason, row.last_status) == (state, reason, status)


def test_attempts_run_out_where_a_limit_is_set(outbox: Outbox) -> None:
    """``MAX_ATTEMPTS`` failures quarantine as ``attempts_exhausted``."""
    outbox.configure(MAX_ATTEMPTS=2, BACKOFF={"base": 0.02, "cap": 0.02})
    outbox.receiver.answer = lambda received: 500
    (receipt,) = outbox.enqueue()
    outbox.work("empty")
    assert outbox.row(receipt).quarantine_reason == "attempts_exhausted"
    assert len(outbox.receiver.requests) == 2


EDITS = {
    "notification_type": "order.refunded",
    "destination": "evil.example.com",
    "account_id": "2",
    "caller_scope_id": "other",
    "signing_scope_id": "other",
    "idempotency_key": "other",
    "ordering_key": "other",
    "dedup_id": "00000000-0000-4000-8000-000000000000",
    "destination_key": "00000000-0000-4000-8000-000000000000",
    "sealed": b"\x01" + b"0" * 80,
}


@pytest.mark.parametrize("column", EDITS)
def test_a_row_edited_in_sql_is_quarantined_and_never_sent(outbox: Outbox, column: str) -> None:
    """Whoever can write the table cannot make us send something else."""
    (receipt,) = outbox.enqueue(account_id=1)
    OutboxMessage.objects.update(**{column: EDITS[column]})
    outbox.work()
    assert outbox.row(receipt).quarantine_reason == "tampered"
    assert outbox.receiver.connections == 0


@pytest.mark.parametrize("change", [{"encryption_key_id": "2031"}, {"sealed": b"\x07" + b"0" * 80}])
def test_a_row_this_worker_cannot_read_yet_waits(outbox: Outbox, change: dict[str, Any]) -> None:
    """An unknown key or version is handed back unattempted with a pause; a deploy may bring it."""
    (receipt,) = outbox.enqueue()
    OutboxMessage.objects.update(**change, due_at=F("due_at") - timedelta(seconds=800))
    outbox.work()
    row = outbox.row(receipt)
    named = "unknown_key:2031" if "encryption_key_id" in change else "unknown_key:version 7"
    assert (row.state, row.attempts, row.last_error) == ("pending", 0, named)
    # an eighth of its age
    assert 99 < (row.available_at - row.updated_at).total_seconds() < 110
    assert outbox.receiver.connections == 0


def test_a_row_moved_to_a_lane_nobody_has_stays_and_is_reported(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not sent, not lost, and the worker says that nobody serves it."""
    (receipt,) = outbox.enqueue()
    OutboxMessage.objects.update(publisher="nowhere")
    process = outbox.start("--concurrency", "2")
    wait_until(lambda: "publisher='nowhere' has messages" in process.log, "the report")
    process.terminate()
    assert process.wait() == 0
    assert outbox.row(receipt).state == "pending"
    assert outbox.receiver.connections == 0


FORBIDDEN = ["https://127.0.0.1:{port}/", "https://[::ffff:127.0.0.1]:{port}/", "https://localhost:{port}/"]


@pytest.mark.parametrize("url", FORBIDDEN)
def test_a_loopback_destination_is_never_dialled_unless_opened(outbox: Outbox, url: str) -> None:
    """Enqueued while it was open, it is refused at the dial after the policy closed."""
    port = outbox.receiver.host.rpartition(":")[2]
    target = url.format(port=port)
    opened = target.removeprefix("https://").removesuffix("/")
    outbox.configure({"allow_hosts": [opened]}, MAX_REJECTIONS=1)
    (receipt,) = outbox.enqueue(to=target)
    outbox.configure({"allow_hosts": [], "ports": [int(port)]}, MAX_REJECTIONS=1)
    outbox.work()
    row = outbox.row(receipt)
    assert (row.state, row.quarantine_reason) == ("quarantined", "destination_forbidden")
    assert outbox.receiver.connections == 0


def test_a_redirect_is_an_answer_and_is_never_followed(outbox: Outbox) -> None:
    """A receiver cannot send us elsewhere."""
    outbox.receiver.answer = lambda received: (307, {"Location": outbox.receiver.url("/elsewhere")})
    (receipt,) = outbox.enqueue()
    outbox.work()
    assert [received.target for received in outbox.receiver.requests] == ["/hooks"]
    assert outbox.row(receipt).last_error == "http_307"


def test_two_workers_deliver_two_thousand_messages_once_each(outbox: Outbox) -> None:
    """While no lease is lost nothing is sent twice."""
    receipts = outbox.enqueue(2000)
    workers = [outbox.start("--until-empty", "--concurrency", "32") for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert outbox.states() == {"delivered": 2000}
    assert Counter(message_ids(outbox.receiver.requests)) == Counter(one.message_id for one in receipts)
    assert not OutboxMessage.objects.exclude(attempts=1, lost_leases=0).exists()


def test_what_a_killed_worker_held_is_delivered_again_with_the_same_bytes(outbox: Outbox) -> None:
    """After SIGKILL in mid-flight and the lease's end another worker sends the same message, freshly signed."""
    outbox.configure(**QUICK)
    held = outbox.receiver.answer = Held()
    (receipt,) = outbox.enqueue()
    first = outbox.start()
    outbox.receiver.wait_for(1)
    first.kill()
    outbox.receiver.answer = lambda received: 200
    held.gate.set()
    assert outbox.row(receipt).state == "in_flight"
    second = outbox.start("--until-empty")
    assert second.wait() == 0
    before, after = outbox.receiver.requests
    assert before.body == after.body
    assert message_ids([before]) == message_ids([after]) == [receipt.message_id]
    assert before.header("signature") != after.header("signature")
    row = outbox.row(receipt)
    assert (row.state, row.attempts) == ("delivered", 2)


def test_sigterm_lets_running_deliveries_end_and_hands_back_the_rest(outbox: Outbox) -> None:
    """Exit 0, what ran is recorded, what waited was not attempted, no lease is left."""
    held = outbox.receiver.answer = Held()
    outbox.enqueue(10)
    process = outbox.start("--concurrency", "4", "--shutdown-timeout", "30")
    outbox.receiver.wait_for(4)
    process.terminate()
    wait_until(lambda: outbox.states().get("pending") == 6, "the rest handed back")
    assert outbox.states() == {"in_flight": 4, "pending": 6}
    held.gate.set()
    assert process.wait() == 0
    assert outbox.states() == {"delivered": 4, "pending": 6}
    assert len(outbox.receiver.requests) == 4
    assert not OutboxMessage.objects.filter(state="pending").exclude(attempts=0, leased_by="").exists()


def test_deliveries_beyond_the_shutdown_timeout_are_handed_back(outbox: Outbox) -> None:
    """A receiver that never answers cannot keep a worker from leaving."""
    outbox.receiver.answer = Held()
    outbox.enqueue(2)
    process = outbox.start("--shutdown-timeout", "0.2")
    outbox.receiver.wait_for(2)
    process.terminate()
    assert process.wait() == 0
    assert outbox.states() == {"pending": 2}


def test_a_second_signal_leaves_at_once(outbox: Outbox) -> None:
    """Exit 3; the leases end by themselves."""
    outbox.receiver.answer = Held()
    outbox.enqueue(6)
    process = outbox.start("--concurrency", "2")
    outbox.receiver.wait_for(2)
    process.terminate()
    wait_until(lambda: outbox.states().get("pending") == 4, "the first signal to be taken")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 3
    assert outbox.states() == {"in_flight": 2, "pending": 4}


def test_a_long_wait_for_a_slot_is_renewed_not_lost(outbox: Outbox) -> None:
    """What is in hand but cannot start yet keeps its lease."""
    outbox.configure(**QUICK, CONCURRENCY={"worker": 1})

    def slow(received: Received) -> int:
        threading.Event().wait(0.8)
        return 200

    outbox.receiver.answer = slow
    outbox.enqueue(6)
    outbox.work("empty")
    assert outbox.states() == {"delivered": 6}
    assert len(outbox.receiver.requests) == 6
    assert not OutboxMessage.objects.filter(lost_leases__gt=0).exists()


def test_a_lost_lease_cancels_its_delivery(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Another worker has the message by then: what still runs here is stopped and its outcome not recorded."""
    outbox.configure(ATTEMPT_TIMEOUT=8, LEASE=10)
    outbox.receiver.answer = Held()
    (receipt,) = outbox.enqueue()
    process = outbox.start()
    outbox.receiver.wait_for(1)
    OutboxMessage.objects.update(state="cancelled", lease_token=None, settled_at=Now())
    wait_until(lambda: "outbox lease lost" in process.log, "the renewal to notice")
    process.terminate()
    assert process.wait() == 0
    assert outbox.states() == {"cancelled": 1}
    assert "outbox settle" not in process.log
    assert outbox.row(receipt).last_error == ""


def test_an_idle_worker_finds_new_messages_by_itself(outbox: Outbox) -> None:
    """Polling meets what was committed while it slept."""
    outbox.configure(root={"POLL_INTERVAL": 0.1})
    process = outbox.start()
    for count in (1, 2):
        outbox.enqueue()
        outbox.receiver.wait_for(count)
    process.terminate()
    assert process.wait() == 0


def test_a_stopped_worker_can_run_again_and_stop_before_run_does_nothing(outbox: Outbox) -> None:
    """``Worker`` is restartable inside an application's own loop."""

    def enqueue() -> None:
        outbox.enqueue()
        connection.close()

    async def scenario() -> None:
        worker = Worker()
        worker.stop()
        for count in (1, 2):
            await asyncio.to_thread(enqueue)
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(outbox.receiver.wait_for, count)
            worker.stop()
            await asyncio.wait_for(running, 20)

    asyncio.run(scenario())
    assert outbox.states() == {"delivered": 2}


@pytest.mark.parametrize("error", [OperationalError, InternalError, ProgrammingError, InterfaceError])
def test_outcomes_outlive_a_database_that_is_away(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """Whatever the database says, settlements and claims are repeated; the outage is logged once, and its end."""
    failures = iter(range(4))

    def flaky(settlements: Any, **named: Any) -> Any:
        if next(failures, None) is not None:
            raise error("the server became read-only")
        return real(settlements, **named)

    refused: list[bool] = []

    def refuse_once(*arguments: Any, **named: Any) -> Any:
        if not refused:
            refused.append(True)
            raise error("the server became read-only")
        return claim(*arguments, **named)

    real, claim = leases.settle, leases.claim
    monkeypatch.setattr(leases, "settle", flaky)
    monkeypatch.setattr(leases, "claim", refuse_once)
    outbox.enqueue(3)
    with caplog.at_level(logging.INFO, "notification_outbox"):
        outbox.work()
    assert outbox.states() == {"delivered": 3}
    assert len(outbox.receiver.requests) == 3
    said = [record.message for record in caplog.records if "database" in record.message]
    assert said == [
        f"outbox database away role=settle error={error.__name__} code=none",
        "outbox database back role=settle after=4",
    ]


def test_outcomes_that_wait_longer_than_a_lease_are_not_sent_again(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While outcomes cannot be recorded their leases are kept and nothing new is claimed."""
    outbox.configure(ATTEMPT_TIMEOUT=0.2, LEASE=2.2)
    monkeypatch.setattr(database, "AWAY_PAUSE", (0.05, 0.1))
    back = time.monotonic() + 4

    def away(settlements: Any, **named: Any) -> Any:
        if time.monotonic() < back:
            raise OperationalError("connection refused")
        return real(settlements, **named)

    real = leases.settle
    monkeypatch.setattr(leases, "settle", away)
    outbox.enqueue(5)
    outbox.work()
    assert len(outbox.receiver.requests) == 5
    assert set(OutboxMessage.objects.values_list("state", "attempts", "lost_leases")) == {("delivered", 1, 0)}


class Leaving(Publisher):
    """A publisher whose inner task was cancelled, or that calls for the end of the program."""

    async def publish(self, message: Message) -> None:
        raise {"cancel": asyncio.CancelledError, "exit": SystemExit}[message.destination]


@pytest.mark.parametrize(("way", "error"), [("cancel", "CancelledError"), ("exit", "SystemExit")])
def test_a_publisher_that_leaves_by_itself_has_failed(
    outbox: Outbox, configure: Callable[..., None], way: str, error: str
) -> None:
    """What is not the worker's own stop is an outcome like any other: the worker and the row go on."""
    configure(PUBLISHERS={"default": {"BACKEND": "tests.test_worker.Leaving"}})
    (receipt,) = outbox.enqueue(to=way)
    outbox.work()
    row = outbox.row(receipt)
    assert (row.state, row.attempts, row.last_error) == ("pending", 1, error)


class Hidden(BaseException):
    """What no handler of ``Exception`` sees."""


ODD: dict[str, Any] = {
    "true": True,
    "text": "accepted",
    "numbers": Answer(10**9, "x" * 500, "y" * 500),
    "nul": Answer(200, "a\0b", "c\0d"),
    "kinds": Answer("200", None, 5),  # type: ignore[arg-type]
    "no code": PublishFailed(None),  # type: ignore[arg-type]
    "long code": PublishFailed("c" * 500),
    "nul code": PublishFailed("a\0b"),
    "no fault": PublishFailed("x", None),  # type: ignore[arg-type]
    "odd answer": PublishFailed("x", answer=True),  # type: ignore[arg-type]
    "for ever": PublishFailed("x", retry_after=float("inf")),
    "text pause": PublishFailed("x", retry_after="5"),  # type: ignore[arg-type]
    "no number": PublishFailed("x", retry_after=float("nan")),
    "transient for ever": TransientPublishError("x", retry_after=float("inf")),
    "transient backwards": TransientPublishError("x", retry_after=-5.0),
    "a century": TransientPublishError("x", retry_after=3e9),
    "gone": PermanentPublishError("gone", answer=object()),  # type: ignore[arg-type]
    "hidden": Hidden("s3cr3t"),
}


class Odd(Publisher):
    """A publisher that says what no table takes."""

    async def publish(self, message: Message) -> Answer | None:
        said = ODD[message.destination]
        if isinstance(said, BaseException):
            raise said
        return said  # type: ignore[no-any-return]


def test_whatever_a_publisher_says_is_recorded(
    outbox: Outbox, configure: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger's odd answer or error costs its own message at most a detail, and its neighbours nothing."""
    configure(PUBLISHERS={"default": {"BACKEND": "tests.test_worker.Odd"}})
    receipts = {way: outbox.enqueue(to=way)[0] for way in ODD}
    outbox.work()
    rows = {way: outbox.row(receipt) for way, receipt in receipts.items()}
    expected = {
        way: "delivered"
        if not isinstance(said, BaseException)
        else "quarantined"
        if isinstance(said, PermanentPublishError)
        else "pending"
        for way, said in ODD.items()
    }
    assert {way: row.state for way, row in rows.items()} == expected
    assert not OutboxMessage.objects.exclude(lease_token=None).exists()
    assert rows["nul"].last_status == 200
    assert rows["kinds"].last_status is None
    assert rows["no code"].last_error == "PublishFailed"
    assert rows["long code"].last_error == "c" * 128
    assert rows["hidden"].last_error == "Hidden"
    assert "s3cr3t" not in caplog.text


def test_a_runner_that_breaks_ends_the_worker_at_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of ours is not waited for: what it had in hand is handed back, and the error is told."""

    async def broken(*args: Any, **named: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(lanes, "publish", broken)
    outbox.enqueue(8)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="ours"):
        outbox.work(shutdown_timeout=30)
    assert time.monotonic() - began < 10
    assert set(OutboxMessage.objects.values_list("state", "attempts", "lease_token")) == {
        ("pending", 0, None)
    }


def test_a_worker_whose_database_is_away_can_still_be_stopped(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves when told to: what it could not record is delivered again when the leases end."""
    down = threading.Event()

    def or_down(mover: Any) -> Any:
        def ask(*arguments: Any, **named: Any) -> Any:
            if down.is_set():
                raise OperationalError("connection refused")
            return mover(*arguments, **named)

        return ask

    for name in ("claim", "recover", "next_due", "settle", "renew"):
        monkeypatch.setattr(leases, name, or_down(getattr(leases, name)))
    monkeypatch.setattr(database, "AWAY_PAUSE", (0.05, 0.1))
    held = outbox.receiver.answer = Held()
    outbox.enqueue(2)

    async def scenario() -> None:
        worker = Worker(conf.get(), using="default", shutdown_timeout=0.5)
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(outbox.receiver.wait_for, 2)
        down.set()
        held.gate.set()
        await asyncio.sleep(0.1)
        worker.stop()
        await asyncio.wait_for(running, 20)

    asyncio.run(scenario())
    assert outbox.states() == {"in_flight": 2}


def test_a_database_without_tables_is_named_at_once(outbox: Outbox) -> None:
    """The first thing a newcomer forgets is answered with the command that mends it."""
    connections["second"].close()
    with connections["second"].schema_editor() as editor:
        editor.alter_db_table(OutboxMessage, OutboxMessage._meta.db_table, "elsewhere")
    try:
        with pytest.raises(
            CommandError, match=r"'second' has no outbox tables: run 'manage.py migrate --database second'"
        ):
            call_command("run_outbox_worker", database=["second"])
    finally:
        with connections["second"].schema_editor() as editor:
            editor.alter_db_table(OutboxMessage, "elsewhere", OutboxMessage._meta.db_table)


def test_nothing_secret_is_logged_or_stored_in_the_clear(outbox: Outbox) -> None:
    """No payload, header value, URL path or peer text in any library's DEBUG log or in clear columns."""
    outbox.configure(MAX_REJECTIONS=1)
    answers = {"/pathmark?querymark": 500, "/pathmark2": 400, "/pathmark3": 200}
    outbox.receiver.answer = lambda received: (answers[received.target], {"X-Peer": "peermark"})
    for path in answers:
        outbox.enqueue(path=path, headers={"X-Token": "headermark"})
    outbox.enqueue(to="https://localhost.pathmark.acme.com/pathmark")
    OutboxMessage.objects.filter(destination__startswith="localhost.p").update(sealed=b"\x01tampered")
    process = outbox.start("--once", log_level="DEBUG")
    assert process.wait() == 0
    # that other libraries are heard is seen by what asyncio says at its start
    expected = (
        "outcome=quarantined error=http_400",
        "outcome=retry error=http_500",
        "error=tampered",
        "selector",
    )
    for said in expected:
        assert said in process.log
    columns = [
        field.name for field in OutboxMessage._meta.fields if field.name not in ("sealed", "destination")
    ]
    stored = repr(list(OutboxMessage.objects.values_list(*columns)))
    stored += repr(list(DeliveryAttempt.objects.values_list()))
    for mark in ("pathmark", "querymark", "headermark", "peermark", '"n"', "{'n'"):
        assert mark not in process.log.replace("localhost.pathmark", "")
        assert mark not in stored


def test_wrong_arguments_and_settings_exit_with_one(outbox: Outbox) -> None:
    """The text names what is wrong and what there is."""
    with pytest.raises(CommandError, match=r"no publisher of that alias.*has default"):
        call_command("run_outbox_worker", publisher=["nope"])
    process = outbox.start("--publisher", "nope")
    assert process.wait() == 1
    outbox.configure({"ca_file": "missing.pem"})
    process = outbox.start("--once")
    assert process.wait() == 1
    assert "ca_file" in process.log
    assert "Traceback" not in process.log


def test_only_the_chosen_lanes_are_served(outbox: Outbox) -> None:
    """``--publisher`` leaves the other aliases to other workers."""
    raw = outbox.raw["PUBLISHERS"]
    raw["second"] = raw["default"]
    outbox.raw = {"PUBLISHERS": raw}
    mine, other = outbox.enqueue(2)
    OutboxMessage.objects.filter(id=other.id).update(publisher="second")
    process = outbox.start("--publisher", "default", "--once")
    assert process.wait() == 0
    assert (outbox.row(mine).state, outbox.row(other).state) == ("delivered", "pending")


def test_once_leaves_what_is_not_due(outbox: Outbox) -> None:
    """``--once`` delivers what is due now and does not wait for retries."""
    outbox.receiver.answer = lambda received: 503
    outbox.enqueue(3)
    began = time.monotonic()
    assert outbox.start("--once").wait() == 0
    assert outbox.states() == {"pending": 3}
    assert len(outbox.receiver.requests) == 3
    assert time.monotonic() - began < 60


def test_the_help_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes and signals are where an operator looks first."""
    with pytest.raises(SystemExit):
        call_command("run_outbox_worker", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for promise in ("SIGTERM", "exit 0", "exit 3", "exit 1", "--until-empty", "--once", "--shutdown-timeout"):
        assert promise in text
