"""Leases: the only code that moves a message after its insert.

``claim`` takes due rows, ``settle`` records what came of them, ``renew`` keeps them, ``release`` hands them back
unattempted, ``requeue`` revives dead letters, ``cancel`` and ``quarantine`` give up live ones, ``send_now`` brings
pending ones forward, ``expunge`` erases bodies, ``purge`` deletes what is kept no longer. Every mover first locks
its rows in id order and then writes only those that are still as it believes (compare-and-swap on the lease
token), so that a stale worker harms nobody; what it lost, it is told. The database owns the clock. Transactions
are short, READ COMMITTED, and wait for a lock only in their first statement.
"""

from .claiming import CLAIMED, Claimed, Recovered, claim, next_due, recover, renew
from .operating import Resealed, cancel, quarantine, requeue, reseal, send_now
from .retention import expunge, expunge_delivered, purge, purge_attempts, purgeable
from .rows import Among, Ended, StateLiteral
from .settling import Settlement, release, settle

__all__ = [
    "CLAIMED",
    "Among",
    "Claimed",
    "Ended",
    "Recovered",
    "Resealed",
    "Settlement",
    "StateLiteral",
    "cancel",
    "claim",
    "expunge",
    "expunge_delivered",
    "next_due",
    "purge",
    "purge_attempts",
    "purgeable",
    "quarantine",
    "recover",
    "release",
    "renew",
    "requeue",
    "reseal",
    "send_now",
    "settle",
]
