"""System checks: what is wrong with the settings, found by ``manage.py check`` before a message is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning
from django.db import connections
from django.db.utils import ConnectionHandler

from . import conf
from .exceptions import ConfigurationError
from .publishers import build


@register
def check_settings(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Read the settings and make every publisher once."""
    try:
        settings = conf.get()
    except ConfigurationError as error:
        return [Error(str(error), id="notification_outbox.E001")]
    found: list[CheckMessage] = []
    for publisher in settings.publishers.values():
        try:
            build(publisher)
        except ConfigurationError as error:
            found.append(Error(str(error), id="notification_outbox.E002"))
    return found


@register
def check_sqlite(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Look at the project's databases."""
    return check_databases(connections)


def check_databases(handler: ConnectionHandler) -> list[CheckMessage]:
    """Return a warning for every SQLite database whose transactions do not begin by locking."""
    return [
        CheckWarning(
            f"DATABASES['{alias}']: SQLite refuses a transaction that reads and then writes while another "
            "one writes; enqueue() and workers would meet 'database is locked'.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} for this database.',
            id="notification_outbox.W001",
        )
        for alias, settings in handler.settings.items()
        if settings["ENGINE"] == "django.db.backends.sqlite3"
        and settings.get("OPTIONS", {}).get("transaction_mode", "").upper() != "IMMEDIATE"
    ]
