"""What ends its workers is found out and put aside, and nothing innocent with it."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import transaction
from django.db.models.functions import Now

from notification_outbox import Message, Publisher, enqueue, leases
from notification_outbox.lifecycle import LONE_AT, TOGETHER, Lone, Outcome, Verdict
from notification_outbox.models import OutboxMessage
from notification_outbox.suspects import SHARE, Suspects, Terms
from tests.processes import Outbox

QUICK: dict[str, Any] = {"ATTEMPT_TIMEOUT": 0.5, "LEASE": 2.5}


class Deadly(Publisher):
    """Ends its process in the middle of a poisonous message, without a word."""

    async def publish(self, message: Message) -> None:
        await asyncio.sleep(0.02)
        if b"poison" in message.body:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.django_db(transaction=True)
def test_a_message_that_kills_its_worker_every_time_ends_worker_lost_and_its_neighbours_are_delivered(
    outbox: Outbox,
) -> None:
    """Two poisonous messages among fifty: both are quarantined, nothing else is, however often a worker dies."""
    outbox.raw = {
        "POLL_INTERVAL": 0.1,
        "PUBLISHERS": {"default": {"BACKEND": "tests.test_suspects.Deadly", **QUICK}},
    }
    outbox.configure_settings(**outbox.raw)
    with transaction.atomic():
        for n in range(52):
            enqueue("t", {"poison": n} if n in (10, 30) else {"n": n}, to="somewhere")
    deaths = 0
    while (code := outbox.start("--until-empty", "--concurrency", "16").wait()) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths <= 6, outbox.states()
    assert outbox.states() == {"delivered": 50, "quarantined": 2}
    dead = OutboxMessage.objects.filter(state="quarantined")
    assert set(dead.values_list("quarantine_reason", "lost_leases")) == {("worker_lost", LONE_AT + 1)}
    assert not OutboxMessage.objects.filter(state="delivered", lost_leases__gt=0).exists()


def stored(*lost_leases: int) -> list[int]:
    """Commit due messages that have lost so many leases; return their ids, oldest due first."""
    ids = []
    with transaction.atomic():
        for number in lost_leases:
            ids.append(enqueue("t", {}, to="https://hooks.acme.com/").id)
            OutboxMessage.objects.filter(id=ids[-1]).update(lost_leases=number)
    return ids


def claim(**terms: Any) -> leases.Claimed:
    return leases.claim("default", limit=10, budget=10**9, worker="w", lease=60, using="default", **terms)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("terms", "taken", "met"),
    [
        ({"suspects": 4, "lone": Lone.SKIPPED}, [0, 1, 3, 5], False),
        ({"suspects": 1, "lone": Lone.REPORTED}, [0, 1, 5], True),
        ({"suspects": 0, "lone": Lone.REPORTED}, [0, 5], False),
        ({"suspects": 4, "lone": Lone.TAKEN}, [2], False),
    ],
)
def test_a_claim_brings_what_its_terms_allow(terms: dict[str, Any], taken: list[int], met: bool) -> None:
    """A few suspects, a lone one by itself; what is left is not touched."""
    ids = stored(0, 1, 2, 1, 3, 0)
    claimed = claim(**terms)
    assert [ids.index(one.id) for one in claimed.claims] == taken
    assert claimed.lone_met is met
    left = OutboxMessage.objects.exclude(id__in=[one.id for one in claimed.claims])
    assert set(left.values_list("state", "attempts")) == {("pending", 0)}


@pytest.mark.django_db(transaction=True)
def test_a_scan_does_not_fill_up_with_rows_it_would_leave() -> None:
    """Behind a crowd of suspects the others are still found."""
    ids = stored(*[2] * 12, *[1] * 12, 0)
    assert [one.id for one in claim(suspects=0, lone=Lone.SKIPPED).claims] == [ids[-1]]


@pytest.mark.django_db(transaction=True)
def test_a_third_lost_lease_ends_worker_lost() -> None:
    """It was alone in hand, so nothing else can have ended its worker."""
    (innocent, deadly) = stored(0, LONE_AT)
    claim(lone=Lone.TAKEN)
    claim(lone=Lone.SKIPPED)
    OutboxMessage.objects.update(available_at=Now())
    recovered = leases.recover("default", limit=10, using="default")
    assert recovered.pending == 1
    assert [(one.id, one.state) for one in recovered.ended] == [(deadly, "quarantined")]
    row = OutboxMessage.objects.get(id=deadly)
    assert (row.quarantine_reason, row.lost_leases, row.lease_token) == ("worker_lost", LONE_AT + 1, None)
    assert OutboxMessage.objects.get(id=innocent).lost_leases == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("verdict", "left"), [(Verdict.RETRY, 0), (Verdict.DELIVERED, 0), (Verdict.RELEASED, 1)]
)
def test_a_settled_attempt_ends_the_suspicion_and_a_release_does_not(verdict: Verdict, left: int) -> None:
    """Who survived an attempt is innocent; who was only handed back was not tried."""
    (row_id,) = stored(1)
    (held,) = claim().claims
    leases.settle([leases.Settlement(held, Outcome(verdict))], using="default")
    assert OutboxMessage.objects.get(id=row_id).lost_leases == left


def terms_at(process: Suspects, now: float) -> Terms:
    terms = process.ask(now)
    assert terms is not None
    return terms


def fake(lost_leases: int = 0) -> Any:
    return SimpleNamespace(lost_leases=lost_leases)


def test_a_lone_message_waits_for_free_hands_and_then_has_the_process_to_itself() -> None:
    """Met with something in hand: nothing more is claimed, by any worker of the process, until it was alone."""
    process = Suspects()
    ordinary = fake()
    terms = terms_at(process, 0.0)
    assert terms.lone is Lone.TAKEN
    assert process.ask(0.0) is None  # until the answer is here
    process.answered(terms, [ordinary], lone_met=False, now=0.0)
    terms = terms_at(process, 1.0)
    assert terms.lone is Lone.REPORTED
    process.answered(terms, [], lone_met=True, now=1.0)
    assert process.ask(1.5) is None
    process.drop(ordinary, 2.0)
    terms = terms_at(process, 2.0)
    assert terms.lone is Lone.TAKEN
    lone = fake(LONE_AT)
    process.answered(terms, [lone], lone_met=False, now=2.0)
    assert process.ask(2.5) is None
    process.drop(lone, 3.0)
    # two seconds were spent on it
    rest = (SHARE - 1) * 2.0
    terms = terms_at(process, 3.0)
    assert terms.lone is Lone.SKIPPED
    process.answered(terms, [], lone_met=False, now=3.0)
    terms = terms_at(process, 3.0 + rest)
    assert terms.lone is Lone.TAKEN


def test_only_a_few_suspects_are_in_hand_at_a_time() -> None:
    """Over all claims of the process; one that was dropped makes room."""
    process = Suspects()
    terms = terms_at(process, 0.0)
    assert terms.suspects == TOGETHER
    held = [fake(1) for _ in range(TOGETHER)]
    process.answered(terms, held, lone_met=False, now=0.0)
    terms = terms_at(process, 0.0)
    assert terms.suspects == 0
    process.answered(terms, [], lone_met=False, now=0.0)
    process.drop(held[0], 1.0)
    terms = terms_at(process, 1.0)
    assert terms.suspects == 1


def test_hands_that_are_not_free_in_time_are_waited_for_later() -> None:
    """Their database may be away: others of the process go on meanwhile, and the lone one has its turn later."""
    process = Suspects()
    terms = terms_at(process, 0.0)
    process.answered(terms, [fake()], lone_met=False, now=0.0)
    terms = terms_at(process, 1.0)
    process.answered(terms, [], lone_met=True, now=1.0)
    assert process.ask(10.0, patience=20.0) is None
    terms = process.ask(22.0, patience=20.0)
    assert terms is not None
    assert terms.lone is Lone.SKIPPED
    process.answered(terms, [], lone_met=False, now=22.0)
    assert terms_at(process, 22.0 + (SHARE - 1) * 21.0).lone is Lone.REPORTED


def test_a_lone_message_whose_database_hangs_does_not_keep_the_others_waiting() -> None:
    """Its question without an answer, or its outcome without a record: after ``patience`` the rest goes on."""
    process = Suspects()
    hanging = terms_at(process, 0.0)
    assert process.ask(10.0, patience=20.0) is None
    terms = process.ask(21.0, patience=20.0)
    assert terms is not None
    assert terms.lone is Lone.SKIPPED
    process.answered(terms, [], lone_met=False, now=21.0)
    # the answer comes late, with a lone one: it has the process to itself, and patience counts from here
    lone = fake(LONE_AT)
    process.answered(hanging, [lone], lone_met=False, now=30.0)
    assert process.ask(49.0, patience=20.0) is None
    terms = process.ask(51.0, patience=20.0)
    assert terms is not None
    process.answered(terms, [], lone_met=False, now=51.0)
    process.drop(lone, 60.0)
    assert process.ask(60.0, patience=20.0) is not None
