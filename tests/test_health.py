"""What the numbers mean: every sign, its colour and its advice, as a table of cases."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest

from notification_outbox.health import Light, judge
from notification_outbox.stats import CAP, Backlog, Lane, Numbers, Quarter

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
RED, AMBER, GREEN = Light


def numbers(
    *lanes: Lane,
    delivered: int = 1000,
    keys: dict[str, int] | None = None,
    dead: dict[str, int] | None = None,
) -> Numbers:
    """Return numbers of an outbox in which what was given up is still there, unless ``dead`` says otherwise."""
    if dead is None:
        dead = dict(sum((Counter(lane.dead) for lane in lanes), Counter()))
    return Numbers(lanes or (Lane("default"),), (Quarter(NOW, delivered, 0, 0),), dead, keys or {"k1": 9})


def waiting(seconds: float, in_flight: int = 0, **lane: float) -> Lane:
    return Lane("default", Backlog(due=1, in_flight=in_flight, oldest_due=seconds), **lane)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "light", "said", "advised"),
    [
        (numbers(), GREEN, "1,000 messages were delivered", ""),
        (numbers(delivered=0), GREEN, "0 messages were delivered", ""),
        (numbers(waiting(59)), GREEN, "nothing is late", ""),
        (numbers(waiting(61)), AMBER, "Nobody takes messages of the lane “default”", "run_outbox_worker"),
        (
            numbers(waiting(301)),
            RED,
            "Nobody takes messages of the lane “default”: its oldest has",
            "Start a",
        ),
        (numbers(waiting(301)), RED, "due for 5 min", "worker"),
        (numbers(waiting(301, in_flight=1)), RED, "are behind", "more workers"),
        (numbers(waiting(90, delivered=0.2)), AMBER, "are behind", "CONCURRENCY"),
        (numbers(Lane("old", Backlog(due=1, oldest_due=1))), RED, "publisher “old”", "PUBLISHERS"),
        (numbers(Lane("old", Backlog(scheduled=1))), RED, "publisher “old”", "cancel"),
        (numbers(Lane("old", Backlog(in_flight=1))), RED, "publisher “old”", "cancel"),
        (numbers(Lane("old", dead={"gone": 1})), GREEN, "All is well", ""),
        (
            numbers(keys={"k0": 7, "k1": 1}),
            RED,
            "Messages (7) are sealed under the key “k0”",
            "ENCRYPTION_KEYS",
        ),
        (numbers(keys={"k0": CAP + 1}), RED, "Messages (10,000+)", "SECRET_KEY_FALLBACKS"),
        (
            numbers(Lane("default", dead={"tampered": 1})),
            AMBER,
            "Messages (1) were changed",
            "who else writes",
        ),
        (
            numbers(Lane("default", dead={"worker_lost": 2})),
            AMBER,
            "Messages (2) ended the workers",
            "killed",
        ),
        (numbers(Lane("default", dead={"gone": 10})), GREEN, "All is well", ""),
        (
            numbers(Lane("default", dead={"gone": 5, "rejected": 6})),
            AMBER,
            "11 of 1,011 messages were given up in the last 24 hours, most as “rejected”",
            "requeue",
        ),
        (numbers(Lane("default", dead={"gone": 1}), delivered=0), AMBER, "1 of 1 messages", "mend the cause"),
        (numbers(Lane("default", delivered=2.0, failed=2.2)), AMBER, "Most attempts of", "timeline"),
        (numbers(Lane("default", delivered=2.2, failed=2.0)), GREEN, "All is well", ""),
        (numbers(Lane("default", failed=0.4)), GREEN, "All is well", ""),
        (numbers(dead={"gone": CAP + 1}), GREEN, "All is well", ""),
        # what was requeued asks for nothing any more
        (numbers(Lane("default", dead={"gone": 90, "tampered": 1}), dead={}), GREEN, "All is well", ""),
        (
            numbers(Lane("default", dead={"gone": 90, "rejected": 20}), dead={"rejected": 15}),
            AMBER,
            "15 of 1,015 messages were given up in the last 24 hours, most as “rejected”",
            "requeue",
        ),
    ],
)
def test_every_sign_says_what_is_wrong_and_what_to_do(
    given: Numbers, light: Light, said: str, advised: str
) -> None:
    """Red when messages are not delivered, amber when somebody should look, green with what went well."""
    (sign,) = judge(given, publishers=["default"], is_known="k1".__eq__)
    assert sign.light is light
    assert said in sign.sentence
    assert advised in sign.advice
    assert bool(sign.advice) == (light is not GREEN)


def test_the_worst_comes_first() -> None:
    """Whoever reads one sentence reads the one to act on."""
    given = numbers(waiting(400), Lane("second", Backlog(due=1, oldest_due=70), dead={"tampered": 1}))
    signs = judge(given, publishers=["default", "second"], is_known="k1".__eq__)
    assert [sign.light for sign in signs] == [RED, AMBER, AMBER]
