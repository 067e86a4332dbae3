"""One claim in, one outcome out: open, publish, classify. Knows neither the table nor the loop.

Whatever a publisher raises ends here, as a code: its text, which may hold a URL or a payload, goes no further.
"""

from __future__ import annotations

import asyncio

from .envelope import Claim, Keyring, Message, open_sealed
from .exceptions import (
    PermanentPublishError,
    PublishFailed,
    Tampered,
    TransientPublishError,
    UnknownKey,
)
from .lifecycle import (
    UNKNOWN_KEY,
    Answer,
    Fault,
    Outcome,
    QuarantineReason,
    RetryPolicy,
    Verdict,
    decide,
)
from .publishers import Publisher

# seconds; between them a row that waits for a key is looked at again after an eighth of its age
KEY_PAUSE = (5.0, 900.0)


async def deliver(
    claim: Claim, publisher: Publisher, *, keyring: Keyring, policy: RetryPolicy, timeout: float
) -> Outcome:
    """Deliver one claimed message and say what came of it. ``timeout`` in seconds bounds the whole attempt."""
    try:
        message = open_message(claim, keyring)
        async with asyncio.timeout(timeout):
            answer = await publisher.publish(message)
    except Exception as error:
        return classify(error, claim, policy)
    return Outcome(Verdict.DELIVERED, answer=answer or Answer())


def open_message(claim: Claim, keyring: Keyring) -> Message:
    """Return the claimed row as publishers see it. Raises ``Tampered`` or ``UnknownKey``."""
    binding = claim.binding
    if claim.sealed is None:
        # an expunged body is never waiting to be sent: somebody put the row back by hand
        raise Tampered
    content = open_sealed(claim.sealed, binding, keyring)
    return Message(
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


def classify(error: Exception, claim: Claim, policy: RetryPolicy) -> Outcome:
    """Return what becomes of a message when opening or publishing it raised ``error``."""
    if isinstance(error, UnknownKey):
        # not the row's fault: a deploy may bring the key. The pause grows with the wait.
        shortest, longest = KEY_PAUSE
        pause = min(max(claim.age / 8, shortest), longest)
        return Outcome(Verdict.RELEASED, delay=pause, error=f"{UNKNOWN_KEY}{error.key_id}")
    if isinstance(error, Tampered):
        return _quarantined(QuarantineReason.TAMPERED)
    if isinstance(error, TransientPublishError):
        pause = policy.pause(1) if error.retry_after is None else error.retry_after
        return Outcome(Verdict.RELEASED, delay=pause, error=error.code)
    if isinstance(error, PermanentPublishError):
        return _quarantined(error.reason, error.answer)
    fault, code, retry_after, answer = Fault.DESTINATION, type(error).__name__, None, None
    if isinstance(error, PublishFailed):
        fault, code, retry_after, answer = error.fault, error.code, error.retry_after, error.answer
    elif isinstance(error, TimeoutError):
        code = "timeout"
    return decide(
        fault,
        code=code,
        attempts=claim.attempt,
        rejections=claim.rejections,
        policy=policy,
        retry_after=retry_after,
        answer=answer,
    )


def _quarantined(reason: QuarantineReason, answer: Answer | None = None) -> Outcome:
    return Outcome(Verdict.QUARANTINED, reason=reason, error=reason.value, answer=answer or Answer())
