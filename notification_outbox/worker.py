"""The worker: claims what it can start, runs the deliveries, has them settled, drains when told to stop.

Owns the event loop's side: who is in hand, until when, and who runs. It decides nothing about a message
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
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from django.db import Error, close_old_connections
from django.dispatch import Signal

from . import conf, leases, signals, stats
from .conf import LEASE_MARGIN, Settings
from .database import AWAY_PAUSE, DatabaseThread, Outage
from .delivery import classify, deliver
from .exceptions import ConfigurationError
from .housekeeping import keep_house
from .lanes import Held, Lane
from .leases import Claimed, Ended, Settlement
from .lifecycle import Outcome, State, Verdict
from .settling import Settler
from .suspects import PROCESS
from .tally import Tally

logger = logging.getLogger("notification_outbox")

MAX_BYTES_IN_HAND = 64 * 1024 * 1024
FIRST_POLL = 0.02
POLL_GROWTH = 1.5
RECOVER_EVERY = 1.0
REPORT_EVERY = 60.0
# seconds that a stopping worker gives its database to answer
LAST_ANSWER = 3.0

# one thread with a connection for each, so that none waits for another
ROLES = ("claim", "settle", "housekeeping", "signals")
LEVELS = {Verdict.DELIVERED: logging.DEBUG, Verdict.QUARANTINED: logging.WARNING}
SIGNALS = {
    State.DELIVERED: signals.message_delivered,
    State.QUARANTINED: signals.message_quarantined,
    State.EXPIRED: signals.message_expired,
}

T = TypeVar("T")
Until = Literal["stopped", "idle", "empty"]


class _Stopped(Exception):
    """The worker was told to stop while it waited for its database."""


class Worker:
    """Delivers the messages of some lanes from one database until it is stopped; in an application's own loop, too.

    ``settings``: those of ``conf.read()`` (default: the project's). ``publishers``: aliases to serve (default: all).
    ``concurrency``: deliveries at once in each lane (default: the alias's own). ``shutdown_timeout``: seconds that
    running deliveries may still take after ``stop()``. ``until``: "stopped", "idle" (nothing is due any more) or
    "empty" (nothing waits any more, retries included). ``max_messages``: claim so many, let them end and return.
    ``poll_interval``: seconds, instead of the setting's. ``liveness_file``: its time of modification says when the
    worker last was well. ``purge``: whether it also does what ``RETENTION`` asks. May be run again after it
    returned; from one event loop at a time.
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
        liveness_file: Path | None = None,
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
        self._liveness_file = liveness_file
        self._purge = purge
        self.aliases = [chosen.alias for chosen in self._chosen]
        self.worker_id = worker_id or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self.unrecorded = 0
        self._begin([])

    def _begin(self, lanes: list[Lane]) -> None:
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._lanes = lanes
        # a copy of production that must not reach anybody claims nothing
        self._served = [] if self._settings.deliver == frozenset() else lanes
        self._left = self._max_messages
        self._outage = Outage("claim")
        self._broken: BaseException | None = None
        self._tally = Tally()
        self.unrecorded = 0

    async def run(self) -> None:
        """Work until stopped or done. Raises ``ConfigurationError`` before anything is claimed.

        Cancelled, it hands back what is in hand at once; cancelled again, it leaves that to the leases.
        ``unrecorded`` then says of how many messages the outcome could not be recorded: they are sent again.
        """
        self._begin([Lane(chosen, self._settings, self._concurrency) for chosen in self._chosen])
        self._start_living()
        threads = [DatabaseThread(self.using, role) for role in ROLES]
        self._claiming, settling, housekeeping, self._telling = threads
        self._settler = Settler(settling, self._recorded)
        timeout = self._shutdown_timeout
        try:
            async with AsyncExitStack() as stack:
                for lane in self._lanes:
                    await lane.publisher.open()
                    stack.push_async_callback(self._close, lane)
                self._say_who_is_reached()
                self._tell(signals.worker_started, [{"worker_id": self.worker_id}])
                async with asyncio.TaskGroup() as tasks:
                    keepers = [
                        tasks.create_task(self._settler.run()),
                        tasks.create_task(self._renew_forever()),
                        tasks.create_task(self._until_stopped(self._report_forever())),
                    ]
                    if self._purge:
                        keepers.append(tasks.create_task(keep_house(housekeeping, self._settings.retention)))
                    claiming = tasks.create_task(self._claim_until_done())
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
            for lane in self._lanes:
                for held in list(lane.held.values()):
                    lane.drop(held)
            self._tell(signals.worker_stopped, [{"worker_id": self.worker_id}])
            told = self._telling.close(max(timeout, 1.0))
            _, _, _, all_told = await asyncio.gather(*(thread.close() for thread in threads[:3]), told)
            if not all_told:
                logger.error("outbox stop: receivers of signals did not end in time, some were not told")
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Claim nothing more and return from ``run()`` when what runs has ended.

        Call it in the loop's thread. Before ``run()`` has begun it does nothing.
        """
        self._stopping.set()
        self._freed.set()

    # claiming

    async def _claim_until_done(self) -> None:
        """Claim whatever is due until told to stop or done."""
        with suppress(_Stopped):
            await self._go_round()

    async def _go_round(self) -> None:
        pause = FIRST_POLL
        aliases = [lane.alias for lane in self._served]
        while not self._stopping.is_set():
            self._touch()
            answers = [await self._claim(lane) for lane in self._served]
            asked = [claimed for claimed in answers if claimed is not None]
            found = any(claimed.claims for claimed in asked)
            more = any(claimed.more for claimed in asked)
            if found or more:
                pause = FIRST_POLL
            if len(asked) < len(answers):
                # no room, or company that a lone message must not have: a settlement comes first
                await self._wait(self._freed, pause)
                self._freed.clear()
                if self._left == 0 and not self._in_hand:
                    return
            elif not more:
                due = await self._ask(lambda: self._claiming(leases.next_due, publishers=aliases))
                if not found and not self._in_hand and self._done(due):
                    return
                # due and not claimed: somebody holds it, or it must wait for its turn
                seconds = min(pause, max(due, FIRST_POLL)) if due else pause
                if self._until == "stopped" or not self._in_hand:
                    await self._wait(self._stopping, seconds)
                else:
                    # the last to be recorded ends the work
                    await self._wait(self._freed, seconds)
                    self._freed.clear()
            pause = min(pause * POLL_GROWTH, self._poll_interval)

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
        claimed = await self._ask(lambda: self._take(lane, wanted, budget))
        if claimed is None:
            return None
        while len(lane.runners) < min(lane.concurrency, lane.open):
            runner = asyncio.create_task(self._deliver_forever(lane))
            runner.add_done_callback(self._runner_ended)
            lane.runners.append(runner)
        if self._left is not None:
            self._left -= len(claimed.claims)
        self._tell_ended(claimed.ended)
        return claimed

    async def _take(self, lane: Lane, wanted: int, budget: int) -> Claimed | None:
        """Ask the database for claims, on the process's terms, and take them in hand."""
        asked = time.monotonic()
        terms = PROCESS.ask(asked, patience=lane.settings.attempt_timeout + LEASE_MARGIN)
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
            if (before := lane.held.get(claim.id)) is not None:
                # its lease ended and the row came to us again
                lane.drop(before)
                self._cancel(before)
            # the lease's end by our clock counts from before the question was sent: early, never late
            lane.take(Held(claim, asked + lane.settings.lease))
        return claimed

    async def _recover(self, lane: Lane) -> None:
        """Once in a while put rows whose lease ended back, whoever held them."""
        now = time.monotonic()
        if now - lane.recovered_at < RECOVER_EVERY:
            return
        lane.recovered_at = now
        recovered = await self._ask(
            lambda: self._claiming(
                leases.recover, publisher=lane.alias, limit=lane.capacity, tally=self._tally
            )
        )
        if recovered.pending:
            logger.warning("outbox recover publisher=%s lost_leases=%s", lane.alias, recovered.pending)
        for ended in recovered.ended:
            logger.error("outbox recover publisher=%s id=%s quarantined=worker_lost", lane.alias, ended.id)
        self._tell_ended(recovered.ended)

    # delivering

    async def _deliver_forever(self, lane: Lane) -> None:
        """Deliver one message after another."""
        task = asyncio.current_task()
        assert task is not None
        now = time.monotonic
        settings = lane.settings
        while True:
            held = await lane.waiting.get()
            if held.closed:
                continue
            began = now()
            if held.ends - began < settings.attempt_timeout + LEASE_MARGIN:
                self._settle(lane, held, Outcome(Verdict.RELEASED))
                continue
            held.runner = task
            outcome = None
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
                if not task.cancelling():
                    # not we cancelled it: something inside the publisher did
                    outcome = classify(error, held.claim, settings.retry)
                elif not held.closed:
                    raise
            held.runner = None
            if held.closed and task.cancelling():
                # this delivery was cancelled, not this runner; unless both were
                task.uncancel()
                if task.cancelling():
                    return
            if outcome is not None:
                self._settle(lane, held, outcome, now() - began)

    def _runner_ended(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._broken = error
            self.stop()

    def _cancel(self, held: Held) -> None:
        """Stop the delivery of a message that is closed."""
        if held.runner is not None:
            held.runner.cancel()
            held.runner = None

    # settling

    def _settle(self, lane: Lane, held: Held, outcome: Outcome, took: float | None = None) -> None:
        if held.closed and outcome.verdict is not Verdict.DELIVERED:
            return  # only a success is a fact, however late
        lane.close(held)
        if lane.hungry or self._stopping.is_set():
            self._freed.set()
        handed_back = outcome.verdict is Verdict.RELEASED and not outcome.error
        logger.log(
            logging.DEBUG if handed_back else LEVELS.get(outcome.verdict, logging.INFO),
            "outbox deliver id=%s publisher=%s attempt=%s outcome=%s error=%s",
            held.claim.id,
            lane.alias,
            held.claim.attempt,
            outcome.verdict,
            outcome.error,
        )
        wanted = self._settings.log_attempts
        if wanted == "none" or (wanted == "failures" and outcome.verdict is Verdict.DELIVERED):
            took = None
        self._settler.add(Settlement(held.claim, outcome, self.worker_id, took))

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
        self._tell_ended(
            (
                Ended(claim.id, claim.binding.message_id, State(outcome.verdict.value))
                for claim, outcome, *_ in landed
                if outcome.verdict in (Verdict.DELIVERED, Verdict.QUARANTINED)
            )
        )

    def _tell_ended(self, messages: Iterable[Ended]) -> None:
        listened = {state: signal for state, signal in SIGNALS.items() if signal.has_listeners(Worker)}
        for one in messages if listened else ():
            if one.state in listened:
                self._tell(listened[one.state], [{"id": one.id, "message_id": one.message_id}])

    def _tell(self, signal: Signal, calls: list[dict[str, Any]]) -> None:
        if calls and signal.has_listeners(Worker):
            self._telling.soon(_send, signal=signal, calls=calls)

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
        now = time.monotonic
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
                elif not held.closed:
                    logger.warning("outbox lease lost id=%s", held.claim.id)
                    lane.drop(held)
                    self._cancel(held)
            if lost:
                self._freed.set()

    async def _report_forever(self) -> None:
        """Say once of every lane that has messages and no publisher here: nobody may be serving it."""
        reported: set[str] = set()
        while True:
            found = await self._ask(lambda: self._claiming(stats.lanes))
            for alias in set(found) - set(self._settings.publishers) - reported:
                reported.add(alias)
                logger.warning("outbox lane publisher=%r has messages but is not in PUBLISHERS", alias)
            await asyncio.sleep(REPORT_EVERY)

    def _say_who_is_reached(self) -> None:
        if (reached := self._settings.deliver) is not None:
            logger.warning("outbox DELIVER: only to %s", ", ".join(sorted(reached)) or "nobody")

    def _start_living(self) -> None:
        problem = None
        try:
            if self._liveness_file is not None:
                self._liveness_file.touch()
        except OSError as error:
            problem = type(error).__name__
        if problem:
            raise ConfigurationError(f"the liveness file cannot be written: {problem}")

    def _touch(self) -> None:
        if self._liveness_file is not None:
            # a disk that is full for a while ends no worker: the file's age tells
            with suppress(OSError):
                self._liveness_file.touch()

    # stopping

    async def _drain(self, timeout: float) -> None:
        """Hand back what has not started, let the rest end in time, record everything."""
        for lane, held in self._open():
            if held.runner is None:
                self._hand_back(lane, held)
        await self._wait_while(self._open, timeout)
        for lane, held in self._open():
            self._hand_back(lane, held)
            self._cancel(held)
        await self._wait_while(lambda: self._in_hand, LAST_ANSWER)
        runners = {runner for lane in self._lanes for runner in lane.runners}
        for runner in runners:
            runner.cancel()
        if runners:
            _, stuck = await asyncio.wait(runners, timeout=1.0)
            if stuck:
                logger.error("outbox stop: %s deliveries ignore their cancellation", len(stuck))
        self.unrecorded = sum(len(lane.held) for lane in self._lanes)
        if self.unrecorded:
            logger.error("outbox stop unrecorded=%s: their leases end by themselves", self.unrecorded)

    async def _close(self, lane: Lane) -> None:
        try:
            async with asyncio.timeout(LAST_ANSWER):
                await lane.publisher.close()
        except TimeoutError:
            logger.error("outbox stop publisher=%s: its close() does not end", lane.alias)

    def _open(self) -> list[tuple[Lane, Held]]:
        """Return what is in hand without an outcome."""
        return [(lane, held) for lane in self._lanes for held in lane.held.values() if not held.closed]

    def _hand_back(self, lane: Lane, held: Held) -> None:
        self._settle(lane, held, Outcome(Verdict.RELEASED))

    @property
    def _in_hand(self) -> bool:
        return any(lane.held for lane in self._lanes)

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

    async def _wait_while(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until the condition ends, looking whenever something is freed, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while condition():
                    self._freed.clear()
                    await self._freed.wait()

    async def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the database's answer; one that is away is asked again until the stop."""
        while True:
            try:
                if self._outage:
                    # what is in hand first: claimed again it would be sent again
                    await self._or_stopped(self._renew(1.0))
                answer = await self._or_stopped(question())
            except Error as error:
                pause = self._outage.failed(error)
            else:
                if self._outage:
                    # others may hold outcomes of rows whose leases ended meanwhile: they record first
                    for lane in self._lanes:
                        lane.recovered_at = time.monotonic() + AWAY_PAUSE[1]
                self._outage.ended()
                return answer
            self._touch()
            if await self._wait(self._stopping, pause):
                raise _Stopped

    async def _or_stopped(self, question: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a question to the database, which may hang: a stop gives it ``LAST_ANSWER`` more."""
        asking = asyncio.ensure_future(question)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # what a claim brings after the stop is handed back, not left to its lease
            await asyncio.wait({asking}, timeout=LAST_ANSWER)
            if asking.done():
                return asking.result()
        finally:
            stopping.cancel()
            asking.cancel()
        logger.error("outbox stop: the database does not answer")
        raise _Stopped


def _send(signal: Signal, calls: list[dict[str, Any]], *, using: str) -> None:
    close_old_connections()
    for call in calls:
        signal.send_robust(Worker, using=using, **call)
    close_old_connections()
