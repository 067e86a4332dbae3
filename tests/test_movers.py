"""Every mover at once on the same few hundred rows, each with a connection of its own: nobody fails another."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from notification_outbox import Draft, enqueue_many, leases
from notification_outbox.conf import Retention
from notification_outbox.envelope import Claim
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Outcome, QuarantineReason, Verdict
from notification_outbox.models import DeliveryAttempt, OutboxMessage
from tests.processes import wait_until

SECONDS = 8.0
ROWS = 300
# so short that rows come back, expire and are purged while the movers run
LEASE = 0.3
TIME = timedelta(seconds=2)
KEPT = Retention(delivered=timedelta(0), dead=timedelta(seconds=1), attempts=timedelta(hours=1))
OUTCOMES = [
    Outcome(Verdict.DELIVERED),
    Outcome(Verdict.RETRY, error="http_503"),
    Outcome(Verdict.QUARANTINED, reason=QuarantineReason.REJECTED, error="http_400"),
    Outcome(Verdict.RELEASED),
]
_HELD = Q(lease_token__isnull=False) & ~Q(leased_by="")
_FREE = Q(lease_token__isnull=True, leased_by="")
_LIVE = Q(settled_at__isnull=True, quarantine_reason="")
LEGAL = (
    Q(state="in_flight") & _HELD & _LIVE
    | Q(state="pending", available_at__lte=F("retry_until")) & _FREE & _LIVE
    | Q(state__in=["delivered", "expired", "cancelled"], settled_at__isnull=False, quarantine_reason="")
    & _FREE
    | Q(state="quarantined", settled_at__isnull=False) & ~Q(quarantine_reason="") & _FREE
)


class Mover:
    """What one thread does again and again. Each returns how many rows it moved."""

    def __init__(self, held: deque[Claim], seed: int) -> None:
        self._held = held  # shared: others hold the same claims, and some are stale
        self._dice = random.Random(seed)

    def enqueue(self) -> int:
        missing = ROWS - OutboxMessage.objects.count()
        drafts = [Draft("t", {"n": n}, to="https://hooks.acme.com/x") for n in range(missing)]
        with transaction.atomic():
            ids = [receipt.id for receipt in enqueue_many(drafts)]
            OutboxMessage.objects.filter(id__in=ids).update(
                give_up_after=TIME, retry_until=F("due_at") + TIME, available_at=F("due_at")
            )
            # as after a year of retries: what is purged is not what is written
            old = {"started_at": Now() - timedelta(days=365), "duration_ms": 1, "outcome": "retry"}
            DeliveryAttempt.objects.bulk_create(
                DeliveryAttempt(message_id=row_id, number=0, **old) for row_id in ids
            )
        return len(ids)

    def claim(self) -> int:
        limit = self._dice.randint(1, 40)
        claims = leases.claim(
            "default", limit=limit, budget=10**9, worker="w", lease=LEASE, using="default"
        ).claims
        self._held.extend(claims)
        return len(claims)

    def renew(self) -> int:
        claims = self._some_held()
        return len(claims) - len(leases.renew(claims, lease=LEASE, using="default"))

    def settle(self) -> int:
        settlements = [
            Settlement(claim, self._dice.choice(OUTCOMES), "w", 0.01) for claim in self._some_held()
        ]
        return len(settlements) - len(leases.settle(settlements, using="default"))

    def release(self) -> int:
        claims = self._some_held()
        return len(claims) - len(leases.release(claims, using="default"))

    def recover(self) -> int:
        pending, ended = leases.recover("default", limit=50, using="default")
        return pending + len(ended)

    def requeue(self) -> int:
        return leases.requeue(self._some_ids(60), using="default")

    def cancel(self) -> int:
        return leases.cancel(self._some_ids(5), using="default")

    def expunge(self) -> int:
        return leases.expunge(self._some_ids(5), using="default")

    def quarantine(self) -> int:
        return leases.quarantine(self._some_ids(3), using="default")

    def send_now(self) -> int:
        return leases.send_now(self._some_ids(60), using="default")

    def purge_attempts(self) -> int:
        return leases.purge_attempts(retention=KEPT, limit=50, using="default")

    def purge(self) -> int:
        return leases.purge(retention=KEPT, limit=50, using="default")

    def _some_held(self) -> list[Claim]:
        held = {claim.id: claim for claim in self._held.copy()}
        return self._dice.sample(list(held.values()), min(len(held), self._dice.randint(1, 20)))

    def _some_ids(self, most: int) -> list[int]:
        ids = list(OutboxMessage.objects.order_by("id").values_list("id", flat=True))
        return self._dice.sample(ids, min(len(ids), self._dice.randint(1, most)))


# two of those that hold most locks, so that they also meet their own kind
MOVERS = [
    Mover.enqueue,
    Mover.claim,
    Mover.claim,
    Mover.settle,
    Mover.settle,
    Mover.renew,
    Mover.release,
    Mover.recover,
    Mover.requeue,
    Mover.cancel,
    Mover.expunge,
    Mover.quarantine,
    Mover.send_now,
    Mover.purge_attempts,
    Mover.purge,
]
OTHERS = [move for move in MOVERS if move is not Mover.enqueue]


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
def test_all_movers_at_once_never_deadlock_and_leave_every_row_legal() -> None:
    """Eight seconds of everything on the same rows: no database error, everybody moves rows, nothing is stuck."""
    held: deque[Claim] = deque(maxlen=200)
    moved: Counter[str] = Counter()
    errors: list[tuple[str, Exception]] = []
    end = time.monotonic() + SECONDS

    def run(mover: Mover, move: Callable[[Mover], int]) -> None:
        try:
            while time.monotonic() < end:
                try:
                    count = move(mover)
                except Exception as error:
                    errors.append((move.__name__, error))
                else:
                    moved[move.__name__] += count
        finally:
            connections["default"].close()

    Mover(held, 0).enqueue()
    threads = [
        threading.Thread(target=run, args=(Mover(held, seed), move), daemon=True)
        for seed, move in enumerate(MOVERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert all(moved[move.__name__] > 0 for move in MOVERS), moved
    assert not OutboxMessage.objects.exclude(LEGAL).exists()
    wait_until(nothing_waits, "the rest to be delivered or to expire")


def nothing_waits() -> bool:
    """Let a worker's round go by and say whether every row is settled."""
    leases.recover("default", limit=ROWS, using="default")
    claims = leases.claim("default", limit=ROWS, budget=10**9, worker="w", lease=60, using="default").claims
    leases.settle([Settlement(claim, OUTCOMES[0]) for claim in claims], using="default")
    return not OutboxMessage.objects.filter(settled_at__isnull=True).exists()


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("move", dict.fromkeys(OTHERS), ids=lambda move: move.__name__)
def test_an_enqueue_that_is_not_committed_yet_delays_no_mover(move: Callable[[Mover], int]) -> None:
    """A caller's transaction may be long: nobody else looks at its row, also where the table is small."""
    mover = Mover(deque(maxlen=200), 0)
    mover.enqueue()
    mover.claim()
    free = OutboxMessage.objects.filter(state="pending").order_by("id")
    for state in ("delivered", "expired"):
        ids = list(free.values_list("id", flat=True)[:60])
        OutboxMessage.objects.filter(id__in=ids).update(
            state=state, settled_at=Now(), retry_until=Now() - timedelta(days=1)
        )
    OutboxMessage.objects.filter(state="in_flight").update(available_at=Now())
    later = list(free.values_list("id", flat=True)[:60])
    OutboxMessage.objects.filter(id__in=later).update(
        available_at=Now() + timedelta(hours=1), retry_until=Now() + timedelta(hours=1)
    )
    moved: list[int] = []

    def run() -> None:
        try:
            moved.append(move(mover))
        finally:
            connections["default"].close()

    thread = threading.Thread(target=run)
    with transaction.atomic():
        enqueue_many([Draft("t", {}, to="https://hooks.acme.com/x")])
        thread.start()
        thread.join(10)
        waits = thread.is_alive()
    thread.join(60)
    assert not waits
    assert sum(moved) > 0
