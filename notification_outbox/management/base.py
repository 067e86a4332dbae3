"""What the outbox's commands have in common: one database, read settings, and errors that say what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router

from .. import conf
from ..exceptions import ConfigurationError
from ..models import OutboxMessage

COULD_NOT_RUN = 2
SAY_EVERY = 2.0


class ToldCommand(BaseCommand):
    """A command that tells in ``--help`` what its exit codes mean: ``exits``, and why it ``could_not_run``."""

    exits: ClassVar[dict[int, str]]
    could_not_run: ClassVar[str] = "wrong options or settings"
    # what the command needs is read by itself; nothing that is wrong elsewhere in the project may stop it
    requires_system_checks = ()

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        exits = {**self.exits, COULD_NOT_RUN: f"could not run: {self.could_not_run}"}
        codes = "; ".join(f"{code} {meaning}" for code, meaning in exits.items())
        return super().create_parser(prog_name, subcommand, epilog=f"Exit codes: {codes}.", **kwargs)


class OutboxCommand(ToldCommand):
    """A command about the outbox of one database; ``run`` does the work and returns the exit code.

    Wrong options, settings, tables or a database that fails end with ``COULD_NOT_RUN`` and one sentence.
    """

    could_not_run = "wrong options or settings, or a failing database"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="default: the router's choice")

    def handle(self, *args: Any, **options: Any) -> None:
        using = options["database"] or router.db_for_write(OutboxMessage)
        try:
            settings = conf.get()
            require_alias(using)
            require_tables(using)
            code = self.run(settings, using, options)
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=COULD_NOT_RUN) from None
        except Error as error:
            raise CommandError(
                f"database {using!r} failed ({type(error).__name__}): see that it answers and is migrated, then run "
                "this again; what was done so far stays done. --traceback shows the database's own words",
                returncode=COULD_NOT_RUN,
            ) from error
        if code:
            raise SystemExit(code)

    def run(self, settings: conf.Settings, using: str, options: dict[str, Any]) -> int:
        raise NotImplementedError

    def progress(self, what: str) -> Callable[[int], None]:
        """Return a function that takes a count and says it on stderr every ``SAY_EVERY`` seconds at most."""
        said = time.monotonic()

        def say(count: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                self.stderr.write(f"{count} {what} so far")

        return say


def require_alias(alias: str) -> None:
    """Raise ``ConfigurationError`` unless the project has such a database."""
    if alias not in connections:
        known = ", ".join(sorted(connections))
        raise ConfigurationError(f"there is no database {alias!r}; DATABASES has {known}")


def require_tables(alias: str) -> None:
    """Raise ``ConfigurationError`` unless the database has our tables, ``django.db.Error`` when it is away."""
    if OutboxMessage._meta.db_table not in connections[alias].introspection.table_names():
        raise ConfigurationError(
            f"database {alias!r} has no outbox tables: run 'manage.py migrate --database {alias}' first"
        )
