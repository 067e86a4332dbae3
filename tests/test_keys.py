"""Keys in motion: rotation, rolling deploys, rows of every earlier version, what doctor and checks say."""

from __future__ import annotations

import base64
import io
import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from notification_outbox import conf, enqueue, leases, operations
from notification_outbox.delivery import as_message, open_claim
from notification_outbox.envelope import Binding, Keyring, open_sealed
from notification_outbox.models import OutboxMessage
from tests.processes import Outbox, wait_until
from tests.settings import SIGNER

URL = "https://hooks.acme.com/shop"
OLD, NEW = (base64.b64encode(letter * 32).decode() for letter in (b"o", b"n"))
GOLDEN = Path(__file__).parent / "cases/sealed_rows.json"


def keys_from_a_vault() -> dict[str, str]:
    return {"vault": NEW}


def fill(count: int) -> None:
    with transaction.atomic():
        for n in range(count):
            enqueue("t", {"n": n}, to=URL)


def command(name: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=out)
    return out.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_rotation_reseals_every_row_that_holds_a_body(configure: Callable[..., None]) -> None:
    """Live, dead and delivered rows come under the new key, byte for byte, and the old one can be dropped."""
    configure(ENCRYPTION_KEYS={"old": OLD})
    fill(250)
    ids = list(OutboxMessage.objects.order_by("id").values_list("id", flat=True))
    OutboxMessage.objects.filter(id=ids[0]).update(state="delivered", settled_at=Now())
    OutboxMessage.objects.filter(id=ids[1]).update(state="expired", settled_at=Now())
    OutboxMessage.objects.filter(id=ids[2]).update(state="cancelled", settled_at=Now(), sealed=None)
    configure(ENCRYPTION_KEYS={"new": NEW, "old": OLD})
    assert "249 messages would be resealed under 'new'" in command("outbox_rotate_keys", "--dry-run")
    assert set(OutboxMessage.objects.values_list("encryption_key_id", flat=True)) == {"old"}
    assert "249 messages resealed under 'new'" in command("outbox_rotate_keys")
    assert "0 messages resealed" in command("outbox_rotate_keys")
    configure(ENCRYPTION_KEYS={"new": NEW})
    assert leases.requeue([ids[1]], using="default") == 1
    claims = leases.claim("default", limit=300, budget=10**9, worker="w", lease=9, using="default").claims
    bodies = [as_message(one, open_claim(one, conf.get().keyring)).payload["n"] for one in claims]
    assert sorted(bodies) == [1, *range(3, 250)]


@pytest.mark.django_db(transaction=True)
def test_a_rotation_that_leaves_rows_is_not_done(configure: Callable[..., None]) -> None:
    """Rows under a key nobody has, or changed in the table, are counted, named and end with exit 1."""
    configure(ENCRYPTION_KEYS={"old": OLD})
    fill(3)
    first, second, _ = OutboxMessage.objects.order_by("id").values_list("id", flat=True)
    OutboxMessage.objects.filter(id=first).update(encryption_key_id="lost")
    OutboxMessage.objects.filter(id=second).update(notification_type="forged")
    configure(ENCRYPTION_KEYS={"new": NEW, "old": OLD})
    out = io.StringIO()
    with pytest.raises(CommandError, match="left under 'lost', 'old'"):
        call_command("outbox_rotate_keys", stdout=out)
    assert "1 messages resealed" in out.getvalue()
    assert f"1 messages were changed in the table and cannot be opened: ids {second}\n" in out.getvalue()
    assert "outbox_expunge --id" in out.getvalue()
    assert "1 messages are under 'lost', which is not configured" in out.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_rotation_is_done_once_what_was_forged_is_erased(outbox: Outbox) -> None:
    """The worker quarantines such a row, ``outbox_expunge`` erases its body, and no row is under the old key."""
    outbox.configure(root={"ENCRYPTION_KEYS": {"old": OLD}})
    (receipt,) = outbox.enqueue()
    OutboxMessage.objects.update(notification_type="forged")
    outbox.configure(root={"ENCRYPTION_KEYS": {"new": NEW, "old": OLD}})
    outbox.work()
    assert outbox.row(receipt).quarantine_reason == "tampered"
    with pytest.raises(CommandError, match="left under 'old'"):
        command("outbox_rotate_keys")
    assert command("outbox_expunge", "--id", str(receipt.id), "--yes") == "1 bodies erased\n"
    assert command("outbox_rotate_keys") == "0 messages resealed under 'new'\n"
    outbox.configure(root={"ENCRYPTION_KEYS": {"new": NEW}})
    assert command("outbox_doctor") == "all is well\n"


