"""One claim in, one outcome out: ``prepare`` opens it, ``publish`` sends it, what either raises is classified.

Knows neither the table nor the loop. Whatever a publisher raises ends here, as a code: its text, which may hold a
URL or a payload, goes no further.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from .drafts import Draft, header_fields
from .envelope import Claim, Content, Keyring, Message, open_sealed
from .exceptions import (
    InvalidMessage,
    PermanentPublishError,
    PublishFailed,
    Tampered,
    TransientPublishError,
    UnknownKey,
)
from .lifecycle import (
    NOT_HERE,
    UNKNOWN_KEY,
    Answer,
    Fault,
    Outcome,
    QuarantineReason,
    RetryPolicy,
    Verdict,
    decide,
)
from .payloads import Validators, bind, serialise
from .publishers import Publisher

LEAST_PAUSE, MAX_PAUSE = 1.0, 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a message is held to once more before it is published: the project may have become stricter.

    ``deliver``: the destinations, as ``Publisher.display`` shows them, that may be reached at all; None: every one.
    """

    validators: Validators
    max_body_bytes: int
    body: str = "plain"
    deliver: frozenset[str] | None = None


def prepare(
    claim: Claim, publisher: Publisher, *, keyring: Keyring, rules: Rules, policy: RetryPolicy
) -> Message | Outcome:
    """Open a claimed message and hold it to the rules; return it, or what came of it instead."""
    try:
        content = open_claim(claim, keyring)
        if rules.deliver is not None and claim.binding.destination not in rules.deliver:
            return _for_another_worker(NOT_HERE)
        message = as_message(claim, content)
        check(message, publisher, rules, checked=content.checked)
        return message
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # code that leaves its program must not take the worker with it
        return classify(error, policy, attempts=claim.attempt, rejections=claim.rejections)


async def publish(
    message: Message, claim: Claim, publisher: Publisher, *, policy: RetryPolicy, timeout: float
) -> Outcome:
    """Publish a claim's message and say what came of it. ``timeout`` in seconds bounds the attempt."""
    try:
        if publisher.own_timeout is not None and publisher.own_timeout <= timeout:
            answer = await publisher.publish(message)
        else:
            async with asyncio.timeout(timeout):
                answer = await publisher.publish(message)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return classify(error, policy, attempts=claim.attempt, rejections=claim.rejections)
    return Outcome(Verdict.DELIVERED, answer=_recordable(answer))


def open_claim(claim: Claim, keyring: Keyring) -> Content:
    """Return what the claimed row sealed. Raises ``Tampered`` or ``UnknownKey``."""
    if claim.sealed is None:
        # an expunged body is never waiting to be sent: somebody put the row back by hand
        raise Tampered
    return open_sealed(claim.sealed, claim.binding, keyring)


def as_message(claim: Claim, content: Content) -> Message:
    """Return the claimed row as publishers see it."""
    binding = claim.binding
    message = Message.__new__(Message)
    # a frozen dataclass sets its fields one by one, which costs a fifth of opening the row
    message.__dict__.update(
        id=binding.message_id,
        notification_type=binding.notification_type,
        publisher=binding.publisher,
        destination=content.destination,
        body=content.body,
        content_type=content.content_type,
        headers=content.headers,
        caller_scope_id=binding.caller_scope_id,
        account_id=binding.account_id,
        signing_scope_id=binding.signing_scope_id,
        idempotency_key=binding.idempotency_key,
        ordering_key=binding.ordering_key,
        attempt=claim.attempt,
        created_at=claim.created_at,
        traceparent=claim.traceparent,
    )
    return message


def check(message: Message, publisher: Publisher, rules: Rules, *, checked: bool) -> None:
    """Raise ``InvalidMessage`` for what must not be published.

    A message that was stored although it broke a rule (``checked`` is False) is held to all of them: a requeue
    may have followed a mended setting, or nothing at all.
    """
    if not checked:
        header_fields(dict(message.headers))
        serialise(message.body, message.content_type, rules.max_body_bytes)
        if rules.body == "bound":
            names = {
                "idempotency_key": message.idempotency_key,
                "notification_type": message.notification_type,
            }
            bind(message.body, message.body, names, message.account_id)
        to = message.destination
        publisher.validate(
            Draft(message.notification_type, b"", to=to, signing_scope_id=message.signing_scope_id)
        )
    rules.validators.check(message.notification_type, message.body, message.content_type)


def classify(error: BaseException, policy: RetryPolicy, *, attempts: int = 1, rejections: int = 0) -> Outcome:
    """Return what becomes of a message when opening or publishing it raised ``error``.

    ``attempts`` counts this one, ``rejections`` those in a row before it.
    """
    if isinstance(error, UnknownKey):
        # not the row's fault: a deploy may bring the key
        return _for_another_worker(f"{UNKNOWN_KEY}{error.key_id}")
    if isinstance(error, Tampered):
        return _quarantined(QuarantineReason.TAMPERED)
    if isinstance(error, InvalidMessage):
        code = f"{error.field}:{error.rule}"
        return Outcome(Verdict.QUARANTINED, reason=QuarantineReason.INVALID_REQUEST, error=code)
    if isinstance(error, TransientPublishError):
        wish = _seconds(error.retry_after)
        # what is down is not asked without end
        pause = policy.pause(1) if wish is None else max(wish, LEAST_PAUSE)
        return Outcome(Verdict.RELEASED, delay=pause, error=_word(error.code, error))
    if isinstance(error, PermanentPublishError):
        return _quarantined(error.reason, error.answer)
    fault, code, retry_after, answer = Fault.DESTINATION, type(error).__name__, None, None
    if isinstance(error, PublishFailed):
        fault = error.fault if isinstance(error.fault, Fault) else fault
        code, retry_after, answer = _word(error.code, error), _seconds(error.retry_after), error.answer
    elif isinstance(error, TimeoutError):
        code = "timeout"
    return decide(
        fault,
        code=code,
        attempts=attempts,
        rejections=rejections,
        policy=policy,
        retry_after=retry_after,
        answer=_recordable(answer),
    )


def _for_another_worker(error: str) -> Outcome:
    """Hand a row back that this worker cannot or must not send."""
    return Outcome(Verdict.RELEASED, delay=None, error=error)


def _quarantined(reason: QuarantineReason, answer: Answer | None = None) -> Outcome:
    return Outcome(Verdict.QUARANTINED, reason=reason, error=reason.value, answer=_recordable(answer))


# what a stranger's publisher says must never keep an outcome from being recorded: the message would be sent again


def _recordable(answer: object) -> Answer:
    """Return what is known of the other side, as far as the tables take it."""
    if not isinstance(answer, Answer):
        return Answer()
    status, phase, peer = answer
    known = isinstance(status, int) and 0 <= status < 1000
    return Answer(status if known else None, _text(phase)[:16], _text(peer)[:64])


def _word(code: object, error: Exception) -> str:
    return _text(code)[:128] or type(error).__name__


def _text(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else ""


def _seconds(wish: object) -> float | None:
    """Return a pause that somebody wishes for, at most a month; None for none, and for what is no length of time."""
    if isinstance(wish, int | float) and math.isfinite(wish):
        return min(max(float(wish), 0.0), MAX_PAUSE)
    return None
