"""Erasing bodies: what goes, what stays bound, who is told what is left, who is asked before."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.db.models.functions import Now

from notification_outbox import IdempotencyConflict, Receipt, enqueue, leases, operations
from notification_outbox.leases import Settlement
from notification_outbox.lifecycle import Outcome, Verdict
from notification_outbox.models import OutboxMessage

pytestmark = pytest.mark.django_db(transaction=True)

URL = "https://hooks.acme.com/secret-path"
SETTLED = ("delivered", "quarantined", "expired", "cancelled")
LIVE = ("pending", "in_flight", "blocked")


def put(payload: Any = None, key: str | None = None, account_id: str | None = "7") -> Receipt:
    with transaction.atomic():
        return enqueue("t", payload or {}, to=URL, idempotency_key=key, account_id=account_id)


def make(state: str, days: float = 0, **arguments: Any) -> int:
    """Commit a message that came to this state so many days ago."""
    row_id = put(**arguments).id
    rows = OutboxMessage.objects.filter(id=row_id)
    if state == "in_flight":
        leases.claim("default", limit=1, budget=1, worker="w", lease=60, using="default")
    elif state == "blocked":
        rows.update(state=state, blocked_by="order")
    elif state in SETTLED:
        reason = "rejected" if state == "quarantined" else ""
        rows.update(state=state, quarantine_reason=reason, settled_at=Now() - timedelta(days=days))
    return row_id


def bodies() -> set[int]:
    return set(OutboxMessage.objects.filter(sealed__isnull=False).values_list("id", flat=True))


def command(*arguments: str, code: int = 0) -> str:
    """Run ``outbox_expunge``; return what it printed after checking its exit code."""
    out = io.StringIO()
    try:
        call_command("outbox_expunge", *arguments, stdout=out, stderr=out)
        left = 0
    except SystemExit as end:
        left = int(str(end.code))
    assert left == code, out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("state", [*SETTLED, *LIVE])
def test_only_settled_rows_lose_their_body(state: str) -> None:
    """Everything else of the row stays as it was; the count says how many bodies were erased."""
    row_id = make(state)
    (before,) = OutboxMessage.objects.values()
    gone = state in SETTLED
    assert leases.expunge([row_id, 10**9], using="default") == int(gone)
    (after,) = OutboxMessage.objects.values()
    assert (after["sealed"] is None) is gone
    kept = set(before) - {"sealed", "updated_at"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert leases.expunge([row_id], using="default") == 0


def test_an_expunged_message_still_answers_for_its_key() -> None:
    """Same key and content: the first receipt. Other content: the conflict. Never a second message."""
    first = put({"n": 1}, key="k")
    OutboxMessage.objects.update(state="delivered", settled_at=Now())
    assert operations.expunge([first.id]) == 1
    again = put({"n": 1}, key="k")
    assert (again.id, again.message_id, again.state, again.created) == (
        first.id,
        first.message_id,
        "delivered",
        False,
    )
    with pytest.raises(IdempotencyConflict, match="another payload"):
        put({"n": 2}, key="k")


def test_an_expunged_message_is_never_sent_again_but_a_late_success_lands() -> None:
    """A requeue leaves it; what a worker had already sent is still recorded."""
    row_id = put().id
    claims = leases.claim("default", limit=1, budget=1, worker="w", lease=60, using="default").claims
    operations.cancel([row_id])
    operations.expunge([row_id])
    OutboxMessage.objects.update(state="expired")
    assert operations.requeue([row_id]) == 0
    delivered = [Settlement(one, Outcome(Verdict.DELIVERED)) for one in claims]
    assert leases.settle(delivered, using="default") == []
    assert OutboxMessage.objects.values_list("state", "sealed").get() == ("delivered", None)


def test_an_expunge_needs_to_be_told_which() -> None:
    """No argument is never "all of them"; no ids are none of them."""
    make("delivered")
    with pytest.raises(TypeError, match="needs ids, account_id or older_than"):
        operations.expunge()
    assert operations.expunge([]) == 0
    with pytest.raises(CommandError, match="say which: --id, --account or --older-than") as caught:
        call_command("outbox_expunge", "--yes")
    assert caught.value.returncode == 2
    assert len(bodies()) == 1


def test_an_account_is_erased_in_chunks_and_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is committed as it goes, in id order; run again it does the rest. Others keep theirs."""
    monkeypatch.setattr(operations, "CHUNK", 2)
    ids = [make(state) for state in ("delivered", "expired", "delivered", "quarantined", "cancelled")]
    others = {make("delivered", account_id="77"), make("delivered", account_id=None)}

    def interrupt(erased: int) -> None:
        if erased == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operations.expunge(account_id="7", progress=interrupt)
    assert bodies() == {ids[4]} | others
    assert command("--account", "7", "--yes") == "1 bodies erased\n"
    assert bodies() == others
    assert command("--account", "7", "--yes") == "0 bodies erased\n"


