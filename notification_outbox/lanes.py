"""A lane at work: what is in hand for one publisher alias, and the runners that deliver it.

In memory only. A row is in hand from its claim until its outcome is recorded or its lease lost, and counts by rows
and by sealed bytes. What becomes of a message is for ``delivery`` to say, and for who owns the lane to record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .conf import LEASE_MARGIN, PublisherSettings, Settings
from .delivery import Rules, classify, prepare, publish
from .envelope import Claim, Message
from .lifecycle import Outcome, Verdict
from .publishers import Publisher, build
from .suspects import PROCESS

logger = logging.getLogger("notification_outbox")

# seconds that a publisher may take to end a cancelled delivery, and to close
LAST_STEP = 3.0
# how much is in hand beyond what runs: what will be started in so many seconds, at least one round of the runners,
# which is all that a slow receiver should keep from other workers, and at most so many rounds
AHEAD_SECONDS = 0.1
ROUNDS_AHEAD = 5
# a crowd of small messages opened together costs half of what each costs on its own; a large one waits its turn
OPENED_AHEAD = 64 * 1024


@dataclass(eq=False, slots=True)
class Held:
    """A claim in hand. ``ends`` is when its lease ends by ``time.monotonic()``, taken before the claim was sent.

    ``message`` is what it holds, or what came of opening it. ``runner`` delivers it just now. ``closed``: its
    outcome is known or its lease lost, and whatever a delivery still brings comes too late.
    """

    claim: Claim
    ends: float
    runner: asyncio.Task[None] | None = None
    closed: bool = False
    message: Message | Outcome | None = None


class Lane:
    """One publisher alias: its publisher, its runners and what is in hand for it.

    ``settled(lane, held, outcome, took)`` is told how each delivery ended, and ``broke(error)`` when a runner did.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        project: Settings,
        *,
        concurrency: int | None,
        settled: Callable[[Lane, Held, Outcome, float | None], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.alias = settings.alias
        self.settings = settings
        self._rules = Rules(project.validators, project.max_body_bytes, settings.body, project.deliver)
        self._keyring = project.keyring
        self._settled = settled
        self._broke = broke
        self.publisher: Publisher = build(settings)
        self._concurrency = concurrency or settings.concurrency
        self._ahead = self._concurrency
        self.most = (1 + ROUNDS_AHEAD) * self._concurrency
        self._ended_lately = 0
        self._looked_at = float("-inf")
        self._waiting: deque[Held] = deque()
        self._runners: set[asyncio.Task[None]] = set()
        self.held: dict[int, Held] = {}
        self.unfinished = 0  # in hand, and no outcome yet
        self.bytes_held = 0
        self.recovered_at = float("-inf")

    # what is in hand

    @property
    def room(self) -> int:
        """How many more rows it may take."""
        # outcomes that cannot be recorded must not pile up without end
        return min(self._concurrency + self._ahead - self.unfinished, 3 * self.most - len(self.held))

    @property
    def hungry(self) -> bool:
        """Whether it is time for a claim: many small ones cost more than one, so a good part must be free."""
        return not self.held or self.room >= max(self._concurrency, self._ahead // 2)

    def look_ahead(self, now: float) -> None:
        """After a claim: have as much in hand from now on as the pace since the last one suggests."""
        pace = self._ended_lately / max(now - self._looked_at, 0.001)
        # one slow moment says little: what is in hand shrinks by halves
        wanted = max(pace * AHEAD_SECONDS, self._ahead / 2, self._concurrency)
        self._ahead = round(min(wanted, ROUNDS_AHEAD * self._concurrency))
        self._ended_lately = 0
        self._looked_at = now

    def take(self, held: Held) -> None:
        """Take a claim in hand, to be delivered as soon as a runner is free."""
        if (before := self.held.get(held.claim.id)) is not None:
            # its lease ended and the row came to us again
            self.drop(before)
        self.held[held.claim.id] = held
        self.unfinished += 1
        self.bytes_held += len(held.claim.sealed or b"")
        if len(held.claim.sealed or b"") <= OPENED_AHEAD:
            held.message = self._prepare(held.claim)
        self._waiting.append(held)
        if len(self._runners) < self._concurrency:
            runner = asyncio.create_task(self._deliver())
            runner.add_done_callback(self._ended)
            self._runners.add(runner)

    def close(self, held: Held) -> None:
        """Its outcome is known: it makes room for another before the outcome is recorded."""
        if not held.closed:
            held.closed = True
            self.unfinished -= 1
            self._ended_lately += 1

    def drop(self, held: Held) -> None:
        """Take it out of hand, recorded or lost; a delivery that still runs is cancelled."""
        self.close(held)
        self.cancel(held)
        del self.held[held.claim.id]
        self.bytes_held -= len(held.claim.sealed or b"")
        PROCESS.drop(held.claim, time.monotonic())

    def cancel(self, held: Held) -> None:
        """Stop the delivery of a message that is closed, if it runs."""
        if held.runner is not None:
            held.runner.cancel()
            held.runner = None

    # delivering

    def _prepare(self, claim: Claim) -> Message | Outcome:
        policy = self.settings.retry
        return prepare(claim, self.publisher, keyring=self._keyring, rules=self._rules, policy=policy)

    async def _deliver(self) -> None:
        """Deliver one message after another while some wait."""
        runner = asyncio.current_task()
        assert runner is not None
        settings = self.settings
        while self._waiting:
            held = self._waiting.popleft()
            if held.closed:
                continue
            began = time.monotonic()
            if held.ends - began < settings.attempt_timeout + LEASE_MARGIN:
                self._settled(self, held, Outcome(Verdict.RELEASED), None)
                continue
            held.runner = runner
            outcome = None
            try:
                message = held.message or self._prepare(held.claim)
                if isinstance(message, Outcome):
                    outcome = message
                else:
                    outcome = await publish(
                        message,
                        held.claim,
                        self.publisher,
                        policy=settings.retry,
                        timeout=settings.attempt_timeout,
                    )
            except asyncio.CancelledError as error:
                if not runner.cancelling():
                    # not we cancelled it: something inside the publisher did
                    claim = held.claim
                    outcome = classify(
                        error, settings.retry, attempts=claim.attempt, rejections=claim.rejections
                    )
                elif not held.closed:
                    raise
            held.runner = None
            if held.closed and runner.cancelling():
                # this delivery was cancelled, not this runner; unless both were
                runner.uncancel()
                if runner.cancelling():
                    return
            if outcome is not None:
                self._settled(self, held, outcome, time.monotonic() - began)
        # what comes from now on is another runner's
        self._runners.discard(runner)

    def _ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()) is not None:
            for held in self.held.values():
                if held.runner is runner:
                    # nobody delivers it any more: it is handed back
                    held.runner = None
            self._broke(error)

    # ending

    async def end(self) -> None:
        """Stop the runners; a delivery that ignores its cancellation is left behind."""
        if not self._runners:
            return
        for runner in self._runners:
            runner.cancel()
        _, stuck = await asyncio.wait(self._runners, timeout=LAST_STEP)
        if stuck:
            logger.error(
                "outbox stop publisher=%s: %s deliveries ignore their cancellation", self.alias, len(stuck)
            )

    async def close_publisher(self) -> None:
        """Close the publisher, if it lets itself be closed in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP):
                return await self.publisher.close()
        logger.error("outbox stop publisher=%s: its close() does not end", self.alias)
        return None
