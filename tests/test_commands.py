"""What every command of an operator has in common: help, exit codes, errors that say what to do, progress."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import DatabaseError, connections, transaction
from django.db.models.functions import Now

from notification_outbox import enqueue, operations
from notification_outbox.management import base
from notification_outbox.models import OutboxMessage

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "second"])

COMMANDS = {
    "outbox_doctor": [],
    "outbox_purge": [],
    "outbox_rotate_keys": [],
    "outbox_expunge": ["--account", "7", "--yes"],
}
every_command = pytest.mark.parametrize("name", COMMANDS)
URL = "https://hooks.acme.com/"


def stopped(name: str, *arguments: str) -> str:
    """Run a command that cannot run; return the one sentence it ends with."""
    with pytest.raises(CommandError) as caught:
        call_command(name, *COMMANDS[name], *arguments)
    assert caught.value.returncode == 2
    return str(caught.value)


@every_command
def test_help_tells_exit_codes_and_every_option(name: str) -> None:
    """What a command does, each of its options, and what its exit codes mean, without the source."""
    parser = load_command_class("notification_outbox", name).create_parser("manage.py", name)
    text = re.sub(r"\s+", " ", parser.format_help())
    assert re.search(
        r"Exit codes: 0 \w.*; 2 could not run: wrong options or settings, or a failing database\.", text
    )
    assert len(str(parser.description)) > 100
    for action in parser._actions:
        assert action.help, action.dest
    for option in ("--database", "--dry-run") if name != "outbox_doctor" else ("--database", "--json"):
        assert option in text


@every_command
def test_a_database_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    """A typing error is answered with the choice."""
    assert stopped(name, "--database", "nope") == "there is no database 'nope'; DATABASES has default, second"


@every_command
def test_a_database_without_tables_is_answered_with_the_command_that_makes_them(name: str) -> None:
    """It names the database too."""
    table = OutboxMessage._meta.db_table
    connections["second"].close()
    with connections["second"].schema_editor() as editor:
        editor.alter_db_table(OutboxMessage, table, "elsewhere")
    try:
        assert stopped(name, "--database", "second") == (
            "database 'second' has no outbox tables: run 'manage.py migrate --database second' first"
        )
    finally:
        with connections["second"].schema_editor() as editor:
            editor.alter_db_table(OutboxMessage, "elsewhere", table)


@every_command
def test_settings_that_cannot_be_read_are_named(
    name: str, configure: Callable[..., None], settings: Any
) -> None:
    """Ours and Django's; no secret in them is repeated."""
    configure(RETENTION={"deliverd": "secretmark"})
    assert "unknown key 'deliverd' (did you mean 'delivered'?)" in stopped(name)
    assert "secretmark" not in stopped(name)
    configure()
    settings.SECRET_KEY = ""
    assert "SECRET_KEY" in stopped(name)


@every_command
def test_a_database_that_is_away_ends_in_one_sentence(name: str, tmp_path: Path) -> None:
    """What kind of error, what to do, and where to read more."""
    second = connections["second"]
    second.close()
    there = second.settings_dict["NAME"]
    second.settings_dict["NAME"] = str(tmp_path / "no" / "such.sqlite3")
    try:
        told = stopped(name, "--database", "second")
    finally:
        second.settings_dict["NAME"] = there
    assert told.startswith("database 'second' failed (OperationalError): see that it answers and is migrated")
    assert "--traceback" in told


@every_command
def test_a_database_that_fails_in_the_middle_does_so_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of another version or a lost connection are no traceback either, and the database's text stays out."""

    def fail(*args: Any, **arguments: Any) -> None:
        raise DatabaseError("column peermark is missing")

    home = f"notification_outbox.management.commands.{name}"
    does = {"outbox_doctor": "examine", "outbox_purge": "purge", "outbox_expunge": "bodies"}
    monkeypatch.setattr(f"{home}.{does.get(name, 'rotate_keys')}", fail)
    told = stopped(name)
    assert "database 'default' failed (DatabaseError)" in told
    assert "peermark" not in told


def test_the_process_says_one_sentence_and_exits_with_two() -> None:
    """Seen from a shell: no traceback, whatever other apps' checks say."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "django", "outbox_purge", "--database", "nope"],
        cwd=Path(__file__).parent.parent,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "OUTBOX_TEST_SETTINGS": '{"LOOKUP_KEY": 3}',
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("CommandError: NOTIFICATION_OUTBOX['LOOKUP_KEY']: expected a secret")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outbox_purge", ["2 rows and bodies so far", "3 rows and bodies so far"]),
        ("outbox_rotate_keys", ["2 messages resealed so far", "3 messages resealed so far"]),
        ("outbox_expunge", ["2 bodies erased so far", "3 bodies erased so far"]),
    ],
)
def test_long_work_says_how_far_it_is(
    name: str, said: list[str], configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, so that stdout stays the result; every two seconds at most."""
    monkeypatch.setattr(operations, "CHUNK", 2)
    monkeypatch.setattr(operations, "RESEAL_CHUNK", 2)
    keys = {"old": b"o" * 32}
    configure(ENCRYPTION_KEYS=keys)

    def fill() -> None:
        with transaction.atomic():
            for _ in range(3):
                enqueue("t", {}, to=URL, account_id="7")
        OutboxMessage.objects.update(state="delivered", settled_at=Now())

    fill()
    configure(ENCRYPTION_KEYS={"new": b"n" * 32, **keys}, RETENTION={"expunge_delivered": 0})
    err = io.StringIO()
    monkeypatch.setattr(base, "SAY_EVERY", 0.0)
    call_command(name, *COMMANDS[name], stdout=io.StringIO(), stderr=err)
    assert err.getvalue().splitlines() == said
    monkeypatch.setattr(base, "SAY_EVERY", 60.0)
    fill()
    call_command(name, *COMMANDS[name], stdout=io.StringIO(), stderr=err)
    assert err.getvalue().splitlines() == said