@pytest.mark.django_db(transaction=True)
def test_key_ids_that_differ_in_case_are_two_keys(configure: Callable[..., None]) -> None:
    """No database's collation may take rows under an old key for rows under the new one."""
    configure(ENCRYPTION_KEYS={"K1": OLD})
    fill(4)
    configure(ENCRYPTION_KEYS={"k1": NEW, "K1": OLD})
    fill(3)
    assert "4 messages resealed under 'k1'" in command("outbox_rotate_keys")
    configure(ENCRYPTION_KEYS={"k1": NEW})
    assert command("outbox_doctor") == "all is well\n"
    claims = leases.claim("default", limit=9, budget=10**9, worker="w", lease=9, using="default").claims
    assert len([open_claim(one, conf.get().keyring) for one in claims]) == 7


@pytest.mark.django_db(transaction=True)
def test_a_version_nobody_knows_does_not_stop_a_rotation(configure: Callable[..., None]) -> None:
    """The row is counted and named, the others are resealed."""
    configure(ENCRYPTION_KEYS={"old": OLD})
    fill(3)
    row = OutboxMessage.objects.order_by("id")[0]
    OutboxMessage.objects.filter(id=row.id).update(sealed=b"\x02" + bytes(row.sealed or b"")[1:])
    configure(ENCRYPTION_KEYS={"new": NEW, "old": OLD})
    out = io.StringIO()
    with pytest.raises(CommandError, match="left under 'old'"):
        call_command("outbox_rotate_keys", stdout=out)
    assert "2 messages resealed" in out.getvalue()
    assert "1 messages are under 'version 2'" in out.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_rotation_never_overwrites_what_changed_meanwhile(configure: Callable[..., None]) -> None:
    """Compare-and-swap: a row resealed or expunged by somebody else stays as he left it."""
    configure(ENCRYPTION_KEYS={"old": OLD})
    fill(2)
    first, second = OutboxMessage.objects.order_by("id")
    stale = [leases.Resealed(row.id, "old", bytes(row.sealed or b""), "new", b"x") for row in (first, second)]
    OutboxMessage.objects.filter(id=first.id).update(sealed=None)
    assert leases.reseal(stale, using="default") == 1
    assert OutboxMessage.objects.get(id=first.id).sealed is None


@pytest.mark.django_db(transaction=True)
def test_a_rotation_runs_beside_a_worker(outbox: Outbox) -> None:
    """Rows in hand are delivered all the same."""
    outbox.configure(root={"ENCRYPTION_KEYS": {"old": OLD}})
    outbox.enqueue(300)
    outbox.configure(root={"ENCRYPTION_KEYS": {"new": NEW, "old": OLD}})
    worker = outbox.start("--until-empty", "--concurrency", "4")
    outbox.receiver.wait_for(20)
    rotation = operations.rotate_keys(conf.get().keyring)
    assert rotation.done
    assert worker.wait() == 0
    assert outbox.states() == {"delivered": 300}
    assert len(outbox.receiver.requests) == 300


@pytest.mark.django_db(transaction=True)
def test_a_rolling_deploy_of_a_new_key_loses_nothing(outbox: Outbox) -> None:
    """Web processes seal under the new key while a worker has only the old: it waits, then delivers."""
    outbox.configure(root={"ENCRYPTION_KEYS": {"old": OLD}})
    (before,) = outbox.enqueue()
    worker = outbox.start()
    outbox.receiver.wait_for(1)
    outbox.configure(root={"ENCRYPTION_KEYS": {"new": NEW, "old": OLD}})
    (after,) = outbox.enqueue()
    wait_until(lambda: outbox.row(after).last_error == "unknown_key:new", "the worker to hand it back")
    worker.terminate()
    assert worker.wait() == 0
    assert (outbox.row(after).state, outbox.row(after).attempts) == ("pending", 0)
    OutboxMessage.objects.filter(id=after.id).update(available_at=Now())
    outbox.work("empty")
    assert outbox.row(after).state == outbox.row(before).state == "delivered"
    assert outbox.row(after).last_error == ""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("age", "pause"), [(0, 5), (400, 50), (86400, 900)])
