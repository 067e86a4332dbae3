"""What one message's page says: three sentences, every column that is not sealed, the timeline of attempts."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _

from ..explain import REASONS, STANDINGS, Facts, error_words, explain
from ..models import DeliveryAttempt, OutboxMessage

# of a message's attempts the newest are shown
TIMELINE = 50


def about(message: OutboxMessage) -> dict[str, Any]:
    """Return the page's context; two queries, whatever the message has been through."""
    facts = Facts.of(message)
    attempts = DeliveryAttempt.objects.using(message._state.db).filter(message=message)
    return {
        "title": message.message_id,
        "original": message,
        "holds": facts.holds,
        "standing": facts.standing.value,
        "standing_words": STANDINGS[facts.standing],
        "explanation": explain(facts),
        "sections": _sections(message, facts),
        "timeline": [
            (attempt, last_answer(attempt.status, attempt.error), error_words(attempt.error))
            for attempt in attempts.order_by("-number")[:TIMELINE]
        ],
    }


def last_answer(status: int | None, error: str) -> str:
    """Return an HTTP status or an error's code, for a narrow column; '' for neither."""
    if status is not None and error in ("", f"http_{status}"):
        return f"HTTP {status}"
    return f"HTTP {status} {error}" if status is not None else error


def _sections(message: OutboxMessage, facts: Facts) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    reason = REASONS[message.quarantine_reason].name if message.quarantine_reason else None
    return [
        (
            _("What it is"),
            [
                (_("number"), str(message.pk)),
                (_("message id"), message.message_id),
                (_("type"), message.notification_type),
                (_("publisher"), message.publisher),
                (_("destination"), message.destination),
                (_("account"), message.account_id),
                (_("idempotency key"), message.idempotency_key),
                (_("ordering key"), message.ordering_key),
                (_("caller scope"), message.caller_scope_id),
                (_("signing scope"), message.signing_scope_id),
                (_("encryption key"), message.encryption_key_id),
                (_("body"), _("kept, encrypted") if facts.holds else _("erased")),
                (_("trace"), message.traceparent),
            ],
        ),
        (
            _("When"),
            [
                (_("made"), message.created_at),
                (_("due"), message.due_at),
                (_("lease ends") if message.lease_token else _("next"), message.available_at)
                if message.settled_at is None
                else (_("settled"), message.settled_at),
                (_("given up after"), message.retry_until),
                (_("last change"), message.updated_at),
                (_("now"), facts.now),
            ],
        ),
        (
            _("How it went"),
            [
                (_("attempts"), str(message.attempts)),
                (_("attempts before the last requeue"), str(message.past_attempts)),
                (_("requeues"), str(message.requeues)),
                (_("refusals in a row"), str(message.rejections)),
                (_("workers lost in a row"), str(message.lost_leases)),
                (_("worker"), message.leased_by),
                (_("quarantined for"), reason),
                (_("last answer"), last_answer(message.last_status, message.last_error)),
            ],
        ),
    ]
