"""Workers that are killed, databases that go away or hang: nothing is lost, little is sent twice, nobody is stuck."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from notification_outbox import housekeeping, leases
from notification_outbox.asking import LAST_ANSWER
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from notification_outbox.worker import Worker
from tests.processes import ROOT, Outbox, Started, database_url, wait_until
from tests.receiver import Received

pytestmark = pytest.mark.django_db(transaction=True)

QUICK: dict[str, Any] = {"ATTEMPT_TIMEOUT": 1, "LEASE": 3}
TABLE = OutboxMessage._meta.db_table
# so many equal looks in a row, 50 ms apart, say that a dead process's last transaction has ended
STABLE = 10
# what a stop may take beyond the shutdown timeout when its database is mute, on a busy machine
STOP = 3 * LAST_ANSWER + 6


def sent(outbox: Outbox) -> Counter[str]:
    """Return how often each message id arrived."""
    return Counter(
        (received.header("idempotency-key") or "").strip('"') for received in outbox.receiver.requests
    )


def in_flight(worker_id: str) -> set[int]:
    """Return what a dead worker held, once what its last statement was about is committed or gone."""
    rows = OutboxMessage.objects.filter(state="in_flight", leased_by=worker_id).order_by("id")
    seen: list[list[int]] = []
    while len(seen) < STABLE or any(one != seen[-1] for one in seen[-STABLE:]):
        time.sleep(0.05)
        seen.append(list(rows.values_list("id", flat=True)))
    return set(seen[-1])


@pytest.mark.databases("postgresql", "mysql")
def test_workers_killed_at_random_lose_nothing_and_repeat_only_what_they_held(outbox: Outbox) -> None:
    """3,000 deliveries by four workers, each killed and restarted: all arrive, and attempts add up."""
    dice = random.Random(4)
    # longer than a busy machine keeps a renewal waiting
    outbox.configure(ATTEMPT_TIMEOUT=1, LEASE=6)

    async def answer(received: Received) -> int:
        await asyncio.sleep(0.02)
        return 200

    outbox.receiver.answer = answer
    receipts = {one.id: one for one in outbox.enqueue(3000)}
    names = iter(range(1000))

    def start() -> tuple[str, Started]:
        name = f"worker-{next(names)}"
        return name, outbox.start("--worker-id", name, "--concurrency", "16", "--until-empty")

    workers = [start() for _ in range(4)]
    held: Counter[int] = Counter()
    for threshold in sorted(dice.sample(range(100, 2600), 8)):
        outbox.receiver.wait_for(threshold, 60)
        place = dice.randrange(4)
        name, process = workers[place]
        process.kill()
        held.update(in_flight(name))
        workers[place] = start()
    assert [process.wait() for _, process in workers] == [0] * 4
    assert outbox.states() == {"delivered": 3000}
    assert held
    arrived = sent(outbox)
    assert set(arrived) == {one.message_id for one in receipts.values()}
    # on a busy machine an answer may come too late: that attempt is remembered
    failed = Counter(DeliveryAttempt.objects.values_list("message_id", flat=True))
    for row_id, attempts in OutboxMessage.objects.values_list("id", "attempts"):
        assert attempts == 1 + held[row_id] + failed[row_id]
        assert arrived[receipts[row_id].message_id] <= attempts


class Cluster:
    """A PostgreSQL of the test's own, which it may stop."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.url = server.url("postgres")
        self.environment = {
            **os.environ,
            "DATABASE_URL": self.url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        self.python(
            "import django; django.setup()\n"
            "from django.core.management import call_command\n"
            "call_command('migrate', verbosity=0)"
        )

    def python(self, code: str, **environment: str) -> str:
        """Run code against the cluster and return what it printed."""
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**self.environment, **environment},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def enqueue(self, outbox: Outbox, count: int) -> None:
        self.python(
            "import os, django; django.setup()\n"
            "from django.db import transaction\n"
            "from notification_outbox import enqueue\n"
            "with transaction.atomic():\n"
            f"    for n in range({count}): enqueue('t', {{'n': n}}, to={outbox.receiver.url('/')!r})",
            OUTBOX_TEST_SETTINGS=outbox.settings_text(),
        )

    def states(self) -> dict[tuple[str, int], int]:
        """Return how many messages there are by state and attempts."""
        with psycopg.connect(self.url) as own:
            found = own.execute(f"SELECT state, attempts, count(*) FROM {TABLE} GROUP BY 1, 2").fetchall()
        return {(state, attempts): count for state, attempts, count in found}

    def stop(self) -> None:
        self.server.stop("immediate")

    def start(self) -> None:
        self.server.start(lambda line: None)


