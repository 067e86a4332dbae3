"""The worker: claims what it can start, runs the deliveries, settles in batches, drains when told to stop.

Owns the event loop's side: who is in hand, until when, and what is not settled yet. It decides nothing about a
message (``delivery`` does) and writes no row (``leases`` does). Database work runs in threads of its own, one for
claims and renewals, one for settlements, one for housekeeping, so none waits for another. A database that is
away is waited for: outcomes are kept until they are recorded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from django.db import DataError, Error, IntegrityError

from . import leases, stats
from .conf import LEASE_MARGIN, PublisherSettings, Settings
from .database import DatabaseThread
from .delivery import Rules, classify, deliver
from .envelope import Claim
from .housekeeping import keep_house
from .leases import Settlement
from .lifecycle import Outcome, Verdict
from .publishers import Publisher, build

logger = logging.getLogger("notification_outbox")

MAX_BYTES_IN_HAND = 64 * 1024 * 1024
SETTLE_BATCH = 100
SETTLE_PAUSE = 0.02
FIRST_POLL = 0.02
POLL_GROWTH = 1.5
RECOVER_EVERY = 1.0
REPORT_EVERY = 60.0
AWAY_PAUSE = (0.1, 5.0)

T = TypeVar("T")
Until = Literal["stopped", "idle", "empty"]


class _Stopped(Exception):
    """The worker was told to stop while it waited for its database."""


@dataclass(eq=False, slots=True)
class _Held:
    """A claim in hand. ``ends`` is when its lease ends by the loop's clock, taken before the claim was sent."""

    claim: Claim
    ends: float
    task: asyncio.Task[None] | None = None
    started: bool = False
    settling: bool = False


