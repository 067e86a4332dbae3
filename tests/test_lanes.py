"""A lane at work: how much it keeps in hand, and when it asks for more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from notification_outbox import conf, lanes
from notification_outbox.lanes import ROUNDS_AHEAD, Held, Lane
from notification_outbox.models import OutboxMessage
from tests.processes import Outbox
from tests.receiver import Received

CONCURRENCY = 4


def close(lane: Lane, held: Held, *outcome: Any) -> None:
    lane.close(held)


def lane(settled: Callable[..., None] = close) -> Lane:
    """Return a lane, and no worker around it."""

    def broke(error: BaseException) -> None:
        raise error

    project = conf.get()
    return Lane(project.publisher("default"), project, concurrency=CONCURRENCY, settled=settled, broke=broke)


def deliver(lane: Lane, count: int) -> None:
    """Have so many messages come and go."""
    for row_id in range(count):
        claim: Any = SimpleNamespace(id=row_id, sealed=None, lost_leases=0, attempt=1, rejections=0)
        held = Held(claim, float("inf"))
        lane.take(held)
        lane.drop(held)


@pytest.mark.parametrize(
    ("ended", "rounds"),
    [(0, 1.0), (4, 1.0), (40, 1.0), (60, 1.5), (120, 3.0), (400, ROUNDS_AHEAD), (4000, ROUNDS_AHEAD)],
)
async def test_what_is_in_hand_follows_the_pace(ended: int, rounds: float) -> None:
    """One round of the runners beyond what runs with a slow receiver, several with a fast one, so that none waits."""
    slow = lane()
    slow.look_ahead(now=10.0)
    assert slow.room == 2 * CONCURRENCY
    deliver(slow, ended)
    slow.look_ahead(now=11.0)
    assert slow.room == (1 + rounds) * CONCURRENCY
    # when the pace is gone it shrinks by halves
    slow.look_ahead(now=12.0)
    assert slow.room == (1 + max(rounds / 2, 1)) * CONCURRENCY
    await slow.end()


async def test_a_claim_waits_until_it_can_bring_a_good_part() -> None:
    """Many small claims cost more than one; with nothing in hand any time is right."""
    busy = lane()
    assert busy.hungry
    for row_id in range(2 * CONCURRENCY):
        claim: Any = SimpleNamespace(id=row_id, sealed=None, lost_leases=0, attempt=1, rejections=0)
        busy.take(Held(claim, float("inf")))
    for held in list(busy.held.values())[: CONCURRENCY - 1]:
        busy.close(held)
        assert not busy.hungry
    busy.close(list(busy.held.values())[CONCURRENCY - 1])
    assert busy.hungry
    assert busy.room == CONCURRENCY
    await busy.end()


@pytest.mark.django_db(transaction=True)
def test_a_slow_receiver_keeps_two_rounds_from_other_workers(outbox: Outbox) -> None:
    """However many wait: what runs, and what runs next."""
    gate = threading.Event()

    def slow(received: Received) -> int:
        gate.wait(60)
        return 200

    outbox.receiver.answer = slow
    outbox.enqueue(100)
    outbox.configure(root={"POLL_INTERVAL": 0.05})

    def look() -> int:
        outbox.receiver.wait_for(CONCURRENCY)
        # time for further claims
        threading.Event().wait(0.3)
        found = OutboxMessage.objects.filter(state="in_flight").count()
        connection.close()
        gate.set()
        return found

    async def scenario() -> None:
        looking = asyncio.create_task(asyncio.to_thread(look))
        await asyncio.to_thread(outbox.work, "empty", concurrency=CONCURRENCY)
        assert await looking == 2 * CONCURRENCY

    asyncio.run(scenario())
    assert outbox.states() == {"delivered": 100}


async def test_a_large_message_is_opened_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are opened together as they come; a crowd of large ones would stand in memory twice."""
    opened: list[int] = []

    def prepare(claim: Any, *args: Any, **named: Any) -> Any:
        opened.append(claim.id)
        return lanes.Outcome(lanes.Verdict.RELEASED)

    monkeypatch.setattr(lanes, "prepare", prepare)
    ended = asyncio.Event()

    def settled(lane: Lane, held: Held, *outcome: Any) -> None:
        lane.close(held)
        if held.claim.id == 2:
            ended.set()

    working = lane(settled)
    for row_id, size in enumerate((10, lanes.OPENED_AHEAD, lanes.OPENED_AHEAD + 1)):
        claim: Any = SimpleNamespace(id=row_id, sealed=b"x" * size, lost_leases=0, attempt=1, rejections=0)
        working.take(Held(claim, float("inf")))
    assert opened == [0, 1]
    async with asyncio.timeout(5):
        await ended.wait()
    assert opened == [0, 1, 2]
    await working.end()
