"""Benches: what the outbox costs, as ratios of things measured in the same run.

Started by ``run.py bench [NAME ...] [--json]`` with DATABASE_URL naming a PostgreSQL server; works in a database of
its own there. Each bench plays its contestants in turns, several rounds, and compares medians: times of a shared
machine mean little, ratios of one run a lot. ``--json`` prints one line a bench:
``{"bench", "ratios", "bars", "ok"}``.

Exit codes: 0 every bar is held, 1 one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import django
import trustme
from django.test import override_settings

HERE = Path(__file__).resolve().parent
ROUNDS = 7
ROWS = 1000


class Bar(NamedTuple):
    """What a ratio is held to: ``at most`` or ``at least`` so much."""

    sense: str
    value: float

    def held(self, ratio: float) -> bool:
        return ratio <= self.value if self.sense == "at most" else ratio >= self.value

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"


class Result(NamedTuple):
    """A bench's ratios and the bars that some of them are held to."""

    ratios: dict[str, float]
    bars: dict[str, Bar]

    @property
    def ok(self) -> bool:
        return all(bar.held(self.ratios[name]) for name, bar in self.bars.items())


def cpu(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process spends on the work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def wall(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(
    contestants: dict[str, Callable[[], object]],
    measure: Callable[[Callable[[], object]], float] = cpu,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Let the contestants play in turns; return each one's median. The first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, work in contestants.items():
            spent = measure(work)
            if round_:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def bench_enqueue() -> Result:
    """CPU of one row by enqueue(), by enqueue_many(), by the ORM and by psycopg alone, 1 KB sealed."""
    from django.db import connection, transaction

    from notification_outbox import Draft, enqueue, enqueue_many
    from notification_outbox.models import OutboxMessage

    url = "https://hooks.acme.com/shop?token=abc"
    payload = {"order": 7, "lines": [{"sku": f"sku-{n}", "count": n, "price": "10.00"} for n in range(18)]}
    with transaction.atomic():
        sample = OutboxMessage.objects.get(id=enqueue("order.paid", payload, to=url, account_id=7).id)
    columns = {field.attname: getattr(sample, field.attname) for field in sample._meta.fields}
    del columns["id"]
    columns |= {"sealed": bytes(sample.sealed or b""), "content_mac": bytes(sample.content_mac)}
    names = ", ".join(columns)
    insert = f"INSERT INTO {sample._meta.db_table} ({names}) VALUES ({', '.join(['%s'] * len(columns))})"

    def fresh() -> dict[str, Any]:
        now = datetime.now(UTC)
        times = {"due_at": now, "available_at": now, "created_at": now, "updated_at": now}
        return columns | times | {"dedup_id": uuid.uuid4(), "retry_until": now + timedelta(days=3)}

    @contextmanager
    def rolled_back() -> Iterator[None]:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)

    @rolled_back()
    def by_enqueue() -> None:
        for _ in range(ROWS):
            enqueue("order.paid", payload, to=url, account_id=7)

    @rolled_back()
    def by_enqueue_many() -> None:
        enqueue_many(Draft("order.paid", payload, to=url, account_id=7) for _ in range(ROWS))

    @rolled_back()
    def by_create() -> None:
        for _ in range(ROWS):
            OutboxMessage.objects.create(**fresh())

    @rolled_back()
    def by_psycopg() -> None:
        with connection.connection.cursor() as cursor:
            for _ in range(ROWS):
                cursor.execute(insert, list(fresh().values()))

    spent = medians(
        {"enqueue": by_enqueue, "enqueue_many": by_enqueue_many, "create": by_create, "psycopg": by_psycopg}
    )
    return Result(
        ratios={
            "enqueue/create": spent["enqueue"] / spent["create"],
            "enqueue_many/enqueue": spent["enqueue_many"] / spent["enqueue"],
            "enqueue/psycopg": spent["enqueue"] / spent["psycopg"],
            "create/psycopg": spent["create"] / spent["psycopg"],
        },
        bars={"enqueue/create": Bar("at most", 1.6), "enqueue_many/enqueue": Bar("at most", 0.5)},
    )


CONCURRENT = 64
MESSAGES = 3000


@contextmanager
def receiving() -> Iterator[tuple[str, str]]:
    """Start the receiver as a process; yield ``host:port`` and the file of its authority."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        certificate, ca_file = Path(folder) / "certificate.pem", Path(folder) / "ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(ca_file))
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        process = subprocess.Popen(
            [sys.executable, str(HERE / "bench_receiver.py"), str(certificate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield f"localhost:{process.stdout.readline().strip()}", str(ca_file)
        finally:
            process.kill()
            process.communicate()


async def spread_over(count: int, work: Callable[[int], Any]) -> None:
    """Do ``work(n)`` for each n below ``count``, ``CONCURRENT`` at a time."""
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for n in numbers:
            await work(n)

    await asyncio.gather(*(one_after_another() for _ in range(CONCURRENT)))


def bench_throughput() -> Result:
    """Messages a second to a local TLS receiver, 1 KB, signed with ed25519: worker, bare loops, 64 concurrent."""
    import aiohttp
    from django.db import transaction

    from notification_outbox import Draft, conf, enqueue_many
    from notification_outbox.models import OutboxMessage
    from notification_outbox.signing import HttpMessageSigner, SigningRequest
    from notification_outbox.transport import GuardedTransport
    from notification_outbox.urls import DestinationPolicy
    from notification_outbox.worker import Worker

    signer = HttpMessageSigner.from_secret("bench")
    body = b'{"filling":"' + b"x" * 1000 + b'"}'
    with receiving() as (host, ca_file):
        options = {"signer": signer, "ca_file": ca_file, "allow_hosts": [host]}
        policy = DestinationPolicy.from_options(
            ports=[443], allow_hosts=[host], allow_networks=[], insecure_hosts=[]
        )
        target = policy.parse(f"https://{host}/hooks?x=1")

        async def bare_aiohttp() -> None:
            context = ssl.create_default_context(cafile=ca_file)
            connector = aiohttp.TCPConnector(ssl=context, limit=CONCURRENT)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def post(n: int) -> None:
                    async with session.post(target.url, data=body) as response:
                        await response.read()

                await spread_over(MESSAGES, post)

        async def bare_loop() -> None:
            transport = GuardedTransport(policy, timeout=15.0, ca_file=ca_file)
            await transport.open()

            async def post(n: int) -> None:
                name = f"msg_{n:032x}"
                request = SigningRequest(target.url, target.authority, "application/json", body, name, name)
                headers = signer.sign(request, created=int(time.time()), nonce=name)
                await transport.post(target, [("Content-Type", "application/json"), *headers], body)

            await spread_over(MESSAGES, post)
            await transport.close()

        def fill() -> None:
            OutboxMessage.objects.all().delete()
            with transaction.atomic():
                enqueue_many(Draft("bench", body, to=target.url) for _ in range(MESSAGES))

        def worker() -> None:
            asyncio.run(Worker(conf.get(), using="default", concurrency=CONCURRENT, until="empty").run())
            undelivered = OutboxMessage.objects.exclude(state="delivered").count()
            if undelivered:
                raise SystemExit(f"bench: {undelivered} messages were not delivered")

        def measured(work: Callable[[], object]) -> float:
            if work is worker:
                fill()
            return wall(work)

        with override_settings(NOTIFICATION_OUTBOX={"PUBLISHERS": {"default": {"OPTIONS": options}}}):
            spent = medians(
                {
                    "aiohttp": lambda: asyncio.run(bare_aiohttp()),
                    "loop": lambda: asyncio.run(bare_loop()),
                    "worker": worker,
                },
                measured,
                rounds=3,
            )
    return Result(
        ratios={
            "worker/loop": spent["loop"] / spent["worker"],
            "worker/aiohttp": spent["aiohttp"] / spent["worker"],
        },
        bars={"worker/loop": Bar("at least", 0.6), "worker/aiohttp": Bar("at least", 0.4)},
    )


BENCHES: dict[str, Callable[[], Result]] = {"enqueue": bench_enqueue, "throughput": bench_throughput}


@contextmanager
def database() -> Iterator[None]:
    """Make a migrated database beside the one that DATABASE_URL names, and drop it."""
    from django.db import connection

    if connection.vendor != "postgresql":
        sys.exit("bench: the bars are PostgreSQL's; set DATABASE_URL to a PostgreSQL server or to nothing")
    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
    try:
        yield
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run.py bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(BENCHES)}"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each bench")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"there is no bench {', '.join(sorted(unknown))}; there is {', '.join(BENCHES)}")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    missed = False
    with database():
        for name in options.names or BENCHES:
            if not options.json:
                print(f"{name}: {BENCHES[name].__doc__}", flush=True)
            result = BENCHES[name]()
            missed |= not result.ok
            report(name, result, as_json=options.json)
    return int(missed)


def report(name: str, result: Result, *, as_json: bool) -> None:
    ratios = {ratio: round(value, 3) for ratio, value in result.ratios.items()}
    if as_json:
        bars = {ratio: str(bar) for ratio, bar in result.bars.items()}
        print(json.dumps({"bench": name, "ratios": ratios, "bars": bars, "ok": result.ok}), flush=True)
        return
    for ratio, value in ratios.items():
        bar = result.bars.get(ratio)
        verdict = "" if bar is None else f"  {bar}  {'held' if bar.held(result.ratios[ratio]) else 'MISSED'}"
        print(f"  {ratio:<24}{value:>8.2f}{verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
