"""The cost of claiming and settling in a full table, against that in a small one."""

from __future__ import annotations

from functools import partial

from django.db import connections, transaction
from tqdm import tqdm

from notification_outbox import enqueue, leases
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Outcome, Verdict
from notification_outbox.models import OutboxMessage

from .databases import database
from .measuring import Bar, Result, medians, wall

LIVE = {"small": 10_000, "large": 1_000_000}  # and as many delivered ones that are kept
BATCH, BATCHES = 100, 10
ROUNDS = 15  # many short ones: another load on the machine then meets both alike
CHUNK = 50_000
# enqueued over the last hour, and in no order: retries and delays mix what is due
CHANGES = {"dedup_id": "gen_random_uuid()", "available_at": "now() - random() * interval '1 hour'"}
STATES = {
    "pending": {"state": "'pending'", "settled_at": "NULL"},
    "delivered": {"state": "'delivered'", "settled_at": "now()"},
}


def bench_claim() -> Result:
    """Wall time of a row claimed and settled among 1 M due and 1 M delivered rows, and among 10 k of each."""
    with database("small"), database("large"):
        for alias, rows in LIVE.items():
            fill(alias, rows)

        def refill() -> None:
            for alias in LIVE:
                copies(alias, "pending", BATCH * BATCHES)

        # what was delivered comes in again between the rounds, as in life
        contestants = {alias: partial(deliver, alias) for alias in LIVE} | {"refill": refill}
        spent = medians(contestants, wall, rounds=ROUNDS)
    return Result(
        ratios={"large/small": spent["large"] / spent["small"]},
        bars={"large/small": Bar("at most", 1.5)},
    )


def deliver(alias: str) -> None:
    """Claim and settle as a worker does, but for the delivery between."""
    for _ in range(BATCHES):
        claims = leases.claim(
            "default", limit=BATCH, budget=2**26, worker="bench", lease=60.0, using=alias
        ).claims
        if len(claims) < BATCH:
            raise SystemExit(f"bench: {len(claims)} of {BATCH} rows could be claimed")
        leases.settle([Settlement(claim, Outcome(Verdict.DELIVERED)) for claim in claims], using=alias)


def fill(alias: str, rows: int) -> None:
    """Store ``rows`` delivered messages and as many due ones, with progress on stderr."""
    with transaction.atomic(using=alias):
        enqueue("bench", {"order": 7}, to="https://hooks.acme.com/shop", using=alias)
    with tqdm(total=2 * rows, unit=" rows", desc=f"filling {alias}") as bar:
        for state in ("delivered", "pending"):
            for _ in range(0, rows, CHUNK):
                bar.update(copies(alias, state, min(rows, CHUNK)))
    with connections[alias].cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {OutboxMessage._meta.db_table}")


def copies(alias: str, state: str, count: int) -> int:
    """Store copies of the first row, good for claiming, not for opening; return how many."""
    table = OutboxMessage._meta.db_table
    changes = CHANGES | STATES[state]
    columns = [field.column for field in OutboxMessage._meta.concrete_fields if field.column != "id"]
    values = ", ".join(changes.get(column, column) for column in columns)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} "
            f"FROM (SELECT * FROM {table} ORDER BY id LIMIT 1) AS first, generate_series(1, %s)",
            [count],
        )
        return cursor.rowcount
