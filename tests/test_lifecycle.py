"""What becomes of a message whose attempt failed, as a table."""

from __future__ import annotations

import pytest

from notification_outbox.lifecycle import Fault, QuarantineReason, RetryPolicy, Verdict, decide

EXACT = RetryPolicy(base=5, factor=2, cap=100, jitter=0, max_attempts=None, max_rejections=3)


@pytest.mark.parametrize(("attempts", "pause"), [(1, 5), (2, 10), (5, 80), (6, 100), (10_000, 100)])
def test_pauses_double_up_to_the_cap_and_never_overflow(attempts: int, pause: float) -> None:
    """The pause before the next attempt grows by its factor until the cap, however many attempts there were."""
    assert EXACT.pause(attempts) == pause


@pytest.mark.parametrize(("dice", "pause"), [(0.0, 3.75), (0.5, 5.0), (1.0, 6.25)])
def test_jitter_spreads_a_crowd_around_the_pause(dice: float, pause: float) -> None:
    """A quarter of jitter makes pauses between three and five quarters."""
    assert RetryPolicy(base=5, jitter=0.25).pause(1, lambda: dice) == pause


@pytest.mark.parametrize(
    ("fault", "attempts", "rejections", "max_attempts", "verdict", "reason", "counted"),
    [
        (Fault.DESTINATION, 1, 0, None, Verdict.RETRY, None, 0),
        (Fault.DESTINATION, 9_999, 2, None, Verdict.RETRY, None, 0),
        (Fault.DESTINATION, 3, 0, 3, Verdict.QUARANTINED, QuarantineReason.ATTEMPTS_EXHAUSTED, 0),
        (Fault.NAME, 3, 0, 3, Verdict.RETRY, None, 0),
        (Fault.REJECTION, 1, 0, None, Verdict.RETRY, None, 1),
        (Fault.REJECTION, 3, 2, None, Verdict.QUARANTINED, QuarantineReason.REJECTED, 3),
        (Fault.FORBIDDEN, 3, 2, None, Verdict.QUARANTINED, QuarantineReason.DESTINATION_FORBIDDEN, 3),
        (Fault.REJECTION, 3, 0, 3, Verdict.QUARANTINED, QuarantineReason.ATTEMPTS_EXHAUSTED, 1),
    ],
)
def test_the_fault_decides_what_becomes_of_the_message(
    fault: Fault,
    attempts: int,
    rejections: int,
    max_attempts: int | None,
    verdict: Verdict,
    reason: QuarantineReason | None,
    counted: int,
) -> None:
    """Only rejections in a row and, where set, attempts give up; a name that does not resolve never does."""
    policy = RetryPolicy(max_attempts=max_attempts, max_rejections=3)
    outcome = decide(fault, code="x", attempts=attempts, rejections=rejections, policy=policy)
    assert (outcome.verdict, outcome.reason, outcome.rejections) == (verdict, reason, counted)


def test_without_a_limit_rejections_are_retried_until_time_runs_out() -> None:
    """``MAX_REJECTIONS=None`` never quarantines a rejection."""
    policy = RetryPolicy(max_rejections=None)
    outcome = decide(Fault.REJECTION, code="x", attempts=500, rejections=499, policy=policy)
    assert outcome.verdict is Verdict.RETRY


@pytest.mark.parametrize(("dice", "pause"), [(0.0, 120), (0.5, 135), (1.0, 150)])
def test_jitter_only_adds_to_a_peers_wish(dice: float, pause: float) -> None:
    """A crowd that was sent away together does not come back together, and none of it too early."""
    outcome = decide(
        Fault.DESTINATION,
        code="x",
        attempts=1,
        rejections=0,
        policy=RetryPolicy(jitter=0.25),
        retry_after=120,
        dice=lambda: dice,
    )
    assert outcome.delay == pause


@pytest.mark.parametrize(("wish", "pause"), [(None, 5), (1.0, 5), (60.0, 60)])
def test_a_peers_wish_is_never_undercut(wish: float | None, pause: float) -> None:
    """``retry_after`` can only lengthen our own pause."""
    outcome = decide(Fault.DESTINATION, code="x", attempts=1, rejections=0, policy=EXACT, retry_after=wish)
    assert outcome.delay == pause
