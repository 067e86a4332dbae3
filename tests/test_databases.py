"""Projects with several databases: each has an outbox of its own, and a worker is told which it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from notification_outbox import NotInTransaction, enqueue, operations
from notification_outbox.models import OutboxMessage
from tests.processes import ROOT, Outbox, database_url

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "second"])

URL = "https://hooks.acme.com/shop"


class ToSecond:
    """A router that keeps the outbox beside the second database's tables."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "second" if model is OutboxMessage else None

    db_for_read = db_for_write


@pytest.fixture
def routed(settings: Any) -> None:
    settings.DATABASE_ROUTERS = ["tests.test_databases.ToSecond"]


def test_the_message_lands_in_the_database_that_was_named() -> None:
    """``using=`` joins that database's transaction."""
    with transaction.atomic(using="second"):
        receipt = enqueue("t", {}, to=URL, using="second")
    assert OutboxMessage.objects.using("second").get().id == receipt.id
    assert not OutboxMessage.objects.using("default").exists()


def test_a_transaction_on_the_wrong_database_is_named() -> None:
    """The error says which alias is needed and which one is open."""
    with transaction.atomic(using="second"), pytest.raises(NotInTransaction) as caught:
        enqueue("t", {}, to=URL)
    assert "on database 'default'" in str(caught.value)
    assert "using='second'" in str(caught.value)


def test_the_router_decides_where_nothing_is_said(routed: None) -> None:
    """Enqueue, operations and workers ask the project's router."""
    with transaction.atomic(using="second"):
        receipt = enqueue("t", {}, to=URL)
    OutboxMessage.objects.using("second").update(state="expired", settled_at="2026-01-01T00:00Z")
    assert operations.requeue([receipt.id]) == 1


@pytest.mark.parametrize("how", ["flag", "setting"])
def test_a_worker_serves_the_databases_it_is_told(
    outbox: Outbox, how: str, configure: Callable[..., None]
) -> None:
    """``--database`` may be repeated, ``DATABASES`` says the same for every worker."""
    outbox.configure(root={"DATABASES": ["default", "second"]} if how == "setting" else None)
    for alias in ("default", "second"):
        with transaction.atomic(using=alias):
            enqueue("t", {"db": alias}, to=outbox.receiver.url("/"), using=alias)
    flags = ["--database", "default", "--database", "second"] if how == "flag" else []
    assert outbox.start("--once", *flags).wait() == 0
    assert {received.body for received in outbox.receiver.requests} == {
        b'{"db":"default"}',
        b'{"db":"second"}',
    }
    for alias in ("default", "second"):
        assert OutboxMessage.objects.using(alias).get().state == "delivered"


@pytest.mark.databases("postgresql")
def test_the_server_may_bind_parameters(outbox: Outbox) -> None:
    """``server_side_binding`` changes how statements travel, and nothing else."""
    code = """
from django.conf import settings
settings.DATABASES["default"].setdefault("OPTIONS", {})["server_side_binding"] = True
import django; django.setup()
from django.core.management import call_command
from django.db import transaction
from notification_outbox import Draft, enqueue, enqueue_many, operations
from notification_outbox.models import OutboxMessage
with transaction.atomic():
    enqueue("t", {"n": 0}, to=URL)
    enqueue_many(Draft("t", {"n": n}, to=URL) for n in range(1, 6))
operations.cancel(OutboxMessage.objects.filter(id=OutboxMessage.objects.latest("id").id))
call_command("run_outbox_worker", "--once")
"""
    environment = {
        **os.environ,
        "DATABASE_URL": database_url(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "OUTBOX_TEST_SETTINGS": outbox.settings_text(),
    }
    script = code.replace("URL", repr(outbox.receiver.url("/")))
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, env=environment, check=True)
    assert outbox.states() == {"delivered": 5, "cancelled": 1}
