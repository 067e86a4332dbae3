"""Telling receivers of signals what became of messages: in a thread of its own, after the commit, nobody obeyed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from django.db import close_old_connections
from django.dispatch import Signal

from . import signals
from .database import DatabaseThread
from .leases import Ended
from .lifecycle import State

logger = logging.getLogger("notification_outbox")

ENDS = {
    State.DELIVERED: signals.message_delivered,
    State.QUARANTINED: signals.message_quarantined,
    State.EXPIRED: signals.message_expired,
}


class Teller:
    """Sends the signals of one worker, ``sender`` being its class, in the order in which they are told."""

    def __init__(self, sender: type[object], using: str) -> None:
        self._sender = sender
        self._thread = DatabaseThread(using, "signals")

    def tell(self, signal: Signal, **carried: Any) -> None:
        """Have a signal sent soon, if anybody listens."""
        if signal.has_listeners(self._sender):
            self._thread.soon(_send, signal=signal, sender=self._sender, carried=carried)

    def tell_ends(self, messages: Iterable[Ended]) -> None:
        """Have told which messages were delivered, quarantined or expired."""
        listened = {state: signal for state, signal in ENDS.items() if signal.has_listeners(self._sender)}
        for one in messages if listened else ():
            if one.state in listened:
                self.tell(listened[one.state], id=one.id, message_id=one.message_id)

    async def close(self, patience: float) -> None:
        """Let receivers hear what was told, for ``patience`` seconds."""
        if not await self._thread.close(patience):
            logger.error("outbox stop: receivers of signals did not end in time, some were not told")


def _send(signal: Signal, sender: type[object], carried: dict[str, Any], *, using: str) -> None:
    close_old_connections()
    signal.send_robust(sender, using=using, **carried)
    close_old_connections()
