"""What an operator asks of a worker: how long, how much, whom it may reach, and what it says while it lives."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.dispatch import Signal

from notification_outbox import Message, Publisher, conf, database, enqueue, leases, signals
from notification_outbox import worker as worker_room
from notification_outbox.database import DatabaseThread
from notification_outbox.management.commands import run_outbox_worker
from notification_outbox.management.commands.run_outbox_worker import rare_collections
from notification_outbox.models import OutboxMessage
from notification_outbox.worker import Worker
from tests.processes import Outbox, wait_until
from tests.receiver import Received

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "second"])


def enqueue_elsewhere(outbox: Outbox) -> None:
    """Enqueue in another thread, which keeps no connection."""
    outbox.enqueue()
    connection.close()


def test_max_messages_are_delivered_and_no_more(outbox: Outbox) -> None:
    """A worker that is renewed now and then leaves by itself; what it claimed is finished."""
    outbox.enqueue(10)
    process = outbox.start("--max-messages", "4", "--concurrency", "2")
    assert process.wait() == 0
    assert outbox.states() == {"delivered": 4, "pending": 6}


def test_max_runtime_stops_like_sigterm(outbox: Outbox) -> None:
    """What runs may end, what waits is handed back, exit 0."""
    gate = threading.Event()

    def held(received: Received) -> int:
        gate.wait(60)
        return 200

    outbox.receiver.answer = held
    outbox.enqueue(3)
    process = outbox.start("--max-runtime", "1", "--concurrency", "1")
    outbox.receiver.wait_for(1)
    wait_until(lambda: outbox.states().get("pending") == 2, "the rest handed back")
    gate.set()
    assert process.wait() == 0
    assert outbox.states() == {"delivered": 1, "pending": 2}


def test_the_worker_id_marks_leases_and_attempts(outbox: Outbox) -> None:
    """An operator sees which worker holds or tried a message."""
    gate = threading.Event()

    def held(received: Received) -> int:
        gate.wait(60)
        return 503

    outbox.receiver.answer = held
    (receipt,) = outbox.enqueue()
    process = outbox.start("--once", "--worker-id", "blue-7")
    outbox.receiver.wait_for(1)
    assert outbox.row(receipt).leased_by == "blue-7"
    gate.set()
    assert process.wait() == 0
    assert outbox.row(receipt).timeline.get().worker == "blue-7"


def test_the_poll_interval_flag_overrides_the_setting(outbox: Outbox) -> None:
    """An idle worker finds new messages within it."""
    outbox.configure(root={"POLL_INTERVAL": "1h"})
    worker = Worker(conf.get(), using="default", poll_interval=0.05)

    async def scenario() -> None:
        running = asyncio.create_task(worker.run())
        # long enough for its pauses to have grown to the interval
        await asyncio.sleep(0.5)
        await asyncio.to_thread(enqueue_elsewhere, outbox)
        await asyncio.to_thread(outbox.receiver.wait_for, 1, 10)
        worker.stop()
        await running

    asyncio.run(scenario())


def test_the_liveness_file_is_touched_while_all_workers_go_round(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle or with a database away the process is well; with one worker hung in its database it is not."""
    monkeypatch.setattr(run_outbox_worker, "SHOW_LIFE_EVERY", 0.02)
    file = tmp_path / "alive"
    outbox.configure(root={"POLL_INTERVAL": 0.05})
    hang, entered = threading.Event(), threading.Event()
    workers = [Worker(conf.get(), using=alias) for alias in ("default", "second")]
    next_due = leases.next_due

    def hanging(publishers: Any, *, using: str) -> float | None:
        if using == "second":
            entered.set()
            hang.wait(60)
        return next_due(publishers, using=using)

    def age() -> int:
        return file.stat().st_mtime_ns

    async def touched_again() -> None:
        before = age()
        await asyncio.to_thread(wait_until, lambda: age() > before, "a touch")

    async def scenario() -> None:
        running = [asyncio.create_task(worker.run()) for worker in workers]
        living = asyncio.create_task(run_outbox_worker.show_life(file, workers))
        await asyncio.to_thread(wait_until, file.exists, "the file")
        await touched_again()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leases, "next_due", hanging)
            assert await asyncio.to_thread(entered.wait, 10)
            # what it did before it hung may still be shown once
            await asyncio.sleep(0.2)
            before, went = age(), workers[0].went_round_at
            await asyncio.to_thread(
                wait_until, lambda: workers[0].went_round_at > went + 0.3, "the other one"
            )
            assert age() == before
            hang.set()
        await touched_again()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        living.cancel()

    asyncio.run(scenario())