@pytest.mark.parametrize(
    ("arguments", "erased"),
    [
        (["--older-than", "36h"], {"7 old", "8 old"}),
        (["--older-than", "3d"], set()),
        (["--account", "7", "--older-than", "36h"], {"7 old"}),
        (["--account", "8", "--older-than", "0s"], {"8 old", "8 new"}),
    ],
)
def test_the_age_counts_from_settling(arguments: list[str], erased: set[str]) -> None:
    """All that is given must hold; a live message has no age, so it is not said to be left."""
    made = {
        "7 old": make("delivered", 2),
        "8 old": make("quarantined", 2, account_id="8"),
        "7 new": make("delivered", 1),
        "8 new": make("expired", 1, account_id="8"),
        "live": make("pending"),
    }
    assert command(*arguments, "--yes") == f"{len(erased)} bodies erased\n"
    assert {name for name, row_id in made.items() if row_id not in bodies()} == erased


def test_one_message_can_be_named() -> None:
    """For a secret that was sent by mistake, or a row that no key opens."""
    first, second, third = (make("delivered") for _ in range(3))
    assert command("--id", str(first), "--id", str(third), "--yes") == "2 bodies erased\n"
    assert bodies() == {second}


def test_what_is_not_settled_keeps_its_body_and_fails_the_command() -> None:
    """An erasure that is not complete must not look as if it were; run again after a cancel it is."""
    make("delivered")
    live = [make(state) for state in LIVE]
    make("pending", account_id="8")
    left = (
        "3 of these messages are not settled yet and keep their body: cancel them or wait, then run again\n"
    )
    assert command("--account", "7", "--dry-run") == f"1 bodies would be erased\n{left}"
    assert command("--account", "7", "--yes", code=1) == f"1 bodies erased\n{left}"
    assert operations.cancel(live) == 3
    assert command("--account", "7", "--yes") == "3 bodies erased\n"


def test_what_settles_meanwhile_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that settles behind the running erasure still counts as left."""
    late = make("pending")
    make("delivered")
    expunge = leases.expunge

    def settle_behind(ids: list[int], using: str) -> int:
        operations.cancel([late])
        return expunge(ids, using=using)

    monkeypatch.setattr(leases, "expunge", settle_behind)
    assert "1 of these messages" in command("--account", "7", "--yes", code=1)
    assert bodies() == {late}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function that lets somebody at a terminal answer every question; it returns the questions."""

    def answering(answer: str) -> list[str]:
        asked: list[str] = []

        def ask(question: str) -> str:
            asked.append(question)
            return answer

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return asked

    return answering


def test_somebody_at_a_terminal_is_asked(terminal: Callable[[str], list[str]]) -> None:
    """The question names the count and the database; only "yes" goes on."""
    make("delivered")
    asked = terminal("y")
    with pytest.raises(CommandError, match="nothing was erased") as caught:
        call_command("outbox_expunge", "--account", "7")
    assert caught.value.returncode == 2
    assert "bodies of 1 messages of database 'default' for good" in asked[0]
    assert len(bodies()) == 1
    terminal("yes")
    assert command("--account", "7") == "1 bodies erased\n"


def test_nothing_to_erase_is_not_asked_about(terminal: Callable[[str], list[str]]) -> None:
    """The question comes only when there is something to lose."""
    asked = terminal("yes")
    assert command("--account", "nobody") == "0 bodies erased\n"
    assert command("--account", "nobody", "--dry-run") == "0 bodies would be erased\n"
    assert asked == []


def test_where_nobody_can_answer_yes_must_be_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cron job neither hangs nor erases by accident."""
    make("delivered")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(CommandError, match="1 bodies are erased: pass --yes") as caught:
        call_command("outbox_expunge", "--account", "7")
    assert caught.value.returncode == 2
    assert len(bodies()) == 1


@pytest.mark.parametrize("age", ["soon", "90", "-1d", "1" * 400 + "d"])
def test_a_wrong_age_is_refused(age: str) -> None:
    """The durations of the settings, and nothing else."""
    with pytest.raises(CommandError, match="expected a duration such as 90s"):
        call_command("outbox_expunge", f"--older-than={age}", "--yes")