@contextmanager
def cluster() -> Iterator[Cluster]:
    sys.path.insert(0, str(ROOT / "example_project"))
    try:
        import private_postgres
    finally:
        sys.path.pop(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with private_postgres.own(lambda line: None, port) as server:
        yield Cluster(server)


def cpu_seconds(process: Started) -> float:
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.databases("postgresql")
def test_a_database_stopped_for_longer_than_a_lease_loses_and_repeats_nothing(outbox: Outbox) -> None:
    """The same worker goes on, records what it delivered meanwhile, says it once, and did not spin."""
    lease = QUICK["LEASE"]
    outbox.configure(**QUICK)
    gate = threading.Event()

    def answer(received: Received) -> int:
        # those in hand when the database goes are answered while it is away
        if len(outbox.receiver.requests) > 200:
            gate.wait(0.9)
        return 200

    outbox.receiver.answer = answer
    with cluster() as own:
        own.enqueue(outbox, 1000)
        process = outbox.start("--until-empty", "--concurrency", "16", DATABASE_URL=own.url)
        outbox.receiver.wait_for(210)
        own.stop()
        gate.set()
        wait_until(lambda: "database away role=settle" in process.log, "the outage to be noticed")
        spent = cpu_seconds(process)
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped + 1.5 * lease, "more than a lease", 60)
        assert cpu_seconds(process) - spent < 0.5
        own.start()
        assert process.wait() == 0
        assert own.states() == {("delivered", 1): 1000}
    assert set(sent(outbox).values()) == {1}
    assert process.log.count("database away role=settle") == 1
    for role in ("claim", "settle"):
        assert process.log.count(f"database away role={role}") <= 1
        assert process.log.count(f"database back role={role}") == process.log.count(
            f"database away role={role}"
        )


