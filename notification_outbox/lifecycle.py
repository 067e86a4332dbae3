"""The life of a message as values: states, reasons, faults, and the one function that decides what comes next.

Pure: no clock, no database, no settings. ``decide()`` says what should happen; ``leases`` makes it so, and
where the two disagree (the lease was lost meanwhile) the table is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Where a message is. Live states wait for a worker, the others are settled."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    BLOCKED = "blocked"
    DELIVERED = "delivered"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


LIVE = (State.PENDING, State.IN_FLIGHT, State.BLOCKED)
SETTLED = (State.DELIVERED, State.QUARANTINED, State.EXPIRED, State.CANCELLED)
DEAD = (State.QUARANTINED, State.EXPIRED)


class BlockedBy(StrEnum):
    """Why a message is out of the claim's reach."""

    ORDER = "order"
    PAUSE = "pause"


class QuarantineReason(StrEnum):
    """Why a message was given up, in one word an operator can filter by."""

    TAMPERED = "tampered"
    UNREADABLE = "unreadable"
    DESTINATION_FORBIDDEN = "destination_forbidden"
    SCOPE_UNKNOWN = "scope_unknown"
    REJECTED = "rejected"
    GONE = "gone"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    WORKER_LOST = "worker_lost"
    INVALID_REQUEST = "invalid_request"
    PUBLISHER_REFUSED = "publisher_refused"
    OPERATOR = "operator"


# leases lost in a row after which a message is claimed alone; lost once more, it is what ends its workers
LONE_AT = 2
# of messages with fewer lost leases, how many may be in hand at a time
TOGETHER = 4


class Lone(StrEnum):
    """What a claim does about a message that may only be claimed alone.

    SKIPPED   looks past it
    REPORTED  leaves it and says that it is there
    TAKEN     takes the first one and nothing else
    """

    SKIPPED = "skipped"
    REPORTED = "reported"
    TAKEN = "taken"


# last_error of a row that waits for a key this process lacks, followed by the key's id
UNKNOWN_KEY = "unknown_key:"
# last_error of a row that this copy of the project must not send (``DELIVER``)
NOT_HERE = "not_delivered_here"


class Fault(StrEnum):
    """Whose fault a failed attempt is.

    DESTINATION  unreachable, slow, broken or busy: backoff, counts towards ``MAX_ATTEMPTS``
    NAME         its name does not resolve: backoff, never exhausts attempts
    REJECTION    it answered and refused: counts towards ``MAX_REJECTIONS``
    FORBIDDEN    its name led to an address the policy refuses: counts towards ``MAX_REJECTIONS``
    """

    DESTINATION = "destination"
    NAME = "name"
    REJECTION = "rejection"
    FORBIDDEN = "forbidden"


class Answer(NamedTuple):
    """What is known of the other side after an attempt: HTTP status, phase reached, peer's ``address:port``."""

    status: int | None = None
    phase: str = ""
    peer: str = ""


class Verdict(StrEnum):
    """What becomes of a claimed message."""

    DELIVERED = "delivered"
    RETRY = "retry"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Outcome(NamedTuple):
    """What one claim came to, in the words ``leases.settle`` understands.

    ``delay`` is the pause in seconds before a worker may take the message again (RETRY, RELEASED); None: the
    longer it has waited, the longer (``patience``).
    ``rejections`` is the new count of rejections in a row. A RELEASED message was not attempted: its attempt
    is refunded and no attempt row is written.
    """

    verdict: Verdict
    delay: float | None = 0.0
    reason: QuarantineReason | None = None
    error: str = ""
    rejections: int = 0
    answer: Answer = Answer()


def patience(waited: float) -> float:
    """Return the pause in seconds of a message that waits for another worker since ``waited`` seconds."""
    return min(max(waited / 8, 5.0), 900.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait and how often to try. Durations in seconds; None for a count means no limit.

    The pause before attempt n+1 is ``min(base * factor**(n-1), cap)``, spread by ``jitter`` (0.25: between
    three and five quarters of it) so that a crowd that failed together does not come back together.
    """

    base: float = 5.0
    factor: float = 2.0
    cap: float = 4 * 3600.0
    jitter: float = 0.25
    max_attempts: int | None = None
    max_rejections: int | None = 12

    def pause(self, attempts: int, dice: Callable[[], float] = random.random) -> float:
        """Return the pause in seconds after ``attempts`` attempts; ``dice`` gives a number in [0, 1)."""
        # 2.0**1024 overflows a float; by then every cap is reached
        steps = min(max(attempts - 1, 0), 64)
        return min(self.base * self.factor**steps, self.cap) * (1 + self.jitter * (2 * dice() - 1))


def decide(
    fault: Fault,
    *,
    code: str,
    attempts: int,
    rejections: int,
    policy: RetryPolicy,
    retry_after: float | None = None,
    answer: Answer | None = None,
    dice: Callable[[], float] = random.random,
) -> Outcome:
    """Return what becomes of a message whose attempt failed.

    ``attempts`` counts this attempt, ``rejections`` those in a row before it. A ``retry_after`` from the peer
    is never undercut: the pause is the longer of its wish and our own, and jitter only adds to its wish.
    """
    refused = fault in (Fault.REJECTION, Fault.FORBIDDEN)
    rejections = rejections + 1 if refused else 0
    reason: QuarantineReason | None = None
    if refused and policy.max_rejections is not None and rejections >= policy.max_rejections:
        forbidden = fault is Fault.FORBIDDEN
        reason = QuarantineReason.DESTINATION_FORBIDDEN if forbidden else QuarantineReason.REJECTED
    elif fault is not Fault.NAME and policy.max_attempts is not None and attempts >= policy.max_attempts:
        reason = QuarantineReason.ATTEMPTS_EXHAUSTED
    wish = (retry_after or 0.0) * (1 + policy.jitter * dice())
    return Outcome(
        verdict=Verdict.QUARANTINED if reason else Verdict.RETRY,
        delay=0.0 if reason else max(policy.pause(attempts, dice), wish),
        reason=reason,
        error=code,
        rejections=rejections,
        answer=answer or Answer(),
    )
