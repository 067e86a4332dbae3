"""Benches: what the outbox costs, as ratios of things measured in the same run.

Started by ``run.py bench [NAME ...] [--json]`` with DATABASE_URL naming a PostgreSQL server; works in a database of
its own there. Each bench plays its contestants in turns, several rounds, and compares medians: times of a shared
machine mean little, ratios of one run a lot. ``--json`` prints one line a bench:
``{"bench", "ratios", "bars", "ok"}``.

Exit codes: 0 every bar is held, 1 one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import django

ROUNDS = 7
ROWS = 1000


class Result(NamedTuple):
    """A bench's ratios and the bar that each must not pass."""

    ratios: dict[str, float]
    bars: dict[str, float]

    @property
    def ok(self) -> bool:
        return all(self.ratios[name] <= bar for name, bar in self.bars.items())


def cpu(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process spends on the work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def medians(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Let the contestants play in turns; return each one's median CPU. The first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(ROUNDS + 1):
        for name, work in contestants.items():
            spent = cpu(work)
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
        bars={"enqueue/create": 1.6, "enqueue_many/enqueue": 0.5},
    )


BENCHES: dict[str, Callable[[], Result]] = {"enqueue": bench_enqueue}


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
        print(json.dumps({"bench": name, "ratios": ratios, "bars": result.bars, "ok": result.ok}), flush=True)
        return
    for ratio, value in ratios.items():
        bar = result.bars.get(ratio)
        verdict = (
            "" if bar is None else f"  bar {bar:g}  {'held' if result.ratios[ratio] <= bar else 'MISSED'}"
        )
        print(f"  {ratio:<24}{value:>8.2f}{verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