@pytest.mark.databases("postgresql")
def test_several_workers_repeat_only_what_was_in_flight_when_the_database_went(outbox: Outbox) -> None:
    """Whoever asks first when it is back takes the ended leases of all; nothing else is sent again."""
    outbox.configure(**QUICK)

    async def answer(received: Received) -> int:
        await asyncio.sleep(0.05)
        return 200

    outbox.receiver.answer = answer
    with cluster() as own:
        own.enqueue(outbox, 1000)
        workers = [
            outbox.start("--until-empty", "--concurrency", "16", DATABASE_URL=own.url) for _ in range(3)
        ]
        outbox.receiver.wait_for(300)
        own.stop()
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped + 1.5 * QUICK["LEASE"], "more than a lease")
        # none may ask before we have seen what the database remembers
        for worker in workers:
            worker.popen.send_signal(signal.SIGSTOP)
        own.start()
        with psycopg.connect(own.url) as other:
            found = other.execute(f"SELECT dedup_id FROM {TABLE} WHERE state = 'in_flight'").fetchall()
        for worker in workers:
            worker.popen.send_signal(signal.SIGCONT)
        assert [worker.wait() for worker in workers] == [0, 0, 0]
        assert {state for state, _ in own.states()} == {"delivered"}
    arrived = sent(outbox)
    assert len(arrived) == 1000
    assert {name for name, times in arrived.items() if times > 1} <= {f"msg_{name.hex}" for (name,) in found}
    assert max(arrived.values()) <= 2


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("number", [signal.SIGSTOP, None])
def test_a_database_that_hangs_does_not_hold_a_worker_that_is_told_to_stop(
    outbox: Outbox, number: signal.Signals | None
) -> None:
    """A frozen server or a lock on the whole table: it leaves in time, by 4, saying what it could not record."""
    gate = threading.Event()

    def answer(received: Received) -> int:
        if len(outbox.receiver.requests) > 1:
            gate.wait(60)
        return 200

    outbox.receiver.answer = answer
    with cluster() as own:
        own.enqueue(outbox, 1)
        process = outbox.start("--shutdown-timeout", "1", "--poll-interval", "0.05", DATABASE_URL=own.url)
        # by then each of its connections is open
        wait_until(lambda: own.states() == {("delivered", 1): 1}, "the first to be recorded")
        own.enqueue(outbox, 3)
        outbox.receiver.wait_for(4)
        with psycopg.connect(own.url) as other:
            if number is None:
                other.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
            others = "SELECT pid FROM pg_stat_activity WHERE client_port > 0 AND pid <> pg_backend_pid()"
            backends = [pid for (pid,) in other.execute(others).fetchall()]
            if number is not None:
                for pid in backends:
                    os.kill(pid, number)
            try:
                gate.set()
                began = time.monotonic()
                process.terminate()
                assert process.wait() == 4
                assert time.monotonic() - began < 1 + STOP
            finally:
                if number is not None:
                    for pid in backends:
                        os.kill(pid, signal.SIGCONT)
        assert "outbox stop unrecorded=3" in process.log
        assert "3 outcomes could not be recorded" in process.log


@pytest.mark.databases("postgresql")
def test_a_worker_with_nothing_in_hand_leaves_a_database_that_hangs_in_peace(outbox: Outbox) -> None:
    """Its question stays unanswered, which it says; nothing is unrecorded, so it exits 0."""
    process = outbox.start("--poll-interval", "0.05")
    outbox.enqueue()
    wait_until(lambda: outbox.states() == {"delivered": 1}, "the first to be recorded")
    with psycopg.connect(database_url()) as other:
        other.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
        wait_until(lambda: other.execute(waiting, [TABLE]).fetchone() != (0,), "the worker to ask")
        began = time.monotonic()
        process.terminate()
        assert process.wait() == 0
        assert time.monotonic() - began < STOP
    assert "outbox stop: the database does not answer" in process.log
    assert "unrecorded" not in process.log


def test_sigterm_with_many_slow_deliveries_leaves_no_lease(outbox: Outbox) -> None:
    """Of 64 running ones those inside the timeout are delivered, the rest are released unattempted; exit 0."""
    gate = threading.Event()

    def answer(received: Received) -> int:
        gate.wait(60)
        if b'"n":1' not in received.body:
            threading.Event().wait(60)
        return 200

    outbox.receiver.answer = answer
    outbox.enqueue(70)
    process = outbox.start("--concurrency", "64", "--shutdown-timeout", "2")
    outbox.receiver.wait_for(64)
    process.terminate()
    wait_until(lambda: outbox.states().get("in_flight") == 64, "the rest handed back")
    gate.set()
    assert process.wait() == 0
    # 1 and 10 to 19 answered
    assert outbox.states() == {"delivered": 11, "pending": 59}
    left = OutboxMessage.objects.filter(state="pending")
    assert set(left.values_list("attempts", "leased_by", "lease_token")) == {(0, "", None)}


def failures() -> int:
    """Return how many transactions of this database have failed so far, where the server counts them."""
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