class _Lane:
    """One publisher alias at work: its publisher, its slots and what is in hand for it."""

    def __init__(self, settings: PublisherSettings, project: Settings, concurrency: int) -> None:
        self.settings = settings
        self.rules = Rules(project.validators, project.max_body_bytes, settings.body)
        self.publisher: Publisher = build(settings)
        self.slots = asyncio.Semaphore(concurrency)
        self.capacity = 2 * concurrency
        # asked for again when a good part is free: many small claims cost more than one
        self.refill = max(1, concurrency // 2)
        self.held: dict[int, _Held] = {}
        self.unfinished = 0
        self.bytes_held = 0
        self.recovered_at = float("-inf")

    def take(self, held: _Held) -> None:
        if (before := self.held.get(held.claim.id)) is not None:
            # its lease ended and the row came to us again
            self.drop(before)
        self.held[held.claim.id] = held
        self.unfinished += 1
        self.bytes_held += len(held.claim.sealed or b"")

    def finish(self, held: _Held) -> None:
        """Its outcome is known: it makes room for another before the outcome is recorded."""
        if not held.settling:
            held.settling = True
            self.unfinished -= 1

    def drop(self, held: _Held) -> None:
        self.finish(held)
        del self.held[held.claim.id]
        self.bytes_held -= len(held.claim.sealed or b"")

    @property
    def room(self) -> int:
        # outcomes that cannot be recorded must not pile up without end
        return min(self.capacity - self.unfinished, 2 * self.capacity - len(self.held))

    @property
    def hungry(self) -> bool:
        return not self.held or self.room >= self.refill


class Worker:
    """Delivers the messages of some lanes from one database until it is stopped.

    ``publishers``: aliases to serve (default: all). ``concurrency``: deliveries at once in each lane (default:
    the alias's own). ``shutdown_timeout``: seconds that running deliveries may still take after ``stop()``.
    ``until``: "stopped", "idle" (nothing is due any more) or "empty" (nothing waits any more, retries included).
    ``purge``: whether it also deletes what ``RETENTION`` no longer keeps. May be run again after it returned.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        using: str,
        publishers: Collection[str] = (),
        concurrency: int | None = None,
        shutdown_timeout: float = 30.0,
        until: Until = "stopped",
        worker_id: str = "",
        purge: bool = True,
    ) -> None:
        self._settings = settings
        self.using = using
        self._chosen = [settings.publisher(alias) for alias in publishers or settings.publishers]
        self._concurrency = concurrency
        self._shutdown_timeout = shutdown_timeout
        self._until = until
        self._purge = purge
        self.aliases = [chosen.alias for chosen in self._chosen]
        self.worker_id = worker_id or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self._begin()

    def _begin(self) -> None:
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._settle_soon = asyncio.Event()
        self._settle_now = asyncio.Event()
        self._lanes: list[_Lane] = []
        self._unsettled: list[Settlement] = []
        self._failures: Counter[str] = Counter()

    async def run(self) -> None:
        """Work until stopped or done. Raises ``ConfigurationError`` before anything is claimed."""
        self._begin()
        self._lanes = [
            _Lane(chosen, self._settings, self._concurrency or chosen.concurrency) for chosen in self._chosen
        ]
        async with AsyncExitStack() as stack:
            self._claiming = DatabaseThread(self.using, "claim")
            stack.push_async_callback(self._claiming.close)
            self._settling = DatabaseThread(self.using, "settle")
            stack.push_async_callback(self._settling.close)
            for lane in self._lanes:
                await lane.publisher.open()
                stack.push_async_callback(lane.publisher.close)
            async with asyncio.TaskGroup() as tasks:
                keepers = [
                    tasks.create_task(self._settle_forever()),
                    tasks.create_task(self._renew_forever()),
                    tasks.create_task(self._until_stopped(self._report_forever())),
                ]
                if self._purge:
                    thread = DatabaseThread(self.using, "housekeeping")
                    stack.push_async_callback(thread.close)
                    keepers.append(tasks.create_task(keep_house(thread, self._settings.retention)))
                with suppress(_Stopped):
                    await self._claim_until_done(tasks)
                await self._drain()
                for keeper in keepers:
                    keeper.cancel()

    def stop(self) -> None:
        """Claim nothing more and return from ``run()`` when what runs has ended. Call it in the loop's thread."""
        self._stopping.set()
        self._freed.set()

    # claiming

    async def _claim_until_done(self, tasks: asyncio.TaskGroup) -> None:
        pause = FIRST_POLL
        while not self._stopping.is_set():
            full = found = False
            for lane in self._lanes:
                wanted, got = await self._claim(lane, tasks)
                full |= got == wanted
                found |= got > 0
            if full:
                # more may be due, or a lane has no room: either way a settlement comes first
                await self._wait(self._freed, self._settings.poll_interval)
                self._freed.clear()
                pause = FIRST_POLL
                continue
            busy = any(lane.held for lane in self._lanes)
            if found:
                pause = FIRST_POLL
            due, _ = await self._ask(leases.next_due, publishers=self.aliases)
            if not busy and not found and self._done(due):
                return
            await self._wait(self._stopping, pause if due is None else min(pause, max(due, FIRST_POLL)))
            pause = min(pause * POLL_GROWTH, self._settings.poll_interval)

    def _done(self, due: float | None) -> bool:
        """Say whether the work is done when the next row may be taken in ``due`` seconds.

        A row that is due and was not claimed is not nothing: somebody else holds it locked for a moment.
        """
        return self._until != "stopped" and (due is None or (self._until == "idle" and due > 0))

    async def _claim(self, lane: _Lane, tasks: asyncio.TaskGroup) -> tuple[int, int]:
        """Claim what the lane can hold; return how many were wanted and how many came."""
        now = asyncio.get_running_loop().time
        budget = MAX_BYTES_IN_HAND - sum(lane.bytes_held for lane in self._lanes)
        if self._stopping.is_set() or not lane.hungry or (budget <= 0 and lane.held):
            return 0, 0
        if self._failures["settle"]:
            # outcomes are waiting for the database: it is not the time to take more
            return 0, 0
        alias = lane.settings.alias
        if now() - lane.recovered_at >= RECOVER_EVERY:
            lane.recovered_at = now()
            ended, _ = await self._ask(leases.recover, publisher=alias, limit=lane.capacity)
            if ended:
                logger.warning("outbox recover publisher=%s lost_leases=%s", alias, ended)
        wanted = lane.room
        claims, asked = await self._ask(
            leases.claim,
            publisher=alias,
            limit=wanted,
            budget=budget,
            worker=self.worker_id,
            lease=lane.settings.lease,
        )
        for claim in claims:
            # the lease's end by our clock counts from before the question was sent: early, never late
            held = _Held(claim, asked + lane.settings.lease)
            lane.take(held)
            held.task = tasks.create_task(self._deliver(lane, held))
        return wanted, len(claims)

    # delivering

    async def _deliver(self, lane: _Lane, held: _Held) -> None:
        loop = asyncio.get_running_loop()
        settings = lane.settings
        async with lane.slots:
            held.started = True
            if held.ends - loop.time() < settings.attempt_timeout + LEASE_MARGIN:
                self._settle(lane, held, Outcome(Verdict.RELEASED))
                return
            began = loop.time()
            try:
                outcome = await deliver(
                    held.claim,
                    lane.publisher,
                    keyring=self._settings.keyring,
                    rules=lane.rules,
                    policy=settings.retry,
                    timeout=settings.attempt_timeout,
                )
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # not we cancelled it: something inside the publisher did
                outcome = classify(error, held.claim, settings.retry)
            self._settle(lane, held, outcome, loop.time() - began)
        claim = held.claim
        level = logging.WARNING if outcome.verdict is Verdict.QUARANTINED else logging.INFO
        logger.log(
            logging.DEBUG if outcome.verdict is Verdict.DELIVERED else level,
            "outbox deliver id=%s publisher=%s attempt=%s outcome=%s error=%s",
            claim.id,
            settings.alias,
            claim.attempt,
            outcome.verdict,
            outcome.error,
        )

    # settling

    def _settle(self, lane: _Lane, held: _Held, outcome: Outcome, took: float | None = None) -> None:
        lane.finish(held)
        if lane.hungry:
            self._freed.set()
        wanted = self._settings.log_attempts
        if wanted == "none" or (wanted == "failures" and outcome.verdict is Verdict.DELIVERED):
            took = None
        self._unsettled.append(Settlement(held.claim, outcome, self.worker_id, took))
        self._settle_soon.set()
        if len(self._unsettled) >= SETTLE_BATCH:
            self._settle_now.set()

    async def _settle_forever(self) -> None:
        while True:
            await self._settle_soon.wait()
            # a short wait makes one transaction of many outcomes
            await self._wait(self._settle_now, SETTLE_PAUSE)
            await self._settle_batch()

    async def _settle_batch(self) -> None:
        """Record what is unsettled, waiting for the database as long as it takes."""
        batch = self._unsettled[:SETTLE_BATCH]
        del self._unsettled[:SETTLE_BATCH]
        if not self._unsettled:
            self._settle_soon.clear()
        if len(self._unsettled) < SETTLE_BATCH:
            self._settle_now.clear()
        if not batch:
            return
        try:
            lost = await self._record(batch)
        except asyncio.CancelledError:
            self._unsettled[:0] = batch
            raise
        for claim, outcome, *_ in lost:
            logger.warning("outbox settle lost id=%s outcome=%s", claim.id, outcome.verdict)
        for settlement in batch:
            for lane in self._lanes:
                held = lane.held.get(settlement.claim.id)
                if held is not None and held.claim is settlement.claim:
                    lane.drop(held)
        self._freed.set()

    async def _record(self, batch: list[Settlement]) -> list[Settlement]:
        pause, longest = AWAY_PAUSE
        while True:
            try:
                lost = await self._settling(leases.settle, settlements=batch)
            except (IntegrityError, DataError) as error:
                if len(batch) == 1:
                    logger.error(
                        "outbox settle refused id=%s error=%s", batch[0].claim.id, type(error).__name__
                    )
                    return batch
                # one bad row must not lose the others
                return [lost for one in batch for lost in await self._record([one])]
            except Error as error:
                # also a server that became read-only (a demoted primary) or lost its tables for a while
                self._away("settle", error)
            else:
                self._back("settle")
                return lost
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

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
        now = asyncio.get_running_loop().time
        for lane in self._lanes:
            lease = lane.settings.lease
            asked = now()
            old = [held for held in lane.held.values() if held.ends - asked <= lease * share]
            if not old:
                continue
            lost = await self._claiming(leases.renew, claims=[held.claim for held in old], lease=lease)
            for held in old:
                if held.claim.id not in lost:
                    held.ends = asked + lease
                elif not held.settling and held.task is not None:
                    logger.warning("outbox lease lost id=%s", held.claim.id)
                    held.task.cancel()
                    lane.drop(held)
            if lost:
                self._freed.set()

    async def _report_forever(self) -> None:
        """Say once of every lane that has messages and no publisher here: nobody may be serving it."""
        reported: set[str] = set()
        while True:
            found, _ = await self._ask(stats.lanes)
            for alias in set(found) - set(self._settings.publishers) - reported:
                reported.add(alias)
                logger.warning("outbox lane publisher=%r has messages but is not in PUBLISHERS", alias)
            await asyncio.sleep(REPORT_EVERY)

    # stopping

    async def _drain(self) -> None:
        """Hand back what has not started, let the rest end in time, record everything."""
        held = [(lane, one) for lane in self._lanes for one in lane.held.values()]
        for lane, one in held:
            if not one.started:
                self._hand_back(lane, one)
        running = [one.task for _, one in held if one.task is not None and not one.task.done()]
        if running:
            await asyncio.wait(running, timeout=self._shutdown_timeout)
        for lane, one in held:
            if not one.settling:
                self._hand_back(lane, one)
        try:
            async with asyncio.timeout(AWAY_PAUSE[1]):
                while any(lane.held for lane in self._lanes):
                    await self._wait(self._freed, AWAY_PAUSE[0])
                    self._freed.clear()
        except TimeoutError:
            left = sum(len(lane.held) for lane in self._lanes)
            logger.error("outbox stop unrecorded=%s: their leases end by themselves", left)

    def _hand_back(self, lane: _Lane, held: _Held) -> None:
        if held.task is not None:
            held.task.cancel()
        self._settle(lane, held, Outcome(Verdict.RELEASED))

    # waiting

    async def _until_stopped(self, keeper: Coroutine[None, None, None]) -> None:
        with suppress(_Stopped):
            await keeper

    async def _wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, at most so long; say whether it came."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def _ask(self, function: Callable[..., T], **arguments: object) -> tuple[T, float]:
        """Return the database's answer and when it was asked; one that is away is asked again until the stop."""
        loop = asyncio.get_running_loop()
        pause, longest = AWAY_PAUSE
        while True:
            try:
                if self._failures["claim"]:
                    # what is in hand first: claimed again it would be sent again
                    await self._renew(1.0)
                asked = loop.time()
                answer = await self._claiming(function, **arguments)
            except Error as error:
                self._away("claim", error)
            else:
                self._back("claim")
                return answer, asked
            if await self._wait(self._stopping, pause):
                raise _Stopped
            pause = min(pause * 2, longest)

    def _away(self, role: str, error: Exception) -> None:
        """Count a failure; from the second in a row on it is more than a conflict and is said once."""
        self._failures[role] += 1
        if self._failures[role] == 2:
            logger.error("outbox database away role=%s error=%s", role, type(error).__name__)

    def _back(self, role: str) -> None:
        if self._failures[role] >= 2:
            logger.warning("outbox database back role=%s after=%s", role, self._failures[role])
        self._failures[role] = 0
