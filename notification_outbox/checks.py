"""System checks: what is wrong with the settings, found by ``manage.py check`` before a message is lost.

    E001  NOTIFICATION_OUTBOX cannot be read        W001  SQLite without IMMEDIATE transactions
    E002  a publisher cannot be made                W002  MySQL family connection without utf8mb4
    E003  DATABASES names an unknown alias          W003  (deploy) a key is derived from SECRET_KEY
                                                    W004  (deploy) a publisher has a development setting

They read settings and open no connection; what only the network or the tables know belongs to the doctor.
"""

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

DERIVED = {
    "ENCRYPTION_KEYS": (
        "Messages are sealed under keys derived from SECRET_KEY: once it is rotated out of "
        "SECRET_KEY_FALLBACKS, what was sealed under it can no longer be opened.",
        'Set ENCRYPTION_KEYS = {"2026": "<32 random bytes in base64>"}.',
    ),
    "LOOKUP_KEY": (
        "Idempotency keys are looked up under a secret derived from SECRET_KEY: after its rotation the same key "
        "would be accepted a second time.",
        "Set LOOKUP_KEY to a secret of its own that never rotates.",
    ),
    "PUBLISHERS": (
        "The default publisher signs with a key derived from SECRET_KEY: receivers must learn a new public key "
        "whenever it is rotated.",
        "Set PUBLISHERS with a signer that has a key of its own.",
    ),
}


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
    known = ", ".join(sorted(connections))
    found += [
        Error(
            f"{conf.NAME}['DATABASES']: there is no database {alias!r}; the project has {known}.",
            id="notification_outbox.E003",
        )
        for alias in settings.databases
        if alias not in connections
    ]
    return found


@register
def check_databases(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Look at how the project connects to its databases."""
    return database_warnings(connections)


def database_warnings(handler: ConnectionHandler) -> list[CheckMessage]:
    """Return what is wrong with the options of the databases of ``handler``."""
    found: list[CheckMessage] = []
    for alias, settings in handler.settings.items():
        engine, options = settings["ENGINE"].rpartition(".")[2], settings.get("OPTIONS", {})
        if engine == "sqlite3" and str(options.get("transaction_mode")).upper() != "IMMEDIATE":
            found.append(
                CheckWarning(
                    f"DATABASES['{alias}']: SQLite refuses a transaction that reads and then writes while another "
                    "one writes; enqueue() and workers would meet 'database is locked'.",
                    hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"} for this database.',
                    id="notification_outbox.W001",
                )
            )
        if engine == "mysql" and options.get("charset", "utf8mb4") != "utf8mb4":
            found.append(
                CheckWarning(
                    f"DATABASES['{alias}']: this character set cannot hold every identifier; what it cannot hold "
                    "is refused or changed, and a changed row is never sent.",
                    hint='Set OPTIONS = {"charset": "utf8mb4"} for this database, and for its tables.',
                    id="notification_outbox.W002",
                )
            )
    return found


@register(deploy=True)
def check_deployment(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Name what is fine on a laptop and not in production."""
    try:
        settings = conf.get()
        publishers = [(publisher.alias, build(publisher)) for publisher in settings.publishers.values()]
    except ConfigurationError:
        return []  # check_settings has said it
    found: list[CheckMessage] = [
        CheckWarning(DERIVED[key][0], hint=DERIVED[key][1], id="notification_outbox.W003")
        for key in sorted(settings.derived)
    ]
    found += [
        CheckWarning(f"PUBLISHERS['{alias}']: {warning}", id="notification_outbox.W004")
        for alias, publisher in publishers
        for warning in publisher.check()
    ]
    return found