def test_recovery_waits_after_an_outage(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks first when the database is back would take what others delivered and are about to record."""
    pause = 0.5
    monkeypatch.setattr(worker_room, "AWAY_PAUSE", (0.02, pause))
    monkeypatch.setattr(worker_room, "RECOVER_EVERY", 0.05)
    outbox.configure(root={"POLL_INTERVAL": 0.05})
    recover = leases.recover
    recovered: list[float] = []
    away = False

    def recovering(*arguments: Any, **named: Any) -> leases.Recovered:
        if away:
            raise OperationalError
        recovered.append(time.monotonic())
        return recover(*arguments, **named)

    def asked(*arguments: Any, **named: Any) -> Any:
        raise OperationalError

    async def scenario(worker: Worker) -> None:
        nonlocal away
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(wait_until, lambda: len(recovered) > 1, "a recovery")
        with pytest.MonkeyPatch.context() as patch:
            away = True
            for question in ("claim", "next_due"):
                patch.setattr(leases, question, asked)
            await asyncio.sleep(0.3)
        before = len(recovered)
        away = False
        back = time.monotonic()
        await asyncio.to_thread(wait_until, lambda: len(recovered) > before, "the next recovery")
        assert recovered[before] - back >= pause
        worker.stop()
        await running

    monkeypatch.setattr(leases, "recover", recovering)
    # an outage may begin with any question
    for _ in range(5):
        recovered.clear()
        asyncio.run(scenario(Worker(conf.get(), using="default")))


def test_a_worker_of_several_databases_ends_when_the_last_is_empty(outbox: Outbox) -> None:
    """However long its pauses may grow: what the one has in hand is no reason for the other to sleep."""
    outbox.enqueue(20)
    with transaction.atomic(using="second"):
        for n in range(20):
            enqueue("order.paid", {"n": n}, to=outbox.receiver.url("/hooks"), using="second")
    began = time.monotonic()
    process = outbox.start(
        "--until-empty", "--poll-interval", "60", "--database", "default", "--database", "second"
    )
    assert process.wait() == 0
    assert time.monotonic() - began < 20
    assert len(outbox.receiver.requests) == 40


def test_a_liveness_file_that_cannot_be_written_is_said_at_once(outbox: Outbox, tmp_path: Path) -> None:
    """A wrong path would look like a hanging worker for ever."""
    with pytest.raises(CommandError, match="liveness file cannot be written"):
        call_command("run_outbox_worker", "--once", "--liveness-file", str(tmp_path / "no" / "alive"))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--concurrency", "0"], "expected a whole number from 1"),
        (["--concurrency", "2.5"], "expected a whole number from 1"),
        (["--max-messages", "-1"], "expected a whole number from 1"),
        (["--shutdown-timeout", "soon"], "expected a number from 0"),
        (["--poll-interval", "0"], "expected a number from 0.01"),
        (["--worker-id", "a\nb"], "expected 1 to 255 printable characters"),
        (["--once", "--until-empty"], "not allowed with"),
    ],
)
def test_a_wrong_argument_is_answered_with_its_rule(arguments: list[str], rule: str) -> None:
    """The flag and what it accepts."""
    with pytest.raises(CommandError, match=rule):
        call_command("run_outbox_worker", *arguments)


def test_a_copy_that_may_reach_some_hosts_leaves_the_others_waiting(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """``DELIVER`` with a list: the rest is looked at with growing pauses, unattempted."""
    outbox.configure({"allow_hosts": [outbox.receiver.host]}, root={"DELIVER": ["localhost"]})
    (mine,) = outbox.enqueue()
    (other,) = outbox.enqueue(to="https://hooks.acme.com/")
    OutboxMessage.objects.update(due_at=F("due_at") - timedelta(seconds=800))
    outbox.work()
    row = outbox.row(other)
    assert (outbox.row(mine).state, row.state) == ("delivered", "pending")
    assert (row.attempts, row.last_error) == (0, "not_delivered_here")
    assert 99 < (row.available_at - row.updated_at).total_seconds() < 110
    assert "DELIVER: only to localhost" in caplog.text


def test_a_copy_that_may_reach_nobody_touches_nothing(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """``DELIVER = "none"``: a staging copy of production data sends nothing and moves nothing."""
    outbox.configure(root={"DELIVER": "none"})
    outbox.enqueue()
    before = OutboxMessage.objects.values().get()
    outbox.work()
    assert OutboxMessage.objects.values().get() == before
    assert outbox.receiver.connections == 0
    assert "DELIVER: only to nobody" in caplog.text


@contextmanager
def listening(*heard: Signal) -> Iterator[list[tuple[Signal, dict[str, Any]]]]:
    """Collect what the signals carry."""
    calls: list[tuple[Signal, dict[str, Any]]] = []

    def hear(sender: Any, signal: Signal, **carried: Any) -> None:
        assert sender is Worker
        calls.append((signal, carried))

    for signal in heard:
        signal.connect(hear)
    try:
        yield calls
    finally:
        for signal in heard:
            signal.disconnect(hear)


def test_signals_tell_what_became_of_messages_after_the_commit(outbox: Outbox) -> None:
    """Delivered, quarantined, expired: ids only, sent where the ORM may be used."""
    outbox.configure(MAX_REJECTIONS=1)
    outbox.receiver.answer = lambda received: 400 if received.target == "/bad" else 200
    (good,) = outbox.enqueue()
    (bad,) = outbox.enqueue(path="/bad")
    (late,) = outbox.enqueue()
    OutboxMessage.objects.filter(id=late.id).update(available_at=Now(), retry_until=Now())
    states: list[str] = []

    def look(message_id: str, using: str, **carried: Any) -> None:
        row = OutboxMessage.objects.using(using).get(id=carried["id"])
        assert row.message_id == message_id
        states.append(row.state)

    ended = (signals.message_delivered, signals.message_quarantined, signals.message_expired)
    for signal in ended:
        signal.connect(look)
    try:
        with listening(*ended) as calls:
            outbox.work()
    finally:
        for signal in ended:
            signal.disconnect(look)
    expected = [
        (signal, {"id": one.id, "message_id": one.message_id, "using": "default"})
        for signal, one in zip(ended, (good, bad, late), strict=True)
    ]
    assert sorted(calls, key=lambda call: call[1]["id"]) == expected
    assert sorted(states) == ["delivered", "expired", "quarantined"]


def test_signals_tell_when_a_worker_starts_and_stops(outbox: Outbox) -> None:
    """Once each, with its name."""
    with listening(signals.worker_started, signals.worker_stopped) as calls:
        outbox.work(worker_id="blue-7")
    carried = {"worker_id": "blue-7", "using": "default"}
    assert calls == [(signals.worker_started, carried), (signals.worker_stopped, carried)]


def test_slow_receivers_are_told_everything_before_the_worker_leaves(outbox: Outbox) -> None:
    """A stop waits for them as it does for deliveries."""

    def wait(**carried: Any) -> None:
        time.sleep(0.02)

    signals.message_delivered.connect(wait)
    try:
        with listening(signals.message_delivered, signals.worker_stopped) as calls:
            outbox.enqueue(100)
            outbox.work()
    finally:
        signals.message_delivered.disconnect(wait)
    assert [signal for signal, _ in calls] == [signals.message_delivered] * 100 + [signals.worker_stopped]


def test_a_receiver_that_fails_or_hangs_stops_nothing(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Signals are told, not obeyed: deliveries go on and the worker leaves, saying what it did not tell."""
    hang = threading.Event()

    def fail(**carried: Any) -> None:
        raise ValueError

    def wait(**carried: Any) -> None:
        hang.wait(60)

    signals.message_delivered.connect(fail)
    signals.message_delivered.connect(wait)
    try:
        outbox.enqueue(300)
        began = time.monotonic()
        outbox.work(shutdown_timeout=1)
        assert time.monotonic() - began < 30
        assert "receivers of signals did not end in time" in caplog.text
    finally:
        hang.set()
        signals.message_delivered.disconnect(fail)
        signals.message_delivered.disconnect(wait)
    assert outbox.states() == {"delivered": 300}


def test_the_reloader_starts_anew_when_the_code_changes_and_drains_first(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--reload``: what was in hand is handed back, not left to its lease."""
    module = tmp_path / "edited_by_test.py"
    module.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OUTBOX_TEST_IMPORT", "edited_by_test")
    outbox.receiver.answer = lambda received: threading.Event().wait(60) or 200
    outbox.enqueue(3)
    process = outbox.start("--reload", "--concurrency", "1", "--shutdown-timeout", "0.2", log_level="DEBUG")
    outbox.receiver.wait_for(1)
    # an edit before the reloader's first look would be taken for what was there
    wait_until(lambda: f"{module} first seen" in process.log, "the reloader to look")
    first = OutboxMessage.objects.get(state="in_flight", id=OutboxMessage.objects.earliest("id").id).leased_by
    outbox.receiver.answer = lambda received: 200
    module.write_text("changed = True\n")
    wait_until(lambda: outbox.states() == {"delivered": 3}, "the second life")
    assert process.log.count(" serves default ") == 2
    assert first in process.log
    assert not OutboxMessage.objects.filter(lost_leases__gt=0).exists()
    # its child goes with it
    process.terminate()
    process.wait()


class Stubborn(Publisher):
    """A publisher that will not be stopped: it swallows its cancellation, or waits in a thread."""

    async def publish(self, message: Message) -> None:
        if message.destination == "thread":
            await asyncio.to_thread(threading.Event().wait, 60)
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


@pytest.mark.parametrize("way", ["swallow", "thread"])
def test_a_publisher_that_will_not_be_stopped_cannot_keep_the_process(outbox: Outbox, way: str) -> None:
    """Its message is handed back, and the worker leaves by 0 within a few seconds."""
    outbox.raw = {
        "PUBLISHERS": {"default": {"BACKEND": "tests.test_worker_options.Stubborn", "ATTEMPT_TIMEOUT": 50}}
    }
    outbox.configure_settings(**outbox.raw)
    (receipt,) = outbox.enqueue(to=way)
    process = outbox.start("--shutdown-timeout", "0.2")
    wait_until(lambda: outbox.row(receipt).state == "in_flight", "the delivery")
    process.terminate()
    began = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - began < 15
    row = outbox.row(receipt)
    assert (row.state, row.attempts) == ("pending", 0)


def test_a_worker_of_several_databases_leaves_the_others_alone_while_one_is_away(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The company that a suspect must not have is not waited for without end."""
    outbox.configure(ATTEMPT_TIMEOUT=0.2, LEASE=2.2)
    away = threading.Event()
    real = leases.claim

    def claim(*arguments: Any, using: str, **named: Any) -> Any:
        if using == "second" and away.is_set():
            raise OperationalError("connection refused")
        return real(*arguments, using=using, **named)

    monkeypatch.setattr(leases, "claim", claim)
    away.set()

    async def scenario() -> None:
        workers = [Worker(using=alias, poll_interval=0.05) for alias in ("second", "default")]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        # some pauses of the one that is away
        await asyncio.sleep(1.0)
        await asyncio.to_thread(enqueue_elsewhere, outbox)
        await asyncio.to_thread(outbox.receiver.wait_for, 1, 10)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)

    asyncio.run(scenario())


@pytest.mark.databases("postgresql")
def test_the_kernel_probes_a_silent_database() -> None:
    """A server that failed over without a word is noticed in half a minute, not in two hours."""

    def options(*, using: str) -> tuple[int, int]:
        with socket.socket(fileno=socket.dup(connection.connection.fileno())) as peer:
            return (
                peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            )

    async def scenario() -> tuple[int, int]:
        thread = DatabaseThread("default", "test")
        try:
            return await thread(options)
        finally:
            await thread.close()

    assert asyncio.run(scenario()) == (1, database.KEEPALIVE_INTERVAL)


def test_garbage_is_looked_for_seldom_while_a_worker_runs() -> None:
    """And as before once it returned: the process may be somebody else's."""
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] > 10_000
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
