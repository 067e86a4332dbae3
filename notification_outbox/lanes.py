"""What a worker has in hand, lane by lane: who waits for a start, who runs, whose outcome is not recorded yet.

Bookkeeping in memory only. A row is in hand from its claim until its outcome is recorded or its lease lost, and
counts by rows and by sealed bytes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from .conf import PublisherSettings, Settings
from .delivery import Rules
from .envelope import Claim
from .publishers import Publisher, build
from .suspects import PROCESS


@dataclass(eq=False, slots=True)
class Held:
    """A claim in hand. ``ends`` is when its lease ends by the loop's clock, taken before the claim was sent.

    ``runner`` delivers it just now. ``closed``: its outcome is known or its lease lost, and whatever a delivery
    still brings comes too late.
    """

    claim: Claim
    ends: float
    runner: asyncio.Task[None] | None = None
    closed: bool = False


class Lane:
    """One publisher alias at work: its publisher, and what is in hand for it."""

    def __init__(self, settings: PublisherSettings, project: Settings, concurrency: int | None) -> None:
        self.settings = settings
        self.alias = settings.alias
        self.rules = Rules(project.validators, project.max_body_bytes, settings.body, project.deliver)
        self.publisher: Publisher = build(settings)
        self.concurrency = concurrency or settings.concurrency
        self.capacity = 3 * self.concurrency
        # asked for again when a good part is free: many small claims cost more than one
        self.refill = self.concurrency
        self.waiting: asyncio.Queue[Held] = asyncio.Queue()
        self.runners: list[asyncio.Task[None]] = []
        self.held: dict[int, Held] = {}
        self.open = 0
        self.bytes_held = 0
        self.recovered_at = float("-inf")

    def take(self, held: Held) -> None:
        """Count a claim and let it wait for a start."""
        self.held[held.claim.id] = held
        self.open += 1
        self.bytes_held += len(held.claim.sealed or b"")
        self.waiting.put_nowait(held)

    def close(self, held: Held) -> None:
        """Its outcome is known: it makes room for another before the outcome is recorded."""
        if not held.closed:
            held.closed = True
            self.open -= 1

    def drop(self, held: Held) -> None:
        """Take it out of hand: recorded or lost."""
        self.close(held)
        del self.held[held.claim.id]
        self.bytes_held -= len(held.claim.sealed or b"")
        PROCESS.drop(held.claim, time.monotonic())

    @property
    def room(self) -> int:
        # outcomes that cannot be recorded must not pile up without end
        return min(self.capacity - self.open, 2 * self.capacity - len(self.held))

    @property
    def hungry(self) -> bool:
        return not self.held or self.room >= self.refill