def test_a_row_without_its_key_waits_longer_and_longer(outbox: Outbox, age: float, pause: float) -> None:
    """An eighth of its age, between five seconds and a quarter of an hour."""
    (receipt,) = outbox.enqueue()
    OutboxMessage.objects.update(encryption_key_id="gone", due_at=F("due_at") - timedelta(seconds=age))
    outbox.work()
    row = outbox.row(receipt)
    assert pause - 1 < (row.available_at - row.updated_at).total_seconds() < pause + 5


@pytest.mark.django_db(transaction=True)
def test_the_doctor_finds_keys_that_nobody_holds(configure: Callable[..., None]) -> None:
    """Key ids in rows and lanes without a publisher are named with their mend; exit 1."""
    configure(ENCRYPTION_KEYS={"old": OLD})
    assert command("outbox_doctor") == "all is well\n"
    fill(2)
    OutboxMessage.objects.update(publisher="retired")
    configure(ENCRYPTION_KEYS={"new": NEW})
    out = io.StringIO()
    with pytest.raises(SystemExit) as caught:
        call_command("outbox_doctor", "--json", stdout=out)
    assert caught.value.code == 1
    found = json.loads(out.getvalue())
    assert [finding["code"] for finding in found] == ["unknown_key", "unknown_lane"]
    assert "2 messages are sealed under the key 'old'" in found[0]["problem"]
    assert "ENCRYPTION_KEYS" in found[0]["mend"]
    with pytest.raises(SystemExit):
        command("outbox_doctor")


@pytest.mark.parametrize("source", [keys_from_a_vault, "tests.test_keys.keys_from_a_vault"])
def test_keys_can_come_from_a_callable(source: Any) -> None:
    """A vault is asked once, when the settings are read."""
    keyring = conf.read({"ENCRYPTION_KEYS": source}, secrets=[b"secret"]).keyring
    assert keyring.current_id == "vault"
    assert keyring.master("vault") == b"n" * 32


def test_deploy_checks_name_what_is_derived(configure: Callable[..., None]) -> None:
    """On a laptop nothing is said; before a deploy each derived key and its remedy is."""
    configure()
    assert _ours(run_checks()) == []
    found = _ours(run_checks(include_deployment_checks=True))
    assert [message.id for message in found] == ["notification_outbox.W003"] * 3
    for message, word in zip(found, ("ENCRYPTION_KEYS", "LOOKUP_KEY", "PUBLISHERS"), strict=True):
        assert word in message.hint


def test_deploy_checks_name_development_options(configure: Callable[..., None]) -> None:
    """Plain http is for laptops; with everything set nothing else is said."""
    configure(
        ENCRYPTION_KEYS={"new": NEW},
        LOOKUP_KEY="a lookup key of its own",
        PUBLISHERS={"default": {"OPTIONS": {"signer": SIGNER, "insecure_hosts": ["localhost:8000"]}}},
    )
    (message,) = _ours(run_checks(include_deployment_checks=True))
    assert message.id == "notification_outbox.W004"
    assert "PUBLISHERS['default']: insecure_hosts" in message.msg


def test_an_unknown_database_is_a_check_error(configure: Callable[..., None]) -> None:
    """``DATABASES`` names aliases of the project."""
    configure(DATABASES=["elsewhere"])
    (message,) = _ours(run_checks())
    assert message.id == "notification_outbox.E003"
    with pytest.raises(CommandError, match=r"no database 'elsewhere'; DATABASES has default"):
        call_command("run_outbox_worker")


def _ours(messages: list[Any]) -> list[Any]:
    return [message for message in messages if (message.id or "").startswith("notification_outbox")]


def golden() -> list[dict[str, Any]]:
    return list(json.loads(GOLDEN.read_text())["rows"])


@pytest.mark.parametrize("row", golden(), ids=lambda row: row["about"])
def test_rows_sealed_by_earlier_versions_open(row: dict[str, Any]) -> None:
    """A committed set of rows opens for ever: an upgrade never strands a message."""
    columns = dict(row["binding"])
    for name in ("destination_key", "dedup_id"):
        columns[name] = uuid.UUID(columns[name])
    keyring = Keyring({key_id: base64.b64decode(key) for key_id, key in row["keys"].items()})
    if "secret" in row:
        keyring = Keyring.from_secrets([row["secret"]])
    content = open_sealed(base64.b64decode(row["sealed"]), Binding(**columns), keyring)
    assert content.body == base64.b64decode(row["body"])
    assert content.content_type == row["content_type"]
    assert [list(pair) for pair in content.headers] == row["headers"]
    assert (content.destination, content.checked) == (row["destination"], row["checked"])
