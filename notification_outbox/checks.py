"""System checks: what is wrong with the settings, found by ``manage.py check`` before a message is lost.

    E001  NOTIFICATION_OUTBOX cannot be read        W001  SQLite without IMMEDIATE transactions
    E002  a publisher cannot be made                W002  MySQL family connection without utf8mb4
    E003  DATABASES names an unknown alias          W003  (deploy) a key is derived from SECRET_KEY
    E004  a publisher could not be opened here      W004  (deploy) a publisher has a development setting
    E005  TO is refused by its own publisher        W005  a pool too small for a worker's connections
                                                    W006  a publisher's timeout beyond ATTEMPT_TIMEOUT
                                                    W007  CALLER_SCOPE_ID fails outside a request

They read settings and open no connection; what only the network or the tables know belongs to the doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import ConnectionHandler

from . import conf
from .drafts import Draft, identifier
from .exceptions import ConfigurationError, InvalidMessage
from .publishers import Publisher, build
from .reading import spoken

# what one worker keeps open: for claims, settlements and housekeeping, so that none waits for another; receivers of
# its signals have a fourth where they query
WORKER_CONNECTIONS = 3

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
    except (ConfigurationError, ImproperlyConfigured) as error:
        return [Error(str(error), id="notification_outbox.E001")]
    found: list[CheckMessage] = []
    for lane in settings.publishers.values():
        try:
            publisher = build(lane)
        except ConfigurationError as error:
            found.append(Error(str(error), id="notification_outbox.E002"))
        else:
            found += _publisher_problems(lane, publisher)
    if callable(settings.caller_scope_id):
        found += _scope_problems(settings.caller_scope_id)
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


def _publisher_problems(lane: conf.PublisherSettings, publisher: Publisher) -> list[CheckMessage]:
    path = f"PUBLISHERS['{lane.alias}']"
    found: list[CheckMessage] = [
        Error(
            f"{path}: {problem}",
            hint="A worker cannot start here. Where none runs, add this id to SILENCED_SYSTEM_CHECKS.",
            id="notification_outbox.E004",
        )
        for problem in _sentences(publisher.problems)
    ]
    if refusal := _refusal_of_to(lane, publisher):
        found.append(Error(f"{path}['TO']: {refusal}", id="notification_outbox.E005"))
    timeout = publisher.own_timeout
    if timeout is not None and timeout > lane.attempt_timeout:
        found.append(
            CheckWarning(
                f"{path}: its publisher waits up to {spoken(timeout)}, but ATTEMPT_TIMEOUT ends every attempt "
                f"after {spoken(lane.attempt_timeout)}.",
                hint="Raise ATTEMPT_TIMEOUT, and LEASE with it, or lower the publisher's own timeout.",
                id="notification_outbox.W006",
            )
        )
    return found


def _refusal_of_to(lane: conf.PublisherSettings, publisher: Publisher) -> str | None:
    if lane.to is None:
        return None
    try:
        publisher.validate(Draft("check", b"", to=lane.to))
    except InvalidMessage as error:
        return f"{error.hint} [{error.rule}]" if error.field == "to" else None
    except Exception:
        return None  # it wanted more of a draft than its destination
    return None


def _scope_problems(scope: Callable[[], object]) -> list[CheckMessage]:
    try:
        identifier("caller_scope_id", scope())
        return []
    except InvalidMessage as error:
        problem = f"returned what is no identifier ({error.hint})"
    except Exception as error:
        problem = f"raised {type(error).__name__}"
    return [
        CheckWarning(
            f"{conf.NAME}['CALLER_SCOPE_ID']: called here it {problem}; enqueue() outside a request fails likewise.",
            hint="Return a scope for commands and tasks too, or pass caller_scope_id= in each of their calls.",
            id="notification_outbox.W007",
        )
    ]


def _sentences(hook: Callable[[], Iterable[str]]) -> list[str]:
    """Return what a publisher says of itself; its class may be a stranger's."""
    try:
        return list(hook())
    except Exception as error:
        return [f"{hook.__qualname__}() raised {type(error).__name__}."]


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
        size = _pool_size(options.get("pool"))
        if size is not None and size < WORKER_CONNECTIONS:
            found.append(
                CheckWarning(
                    f"DATABASES['{alias}']: a worker keeps {WORKER_CONNECTIONS} connections and this pool has "
                    f"{size}: some of its work would wait for one in vain.",
                    hint=f'Set "max_size" of OPTIONS["pool"] to at least {WORKER_CONNECTIONS} where a worker runs, '
                    "and to one more where receivers of its signals query.",
                    id="notification_outbox.W005",
                )
            )
    return found


def _pool_size(pool: object) -> int | None:
    """Return how many connections Django's pool for PostgreSQL gives a process, None where there is no pool."""
    if not pool:
        return None
    options = pool if isinstance(pool, Mapping) else {}
    size = options.get("max_size") or options.get("min_size", 4)  # as psycopg_pool counts
    return size if isinstance(size, int) else None


@register(deploy=True)
def check_deployment(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Name what is fine on a laptop and not in production."""
    try:
        settings = conf.get()
        publishers = [(publisher.alias, build(publisher)) for publisher in settings.publishers.values()]
    except (ConfigurationError, ImproperlyConfigured):
        return []  # check_settings has said it
    found: list[CheckMessage] = [
        CheckWarning(DERIVED[key][0], hint=DERIVED[key][1], id="notification_outbox.W003")
        for key in sorted(settings.derived)
    ]
    found += [
        CheckWarning(f"PUBLISHERS['{alias}']: {warning}", id="notification_outbox.W004")
        for alias, publisher in publishers
        for warning in _sentences(publisher.check)
    ]
    return found
