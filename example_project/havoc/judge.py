"""The judge of a chaos run: what happened, as counts by order number, and what must be true of it.

Knows no table and no socket. An order stands for its message: they are written in one transaction. A duplicate is
a request beyond an order's first that the receiver accepted. It is explained when the receiver never let the sender
know of an acceptance, or when a worker had the message in hand as it was killed or as the database went away; each
such event explains one. Anything else is a message sent again although its worker lived and knew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from figures import Figures


@dataclass
class Evidence:
    """Orders by number: ``placed`` at all, ``confirmed`` to the customer, ``committed`` in the end, the ``states``
    of their messages, how often they were ``accepted`` by the receiver, how often it kept that to itself
    (``answers_lost``), how often a worker had them ``in_hand`` at a kill or an outage, and those that came under
    more than one message id (``renamed``).
    """

    placed: Collection[str] = ()
    confirmed: Collection[str] = ()
    committed: Collection[str] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    accepted: Counter[str] = field(default_factory=Counter)
    answers_lost: Counter[str] = field(default_factory=Counter)
    in_hand: Counter[str] = field(default_factory=Counter)
    renamed: Collection[str] = ()
    kills: int = 0
    deserted: int = 0
    outages: int = 0
    long_outages: int = 0
    flaps: int = 0


def judge(evidence: Evidence) -> Figures:
    """Return the table of what happened; its verdict is the run's."""
    committed = set(evidence.committed)
    delivered = {number for number in committed if evidence.accepted[number]}
    unsettled = {number for number in delivered if evidence.states.get(number) != "delivered"}
    lost = (committed - delivered) | unsettled | (set(evidence.confirmed) - committed)
    by_trouble = by_silence = unexplained = 0
    for number, times in evidence.accepted.items():
        beyond = times - 1
        silence = min(beyond, evidence.answers_lost[number])
        trouble = min(beyond - silence, evidence.in_hand[number])
        by_silence += silence
        by_trouble += trouble
        unexplained += beyond - silence - trouble

    table = Figures()
    table.add("committed", len(committed))
    table.add("rolled back", len(set(evidence.placed) - committed))
    table.add("delivered", len(delivered), len(committed))
    table.add("duplicates", by_silence + by_trouble + unexplained)
    table.add("  in hand at a kill or outage", by_trouble)
    table.add("  the answer was lost", by_silence)
    table.add("  unexplained", unexplained, 0)
    table.add("  under another message id", len(evidence.renamed), 0)
    table.add("workers killed", evidence.kills)
    table.add("  ended by themselves", evidence.deserted, 0)
    table.add("database outages", evidence.outages, note=f"{evidence.long_outages} longer than a lease")
    table.add("receiver flaps", evidence.flaps)
    table.add("sent though rolled back", len(evidence.accepted.keys() - committed), 0)
    table.add("lost", len(lost), 0, note=", ".join(f"{n} {evidence.states.get(n)}" for n in sorted(lost)[:5]))
    return table
