"""Housekeeping: deletes or erases what is kept no longer, beside the deliveries and never in their way.

Works in small locked chunks with a pause between them, in a thread of its own. Whatever goes wrong here is said
once and tried again at the next round: a failing purge never stops or delays a delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from django.db import Error

from . import leases, tally
from .conf import Retention
from .database import DatabaseThread

logger = logging.getLogger("notification_outbox")

EVERY = 60.0
CHUNK = 500
BREATH = 0.05


async def keep_house(database: DatabaseThread, retention: Retention) -> None:
    """Purge until nothing is left to purge, once a minute, until cancelled."""
    failing = False
    while True:
        try:
            deleted = await _drain(database, leases.purge, retention=retention)
            deleted += await _drain(database, leases.purge_attempts, retention=retention)
            expunged = await _drain(database, leases.expunge_delivered, retention=retention)
            await _drain(database, tally.tidy)
        except Error as error:
            if not failing:
                logger.error("outbox purge failed error=%s: it is tried again", type(error).__name__)
            failing = True
        else:
            failing = False
            if deleted or expunged:
                logger.info("outbox purge deleted=%s expunged=%s", deleted, expunged)
        await asyncio.sleep(EVERY)


async def _drain(database: DatabaseThread, purge: Callable[..., int], **arguments: object) -> int:
    total = 0
    while done := await database(purge, limit=CHUNK, **arguments):
        total += done
        await asyncio.sleep(BREATH)
    return total