ENQUEUE = """
import sys, django; django.setup()
from django.db import transaction
from notification_outbox import enqueue
for n in range(100):
    with transaction.atomic():
        enqueue("t", {"n": n}, to=sys.argv[1], account_id=sys.argv[2])
"""


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_stricter_default_isolation_brings_no_failures(outbox: Outbox, isolation: str) -> None:
    """Two workers and two enqueuing processes at REPEATABLE READ or SERIALIZABLE never fail one another."""
    environment = {
        "DATABASE_URL": database_url(),
        "OUTBOX_TEST_ISOLATION": isolation,
        "OUTBOX_TEST_SETTINGS": outbox.settings_text(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    failed = failures()
    enqueuers = [
        subprocess.Popen(
            [sys.executable, "-c", ENQUEUE, outbox.receiver.url("/"), account],
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        for account in ("a", "b")
    ]
    workers = [outbox.start("--poll-interval", "0.05", OUTBOX_TEST_ISOLATION=isolation) for _ in range(2)]
    assert [process.wait(60) for process in enqueuers] == [0, 0]
    wait_until(lambda: outbox.states() == {"delivered": 200}, "all to be delivered")
    for worker in workers:
        worker.terminate()
        assert worker.wait() == 0
        assert "away" not in worker.log
    assert set(sent(outbox).values()) == {1}
    # a single failure is repeated without a word
    assert failures() == failed


def test_a_purge_that_hangs_delays_no_delivery_and_no_stop(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Housekeeping has a thread of its own, which a stop does not wait for."""
    hang = threading.Event()
    entered = threading.Event()

    def hanging(**arguments: Any) -> int:
        entered.set()
        hang.wait(60)
        return 0

    monkeypatch.setattr(leases, "purge", hanging)
    monkeypatch.setattr(housekeeping, "EVERY", 0.02)
    outbox.enqueue(20)
    began = time.monotonic()
    try:
        outbox.work()
        took = time.monotonic() - began
    finally:
        hang.set()
    assert entered.is_set()
    assert outbox.states() == {"delivered": 20}
    assert took < 10


def test_a_worker_cancelled_in_an_applications_loop_hands_back_what_it_holds(outbox: Outbox) -> None:
    """The cancellation goes on, no lease is left and nothing was attempted."""
    gate = threading.Event()

    def answer(received: Received) -> int:
        gate.wait(60)
        return 200

    outbox.receiver.answer = answer
    outbox.enqueue(5)

    async def scenario() -> None:
        running = asyncio.create_task(Worker(concurrency=2).run())
        await asyncio.to_thread(outbox.receiver.wait_for, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)

    asyncio.run(scenario())
    gate.set()
    assert set(OutboxMessage.objects.values_list("state", "attempts", "leased_by")) == {("pending", 0, "")}
    connection.close()


@pytest.mark.parametrize("moment", ["claiming", "draining"])
def test_a_cancellation_at_an_awkward_moment_leaves_no_lease_either(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """While a claim is under way, or while a stopped worker still waits for answers: all is handed back."""
    gate, asked = threading.Event(), threading.Event()

    def answer(received: Received) -> int:
        gate.wait(60)
        return 200

    def slow_claim(*arguments: Any, **named: Any) -> leases.Claimed:
        claimed = claim(*arguments, **named)
        asked.set()
        if moment == "claiming":
            # committed, and on its way back when the cancellation comes
            time.sleep(0.1)
        return claimed

    claim = leases.claim
    monkeypatch.setattr(leases, "claim", slow_claim)
    outbox.receiver.answer = answer
    outbox.enqueue(3)

    def the_stop_is_taken() -> None:
        wait_until(lambda: outbox.states() == {"in_flight": 2, "pending": 1}, "the rest handed back")
        connection.close()

    async def scenario() -> None:
        worker = Worker(concurrency=2)
        running = asyncio.create_task(worker.run())
        if moment == "claiming":
            await asyncio.to_thread(asked.wait, 20)
        else:
            await asyncio.to_thread(outbox.receiver.wait_for, 2)
            worker.stop()
            await asyncio.to_thread(the_stop_is_taken)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
        assert worker.unrecorded == 0

    try:
        asyncio.run(scenario())
    finally:
        gate.set()
    assert set(OutboxMessage.objects.values_list("state", "attempts", "leased_by")) == {("pending", 0, "")}
    connection.close()
