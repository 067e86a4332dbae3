"""Recording outcomes in batches, waiting for the database as long as it takes.

One transaction records what came together; a row that the database refuses is recorded, or given up, alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from django.db import DataError, Error, IntegrityError

from . import leases
from .asking import come
from .database import DatabaseThread, Outage
from .envelope import Claim
from .leases import Settlement
from .lifecycle import Outcome, Verdict
from .tally import Tally

logger = logging.getLogger("notification_outbox")

# one transaction records so many outcomes at most, or what came in so many seconds
BATCH = 400
PAUSE = 0.025
LEVELS = {Verdict.DELIVERED: logging.DEBUG, Verdict.QUARANTINED: logging.WARNING}


class Settler:
    """Takes outcomes at any time and records them; ``recorded(batch, lost)`` is told what became of a batch.

    ``log_attempts`` as in the settings: which attempts get a row, marked with ``worker_id``.
    """

    def __init__(
        self,
        database: DatabaseThread,
        recorded: Callable[[list[Settlement], list[Settlement]], None],
        *,
        worker_id: str,
        log_attempts: str,
    ) -> None:
        self._database = database
        self._recorded = recorded
        self._worker_id = worker_id
        self._log_attempts = log_attempts
        self._unsettled: list[Settlement] = []
        self._soon = asyncio.Event()
        self._now = asyncio.Event()
        self._tally = Tally()
        self.outage = Outage("settle")

    def add(self, claim: Claim, outcome: Outcome, took: float | None) -> None:
        """Have an outcome recorded soon, with the seconds it ``took`` if it was attempted."""
        handed_back = outcome.verdict is Verdict.RELEASED and not outcome.error
        logger.log(
            logging.DEBUG if handed_back else LEVELS.get(outcome.verdict, logging.INFO),
            "outbox deliver id=%s publisher=%s attempt=%s outcome=%s error=%s",
            claim.id,
            claim.binding.publisher,
            claim.attempt,
            outcome.verdict,
            outcome.error,
        )
        if self._log_attempts == "none" or (
            self._log_attempts == "failures" and outcome.verdict is Verdict.DELIVERED
        ):
            took = None
        self._unsettled.append(Settlement(claim, outcome, self._worker_id, took))
        self._soon.set()
        if len(self._unsettled) >= BATCH:
            self.hurry()

    def hurry(self) -> None:
        """Record at once what has come: it is enough, or nothing more is on its way."""
        self._now.set()

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            await self._soon.wait()
            if len(self._unsettled) < BATCH:
                # a short wait makes one transaction of many outcomes
                await come(self._now, PAUSE)
            self._now.clear()
            batch = self._unsettled[:BATCH]
            del self._unsettled[:BATCH]
            if not self._unsettled:
                self._soon.clear()
            self._recorded(batch, await self._record(batch))

    async def _record(self, batch: list[Settlement]) -> list[Settlement]:
        """Return the settlements that changed nothing."""
        while True:
            try:
                lost = await self._database(leases.settle, settlements=batch, tally=self._tally)
            except (IntegrityError, DataError) as error:
                if len(batch) == 1:
                    refused = type(error).__name__
                    logger.error("outbox settle refused id=%s error=%s", batch[0].claim.id, refused)
                    return batch
                # one bad row must not lose the others
                return [lost for one in batch for lost in await self._record([one])]
            except Error as error:
                # also a server that became read-only (a demoted primary) or lost its tables for a while
                pause = self.outage.failed(error)
            else:
                self.outage.ended()
                return lost
            await asyncio.sleep(pause)
