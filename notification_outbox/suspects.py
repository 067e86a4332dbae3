"""Suspects: how a process holds messages that other workers were holding when they died.

A message whose lease ended with its worker may have killed it. Such messages are claimed a few at a time; one
whose lease was lost ``LONE_AT`` times is claimed alone, with nothing else in hand in the whole process, so that
when it ends its worker once more no other message is there to be blamed. Innocent ones lose the suspicion with
their first settled attempt. The bookkeeping is the process's, since it is the process that dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .envelope import Claim
from .lifecycle import LONE_AT, TOGETHER, Lone

# of the time, lone messages get at most one part in so many; the wait for free hands counts as theirs
SHARE = 5


@dataclass(frozen=True, slots=True)
class Terms:
    """What a claim may bring: so many ``suspects``, and what to do about a ``lone`` one."""

    suspects: int
    lone: Lone


class Suspects:
    """What one process has in hand, over all its workers and databases. Times are the event loop's, in seconds."""

    def __init__(self) -> None:
        # messages, and claims on their way that may bring some
        self._in_hand = 0
        self._suspects = 0
        self._alone = False
        self._since: float | None = None
        self._rest_until = float("-inf")

    def ask(self, now: float, patience: float = float("inf")) -> Terms | None:
        """Return the terms of a claim, or None while nothing may be claimed; what it brings goes to ``answered``.

        What is not over after ``patience`` seconds, the wait for free hands and the lone message's own attempt, is
        waited for no longer: some database may be away or hang.
        """
        if self._since is not None and now - self._since > patience:
            self._alone = False
            self._rest(now)
        if self._alone or (self._since is not None and self._in_hand):
            return None
        lone = Lone.SKIPPED
        if now >= self._rest_until:
            lone = Lone.REPORTED if self._in_hand else Lone.TAKEN
        if lone is Lone.TAKEN:
            # until it is answered nobody else may take anything beside a lone one
            self._alone = True
            self._since = now if self._since is None else self._since
        self._in_hand += 1
        return Terms(max(TOGETHER - self._suspects, 0), lone)

    def answered(self, terms: Terms, claims: Sequence[Claim], *, lone_met: bool, now: float) -> None:
        """Count what came; ``lone_met``: a lone one was seen and left where it was."""
        self._in_hand += len(claims) - 1
        self._suspects += sum(0 < claim.lost_leases < LONE_AT for claim in claims)
        if terms.lone is Lone.TAKEN:
            self._alone = any(claim.lost_leases >= LONE_AT for claim in claims)
            if not self._alone:
                self._rest(now)
            elif self._since is None:
                # it came so late that nobody waited for it any more
                self._since = now
        elif lone_met and self._since is None:
            self._since = now

    def drop(self, claim: Claim, now: float) -> None:
        """Take a message out of hand."""
        self._in_hand -= 1
        if claim.lost_leases >= LONE_AT:
            self._alone = False
            self._rest(now)
        elif claim.lost_leases:
            self._suspects -= 1

    def _rest(self, now: float) -> None:
        since = now if self._since is None else self._since
        self._rest_until = now + (SHARE - 1) * (now - since)
        self._since = None


PROCESS = Suspects()
