"""What a row means in words: every state, reason and code of ours is explained, in time and in effect."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import translation

import notification_outbox
from notification_outbox.explain import (
    ERRORS,
    REASONS,
    STANDINGS,
    Facts,
    Standing,
    error_words,
    explain,
    in_words,
    next_words,
)
from notification_outbox.lifecycle import QuarantineReason, State

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(notification_outbox.__file__).parent


def facts(state: str, **changes: Any) -> Facts:
    about: dict[str, Any] = {
        "blocked_by": "order" if state == "blocked" else "",
        "quarantine_reason": "gone" if state == "quarantined" else "",
        "last_error": "",
        "attempts": 0,
        "lost_leases": 0,
        "leased_by": "",
        "available_at": NOW,
        "retry_until": NOW + timedelta(days=3),
        "holds": True,
        "now": NOW,
    }
    return Facts(state, **(about | changes))


def test_every_quarantine_reason_has_its_words() -> None:
    """A new reason fails until somebody says what it means and whether a requeue can help."""
    assert set(REASONS) == set(QuarantineReason)
    for meaning in REASONS.values():
        assert all(str(words).strip() for words in (meaning.name, meaning.sentence, meaning.advice))
        assert isinstance(meaning.can_help, bool)
        assert meaning.can_help != str(meaning.advice).startswith("No")


@pytest.mark.parametrize("reason", list(QuarantineReason))
def test_a_reason_is_told_once(reason: QuarantineReason) -> None:
    """Where the last error only repeats the reason, it is not said twice."""
    told = explain(facts("quarantined", quarantine_reason=reason.value, last_error=reason.value))
    meaning = REASONS[reason]
    assert (told.why, told.requeue, told.can_help) == (meaning.sentence, meaning.advice, meaning.can_help)
    more = explain(facts("quarantined", quarantine_reason=reason.value, last_error="http_404")).why
    assert more.startswith(str(meaning.sentence))
    assert more.endswith("The last problem: the receiver does not know this address (HTTP 404).")


def test_every_state_has_three_sentences() -> None:
    """Whatever a row is in, an operator reads why, what next and whether a requeue can help."""
    assert set(STANDINGS) == set(Standing)
    for state in State:
        told = explain(facts(state.value))
        for sentence in (told.why, told.what_next, told.requeue):
            assert sentence.endswith(".")
        assert told.can_help == (state in (State.QUARANTINED, State.EXPIRED))


def test_an_erased_body_cannot_be_requeued() -> None:
    """However promising the reason."""
    for state in ("quarantined", "expired"):
        told = explain(facts(state, holds=False))
        assert not told.can_help
        assert "erased" in told.requeue


@pytest.mark.parametrize(
    ("changes", "standing", "words"),
    [
        ({}, Standing.DUE, "now"),
        ({"available_at": NOW + timedelta(minutes=3)}, Standing.SCHEDULED, "in 3 min"),
        ({"available_at": NOW + timedelta(seconds=20), "attempts": 1}, Standing.RETRYING, "in 20 s"),
        (
            {"available_at": NOW + timedelta(hours=3), "last_error": "unknown_key:k"},
            Standing.RETRYING,
            "in 3 h",
        ),
        ({"state": "in_flight", "available_at": NOW}, Standing.IN_FLIGHT, "lease ended"),
        (
            {"state": "in_flight", "available_at": NOW + timedelta(seconds=20)},
            Standing.IN_FLIGHT,
            "lease ends in 20 s",
        ),
        ({"state": "blocked", "blocked_by": "pause"}, Standing.BLOCKED, "when unblocked"),
        ({"state": "delivered"}, Standing.DELIVERED, ""),
    ],
)
def test_pending_is_split_and_next_is_said_in_words(
    changes: dict[str, Any], standing: Standing, words: str
) -> None:
    """What is due, what was asked for later and what failed before are three things."""
    found = facts(**{"state": "pending", **changes})
    assert (found.standing, next_words(found)) == (standing, words)


def test_the_sentences_know_the_time_and_the_holder() -> None:
    """When, by whom, until when; and what a dead worker or a spent time means."""
    retrying = facts(
        "pending", attempts=2, last_error="timeout", available_at=NOW + timedelta(seconds=40), lost_leases=1
    )
    told = explain(retrying)
    assert "A worker died" in told.why
    assert "did not answer in time" in told.why
    assert told.what_next == "It is tried again in 40 s, and given up in 3 d."
    assert "w-1" in explain(facts("in_flight", leased_by="w-1")).why
    assert "did not report back" in explain(facts("in_flight")).what_next
    assert "expired" in explain(facts("pending", retry_until=NOW)).what_next
    assert "paused" in explain(facts("blocked", blocked_by="pause")).why


def test_every_code_that_our_rooms_write_is_explained() -> None:
    """A new code in transport, connector, wire or resolver fails until it has its words."""
    written: set[str] = set()
    for room in ("transport", "connector", "wire", "resolver", "publishers/webhook"):
        source = (ROOT / f"{room}.py").read_text()
        made = r'(?:_error\(attempt, |_Failure\(|PublishFailed\(|DialFailed\(|_end\(|return | else )"(\w+)"'
        written.update(re.findall(made, source))
        written.update(re.findall(r'\("(\w+)", Fault\.', source))
    written -= {"local_dns", "local_threads", "local_closing"}  # by their prefix, below
    assert {"timeout", "tls", "reset", "protocol", "dns", "forbidden_address", "forbidden_url"} < written
    assert written <= set(ERRORS)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", ""),
        ("http_503", "failure of its own (HTTP 503)"),
        ("http_302", "points elsewhere (HTTP 302)"),
        ("http_422", "refused it (HTTP 422)"),
        ("http_401", "signature"),
        ("unknown_key:k-1", "lack the key it is encrypted with (k-1)"),
        ("not_delivered_here", "DELIVER"),
        ("local_emfile", "own machine has a problem (local_emfile)"),
        ("to:url-scheme", "breaks a rule (to:url-scheme)"),
        ("ZeroDivisionError", "ZeroDivisionError, raised by"),
        ("gone", "410"),
    ],
)
def test_codes_are_said_in_words(code: str, words: str) -> None:
    """The usual ones by what they mean, a stranger's by its name."""
    assert words in error_words(code)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (99, "99 s"), (100, "2 min"), (5990, "100 min"), (6000, "2 h"), (200_000, "2 d")],
)
def test_times_are_short(seconds: float, words: str) -> None:
    """One unit is enough to decide whether to wait."""
    assert in_words(timedelta(seconds=seconds)) == words


def test_words_are_translated_when_they_are_shown() -> None:
    """Nothing is fixed at import: each reader's language is asked at each use."""
    with translation.override("de"):
        assert str(STANDINGS[Standing.DUE])
    assert all(not isinstance(words, str) for words in [*STANDINGS.values(), *ERRORS.values()])
