"""What the numbers mean: signs in red, amber and green, the worst first, each with what to do about it.

Pure: it is given numbers and settings' names, reads nothing and writes nothing. For people who have never seen
the code, so sentences speak of messages and lanes, and advice names the command or setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from .explain import in_words
from .lifecycle import QuarantineReason
from .stats import Lane, Numbers, bounded

# seconds that a message may be due before it is late, and before somebody should get up
LATE, TOO_LATE = 60.0, 300.0
# the share of what was settled in 24 hours that may be given up
DEAD_SHARE = 0.01


class Light(StrEnum):
    """How bad it is. RED: messages are not delivered. AMBER: look at it by day. GREEN: all is well."""

    RED = "red"
    AMBER = "amber"
    GREEN = "green"


class Sign(NamedTuple):
    """One thing that the numbers say, and what to do about it ('' when there is nothing to do)."""

    light: Light
    sentence: str
    advice: str


def judge(numbers: Numbers, *, publishers: Container[str], is_known: Callable[[str], bool]) -> list[Sign]:
    """Return what the numbers say, the worst first and at least one, in the current language.

    ``publishers`` are the aliases of this process's settings; ``is_known`` says whether they have a key id.
    """
    signs = [
        *_unserved(numbers, publishers),
        *_unreadable(numbers, is_known),
        *(sign for lane in numbers.lanes if lane.name in publishers for sign in _late(lane)),
        *_poisoned(numbers),
        *_given_up(numbers),
        *(sign for lane in numbers.lanes for sign in _failing(lane)),
    ]
    order = list(Light)
    return sorted(signs, key=lambda sign: order.index(sign.light)) or [_well(numbers)]


def _unserved(numbers: Numbers, publishers: Container[str]) -> Iterator[Sign]:
    for lane in numbers.lanes:
        if lane.name not in publishers and (
            lane.backlog.due or lane.backlog.scheduled or lane.backlog.in_flight
        ):
            yield Sign(
                Light.RED,
                _("Messages wait for the publisher “%(lane)s”, which is not configured here.")
                % {"lane": lane.name},
                _("Configure the alias in PUBLISHERS again, or cancel its messages."),
            )


def _unreadable(numbers: Numbers, is_known: Callable[[str], bool]) -> Iterator[Sign]:
    for key, count in numbers.keys.items():
        if not is_known(key):
            yield Sign(
                Light.RED,
                _("Messages (%(count)s) are sealed under the key “%(key)s”, which is not configured here.")
                % {"count": bounded(count), "key": key},
                _(
                    "Add the key to ENCRYPTION_KEYS of every process, or its secret to SECRET_KEY_FALLBACKS. "
                    "Until then they wait, and at the end of their time they become unreadable."
                ),
            )


def _late(lane: Lane) -> Iterator[Sign]:
    waited = lane.backlog.oldest_due
    if waited is None or waited < LATE:
        return
    light = Light.RED if waited >= TOO_LATE else Light.AMBER
    words = {"lane": lane.name, "age": in_words(timedelta(seconds=waited))}
    if lane.backlog.in_flight or lane.delivered or lane.failed:
        yield Sign(
            light,
            _("Deliveries of the lane “%(lane)s” are behind: its oldest message has been due for %(age)s.")
            % words,
            _("If attempts fail, mend that first. If none does, run more workers or raise CONCURRENCY."),
        )
    else:
        yield Sign(
            light,
            _("Nobody takes messages of the lane “%(lane)s”: its oldest has been due for %(age)s.") % words,
            _(
                "Start a worker that serves it (manage.py run_outbox_worker), or read why it stopped in its log."
            ),
        )


def _dead(numbers: Numbers) -> Counter[str]:
    """Return by reason what was given up in 24 hours and still is: what was requeued since asks for nothing."""
    given_up: Counter[str] = sum((Counter(lane.dead) for lane in numbers.lanes), Counter())
    return +Counter({reason: min(n, numbers.dead.get(reason, 0)) for reason, n in given_up.items()})


def _poisoned(numbers: Numbers) -> Iterator[Sign]:
    dead = _dead(numbers)
    if count := dead[QuarantineReason.TAMPERED]:
        yield Sign(
            Light.AMBER,
            _("Messages (%(count)s) were changed outside of the outbox and are not sent.")
            % {"count": _number(count)},
            _(
                "Find out who else writes to the table. Then cancel them and enqueue what they should have said."
            ),
        )
    if count := dead[QuarantineReason.WORKER_LOST]:
        yield Sign(
            Light.AMBER,
            _("Messages (%(count)s) ended the workers that delivered them.") % {"count": _number(count)},
            _("Read what killed the workers (memory, a crash in the publisher), mend it, then requeue them."),
        )


def _given_up(numbers: Numbers) -> Iterator[Sign]:
    dead = _dead(numbers)
    delivered = _delivered(numbers)
    if dead.total() > DEAD_SHARE * (delivered + dead.total()):
        ((reason, _most),) = dead.most_common(1)
        yield Sign(
            Light.AMBER,
            _("%(dead)s of %(all)s messages were given up in the last 24 hours, most as “%(reason)s”.")
            % {
                "dead": _number(dead.total()),
                "all": _number(delivered + dead.total()),
                "reason": reason,
            },
            _("Filter the messages by this reason, mend the cause, then requeue them."),
        )


def _failing(lane: Lane) -> Iterator[Sign]:
    if lane.failed >= 1 and lane.failed > lane.delivered:
        yield Sign(
            Light.AMBER,
            _("Most attempts of the lane “%(lane)s” fail just now.") % {"lane": lane.name},
            _(
                "Open one of its messages: the timeline says what the receiver answered. They are tried again."
            ),
        )


def _well(numbers: Numbers) -> Sign:
    return Sign(
        Light.GREEN,
        _("All is well: nothing is late, and %(count)s messages were delivered in the last 24 hours.")
        % {"count": _number(_delivered(numbers))},
        "",
    )


def _delivered(numbers: Numbers) -> int:
    return sum(quarter.delivered for quarter in numbers.quarters)


def _number(count: int) -> str:
    return number_format(count, force_grouping=True)
