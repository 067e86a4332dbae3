"""The worker: claims what its lanes can start, has what comes of it settled, drains when told to stop.

Owns the event loop's side: who is in hand, until when, and when to claim more. It decides nothing about a message
(``delivery`` does) and writes no row (``leases`` does). Database work runs in threads of its own, one for claims
and renewals, one for settlements, one for housekeeping, so none waits for another. A database that is away is
waited for: outcomes are kept until they are recorded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Literal

from django.db import Error

from . import conf, leases, signals, stats
from .asking import LAST_ANSWER, Asker, Stopped, come
from .conf import LEASE_MARGIN, Settings
from .database import AWAY_PAUSE, DatabaseThread
from .housekeeping import keep_house
from .lanes import Held, Lane
from .leases import Claimed, Ended, Settlement
from .lifecycle import Outcome, State, Verdict
from .settling import Settler
from .suspects import PROCESS
from .tally import Tally
from .telling import Teller

logger = logging.getLogger("notification_outbox")

MAX_BYTES_IN_HAND = 64 * 1024 * 1024
FIRST_POLL = 0.02
POLL_GROWTH = 1.5
RECOVER_EVERY = 1.0
REPORT_EVERY = 60.0

Until = Literal["stopped", "idle", "empty"]


class Worker:
    """Delivers the messages of some lanes from one database until it is stopped; in an application's own loop, too.

    ``settings``: those of ``conf.read()`` (default: the project's). ``publishers``: aliases to serve (default: all).
    ``concurrency``: deliveries at once in each lane (default: the alias's own). ``shutdown_timeout``: seconds that
    running deliveries may still take after ``stop()``. ``until``: "stopped", "idle" (nothing is due any more) or
    "empty" (nothing waits any more, retries included). ``max_messages``: claim so many, let them end and return.
    ``poll_interval``: seconds, instead of the setting's. ``purge``: whether it also does what ``RETENTION`` asks.
    May be run again after it returned; from one event loop at a time.

    ``went_round_at`` is when it last looked for work, by ``time.monotonic()``: at least every poll interval, also
    while its database is away. ``unrecorded`` says after a run of how many messages the outcome could not be
    recorded: they are sent again.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        using: str = "default",
        publishers: Collection[str] = (),
        concurrency: int | None = None,
        shutdown_timeout: float = 30.0,
        until: Until = "stopped",
        max_messages: int | None = None,
        poll_interval: float | None = None,
        worker_id: str = "",
        purge: bool = True,
    ) -> None:
        settings = settings or conf.get()
        self._settings = settings
        self.using = using
        self._chosen = [settings.publisher(alias) for alias in publishers or settings.publishers]
        self._concurrency = concurrency
        self._shutdown_timeout = shutdown_timeout
        self._until = until
        self._max_messages = max_messages
        self._poll_interval = poll_interval or settings.poll_interval
        self._purge = purge
        self.aliases = [chosen.alias for chosen in self._chosen]
        self.worker_id = worker_id or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        # the others of this process finish what they run, then a lone message runs
        longest = max(publisher.attempt_timeout for publisher in settings.publishers.values())
        self._patience = 2 * (longest + LEASE_MARGIN)
        self._begin([])

    def _begin(self, lanes: list[Lane]) -> None:
        self._freed = asyncio.Event()
        self._lanes = lanes
        # a copy of production that must not reach anybody claims nothing
        self._served = [] if self._settings.deliver == frozenset() else lanes
        self._left = self._max_messages
        self._asker = Asker(again=self._ask_again, back=self._let_others_record)
        self._broken: BaseException | None = None
        self._tally = Tally()
        self.went_round_at = float("-inf")
        self.unrecorded = 0

    async def run(self) -> None:
        """Work until stopped or done. Raises ``ConfigurationError`` before anything is claimed.

        Cancelled, it hands back what is in hand at once; cancelled again, it leaves that to the leases.
        """
        self._begin(
            [
                Lane(
                    chosen,
                    self._settings,
                    concurrency=self._concurrency,
                    settled=self._settled,
                    broke=self._broke,
                )
                for chosen in self._chosen
            ]
        )
        self._claiming, settling, housekeeping = threads = [
            DatabaseThread(self.using, role) for role in ("claim", "settle", "housekeeping")
        ]
        self._teller = Teller(Worker, self.using)
        self._settler = Settler(
            settling, self._recorded, worker_id=self.worker_id, log_attempts=self._settings.log_attempts
        )
        timeout = self._shutdown_timeout
        try:
            async with AsyncExitStack() as stack:
                for lane in self._lanes:
                    await lane.publisher.open()
                    stack.push_async_callback(lane.close_publisher)
                if (reached := self._settings.deliver) is not None:
                    logger.warning("outbox DELIVER: only to %s", ", ".join(sorted(reached)) or "nobody")
                self._teller.tell(signals.worker_started, worker_id=self.worker_id)
                async with asyncio.TaskGroup() as tasks:
                    keepers = [
                        tasks.create_task(self._settler.run()),
                        tasks.create_task(self._renew_forever()),
                        tasks.create_task(_until_stopped(self._report_forever())),
                    ]
                    if self._purge:
                        keepers.append(tasks.create_task(keep_house(housekeeping, self._settings.retention)))
                    claiming = tasks.create_task(_until_stopped(self._claim_until_done()))
                    try:
                        await asyncio.shield(claiming)
                        await self._drain(timeout)
                    except asyncio.CancelledError:
                        # a claim on its way must not leave its leases behind
                        timeout = 0.0
                        self.stop()
                        await asyncio.wait({claiming})
                        await self._drain(timeout)
                        raise
                    for keeper in keepers:
                        keeper.cancel()
        finally:
            for lane, held in self._in_hand():
                lane.drop(held)
            self._teller.tell(signals.worker_stopped, worker_id=self.worker_id)
            await asyncio.gather(
                self._teller.close(max(timeout, 1.0)), *(thread.close() for thread in threads)
            )
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Claim nothing more and return from ``run()`` when what runs has ended.

        Call it in the loop's thread. Before ``run()`` has begun it does nothing.
        """
        self._asker.stop()
        self._freed.set()

    def _broke(self, error: BaseException) -> None:
        self._broken = error
        self.stop()

    # claiming

    async def _claim_until_done(self) -> None:
        """Claim whatever is due until told to stop or done."""
        pause = FIRST_POLL
        aliases = [lane.alias for lane in self._served]
        while not self._asker.stopping.is_set():
            self.went_round_at = time.monotonic()
            answers = [await self._claim(lane) for lane in self._served]
            asked = [claimed for claimed in answers if claimed is not None]
            found = any(claimed.claims for claimed in asked)
            more = any(claimed.more for claimed in asked)
            if found or more:
                pause = FIRST_POLL
            if len(asked) < len(answers):
                # no room, or company that a lone message must not have: a settlement comes first
                await self._wait_for_hands(pause)
                if self._left == 0 and not self._in_hand():
                    return
            elif not more:
                due = await self._asker.ask(lambda: self._claiming(leases.next_due, publishers=aliases))
                if not found and not self._in_hand() and self._done(due):
                    return
                # due and not claimed: somebody holds it, or it must wait for its turn
                seconds = min(pause, max(due, FIRST_POLL)) if due else pause
                if self._until == "stopped" or not self._in_hand():
                    await come(self._asker.stopping, seconds)
                else:
                    # the last to be recorded ends the work
                    await self._wait_for_hands(seconds)
            pause = min(pause * POLL_GROWTH, self._poll_interval)

    async def _wait_for_hands(self, seconds: float) -> None:
        await come(self._freed, seconds)
        self._freed.clear()

    def _done(self, due: float | None) -> bool:
        """Say whether the work is done when the next row may be taken in ``due`` seconds."""
        return self._until != "stopped" and (due is None or (self._until == "idle" and due > 0))

    async def _claim(self, lane: Lane) -> Claimed | None:
        """Claim what the lane can hold; None when it is not the time to claim."""
        budget = MAX_BYTES_IN_HAND - sum(one.bytes_held for one in self._lanes)
        wanted = lane.room if self._left is None else min(lane.room, self._left)
        # outcomes that wait for the database: it is not the time to take more
        if not lane.hungry or not wanted or (budget <= 0 and lane.held) or self._settler.outage:
            return None
        await self._recover(lane)
        claimed = await self._asker.ask(lambda: self._take(lane, wanted, budget))
        if claimed is None:
            return None
        if self._left is not None:
            self._left -= len(claimed.claims)
        self._teller.tell_ends(claimed.ended)
        return claimed

    async def _take(self, lane: Lane, wanted: int, budget: int) -> Claimed | None:
        """Ask the database for claims, on the process's terms, and take them in hand."""
        asked = time.monotonic()
        terms = PROCESS.ask(asked, patience=self._patience)
        if terms is None:
            return None
        claimed = Claimed([], False, False, [])
        try:
            claimed = await self._claiming(
                leases.claim,
                publisher=lane.alias,
                limit=wanted,
                budget=budget,
                worker=self.worker_id,
                lease=lane.settings.lease,
                suspects=terms.suspects,
                lone=terms.lone,
                tally=self._tally,
            )
        finally:
            PROCESS.answered(terms, claimed.claims, lone_met=claimed.lone_met, now=time.monotonic())
        for claim in claimed.claims:
            # the lease's end by our clock counts from before the question was sent: early, never late
            lane.take(Held(claim, asked + lane.settings.lease))
        lane.look_ahead(time.monotonic())
        return claimed

    async def _recover(self, lane: Lane) -> None:
        """Once in a while put rows whose lease ended back, whoever held them."""
        now = time.monotonic()
        if now - lane.recovered_at < RECOVER_EVERY:
            return
        lane.recovered_at = now
        # not repeated: the first thing after an outage would be to take what others are about to record
        recovered = await self._asker.once(
            lambda: self._claiming(leases.recover, publisher=lane.alias, limit=lane.most, tally=self._tally)
        )
        if recovered is None:
            return
        if recovered.pending:
            logger.warning("outbox recover publisher=%s lost_leases=%s", lane.alias, recovered.pending)
        for ended in recovered.ended:
            logger.error("outbox recover publisher=%s id=%s quarantined=worker_lost", lane.alias, ended.id)
        self._teller.tell_ends(recovered.ended)

    async def _ask_again(self) -> None:
        """See to what is in hand before a question is repeated: claimed again it would be sent again."""
        self.went_round_at = time.monotonic()
        await self._renew(1.0)

    def _let_others_record(self) -> None:
        """Recover nothing for a while: others may hold outcomes of rows whose leases ended in the outage."""
        for lane in self._lanes:
            lane.recovered_at = time.monotonic() + AWAY_PAUSE[1]

    # settling

    def _settled(self, lane: Lane, held: Held, outcome: Outcome, took: float | None) -> None:
        """Have an outcome recorded."""
        if held.closed and outcome.verdict is not Verdict.DELIVERED:
            return  # only a success is a fact, however late
        lane.close(held)
        self._settler.add(held.claim, outcome, took)
        if not self._freed.is_set() and (lane.hungry or self._asker.stopping.is_set()):
            self._freed.set()
        if not lane.unfinished and not any(one.unfinished for one in self._lanes):
            self._settler.hurry()

    def _recorded(self, batch: list[Settlement], lost: list[Settlement]) -> None:
        """Take recorded messages out of hand and tell who listens."""
        for claim, outcome, *_ in lost:
            logger.warning("outbox settle too late id=%s outcome=%s", claim.id, outcome.verdict)
        for claim, *_ in batch:
            for lane in self._lanes:
                held = lane.held.get(claim.id)
                if held is not None and held.claim is claim:
                    lane.drop(held)
        self._freed.set()
        landed = [settlement for settlement in batch if settlement not in lost] if lost else batch
        self._teller.tell_ends(
            Ended(claim.id, claim.binding.message_id, State(outcome.verdict.value))
            for claim, outcome, *_ in landed
            if outcome.verdict in (Verdict.DELIVERED, Verdict.QUARANTINED)
        )

    # keeping

    async def _renew_forever(self) -> None:
        """Renew what is in hand, first at half a lease; what waits to be recorded is in hand too."""
        while True:
            await asyncio.sleep(min(lane.settings.lease for lane in self._lanes) / 8)
            # a database that is away is asked by those who need more of it
            with suppress(Error):
                await self._renew(0.5)

    async def _renew(self, share: float) -> None:
        """Renew leases of which less than ``share`` is left; one that was lost cancels its delivery."""
        for lane in self._lanes:
            lease = lane.settings.lease
            asked = time.monotonic()
            old = [held for held in lane.held.values() if held.ends - asked <= lease * share]
            if not old:
                continue
            lost = await self._claiming(leases.renew, claims=[held.claim for held in old], lease=lease)
            for held in old:
                if held.claim.id not in lost:
                    held.ends = asked + lease
                elif not held.closed:
                    logger.warning("outbox lease lost id=%s", held.claim.id)
                    lane.drop(held)
            if lost:
                self._freed.set()

    async def _report_forever(self) -> None:
        """Say once of every lane that has messages and no publisher here: nobody may be serving it."""
        reported: set[str] = set()
        while True:
            found = await self._asker.ask(lambda: self._claiming(stats.lanes))
            for alias in set(found) - set(self._settings.publishers) - reported:
                reported.add(alias)
                logger.warning("outbox lane publisher=%r has messages but is not in PUBLISHERS", alias)
            await asyncio.sleep(REPORT_EVERY)

    # stopping

    async def _drain(self, timeout: float) -> None:
        """Hand back what has not started, let the rest end in time, record everything."""
        for lane, held in self._without_outcome():
            if held.runner is None:
                self._hand_back(lane, held)
        await self._wait_while(self._without_outcome, timeout)
        for lane, held in self._without_outcome():
            self._hand_back(lane, held)
            lane.cancel(held)
        await self._wait_while(self._in_hand, LAST_ANSWER)
        await asyncio.gather(*(lane.end() for lane in self._lanes))
        self.unrecorded = len(self._in_hand())
        if self.unrecorded:
            logger.error("outbox stop unrecorded=%s: their leases end by themselves", self.unrecorded)

    def _hand_back(self, lane: Lane, held: Held) -> None:
        self._settled(lane, held, Outcome(Verdict.RELEASED), None)

    def _in_hand(self) -> list[tuple[Lane, Held]]:
        return [(lane, held) for lane in self._lanes for held in lane.held.values()]

    def _without_outcome(self) -> list[tuple[Lane, Held]]:
        return [(lane, held) for lane, held in self._in_hand() if not held.closed]

    async def _wait_while(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until the condition ends, looking whenever something is freed, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while condition():
                    self._freed.clear()
                    await self._freed.wait()


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    with suppress(Stopped):
        await work
