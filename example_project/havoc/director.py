"""Who breaks what, when; and who was in whose hands at that moment."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from django.db import Error, connection
from django.db.models import Q, QuerySet

from notification_outbox import conf
from notification_outbox.lifecycle import LIVE
from notification_outbox.models import OutboxMessage
from shop.models import Order
from stage import say

from .database import Database
from .judge import Evidence
from .orders import Customers
from .receiver import MOODS, Receiver
from .workers import Crew

TICK = 0.05
REPORT_EVERY = 10.0
PATIENCE = 180.0  # seconds for the outbox to become empty once all is well
BEFORE = 1.0  # seconds before an outage in which what was accepted may not have been recorded yet

T = TypeVar("T")


class Director:
    """Breaks things for a while, mends them, and gathers the evidence for the judge."""

    def __init__(
        self, database: Database, receiver: Receiver, customers: Customers, crew: Crew, dice: random.Random
    ) -> None:
        self._database, self._receiver, self._customers, self._crew = database, receiver, customers, crew
        self._dice = dice
        self._lease = conf.get().publisher("default").lease
        self._in_hand: Counter[str] = Counter()
        self._outages: list[float] = []
        self._away_since: float | None = None
        self._before: set[str] = set()
        self._began = time.monotonic()
        self._told = self._began

    def rage(self, seconds: float) -> None:
        """Break things at random moments for so long."""
        now = time.monotonic()
        end = now + seconds
        events: dict[Callable[[], float], float] = {
            self._kill: now + 3,
            self._flap: now + 1,
            self._outage: now + self._dice.uniform(3, 6),
        }
        while (now := time.monotonic()) < end:
            self._crew.keep()
            for event, moment in list(events.items()):
                if now >= moment:
                    events[event] = time.monotonic() + event()
            self._tell()
            time.sleep(TICK)

    def calm(self) -> None:
        """Make all well again."""
        self._receiver.become("well")
        if self._away_since is not None:
            self._outage()
        self._crew.keep()

    # each breaks or mends something and returns in how many seconds it wants to be called again

    def _kill(self) -> float:
        pid = self._crew.kill_one()
        if pid is not None and self._away_since is None:
            # while the database is away its rows cannot be read; what was in hand then counts by the outage
            self._in_hand.update(self._in_flight(Q(leased_by__contains=f":{pid}:")))
        return min(self._dice.expovariate(1 / 3), 10)

    def _flap(self) -> float:
        well = self._receiver.mood == "well"
        self._receiver.become(self._dice.choice(MOODS) if well else "well")
        return self._dice.uniform(0.5, 3)

    def _outage(self) -> float:
        if self._away_since is None:
            self._before = self._in_flight(Q())
            self._away_since = time.monotonic()
            self._database.stop()
            long = self._dice.random() < 0.4
            return (
                self._dice.uniform(self._lease + 1, self._lease + 3) if long else self._dice.uniform(0.2, 2)
            )
        self._database.start()
        # recovered rows may already be claimed again: those that lost a lease since their last outcome say so
        after = self._in_flight(Q(), or_lapsed=True)
        accepted = self._receiver.accepted_since(self._away_since - BEFORE)
        self._in_hand.update(self._before | after | accepted)
        self._outages.append(time.monotonic() - self._away_since)
        self._away_since = None
        return self._dice.uniform(5, 20)

    def _in_flight(self, which: Q, *, or_lapsed: bool = False) -> set[str]:
        """Return the orders whose messages workers have in hand."""
        state = Q(state="in_flight") | Q(lost_leases__gt=0) if or_lapsed else Q(state="in_flight")
        rows = OutboxMessage.objects.filter(state, which)
        return set(ask(lambda: states(rows)))

    def wait_until_empty(self) -> None:
        """Give the workers time to deliver what is left; whatever remains the judge will find."""
        waiting = OutboxMessage.objects.filter(state__in=[state.value for state in LIVE])
        deadline = time.monotonic() + PATIENCE
        while left := ask(waiting.count):
            if time.monotonic() > deadline:
                say(f"{left} messages still wait after {PATIENCE:.0f} s")
                return
            self._crew.keep()
            self._tell()
            time.sleep(TICK)

    def evidence(self) -> Evidence:
        """Return what the judge needs; call it when everybody has stopped."""
        return Evidence(
            placed=self._customers.placed,
            confirmed=self._customers.confirmed,
            committed=set(Order.objects.values_list("number", flat=True)),
            states=states(OutboxMessage.objects.all()),
            accepted=self._receiver.accepted,
            answers_lost=self._receiver.answers_lost,
            in_hand=self._in_hand,
            renamed=[number for number, names in self._receiver.names.items() if len(names) > 1],
            kills=self._crew.kills,
            deserted=self._crew.deserted,
            outages=len(self._outages),
            long_outages=sum(length > self._lease for length in self._outages),
            flaps=self._receiver.flaps,
        )

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told < REPORT_EVERY:
            return
        self._told = now
        away = "here" if self._away_since is None else "away"
        say(
            f"{now - self._began:4.0f} s: {len(self._customers.confirmed)} orders confirmed, "
            f"{len(self._receiver.accepted)} delivered; {self._crew.kills} workers killed, "
            f"database {away} after {len(self._outages)} outages, receiver {self._receiver.mood}"
        )


def states(messages: QuerySet[OutboxMessage]) -> dict[str, str]:
    """Return the state of each order's message."""
    found = messages.values_list("idempotency_key", "state")
    return {key.removeprefix("order-"): state for key, state in found}


def ask(question: Callable[[], T]) -> T:
    """Return the database's answer; it may have just come back, and our connection is one of those it ended."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return question()
        except Error:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(TICK)
