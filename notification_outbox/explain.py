"""What a message's row means, for people: why it is here, what happens next, whether a requeue can help.

Pure: judges a row's columns and the database's now. Written for somebody who has never seen the code and was just
woken up: short sentences, no jargon, what to do. Every state, quarantine reason and code that our own rooms write
has its words; what a stranger's publisher raised is shown by its name.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from django.utils.functional import Promise
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from .lifecycle import NOT_HERE, UNKNOWN_KEY, BlockedBy, QuarantineReason, State

Words = str | Promise


class Standing(StrEnum):
    """A state as operators see it: what is pending is due, scheduled or between two attempts."""

    DUE = "due"
    SCHEDULED = "scheduled"
    RETRYING = "retrying"
    IN_FLIGHT = "in_flight"
    BLOCKED = "blocked"
    DELIVERED = "delivered"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


STANDINGS: dict[Standing, Words] = {
    Standing.DUE: _("due"),
    Standing.SCHEDULED: _("scheduled"),
    Standing.RETRYING: _("retrying"),
    Standing.IN_FLIGHT: _("in flight"),
    Standing.BLOCKED: _("blocked"),
    Standing.DELIVERED: _("delivered"),
    Standing.QUARANTINED: _("quarantined"),
    Standing.EXPIRED: _("expired"),
    Standing.CANCELLED: _("cancelled"),
}


class Meaning(NamedTuple):
    """A quarantine reason: a short name, a sentence, whether a requeue can help, and what must be done first."""

    name: Words
    sentence: Words
    can_help: bool
    advice: Words


REASONS: dict[str, Meaning] = {
    QuarantineReason.TAMPERED: Meaning(
        _("tampered"),
        _("The row was changed after it was stored, so it was not sent. Somebody may have edited the table."),
        False,
        _(
            "No: it can never be sent. Find out who changed the row, and have the application send a new message."
        ),
    ),
    QuarantineReason.UNREADABLE: Meaning(
        _("unreadable"),
        _("No worker had the key that the message is encrypted with until its time ran out."),
        True,
        _(
            "Yes, once the workers have the key: put it back into ENCRYPTION_KEYS or SECRET_KEY_FALLBACKS first."
        ),
    ),
    QuarantineReason.DESTINATION_FORBIDDEN: Meaning(
        _("destination forbidden"),
        _("The destination leads to an address that must not be called, such as one inside the own network."),
        True,
        _("Only when its DNS entry was corrected, or the address was allowed in the settings."),
    ),
    QuarantineReason.SCOPE_UNKNOWN: Meaning(
        _("signing scope unknown"),
        _("There is no signing key for the scope the message belongs to."),
        True,
        _("Yes, once the scope has a signing key again."),
    ),
    QuarantineReason.REJECTED: Meaning(
        _("rejected"),
        _("The receiver answered and refused the message, as often as the settings allow (MAX_REJECTIONS)."),
        True,
        _("Yes, once the receiver takes such messages. Ask them why they refuse; the last answer tells how."),
    ),
    QuarantineReason.GONE: Meaning(
        _("gone"),
        _("The receiver said that this address is gone for good (HTTP 410)."),
        True,
        _("Only when the receiver has opened the same address again. A new address needs a new message."),
    ),
    QuarantineReason.ATTEMPTS_EXHAUSTED: Meaning(
        _("attempts exhausted"),
        _("It failed as often as the settings allow (MAX_ATTEMPTS)."),
        True,
        _("Yes, once the cause of the last failure is gone."),
    ),
    QuarantineReason.WORKER_LOST: Meaning(
        _("worker lost"),
        _("Three workers in a row died while they had it in hand, the last one with nothing else to do."),
        True,
        _(
            "Only when the cause is mended: a handler that ends its process, or too little memory. "
            "Otherwise it ends more workers."
        ),
    ),
    QuarantineReason.INVALID_REQUEST: Meaning(
        _("invalid request"),
        _(
            "The message breaks a rule of this project, such as a malformed URL or a body that is not allowed."
        ),
        True,
        _("Only when the rule was changed: the same message is checked again. Else send a corrected one."),
    ),
    QuarantineReason.PUBLISHER_REFUSED: Meaning(
        _("publisher refused"),
        _("The code that publishes it said that no retry can help."),
        True,
        _("Only when that code, or what it complained about, was changed."),
    ),
    QuarantineReason.OPERATOR: Meaning(
        _("set aside by an operator"),
        _("Somebody set it aside by hand; the history tells who."),
        True,
        _("Yes: it is sent as if nothing had happened. Ask whoever set it aside first."),
    ),
}

# codes of our own rooms; they complete "The last problem: …"
ERRORS: dict[str, Words] = {
    "timeout": _("the receiver did not answer in time."),
    "refused": _("the receiver's machine refuses connections; its service is probably down."),
    "unreachable": _("the receiver's machine cannot be reached over the network."),
    "reset": _("the connection broke before an answer came."),
    "tls": _(
        "no secure connection: the receiver's certificate is expired, for another name, or not trusted."
    ),
    "protocol": _("the answer was not valid HTTP."),
    "answer_too_large": _("the answer was far too large."),
    "dns": _("the receiver's host name does not exist or its name server does not answer."),
    "dns_too_many_answers": _("the receiver's host name leads to absurdly many addresses."),
    "forbidden_address": _("the host name leads to an address that must not be called."),
    "forbidden_url": _("the settings no longer allow this URL."),
    "unexpected": _("something unexpected in this program; the worker's log has more."),
    "transient": _("what publishes it was down."),
    NOT_HERE: _("this copy of the project must not send to this destination (setting DELIVER)."),
}
_HTTP: dict[str, Words] = {
    "http_401": _("the receiver did not accept the signature or credentials (HTTP 401)."),
    "http_403": _("the receiver forbids it (HTTP 403)."),
    "http_404": _("the receiver does not know this address (HTTP 404)."),
    "http_413": _("the receiver finds the message too large (HTTP 413)."),
    "http_429": _("the receiver asks to be called less often (HTTP 429)."),
}


def error_words(code: str) -> str:
    """Return what a ``last_error`` means, to follow a colon; '' for none."""
    if not code:
        return ""
    if words := ERRORS.get(code) or _HTTP.get(code):
        return str(words)
    if code.startswith("http_"):
        status = code.removeprefix("http_")
        if status.startswith("5"):
            return _now("the receiver has a failure of its own (HTTP %(status)s).") % {"status": status}
        if status.startswith("3"):
            return _now("the receiver points elsewhere (HTTP %(status)s), which is not followed.") % {
                "status": status
            }
        return _now("the receiver refused it (HTTP %(status)s).") % {"status": status}
    if code.startswith(UNKNOWN_KEY):
        return _now("the workers lack the key it is encrypted with (%(key)s).") % {
            "key": code.removeprefix(UNKNOWN_KEY)
        }
    if code.startswith("proxy_"):
        return _now("the proxy opened no way to the receiver (HTTP %(status)s).") % {
            "status": code.removeprefix("proxy_")
        }
    if code.startswith("local_"):
        return _now("the worker's own machine has a problem (%(code)s).") % {"code": code}
    if meaning := REASONS.get(code):
        return str(meaning.sentence)
    if ":" in code:
        return _now("it breaks a rule (%(code)s).") % {"code": code}
    return _now("%(code)s, raised by the code that publishes it.") % {"code": code}


def in_words(length: timedelta) -> str:
    """Return a length of time as short words: "20 s", "3 min", "5 h", "2 d"."""
    seconds = max(round(length.total_seconds()), 0)
    if seconds < 100:
        return _now("%(count)d s") % {"count": seconds}
    if seconds < 100 * 60:
        return _now("%(count)d min") % {"count": round(seconds / 60)}
    if seconds < 48 * 3600:
        return _now("%(count)d h") % {"count": round(seconds / 3600)}
    return _now("%(count)d d") % {"count": round(seconds / 86400)}


class Facts(NamedTuple):
    """What the sentences are about: a row's columns, whether it still ``holds`` a body, the database's ``now``."""

    state: str
    blocked_by: str
    quarantine_reason: str
    last_error: str
    attempts: int
    lost_leases: int
    leased_by: str
    available_at: datetime
    retry_until: datetime
    holds: bool
    now: datetime

    @classmethod
    def of(cls, row: object) -> Facts:
        """Return the facts of anything that has them as attributes."""
        return cls(*(getattr(row, name) for name in cls._fields))

    @property
    def standing(self) -> Standing:
        if self.state != State.PENDING:
            return Standing(self.state)
        if self.available_at <= self.now:
            return Standing.DUE
        return Standing.RETRYING if self.attempts or self.last_error else Standing.SCHEDULED


class Explanation(NamedTuple):
    """Three answers. ``can_help`` says whether a requeue is worth a thought."""

    why: str
    what_next: str
    requeue: str
    can_help: bool


def next_words(facts: Facts) -> str:
    """Return when something happens next, for a list: "in 3 min", "lease ends in 20 s"; '' for nothing."""
    match facts.standing:
        case Standing.DUE:
            return _now("now")
        case Standing.SCHEDULED | Standing.RETRYING:
            return _now("in %(time)s") % {"time": in_words(facts.available_at - facts.now)}
        case Standing.IN_FLIGHT if facts.available_at <= facts.now:
            return _now("lease ended")
        case Standing.IN_FLIGHT:
            return _now("lease ends in %(time)s") % {"time": in_words(facts.available_at - facts.now)}
        case Standing.BLOCKED:
            return _now("when unblocked")
    return ""


def explain(facts: Facts) -> Explanation:
    """Return the three sentences of a row."""
    return Explanation(_why(facts), _what_next(facts), *_requeue(facts))


def _why(facts: Facts) -> str:
    match facts.standing:
        case Standing.DUE:
            waits = in_words(facts.now - facts.available_at)
            why = _now("It has been due for %(time)s and waits for a worker to take it.") % {"time": waits}
        case Standing.SCHEDULED:
            why = _now("It was asked to be sent later.")
        case Standing.RETRYING:
            why = _now("It could not be sent yet and will be tried again.")
        case Standing.IN_FLIGHT:
            why = _now("The worker %(worker)s is sending it.") % {"worker": facts.leased_by or "?"}
        case Standing.BLOCKED if facts.blocked_by == BlockedBy.PAUSE:
            why = _now("Its destination is paused.")
        case Standing.BLOCKED:
            why = _now("An earlier message with the same ordering key must be delivered first.")
        case Standing.DELIVERED:
            return _now("It was delivered: the receiver accepted it.")
        case Standing.EXPIRED:
            why = _now("Its time ran out before it could be delivered.")
        case Standing.CANCELLED:
            return _now("It was cancelled by an operator or by the application.")
        case Standing.QUARANTINED:
            why = str(REASONS[facts.quarantine_reason].sentence)
            if facts.last_error == facts.quarantine_reason:
                return why
    if facts.lost_leases and facts.state == State.PENDING:
        why += " " + _now("A worker died while it had it in hand.")
    if facts.last_error:
        why += " " + _now("The last problem: %(error)s") % {"error": error_words(facts.last_error)}
    return why


def _what_next(facts: Facts) -> str:
    times = {
        "next": in_words(facts.available_at - facts.now),
        "end": in_words(facts.retry_until - facts.now),
    }
    match facts.standing:
        case Standing.DUE if facts.retry_until <= facts.now:
            return _now("Its time is over: the next worker that meets it marks it as expired.")
        case Standing.DUE:
            return (
                _now(
                    "The next free worker sends it. If that does not happen soon, see whether workers run. "
                    "It is given up in %(end)s."
                )
                % times
            )
        case Standing.SCHEDULED:
            return _now("It is sent in %(next)s.") % times
        case Standing.RETRYING:
            return _now("It is tried again in %(next)s, and given up in %(end)s.") % times
        case Standing.IN_FLIGHT if facts.available_at <= facts.now:
            return _now("The worker did not report back; another one sends it again shortly.")
        case Standing.IN_FLIGHT:
            return (
                _now("The worker reports what came of it. If it dies, another one takes over in %(next)s.")
                % times
            )
        case Standing.BLOCKED:
            return (
                _now("It goes on by itself when what blocks it is gone, and is given up in %(end)s.") % times
            )
        case Standing.QUARANTINED | Standing.EXPIRED:
            return _now("Nothing, until somebody requeues it. It is deleted at the end of its RETENTION.")
    return _now("Nothing. It is deleted at the end of its RETENTION.")


def _requeue(facts: Facts) -> tuple[str, bool]:
    match facts.standing:
        case Standing.DELIVERED:
            return _now("No need: it arrived."), False
        case Standing.CANCELLED:
            return _now("No: what was cancelled stays so. Have the application send a new message."), False
        case Standing.QUARANTINED | Standing.EXPIRED if not facts.holds:
            return _now("No: its body was erased, so there is nothing left to send."), False
        case Standing.QUARANTINED:
            meaning = REASONS[facts.quarantine_reason]
            return str(meaning.advice), meaning.can_help
        case Standing.EXPIRED:
            return _now("Yes, once the cause is gone: it gets fresh time and attempts."), True
        case Standing.SCHEDULED | Standing.RETRYING:
            return _now("Not needed: it is still being tried. 'Send now' makes it due at once."), False
    return _now("Not needed: it is still being tried."), False
